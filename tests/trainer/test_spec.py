from typing import Any

import pytest
from pydantic import ValidationError

from trainer.spec import OPTIMIZERS, Optimizer, TrainSpec, with_defaults


def faults(**train: Any) -> dict[str, str]:
    """Dotted key -> what is wrong with it."""
    with pytest.raises(ValidationError) as caught:
        TrainSpec.model_validate({"task": "trainer.tasks.lm:NextToken", **train})
    return {".".join(map(str, fault["loc"])): fault["msg"] for fault in caught.value.errors()}


@pytest.mark.parametrize(
    ("optimizer", "key", "message"),
    [
        ({"name": "sgd", "b1": 0.9}, "b1", "does not apply to sgd, which takes momentum, nesterov"),
        ({"name": "sgd", "b2": 0.9}, "b2", "does not apply to sgd"),
        ({"name": "sgd", "eps": 1e-8}, "eps", "does not apply to sgd"),
        ({"name": "sgd", "nesterov": True}, "nesterov", "needs a momentum above 0"),
        ({"name": "lion", "eps": 1e-8}, "eps", "does not apply to lion, which takes b1, b2"),
        ({"name": "adafactor", "b2": 0.9}, "b2", "does not apply to adafactor, which takes b1, eps"),
        ({"momentum": 0.9}, "momentum", "does not apply to adamw, which takes b1, b2, eps"),
        ({"schedule": {"name": "constant", "final": 0.1}}, "schedule.final", "does not apply to constant"),
        ({"schedule": {"decay": 10}}, "schedule.decay", "does not apply to cosine"),
        ({"schedule": {"name": "linear", "shape": "cosine"}}, "schedule.shape", "does not apply to linear"),
        ({"schedule": {"start": 0.1}}, "schedule.start", "does not apply without a warmup"),
    ],
)
def test_a_key_that_the_named_optimizer_or_schedule_does_not_take_is_a_fault(
    optimizer: dict[str, Any], key: str, message: str
) -> None:
    found = faults(optimizer=optimizer)
    assert list(found) == [f"optimizer.{key}"]
    assert message in found[f"optimizer.{key}"]


@pytest.mark.parametrize(("length", "steps"), [({"steps": 100}, 100), ({}, 1000)])
def test_a_decay_that_does_not_fit_beside_the_warmup_is_a_fault(length: dict[str, int], steps: int) -> None:
    schedule = {"name": "wsd", "warmup": 60, "decay": 990}
    found = faults(**length, optimizer={"schedule": schedule})
    assert f"schedule.warmup = 60 and decay = 990 do not fit in {steps} steps" in found["optimizer"]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_optimizer_survives_being_written_out_in_full(name: str) -> None:
    optimizer = Optimizer(name=name)  # type: ignore[arg-type]
    assert Optimizer.model_validate_json(optimizer.model_dump_json()) == optimizer
    assert optimizer.options() == OPTIMIZERS[name]


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        ({"optimizer": {"lr": 0.1}}, {"optimizer": {"name": "adamw", "eps": 1e-6, "lr": 0.1}}),
        ({"optimizer": {"name": "lion"}}, {"optimizer": {"name": "lion"}}),
        ({"data": {"name": "mnist"}}, {"data": {"source": "tfds", "name": "mnist", "split": "train[:9]"}}),
        ({"data": {"source": "text", "path": "a"}}, {"data": {"source": "text", "path": "a"}}),
    ],
)
def test_a_task_s_defaults_hold_for_the_same_optimizer_and_source_only(
    given: dict[str, Any], merged: dict[str, Any]
) -> None:
    defaults = {
        "optimizer": {"name": "adamw", "eps": 1e-6},
        "data": {"source": "tfds", "name": "digits", "split": "train[:9]"},
    }
    assert with_defaults(given, defaults) == defaults | merged
