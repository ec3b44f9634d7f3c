"""What a host does next, from what it has been told: tables, no connection and no process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.host.leader_connection import ONE_PRESS_S, MemberState, Press, WhenIdle
from jaxlaunch.records.verdict import verdict_for_code


def state(*, replaces: bool = True, is_leader: bool = False) -> MemberState:
    config: Any = SimpleNamespace(job=SimpleNamespace(replaces=replaces), is_leader=is_leader)
    return MemberState(config)


def test_signals_close_together_are_one_and_a_later_one_kills() -> None:
    host = state()
    assert host.take_signal(0.0) is Press.STOP
    assert host.take_signal(ONE_PRESS_S / 2) is Press.REPEATED
    assert host.take_signal(ONE_PRESS_S + 0.1) is Press.KILL


def test_a_leader_may_start_again_only_before_the_first_attempt() -> None:
    host = state()
    assert host.awaits_first_start
    host.start(1)
    assert not host.awaits_first_start and host.when_idle(has_leader=True) is None
    host.end(1, verdict_for_code(contract.CRASH, "it broke"))
    host.start(2)
    assert (host.attempt, host.verdict, host.is_stopping) == (2, None, False)


@pytest.mark.parametrize(
    ("code", "facts", "is_signalled", "has_leader", "step"),
    [
        (contract.CRASH, {}, False, True, WhenIdle.REPORT),
        (contract.CRASH, {}, False, False, WhenIdle.WAIT_FOR_LEADER),
        (contract.PREEMPTED, {}, False, False, WhenIdle.WAIT_FOR_LEADER),
        (contract.PREEMPTED, {}, True, False, WhenIdle.FINISH),
        (contract.BAD_DATA, {}, False, False, WhenIdle.FINISH),
        (contract.CRASH, {"replaces": False}, False, False, WhenIdle.FINISH),
        (contract.CRASH, {"is_leader": True}, False, False, WhenIdle.FINISH),
    ],
)
def test_a_host_without_processes_reports_waits_or_ends(
    code: int, facts: dict[str, bool], is_signalled: bool, has_leader: bool, step: WhenIdle
) -> None:
    host = state(**facts)
    host.start(1)
    host.end(1, verdict_for_code(code, "it ended"))
    if is_signalled:
        host.take_signal(1.0)
    assert host.when_idle(has_leader=has_leader) is step
