"""Conditions of a resumed run, and what the loop of the built-in training does."""

from __future__ import annotations

import gc
import json
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxlaunch.trainer import train
from jaxlaunch.trainer.checkpoint import saved_files
from jaxlaunch.trainer.data.source import fingerprint_arguments
from jaxlaunch.trainer.errors import CheckpointError, DataError, Stopped
from jaxlaunch.trainer.loop import driver
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.start import preflight
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.train import build_loop, resume_conditions
from tests.trainer import tiny


def conditions(**keys: Any) -> dict[str, Any]:
    data = {"source": "synthetic", "examples": 8, "shape": [2, 2]} | keys.pop("data", {})
    spec = TrainSpec.model_validate({"task": "classify", "data": data} | keys)
    source = open_source(spec, "train")
    assert source is not None
    return resume_conditions(spec, source)


def small_spec(**keys: Any) -> TrainSpec:
    """Return the training of a small MLP on synthetic images."""
    data = keys.pop("data", {})
    if "source" not in data:
        images = {"source": "synthetic", "examples": 64, "eval_examples": 0, "shape": [4, 4]}
        data = images | data
    model = {"kind": "mlp", "layers": 1, "width": 8}
    block = {"task": "classify", "model": model, "data": data, "batch": 8, "steps": 8}
    return TrainSpec.model_validate(block | keys)


def build_run(
    spec: TrainSpec, folder: Path, stop: Any = None, report: Progress | None = None, saved: int = 0
) -> Loop[Any]:
    """Return the loop of a run in a folder, which is stopped by `stop`."""
    context = RunContext(str(folder), saved_step=saved)
    loop = build_loop(spec, Classify(), context, stop or Never(), report or Progress(None))
    if stop is not None:
        stop.run = loop
    return loop


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"batch": 64},
            CheckpointError,
            "train.batch is 64, but the checkpoints in here were made with 128",
        ),
        ({"seed": 1}, CheckpointError, "train.seed is 1"),
        ({"data": {"shuffle": False}}, CheckpointError, "train.data.shuffle is false"),
        ({"data": {"examples": 9}}, DataError, "the training data changed"),
    ],
)
def test_changed_example_order_is_refused(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        preflight.check_resumed(conditions(), conditions(**change), "here")


def test_changed_dataset_argument_is_named_without_value() -> None:
    def fingerprint(token: str) -> str:
        args = {"auth": {"token": token, "it's": [1, 2.5, None]}, "folder": "/data"}
        return f"my:Data, 4 examples, {fingerprint_arguments(args)}"

    then, repeated, now = (fingerprint(token) for token in ("s3cret-a", "s3cret-a", "s3cret-b"))
    assert "s3cret" not in then + now
    preflight.check_resumed({"data": then}, {"data": repeated}, "here")
    with pytest.raises(DataError, match=r"changed \(train.data.args.auth.token\)") as raised:
        preflight.check_resumed({"data": then}, {"data": now}, "here")
    assert "s3cret" not in str(raised.value) and "folder)" not in str(raised.value)


def test_equal_conditions_are_accepted() -> None:
    preflight.check_resumed(conditions(), conditions(accumulate=2, steps=5), "here")


class Collections(Progress):
    """Records where the loop is whenever Python collects garbage."""

    def __init__(self) -> None:
        super().__init__(None)
        self.seen: list[tuple[str, int, int]] = []  # phase, step, generation
        self._now: tuple[str, int] | None = None  # from the first step on

    def report_phase(self, name: str, step: int) -> None:
        if name == "step" and self._now is None:
            gc.set_threshold(1)
        if name == "step" or self._now is not None:
            self._now = name, step

    def __call__(self, when: str, info: dict[str, int]) -> None:
        if when == "start" and self._now is not None:
            self.seen.append((*self._now, info["generation"]))


@pytest.fixture
def collections() -> Iterator[Collections]:
    """Restore Python's collection at the end, whatever the loop made of it."""
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


def test_garbage_is_collected_outside_steps(
    collections: Collections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "COLLECTION_INTERVAL_STEPS", 5)
    often = {"eval": {"every": 2}, "checkpoint": {"every": 3}}
    spec = small_spec(data={"eval_examples": 8}, steps=6, **often)
    build_run(spec, tmp_path, report=collections).run()
    steps = [("eval", 2), ("save", 3), ("eval", 4), ("step", 5), ("eval", 6), ("save", 6)]
    assert collections.seen == [(*step, 2) for step in steps]


def test_logged_steps_of_dispatch_share_time(tmp_path: Path) -> None:
    spec = small_spec(steps_per_dispatch=4, log_every=2, checkpoint={"every": None})
    build_run(spec, tmp_path).run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    for first, other in (lines[:2], lines[2:]):
        assert first["data_s"] == pytest.approx(other["data_s"])
        assert first["wall_s"] < 2 * other["wall_s"]
        assert first["examples_per_s"] == other["examples_per_s"]


class AtFive:
    """A stop that comes at step 5."""

    def __init__(self) -> None:
        self.run: Loop[Any] | None = None

    def poll(self) -> bool:
        return self.run is not None and self.run.done_step == 5


def test_deleted_checkpoint_is_saved_again_or_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Deletes(AtFive):
        def poll(self) -> bool:
            if (is_at_five := super().poll()) and self.run is not None:
                self.run.store.wait()
                shutil.rmtree(tmp_path / "checkpoints")
            return is_at_five

    run = build_run(small_spec(checkpoint={"every": 5}), tmp_path, Deletes(), saved=4)
    with pytest.raises(Stopped, match="saved step 5"):
        run.run()
    assert [path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")] == ["5"]
    message = capsys.readouterr().out
    assert "step 4, which this run saved, is gone from" in message
    assert "starts again from step 0" in message
    assert "step 5 is gone from" in message and "saving it again" in message


def test_refused_run_keeps_saved_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path / "checkpoints")
    monkeypatch.setattr(train, "tokenizer_files", lambda data: {"tokenizer.json": b"another"})
    saved_files.save_tokenizer(folder, {"tokenizer.json": b"its own"})
    run = build_run(small_spec(), tmp_path)
    monkeypatch.setattr(run.store, "restore", lambda *_: (4, {}, {"conditions": {}}))

    def refused(*_: object) -> None:
        raise CheckpointError("another batch")

    monkeypatch.setattr(preflight, "check_resumed", refused)
    with pytest.raises(CheckpointError, match="another batch"):
        tiny.run_to_an_error(run)
    assert saved_files.read_saved_tokenizer(folder) == {"tokenizer.json": b"its own"}


def test_stop_with_occupied_step_place_is_clean(tmp_path: Path) -> None:
    spec = small_spec(checkpoint={"every": 4}, log_every=1)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "checkpoints" / "5" / "theirs").touch()
    run = build_run(spec, tmp_path, AtFive())
    with pytest.raises(Stopped, match="nothing new saved after step 4: 5 in .* is another's"):
        run.run()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "5"]


