"""A started process and what it runs: which of them reports, how they are stopped, and what an end leaves behind.

The started process may be the program, or a wrapper of it such as `sh -c`. SIGTERM is meant for the program, once for
each of its processes; a wrapper that receives it too would end before the program has saved.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator

from jaxlaunch.launcher.agent.host import programs

# For bash's trap for EXIT, once what was told has ended: a signal then would cut it short.
TRAP_S = 3.0


class ProcessTree:
    """The processes of a rank, in the session of the one that was started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.is_killed = self._is_reaped = False
        # The pid of the Python that reports, 0 before the first report. It existed when it did, unless its namespace
        # is another one.
        self._reporter = 0
        self._has_met_reporter = False
        # Processes that were sent SIGTERM, and when one of them last existed.
        self._told: set[int] = set()
        self._told_at = -math.inf
        # The started process was a wrapper when it was to stop.
        self._is_wrapper = False

    @property
    def is_program(self) -> bool:
        """Whether what reports is the process that was started: how it ends is then how the program ends.

        A wrapper (`sh -c "python a.py || python b.py"`) may handle that, and go on with something else.
        """
        return self._reporter in (0, self.pid)

    @property
    def has_lost_reporter(self) -> bool:
        """Whether a wrapper went on without the Python that reported: its last phase says nothing any more."""
        return not self.is_program and self._has_met_reporter and not programs.exists(self._reporter)

    def take_reporter(self, pid: int) -> None:
        """Note which process reports from now on."""
        self._reporter, self._has_met_reporter = pid, programs.exists(pid)

    def take_reaped(self) -> None:
        """Note that the kernel may give the pid of the ended process to another."""
        self._is_reaped = True

    def stop(self) -> None:
        """Send SIGTERM to the program, once to each of its processes that it is meant for.

        Called again until it has ended: a shell may go on with another program, which is told once it has a handler.
        """
        self._is_wrapper = self._is_wrapper or not self.is_program or programs.is_shell(self.pid)
        is_first, told = not self._told, {pid for pid in self._told if programs.session(pid) is not None}
        if told:
            self._told_at = time.monotonic()
        targets = [pid for pid in self._targets() if pid not in told]
        if is_first:
            others = [pid for pid in targets if programs.catches(pid, signal.SIGTERM) or not programs.reads_a_pipe(pid)]
            targets = others or targets
        else:
            targets = [pid for pid in targets if programs.catches(pid, signal.SIGTERM)]
        last = [pid for pid in targets if programs.ends_at_once(pid)]
        has_had_its_time = time.monotonic() - self._told_at >= TRAP_S
        for pid in [pid for pid in targets if pid not in last] or (last if has_had_its_time else []):
            self._tell(pid)

    def _targets(self) -> Iterator[int]:
        """The Python that reports, else what a wrapper runs, else the started process."""
        if not self.is_program and programs.session(self._reporter) == self.pid:
            return programs.towards(self._reporter, self.pid, signal.SIGTERM)
        return programs.below(self.pid, signal.SIGTERM, is_wrapper=self.has_lost_reporter)

    def _tell(self, pid: int) -> None:
        programs.signal(pid, signal.SIGTERM)
        self._told.add(pid)

    def leaves_programs(self) -> bool:
        """Return whether the started process has ended after a stop, and programs that it ran still do.

        A shell may end in its trap, and leave a program in its background: that is told now, if the trap did not.
        """
        if self.is_killed or not self._told or not self._is_wrapper:
            return False
        left = programs.orphans(programs.of_session(self.pid))
        for pid in left if self.pid in self._told else ():
            if pid not in self._told:
                self._tell(pid)
        return not self._told.isdisjoint(left)

    def dump_stacks(self) -> None:
        """Have the Python with our site hook write its stacks. Without its handler the signal would end a program."""
        is_wrapped = not self.is_program and programs.session(self._reporter) == self.pid
        pid = self._reporter if is_wrapped else self.pid
        if programs.catches(pid, signal.SIGUSR1):
            programs.signal(pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the process and its session: tini, and a shell with `set -m`, give what they run a group of its own."""
        self.is_killed = True
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            # Between fork and setsid there is no group yet.
            if not self._is_reaped:
                os.kill(self.pid, signal.SIGKILL)
        for pid in programs.of_session(self.pid):
            programs.signal(pid, signal.SIGKILL)
