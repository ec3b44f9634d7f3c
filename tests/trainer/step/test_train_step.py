import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.step import executable
from jaxlaunch.trainer.step.executable import setup_compiler_options
from jaxlaunch.trainer.step.state import TrainState
from jaxlaunch.trainer.task import Loss
from tests.trainer.tiny import GPT2, Counting, Digits, MeanLoss, Pictures, build, compiled_step, run

TASKS: dict[str, Any] = {"mlp": Digits(), "decoder": Counting()}
MODELS: dict[str, dict[str, Any]] = {"gpt2": {"model": GPT2}, "vit": {}}
# Over two slices of 2 × 2: on the devices of one process this is also the mesh of the same axes
# without slices.
HYBRID: dict[str, Any] = {"dp": 2, "fsdp": 2, "mp": 2, "dcn": {"dp": 2}}
MESHES: list[dict[str, Any]] = [{"dp": 8}, {"fsdp": 8}, HYBRID]


@functools.cache
def losses_on_one_device(name: str) -> np.ndarray:
    """Losses of 20 steps on one device."""
    return run(TASKS[name])[0]


def share(state: TrainState, name: str | None = None) -> float:
    """The share of the state's bytes, or of one parameter's, that the fullest device holds."""
    leaves = jax.tree.leaves(state) if name is None else [state.params[name]]
    stored = {
        device: sum(
            s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == device
        )
        for device in leaves[0].sharding.device_set
    }
    return max(stored.values()) / sum(leaf.nbytes for leaf in leaves)


def equal(first: TrainState, other: TrainState) -> bool:
    return jax.tree.all(
        jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), first, other)
    )


def copy_state(state: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf: np.array(leaf), state)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_losses_are_equal_on_every_mesh(name: str, axes: dict[str, Any]) -> None:
    losses, state = run(TASKS[name], mesh=axes)
    np.testing.assert_allclose(losses, losses_on_one_device(name), rtol=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    assert share(state) <= 1.01 / (axes.get("fsdp", 1) * axes.get("mp", 1)) + 0.01


# The decoder and the MLP cover the meshes of fewer axes.
@pytest.mark.parametrize("name", MODELS)
def test_transformer_losses_are_equal_on_a_mesh_of_all_axes(name: str) -> None:
    task = Pictures() if name == "vit" else Counting()
    losses, _ = run(task, mesh=HYBRID, **MODELS[name])
    np.testing.assert_allclose(losses, run(task, **MODELS[name])[0], rtol=1e-5)


def test_indivisible_vocabulary_stays_whole() -> None:
    odd = {"model": GPT2.model_copy(update={"vocab": 33})}
    losses, _ = run(Counting(), 5, mesh={"dp": 2, "fsdp": 2, "mp": 2}, **odd)
    np.testing.assert_allclose(losses, run(Counting(), 5, **odd)[0], rtol=1e-5)


@pytest.mark.parametrize("name", TASKS)
def test_fsdp_splits_whole_state(name: str) -> None:
    step = build(TASKS[name], mesh={"fsdp": 8}, optimizer={"ema": 0.9})
    assert share(step.init_state()) <= 1 / 8 * 1.04  # vectors are whole, and few bytes even here


def test_mp_halves_named_weights() -> None:
    state = build(TASKS["decoder"], mesh={"mp": 2}).init_state()
    names = [name for name in state.params if "norm" not in name]
    assert {name: share(state, name) for name in names} == dict.fromkeys(names, 0.5)
    state = build(TASKS["mlp"], mesh={"mp": 2}).init_state()
    assert {share(state, f"layers.{i}.kernel") for i in (0, 1)} == {0.5}


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_optimizer_state_has_parameter_shardings(name: str) -> None:
    losses, state = run(TASKS["decoder"], 3, mesh={"fsdp": 8}, optimizer={"name": name})
    alone = run(TASKS["decoder"], 3, optimizer={"name": name})[0]
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert share(state) <= 1 / 8 * 1.06  # vectors are whole


@pytest.mark.parametrize(("task", "accumulate"), [(Counting(), 4), (MeanLoss(), 2)])
def test_micro_batches_equal_one_batch(task: Any, accumulate: int) -> None:
    options: dict[str, Any] = {
        "mesh": {"dp": 2, "fsdp": 2},
        "optimizer": {"name": "sgd", "lr": 0.1},
    }
    whole, state = run(task, 3, **options)
    parts, state_of_parts = run(task, 3, accumulate=accumulate, **options)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)
    assert_close = functools.partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(assert_close, state_of_parts.params, state.params)


