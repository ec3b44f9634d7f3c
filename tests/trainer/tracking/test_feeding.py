"""A tracker gets each line of a run once, and nothing waits for it."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxlaunch import contract, reporting, samples, tracker_feed
from jaxlaunch.launcher.job import load
from jaxlaunch.runs import layout
from jaxlaunch.runs.journal import Journal
from jaxlaunch.samples import SampleWriter
from jaxlaunch.trainer.tracking import __main__ as program
from jaxlaunch.trainer.tracking import media

TRACKERS = """
import os
import time
class Kept:
    def __init__(self, run):
        self.file = open(run.folder + "/kept", "a")
        print("run", run.id, file=self.file, flush=True)
    def log(self, step, values):
        for name, value in values.items():
            print(step, name, value, file=self.file, flush=True)
    def close(self):
        print("closed", file=self.file, flush=True)
class Blocks(Kept):
    def log(self, step, values):
        time.sleep(3600)
class OpensLate(Kept):
    def __init__(self, run):
        time.sleep(4)
        super().__init__(run)
class NeverOpens:
    def __init__(self, run):
        time.sleep(3600)
class Crawls(Kept):
    def log(self, step, values):
        super().log(step, values)
        time.sleep(0.15)
class Raises(Kept):
    def log(self, step, values):
        raise OSError(28, "No space left on device")
class FailsAtFirst(Kept):
    def log(self, step, values):
        if step == 3 and not os.path.exists("failed"):
            open("failed", "w").close()
            raise OSError(104, "Connection reset by peer")
        super().log(step, values)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(TRACKERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(contract.UID, "uid-of-a-job")
    return tmp_path


def run_feed(
    folder: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    last: int,
    variables: Mapping[str, str] | None = None,
) -> str | None:
    """Return the message about the tracker after steps `first` + 1 to `last`."""
    settings = {contract.TRACKER: json.dumps({"tracker": f"mine:{name}", "name": "job"})}
    for variable, value in (variables or settings).items():
        monkeypatch.setenv(variable, value)
    journals = {
        journal_name: Journal(str(folder / f"{journal_name}.jsonl"), first)
        for journal_name in ("metrics", "eval", "samples")
    }
    started = tracker_feed.start_feed(str(folder))
    assert started is not None
    for step in range(first + 1, last + 1):
        journals["metrics"].write(step, {"loss": 1 / step, "mfu": None, "time": 5.0})
        if step % 2 == 0:
            journals["eval"].write(step, {"loss": 2 / step})
            journals["samples"].write(step, {"samples": [{"prompt": "a", "text": "b"}]})
    if name in ("Raises", "FailsAtFirst"):  # the training takes longer than that
        started._process.wait()
    for journal in journals.values():
        journal.close()
    return started.close()


def test_each_line_is_sent_once_across_restarts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first, last in ((0, 4), (2, 5), (5, 5), (3, 8)):  # resumed at 2, 5 and 3
        assert run_feed(folder, "Kept", monkeypatch, first, last) is None
        monkeypatch.setenv(contract.UID, f"another start {last}")
    lines = (folder / "kept").read_text().splitlines()
    assert len({line for line in lines if line.startswith("run ")}) == 1
    assert lines.count("closed") == 4
    sent = [line for line in lines if line[0].isdigit()]
    expected = [
        line
        for step in range(1, 9)
        for line in (
            f"{step} train/loss {1 / step}",
            *([f"{step} eval/loss {2 / step}"] if step % 2 == 0 else []),
        )
    ]
    assert sent == expected


def test_time_limit_starts_when_the_tracker_opens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_feed, "SEND_TIMEOUT_S", 3.0)
    assert run_feed(folder, "OpensLate", monkeypatch, 0, 4) is None
    lines = (folder / "kept").read_text().splitlines()
    assert len(lines) == 8 and lines[-1] == "closed"
    monkeypatch.setattr(tracker_feed, "OPEN_TIMEOUT_S", 1.0)
    message = run_feed(folder, "NeverOpens", monkeypatch, 0, 4)
    assert message is not None
    assert "was not open 1 s after the training" in message
    assert str(folder / tracker_feed.LOG_FILE) in message


