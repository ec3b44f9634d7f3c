"""Experts: where tokens go, what that costs, and that no mesh changes it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from flax import nnx

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.metrics.means import EvaluationMeans
from jaxlaunch.trainer.models import experts as module
from jaxlaunch.trainer.models.decoder import Decoder
from jaxlaunch.trainer.models.experts import MAX_LISTED_EXPERTS, Experts, Routing
from jaxlaunch.trainer.numerics import flops, grouped
from jaxlaunch.trainer.task import Loss
from tests.trainer.tiny import DECODER, EXPERTS, ROWS, Counting, build, compiled_step, run

MESHES: list[dict[str, int]] = [{"fsdp": 2, "ep": 4}, {"fsdp": 2, "ep": 2, "mp": 2}]
TIGHT = EXPERTS.model_copy(update={"capacity": 0.75})


@pytest.fixture(scope="module")
def on_one_device() -> np.ndarray:
    return run(Counting(), model=EXPERTS)[0]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_training_is_equal_on_every_mesh(axes: dict[str, int], on_one_device: np.ndarray) -> None:
    losses, state = run(Counting(), model=EXPERTS, mesh=axes)
    np.testing.assert_allclose(losses, on_one_device, rtol=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    gate = state.params["blocks.mlp.gate"]
    shard = gate.addressable_shards[0].data
    assert shard.size * math.prod(axes.values()) == gate.size * axes.get("dp", 1)


@pytest.fixture
def use_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled for GPUs, of sizes for which a loop over blocks is worth it."""
    monkeypatch.setattr(module, "platform", lambda: "gpu")
    monkeypatch.setattr(grouped, "is_loop_faster", lambda *sizes: True)
    monkeypatch.setattr(grouped, "_block_rows", lambda share, room, products: min(8, room))


def test_training_with_loops_equals_training_with_one_product(
    on_one_device: np.ndarray, use_loops: None
) -> None:
    axes = {"fsdp": 2, "ep": 2, "mp": 2}
    losses, _ = run(Counting(), model=EXPERTS, mesh=axes, remat=["gate", "up"])
    np.testing.assert_allclose(losses, on_one_device, rtol=1e-5)


def test_loops_give_each_token_the_shares_of_its_experts(use_loops: None) -> None:
    experts, x_BLD = layer()
    made_BLD, _ = experts(x_BLD, jnp.ones((2, 16), jnp.float32))
    np.testing.assert_allclose(made_BLD, reference_output(experts, x_BLD), atol=2e-6)


@pytest.mark.parametrize(("platform", "is_loop"), [("gpu", True), ("cpu", False), ("tpu", False)])
def test_loops_are_used_on_gpus_only(
    platform: str, is_loop: bool, use_loops: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "platform", lambda: platform)
    experts, x_BLD = layer()
    program = str(jax.make_jaxpr(lambda x_BLD: experts(x_BLD, jnp.ones((2, 16)))[0])(x_BLD))
    assert (flops.GROUPED_PRODUCT in program, "ragged_dot" in program) == (is_loop, not is_loop)


def test_loops_have_the_same_flops(use_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"model": EXPERTS, "mesh": {"fsdp": 2, "ep": 2, "mp": 2}}
    in_loops_too = build(Counting(), **experts).count_flops(Counting().batch(0))
    monkeypatch.undo()
    assert in_loops_too == build(Counting(), **experts).count_flops(Counting().batch(0))