@pytest.mark.parametrize(
    ("precision", "requests"), [("fp32", "HIGHEST"), ("tf32", "HIGH"), ("bf16", "DEFAULT")]
)
def test_products_of_a_step_request_its_precision(
    precision: str, requests: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs and TPUs compute float32 products in fewer bits unless the program requests all."""
    texts: list[str] = []

    def compile_lowered(lowered: Any, options: Any) -> Any:
        texts.append(lowered.as_text())
        return lowered.compile()

    monkeypatch.setattr(executable, "compile_lowered", compile_lowered)
    compiled_step(TASKS["mlp"], precision=precision)
    products = [line for text in texts for line in text.splitlines() if "dot_general" in line]
    # Two layers: two products forwards, and one or two backwards of each.
    assert len(products) >= 5
    assert all(f"precision = [{requests}, {requests}]" in line for line in products)


def test_micro_batches_need_no_communication() -> None:
    step = build(TASKS["mlp"], mesh={"dp": 8}, accumulate=2)
    split = jax.jit(
        functools.partial(step._placement.split_micro_batches, count=2),
        in_shardings=step.put_batch(TASKS["mlp"].batch(0))["image"].sharding,
    )
    rows = jax.ShapeDtypeStruct((16, 28), jnp.float32)
    text = split.lower(rows).compile().as_text()
    collectives = "all-to-all", "all-gather", "collective-permute", "all-reduce"
    assert not any(word in text for word in collectives)
    second = split(jnp.arange(16.0)[:, None])[1, :, 0]
    np.testing.assert_array_equal(second, np.arange(1.0, 16.0, 2.0))


def test_step_donates_state() -> None:
    step = compiled_step(TASKS["mlp"])
    state = step.init_state()
    step.train(state, step.put_batch(TASKS["mlp"].batch(0)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_changed_batch_shape_is_named() -> None:
    step, batch = compiled_step(TASKS["decoder"]), TASKS["decoder"].batch(0)
    longer = step.put_batch(batch | {"tokens": np.zeros((16, 19), np.int32)})
    words = r"tokens: compiled for int32\[16, 17\], got int32\[16, 19\]"
    with pytest.raises(TypeError, match=words):
        step.train(step.init_state(), longer)
    with pytest.raises(TypeError, match="tokens"):
        step.compile_train(longer)
    step.compile_train(step.put_batch(batch))


def test_step_that_is_not_finite_keeps_state() -> None:
    task = TASKS["mlp"]
    step = compiled_step(task, mesh={"fsdp": 2}, optimizer={"ema": 0.5})
    state, _ = step.train(step.init_state(), step.put_batch(task.batch(0)))
    previous = copy_state(state)
    bad = task.batch(1)
    bad["label"][3] = 10  # outside the classes
    state, metrics = step.train(state, step.put_batch(bad))
    assert not metrics["finite"] and equal(previous, copy_state(state)) and int(state.step) == 1
    state, metrics = step.train(state, step.put_batch(task.batch(1)))
    assert metrics["finite"] and int(state.step) == 2


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_batch_without_target_only_counts(precision: str, standard: None) -> None:
    task = TASKS["mlp"]
    optimizer = {
        "ema": 0.5,
        "weight_decay": 0.1,
        "schedule": {"name": "linear", "warmup": 4},
    }
    step = compiled_step(task, precision=precision, accumulate=2, optimizer=optimizer)
    state, _ = step.train(step.init_state(), step.put_batch(task.batch(0)))
    previous = copy_state(state)
    empty = step.put_batch(task.batch(1) | {"weight": np.zeros(16, np.float32)})
    state, metrics = step.train(state, empty)
    after = copy_state(state)
    assert metrics["finite"] and not metrics.get("skipped")
    assert metrics["weight"] == 0 and np.isnan(metrics["loss"])
    assert int(after.step) == 2
    assert equal(previous._replace(step=0, opt=0), after._replace(step=0, opt=0))
    old, new = (step.builder.to_tree(state)["opt"] for state in (previous, after))
    counts = {name for name in old if not np.array_equal(old[name], new[name])}
    # Only the schedule advances.
    assert {(int(old[name]), int(new[name])) for name in counts} == {(1, 2)}
    assert all(".mu." not in name and ".nu." not in name for name in counts)
    state, metrics = step.train(state, step.put_batch(task.batch(1)))
    assert metrics["finite"] and int(state.step) == 3 and not equal(previous, copy_state(state))
    np.testing.assert_allclose(metrics["learning_rate"], 0.5e-3)


def test_non_finite_batch_without_target_is_found() -> None:
    class Broken(Digits):
        def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Loss:
            result = super().loss(model, batch, rng)
            return result._replace(sum=result.sum + jnp.nan)

    step = compiled_step(Broken())
    empty = step.put_batch(Broken().batch(1) | {"weight": np.zeros(16, np.float32)})
    assert not step.train(step.init_state(), empty)[1]["finite"]


def test_metrics_are_named_means() -> None:
    step = compiled_step(TASKS["decoder"], optimizer={"schedule": {"name": "linear", "warmup": 10}})
    _, metrics = step.train(step.init_state(), step.put_batch(TASKS["decoder"].batch(0)))
    names = {"loss", "grad_norm", "learning_rate", "finite", "weight", "real_tokens", "accuracy"}
    assert set(metrics) == names
    assert metrics["weight"] == TASKS["decoder"].batch(0)["mask"].sum()
    assert metrics["learning_rate"] == 0 and metrics["grad_norm"] > 0


@pytest.mark.parametrize("task", [Digits(), MeanLoss()], ids=["sums", "mean"])
def test_padded_rows_do_not_count_in_evaluation(task: Any) -> None:
    step, batch = build(task, mesh={"dp": 4}), task.batch(0)
    batch["weight"][11:] = 0
    step.compile_eval(step.put_batch(batch))
    state = step.init_state()
    result = step.evaluate(state, step.put_batch(batch))[0]
    batch["image"][11:] = 7
    batch["label"][11:] = -1
    repeated = step.evaluate(state, step.put_batch(batch))[0]
    assert result["examples"][0] == 11 and result["loss"][1] == 11
    assert jax.tree.all(jax.tree.map(np.array_equal, result, repeated))


def test_evaluation_uses_averaged_weights() -> None:
    task = TASKS["mlp"]
    step = compiled_step(task, optimizer={"ema": 0.999})
    batch = step.put_batch(task.batch(0))
    step.compile_eval(batch)
    state = step.init_state()
    untrained = step.evaluate(state, batch)[0]["loss"][0]
    for _ in range(5):
        state, metrics = step.train(state, batch)
    averaged = step.evaluate(state, batch)[0]["loss"][0]
    assert abs(averaged - untrained) < 0.1 * untrained and metrics["loss"] * 16 < 0.5 * untrained


def test_bf16_computes_in_bfloat16_with_float32_state(standard: None) -> None:
    mesh = {"dp": 2, "fsdp": 2, "mp": 2}
    losses, state = run(TASKS["decoder"], precision="bf16", remat="full", mesh=mesh)
    assert losses[-1] < 0.8 * losses[0]
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves((state.params, state.opt))}
    assert dtypes == {"float32", "int32"}
    assert not np.allclose(losses, losses_on_one_device("decoder"), rtol=1e-5)


def test_state_round_trips_through_tree() -> None:
    step = compiled_step(TASKS["decoder"], optimizer={"ema": 0.9})
    state = step.init_state()
    tree = step.builder.to_tree(state)
    assert tree["params"].keys() == tree["ema"].keys() == state.params.keys()
    assert len(tree["opt"]) == len(jax.tree.leaves(state.opt)) and "rest" not in tree
    assert jax.tree.structure(step.builder.from_tree(tree)) == jax.tree.structure(state)
    assert step.builder.from_tree(step.builder.to_tree(step.abstract)) == step.abstract
    step.train(step.builder.from_tree(tree), step.put_batch(TASKS["decoder"].batch(0)))


class WithState(Digits):
    """A user's model that names no axes, draws noise and keeps statistics."""

    sharding = {r"inner\.kernel": ("embed", "mp")}

    def model(self, spec: Any, rngs: nnx.Rngs) -> nnx.Module:
        return Noisy(rngs)


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(784, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.dropout(nnx.relu(self.norm(self.inner(x.reshape(x.shape[0], -1)))))

        return self.out(hidden)


def test_unnamed_model_is_split_by_path_rules(standard: None) -> None:
    step = build(WithState(), mesh={"fsdp": 2, "mp": 2})
    assert step.abstract.params["inner.kernel"].sharding.spec == jax.P("fsdp", "mp")
    assert set(step.abstract.buffers) == {"norm.mean", "norm.var"}


def test_noise_depends_on_seed_and_step(standard: None) -> None:
    step = compiled_step(WithState(), mesh={"dp": 2})
    first, second = ([step.put_batch(WithState().batch(0))] * 2 for _ in range(2))
    runs = []
    for batches in (first, second):
        state, losses = step.init_state(), []
        for batch in batches:
            state, metrics = step.train(state, batch)
            losses.append(float(metrics["loss"]))
        runs.append((losses, copy_state(state)))
    assert runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])
    assert np.abs(runs[0][1].buffers["norm.mean"]).max() > 0
    batch = second[0]
    step.compile_eval(batch)
    sums = [float(step.evaluate(state, batch)[0]["loss"][0]) for _ in range(2)]
    assert sums[0] == sums[1]