def test_line_is_not_sent_again_after_a_timeout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_feed, "SEND_TIMEOUT_S", 1.0)
    message = run_feed(folder, "Crawls", monkeypatch, 0, 12)
    assert message is not None and "was still busy 1 s after the training" in message
    assert (folder / "kept").read_text().splitlines()[-1] == "closed"
    monkeypatch.setattr(tracker_feed, "SEND_TIMEOUT_S", 60.0)
    assert run_feed(folder, "Crawls", monkeypatch, 12, 12) is None
    sent = [line for line in (folder / "kept").read_text().splitlines() if "train/loss" in line]
    assert sent == [f"{step} train/loss {1 / step}" for step in range(1, 13)]


@pytest.mark.parametrize(
    ("name", "says"), [("Blocks", "was still busy"), ("Raises", "failed (exit 1)")]
)
def test_blocked_or_failed_tracker_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.setattr(tracker_feed, "SEND_TIMEOUT_S", 1.0 if name == "Blocks" else 60.0)
    monkeypatch.setattr(tracker_feed, "CLOSE_TIMEOUT_S", 1.0)
    message = run_feed(folder, name, monkeypatch, 0, 4)
    assert (
        message is not None and says in message and str(folder / tracker_feed.LOG_FILE) in message
    )
    if name == "Raises":
        assert "No space left on device" in (folder / tracker_feed.LOG_FILE).read_text()
    monkeypatch.setattr(tracker_feed, "SEND_TIMEOUT_S", 60.0)
    assert run_feed(folder, "Kept", monkeypatch, 0, 4) is None  # another tracker gets all
    assert (
        len([line for line in (folder / "kept").read_text().splitlines() if "train/loss" in line])
        == 4
    )


def test_failed_tracker_is_started_again_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run_feed(folder, "FailsAtFirst", monkeypatch, 0, 4) is None
    sent = [line for line in (folder / "kept").read_text().splitlines() if "train/loss" in line]
    assert sent == [f"{step} train/loss {1 / step}" for step in range(1, 5)]
    assert "Connection reset by peer" in (folder / tracker_feed.LOG_FILE).read_text()


# Stands for W&B without a key, whose process is killed with what it has not written.
OFFLINE_WANDB = """
import json, os, pathlib
class Table(dict):
    pass
class Image(dict):
    def __init__(self, picture, caption):
        super().__init__(size=picture.size, caption=caption)
class Run:
    offline, url, step = True, None, 0
    def __init__(self, settings):
        self.rows, self.settings, folder = [], settings, pathlib.Path(settings["dir"], "wandb")
        starts = len(list(folder.glob("offline-run-*")))
        self.dir = str(folder / f"offline-run-{starts}-{settings['id']}" / "files")
        os.makedirs(self.dir)
    def log(self, values, step):
        self.rows.append([step, values])
    def finish(self):
        if not os.path.exists("killed"):
            os._exit(9)
        pathlib.Path(self.dir, "run").write_text(json.dumps([self.settings, self.rows]))
def init(**settings):
    return Run(settings)
"""


