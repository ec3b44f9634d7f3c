"""Every implementation of attention says what xla says, whatever may be seen.

cuDNN's is lowered for a GPU that is not here, and its arguments are computed by xla; splash's
kernel is interpreted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.attention import implementations, splash
from jaxlaunch.trainer.attention.implementations import (
    Keys,
    Visible,
    causal_attention,
    full_attention,
)
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.tasks.lm import NextToken

HEADS, GROUPS, SIZE = 4, 2, 16
Kind = Callable[[str], implementations.Attention]


def integers(values: Any) -> Array:
    return jnp.asarray(values, jnp.int32)


def segments(length: int) -> Array:
    return integers(np.arange(length)[None] // [[5], [7]])


SEEN: dict[str, Callable[[int], Visible]] = {
    "all": lambda length: Visible(),
    "mask": lambda length: Visible(mask_BL=integers(np.arange(length)[None] >= [[0], [3]])),
    "segments": lambda length: Visible(segments_BL=segments(length)),
    "lengths": lambda length: Visible(lengths_B=integers([length, length - 4])),
    "both": lambda length: Visible(None, segments(length), integers([length - 3, length])),
}


def operands(length: int, batch: int = 2) -> tuple[Array, Array, Array]:
    """Queries, keys and values."""
    draw = np.random.default_rng(0)
    shapes = [(batch, length, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    query, key, value = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes)
    return query, key, value


def is_real(seen: Visible, length: int) -> Array:
    """Return which queries matter, [B, L, 1, 1]: they see a key, and are not padding."""
    is_real_BL = jnp.ones((2, length), bool)
    if seen.lengths_B is not None:
        is_real_BL &= jnp.arange(length)[None, :] < seen.lengths_B[:, None]
    if seen.mask_BL is not None:
        is_real_BL &= seen.mask_BL != 0
    return is_real_BL[:, :, None, None].astype(jnp.float32)


def outputs_and_gradients(
    attend: implementations.Attention, keys: Keys, length: int
) -> tuple[Array, ...]:
    """The outputs that matter, and the gradients of a sum that reads them alone."""
    real = is_real(implementations.as_visible(keys), length)

    def loss(*inputs: Array) -> tuple[Array, Array]:
        mixed = attend(*inputs, keys) * real  # type: ignore[call-arg]
        return jnp.sin(mixed).sum(), mixed

    grads, mixed = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*operands(length))
    return mixed, *grads


def assert_all_close(actual: tuple[Array, ...], expected: tuple[Array, ...]) -> None:
    for first, second in zip(actual, expected, strict=True):
        np.testing.assert_allclose(first, second, rtol=0, atol=2e-5)


def test_unknown_name_is_rejected() -> None:
    with pytest.raises(SpecError, match="use one of auto, xla, cudnn, splash"):
        causal_attention("flash")


def windowed_attention(name: str) -> implementations.Attention:
    return causal_attention(name, window=6, scale=0.3)


def capped_attention(name: str) -> implementations.Attention:
    return causal_attention(name, window=150, scale=0.3, cap=2.0)


# --- xla ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [causal_attention, full_attention])
def test_segments_are_independent(kind: Kind, standard: None) -> None:
    attend, cut, length = kind("xla"), 5, 12

    def packed(*inputs: Array) -> Array:
        segments = jnp.asarray([[1] * cut + [0] * (length - cut)] * 2)
        return attend(*inputs, Visible(segments_BL=segments))  # type: ignore[call-arg]

    def alone(*inputs: Array) -> Array:
        slices = slice(0, cut), slice(cut, None)
        parts = [attend(*(x[:, part] for x in inputs), None) for part in slices]  # type: ignore[call-arg]
        return jnp.concatenate(parts, axis=1)

    _assert_equal_with_gradients(packed, alone, operands(length))


@pytest.mark.parametrize("kind", [causal_attention, full_attention])
def test_keys_beyond_the_length_are_hidden(kind: Kind, standard: None) -> None:
    attend, length = kind("xla"), 9

    def filled(*inputs: Array) -> Array:
        return attend(*inputs, Visible(lengths_B=jnp.full(2, length)))[:, :length]  # type: ignore[call-arg]

    def short(*inputs: Array) -> Array:
        return attend(*(x[:, :length] for x in inputs), None)  # type: ignore[call-arg]

    _assert_equal_with_gradients(filled, short, operands(12))


def _assert_equal_with_gradients(first: Any, second: Any, inputs: tuple[Array, ...]) -> None:
    def both(attend: Any) -> tuple[Array, ...]:
        def loss(*arguments: Array) -> tuple[Array, Array]:
            mixed = attend(*arguments)
            return jnp.sin(mixed).sum(), mixed

        grads, mixed = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
        return mixed, *grads

    assert_all_close(both(first), both(second))


# --- cudnn ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize(
    ("kind", "length"),
    [
        (causal_attention, 16),
        (full_attention, 17),
        (causal_attention, 17),
        (windowed_attention, 17),
    ],
)
def test_cudnn_arguments_equal_the_xla_computation(
    kind: Kind, name: str, length: int, standard: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, requests = jax.nn.dot_product_attention, []

    def computed(*args: Any, implementation: str, **keys: Any) -> Array:
        requests.append((implementation, args[0].shape[1] % 2))
        return real(*args, implementation="xla", **keys)

    seen = SEEN[name](length)
    expected = outputs_and_gradients(kind("xla"), seen, length)
    monkeypatch.setattr(jax.nn, "dot_product_attention", computed)
    assert_all_close(outputs_and_gradients(kind("cudnn"), seen, length), expected)
    assert set(requests) == {("cudnn", 0)}  # JAX refuses odd lengths


@pytest.mark.parametrize("length", [128, 197])
@pytest.mark.parametrize(
    ("kind", "name", "mask_type", "has_bias"),
    [
        (causal_attention, "all", "CAUSAL", False),
        (causal_attention, "lengths", "PADDING_CAUSAL", False),
        (full_attention, "lengths", "PADDING", False),
        (causal_attention, "segments", "CAUSAL", True),
        (causal_attention, "mask", "CAUSAL", True),
    ],
)
def test_cudnn_uses_pairs_only_for_masks(
    kind: Kind, name: str, mask_type: str, has_bias: bool, length: int, monkeypatch: Any
) -> None:
    actual = _lowered(kind, SEEN[name](length), length, monkeypatch)
    kernel = f"__cudnn$fmha{'ScaleBias' if has_bias else ''}Softmax"
    assert actual == {kernel: mask_type, f"{kernel}Backward": mask_type}


def test_cudnn_mask_types_of_a_vit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(_lowered(full_attention, None, 196, monkeypatch).values()) == {"NO_MASK"}
    assert set(_lowered(full_attention, None, 197, monkeypatch).values()) == {"PADDING"}


@pytest.mark.parametrize(
    ("output", "has_pairs"), [({"length": 40}, False), ({"attention_mask": np.ones(49)}, True)]
)
def test_padded_rows_need_no_array_of_all_pairs(
    output: dict[str, Any], has_pairs: bool, standard: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    task = NextToken()
    model = {"kind": "decoder", "layers": 1, "width": 64, "heads": 4, "vocab": 32, "length": 48}
    train = spec.TrainSpec(task="lm", model=model, attention="cudnn")
    graph, params = nnx.split(task.model(train, nnx.Rngs(0)))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    row = task.example({"tokens": np.arange(49) % 32, **output})
    batch = {name: jnp.asarray(value)[None] for name, value in row.items()}
    batch["weight"] = jnp.ones(1)

    def loss(params: Any) -> Array:
        return task.loss(nnx.merge(graph, params), batch, jax.random.key(0)).sum

    text = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("cuda",)).as_text()
    assert "fmha" in text
    assert ("x48x48x" in text) is has_pairs


def _lowered(kind: Kind, keys: Keys, length: int, monkeypatch: Any) -> dict[str, str]:
    """Return the mask type of each kernel of cuDNN in a training step that is lowered for CUDA."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    query, key = (
        jax.ShapeDtypeStruct((2, length, heads, SIZE), jnp.bfloat16) for heads in (HEADS, GROUPS)
    )

    def loss(*inputs: Array) -> Array:
        return kind("cudnn")(*inputs, keys).astype(jnp.float32).sum()  # type: ignore[call-arg]

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(query, key, key)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    pattern = r'custom_call @(__cudnn\$fmha\w+)\(.*?backend_config = "((?:[^"\\]|\\.)*)"'
    mask_types = {}
    for name, config in re.findall(pattern, text):
        keys = json.loads(config.replace("\\22", '"'))["cudnn_fmha_backend_config"]
        mask_types[name] = keys["mask_type"]
    return mask_types


