"""Members of the gang: which hosts are connected, which ranks they hold, which are missing.

`Membership` assigns ranks to connected hosts, `Gathering` limits the wait for missing ones, and
`Growth` plans a restart with additional ones. This module does no I/O.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping

from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.protocol import Hello
from jaxlaunch.records.verdict import (
    Failure,
    FailureKind,
    Numbers,
    RendezvousFacts,
    Verdict,
    render_numbers,
    verdict_for,
)

# Seconds between two log lines about missing hosts.
LOG_INTERVAL_S = 10.0
# Time for hosts that have not joined yet to learn that the gang will not start.
REFUSAL_LINGER_S = 10.0
# Largest number of different refusals that are kept and logged.
MAX_REFUSALS = 50


class Membership:
    """The hosts of the gang.

    Attributes:
        table: Assignment of ranks to hosts in the newest attempt.
        hellos: Hello of each connected host.
        last_message_at: Time of the last message of each connected host, the oldest first.
        stopping_hosts: Hosts whose pod received a signal to stop.
        departing_hosts: Connected hosts that were sent `leave`, although the gang may continue.
        hosts_with_processes: Hosts that may still have processes of this attempt.
        min_hosts: Number of hosts with which the next attempt starts without further waiting.
        saved_step: Newest step on storage that a host reported when it joined.
    """

    def __init__(self, config: Config) -> None:
        self._leader, self._sizes = config.host, config.gang_sizes
        self.table = config.members
        self.hellos: dict[int, Hello] = {}
        self.last_message_at: OrderedDict[int, float] = OrderedDict()
        self.stopping_hosts: set[int] = set()
        self.departing_hosts: set[int] = set()
        self.hosts_with_processes: set[int] = set()
        self.min_hosts = config.gang_sizes[-1]
        self.saved_step: int | None = None

    @property
    def present_hosts(self) -> Collection[int]:
        """Connected hosts that were not sent `leave`."""
        if self.departing_hosts:
            return self.hellos.keys() - self.departing_hosts
        return self.hellos.keys()

    @property
    def missing_hosts(self) -> list[int]:
        """Hosts of the table that are not present."""
        present_hosts = self.present_hosts
        return [host for host in self.table.hosts if host not in present_hosts]

    @property
    def next_size(self) -> int:
        """Number of hosts that would hold ranks in a new attempt, 0 if too few are present.

        Host 0 must be one of them, because the others expect JAX's coordinator, which runs in rank
        0, at its address.
        """
        present_hosts = self.present_hosts
        reached_size_count = 0
        if self._leader in present_hosts:
            reached_size_count = bisect.bisect_right(self._sizes, len(present_hosts))
        return self._sizes[reached_size_count - 1] if reached_size_count else 0

    @property
    def can_start(self) -> bool:
        """Return whether enough hosts are present to start without further waiting."""
        return self.next_size >= self.min_hosts

    @property
    def have_others_disconnected(self) -> bool:
        """Return whether every host but the leader's has disconnected."""
        return self.hellos.keys() <= {self._leader}

    def add_host(self, hello: Hello, now: float) -> None:
        """Add a host, or replace its earlier connection."""
        if hello.host in self.hellos:
            self.remove_host(hello.host)
        self.hellos[hello.host], self.last_message_at[hello.host] = hello, now

    def remove_host(self, host: int) -> None:
        """Remove a host whose connection is closed."""
        del self.hellos[host], self.last_message_at[host]
        self.departing_hosts.discard(host)
        self.hosts_with_processes.discard(host)

    def record_message(self, host: int, now: float) -> None:
        """Record the time of a message."""
        self.last_message_at[host] = now
        self.last_message_at.move_to_end(host)

    def assign_ranks(self) -> Mapping[int, range]:
        """Assign ranks to the present hosts, and return the ranks by host."""
        self.table = self.table.regroup(self.present_hosts, self.next_size)
        self.min_hosts, self.hosts_with_processes = len(self.table), set(self.present_hosts)
        return {host: self.table.ranks_of(host) for host in self.table.hosts}


