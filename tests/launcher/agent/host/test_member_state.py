"""What a host does next, from what it has been told: tables, no connection and no process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.host.leader_connection import (
    SAME_SIGNAL_S,
    IdleAction,
    MemberState,
    StopRequest,
)
from jaxlaunch.records.verdict import verdict_for_code


def state(*, replaces: bool = True, is_leader: bool = False) -> MemberState:
    config: Any = SimpleNamespace(job=SimpleNamespace(replaces=replaces), is_leader=is_leader)
    return MemberState(config)


def test_close_signals_count_once_and_a_later_one_kills() -> None:
    host = state()
    assert host.take_signal(0.0) is StopRequest.STOP
    assert host.take_signal(SAME_SIGNAL_S / 2) is StopRequest.REPEATED
    assert host.take_signal(SAME_SIGNAL_S + 0.1) is StopRequest.KILL


def test_first_start_is_awaited_only_before_the_first_attempt() -> None:
    host = state()
    assert host.awaits_first_start
    host.start_attempt(1)
    assert not host.awaits_first_start and host.idle_action(has_leader=True) is None
    host.end_attempt(1, verdict_for_code(contract.CRASH, "it broke"))
    host.start_attempt(2)
    assert (host.attempt, host.verdict, host.is_stopping) == (2, None, False)


@pytest.mark.parametrize(
    ("code", "facts", "is_signalled", "has_leader", "step"),
    [
        (contract.CRASH, {}, False, True, IdleAction.REPORT),
        (contract.CRASH, {}, False, False, IdleAction.WAIT_FOR_LEADER),
        (contract.PREEMPTED, {}, False, False, IdleAction.WAIT_FOR_LEADER),
        (contract.PREEMPTED, {}, True, False, IdleAction.FINISH),
        (contract.BAD_DATA, {}, False, False, IdleAction.FINISH),
        (contract.CRASH, {"replaces": False}, False, False, IdleAction.FINISH),
        (contract.CRASH, {"is_leader": True}, False, False, IdleAction.FINISH),
    ],
)
def test_idle_host_reports_waits_or_finishes(
    code: int, facts: dict[str, bool], is_signalled: bool, has_leader: bool, step: IdleAction
) -> None:
    host = state(**facts)
    host.start_attempt(1)
    host.end_attempt(1, verdict_for_code(code, "it ended"))
    if is_signalled:
        host.take_signal(1.0)
    assert host.idle_action(has_leader=has_leader) is step
