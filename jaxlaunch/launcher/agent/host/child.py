"""One child process: started by fork and exec, read through pipes, never outliving its agent."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jaxlaunch import contract, regular_files
from jaxlaunch.launcher.agent.gang import reports
from jaxlaunch.launcher.agent.gang.progress import Progress
from jaxlaunch.launcher.agent.gang.reports import UNSTARTABLE
from jaxlaunch.launcher.agent.host import programs
from jaxlaunch.launcher.agent.io import limits
from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.launcher.agent.io.pipes import LinePipe

TAIL_LINES = 100  # of output that a verdict may quote
MAX_LAST = 256 * 1024  # bytes of output that is asked for
MAX_STACKS = 1024 * 1024  # bytes: of thousands of frames
TRAP_S = 3.0  # for bash's trap for EXIT, once what was told has ended: a signal then would cut it short
# Printed by Gloo, the network of JAX on CPU, at every start of every rank: no word of the program's.
_BANNER = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+"
)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_prctl: Any = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

OnOutput = Callable[["Child", bytes], None]
OnReport = Callable[["Child", Mapping[str, Any]], None]


class Child:
    """A running process of a rank, or the standby process of one."""

    def __init__(
        self,
        loop: Loop,
        rank: int,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        cwd: str | None,
        control: int | None = None,
        phase: str | None = None,
        on_output: OnOutput,
        on_report: OnReport,
    ) -> None:
        """Forks and executes `argv`; that it cannot be executed arrives as a progress line.

        `phase` holds until it reports one: None for a program that may never report. `control` is a descriptor that it
        inherits.
        """
        self.rank = rank
        self.metrics_path, self.stacks_path = environ[contract.METRICS], environ[contract.STACKS]
        self.profile_path = environ[contract.PROFILE]
        self.progress = Progress(time.monotonic(), phase)
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.handled: Mapping[str, Any] | None = None  # the exception of a Python whose wrapper went on
        self.notes: set[str] = set()  # that were passed on
        self._reporter = 0  # the pid of the Python that reports; not that of a wrapper such as `sh -c`
        self._has_met_reporter = False  # it ran when its hello came: a pid of another namespace never does
        self._told: set[int] = set()  # processes that were sent SIGTERM
        self._told_at = -math.inf  # when one of them was last there
        self._wraps = False  # the started process was a wrapper when it was to stop
        self.is_killed = self._is_reaped = False
        self._on_output, self._on_report = on_output, on_report
        self._output = LinePipe(loop, contract.MAX_LINE, self._take_output)
        self._reports = LinePipe(loop, contract.MAX_LINE, self._take_report)
        os.set_blocking(self._reports.write_end, False)
        report_fd = self._reports.write_end
        environ = {**environ, contract.PROGRESS_FD: str(report_fd)}
        agent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            keep = [report_fd] if control is None else [report_fd, control]
            _become(argv, environ, cwd, self._output.write_end, keep, agent)
        self._output.opened()
        self._reports.opened()

    @property
    def tail_text(self) -> str:
        """The last TAIL_LINES lines of its output."""
        return b"\n".join(self.tail).decode(errors="replace")

    @property
    def last_lines(self) -> list[str]:
        """The last lines of its output, at most TAIL_LINES and, but for the last, MAX_LAST bytes."""
        found, size = list[str](), 0
        for line in reversed(self.tail):
            size += len(line)
            if found and size > MAX_LAST:
                break
            found.append(line.decode(errors="replace"))
        return found[::-1]

    @property
    def stacks(self) -> str:
        """The stacks that the process has written so far, the last MAX_STACKS bytes; empty before the first."""
        try:
            return regular_files.read(self.stacks_path, MAX_STACKS, at_end=True).decode(errors="replace")
        except OSError:  # not there yet, or what the process put in its place
            return ""

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

    def pause(self, is_paused: bool) -> None:
        """Has the program wait with its output, or go on."""
        self._output.pause(is_paused)

    def stop(self) -> None:
        """Sends SIGTERM to the program, once to each of its processes that it is meant for.

        Called again until it has ended: a shell may go on with another program, which is told once it has a handler.
        """
        self._wraps = self._wraps or not self.is_program or programs.is_shell(self.pid)
        is_first, told = not self._told, {pid for pid in self._told if programs.session(pid) is not None}
        if told:
            self._told_at = time.monotonic()
        meant = [pid for pid in self._meant() if pid not in told]
        if is_first:
            others = [pid for pid in meant if programs.catches(pid, signal.SIGTERM) or not programs.reads_a_pipe(pid)]
            meant = others or meant
        else:
            meant = [pid for pid in meant if programs.catches(pid, signal.SIGTERM)]
        last = [pid for pid in meant if programs.ends_at_once(pid)]
        has_had_its_time = time.monotonic() - self._told_at >= TRAP_S
        for pid in [pid for pid in meant if pid not in last] or (last if has_had_its_time else []):
            programs.signal(pid, signal.SIGTERM)
            self._told.add(pid)

    def _meant(self) -> Iterator[int]:
        """The Python that reports, else what a wrapper runs, else the started process."""
        if not self.is_program and programs.session(self._reporter) == self.pid:
            return programs.towards(self._reporter, self.pid, signal.SIGTERM)
        return programs.below(self.pid, signal.SIGTERM, is_wrapper=self.has_lost_reporter)

    def leaves_programs(self) -> bool:
        """Whether the started process, which has ended, was told to stop, and programs that it ran still do so.

        A shell may end in its trap, and leave a program in its background: that is told now, if the trap did not.
        """
        if self.is_killed or not self._told or not self._wraps:
            return False
        left = programs.orphans(programs.of_session(self.pid))
        for pid in left if self.pid in self._told else ():
            if pid not in self._told:
                programs.signal(pid, signal.SIGTERM)
                self._told.add(pid)
        return not self._told.isdisjoint(left)

    def dump_stacks(self) -> None:
        """Has the Python with our site hook write its stacks; a program without the handler would die of the signal."""
        is_wrapped = not self.is_program and programs.session(self._reporter) == self.pid
        pid = self._reporter if is_wrapped else self.pid
        if self.progress.has_hello and programs.catches(pid, signal.SIGUSR1):
            programs.signal(pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kills the process and its session: tini, and a shell with `set -m`, give what they run a group of its own."""
        self.is_killed = True
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            if not self._is_reaped:
                os.kill(self.pid, signal.SIGKILL)  # between fork and setsid there is no group yet
        for pid in programs.of_session(self.pid):
            programs.signal(pid, signal.SIGKILL)

    def reaped(self) -> None:
        """Takes in that the kernel may give the pid of the ended process to another."""
        self._is_reaped = True

    def close(self) -> None:
        """Reads what the ended process left in its pipes, and removes its files."""
        for pipe in (self._reports, self._output):
            pipe.drain()
            pipe.close()
        for path in (self.metrics_path, self.stacks_path, self.profile_path):
            with contextlib.suppress(OSError):  # it never was there, or the process put a folder in its place
                os.unlink(path)

    def _take_output(self, line: bytes) -> None:
        text = line.rstrip(b"\r").rpartition(b"\r")[2]  # of a progress bar, what a terminal would show
        if _BANNER.fullmatch(text):
            return
        self.tail.append(text)
        self._on_output(self, text)

    def _take_report(self, line: bytes) -> None:
        if not line:
            return  # it ends a line that a full pipe cut
        message = reports.read(line, self.rank)
        if "pid" in message:
            self._reporter, self.handled = message["pid"], None
            self._has_met_reporter = programs.exists(self._reporter)
        self.progress.take(message, time.monotonic())
        if "error" in message and not self.is_program:
            self.handled = message["error"]
            self.progress.take({"atexit": True}, time.monotonic())
        self._on_report(self, message)


def die_with_parent(number: int, parent: int) -> bool:
    """Has the kernel send signal `number` when the parent dies; False when it is dead already."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent


def _become(
    argv: Sequence[str], environ: Mapping[str, str], cwd: str | None, out: int, keep: Sequence[int], agent: int
) -> NoReturn:
    """Turns the forked copy into the child."""
    report_fd = keep[0]
    try:
        signal.set_wakeup_fd(-1)  # a signal of ours must not wake the agent
        os.setsid()
        if not die_with_parent(signal.SIGKILL, agent):
            os._exit(1)
        limits.forget()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        for fd in keep:
            os.set_inheritable(fd, True)
        if cwd is not None:
            os.chdir(cwd)
        os.execvpe(argv[0], list(argv), dict(environ))
    except OSError as error:
        why = programs.why_unstartable(argv[0], error, environ.get("PATH"))
        contract.send(report_fd, {UNSTARTABLE: why if error.filename != cwd else f"workdir {cwd}: {error.strerror}"})
    finally:
        os._exit(127)
