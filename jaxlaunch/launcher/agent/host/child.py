"""One child process: started by fork and exec, read through pipes, never outliving its agent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jaxlaunch import contract, regular_files
from jaxlaunch.launcher.agent.gang import reports
from jaxlaunch.launcher.agent.gang.progress import Progress
from jaxlaunch.launcher.agent.gang.reports import UNSTARTABLE
from jaxlaunch.launcher.agent.host import programs
from jaxlaunch.launcher.agent.host.process_tree import ProcessTree
from jaxlaunch.launcher.agent.io import limits
from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.launcher.agent.io.pipes import LinePipe

TAIL_LINES = 100  # of output that a verdict may quote
MAX_LAST = 256 * 1024  # bytes of output that is asked for
MAX_STACKS = 1024 * 1024  # bytes: of thousands of frames
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
        self._on_output, self._on_report = on_output, on_report
        self._output = LinePipe(loop, contract.MAX_LINE, self._take_output)
        self._reports = LinePipe(loop, contract.MAX_LINE, self._take_report)
        os.set_blocking(self._reports.write_end, False)
        report_fd = self._reports.write_end
        environ = {**environ, contract.PROGRESS_FD: str(report_fd)}
        agent = os.getpid()
        pid = os.fork()
        if pid == 0:
            keep = [report_fd] if control is None else [report_fd, control]
            _become(argv, environ, cwd, self._output.write_end, keep, agent)
        self.tree = ProcessTree(pid)
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

    def pause(self, is_paused: bool) -> None:
        """Has the program wait with its output, or go on."""
        self._output.pause(is_paused)

    def dump_stacks(self) -> None:
        """Have the program write its stacks, if it has our site hook."""
        if self.progress.has_hello:
            self.tree.dump_stacks()

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
            self.tree.take_reporter(message["pid"])
            self.handled = None
        self.progress.take(message, time.monotonic())
        if "error" in message and not self.tree.is_program:
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