def test_offline_run_is_one_complete_folder_with_the_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that is killed takes its lines along; the next one has all, of the job as it is."""
    (folder / "wandb.py").write_text(OFFLINE_WANDB)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    # There is no netrc with a key.
    monkeypatch.setenv("HOME", str(folder))
    job = "{name: job, accelerator: {type: cpu}, command: [a], env: {TOKEN: x}, hosts: HOSTS, "
    job += "tracker: {name: wandb, project: vision}, labels: {team: vision, baseline: ''}}"
    for hosts, first, last in ((2, 0, 4), (3, 2, 6)):
        spec = load.parse_job(job.replace("HOSTS", str(hosts)))
        variables = spec.tracking_variables("experiments", "lr-sweep")
        message = run_feed(folder, "", monkeypatch, first, last, variables)
        assert (message is None) == (first == 2), message
        (folder / "killed").touch()
    (start,) = (folder / "wandb").glob("offline-run-*")
    settings, rows = json.loads((start / "files" / "run").read_text())
    assert layout.read_tracker_place(folder) == ("command", f"wandb sync {start}")
    assert [settings[key] for key in ("project", "group", "tags", "resume")] == [
        "vision",
        "lr-sweep",
        ["team=vision", "baseline"],
        "allow",
    ]
    assert settings["config"]["hosts"] == 3 and "env" not in settings["config"]
    losses = [(step, row["train/loss"]) for step, row in rows if "train/loss" in row]
    assert losses == [(step, 1 / step) for step in range(1, 7)]
    samples = [(step, row["samples"]) for step, row in rows if "samples" in row]
    wanted = {"columns": ["prompt", "text"], "data": [["a", "b"]]}
    assert samples == [(step, wanted) for step in (2, 4, 6)]


CLASSIFICATION = {
    "per_class": [
        {"label": label, "examples": 2, "precision": 1.0, "recall": 0.5, "f1": None}
        for label in ("cat", "dog | wolf")
    ],
    "confusion": [[2, 0], [1, 1]],
}
PAIRS = [["cat", "cat", 2], ["cat", "dog | wolf", 0], ["dog | wolf", "cat", 1]]


def write_classification(folder: Path, step: int) -> None:
    (folder / contract.CLASSIFICATION).write_text(json.dumps({"step": step, **CLASSIFICATION}))


def test_pictures_texts_and_confusion_are_sent_once_across_restarts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B, whose folder of the first start is lost, gets what is still in the run folder."""
    (folder / "wandb.py").write_text(OFFLINE_WANDB)
    (folder / "killed").touch()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(folder))
    variables = {contract.TRACKER: json.dumps({"tracker": "wandb", "name": "job"})}
    for first, last in ((0, 4), (2, 6)):
        writer = SampleWriter(str(folder / samples.FOLDER), pytest.fail)
        for step in range(first + 2, last + 1, 2):
            picture = np.full((3, 5), step / 10)
            items = samples.check_items({"digits": picture}, f"at {step}", is_kept=True)
            writer.add_items(step, items)
        writer.flush()
        write_classification(folder, last)
        assert run_feed(folder, "", monkeypatch, first, last, variables) is None
    (start,) = (folder / "wandb").glob("offline-run-*")
    _, rows = json.loads((start / "files" / "run").read_text())
    steps = [step for step, _ in rows]
    assert steps == sorted(steps), "W&B drops what comes after a later step"
    reports = [(step, row) for step, row in rows if "reported/digits" in row]
    assert [step for step, _ in reports] == [2, 4, 6]
    for step, row in reports:
        assert row == {
            "reported/digits": {"size": [5, 3], "caption": f"step {step}"},
            "reported/text": {"columns": ["step", "text"], "data": [[step, f"at {step}"]]},
        }
    ((step, row),) = [(step, row) for step, row in rows if "eval/confusion" in row]
    assert step == 6 and row["eval/classes"]["data"][1] == ["dog | wolf", 2, 1.0, 0.5, None]
    assert row["eval/confusion_table"]["data"][:3] == PAIRS
    assert row["eval/confusion"]["caption"] == "step 6"


