"""What a resumed run must have in common with the one it goes on from, and when the loop collects garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer import preflight, train
from trainer.data import sources
from trainer.errors import CheckpointError, DataError
from trainer.progress import Progress
from trainer.spec import TrainSpec
from trainer.tasks.classify import Classify
from trainer.train import Place, Run, conditions


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


class Collections(Progress):
    """Where the loop is whenever Python collects garbage, which it would at every turn of it if it were left to."""

    def __init__(self) -> None:
        super().__init__(None)
        self.seen: list[tuple[str, int, int]] = []  # phase, step, generation
        self._now: tuple[str, int] | None = None  # from the first step on

    def phase(self, name: str, step: int) -> None:
        if name == "step" and self._now is None:
            gc.set_threshold(1)
        if name == "step" or self._now is not None:
            self._now = name, step

    def __call__(self, when: str, info: dict[str, int]) -> None:
        if when == "start" and self._now is not None:
            self.seen.append((*self._now, info["generation"]))


@pytest.fixture
def collections() -> Iterator[Collections]:
    """Python collects as before at the end, whatever the loop made of it."""
    thresholds, watch = gc.get_threshold(), Collections()
    gc.callbacks.append(watch)
    yield watch
    gc.callbacks.remove(watch)
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    gc.enable()


class Never:
    """Nobody tells this run to stop."""

    def poll(self) -> bool:
        return False


def test_garbage_is_collected_beside_evaluations_and_saves_or_every_so_many_steps_alone(
    collections: Collections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "COLLECT_EVERY", 5)
    data = {"source": "synthetic", "examples": 64, "eval_examples": 8, "shape": [4, 4]}
    often = {"eval": {"every": 2}, "checkpoint": {"every": 3}}
    keys = {"model": {"kind": "mlp", "layers": 1, "width": 8}, "data": data, "batch": 8, "steps": 6, **often}
    spec = TrainSpec.model_validate({"task": "trainer.tasks.classify:Classify", **keys})
    Run(spec, Classify(), Place(str(tmp_path)), Never(), collections).run()
    steps = [("eval", 2), ("save", 3), ("eval", 4), ("step", 5), ("eval", 6), ("save", 6)]
    assert collections.seen == [(*each, 2) for each in steps]
