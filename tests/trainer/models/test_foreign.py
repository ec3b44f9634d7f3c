"""Models of flax.linen and of Haiku train as those of nnx do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import haiku
import jax
import numpy as np
import pytest
from flax import linen, nnx

import jaxlaunch
from jaxlaunch import contract
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import read_spec
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.train import build_loop
from tests.trainer import tiny
from tests.trainer.models import foreign_nets

pytestmark = pytest.mark.usefixtures("standard")
NETS = foreign_nets.__name__


def test_running_variance_of_flax_and_haiku_is_biased() -> None:
    """As docs/your-model.md says: torch keeps the variance that is divided by n - 1."""
    x_BD = np.random.default_rng(0).normal(2.0, 3.0, (64, 3)).astype(np.float32)
    ours = nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))
    module = linen.BatchNorm(False, momentum=0.9)
    ours(x_BD)
    _, saved = module.apply(module.init(jax.random.key(0), x_BD), x_BD, mutable=["batch_stats"])
    transformed = haiku.transform_with_state(
        lambda x_BD: haiku.BatchNorm(True, True, 0.9)(x_BD, is_training=True)
    )
    _, state = transformed.apply(*transformed.init(jax.random.key(0), x_BD), None, x_BD)
    biased_D, torch_D = (x_BD.astype(np.float64).var(0, ddof=scale) for scale in (0, 1))
    for found_D in (ours.var[...], saved["batch_stats"]["var"]):
        np.testing.assert_allclose(found_D, 0.9 + 0.1 * biased_D, rtol=1e-5)
    np.testing.assert_allclose(
        state["batch_norm/~/var_ema"]["average"][0], biased_D, rtol=1e-5
    )  # 0 is left out of it
    np.testing.assert_allclose(torch_D / biased_D, 1.016, atol=5e-4)


@pytest.fixture(autouse=True)
def reference_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks with these models train at the rate of tiny.Digits."""
    monkeypatch.setitem(tiny.MODELS, foreign_nets.Images, tiny.MODELS[tiny.Digits])


def build(name: str, task: Any = None, **keys: Any) -> Step:
    task = task or foreign_nets.Images()
    arguments = keys.pop("arguments", {})
    step = tiny.build(task, model={"kind": f"{NETS}:{name}", **arguments}, **keys)
    step.compile_train(step.put_batch(task.batch(0)))
    return step


def losses(step: Step, steps: int = 3) -> list[float]:
    state, actual = step.init_state(), []
    for number in range(steps):
        state, metrics = step.train(state, step.put_batch(foreign_nets.Images().batch(number)))
        actual.append(float(metrics["loss"]))
    return actual


def test_arrays_keep_the_names_of_their_library() -> None:
    step = tiny.build(foreign_nets.Images(), model={"kind": f"{NETS}:CNN"})
    layers = {f"params.{name}" for name in ("Conv_0.kernel", "Conv_0.bias")}
    layers |= {f"params.BatchNorm_0.{name}" for name in ("scale", "bias")}
    assert step.abstract.params.keys() == layers | {"params.Dense_0.kernel", "params.Dense_0.bias"}
    statistics = {f"batch_stats.BatchNorm_0.{name}" for name in ("mean", "var")}
    assert step.abstract.buffers.keys() == statistics
    assert step.builder.axes["params.Dense_0.kernel"] == ("embed", None)
    step = tiny.build(foreign_nets.Images(), model={"kind": f"{NETS}:Net"})
    assert "params.net.linear.w" in step.abstract.params
    assert "state.net.batch_norm.~.mean_ema.average" in step.abstract.buffers
    model = {"kind": f"{NETS}:linen_mlp", "width": 4}
    assert tiny.build(foreign_nets.Images(), model=model).abstract.params
    assert tiny.build(foreign_nets.Images(), model={"kind": f"{NETS}:mlp"}).abstract.params


def test_model_with_a_list_of_axes_is_hashable() -> None:
    """As nnx does with it in caches of its own."""
    model = jaxlaunch.Linen(foreign_nets.Listed(), np.zeros((1, 8)), rngs=nnx.Rngs(0))
    assert hash(nnx.graphdef(model))


