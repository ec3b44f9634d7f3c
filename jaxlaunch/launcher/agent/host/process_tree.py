"""Which of a child's processes is the program, as far as /proc tells: a wrapper such as `sh -c` only waits for it.

A started process and what it runs: which of them reports, how they are stopped, and what an end leaves behind.

The started process may be the program, or a wrapper of it such as `sh -c`. SIGTERM is meant for the program, once for
each of its processes; a wrapper that receives it too would end before the program has saved.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
import shutil
import signal
import signal as signals
import time
from collections.abc import Collection, Iterator
from pathlib import Path

SHELLS = frozenset({"ash", "bash", "busybox", "dash", "ksh", "mksh", "sh", "zsh"})


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to one process, which may have ended."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended, or it is ours and not reaped yet; or it runs as another user


def exists(pid: int) -> bool:
    """Whether there is a process of this pid, a zombie included."""
    return session(pid) is not None


def session(pid: int) -> int | None:
    """The session of a process; None where there is no such process."""
    try:
        return os.getsid(pid)
    except (OSError, OverflowError):
        return None


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal; True where the kernel does not tell."""
    found = _mask(pid, "SigCgt")
    return not os.path.exists("/proc/self/status") if found is None else bool(found >> (number - 1) & 1)


def is_shell(pid: int) -> bool:
    """Whether a process runs a shell, by its executable."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in SHELLS
    except OSError:
        return False


def below(pid: int, number: int, *, is_wrapper: bool = False) -> Iterator[int]:
    """The processes that a signal to `pid` is meant for: what it runs, where it is a shell.

    A shell without a trap dies of the signal, and what it runs would be killed with it. One with a trap runs that when
    the command that it waits for has ended; commands in its background are the trap's to tell. `is_wrapper`: it is
    known to be no program itself.
    """
    has_jobs = is_shell(pid)
    if not (has_jobs or is_wrapper):
        yield pid
        return
    has_trap = catches(pid, number)
    running = children(pid) if has_jobs or not has_trap else []
    if has_trap:
        running = [child for child in running if not _is_in_background(child, pid)]
    if has_trap or not running:
        yield pid
    for child in running:
        yield from below(child, number)


def towards(program: int, pid: int, number: int) -> Iterator[int]:
    """The same where the program below `pid` is known: it, and the shells above it that have a trap.

    Other commands of a pipeline end with it. What a shell with a trap has in its background is the trap's to tell.
    """
    line = [program]
    while line[-1] != pid and (parent := _parent(line[-1])):
        line.append(parent)
    for above, under in itertools.pairwise(reversed(line if line[-1] == pid else [program])):
        if is_shell(above) and catches(above, number):
            yield above
            if _is_in_background(under, above):
                return
    yield program


def ends_at_once(pid: int) -> bool:
    """Whether this is bash with a trap for EXIT, which has handlers for all signals that end it.

    It may have no trap for the signal itself: then it runs that for EXIT while the command that it waits for goes on.
    """
    return catches(pid, signals.SIGXCPU) and is_shell(pid)


def reads_a_pipe(pid: int) -> bool:
    """Whether a process reads what another command of its pipeline writes, and so ends with it."""
    try:
        return os.readlink(f"/proc/{pid}/fd/0").startswith("pipe:")
    except OSError:
        return False


def of_session(leader: int) -> list[int]:
    """The processes of the session that `leader` began, whatever groups they are in; none where there is no /proc."""
    try:
        found = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
    return [pid for pid in found if session(pid) == leader and not _is_zombie(pid)]


def orphans(pids: Collection[int]) -> list[int]:
    """Those of `pids` that no other of them has started."""
    return [pid for pid in pids if _parent(pid) not in pids]


def children(pid: int) -> list[int]:
    """The processes that `pid` started and that run; none where the kernel does not tell."""
    try:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [child for child in found if not _is_zombie(child)]


def why_unstartable(program: str, error: OSError, path: str | None) -> str:
    """Why `exec` of a program failed, in the words of a shell, with the name that the user gave."""
    if error.errno == errno.ENOEXEC:
        return f"{program}: Exec format error; a script begins with a line such as #!/bin/sh"
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        return f"{program}: {error.strerror}"
    file = program if "/" in program else shutil.which(program, path=path)
    if file is None:
        return f"{program}: command not found; it is not on PATH"
    if (interpreter := _interpreter(file)) is not None:
        return f"{program}: {interpreter}: bad interpreter: {error.strerror}"
    return f"{program}: {error.strerror}" + ("" if file.startswith("/") else f" in {os.getcwd()}")


def _interpreter(file: str) -> str | None:
    """The interpreter in a script's first line; None without one."""
    try:
        with open(file, "rb") as script:
            found = re.match(rb"#!\s*(\S+)", script.readline(256))
    except OSError:
        return None
    return os.fsdecode(found[1]) if found else None


