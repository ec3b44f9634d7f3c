"""Every way a gang can end, in real pods, and what its JobSet makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import Action
from jaxlaunch.launcher.job.defaults import Defaults
from tests.cluster.access import Access
from tests.cluster.gangs import Gang, Place, place, program, verdicts, without_agent
from tests.cluster.waiting import until

UNLISTED = 42  # a code that nobody promised
LIMIT = 1  # restarts that count
# Most gangs are one host; these are two, in one Job or in two.
SHAPES = {
    contract.STARTUP: {"hosts": 2},
    contract.PREEMPTED: {"hosts": 2},
    contract.CRASH: {"hosts": 2},
    contract.NOT_FINITE: {"slices": 2},
    contract.STORAGE: {"slices": 2},
}

# What becomes of a job whose every generation ends so: its end, its restarts, and those that count.
# The one that was stopped from outside ends well when it is started again.
TABLE = {
    Action.COMPLETE: ("Completed", (0, 0)),
    Action.FAIL: ("Failed", (0, 0)),
    Action.RESTART_UNCHARGED: ("Completed", (1, 0)),
    Action.RESTART: ("Failed", (LIMIT, LIMIT)),
}
# Gangs that run out of memory: what it takes, and who is named.
HUNGRY = {
    "oom-child": ("child", "rank 1"),
    "oom-container": ("container", "host 1"),
    "oom-container-2": ("container", "host 1"),
    "oom-container-3": ("container", "host 1"),
}
STRICT = {
    "restarts": {"in_place": 0, "crash": 0},
    "resources": {"cpu": "10m", "memory": "96Mi", "shm": "90Mi"},
}


@pytest.fixture(scope="module")
def here(cluster: Access, base_image: str) -> Iterator[Place]:
    with place(cluster, base_image) as found:
        yield found


@pytest.fixture(scope="module")
def gangs(here: Place) -> Mapping[int | str, Gang]:
    """A gang for each code and for each way to run out of memory, all at once."""
    plain = {"restarts": {"in_place": 0, "crash": LIMIT}, "resources": {"cpu": "10m"}}
    started: dict[int | str, Gang] = {}
    for code in contract.OUTCOMES:
        shape = SHAPES.get(code, {})
        started[code] = here.start(
            f"ends-{code}", Defaults(), command=program("ends.py", str(code)), **shape, **plain
        )
    alone = without_agent(["python", "-c", f"raise SystemExit({UNLISTED})"])
    started[UNLISTED] = here.start(f"ends-{UNLISTED}", Defaults(), alone, command=["true"], **plain)
    for name, (whole, _) in HUNGRY.items():
        command = program("grows.py", whole, "1")
        started[name] = here.start(name, Defaults(), hosts=2, command=command, **STRICT)
    return started


@pytest.mark.parametrize("code", [*contract.OUTCOMES, UNLISTED])
def test_a_jobset_ends_and_restarts_as_the_table_says(
    gangs: Mapping[int | str, Gang], code: int
) -> None:
    gang = gangs[code]
    end, counters = TABLE[contract.outcome_for_code(code).action]
    assert (gang.ended(), gang.counters) == (end, counters)
    last = contract.DONE if code == contract.PREEMPTED else code
    there = until(
        lambda: gang.hosts,
        lambda hosts: all(host.terminated for host in hosts),
        f"{gang.name}'s containers ended",
    )
    assert {host.terminated["exitCode"] for host in there} == {last}
    assert {verdict.code for verdict in verdicts(there)} == (
        {last} if code in contract.OUTCOMES else set()
    )


@pytest.mark.parametrize("whole", ["child", "container"])
def test_a_want_of_memory_is_named_whatever_it_takes(
    here: Place, gangs: Mapping[int | str, Gang], whole: str
) -> None:
    names = [name for name in HUNGRY if HUNGRY[name][0] == whole]
    who = HUNGRY[names[0]][1]
    assert {gangs[name].ended() for name in names} == {"Failed"}
    # On a busy node the Job controller may take the pod away before the kubelet has said how it
    # ended; not each time.
    named = [
        name
        for name in names
        if f"{who} was OOMKilled" in here.launcher("explain", name).stdout.splitlines()[0]
    ]
    assert named
    assert "OOMKilled" in here.launcher("status", named[0]).stdout
