"""The decoder against the papers, written a second time in NumPy float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Jaxpr, jaxprs_in_params

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.decoder import Decoder
from jaxlaunch.trainer.models.layers import ModelOptions, apply_rope
from jaxlaunch.trainer.step.state import ModelArrays
from tests.trainer.tiny import DECODER, WIDE, Counting, run

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 16))


def reference(config: spec.Decoder, params: dict, tokens_BL: np.ndarray) -> np.ndarray:
    """Logits_BLV, one head and one position at a time."""
    weights = {name: np.array(value, np.float64) for name, value in params.items()}
    x_BLD = weights["embedding"][tokens_BL]
    for number in range(config.layers):
        block = {
            name[7:]: value[number] for name, value in weights.items() if name.startswith("blocks.")
        }
        y_BLD = norm(x_BLD, block["attention_norm.scale"])
        repeats = config.heads // (config.kv_heads or config.heads)
        for head in range(config.heads):
            query = apply_reference_rope(y_BLD @ block["attention.query"][:, head])
            key = apply_reference_rope(y_BLD @ block["attention.key"][:, head // repeats])
            value = y_BLD @ block["attention.value"][:, head // repeats]
            for i in range(tokens_BL.shape[1]):
                score = np.einsum("bk,bsk->bs", query[:, i], key[:, : i + 1])
                score = np.exp(score / np.sqrt(query.shape[-1]))
                share = score / score.sum(-1, keepdims=True)
                mixed = np.einsum("bs,bsk->bk", share, value[:, : i + 1])
                x_BLD[:, i] += mixed @ block["attention.out"][head]
        y_BLD = norm(x_BLD, block["mlp_norm.scale"])
        gate = y_BLD @ block["mlp.gate"]
        x_BLD = x_BLD + (gate / (1 + np.exp(-gate)) * (y_BLD @ block["mlp.up"])) @ block["mlp.down"]
    head = weights["embedding"].T if config.tied else weights["head"]
    return norm(x_BLD, weights["norm.scale"]) @ head


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def apply_reference_rope(x_BLK: np.ndarray) -> np.ndarray:
    """Channel pairs (k, k + K/2) as complex numbers, turned by position × theta^(-2k/K)."""
    half = x_BLK.shape[-1] // 2
    angle = np.arange(x_BLK.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    turned = (x_BLK[..., :half] + 1j * x_BLK[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize(
    "config", [DECODER, DECODER.model_copy(update={"kv_heads": None, "tied": True})], ids=str
)
def test_logits_equal_a_numpy_reference(config: spec.Decoder) -> None:
    model = Decoder(config, nnx.Rngs(0))
    params, rest = ModelArrays(model).split_model(model)
    assert not rest and ("head" in params) is not config.tied
    np.testing.assert_allclose(model(TOKENS), reference(config, params, TOKENS), atol=1e-5)


def test_attention_is_causal() -> None:
    model = Decoder(DECODER, nnx.Rngs(0))
    changed = TOKENS.copy()
    changed[:, 9:] = 5
    initial, after = model(TOKENS), model(changed)
    np.testing.assert_array_equal(initial[:, :9], after[:, :9])
    assert not np.allclose(initial[:, 9:], after[:, 9:])


def test_window_hides_earlier_tokens() -> None:
    model = Decoder(DECODER.model_copy(update={"layers": 1, "window": 4}), nnx.Rngs(0))
    changed = TOKENS.copy()
    changed[:, 3] = (TOKENS[:, 3] + 1) % 32
    differs = np.abs(np.asarray(model(TOKENS) - model(changed))).max((0, 2)) > 1e-6
    assert np.flatnonzero(differs).tolist() == [3, 4, 5, 6]


def test_cap_bounds_the_logits() -> None:
    model = Decoder(DECODER.model_copy(update={"logit_cap": 0.5}), nnx.Rngs(0))
    plain = Decoder(DECODER, nnx.Rngs(0))(TOKENS)
    np.testing.assert_allclose(model(TOKENS), 0.5 * np.tanh(plain / 0.5), atol=1e-6)


def test_decoder_with_every_option_trains_equally_on_a_mesh(standard: None) -> None:
    expected, state = run(Counting(), 4, model=WIDE)
    axes = {"dp": 2, "fsdp": 2, "mp": 2}
    actual, on_mesh = run(Counting(), 4, model=WIDE, mesh=axes, remat="full")
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    split = {name: str(leaf.sharding.spec) for name, leaf in on_mesh.params.items()}
    for name in ("query_bias", "key_norm.scale"):
        assert "mp" in split[f"blocks.attention.{name}"]
    assert "mp" in split["blocks.mlp.gate_bias"] and state.params.keys() == split.keys()


def test_rotary_products_depend_on_distance_only() -> None:
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    turned_query, turned_key = (
        apply_rope(jnp.repeat(x, 6, axis=1), 10000.0)[0, :, 0] for x in (query, key)
    )
    product = turned_query @ turned_key.T
    np.testing.assert_allclose(product[3, 1], product[5, 3], rtol=1e-5)
    assert not np.isclose(product[3, 1], product[3, 2])


def test_initial_logits_have_unit_scale() -> None:
    model = Decoder(spec.Decoder(layers=4, width=128, vocab=256), nnx.Rngs(0))
    logits = model(np.random.default_rng(0).integers(0, 256, (2, 64)))
    assert 0.5 < float(logits.std()) < 2.0


@pytest.mark.parametrize(
    ("keys", "is_alone"),
    [
        ({}, True),
        ({"scan": False}, False),
        ({"window": 4}, True),
        ({"window": 4, "pattern": ["window", "full"]}, False),
    ],
    ids=str,
)
def test_cse_is_prevented_unless_a_loop_has_one_layer(keys: dict[str, Any], is_alone: bool) -> None:
    config = spec.Decoder(layers=3, width=16, heads=2, hidden=16, vocab=8, length=8, **keys)
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda x: Decoder(config, nnx.Rngs(0), ModelOptions("xla", "full"))(x))(
        tokens
    )
    assert barriers(jaxpr.jaxpr) == {not is_alone}


@pytest.mark.parametrize(
    "keys", [{"layers": 1}, {"experts": 2, "expert_hidden": 8, "dense_layers": [1]}], ids=str
)
def test_loop_of_one_layer_is_removed_by_the_compiler(keys: dict[str, Any]) -> None:
    sizes = {"layers": 3, "width": 16, "heads": 2, "hidden": 16, "vocab": 8, "length": 8}
    config = spec.Decoder(**{**sizes, **keys})
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda x: Decoder(config, nnx.Rngs(0), ModelOptions("xla", "full"))(x))(
        tokens
    )
    assert barriers(jaxpr.jaxpr) == {True}


def barriers(jaxpr: Jaxpr) -> set[bool]:
    """Return whether each recomputation with products may be merged with the first pass."""
    actual: set[bool] = set()
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        if "prevent_cse" in equation.params and any("dot_general" in str(item) for item in inner):
            actual.add(bool(equation.params["prevent_cse"]))
        else:
            actual = actual.union(*map(barriers, inner))
    return actual
