from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlaunch import user_cache
from jaxlaunch.launcher.jobs.status.job_status import JobStatus, State
from jaxlaunch.launcher.local import found, listed, lock, run_folders
from tests.launcher.report import made_runs

opened: list[str] | None = None  # while a test looks


def _note(event: str, arguments: tuple) -> None:
    if opened is not None and event == "open":
        opened.append(os.fsdecode(arguments[0]) if not isinstance(arguments[0], int) else "")


sys.addaudithook(_note)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, of which what they are is kept as soon as it is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(listed, "MANY", 3)
    monkeypatch.setattr(listed, "SETTLED_NS", 0)
    for name in ("first", "second", "third"):
        made_runs.run(tmp_path / "runs" / name, points=1)
        own = tmp_path / "runs" / name / "starts" / "1"
        own.mkdir(parents=True)
        shutil.copy(own.parents[1] / "job.yaml", own)
    return tmp_path / "runs"


def look(folder: Path) -> tuple[dict[str, JobStatus], set[str]]:
    """The runs by name, and the runs of which more was opened than the lock."""
    global opened
    opened = []
    try:
        found_ = listed.statuses(folder)
    finally:
        files, opened = opened, None
    read = {Path(file).parent.name for file in files if file.endswith("summary.json")}
    return {one.name: dataclasses.replace(one, age_s=0.0) for one in found_}, read


def test_a_run_that_ended_is_read_once_and_is_the_same_the_next_time(runs: Path) -> None:
    every = {"first", "second", "third"}
    cold, read = look(runs)
    assert read == set(cold) == every

    warm, read = look(runs)

    assert (warm, read) == (cold, set())
    (kept,) = user_cache.home("lists").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    for damage in (b"", b"0" * 64 + b"\n{}", kept.read_bytes()[:-9] + b"}"):
        kept.write_bytes(damage)
        assert look(runs) == (cold, every)


def test_no_change_of_a_run_is_missed(runs: Path) -> None:
    look(runs)
    summary, job = runs / "first" / "summary.json", runs / "second" / "starts" / "1" / "job.yaml"
    before, times = job.read_text(), job.stat()
    changed = json.loads(summary.read_text()) | {"step": 4321}
    draft = summary.with_name("draft")
    draft.write_text(json.dumps(changed))
    draft.replace(summary)
    job.write_text(before.replace("steps: 1000", "steps: 2000"))
    os.utime(job, ns=(times.st_atime_ns, times.st_mtime_ns))  # of the same size and time
    shutil.copytree(runs / "third", runs / "fourth")

    now, read = look(runs)

    assert read == {"first", "second", "fourth"}
    assert (now["first"].step, now["second"].steps, now["fourth"].state) == (4321, 2000, State.DONE)
    with lock.locked(runs / "third"):
        now, read = look(runs)
        assert now["third"].state is State.RESTARTING and read == {"third"}
    shutil.rmtree(runs / "third")
    assert set(look(runs)[0]) == {"first", "second", "fourth"}


def test_what_changed_a_moment_ago_is_read_again(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "SETTLED_NS", 3_600_000_000_000)
    look(runs)
    assert look(runs)[1] == {"first", "second", "third"}


# In a process of its own: one that has imported JAX must not be copied.
DIVIDED = """
import json, os, signal, sys
from pathlib import Path
from jaxlaunch.launcher.local import listed
parent, look_at_all, forks = os.getpid(), listed._look_at_all, []
sys.addaudithook(lambda event, _: forks.append(event) if event == "os.fork" else None)
def dies(part):
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return look_at_all(part)
os.sched_getaffinity = lambda pid: {0, 1}
listed.DIVIDED = 2
for listed._look_at_all in (look_at_all, dies):
    print(json.dumps([one.to_json() | {"age_s": 0.0} for one in listed.statuses(Path(sys.argv[1]))]))
assert len(forks) == 2
"""


def test_runs_that_several_processes_read_are_those_that_one_reads(runs: Path) -> None:
    (runs / "second" / "summary.json").write_text("{")
    alone = json.loads(json.dumps([one.to_json() for one in look(runs)[0].values()]))

    divided = subprocess.run([sys.executable, "-c", DIVIDED, runs], stdout=subprocess.PIPE, text=True, check=True)

    together, without_a_killed_copy = map(json.loads, divided.stdout.splitlines())
    assert together == without_a_killed_copy == alone and len(alone) == 3


def test_links_between_sweeps_that_lead_in_a_circle_are_no_runs(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        made_runs.run(tmp_path / name / f"{name}-0", points=1)
        (tmp_path / name / run_folders.SWEEP).touch()
        for link in ("link-1", "link-2", "link-3"):
            (tmp_path / name / link).symlink_to(tmp_path / other)

    assert [run.name for run in found.runs_in(tmp_path)] == ["a-0", "b-0"]
