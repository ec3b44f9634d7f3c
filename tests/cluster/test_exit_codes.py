"""Every way a gang can end, in real pods, and what its JobSet makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from launcher.profile import Profile
from tests.cluster.access import Access
from tests.cluster.gangs import Gang, Place, place, program, verdicts, without_agent
from trainer import contract
from trainer.contract import Action

UNLISTED = 42  # a code that nobody promised
BUDGET = 1  # restarts that count
# Most gangs are one host; these are two, in one Job or in two.
SHAPES = {
    contract.STARTUP: {"hosts": 2},
    contract.PREEMPTED: {"hosts": 2},
    contract.CRASH: {"hosts": 2},
    contract.NOT_FINITE: {"slices": 2},
    contract.STORAGE: {"slices": 2},
}

# What becomes of a job whose every generation ends so: its end, its restarts, and those that count. The one that was
# stopped from outside ends well when it is started again.
TABLE = {
    Action.COMPLETE: ("Completed", (0, 0)),
    Action.FAIL: ("Failed", (0, 0)),
    Action.RESTART_UNCHARGED: ("Completed", (1, 0)),
    Action.RESTART: ("Failed", (BUDGET, BUDGET)),
}
STRICT = {"restarts": {"in_place": 0, "crash": 0}, "resources": {"cpu": "10m", "memory": "96Mi", "shm": "90Mi"}}


@pytest.fixture(scope="module")
def here(cluster: Access, base_image: str) -> Iterator[Place]:
    with place(cluster, base_image) as found:
        yield found


@pytest.fixture(scope="module")
def gangs(here: Place) -> Mapping[int | str, Gang]:
    """A gang for each code and for each way to run out of memory, all at once."""
    plain = {"restarts": {"in_place": 0, "crash": BUDGET}, "resources": {"cpu": "10m"}}
    started: dict[int | str, Gang] = {}
    for code in contract.OUTCOMES:
        shape = SHAPES.get(code, {})
        started[code] = here.start(f"ends-{code}", Profile(), command=program("ends.py", str(code)), **shape, **plain)
    alone = without_agent(["python", "-c", f"raise SystemExit({UNLISTED})"])
    started[UNLISTED] = here.start(f"ends-{UNLISTED}", Profile(), alone, command=["true"], **plain)
    for whole in ("child", "container"):
        command = program("grows.py", whole, "1")
        started[whole] = here.start(f"oom-{whole}", Profile(), hosts=2, command=command, **STRICT)
    return started


@pytest.mark.parametrize("code", [*contract.OUTCOMES, UNLISTED])
def test_a_jobset_ends_and_restarts_as_the_table_says(gangs: Mapping[int | str, Gang], code: int) -> None:
    gang = gangs[code]
    end, counters = TABLE[contract.outcome(code).action]
    assert (gang.ended(), gang.counters) == (end, counters)
    last = contract.DONE if code == contract.PREEMPTED else code
    assert {host.ended["exitCode"] for host in gang.hosts} == {last}
    assert {verdict["code"] for verdict in verdicts(gang.hosts)} == ({last} if code in contract.OUTCOMES else set())


@pytest.mark.parametrize(("whole", "who"), [("child", "rank 1"), ("container", "host 1")])
def test_a_want_of_memory_is_named_whatever_it_takes(
    here: Place, gangs: Mapping[int | str, Gang], whole: str, who: str
) -> None:
    gang = gangs[whole]
    assert gang.ended() == "Failed"
    assert f"{who} was OOMKilled" in here.launcher("explain", gang.name).stdout.splitlines()[0]
    assert "OOMKilled" in here.launcher("status", gang.name).stdout