def last_line(folder: Path) -> dict[str, Any]:
    line: dict[str, Any] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return {key: line[key] for key in line if "loss" in key or key in ("step", "grad_norm")}


def test_restart_compiles_while_restoring(tmp_path: Path) -> None:
    often = {"steps_per_dispatch": 2, "log_every": 1, "eval": {"every": 9}}
    spec = small_spec(data={"eval_examples": 12}, steps=9, checkpoint={"every": 5}, **often)
    traced: dict[str, set[str]] = {}  # functions, by thread

    def note(event: str, seconds: float, **about: Any) -> None:
        if event.endswith("jaxpr_trace_duration"):
            thread = threading.current_thread().name.partition("_")[0]
            traced.setdefault(thread, set()).add(str(about.get("fun_name")))

    whole, broken = (tmp_path / name for name in ("whole", "broken"))
    build_run(spec, whole).run()
    run = build_run(spec, broken, AtFive())
    with pytest.raises(Stopped, match="step 5"):
        run.run()
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        build_run(spec, broken, saved=5).run()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    steps = {"_take_step", "_take_steps", "evaluate_state"}
    assert steps <= traced["compile"] and not steps & traced["MainThread"]
    assert last_line(broken) == last_line(whole)


class Labelled:
    """A map-style dataset whose labels are given."""

    def __init__(self, labels: list[int]) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.zeros((2, 2), np.uint8), self.labels[index]


@pytest.mark.parametrize(
    ("train", "held_out", "words"),
    [
        (
            [10] + 7 * [1],
            [0],
            "Labelled: example 0 has label 10, outside 0 to 9, the model's classes",
        ),
        ([*15 * [1], -1], [0], "Labelled: example 15 has label -1, outside 0 to 9"),
        (8 * [1], [0, 99], "Labelled: example 1 has label 99, outside 0 to 9"),
    ],
)
def test_label_out_of_range_exits_with_65(
    train: list[int], held_out: list[int], words: str, tmp_path: Path
) -> None:
    data = {"source": "torch", "dataset": f"{__name__}:Labelled", "shuffle": False}
    data |= {"args": {"labels": train}, "eval_args": {"labels": held_out}}
    spec = small_spec(data=data, steps=3)
    with pytest.raises(DataError, match=words) as caught:
        tiny.run_to_an_error(build_run(spec, tmp_path))
    assert caught.value.code == 65


class Augmented:
    """A map-style dataset that draws from the global generators, as torch's own transforms do."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = np.full((4, 4), 40 * (index % 4), np.int64)
        if random.random() < 0.5:
            image += np.random.randint(0, 60, image.shape)
        return image.astype(np.uint8), index % 4


def test_resumed_run_sees_same_augmentations(tmp_path: Path) -> None:
    data = {"source": "torch", "dataset": f"{__name__}:Augmented", "eval_args": {}}
    constant = {"schedule": {"name": "constant"}}

    def losses(folder: Path, *attempts: int) -> dict[int, float]:
        for steps in attempts:
            random.seed(steps), np.random.seed(steps)  # of a process of its own
            spec = small_spec(data=data, steps=steps, log_every=1, optimizer=constant)
            build_run(spec, folder).run()
        for name in ("metrics", "eval"):
            lines = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
            result.setdefault(name, []).append({line["step"]: line["loss"] for line in lines})
        return result["metrics"][-1]

    result: dict[str, list[dict[int, float]]] = {}
    whole, resumed = losses(tmp_path / "whole", 7), losses(tmp_path / "resumed", 3, 7)
    assert list(whole) == list(range(1, 8)) and resumed == whole
    assert result["eval"][0][7] == result["eval"][1][7]


def test_early_stopped_run_resumes_with_more_patience(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = []
    for patience in (2, 2, 4):
        early = {"metric": "eval/accuracy", "mode": "max", "patience": patience, "min_delta": 1.0}
        data = {"eval_examples": 8}
        spec = small_spec(data=data, steps=9, eval={"every": 1}, stop_early=early)
        build_run(spec, tmp_path).run()
        lines = (tmp_path / "eval.jsonl").read_text().splitlines()
        values.append([json.loads(line)["step"] for line in lines])
        reason = f"stopped early at step {patience + 1} of 9: eval/accuracy was not better than"
        assert reason in capsys.readouterr().out
    assert values == [[1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5]]