# --- splash ---------------------------------------------------------------------------------------


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, standard: None) -> None:
    """Splash without a TPU, in the smallest blocks."""
    monkeypatch.setattr(splash, "BLOCKS", (splash.LANES,))
    interpreted = partial(splash.splash_attention, interpret=True)
    monkeypatch.setattr(splash, "splash_attention", interpreted)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (causal_attention, "all"),
        (causal_attention, "both"),
        (full_attention, "mask"),
        (capped_attention, "segments"),
    ],
)
def test_splash_equals_xla(kind: Kind, name: str, interpreted: None) -> None:
    length = 2 * splash.LANES
    seen = SEEN[name](length)
    splash_outputs = outputs_and_gradients(kind("splash"), seen, length)
    assert_all_close(splash_outputs, outputs_and_gradients(kind("xla"), seen, length))


def test_splash_equals_xla_on_a_mesh(interpreted: None) -> None:
    seen = SEEN["segments"](splash.LANES)
    expected = outputs_and_gradients(causal_attention("xla"), seen, splash.LANES)
    with jax.set_mesh(mesh.build_mesh(spec.Mesh(dp=2, fsdp=1, mp=2), jax.devices()[:4])):
        actual = outputs_and_gradients(causal_attention("splash"), seen, splash.LANES)
    assert_all_close(actual, expected)


