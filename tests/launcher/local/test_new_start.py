"""The starts of a run on this machine: what each leaves, and what the next makes of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.local import bookkeeping
from jaxlaunch.records.summary import AttemptProgress, Summary
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs.run_folder import RunFolder, RunStarts


def dump_job(lr: float, **keys: Any) -> str:
    return json.dumps({"name": "t", "train": {"optimizer": {"lr": lr, "b1": 0.9}}, **keys})


def begin_start(folder: Path, uid: str, text: str) -> RunStarts:
    """A start on its way: its agents may write."""
    bookkeeping.begin_start(folder, uid, text, folder / "checkpoints", pytest.fail)
    return RunStarts(RunFolder(folder, pytest.fail), uid)


def make_ended(uid: str, code: int | None, first: int | None, step: int | None) -> Summary:
    verdict = None if code is None else verdict_for_code(code, "it ended")
    progress = AttemptProgress(uid, 0, 1, 1.0, 2.0, first_step=first)
    return Summary(
        verdict, step=step, seconds={"step": 1.0}, restarts={}, committed=step or None, of=progress
    )


def train_start(
    folder: Path, uid: str, text: str, first: int | None, step: int | None, code: int | None = 0
) -> None:
    """A start that ended; one without a code was killed with its agents."""
    begin_start(folder, uid, text).write_summary(make_ended(uid, code, first, step))


def read_json(folder: Path, name: str = "summary.json") -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / name).read_text())
    return record


def read_tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def read_starts(folder: Path) -> list[tuple[Any, ...]]:
    names = ("start", "code", "first_step", "last_step")
    return [tuple(row[name] for name in names) for row in read_json(folder)["starts"]]


def read_lr(folder: Path, name: str = "job.yaml") -> float:
    return float(read_json(folder, name)["train"]["optimizer"]["lr"])


def test_summary_lists_starts_and_job_is_of_newest_trained_one(
    tmp_path: Path,
) -> None:
    train_start(tmp_path, "a", dump_job(1.0), 1, 6)
    first = read_tree(tmp_path / "starts" / "1")
    train_start(tmp_path, "b", dump_job(2.0), 7, 0, code=64)
    assert (
        read_lr(tmp_path),
        read_json(tmp_path)["status"],
        bookkeeping.find_reached_step(tmp_path),
    ) == (
        1.0,
        "done",
        6,
    )
    train_start(tmp_path, "c", dump_job(1.0, env={"A": "b"}), 7, 6)
    assert (
        read_lr(tmp_path),
        read_json(tmp_path)["status"],
        bookkeeping.find_reached_step(tmp_path),
    ) == (
        1.0,
        "done",
        6,
    )
    train_start(tmp_path, "d", dump_job(3.0), 7, 9, code=80)
    assert (
        read_lr(tmp_path),
        read_json(tmp_path)["status"],
        bookkeeping.find_reached_step(tmp_path),
    ) == (
        3.0,
        "stopped",
        None,
    )
    assert read_starts(tmp_path) == [
        (1, 0, 1, 6),
        (2, 64, None, None),
        (3, 0, None, 6),
        (4, 80, 7, 9),
    ]
    changed = [row["changed"] for row in read_json(tmp_path)["starts"]]
    assert changed == [
        {},
        {"train.optimizer.lr": [1.0, 2.0]},
        {"env": ["…", "…"]},
        {"train.optimizer.lr": [1.0, 3.0]},
    ]
    assert read_tree(tmp_path / "starts" / "1") == first
    assert [read_lr(tmp_path, f"starts/{number}/job.yaml") for number in (1, 2, 3, 4)] == [
        1.0,
        2.0,
        1.0,
        3.0,
    ]
    assert [
        read_json(tmp_path, f"starts/{number}/summary.json")["of"]["uid"] for number in (1, 2, 3, 4)
    ] == list("abcd")


def test_start_knows_earlier_training_with_the_same_checkpoints(
    tmp_path: Path,
) -> None:
    def has_written(uid: str, **checkpoint: Any) -> bool:
        begin_start(tmp_path, uid, json.dumps({"name": "t", "train": {"checkpoint": checkpoint}}))
        return RunStarts(RunFolder(tmp_path, pytest.fail), uid).has_earlier_checkpoints

    assert not has_written("a", path="/x")
    assert not has_written("b", path="/x")
    train_start(
        tmp_path, "c", json.dumps({"name": "t", "train": {"checkpoint": {"path": "/x"}}}), 1, 6
    )
    assert has_written("d", path="/x") and not has_written("e", path="/y")


def test_job_is_of_newest_start_until_one_trained(tmp_path: Path) -> None:
    train_start(tmp_path, "a", dump_job(1.0), 1, 0, code=65)
    begin_start(tmp_path, "b", dump_job(2.0))
    assert read_lr(tmp_path) == 2.0 and read_starts(tmp_path) == [
        (1, 65, None, None),
        (2, None, None, None),
    ]


def test_program_without_steps_counts_as_trained_when_done(tmp_path: Path) -> None:
    train_start(tmp_path, "a", dump_job(1.0), None, None)
    train_start(tmp_path, "b", dump_job(2.0), None, None, code=70)
    assert read_lr(tmp_path) == 1.0
    train_start(tmp_path, "c", dump_job(3.0), None, None)
    assert read_lr(tmp_path) == 3.0


def test_start_keeps_its_first_step_in_later_attempts(tmp_path: Path) -> None:
    starts = begin_start(tmp_path, "a", dump_job(1.0))
    for first, step, row in (
        (1, 0, (None, None)),
        (1, 9, (1, 9)),
        (1, 0, (1, 9)),
        (6, 5, (1, 9)),
        (6, 7, (1, 7)),
    ):
        starts.write_summary(make_ended("a", None, first, step))
        assert read_starts(tmp_path)[0][2:] == row or row == (1, 9)
    assert read_starts(tmp_path) == [(1, None, 1, 7)]


@pytest.mark.parametrize(
    "has_told", [True, False], ids=["it told its first step", "it had no time to"]
)
@pytest.mark.parametrize("committed", [None, 8], ids=["nothing saved", "a step saved"])
def test_killed_start_is_closed_by_the_next_with_step_on_disk(
    tmp_path: Path, committed: int | None, has_told: bool
) -> None:
    train_start(tmp_path, "a", dump_job(1.0), 1, 6)
    save_step(tmp_path, 6)
    train_start(
        tmp_path, "b", dump_job(2.0), 7 if has_told else None, 6 if has_told else None, code=None
    )
    if committed is not None:
        save_step(tmp_path, committed)
    begin_start(tmp_path, "c", dump_job(3.0))
    summary = read_json(tmp_path, "starts/2/summary.json")
    assert (summary["status"], summary["verdict"]["cause"], summary["saved"]) == (
        "failed",
        "lost",
        committed or 6,
    )
    last = committed or (6 if has_told else None)
    assert read_starts(tmp_path)[1:] == [
        (2, contract.LOST, committed and 7, last),
        (3, None, None, None),
    ]
    assert read_lr(tmp_path) == (1.0 if committed is None else 2.0)
    (record,) = RunFolder(tmp_path, pytest.fail).read_records("b")
    assert (record.first_committed, record.last_committed) == (committed, committed)


def save_step(folder: Path, step: int) -> None:
    """A whole step, and half of a later one."""
    (folder / "checkpoints" / str(step)).mkdir(parents=True)
    (folder / "checkpoints" / str(step) / contract.MANIFEST).write_text("{}")
    (folder / "checkpoints" / str(step + 1)).mkdir()


class Killed(BaseException):
    pass


class Kills:
    """Raises Killed in place of the next change of the file system, after `left` of them."""

    def __init__(self, patch: pytest.MonkeyPatch, remaining: int) -> None:
        self._left = remaining
        for owner, name in (
            (Path, "mkdir"),
            (Path, "write_bytes"),
            (Path, "replace"),
            (Path, "rename"),
            (RunFolder, "append_record"),
        ):
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if self._left == 0:
                raise Killed
            self._left -= 1
            return real(*arguments, **options)

        return counted


def test_next_start_succeeds_after_kill_at_any_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for remaining in itertools.count():  # until none of its changes is prevented
        folder = tmp_path / str(remaining)
        train_start(folder, "a", dump_job(1.0), 1, 6, code=None)
        with monkeypatch.context() as patch:
            Kills(patch, remaining)
            try:
                begin_start(folder, "b", dump_job(2.0))
                break
            except Killed:
                pass
        begin_start(folder, "c", dump_job(3.0)).write_summary(make_ended("c", 0, 7, 9))
        rows = read_starts(folder)
        assert rows[0] == (1, contract.LOST, 1, 6) and rows[-1] == (len(rows), 0, 7, 9)
        assert read_lr(folder) == 3.0 and read_lr(folder, "starts/1/job.yaml") == 1.0
        assert read_json(folder, "starts/1/summary.json")["step"] == 6
        assert read_json(folder, f"starts/{len(rows)}/summary.json")["of"]["uid"] == "c"
    assert remaining > 6


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"starts": 7}', '{"starts": []}', '{"starts": [{"start": 1}]}']
)
def test_unreadable_summary_is_rebuilt_from_records(tmp_path: Path, text: str) -> None:
    train_start(tmp_path, "a", dump_job(1.0), 1, 6)
    train_start(tmp_path, "b", dump_job(2.0), 7, 9)
    (tmp_path / "summary.json").write_text(text)
    begin_start(tmp_path, "c", dump_job(3.0))
    assert (
        read_starts(tmp_path) == [(1, 0, 1, 6), (2, 0, 7, 9), (3, None, None, None)]
        and read_lr(tmp_path) == 2.0
    )


def test_saved_step_is_known_before_it_is_restored(
    tmp_path: Path,
) -> None:
    (tmp_path / "checkpoints" / "63").mkdir(parents=True)
    (tmp_path / "checkpoints" / "63" / contract.MANIFEST).touch()
    assert begin_start(tmp_path, "one", dump_job(0.1)).known_saved_step == 63
    assert read_json(tmp_path)["saved"] == 63
