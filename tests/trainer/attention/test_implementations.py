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
SEEN: dict[str, Callable[[int], Visible]] = {
    "all": lambda length: Visible(),
    "mask": lambda length: Visible(
        mask_BL=jnp.asarray(np.arange(length)[None] >= [[0], [3]], jnp.int32)
    ),
    "segments": lambda length: Visible(
        segments_BL=jnp.asarray(np.arange(length)[None] // [[5], [7]], jnp.int32)
    ),
    "lengths": lambda length: Visible(lengths_B=jnp.asarray([length, length - 4], jnp.int32)),
    "segments and lengths": lambda length: Visible(
        None,
        jnp.asarray(np.arange(length)[None] // [[5], [7]], jnp.int32),
        jnp.asarray([length - 3, length], jnp.int32),
    ),
}


def operands(length: int, batch: int = 2) -> tuple[Array, Array, Array]:
    """Queries, keys and values."""
    draw = np.random.default_rng(0)
    shapes = [(batch, length, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    query, key, value = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes)
    return query, key, value


def is_real(seen: Visible, length: int) -> Array:
    """Queries whose answer matters, [B, L, 1, 1]: they see a key, and are no filling."""
    is_real_BL = jnp.ones((2, length), bool)
    if seen.lengths_B is not None:
        is_real_BL &= jnp.arange(length)[None, :] < seen.lengths_B[:, None]
    if seen.mask_BL is not None:
        is_real_BL &= seen.mask_BL != 0
    return is_real_BL[:, :, None, None].astype(jnp.float32)


def answers(attend: implementations.Attention, keys: Keys, length: int) -> tuple[Array, ...]:
    """The outputs that matter, and the gradients of a sum that reads them alone."""
    real = is_real(implementations.as_visible(keys), length)

    def loss(*given: Array) -> tuple[Array, Array]:
        mixed = attend(*given, keys) * real  # type: ignore[call-arg]
        return jnp.sin(mixed).sum(), mixed

    grads, mixed = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*operands(length))
    return mixed, *grads


def same(found: tuple[Array, ...], wanted: tuple[Array, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SpecError, match="use one of auto, xla, cudnn, splash"):
        causal_attention("flash")


def windowed(name: str) -> implementations.Attention:
    return causal_attention(name, window=6, scale=0.3)


def capped(name: str) -> implementations.Attention:
    return causal_attention(name, window=150, scale=0.3, cap=2.0)


# --- xla ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [causal_attention, full_attention])
def test_segments_are_rows_of_their_own(
    kind: Callable[[str], implementations.Attention], standard: None
) -> None:
    attend, cut, length = kind("xla"), 5, 12

    def packed(*given: Array) -> Array:
        segments = jnp.asarray([[1] * cut + [0] * (length - cut)] * 2)
        return attend(*given, Visible(segments_BL=segments))  # type: ignore[call-arg]

    def alone(*given: Array) -> Array:
        slices = slice(0, cut), slice(cut, None)
        parts = [attend(*(x[:, part] for x in given), None) for part in slices]  # type: ignore[call-arg]
        return jnp.concatenate(parts, axis=1)

    _same_with_gradients(packed, alone, operands(length))


@pytest.mark.parametrize("kind", [causal_attention, full_attention])
def test_what_is_behind_the_length_is_not_there(
    kind: Callable[[str], implementations.Attention], standard: None
) -> None:
    attend, length = kind("xla"), 9

    def filled(*given: Array) -> Array:
        return attend(*given, Visible(lengths_B=jnp.full(2, length)))[:, :length]  # type: ignore[call-arg]

    def short(*given: Array) -> Array:
        return attend(*(x[:, :length] for x in given), None)  # type: ignore[call-arg]

    _same_with_gradients(filled, short, operands(12))


def _same_with_gradients(one: Any, other: Any, given: tuple[Array, ...]) -> None:
    def both(attend: Any) -> tuple[Array, ...]:
        def loss(*given: Array) -> tuple[Array, Array]:
            mixed = attend(*given)
            return jnp.sin(mixed).sum(), mixed

        grads, mixed = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*given)
        return mixed, *grads

    same(both(one), both(other))


# --- cudnn ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize(
    ("kind", "length"),
    [(causal_attention, 16), (full_attention, 17), (causal_attention, 17), (windowed, 17)],
)
def test_what_cudnn_is_asked_for_is_what_xla_computes(
    kind: Callable[[str], implementations.Attention],
    name: str,
    length: int,
    standard: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, asked = jax.nn.dot_product_attention, []

    def computed(*args: Any, implementation: str, **keys: Any) -> Array:
        asked.append((implementation, args[0].shape[1] % 2))
        return real(*args, implementation="xla", **keys)

    seen = SEEN[name](length)
    wanted = answers(kind("xla"), seen, length)
    monkeypatch.setattr(jax.nn, "dot_product_attention", computed)
    same(answers(kind("cudnn"), seen, length), wanted)
    assert set(asked) == {("cudnn", 0)}  # JAX refuses odd lengths


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
def test_cudnn_trains_by_its_own_kernels_and_makes_pairs_of_a_mask_alone(
    kind: Callable[[str], implementations.Attention],
    name: str,
    mask_type: str,
    has_bias: bool,
    length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = _lowered(kind, SEEN[name](length), length, monkeypatch)
    assert found == {
        f"__cudnn$fmha{'ScaleBias' if has_bias else ''}Softmax{pass_}": mask_type
        for pass_ in ("", "Backward")
    }


def test_cudnn_reads_a_whole_row_of_a_vit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(_lowered(full_attention, None, 196, monkeypatch).values()) == {"NO_MASK"}
    assert set(_lowered(full_attention, None, 197, monkeypatch).values()) == {"PADDING"}


@pytest.mark.parametrize(
    ("said", "has_pairs"), [({"length": 40}, False), ({"attention_mask": np.ones(49)}, True)]
)
def test_a_row_that_is_filled_up_trains_without_an_array_of_all_pairs(
    said: dict[str, Any], has_pairs: bool, standard: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    task = NextToken()
    model = {"kind": "decoder", "layers": 1, "width": 64, "heads": 4, "vocab": 32, "length": 48}
    train = spec.TrainSpec(task="lm", model=model, attention="cudnn")
    graph, params = nnx.split(task.model(train, nnx.Rngs(0)))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    row = task.example({"tokens": np.arange(49) % 32, **said})
    batch = {name: jnp.asarray(value)[None] for name, value in row.items()} | {
        "weight": jnp.ones(1)
    }

    def loss(params: Any) -> Array:
        return task.loss(nnx.merge(graph, params), batch, jax.random.key(0)).sum

    text = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("cuda",)).as_text()
    assert "fmha" in text
    assert ("x48x48x" in text) is has_pairs


def _lowered(
    kind: Callable[[str], implementations.Attention],
    keys: Keys,
    length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, str]:
    """cuDNN's kernels in a training step that is lowered for CUDA, each with its kind of mask."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    shapes = [
        jax.ShapeDtypeStruct((2, length, heads, SIZE), jnp.bfloat16)
        for heads in (HEADS, GROUPS, GROUPS)
    ]

    def loss(*given: Array) -> Array:
        return kind("cudnn")(*given, keys).astype(jnp.float32).sum()  # type: ignore[call-arg]

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(
        r'custom_call @(__cudnn\$fmha\w+)\(.*?backend_config = "((?:[^"\\]|\\.)*)"', text
    )
    configs = {name: json.loads(config.replace("\\22", '"')) for name, config in calls}
    return {
        name: config["cudnn_fmha_backend_config"]["mask_type"] for name, config in configs.items()
    }


# --- splash ---------------------------------------------------------------------------------------


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, standard: None) -> None:
    """Splash without a TPU, in the smallest blocks."""
    monkeypatch.setattr(splash, "BLOCKS", (splash.LANES,))
    monkeypatch.setattr(
        splash, "splash_attention", partial(splash.splash_attention, interpret=True)
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (causal_attention, "all"),
        (causal_attention, "segments and lengths"),
        (full_attention, "mask"),
        (capped, "segments"),
    ],
)
def test_splash_equals_xla(
    kind: Callable[[str], implementations.Attention], name: str, interpreted: None
) -> None:
    length = 2 * splash.LANES
    seen = SEEN[name](length)
    same(answers(kind("splash"), seen, length), answers(kind("xla"), seen, length))


def test_splash_equals_xla_on_a_mesh(interpreted: None) -> None:
    seen = SEEN["segments"](splash.LANES)
    wanted = answers(causal_attention("xla"), seen, splash.LANES)
    with jax.set_mesh(mesh.build_mesh(spec.Mesh(dp=2, fsdp=1, mp=2), jax.devices()[:4])):
        found = answers(causal_attention("splash"), seen, splash.LANES)
    same(found, wanted)


def test_splash_by_name_is_not_computed_again() -> None:
    """Lowered for a TPU that is not here: one kernel forward and two backward, where remat keeps what it makes."""
    attend, kernels = causal_attention("splash"), []
    for names in ((), (implementations.ATTENTION_OUTPUT,)):
        kept = jax.checkpoint_policies.save_only_these_names(*names)
        apply = jax.checkpoint(
            lambda query, key, value: attend(query, key, value, None).sum(), policy=kept
        )
        step = jax.jit(jax.value_and_grad(apply, (0, 1, 2)))
        lowered = step.trace(*operands(splash.LANES)).lower(lowering_platforms=("tpu",)).as_text()
        kernels.append(lowered.count("tpu_custom_call"))
    assert kernels == [4, 3]


def test_splash_refuses_what_is_not_made_of_blocks() -> None:
    with pytest.raises(
        ValueError, match="its blocks are of 128 positions, which do not divide 197"
    ):
        full_attention("splash")(*operands(197), None)


def test_the_stand_in_of_a_kernel_can_be_mapped_over_and_differentiated() -> None:
    query, key, value = (
        jax.random.normal(jax.random.key(number), (3, 2, 5, 4, 8)) for number in range(3)
    )

    def plain(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        keys: None,
        scores: implementations.Scores,
    ) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, is_causal=scores.is_causal)

    def summed(
        attend: Callable[..., jax.Array], query: jax.Array, key: jax.Array, value: jax.Array
    ) -> jax.Array:
        return jnp.square(attend(query, key, value, None, implementations.Scores(True))).sum()

    for axes in ((0, 0, 0), (None, 1, 0)):
        given = query if axes[0] == 0 else query[0], jnp.moveaxis(key, 0, axes[1]), value
        found, wanted = (
            jax.jit(jax.vmap(jax.grad(partial(summed, attend), argnums=(0, 1, 2)), axes))(*given)  # noqa: B023
            for attend in (implementations.fuse_attention(plain), plain)
        )
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5),
            found,
            wanted,
        )
