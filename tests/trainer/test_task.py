from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from jaxlaunch import contract
from jaxlaunch.trainer import tasks
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.metrics.counters import StepTimer, Workload
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import Metrics
from jaxlaunch.trainer.spec import TASK_DEFAULTS, TASKS
from jaxlaunch.trainer.start.process import read_spec
from jaxlaunch.trainer.task import Loss, Task, task_class
from jaxlaunch.trainer.user_code import load_object
from tests.trainer import tiny


def test_load_object_follows_path() -> None:
    assert load_object(TASKS["classify"]).__name__ == "Classify"
    assert load_object("collections:abc.Mapping").__name__ == "Mapping"


def test_missing_module_is_reported() -> None:
    with pytest.raises(
        SpecError, match=r"importing nowhere failed: .* `code: \.` in job.yaml ships"
    ):
        load_object("nowhere:Task")


def test_failing_module_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfdone.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError, match="halfdone failed: RuntimeError: not today"):
        load_object("halfdone:Task")


def test_missing_name_is_reported_with_defined_names() -> None:
    names = "Classify, HasPixels, blend_images, cut_mix, mix_up, scale_images, standardize_images"
    with pytest.raises(SpecError, match=f"has no 'Clasify'. It defines {names}"):
        load_object("jaxlaunch.trainer.tasks.classify:Clasify")


def test_built_in_task_names_are_complete() -> None:
    result = set()
    for module in pkgutil.iter_modules(tasks.__path__, "jaxlaunch.trainer.tasks."):
        for name, thing in vars(importlib.import_module(module.name)).items():
            if isinstance(thing, type) and issubclass(thing, Task) and thing is not Task:
                result.add(f"{thing.__module__}:{name}")
    assert result == set(TASKS.values())
    assert set(TASKS) == set(TASK_DEFAULTS)


class Dense(linen.Module):
    """A module of flax's older API."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(10)(x)


class Model(nnx.Module):
    """A model that is named in place of a task."""


class NoSource:
    def model(self, spec: Any, rngs: nnx.Rngs) -> Model:
        return Model()

    def loss(self, model: Model, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
        return jnp.zeros(())

    def example(self, raw: dict[str, Any]) -> dict[str, Any]:
        return raw


class NeedsAWord(NoSource):
    def __init__(self, word: str) -> None:
        self.word = word

    def source(self, spec: Any, split: str) -> None:
        return None


def a_function() -> None: ...


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("NoSource", "has no source; a task has the methods model, loss, source, example"),
        ("Model", "is a model, not a task: a task's `model` makes one"),
        ("Dense", "is a model, not a task"),
        (
            "NeedsAWord",
            r"cannot be made: a task is called without arguments \(missing a required "
            r"argument: 'word'\)",
        ),
        ("a_function", "is a function, not a class with model, loss, source, example"),
    ],
)
def test_invalid_tasks_are_refused(name: str, says: str) -> None:
    with pytest.raises(SpecError, match=f"train.task = {__name__}:{name} {says}"):
        read_spec({contract.TRAIN_SPEC: json.dumps({"task": f"{__name__}:{name}"})})


def test_plain_task_class_has_place() -> None:
    class Plain(NoSource):
        __firstlineno__ = 12  # as Python 3.13 sets it

        def source(self, spec: Any, split: str) -> None:
            return None

    result = task_class("plain:Plain", Plain)
    assert issubclass(result, Task) and vars(result)["__firstlineno__"] == 12
    assert (result.__module__, result.__qualname__) == (__name__, Plain.__qualname__)


class ListsDefaults(NoSource):
    defaults = ["batch", 8]


def test_invalid_defaults_are_refused() -> None:
    words = "ListsDefaults: its defaults are a list, not a dict of keys of train"
    with pytest.raises(SpecError, match=words):
        read_spec({contract.TRAIN_SPEC: json.dumps({"task": f"{__name__}:ListsDefaults"})})


class HasSizes(tiny.Digits):
    defaults = {"model": {"kind": "decoder", "layers": 2, "width": 64}}


def test_default_sizes_yield_to_init_from() -> None:
    train = {"task": f"{__name__}:HasSizes", "model": {"init_from": "w"}}
    spec, _ = read_spec({contract.TRAIN_SPEC: json.dumps(train)})
    assert spec.model.model_fields_set == {"init_from"}


class Returns(tiny.Digits):
    """A task whose loss is whatever a test makes of the right one."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        return self.change(super().loss(model, batch, rng))


