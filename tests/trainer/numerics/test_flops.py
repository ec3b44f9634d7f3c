"""Counts against multiplications done by hand."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.classifiers import ViT
from jaxlaunch.trainer.models.decoder import Decoder
from jaxlaunch.trainer.models.gpt2 import GPT2
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.numerics import flops, grouped
from jaxlaunch.trainer.step.state import ModelArrays

X, W = jnp.ones((4, 8)), jnp.ones((8, 8))
MATMUL = 2 * 4 * 8 * 8  # of X @ W


@jax.custom_vjp
def _own_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


_own_gradient.defvjp(
    lambda x, w: (x @ w @ w, (x, w)), lambda saved, out: (out @ saved[1].T, saved[0].T @ out)
)


def _scan(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (carry @ w, None), x, None, length=5)[0]


def _cond(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w)


def _shard_mapped(x: jax.Array, w: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("a")
    specs = {"in_specs": (spec, jax.sharding.PartitionSpec()), "out_specs": spec}
    body = jax.shard_map(lambda x, w: x @ w, mesh=mesh, axis_names={"a"}, **specs)
    return jax.jit(body)(x, w)


def _grouped(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply three rows with one matrix and one with another, in a loop of unknown length."""
    return grouped.grouped_product(x, jnp.stack([w, 2 * w]), jnp.array([3, 1]), rows=len(x))