def test_metrics_that_are_written_during_a_read_come_before_their_evaluation(
    folder: Path,
) -> None:
    names = ("metrics", "eval")
    metrics, evals = (Journal(str(folder / f"{name}.jsonl"), 0) for name in names)
    readers = {
        name: program._JournalReader(str(folder / f"{name}.jsonl"), may_merge=False)
        for name in names
    }
    metrics.write(1, {"loss": 1.0})
    read_evals = readers["eval"].read_rows

    def write_and_read(**options: Any) -> Iterator[dict[str, Any]]:
        for step in (2, 3):
            metrics.write(step, {"loss": 1 / step})
        evals.write(2, {"loss": 0.5})
        yield from read_evals(**options)

    readers["eval"].read_rows = write_and_read  # type: ignore[method-assign]
    rows = program._read_rows(readers, is_last=False)
    # The metrics of step 3 would overtake an evaluation that is written now.
    assert [row[:2] for row in rows] == [(1, "metrics"), (2, "metrics"), (2, "eval")]
    readers["eval"].read_rows = read_evals  # type: ignore[method-assign]
    assert [row[:2] for row in program._read_rows(readers, is_last=False)] == [(3, "metrics")]
    for file in (metrics, evals, *(reader._file for reader in readers.values())):
        assert file is not None
        file.close()


def test_media_wait_for_the_metrics_of_earlier_steps(folder: Path) -> None:
    """A report of an earlier attempt beyond the resumed step must not overtake the metrics."""
    reader = media.MediaReader(str(folder))
    reported = folder / samples.FOLDER
    reported.mkdir()
    for step in (3, 8):
        path = reported / f"{step}.json"
        path.write_text(json.dumps({"samples": [{"name": "", "text": "a"}]}))
        os.utime(path, (0, 0))

    def steps_at(newest_step: int, *, is_last: bool = False) -> list[int]:
        sent = {media.MediaReader.REPORTED: 2}
        rows = reader.read_media(sent, newest_step, is_last=is_last)
        return [step for step, _, _ in rows]

    assert steps_at(2) == [] and steps_at(3) == [3] and steps_at(8) == [3, 8]
    # A program that reports no metrics at all has nothing to wait for.
    assert steps_at(-1) == [3, 8] and steps_at(2, is_last=True) == [3, 8]
    os.utime(reported / "8.json")
    # The program may still add to the newest step.
    assert steps_at(8) == [3] and steps_at(9) == [3, 8]


def test_damaged_media_are_left_out() -> None:
    items = [None, {"image": "data:image/png;base64,eA=="}, {"image": 3}, {"name": "a", "text": ""}]
    assert media.convert_reported({"samples": items}) == media.Media({}, {"reported/a": ""}, {})
    assert media.convert_reported({"samples": 3}) == media.Media({}, {}, {})
    record = {"per_class": CLASSIFICATION["per_class"], "confusion": [[1]]}
    assert media.CONFUSION not in media.convert_classification(record).tables


def test_many_classes_are_a_table_of_the_confused_pairs() -> None:
    confused = [{"label": "a|b", "predicted": "c", "examples": 3}]
    record = {"per_class": CLASSIFICATION["per_class"], "confused": confused}
    images, _, tables = media.convert_classification(record)
    assert not images and tables[media.CONFUSION].rows == [["a|b", "c", 3]]
    assert tables[media.CONFUSION].to_markdown().splitlines()[-1] == "| a\\|b | c | 3 |"


def test_confusion_is_drawn_in_shares_of_each_label() -> None:
    png = media.draw_confusion(["cat", "dog"], [[4, 0], [1, 3]])
    assert png is not None
    with Image.open(io.BytesIO(png)) as file:
        picture = file.convert("RGB")
    side = picture.width
    assert picture.size == (side, side)
    # The corners of the cells, which no text covers.
    colours = [
        [picture.getpixel((side - 61 * (2 - column) + 5, side - 61 * (2 - row) + 5))[0]
         for column in range(2)]
        for row in range(2)
    ]  # fmt: skip
    assert colours[0] == [8, 255] and 8 < colours[1][1] < colours[1][0] < 255


