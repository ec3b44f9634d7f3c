"""A tracker gets each line of a run once, and nothing waits for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.runs.journal import Journal
from jaxlaunch.trainer.tracking import tracker_feed

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
        time.sleep(10)
        super().__init__(run)
class NeverOpens:
    def __init__(self, run):
        time.sleep(3600)
class Crawls(Kept):
    def log(self, step, values):
        super().log(step, values)
        time.sleep(0.3)
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
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, first: int, last: int
) -> str | None:
    """Return the message about the tracker after steps `first` + 1 to `last`."""
    monkeypatch.setenv(contract.TRACKER, json.dumps({"tracker": f"mine:{name}", "name": "job"}))
    journals = {
        journal_name: Journal(str(folder / f"{journal_name}.jsonl"), first)
        for journal_name in ("metrics", "eval")
    }
    started = tracker_feed.start_feed(str(folder))
    assert started is not None
    for step in range(first + 1, last + 1):
        journals["metrics"].write(step, {"loss": 1 / step, "mfu": None, "time": 5.0})
        if step % 2 == 0:
            journals["eval"].write(step, {"loss": 2 / step})
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
    monkeypatch.setattr(tracker_feed, "ENDS_S", 8.0)
    assert run_feed(folder, "OpensLate", monkeypatch, 0, 4) is None
    lines = (folder / "kept").read_text().splitlines()
    assert len(lines) == 8 and lines[-1] == "closed"
    monkeypatch.setattr(tracker_feed, "OPENS_S", 1.0)
    message = run_feed(folder, "NeverOpens", monkeypatch, 0, 4)
    assert message is not None
    assert "was not open 1 s after the training" in message
    assert str(folder / tracker_feed.LOG_FILE) in message


def test_line_is_not_sent_again_after_a_timeout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_feed, "ENDS_S", 1.0)
    message = run_feed(folder, "Crawls", monkeypatch, 0, 12)
    assert message is not None and "was still busy 1 s after the training" in message
    assert (folder / "kept").read_text().splitlines()[-1] == "closed"
    monkeypatch.setattr(tracker_feed, "ENDS_S", 60.0)
    assert run_feed(folder, "Crawls", monkeypatch, 12, 12) is None
    sent = [line for line in (folder / "kept").read_text().splitlines() if "train/loss" in line]
    assert sent == [f"{step} train/loss {1 / step}" for step in range(1, 13)]


@pytest.mark.parametrize(
    ("name", "says"), [("Blocks", "was still busy"), ("Raises", "failed (exit 1)")]
)
def test_blocked_or_failed_tracker_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.setattr(tracker_feed, "ENDS_S", 1.0 if name == "Blocks" else 60.0)
    monkeypatch.setattr(tracker_feed, "CLOSES_S", 1.0)
    message = run_feed(folder, name, monkeypatch, 0, 4)
    assert (
        message is not None and says in message and str(folder / tracker_feed.LOG_FILE) in message
    )
    if name == "Raises":
        assert "No space left on device" in (folder / tracker_feed.LOG_FILE).read_text()
    monkeypatch.setattr(tracker_feed, "ENDS_S", 60.0)
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


def test_job_without_a_tracker_starts_no_feed(folder: Path) -> None:
    assert tracker_feed.start_feed(str(folder)) is None
    assert not (folder / tracker_feed.LOG_FILE).exists()