CASES: dict[str, tuple[Callable[..., Any], float]] = {
    "nothing": (lambda x, w: x + 1, 0),
    "matmul": (lambda x, w: x @ w, MATMUL),
    "batched": (
        lambda x, w: jnp.einsum("bij,bjk->bik", jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))),
        2 * 3 * 4 * 5 * 6,
    ),
    "outer": (lambda x, w: jnp.einsum("i,j->ij", jnp.ones(3), jnp.ones(7)), 2 * 3 * 7),
    "scan": (_scan, 5 * MATMUL),
    "jit": (lambda x, w: jax.jit(jnp.matmul)(x, w), MATMUL),
    "remat": (lambda x, w: jax.checkpoint(jnp.matmul)(x, w), MATMUL),
    "custom_vjp": (_own_gradient, MATMUL),
    "custom_jvp": (lambda x, w: jax.nn.relu(x @ w), MATMUL),
    "cond": (_cond, 2 * MATMUL),
    "shard_map": (_shard_mapped, MATMUL),
    "grouped": (_grouped, MATMUL),
    "grouped, with room for more": (jax.named_scope(flops.share_scope(2, 4))(_grouped), MATMUL / 2),
    "a scope of the user's": (jax.named_scope("causal_conv")(lambda x, w: x @ w), MATMUL),
    "elementwise while": (lambda x, w: jax.lax.while_loop(lambda s: s < 3, lambda s: s + 1, 0), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_count_equals_a_manual_count(case: str) -> None:
    function, expected = CASES[case]
    assert flops.count_flops(jax.make_jaxpr(function)(X, W).jaxpr) == expected


# (trained kernel, input, frozen kernel) -> the multiplications of a step.
FROZEN: dict[str, tuple[Callable[..., Any], float]] = {
    "frozen before": (lambda w, x, f: x @ f @ w, 2 + 1),
    "frozen behind": (lambda w, x, f: x @ w @ f, 2 + 1 + 1),
    "frozen on both sides": (lambda w, x, f: x @ f @ w @ f, 3 + 1 + 1),
    "an operand twice": (lambda w, x, f: x @ w @ w, 2 + 1 + 2),
    "scan": (lambda w, x, f: _scan(x @ w, f), 6 + 1 + 5),
    # The first round computes what a later one needs.
    "scan that trains": (lambda w, x, f: _scan(x, w), 5 + 10),
    "cond": (lambda w, x, f: _cond(x, w), 2 + 3),
    "remat": (lambda w, x, f: jax.checkpoint(lambda x: x @ w @ f)(x), 4),
    "custom_vjp": (lambda w, x, f: _own_gradient(x, f) @ w + _own_gradient(x, w), 3 + 1 + 1),
    "shard_map": (lambda w, x, f: _shard_mapped(x, w), 2),
    "grouped": (lambda w, x, f: _grouped(x @ w, f) + _grouped(x, w), 3 + 2 + 1),
    "whole numbers": (lambda w, x, f: x @ jnp.round(w).astype(jnp.int32).astype(jnp.float32), 1),
}


@pytest.mark.parametrize("case", FROZEN)
def test_step_with_frozen_parameters_counts_needed_gradients(case: str) -> None:
    function, products = FROZEN[case]
    jaxpr = jax.make_jaxpr(function)(W, X, W).jaxpr
    assert flops.train_step_flops(jaxpr, trained=1) == products * MATMUL


@pytest.mark.parametrize(("groups", "per_output"), [(1, 4 * 9), (2, 2 * 9)])
def test_convolution_counts_its_kernel_for_every_output(groups: int, per_output: int) -> None:
    def convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", feature_group_count=groups
        )

    jaxpr = jax.make_jaxpr(convolve)(jnp.ones((2, 4, 8, 8)), jnp.ones((6, 4 // groups, 3, 3))).jaxpr
    assert flops.count_flops(jaxpr) == 2 * (2 * 6 * 8 * 8) * per_output


def test_matmul_in_a_loop_of_unknown_length_is_unknown() -> None:
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ W, x)

    jaxpr = jax.make_jaxpr(loop)(X).jaxpr
    assert math.isnan(flops.count_flops(jaxpr))
    assert flops.train_step_flops(jaxpr) is None


def test_training_step_is_three_times_the_forward_pass() -> None:
    shapes = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
    forward = jax.make_jaxpr(lambda x, w: (x @ w).sum())(shapes, shapes).jaxpr
    assert flops.train_step_flops(forward) == 3 * 2 * float(1 << 60)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_decoder_flops_equal_the_formula(remat: str) -> None:
    batch = 2
    config = spec.Decoder(layers=3, width=32, heads=4, kv_heads=2, hidden=64, vocab=50, length=16)

    def forward(tokens_BL: jax.Array) -> jax.Array:
        return Decoder(config, nnx.Rngs(0), ModelOptions("xla", remat))(tokens_BL)  # type: ignore[arg-type]

    tokens = jax.ShapeDtypeStruct((batch, config.length), jnp.int32)
    counted = flops.train_step_flops(jax.make_jaxpr(forward)(tokens).jaxpr)
    width, kv_width = config.width, config.width * 2 // 4
    layer = 2 * width * width + 2 * width * kv_width + 3 * width * 64
    weights = config.layers * layer + width * config.vocab
    # Scores and mix of a token, not halved for the mask.
    attention = config.layers * 2 * config.length * width
    assert counted == 6 * batch * config.length * (weights + attention)


def test_window_counts_only_its_keys() -> None:
    sizes = {"width": 32, "heads": 4, "hidden": 64, "vocab": 50, "length": 16}
    counted = {}
    turns = {"window": 4, "pattern": ["window", "full"]}
    for name, keys in {"full": {}, "window": {"window": 4}, "turns": turns}.items():
        config = spec.Decoder(layers=3, **sizes, **keys)  # type: ignore[arg-type]
        arrays = ModelArrays(nnx.eval_shape(lambda config=config: Decoder(config, nnx.Rngs(0))))
        tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32)
        traced = jax.make_jaxpr(
            lambda params, x, a=arrays: a.merge_model(params, {}, jax.random.key(0))(x)
        )
        jaxpr = traced(arrays.params, tokens).jaxpr
        counted[name] = [flops.count_flops(jaxpr, causal) for causal in (1.0, 0.5)]
    layer = 2 * 2 * 16 * 16 * 32  # scores and mix of all pairs
    pairs = {1.0: 4 / 16, 0.5: 4 / 16 * (1 - 0.5 * 4 / 16)}  # in a window, of all
    for index, (causal, share) in enumerate(pairs.items()):
        full = counted["full"][index]
        spared = full - counted["window"][index], full - counted["turns"][index]
        assert spared == (3 * layer * (causal - share), 2 * layer * (causal - share))


# Shape -> what a training step costs an image or a token, in GFLOP: with full attention, and with
# what a causal mask leaves of it. Six times the weights in products and 12 × layers × length ×
# width, by hand; the table of llm-foundry's benchmarks counts the last, MPT-1b's, so too.
WIDE = {"width": 2048, "heads": 16, "length": 2048}
SHAPES: dict[str, tuple[spec.Model, float, float]] = {
    "ViT-B/16": (spec.ViT(preset="vit-b16"), 105.4, 105.4),
    "16 layers": (spec.Decoder(**WIDE, layers=16, hidden=8192, vocab=32_000), 7.65, 7.25),
    "24 layers": (spec.Decoder(**WIDE, layers=24, hidden=5504, vocab=32_000), 8.90, 8.29),
    "MPT-1b": (spec.GPT2(**WIDE, layers=24, vocab=50_368), 9.08, 8.47),
}


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "written out"])
@pytest.mark.parametrize("name", SHAPES)
def test_published_models_have_their_flops(name: str, scan: bool) -> None:
    model, full, causal = SHAPES[name]
    config = model.model_copy(update={"scan": scan})
    kinds: dict[str, Any] = {"vit": ViT, "decoder": Decoder, "gpt2": GPT2}
    arrays = ModelArrays(nnx.eval_shape(lambda: kinds[model.kind](config, nnx.Rngs(0))))
    inputs = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    if model.kind == "vit":
        inputs = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)

    def forward(params: Any, x: jax.Array) -> jax.Array:
        return arrays.merge_model(params, {}, jax.random.key(0))(x)

    traced = jax.make_jaxpr(forward)(arrays.params, inputs).jaxpr
    pieces = 1e9 * (1 if model.kind == "vit" else 2048)
    assert flops.train_step_flops(traced) == pytest.approx(full * pieces, rel=0.01)
    assert flops.train_step_flops(traced, causal=0.5) == pytest.approx(causal * pieces, rel=0.01)


def test_peaks_of_known_devices_add_up() -> None:
    class Device:
        device_kind = "NVIDIA H200"

    assert flops.peak_flops(jax.devices()) is None and flops.peak_flops([]) is None
    assert flops.peak_flops([Device(), Device()]) == 2 * 989.4e12  # type: ignore[list-item]


def test_scan_arguments_are_split_in_jax_0_12() -> None:
    class Grouped:
        def unpack(self) -> tuple[tuple[None, ...], ...]:
            return (None, None), (None,), (None, None)

    assert flops.consts_and_carries({"ft_in": Grouped()}) == (2, 1)
    assert flops.consts_and_carries({"num_consts": 3, "num_carry": 4}) == (3, 4)