def test_place_of_an_earlier_start_is_not_announced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"kind": "command", "text": "wandb sync earlier"}
    state = {"tracker": "mine:NeverOpens", "place": place, "feed_id": "earlier"}
    (folder / layout.TRACKER).write_text(json.dumps(state))
    monkeypatch.setenv(contract.TRACKER, json.dumps({"tracker": "mine:NeverOpens", "name": "job"}))
    feed = tracker_feed.start_feed(str(folder))
    assert feed is not None and feed.announce_place() is None
    (folder / layout.TRACKER).write_text(json.dumps(state | {"feed_id": feed._feed_id}))
    assert feed.announce_place() == "tracker: wandb sync earlier" and feed.announce_place() is None
    feed._process.kill()
    feed.close_at_stop()


def test_program_that_reports_prints_where_its_tracker_shows_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(contract.TRACKER, json.dumps({"tracker": "tensorboard", "name": "job"}))
    monkeypatch.setattr(reporting, "PLACE_PERIOD_S", 0.0)
    tracker = reporting.LazyTracker(str(folder), pytest.fail)
    # A program that reports only pictures has a tracker, too, which waits for no metrics.
    tracker.start()
    until = time.monotonic() + 60
    while not (text := capfd.readouterr().err) and time.monotonic() < until:
        time.sleep(0.1)
        tracker.start()
    assert text == f"tracker: tensorboard --logdir {folder}/tensorboard\n"
    tracker.start()
    tracker.close(stops=False)
    assert not capfd.readouterr().err


# JAX, which other tests of this process have imported, warns of forks.
@pytest.mark.filterwarnings("ignore:os.fork")
def test_program_whose_fork_outlives_it_has_every_line_at_its_tracker(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent writes the last line a moment after the program has ended."""
    settings = {"tracker": "mine:Kept", "name": "job"}
    monkeypatch.setenv(contract.TRACKER, json.dumps(settings))
    notes: list[str] = []
    tracker = reporting.LazyTracker(str(folder), notes.append)
    tracker.follow_step(1)
    journal = Journal(str(folder / "metrics.jsonl"), 0)
    journal.write(1, {"loss": 1.0})
    tracker.follow_step(2)
    # Such as a worker that reads data: it has the pipe to the tracker's process.
    if not (worker := os.fork()):
        signal.pause()
    late = threading.Timer(1.0, journal.write, (2, {"loss": 0.5}))
    late.start()
    try:
        tracker.close(stops=False)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    late.join()
    journal.close()
    lines = (folder / "kept").read_text().splitlines()
    assert lines[1:] == ["1 train/loss 1.0", "2 train/loss 0.5", "closed"]
    assert not notes


def test_tracker_that_is_not_installed_is_a_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """W&B's folder of runs in the working folder is not the package."""
    (folder / "trackio").mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv(contract.TRACKER, json.dumps({"tracker": "trackio", "name": "job"}))
    notes: list[str] = []
    reporting.LazyTracker(str(folder), notes.append).follow_step(1)
    message = "no tracker: the package trackio is not installed here"
    assert notes == [f"{message}: install it next to jaxlaunch, such as with `pip install trackio`"]
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("key", "variable", "state", "project"),
    [
        (None, None, {}, "folder"),
        (None, "mine", {}, "mine"),
        ("key", "mine", {}, "key"),
        # A run stays in the project in which it began.
        ("key", None, {"project": "first"}, "first"),
    ],
)
def test_project_is_the_key_the_variable_or_the_folder(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    variable: str | None,
    state: dict[str, str],
    project: str,
) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_PROJECT", variable)
    (folder / layout.TRACKER).write_text(json.dumps({"tracker": "wandb", "id": "x", **state}))
    settings = {"tracker": "wandb", "name": "job", "project": key, "default_project": "folder"}
    new = program._name_project(settings)
    assert program._TrackerState(str(folder), "wandb", "uid", new).project == project


def test_job_without_a_tracker_starts_no_feed(folder: Path) -> None:
    assert tracker_feed.start_feed(str(folder)) is None
    assert not (folder / tracker_feed.LOG_FILE).exists()
