"""Every way a gang can end in real pods, and what its JobSet makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import Action
from jaxlaunch.launcher.job.defaults import Defaults
from tests.cluster.access import Access
from tests.cluster.gangs import (
    Gang,
    Workspace,
    make_workspace,
    program_command,
    read_verdicts,
    replace_agent,
)
from tests.cluster.waiting import wait_until

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
OUT_OF_MEMORY = {
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
def workspace(cluster: Access, base_image: str) -> Iterator[Workspace]:
    with make_workspace(cluster, base_image) as workspace:
        yield workspace


@pytest.fixture(scope="module")
def gangs(workspace: Workspace) -> Mapping[int | str, Gang]:
    """Start a gang for each code and for each way to run out of memory, all at once."""
    plain = {"restarts": {"in_place": 0, "crash": LIMIT}, "resources": {"cpu": "10m"}}
    started: dict[int | str, Gang] = {}
    for code in contract.OUTCOMES:
        shape = SHAPES.get(code, {})
        started[code] = workspace.start(
            f"ends-{code}",
            Defaults(),
            command=program_command("ends.py", str(code)),
            **shape,
            **plain,
        )
    alone = replace_agent(["python", "-c", f"raise SystemExit({UNLISTED})"])
    started[UNLISTED] = workspace.start(
        f"ends-{UNLISTED}", Defaults(), alone, command=["true"], **plain
    )
    for name, (target, _) in OUT_OF_MEMORY.items():
        command = program_command("grows.py", target, "1")
        started[name] = workspace.start(name, Defaults(), hosts=2, command=command, **STRICT)
    return started


@pytest.mark.parametrize("code", [*contract.OUTCOMES, UNLISTED])
def test_jobset_ends_and_restarts_as_the_table_says(
    gangs: Mapping[int | str, Gang], code: int
) -> None:
    gang = gangs[code]
    end, counters = TABLE[contract.outcome_for_code(code).action]
    assert (gang.wait_for_end(), gang.counters) == (end, counters)
    is_free = contract.outcome_for_code(code).action is Action.RESTART_UNCHARGED
    last = contract.DONE if is_free else code
    there = wait_until(
        lambda: gang.hosts,
        lambda hosts: all(host.terminated for host in hosts),
        f"{gang.name}'s containers ended",
    )
    assert {host.terminated["exitCode"] for host in there} == {last}
    assert {verdict.code for verdict in read_verdicts(there)} == (
        {last} if code in contract.OUTCOMES else set()
    )


@pytest.mark.parametrize("target", ["child", "container"])
def test_out_of_memory_is_named_whatever_it_kills(
    workspace: Workspace, gangs: Mapping[int | str, Gang], target: str
) -> None:
    names = [name for name in OUT_OF_MEMORY if OUT_OF_MEMORY[name][0] == target]
    who = OUT_OF_MEMORY[names[0]][1]
    assert {gangs[name].wait_for_end() for name in names} == {"Failed"}
    # On a busy node the Job controller may take the pod away before the kubelet has said how it
    # ended; not each time.
    messages = [
        name
        for name in names
        if f"{who} was OOMKilled" in workspace.launcher("explain", name).stdout.splitlines()[0]
    ]
    assert messages
    assert "OOMKilled" in workspace.launcher("status", messages[0]).stdout
