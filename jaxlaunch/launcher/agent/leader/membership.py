"""Members of the gang: the hosts, their places in the table of ranks, and the wait for missing ones. Pure."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.progress import phase_timeouts
from jaxlaunch.launcher.agent.gang.protocol import Hello
from jaxlaunch.records.verdict import Failure, FailureKind, Numbers, RendezvousFacts, Verdict, names, verdict_for_code

# Seconds between two log lines about missing hosts.
LOG_S = 10.0
# Time for hosts that have not joined yet to learn that the gang was refused.
LINGER_S = 10.0
# Different refusals that are logged.
MAX_REFUSALS = 50


class Membership:
    """The hosts of the gang.

    Attributes:
        table: Which hosts hold which ranks, in the newest attempt.
        hellos: Hello of each connected host.
        last_message_at: When each connected host sent its last message, the longest silent first.
        stopping_hosts: Hosts whose pod was told to stop.
        departing_hosts: Connected hosts that were told to leave, although the gang may continue.
        hosts_with_processes: Hosts that may still have processes of this attempt.
        min_hosts: Hosts with which the next attempt starts at once.
        saved_step: Newest step on storage that a host reported when it joined.
    """

    def __init__(self, config: Config) -> None:
        self._leader, self._sizes = config.host, config.sizes
        self.table = config.members
        self.hellos: dict[int, Hello] = {}
        self.last_message_at: OrderedDict[int, float] = OrderedDict()
        self.stopping: set[int] = set()
        self.departing: set[int] = set()
        self.not_gone: set[int] = set()
        self.min_hosts = config.sizes[-1]
        self.saved_step: int | None = None

    @property
    def present(self) -> Collection[int]:
        """Connected hosts that stay."""
        return self.hellos.keys() - self.departing if self.departing else self.hellos.keys()

    @property
    def missing(self) -> list[int]:
        """Hosts of the table that are not present."""
        present = self.present
        return [host for host in self.table.hosts if host not in present]

    @property
    def size(self) -> int:
        """Number of hosts that would hold ranks in an attempt that starts now, 0 if there are too few.

        Host 0 is always one of them: the others look for JAX's coordinator, which is rank 0, at its address.
        """
        present = self.present
        sizes = bisect.bisect_right(self._sizes, len(present)) if self._leader in present else 0
        return self._sizes[sizes - 1] if sizes else 0

    @property
    def can_start(self) -> bool:
        """Whether there are as many hosts as the next attempt waits for."""
        return self.size >= self.min_hosts

    @property
    def have_left(self) -> bool:
        """Whether every host but the leader's has disconnected."""
        return self.hellos.keys() <= {self._leader}

    def add(self, hello: Hello, now: float) -> None:
        """Add a host, or replace its earlier connection."""
        if hello.host in self.hellos:
            self.remove(hello.host)
        self.hellos[hello.host], self.last_message_at[hello.host] = hello, now

    def remove(self, host: int) -> None:
        """Remove a host whose connection is closed."""
        del self.hellos[host], self.last_message_at[host]
        self.departing.discard(host)
        self.not_gone.discard(host)

    def hear(self, host: int, now: float) -> None:
        """Record the time of a message."""
        self.last_message_at[host] = now
        self.last_message_at.move_to_end(host)

    def regroup(self) -> Mapping[int, range]:
        """Assign the ranks to the present hosts, and return those of each host."""
        self.table = self.table.regrouped(self.present, self.size)
        self.min_hosts, self.not_gone = len(self.table), set(self.present)
        return {host: self.table.ranks(host) for host in self.table.hosts}


class Gathering:
    """Wait for missing hosts, at the start and until others replace lost ones."""

    def __init__(self, config: Config, now: float) -> None:
        self._hosts, self._timeouts_s = config.hosts, phase_timeouts(config.job.timeouts_s)
        # Hosts that ever connected, including refused ones.
        self.arrived: set[int] = set()
        # The newest is last.
        self.refusals: dict[str, None] = {}
        self.begin("rendezvous", now)

    def begin(self, phase: str, now: float) -> None:
        """Begin to wait, for at most the timeout of this phase."""
        self._phase, self._since, self._logged_at = phase, now, now
        self._deadline = now + _or_endless(self._timeouts_s[phase])
        self._shrink_at = now + _or_endless(self._timeouts_s["replace"])

    def may_shrink(self, now: float) -> bool:
        """Return whether a gang of variable size has waited long enough for its full size."""
        return now >= self._shrink_at

    def linger(self, now: float) -> None:
        """Wait only until hosts that join now have learned that there will be no gang."""
        self._deadline = now + LINGER_S

    def have_all_learned(self, now: float) -> bool:
        """Return whether every host has learned that there will be no gang, or has had the time to."""
        return len(self.arrived) == self._hosts or now >= self._deadline

    def add_refusal(self, message: str) -> bool:
        """Record a refusal, and return whether it is new: a refused host tries again for as long as it waits."""
        is_new = message not in self.refusals
        if is_new and len(self.refusals) >= MAX_REFUSALS:
            return False
        self.refusals.pop(message, None)
        self.refusals[message] = None
        return is_new

    def check(self, members: Membership, now: float) -> Verdict | str | None:
        """Return the verdict once the wait has timed out, or a log line when one is due.

        This is called after every message, so it looks for the missing hosts only if it names them.
        """
        waited_s = now - self._since
        if now >= self._deadline:
            missing, limit = members.missing, f"timeouts.{self._phase}"
            wait = RendezvousFacts(Numbers.of(missing), waited_s, limit, tuple(self.refusals))
            facts = Failure(FailureKind.NOT_JOINED, rendezvous=wait)
            return verdict_for_code(contract.LOST, facts, rank=members.table.ranks(missing[0])[0], host=missing[0])
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            return f"waiting for {names(members.missing)} of {len(members.table)}, for {waited_s:.0f} s so far"
        return None


@dataclasses.dataclass
class Growth:
    """Plan to restart with more hosts.

    Attributes:
        after_step: Grow once a newer step than this is on storage. None if no host came that the gang may grow by.
        is_stopping: Whether the ranks save to restart with these hosts.
    """

    after_step: int | None = None
    is_stopping: bool = False

    def plan(self, members: Membership, committed: int | None) -> bool:
        """Plan to grow after the newest step on storage. Return whether there are enough hosts for that."""
        if members.size <= len(members.table):
            return False
        self.after_step = -1 if committed is None else committed
        return True

    def begin(self, members: Membership, last_committed: int | None) -> bool:
        """Begin to grow if the ranks have saved since the plan. Return whether they must stop now."""
        hosts = len(members.table)
        has_saved = last_committed is not None and self.after_step is not None and last_committed > self.after_step
        if self.is_stopping or not has_saved or members.size <= hosts:
            return False
        self.is_stopping, members.min_hosts = True, hosts
        return True


def _or_endless(timeout_s: float | None) -> float:
    return math.inf if timeout_s is None else timeout_s
