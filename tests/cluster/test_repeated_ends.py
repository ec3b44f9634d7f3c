"""Failures that repeat, and programs that ask to be run again, in real pods of a JobSet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from jaxlaunch.launcher.job.defaults import Defaults
from tests.cluster.access import Access
from tests.cluster.gangs import Gang, Workspace, make_workspace, program_command
from tests.cluster.waiting import wait_until


class Ending(NamedTuple):
    """A job, and how its JobSet must end."""

    words: tuple[str, ...]
    job: Mapping[str, Any]
    end: str
    # Restarts of the JobSet, and those that count toward its limit.
    counters: tuple[int, int]
    # The exit code of its last containers.
    code: int


QUICK = {"resources": {"cpu": "10m"}, "grace": "3s"}
NO_PLACE = {"in_place": 0, "crash": 2}
CODES = {"42": "free", "99": "charged", "43": "free-new-pods", "44": "charged-new-pods"}
ENDINGS = {
    # Default restarts: the second attempt in the same pods is the last.
    "raise": Ending(("raise",), {}, "Failed", (0, 0), 70),
    "raise-two": Ending(("raise",), {"hosts": 2}, "Failed", (0, 0), 70),
    "exit": Ending(("exit",), {}, "Failed", (0, 0), 70),
    "segfault": Ending(("segfault",), {}, "Failed", (0, 0), 70),
    "changes": Ending(("changes",), {}, "Completed", (0, 0), 0),
    # Two attempts with code 42 in the same pods, and a third one that finishes.
    "free": Ending(("requeue", "42", "2"), {"hosts": 2}, "Completed", (0, 0), 0),
    "free-pods": Ending(
        ("requeue", "42", "2"), {"restarts": NO_PLACE, "hosts": 2}, "Completed", (2, 0), 0
    ),
    "new-pods": Ending(("requeue", "43", "2"), {}, "Completed", (2, 0), 0),
    "charged": Ending(("requeue", "99", "2"), {}, "Completed", (0, 0), 0),
    "charged-pods": Ending(("requeue", "99", "2"), {"restarts": NO_PLACE}, "Completed", (2, 2), 0),
    "charged-new": Ending(("requeue", "44", "2"), {}, "Completed", (2, 2), 0),
    "used-up": Ending(("requeue", "99", "9"), {"restarts": NO_PLACE}, "Failed", (2, 2), 86),
}


@pytest.fixture(scope="module")
def gangs(cluster: Access, base_image: str) -> Iterator[Mapping[str, Gang]]:
    """Start all jobs at once."""
    with make_workspace(cluster, base_image) as workspace:
        yield {name: start_job(workspace, name, ending) for name, ending in ENDINGS.items()}


def start_job(workspace: Workspace, name: str, ending: Ending) -> Gang:
    restarts = {"codes": CODES} | dict(ending.job.get("restarts", {}))
    job = {**QUICK, **ending.job, "restarts": restarts}
    command = program_command("repeats.py", *ending.words)
    return workspace.start(name, Defaults(), command=command, **job)


@pytest.mark.parametrize("name", ENDINGS)
def test_jobset_ends_after_these_restarts(gangs: Mapping[str, Gang], name: str) -> None:
    gang, ending = gangs[name], ENDINGS[name]
    assert (gang.wait_for_end(), gang.counters) == (ending.end, ending.counters)
    hosts = wait_until(
        lambda: gang.hosts,
        lambda hosts: all(host.terminated for host in hosts),
        f"{name}'s containers ended",
    )
    assert {host.terminated["exitCode"] for host in hosts} == {ending.code}
    reports = [host.termination_report for host in hosts]
    verdicts = [report.verdict for report in reports if report is not None]
    if ending.code == 70:
        # The message of the first attempt, although that of the second differs.
        words = {"raise": "bad batch in attempt 1 of generation 0", "exit": "exit code 3"}
        expected = words.get(ending.words[0], "SIGSEGV")
        assert all(expected in verdict.message for verdict in verdicts) and verdicts
        assert {report.attempt for report in reports if report is not None} == {2}