def metric(name: Any, value: Any) -> Any:
    return lambda loss: loss._replace(metrics={name: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda loss: (loss.sum, {}),
            "loss returned a tuple of 2, not a scalar or a Loss; metrics go into",
        ),
        (
            lambda loss: jnp.ones(16) * loss.sum,
            r"loss returned an array of shape \[16\], not a scalar; a bare loss is",
        ),
        (lambda loss: None, "loss returned None, not a scalar"),
        (lambda loss: {"loss": loss.sum}, "loss returned a dict, not a scalar"),
        (
            lambda loss: loss._replace(weight=jnp.ones(16)),
            r"Loss.weight is an array of shape \[16\], not a scalar",
        ),
        (lambda loss: loss._replace(metrics=[("a", 1.0)]), "Loss.metrics is a list, not a dict"),
        (metric("hits", 0.5), r"metric 'hits' is the number 0.5, not a pair \(sum, weight\)"),
        (metric("hits", jnp.ones(2)), r"metric 'hits' is an array of shape \[2\], not a pair"),
        (metric("hits", (1.0, 2.0, 3.0)), "metric 'hits' is a tuple of 3, not a pair"),
        (
            metric("hits", (jnp.ones(16), 16.0)),
            r"the sum of metric 'hits' is an array of shape \[16\], not a scalar",
        ),
        (metric(3, (1.0, 1.0)), "the name of metric 3 is an int, not text"),
    ],
)
def test_invalid_losses_are_refused(change: Any, says: str) -> None:
    task = Returns(change)
    step, batch = tiny.build(task), task.batch(0)
    with pytest.raises(SpecError, match=f"tests:Tiny: {says}"):
        step.forward_jaxpr(batch)


def test_python_numbers_are_scalars() -> None:
    task = Returns(lambda loss: Loss(loss.sum, 16.0, {"ones": [16, 16.0]}))
    assert tiny.build(task).count_flops(task.batch(0))


@pytest.mark.parametrize(
    "name",
    ["step", "loss", "epoch", "learning_rate", "time", "data_s", "finite", "weight", "eval_loss"],
)
def test_reserved_metric_names_are_refused(name: str) -> None:
    task = Returns(metric(name, (1.0, 1.0)))
    words = f"a metric cannot be named '{name}'; the trainer's own records use"
    with pytest.raises(SpecError, match=words):
        tiny.build(task).forward_jaxpr(task.batch(0))


def test_record_names_are_reserved(tmp_path: Path) -> None:
    metrics = Metrics(
        Workload(2, 1), rank=0, run_dir=str(tmp_path), socket=None, progress=Progress(None)
    )
    metrics.start(0)
    metrics.record_interval(1, {"loss": 1.0, "hits": 0.5, "finite": 1.0})
    metrics.record_evaluated(1, {"loss": 1.0, "hits": 0.5, "examples": 3.0})
    metrics.close()
    lines = [json.loads((tmp_path / f"{name}.jsonl").read_text()) for name in ("metrics", "eval")]
    assert set().union(*lines) - contract.RESERVED_METRICS == {"hits"}
    assert tuple(sorted(StepTimer().part_seconds())) == tuple(sorted(contract.LOOP_PARTS))


@pytest.mark.parametrize(
    ("created", "says"),
    [
        (lambda: Dense(), "model returned the flax.linen module Dense, not a flax.nnx.Module"),
        (lambda: Model, "model returned the class Model, not a flax.nnx.Module"),
        (lambda: None, "model returned None, not a flax.nnx.Module"),
    ],
)
def test_invalid_models_are_refused(
    created: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny.Digits, "model", lambda task, spec, rngs: created())
    with pytest.raises(SpecError, match=f"tests:Tiny: {says}"):
        tiny.build(tiny.Digits())


def test_invalid_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxlaunch.trainer.loop.training import RunContext
    from jaxlaunch.trainer.train import build_loop

    monkeypatch.setattr(tiny.Digits, "source", lambda task, spec, split: [{"image": 1}])
    spec, nowhere = tiny.train_spec(tiny.Digits(), mesh={"dp": -1}), RunContext(str(tmp_path))
    words = "tests:Tiny: source returned a list; a source has __len__, __getitem__ and"
    with pytest.raises(SpecError, match=words):
        build_loop(spec, tiny.Digits(), nowhere, Any, Progress(None))  # type: ignore[arg-type]