def test_indivisible_batch_is_refused() -> None:
    with pytest.raises(SpecError, match="batch = 16 cannot be split evenly over accumulate = 3"):
        build(TASKS["mlp"], accumulate=3)


def test_flops_are_three_times_forward_flops() -> None:
    step = build(TASKS["mlp"], accumulate=2)
    flops = 3 * 2 * 16 * (784 * 32 + 32 * 32 + 32 * 10)
    assert step.count_flops(step.put_batch(TASKS["mlp"].batch(0))) == flops


def test_initial_values_are_equal_on_every_mesh() -> None:
    meshes: list[dict[str, int]] = [{}, {"fsdp": 4, "mp": 2}]
    states = [copy_state(build(TASKS["decoder"], mesh=axes).init_state()) for axes in meshes]
    assert equal(*states)


def test_initial_state_is_equal_without_optimizations(optimized: None) -> None:
    step = build(Digits(), mesh={"fsdp": 2, "mp": 2})
    # These are XLA's defaults.
    whole = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    with step.builder.trace_context():
        expected = jax.jit(
            step.builder._initial_state,
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, step.abstract),
            compiler_options=whole,
        )({})
    assert setup_compiler_options(step.mesh) == {"xla_backend_optimization_level": 1}
    assert equal(step.init_state(), expected)


def test_all_64_bits_of_seed_count() -> None:
    # A seed that 32 bits hold has the keys that it always had.
    def keys(seed: int) -> bytes:
        return jax.random.key_data(build(TASKS["mlp"], seed=seed).builder.random_keys()).tobytes()

    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**33, 2**63, 2**64 - 1]
    assert len({keys(seed) for seed in seeds}) == len(seeds)
    assert keys(7) == np.asarray(jax.random.key_data(jax.random.split(jax.random.key(7)))).tobytes()
