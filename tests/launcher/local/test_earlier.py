"""What an earlier run left, beside a run that is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.leader.run_folder import RunFolder
from jaxlaunch.launcher.local.earlier import KEPT, Earlier
from jaxlaunch.records.summary import Of, Summary
from jaxlaunch.records.verdict import of_code


def summary(code: int | None, step: int | None, uid: str, stepped_s: float = 0.0) -> Summary:
    verdict = None if code is None else of_code(code, "it ended")
    of = Of(uid, 0, 1, 1.0, 2.0)
    return Summary(verdict, step=step, seconds={"step": stepped_s}, restarts={}, of=of)


def finished(folder: Path, code: int = 0, step: int | None = 57) -> dict[str, bytes]:
    """The record of an earlier run."""
    (folder / "logs").mkdir(parents=True)
    RunFolder(folder, print).keep(summary(code, step, "first", 5.0))
    (folder / "job.yaml").write_text("name: first\n")
    (folder / "attempts.jsonl").write_text("{}\n")
    (folder / "logs/rank-0.log").write_text("step 57\n")
    return tree(folder)


def refused(folder: Path, stepped_s: float = 0.0) -> Summary:
    """What another run writes until it is refused."""
    draft = folder / ".job.yaml.draft"
    draft.write_text("name: second\n")
    draft.replace(folder / "job.yaml")
    for name in ("attempts.jsonl", "logs/rank-0.log", "logs/rank-1.log"):
        with (folder / name).open("a") as file:
            file.write("second\n")
    (folder / "logs/rank-0.log").replace(folder / "logs/rank-0.log.1")
    found = summary(contract.NO_CHECKPOINT, 0, "second", stepped_s)
    RunFolder(folder, print).keep(found)
    return found


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("links", [True, False])
def test_a_refused_run_leaves_the_record_of_the_one_before_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *names: (_ for _ in ()).throw(OSError("no links here")))
    before = finished(tmp_path)
    earlier = Earlier(tmp_path)
    earlier.keep()
    assert refused(tmp_path).is_refused(is_train=True) and earlier.step == 57
    earlier.restore()
    assert tree(tmp_path) == before and not (tmp_path / KEPT).exists()


def test_what_a_killed_launcher_kept_is_put_back_by_the_next(tmp_path: Path) -> None:
    before = finished(tmp_path)
    Earlier(tmp_path).keep()
    refused(tmp_path)
    earlier = Earlier(tmp_path)
    earlier.keep()
    assert earlier.step == 57
    earlier.restore()
    assert tree(tmp_path) == before


def test_a_restore_that_was_killed_half_way_is_ended_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = finished(tmp_path)
    earlier = Earlier(tmp_path)
    earlier.keep()
    refused(tmp_path)
    replaced, real = [], os.replace

    def dies(source: Path, target: Path) -> None:
        if len(replaced) == 2:
            raise KeyboardInterrupt
        replaced.append(target)
        real(source, target)

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        earlier.restore()
    monkeypatch.undo()
    again = Earlier(tmp_path)
    again.keep()
    again.restore()
    assert tree(tmp_path) == before


def test_a_killed_run_that_had_stepped_is_the_record_from_then_on(tmp_path: Path) -> None:
    finished(tmp_path)
    Earlier(tmp_path).keep()
    refused(tmp_path, stepped_s=3.0)
    Earlier(tmp_path).keep()
    assert json.loads((tmp_path / "summary.json").read_text())["of"]["uid"] == "second"
    assert (tmp_path / "job.yaml").read_text() == "name: second\n"


def test_a_run_that_never_stepped_is_no_record_to_keep(tmp_path: Path) -> None:
    finished(tmp_path, contract.STARTUP, 0)
    earlier = Earlier(tmp_path)
    earlier.keep()
    assert not earlier.is_kept and not (tmp_path / KEPT).exists()


@pytest.mark.parametrize(
    ("code", "stepped_s", "answer"), [(64, 0, True), (70, 0, True), (78, 3, False), (83, 0, False), (79, 0, False)]
)
def test_refused_is_what_is_wrong_in_itself_before_its_first_step(code: int, stepped_s: float, answer: bool) -> None:
    assert summary(code, 0, "u", stepped_s).is_refused(is_train=True) is answer


ABSENT = "rank 0 could not be started: nope: No such file or directory"
RAISED = "rank 0 raised: RuntimeError: a worker could not be started: no room"


@pytest.mark.parametrize(
    ("code", "message", "restarts", "answer"),
    [
        (contract.STARTUP, ABSENT, {}, True),
        (contract.STARTUP, RAISED, {}, False),
        (contract.STARTUP, "rank 0 raised: KeyError: 3; so did the attempt before", {"crash": 1}, False),
        (contract.STARTUP, ABSENT, {"crash": 1}, False),
        (contract.BAD_SPEC, "host 1 has another spec", {}, True),
        (contract.PREEMPTED, "stopped", {}, False),
        (contract.LOST, "lost", {}, False),
    ],
)
def test_a_program_of_the_job_s_own_that_ran_is_not_refused(
    code: int, message: str, restarts: dict[str, int], answer: bool
) -> None:
    found = Summary(of_code(code, message, rank=0), step=None, seconds={"init": 9.0}, restarts=restarts)
    assert found.is_refused(is_train=False) is found.is_void(is_train=False) is answer


@pytest.mark.parametrize("code", [77, 79, 80, 81, 82, 83, 84, 137, None])
def test_a_run_of_the_trainer_that_never_stepped_is_no_record_however_it_ended(code: int | None) -> None:
    assert summary(code, None, "u").is_void(is_train=True)
    assert not summary(code, 5, "u", stepped_s=1.0).is_void(is_train=True)
    assert not summary(code, None, "u").is_void(is_train=False)


def test_a_run_with_nothing_left_to_train_is_a_record() -> None:
    assert not summary(contract.DONE, 57, "u").is_void(is_train=True)


def test_a_launcher_killed_before_its_agents_wrote_anything_leaves_the_record_of_the_run_before(tmp_path: Path) -> None:
    before = finished(tmp_path)
    Earlier(tmp_path).keep()
    draft = tmp_path / ".job.yaml.draft"
    draft.write_text("name: second\n")
    draft.replace(tmp_path / "job.yaml")
    earlier = Earlier(tmp_path)
    earlier.keep()
    assert tree(tmp_path)["job.yaml"] == before["job.yaml"]
    assert earlier.restore() and tree(tmp_path) == before


@pytest.mark.parametrize(("kind", "kept"), [("train: {task: 'a:B'}", "first"), ("command: ['true']", "second")])
def test_of_a_run_killed_with_its_launcher_only_a_program_that_may_have_worked_is_kept(
    tmp_path: Path, kind: str, kept: str
) -> None:
    finished(tmp_path)
    Earlier(tmp_path).keep()
    (tmp_path / "job.yaml").unlink()
    (tmp_path / "job.yaml").write_text(f"name: second\naccelerator: {{type: cpu}}\n{kind}\n")
    RunFolder(tmp_path, print).keep(summary(None, None, "second"))
    Earlier(tmp_path).keep()
    assert json.loads((tmp_path / "summary.json").read_text())["of"]["uid"] == kept


def test_evaluations_are_part_of_the_record(tmp_path: Path) -> None:
    finished(tmp_path)
    (tmp_path / "eval.jsonl").write_text("{}\n")
    before = tree(tmp_path)
    earlier = Earlier(tmp_path)
    earlier.keep()
    with (tmp_path / "eval.jsonl").open("a") as file:
        file.write("second\n")
    assert earlier.restore() and tree(tmp_path) == before


def test_what_was_kept_and_is_gone_cannot_be_put_back(tmp_path: Path) -> None:
    finished(tmp_path)
    earlier = Earlier(tmp_path)
    earlier.keep()
    shutil.rmtree(tmp_path / KEPT)
    before = tree(tmp_path)
    assert not earlier.restore() and tree(tmp_path) == before
