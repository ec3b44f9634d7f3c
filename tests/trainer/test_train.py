"""What a resumed run must have in common with the one it goes on from."""

from __future__ import annotations

from typing import Any

import pytest

from trainer import preflight
from trainer.data import sources
from trainer.errors import CheckpointError, DataError
from trainer.spec import TrainSpec
from trainer.train import conditions


def made(**keys: Any) -> dict[str, Any]:
    data = {"source": "synthetic", "examples": 8, "shape": [2, 2]} | keys.pop("data", {})
    spec = TrainSpec.model_validate({"task": "trainer.tasks.classify:Classify", "data": data} | keys)
    source = sources.open(spec, "train")
    assert source is not None
    return conditions(spec, source)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"batch": 64}, CheckpointError, "train.batch is 64, but the checkpoints in here were made with 128"),
        ({"seed": 1}, CheckpointError, "train.seed is 1"),
        ({"data": {"shuffle": False}}, CheckpointError, "train.data.shuffle is False"),
        ({"data": {"examples": 9}}, DataError, "the training data changed"),
    ],
)
def test_what_would_change_the_order_of_examples_is_refused(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        preflight.check_resumed(made(), made(**change), "here")


def test_the_same_conditions_are_not() -> None:
    preflight.check_resumed(made(), made(accumulate=2, steps=5), "here")
