"""One child process: started by fork and exec, read through pipes, never outliving its agent.

The processes of this host: started together, killed together, with a standby process for each kept ready.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jaxlaunch import contract, regular_files
from jaxlaunch.launcher.agent.gang import progress
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.progress import UNSTARTABLE, Progress
from jaxlaunch.launcher.agent.host import environment, process_tree
from jaxlaunch.launcher.agent.host.folders import SiteFolder
from jaxlaunch.launcher.agent.host.process_tree import ProcessTree
from jaxlaunch.launcher.agent.io import resources
from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.launcher.agent.io.output import LinePipe, OutputStream, RankLog
from jaxlaunch.records.members import Members
from jaxlaunch.runs.layout import start_folder

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
        message = progress.read_line(line, self.rank)
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
        resources.restore_limits()
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
        why = process_tree.why_unstartable(argv[0], error, environ.get("PATH"))
        contract.send(report_fd, {UNSTARTABLE: why if error.filename != cwd else f"workdir {cwd}: {error.strerror}"})
    finally:
        os._exit(127)


TRAINER = "jaxlaunch.trainer"  # the module that a job without a command runs
POLL_S = 0.1  # between two looks at programs whose wrapper has ended
MAX_KILLED_STANDBYS = 3  # then something kills each of them


class Standby:
    """A process with the trainer's imports done, which waits on a pipe for the environment of the next attempt."""

    def __init__(self, child: Child, control: int) -> None:
        self.child, self._control = child, control

    def activate(self, rank: int, environ: Mapping[str, str]) -> Child:
        """The process of `rank` in the next attempt, which it becomes with these variables."""
        self.child.rank = rank
        has_hello = self.child.progress.has_hello
        self.child.progress = Progress(time.monotonic(), phase="init")
        self.child.progress.has_hello = has_hello
        try:
            os.write(self._control, json.dumps(dict(environ)).encode() + b"\n")
        except BrokenPipeError:
            pass  # it died at this moment: that is a crash like any other
        self.close()
        return self.child

    def close(self) -> None:
        """Closes the pipe; a process that still waits on it exits."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1


class Processes:
    """Owns every process that this agent started, and writes their output."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        site_folder: SiteFolder,
        stdout: OutputStream,
        *,
        say: Callable[[str], None],
        on_report: Callable[[Child, Mapping[str, Any]], None],
        on_end: Callable[[Child, int], None],
    ) -> None:
        self.children: dict[int, Child] = {}  # of this attempt, by rank; those that ended stay until the next
        self._config, self._loop, self._site_folder, self._stdout = config, loop, site_folder, stdout
        self._say, self._on_report, self._on_end = say, on_report, on_end
        self._standbys: dict[int, Standby] = {}  # by place on this host: which rank it gets is not known yet
        self._killed_standbys = 0
        self._has_failed_standby = False
        self._logs: dict[int, RankLog] = {}
        self._is_paused = False  # no program's output is read, since the stream is behind
        stdout.on_room = lambda: self._pause(False)
        self._argv = site_folder.command(TRAINER) if config.job.command is None else config.job.command
        loop.on_child(self._ending, self._reap)

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def start(
        self,
        members: Members,
        attempt: int,
        coordinator: str,
        listens: str | None,
        number: int,
        saved: int | None,
    ) -> None:
        """Starts the ranks that this host has among `members`, by its standby processes if there are any.

        `listens` is the address of this host at which JAX's coordinator listens; None where it is on another host.
        `number` is that of the start, whose folder gets the logs. `saved` is of earlier attempts.
        """
        run, kept = self._config.run_dir, self._config.job.log_bytes
        folder = None if run is None else start_folder(run, number)
        ranks = members.ranks(self._config.host)
        self._logs = {rank: self._logs.get(rank) or RankLog(folder, rank, kept, self._log_failed) for rank in ranks}
        shared = environment.of_attempt(attempt, coordinator, listens, saved)
        self.children = {}
        for place, rank in enumerate(ranks):
            fresh = shared | environment.of_member(self._config, rank, members.processes)
            standby = self._standbys.pop(place, None)
            self.children[rank] = standby.activate(rank, fresh) if standby else self._start(rank, self._argv, fresh)

    def alive(self) -> list[Child]:
        """The processes of this attempt that have not ended."""
        return [child for child in self.children.values() if child.progress.status.exit is None]

    def stop(self) -> None:
        """Asks every program of this attempt to end; called again, those that have begun since."""
        for child in self.alive():
            child.tree.stop()

    def kill(self) -> None:
        """Kills every process of this attempt, with its process group."""
        for child in self.alive():
            child.tree.kill()

    def dump_stacks(self) -> None:
        """Has every process with our site hook write its stacks."""
        for child in self.alive():
            child.dump_stacks()

    def flush(self) -> None:
        """Has the logs reach their files."""
        for log in self._logs.values():
            log.flush()

    def dismiss(self) -> None:
        """Kills every process, standby processes included."""
        self.kill()
        for standby in self._standbys.values():
            standby.child.tree.kill()
            standby.close()
        self._standbys.clear()

    # --- standby processes --------------------------------------------------------------------------------------------

    def keep_standbys(self) -> None:
        """Starts the standby processes that are missing. Called once the ranks step, so that it delays no start."""
        if self._config.job.command is not None or self._config.job.in_place_limit == 0 or self._has_failed_standby:
            return
        for place in range(self._config.job.processes_per_host):
            if place not in self._standbys:
                waits, control = os.pipe()
                argv = self._site_folder.standby(TRAINER, waits)
                rank = next((rank for rank in self.children if rank % len(self.children) == place), place)
                self._standbys[place] = Standby(self._start(rank, argv, {}, control=waits), control)
                os.close(waits)

    # --- one process --------------------------------------------------------------------------------------------------

    def _start(self, rank: int, argv: Sequence[str], extra: Mapping[str, str], control: int | None = None) -> Child:
        environ = environment.of_rank(self._config, os.environ, rank, self._site_folder.site)
        kinds = {contract.METRICS: "metrics", contract.STACKS: "stacks", contract.PROFILE: "profile"}
        paths = {variable: self._site_folder.path(kind) for variable, kind in kinds.items()}
        return Child(
            self._loop,
            rank,
            argv,
            {**environ, **paths, **extra},
            cwd=self._config.job.workdir,
            control=control,
            phase="init" if self._config.job.command is None else None,
            on_output=self._print,
            on_report=self._report,
        )

    def _print(self, child: Child, line: bytes, *, is_shown: bool = True) -> None:
        if is_shown:
            self._stdout.line(b"[%d] %s" % (child.rank, line))
        if self._stdout.is_behind and not self._is_paused:
            self._pause(True)
        if (log := self._logs.get(child.rank)) is not None:  # a spare has none yet
            log.line(line)

    def _pause(self, is_paused: bool) -> None:
        """Has every program wait until the stream has written what is queued, or go on."""
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            for child in [*self.children.values(), *(standby.child for standby in self._standbys.values())]:
                child.pause(is_paused)

    def _report(self, child: Child, message: Mapping[str, Any]) -> None:
        if (refusal := message.get("refusal")) is not None:
            line = contract.refusal_line(refusal["message"], refusal["code"])
            # `launcher run` repeats it in the verdict, at the end.
            self._print(child, line.encode(errors="replace"), is_shown=not self._config.is_launched)
        if self.children.get(child.rank) is child:
            self._on_report(child, message)

    def _ending(self, pid: int) -> None:
        """Kills what an ended process leaves behind in its session, but for programs that a stop lets end."""
        for child in [*self.children.values(), *(standby.child for standby in self._standbys.values())]:
            if child.tree.pid == pid and not child.tree.leaves_programs():
                child.tree.kill()

    def _reap(self, pid: int, code: int) -> None:
        for child in self.children.values():
            if child.tree.pid == pid:
                child.tree.take_reaped()
                return self._ended(child, code)
        for place, standby in list(self._standbys.items()):
            if standby.child.tree.pid == pid:
                standby.close()
                standby.child.close()
                del self._standbys[place]
                return self._lost_standby(standby.child.rank, code)

    def _lost_standby(self, rank: int, code: int) -> None:
        """Says that a standby process has ended, and starts another for one that was killed: at once where the ranks of
        this host step or it has none, as a spare."""
        self._killed_standbys += 1
        self._has_failed_standby = code >= 0 or self._killed_standbys >= MAX_KILLED_STANDBYS
        follows = "restarts will take longer" if self._has_failed_standby else "another is started"
        self._say(f"the standby process of rank {rank} ended with {code}; {follows}")
        if all(child.progress.status.stepped for child in self.alive()):
            self.keep_standbys()

    def _ended(self, child: Child, code: int) -> None:
        """Reports the end of a process, with the last program that it leaves."""
        if child.tree.leaves_programs():
            self._loop.after(POLL_S, lambda: self._ended(child, code))
            return
        if not child.tree.is_killed:
            child.tree.kill()
        child.close()
        child.progress.ended(code)
        self._on_end(child, code)

    def _log_failed(self, error: OSError) -> None:
        self._say(f"cannot write a log in the run folder: {error}")
