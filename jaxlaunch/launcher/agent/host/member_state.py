"""What a host of the gang has been told, and what follows from it. Pure: no connection, no process, no clock."""

from __future__ import annotations

import enum

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.records.verdict import Verdict

# Closer signals count as one: a terminal and the launcher may both pass a Ctrl-C on.
ONE_PRESS_S = 0.5


class Press(enum.Enum):
    """What a signal to stop asks for."""

    REPEATED = enum.auto()
    STOP = enum.auto()
    KILL = enum.auto()


class WhenIdle(enum.Enum):
    """What a host does once no process of an attempt that has ended is left."""

    REPORT = enum.auto()
    WAIT_FOR_LEADER = enum.auto()
    FINISH = enum.auto()


class MemberState:
    """The attempt that a host takes part in, and how it ended."""

    def __init__(self, config: Config) -> None:
        self._replaces, self._is_leader = config.job.replaces, config.is_leader
        # The number of the attempt counts across generations.
        self.attempt = 0
        self.has_started = self.is_stopping = False
        self.verdict: Verdict | None = None
        self.signalled_at: float | None = None

    @property
    def awaits_first_start(self) -> bool:
        """Whether no attempt has started on this host: a leader that is lost may start again."""
        return self.verdict is None and not self.has_started

    def start(self, attempt: int) -> None:
        """Begin an attempt."""
        self.attempt, self.has_started, self.is_stopping, self.verdict = attempt, True, False, None

    def end(self, attempt: int, verdict: Verdict) -> None:
        """Take the leader's verdict on an attempt."""
        self.attempt, self.verdict = attempt, verdict

    def take_signal(self, now: float) -> Press:
        """Return what a SIGTERM or SIGINT asks for: the second one kills the processes."""
        first_at = self.signalled_at
        if first_at is None:
            self.signalled_at = now
            return Press.STOP
        return Press.REPEATED if now - first_at < ONE_PRESS_S else Press.KILL

    def when_idle(self, *, has_leader: bool) -> WhenIdle | None:
        """Return what follows when the last process has ended; None while the attempt has no verdict."""
        if self.verdict is None:
            return None
        if has_leader:
            return WhenIdle.REPORT
        can_continue = contract.outcome(self.verdict.code).in_place or self.verdict.code == contract.PREEMPTED
        waits = self._replaces and can_continue and self.signalled_at is None and not self._is_leader
        return WhenIdle.WAIT_FOR_LEADER if waits else WhenIdle.FINISH