class Gathering:
    """Wait for missing hosts: for all at the start, and for replacements of lost ones."""

    def __init__(self, config: Config, now: float) -> None:
        self._hosts, self._timeouts_s = config.hosts, config.job.phase_timeouts_s
        # Hosts that have connected at any time, including refused ones.
        self.arrived_hosts: set[int] = set()
        # Messages of refusals as an ordered set, the newest last.
        self.refusals: dict[str, None] = {}
        self.begin_wait("rendezvous", now)

    def begin_wait(self, phase: str, now: float) -> None:
        """Begin to wait, for at most the timeout of this phase."""
        self._phase, self._started_at, self._logged_at = phase, now, now
        self._deadline = now + _timeout_or_inf(self._timeouts_s[phase])
        self._shrink_at = now + _timeout_or_inf(self._timeouts_s["replace"])

    def may_shrink(self, now: float) -> bool:
        """Return whether a gang of variable size has waited long enough for its full size."""
        return now >= self._shrink_at

    def shorten_wait(self, now: float) -> None:
        """Wait only until hosts that still join have learned that the gang will not start."""
        self._deadline = now + REFUSAL_LINGER_S

    def is_refusal_wait_over(self, now: float) -> bool:
        """Return whether the wait for hosts that must learn of the refusal is over."""
        return len(self.arrived_hosts) == self._hosts or now >= self._deadline

    def add_refusal(self, message: str) -> bool:
        """Record a refusal, and return whether it is new."""
        is_new = message not in self.refusals
        if is_new and len(self.refusals) >= MAX_REFUSALS:
            return False
        self.refusals.pop(message, None)
        self.refusals[message] = None
        return is_new

    def check_wait(self, members: Membership, now: float) -> Verdict | str | None:
        """Return the verdict once the wait has timed out, or a log line when one is due.

        This is called after every message, so it computes the missing hosts only when needed.
        """
        waited_s = now - self._started_at
        if now >= self._deadline:
            missing_hosts, timeout_key = members.missing_hosts, f"timeouts.{self._phase}"
            hosts, refusals = Numbers.from_sequence(missing_hosts), tuple(self.refusals)
            rendezvous = RendezvousFacts(hosts, waited_s, timeout_key, refusals)
            facts = Failure(FailureKind.NOT_JOINED, rendezvous=rendezvous)
            rank = members.table.ranks_of(missing_hosts[0])[0]
            return verdict_for(facts, rank=rank, host=missing_hosts[0])
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            hosts_text = f"{render_numbers(members.missing_hosts)} of {len(members.table)}"
            return f"waiting for {hosts_text}, for {waited_s:.0f} s so far"
        return None


@dataclasses.dataclass
class Growth:
    """Plan to restart with more hosts.

    Attributes:
        after_step: Step after which a newly saved step begins the growth. None if no growth is
            planned.
        is_stopping: Whether the ranks are stopping to restart with the additional hosts.
    """

    after_step: int | None = None
    is_stopping: bool = False

    def plan_growth(self, members: Membership, committed_step: int | None) -> bool:
        """Plan to grow after the next save. Return whether enough additional hosts are present."""
        if members.next_size <= len(members.table):
            return False
        self.after_step = -1 if committed_step is None else committed_step
        return True

    def begin_growth(self, members: Membership, committed_step: int | None) -> bool:
        """Begin the growth if the ranks have saved since the plan. Return whether it began."""
        host_count = len(members.table)
        if committed_step is None or self.after_step is None or committed_step <= self.after_step:
            return False
        if self.is_stopping or members.next_size <= host_count:
            return False
        self.is_stopping, members.min_hosts = True, host_count
        return True


def _timeout_or_inf(timeout_s: float | None) -> float:
    return math.inf if timeout_s is None else timeout_s