def _is_in_background(pid: int, shell: int) -> bool:
    """Whether a shell runs a command in its background, by what POSIX has it do then: it ignores SIGQUIT for it."""
    quits = 1 << (signals.SIGQUIT - 1)
    return bool((_mask(pid, "SigIgn") or 0) & quits) and not (_mask(shell, "SigIgn") or 0) & quits


def _mask(pid: int, kind: str) -> int | None:
    """A mask of signals of a process, bit 0 for signal 1; None where the kernel does not tell."""
    try:
        found = re.search(rf"^{kind}:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1], 16)


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[0] == "Z"


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process and the pid of its parent, as in proc_pid_stat(5)."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:  # it has ended
        return "Z", "0"
    return state, parent


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
        return not self.is_program and self._has_met_reporter and not exists(self._reporter)

    def take_reporter(self, pid: int) -> None:
        """Note which process reports from now on."""
        self._reporter, self._has_met_reporter = pid, exists(pid)

    def take_reaped(self) -> None:
        """Note that the kernel may give the pid of the ended process to another."""
        self._is_reaped = True

    def stop(self) -> None:
        """Send SIGTERM to the program, once to each of its processes that it is meant for.

        Called again until it has ended: a shell may go on with another program, which is told once it has a handler.
        """
        self._is_wrapper = self._is_wrapper or not self.is_program or is_shell(self.pid)
        is_first, told = not self._told, {pid for pid in self._told if session(pid) is not None}
        if told:
            self._told_at = time.monotonic()
        targets = [pid for pid in self._targets() if pid not in told]
        if is_first:
            others = [pid for pid in targets if catches(pid, signal.SIGTERM) or not reads_a_pipe(pid)]
            targets = others or targets
        else:
            targets = [pid for pid in targets if catches(pid, signal.SIGTERM)]
        last = [pid for pid in targets if ends_at_once(pid)]
        has_had_its_time = time.monotonic() - self._told_at >= TRAP_S
        for pid in [pid for pid in targets if pid not in last] or (last if has_had_its_time else []):
            self._tell(pid)

    def _targets(self) -> Iterator[int]:
        """The Python that reports, else what a wrapper runs, else the started process."""
        if not self.is_program and session(self._reporter) == self.pid:
            return towards(self._reporter, self.pid, signal.SIGTERM)
        return below(self.pid, signal.SIGTERM, is_wrapper=self.has_lost_reporter)

    def _tell(self, pid: int) -> None:
        send_signal(pid, signal.SIGTERM)
        self._told.add(pid)

    def leaves_programs(self) -> bool:
        """Return whether the started process has ended after a stop, and programs that it ran still do.

        A shell may end in its trap, and leave a program in its background: that is told now, if the trap did not.
        """
        if self.is_killed or not self._told or not self._is_wrapper:
            return False
        left = orphans(of_session(self.pid))
        for pid in left if self.pid in self._told else ():
            if pid not in self._told:
                self._tell(pid)
        return not self._told.isdisjoint(left)

    def dump_stacks(self) -> None:
        """Have the Python with our site hook write its stacks. Without its handler the signal would end a program."""
        is_wrapped = not self.is_program and session(self._reporter) == self.pid
        pid = self._reporter if is_wrapped else self.pid
        if catches(pid, signal.SIGUSR1):
            send_signal(pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the process and its session: tini, and a shell with `set -m`, give what they run a group of its own."""
        self.is_killed = True
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            # Between fork and setsid there is no group yet.
            if not self._is_reaped:
                os.kill(self.pid, signal.SIGKILL)
        for pid in of_session(self.pid):
            send_signal(pid, signal.SIGKILL)
