"""The wait for hosts that are not there: at the start, and until others take the places of those that were lost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.progress import phase_timeouts
from jaxlaunch.records.failure import Failure, FailureKind, Numbers, RendezvousFacts
from jaxlaunch.records.members import Members
from jaxlaunch.records.messages import names
from jaxlaunch.records.verdict import Verdict, verdict_for_code

LOG_S = 10.0  # between two lines about who is missing
LINGER_S = 10.0  # in which hosts that have not joined yet can learn that the gang was refused
MAX_REFUSED = 50  # different refusals that are logged


class Gathering:
    """Who came, who was refused, and how long the others are waited for."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self.arrived: set[int] = set()  # hosts that ever connected, refused ones included
        self._refused: dict[str, None] = {}  # the newest last
        self.begin("rendezvous")

    def begin(self, phase: str) -> None:
        """Starts to wait, for as long as the timeout of this phase."""
        self._since = self._logged_at = time.monotonic()
        timeout_s = phase_timeouts(self._config.job.timeouts_s)[phase]
        self._until = None if timeout_s is None else self._since + timeout_s
        self._limit = f"timeouts.{phase}"
        replace_s = phase_timeouts(self._config.job.timeouts_s)["replace"]
        self._enough_at = math.inf if replace_s is None else self._since + replace_s

    def is_enough(self, now: float) -> bool:
        """Whether a gang that may shrink has waited for long enough."""
        return now >= self._enough_at

    def linger(self) -> None:
        """Waits only until hosts that join now have learned that there will be no gang."""
        self._until = time.monotonic() + LINGER_S

    def all_know(self, now: float) -> bool:
        """Whether every host has learned that there will be no gang, or had the time to."""
        return len(self.arrived) == self._config.hosts or (self._until or 0.0) <= now

    def note_refusal(self, message: str) -> None:
        """Logs a refusal, the first time: a host may try again for as long as it waits."""
        is_new = message not in self._refused
        if is_new and len(self._refused) >= MAX_REFUSED:
            return
        self._refused.pop(message, None)
        self._refused[message] = None
        if is_new:
            self._say(f"refused: {message}")

    @property
    def newest_refusals(self) -> list[str]:
        """The last three."""
        return list(self._refused)[-3:]

    def given_up(self, members: Members, find: Callable[[], Sequence[int]], now: float) -> Verdict | None:
        """Why the hosts that `find` finds missing are waited for no longer; None while they are, which is logged.

        It is asked after every message of every host, so it looks for them only where it names them.
        """
        if self._until is not None and now >= self._until:
            missing = find()
            wait = RendezvousFacts(Numbers.of(missing), now - self._since, self._limit, tuple(self._refused))
            facts = Failure(FailureKind.NOT_JOINED, rendezvous=wait)
            return verdict_for_code(contract.LOST, facts, rank=members.ranks(missing[0])[0], host=missing[0])
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            of = f"{names(find())} of {len(members)}"
            self._say(f"waiting for {of}, for {now - self._since:.0f} s so far")
        return None