@pytest.mark.parametrize("name", ["CNN", "Net"])
def test_losses_are_equal_on_every_mesh(name: str) -> None:
    """Batch statistics are of the global batch; dropout draws the same everywhere."""
    first = losses(build(name, accumulate=2))
    many = losses(build(name, mesh={"dp": 2, "fsdp": 2}, accumulate=2))
    np.testing.assert_allclose(many, first, rtol=2e-5)
    assert first[-1] < first[0]


@pytest.mark.parametrize("name", ["CNN", "Net"])
def test_resumed_run_is_bit_identical_and_evaluates(name: str, tmp_path: Path) -> None:
    def run(folder: str, steps: int) -> list[dict[str, Any]]:
        train = {
            "task": "classify",
            "model": {"kind": f"{NETS}:{name}"},
            "data": {"source": "synthetic", "examples": 64, "eval_examples": 24, "shape": [8, 8]},
            "batch": 16,
            "steps": steps,
            "log_every": 1,
            "optimizer": {"lr": 0.01, "ema": 0.5, "schedule": {"name": "constant"}},
        }
        spec, task = read_spec({contract.TRAIN_SPEC: json.dumps(train)})
        context = RunContext(run_dir=str(tmp_path / folder))
        build_loop(spec, task, context, Stop(), Progress(None)).run()
        files = ("metrics.jsonl", "eval.jsonl")
        lines = "".join((tmp_path / folder / file).read_text() for file in files)
        return [json.loads(line) for line in lines.splitlines()]

    unbroken, first, resumed = run("whole", 4), run("parts", 2), run("parts", 4)
    after = {line["step"]: line["loss"] for line in resumed if "grad_norm" in line}
    assert after == {line["step"]: line["loss"] for line in unbroken if "grad_norm" in line}
    assert first and unbroken[-1]["examples"] == 24
    for key in ("loss", "accuracy"):
        assert resumed[-1][key] == unbroken[-1][key]


def test_batch_statistics_are_global_or_per_device() -> None:
    image = foreign_nets.Images().batch(0)["image"].astype(np.float32)
    rows = image.reshape(16, -1)
    rows = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 1e-6)
    expected = {"global": rows.var(0), "device": rows.reshape(4, 4, -1).var(1).mean(0)}
    for which, var in expected.items():
        step = build("Normalized", mesh={"dp": 4}, batch_norm=which, optimizer={"ema": 0.75})
        start = step.init_state()
        initial = jax.device_get(start.buffers)
        state, _ = step.train(start, step.put_batch(foreign_nets.Images().batch(0)))
        rest, ema = jax.device_get((state.buffers, state.ema))
        name = "batch_stats.BatchNorm_0.var"
        np.testing.assert_allclose(rest[name], 0.5 + 0.5 * var, rtol=1e-4, atol=1e-5)
        mean = rest["batch_stats.BatchNorm_0.mean"]
        np.testing.assert_allclose(mean, 0.5 * rows.mean(0), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(ema[name], 0.75 * initial[name] + 0.25 * rest[name], rtol=1e-6)
        buffers = jax.device_get(state.evaluated_buffers())[name]
        assert jax.tree.all(jax.tree.map(np.array_equal, buffers, ema[name]))


def test_loss_can_use_sown_values() -> None:
    step = build("CNN", foreign_nets.Sowing())
    batch = step.put_batch(foreign_nets.Images().batch(0))
    step.compile_eval(batch)
    state, metrics = step.train(step.init_state(), batch)
    assert float(metrics["size"]) > 0
    assert "size" in step.evaluate(state, batch)[0]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("CNN", {"widht": 3}, r"CNN\(widht\) failed: .*widht"),
        (
            "mlp",
            {"width": 3},
            "a transformed function of Haiku takes no arguments; leave out width",
        ),
        (
            "CNN",
            {"width": -1},
            r"the flax.linen module CNN cannot be called with float32\[1, 28, 28\]",
        ),
        (
            "Fickle",
            {},
            "batch_stats: a call in training has .*late.*, init had early; make every "
            "variable in init",
        ),
    ],
)
def test_unsupported_models_are_rejected(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        build(name, arguments=arguments)