class Padded(Counting):
    """Rows of which some begin with padding."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step)
        seen = np.ones((ROWS, 17), np.int32)
        seen[1::4, :6] = 0
        return batch | {"attention_mask": seen, "mask": batch["mask"] * seen[:, :-1]}


def test_capacity_and_balance_do_not_depend_on_the_mesh() -> None:
    keys = {"model": TIGHT, "accumulate": 2}
    losses, _ = run(Padded(), 5, **keys)
    on_mesh, _ = run(Padded(), 5, mesh={"dp": 2, "ep": 2, "mp": 2}, remat="full", **keys)
    np.testing.assert_allclose(on_mesh, losses, rtol=1e-5)


class Uneven(Padded):
    """Rows of other tokens in each half, of which the first have no targets."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step)
        batch["tokens"] = np.random.default_rng(step).integers(0, 32, (ROWS, 17)).astype(np.int32)
        batch["tokens"][: ROWS // 2] %= 4
        batch["mask"][:4] = 0
        return batch


def train_one_step(
    **keys: Any,
) -> tuple[dict[str, float], dict[str, np.ndarray], dict[str, float]]:
    """Return the metrics and the gradients of the first step, and the means of an evaluation."""
    model = EXPERTS.model_copy(update={"balance": 0.5, "router_z": 0.1})
    task, plain = Uneven(), {"name": "sgd", "lr": 1.0, "clip": None}
    step = compiled_step(task, model=model, optimizer=plain, **keys)
    state, means = step.init_state(), EvaluationMeans(task.derived)
    batch = task.batch(0)
    step.compile_eval(step.put_batch(batch))
    for part in np.split(np.eye(ROWS, dtype=np.float32), keys.get("accumulate", 1)):
        rows = step.put_batch(batch | {"weight": part.sum(0)})
        means.add(None, jax.device_get(step.evaluate(state, rows)[0]))
    before = {name: np.asarray(array) for name, array in state.params.items()}
    state, metrics = step.train(state, step.put_batch(batch))
    grads = {name: before[name] - np.asarray(array) for name, array in state.params.items()}
    return {name: float(value) for name, value in metrics.items()}, grads, means.compute_means()


def test_micro_batches_change_neither_loss_nor_gradients_nor_metrics() -> None:
    metrics, grads, means = train_one_step()
    on_parts = train_one_step(accumulate=4, mesh={"dp": 2, "ep": 2})
    assert on_parts[0] == pytest.approx(metrics, rel=1e-5)
    assert on_parts[2] == pytest.approx(means, rel=1e-5)
    assert max(np.abs(array).max() for array in grads.values()) > 0.1
    for name, array in grads.items():
        np.testing.assert_allclose(on_parts[1][name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def layer(**keys: Any) -> tuple[Experts, jax.Array]:
    """A layer of experts, and a stream that it reads."""
    config = EXPERTS.model_copy(update=keys)
    x_BLD = jax.random.normal(jax.random.key(1), (2, 16, 32), jnp.float32)
    return Experts(config, nnx.Rngs(0)), x_BLD


def reference_output(
    experts: Experts, x_BLD: jax.Array, has_place: dict[tuple[int, int, int], bool] | None = None
) -> np.ndarray:
    """Compute the output token by token in float64; `has_place` is by (example, token, choice)."""
    params = (experts.router, experts.gate, experts.up, experts.down)
    router, gate, up, down = (np.asarray(param[...], np.float64) for param in params)
    x = np.asarray(x_BLD, np.float64)
    out = np.zeros_like(x)
    for b, t in np.ndindex(x.shape[:2]):
        logits = x[b, t] @ router
        shares = np.exp(logits) / np.exp(logits).sum()
        chosen = np.argsort(-shares)[: experts.per_token]
        total = shares[chosen].sum() if experts.normalizes_shares else 1.0
        for choice, expert in enumerate(chosen):
            if has_place is None or has_place[b, t, choice]:
                gated = x[b, t] @ gate[expert]
                hidden = gated / (1 + np.exp(-gated)) * (x[b, t] @ up[expert])
                out[b, t] += shares[expert] / total * (hidden @ down[expert])
    return out


@pytest.mark.parametrize("keys", [{}, {"experts_normalized": False}, {"capacity": 2.0}], ids=str)
def test_output_sums_the_shares_of_the_experts(keys: dict[str, Any]) -> None:
    experts, x_BLD = layer(**keys)
    made_BLD, counts = experts(x_BLD, jnp.ones((2, 16), jnp.float32))
    np.testing.assert_allclose(made_BLD, reference_output(experts, x_BLD), atol=2e-6)
    assert float(counts.chosen_SE.sum()) == 2 * 16 * 2 and float(counts.left_out_S.sum()) == 0


def test_capacity_prefers_earlier_tokens_and_ignores_padding() -> None:
    experts, x_BLD = layer(capacity=0.5)
    real_BL = jnp.ones((2, 16), jnp.float32).at[0, :5].set(0.0)
    places = 4  # 0.5 × 16 × 2 / 4
    shares = jax.nn.softmax(jnp.einsum("bld,de->ble", x_BLD, experts.router[...]))
    chosen_BLK = np.asarray(jax.lax.top_k(shares, 2)[1])
    has_place: dict[tuple[int, int, int], bool] = {}
    for b in range(2):
        used = np.zeros(4, int)
        for t, choice in np.ndindex(16, 2):
            expert, is_real = chosen_BLK[b, t, choice], bool(real_BL[b, t])
            has_place[b, t, choice] = is_real and bool(used[expert] < places)
            used[expert] += is_real
    made_BLD, counts = experts(x_BLD, real_BL)
    np.testing.assert_allclose(made_BLD, reference_output(experts, x_BLD, has_place), atol=2e-6)
    left_out = sum(not item for item in has_place.values())
    assert float(counts.left_out_S.sum()) == left_out - 5 * 2 > 0


def test_capacity_is_causal() -> None:
    model = Decoder(TIGHT, nnx.Rngs(0))
    tokens_BL = jax.random.randint(jax.random.key(2), (4, 16), 0, 32)
    read = nnx.jit(lambda model, tokens_BL: model.read(tokens_BL).x_BLD)
    outputs, changed = (read(model, item) for item in (tokens_BL, tokens_BL.at[:, 8:].set(7)))
    np.testing.assert_allclose(outputs[:, :8], changed[:, :8], rtol=1e-5, atol=1e-6)


def test_counts_exclude_padding() -> None:
    experts, x_BLD = layer()
    real_BL = jnp.zeros((2, 16), jnp.float32).at[0, :5].set(1.0)
    counts = experts(x_BLD, real_BL)[1]
    alone = experts(x_BLD[:1, :5], jnp.ones((1, 5), jnp.float32))[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), counts, alone)


def test_flops_count_only_the_experts_of_a_token() -> None:
    task, batch = Counting(), Counting().batch(0)
    tokens, width, hidden, sparse = 16 * 16, 32, 24, 2
    jobs: dict[str, tuple[Any, dict[str, int]]] = {
        "one": (EXPERTS, {}),
        "mesh": (EXPERTS, {"fsdp": 2, "ep": 2, "mp": 2}),
        "roomy": (EXPERTS.model_copy(update={"capacity": 2.0}), {}),
        "more": (EXPERTS.model_copy(update={"experts_per_token": 3}), {}),
    }
    actual = {
        name: build(task, model=model, mesh=axes).count_flops(batch)
        for name, (model, axes) in jobs.items()
    }
    assert actual["one"] == actual["mesh"] == actual["roomy"]
    assert actual["more"] - actual["one"] == 3 * sparse * tokens * 3 * 2 * width * hidden


def test_load_of_many_experts_is_not_listed() -> None:
    task = Counting()
    few = build(task, model=EXPERTS).evaluated_metrics(task.batch(0))
    loads = {f"expert_load/{number}" for number in range(4)}
    assert loads | {"expert_load_max", "balance_loss"} <= set(few)
    many = EXPERTS.model_copy(update={"experts": MAX_LISTED_EXPERTS + 1})
    actual = build(task, model=many).evaluated_metrics(task.batch(0))
    assert {"expert_load_max", "expert_load_min"} <= set(actual)
    assert not any("/" in name for name in actual)


def test_load_extremes_are_per_layer() -> None:
    chosen_ME = jnp.array([[1.0, 7.0], [6.0, 2.0]])
    zero = jnp.zeros(())
    means = Routing(chosen_ME, jnp.ones(2), zero, jnp.array(8.0), None).metric_means()
    assert [float(means[f"expert_load_{which}"]) for which in ("max", "min")] == [7 / 4, 1 / 4]


class Bare(Counting):
    """A loss of its own, of logits alone."""

    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Loss:
        return Loss(model(batch["tokens"]).sum(), batch["weight"].sum())


def test_training_loss_without_router_penalty_is_rejected() -> None:
    task = Bare()
    step = build(task, model=EXPERTS)
    assert "loss" in step.evaluated_metrics(task.batch(0))
    with pytest.raises(
        SpecError,
        match=r"leaves out train\.model\.balance and router_z; return Loss\(…, routing=model\.read",
    ):
        step.count_flops(task.batch(0))
    plain = EXPERTS.model_copy(update={"balance": 0.0, "router_z": 0.0})
    assert build(task, model=plain).count_flops(task.batch(0))


class Mean(Counting):
    """A loss that is a bare mean."""

    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
        return model.read(batch["tokens"]).x_BLD.mean()


def test_evaluation_by_a_bare_mean_is_rejected() -> None:
    with pytest.raises(
        SpecError, match="tests:Tiny: the loss is a bare mean, with which a model with"
    ):
        build(Mean(), model=EXPERTS).evaluated_metrics(Counting().batch(0))


def test_router_multiplies_in_full_float32() -> None:
    experts, x_BLD = layer()
    count_tokens = jax.make_jaxpr(lambda x_BLD: experts(x_BLD, jnp.ones((2, 16)))[1])
    traced = count_tokens(x_BLD.astype(jnp.bfloat16))
    products = [item for item in traced.jaxpr.eqns if item.primitive.name == "dot_general"]
    assert [item.params["precision"] for item in products] == [(jax.lax.Precision.HIGHEST,) * 2]


def test_indivisible_experts_are_rejected() -> None:
    with pytest.raises(
        SpecError, match=r"blocks\.mlp\.\w+: experts = 4 cannot be split evenly over ep = 8 devices"
    ):
        build(Counting(), model=EXPERTS, mesh={"ep": 8})
    with pytest.raises(
        SpecError, match=r"train\.mesh\.ep = 2 splits experts, and train\.model has none; use dp or"
    ):
        build(Counting(), model=DECODER.model_copy(update={"init_from": "/base"}), mesh={"ep": 2})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"capacity": 1.25}, "capacity applies to experts, and experts is null"),
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token = 5 is more than experts = 4"),
        ({"experts": 4, "dense_layers": [4]}, "dense_layers has 4, and layers = 4 are 0 to 3"),
        ({"experts": 4, "dense_layers": [0, 1, 2, 3]}, "dense_layers has all 4 layers"),
        ({"experts": 4, "biases": ["mlp"]}, "experts have no biases"),
        ({"experts": 1}, "greater than or equal to 2"),
        ({"experts": 4, "capacity": 0}, "greater than 0"),
    ],
)
def test_invalid_mixtures_are_rejected(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        spec.Decoder(**keys)