def test_remat_can_keep_the_output_of_splash() -> None:
    """A lowered step has one forward kernel, and two backward, if remat keeps the output."""
    attend, kernels = causal_attention("splash"), []
    for names in ((), (implementations.ATTENTION_OUTPUT,)):
        saved = jax.checkpoint_policies.save_only_these_names(*names)
        apply = jax.checkpoint(lambda q, k, v: attend(q, k, v, None).sum(), policy=saved)
        step = jax.jit(jax.value_and_grad(apply, (0, 1, 2)))
        lowered = step.trace(*operands(splash.LANES)).lower(lowering_platforms=("tpu",)).as_text()
        kernels.append(lowered.count("tpu_custom_call"))
    assert kernels == [4, 3]


def test_splash_rejects_indivisible_lengths() -> None:
    with pytest.raises(
        ValueError, match="its blocks are of 128 positions, which do not divide 197"
    ):
        full_attention("splash")(*operands(197), None)


def test_fused_stand_in_supports_vmap_and_grad() -> None:
    query, key, value = jax.random.normal(jax.random.key(0), (3, 3, 2, 5, 4, 8))

    def plain(query: Any, key: Any, value: Any, keys: None, scores: Any) -> Array:
        return jax.nn.dot_product_attention(query, key, value, is_causal=scores.is_causal)

    def summed(attend: Callable[..., Array], *inputs: Array) -> Array:
        return jnp.square(attend(*inputs, None, implementations.Scores(True))).sum()

    for axes in ((0, 0, 0), (None, 1, 0)):
        inputs = query if axes[0] == 0 else query[0], jnp.moveaxis(key, 0, axes[1]), value
        gradients = []
        for attend in (implementations.fuse_attention(plain), plain):
            gradient = jax.vmap(jax.grad(partial(summed, attend), argnums=(0, 1, 2)), axes)
            gradients.append(jax.jit(gradient)(*inputs))
        for actual, expected in zip(*gradients, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
