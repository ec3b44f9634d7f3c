"""One process of ours: started by fork and exec, read through pipes, never outliving its agent."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from launcher.agent.loop import Loop
from launcher.agent.pipes import LinePipe
from launcher.agent.progress import Progress
from trainer import contract

TAIL_LINES = 100
PR_SET_PDEATHSIG = 1  # linux/prctl.h
UNSTARTABLE = "unstartable"  # a progress line of ours: exec failed, and why
_prctl: Any = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

Line = Callable[["Child", bytes], None]
Heard = Callable[["Child", Mapping[str, Any]], None]


class Child:
    """A running process of a rank, or a spare for one."""

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
        on_output: Line,
        on_progress: Heard,
    ) -> None:
        """Forks and executes; a command that cannot be executed says so as a progress line.

        `phase` is what it is in until it says otherwise: a program that may never report is in none. `control` is a
        descriptor that it keeps.
        """
        self.rank = rank
        self.metrics_path, self.stacks_path = environ[contract.METRICS], environ[contract.STACKS]
        self.profile_path = environ[contract.PROFILE]
        self.progress = Progress(time.monotonic(), phase)
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._reporter = 0  # the pid of the Python that speaks; a wrapper, as `sh -c`, is not it
        self._on_output, self._on_progress = on_output, on_progress
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
        return b"\n".join(self.tail).decode(errors="replace")

    def signal(self, number: int) -> None:
        """Signals the program alone: the Python that speaks, else the process that was started."""
        try:
            is_ours = self._reporter > 0 and os.getsid(self._reporter) == self.pid
            os.kill(self._reporter if is_ours else self.pid, number)
        except ProcessLookupError:
            pass  # it ended and is not reaped yet

    def kill(self) -> None:
        """Kills the process and all of its session that stayed in its group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(self.pid, signal.SIGKILL)  # between fork and setsid there is no group yet

    def reaped(self) -> None:
        """The process is gone: reads its last words and lets go of what it held."""
        for pipe in (self._reports, self._output):
            pipe.drain()
            pipe.close()
        for path in (self.metrics_path, self.stacks_path, self.profile_path):
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass

    def _take_output(self, line: bytes) -> None:
        text = line.rstrip(b"\r").rpartition(b"\r")[2]  # of a progress bar, what it would show
        self.tail.append(text)
        self._on_output(self, text)

    def _take_report(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = {"note": f"rank {self.rank} reported a line that cannot be read"}
        if isinstance(message, dict):
            if isinstance(message.get("pid"), int):
                self._reporter = message["pid"]
            self.progress.take(message, time.monotonic())
            self._on_progress(self, message)


def die_with_parent(number: int, parent: int) -> bool:
    """Asks the kernel for signal `number` when the parent dies; False when it is dead already."""
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
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
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
        contract.send(report_fd, {UNSTARTABLE: f"{error.filename or argv[0]}: {error.strerror}"})
    finally:
        os._exit(127)
