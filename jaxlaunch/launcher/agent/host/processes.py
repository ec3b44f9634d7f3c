"""The child processes of this host.

`Child` is one process. The agent starts it by fork and exec, and reads two pipes of it: one for its
output, one for its progress. The kernel kills it when the agent dies. `Processes` starts and kills
the processes of all ranks of this host. It also keeps a standby process for each rank, which has
done the slow imports and becomes the rank in the next attempt.
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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from jaxlaunch import contract, regular_files
from jaxlaunch.launcher.agent.gang import progress
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.progress import UNSTARTABLE, RankProgress
from jaxlaunch.launcher.agent.host import environment, process_tree
from jaxlaunch.launcher.agent.host.folders import SiteFolder
from jaxlaunch.launcher.agent.host.process_tree import ProcessTree
from jaxlaunch.launcher.agent.host.program_end import RAISED, ProgramEnd, reports_child
from jaxlaunch.launcher.agent.io import resources
from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.launcher.agent.io.output import LinePipe, OutputStream, RankLog
from jaxlaunch.records.members import Members
from jaxlaunch.runs.layout import start_folder

# Number of lines of output that a verdict may quote.
TAIL_LINES = 100
# Largest amount of output that `launcher logs` receives.
MAX_LAST_BYTES = 256 * 1024
# Largest size of the stacks that are read, which is enough for thousands of frames.
MAX_STACKS_BYTES = 1024 * 1024
# Gloo, the network of JAX on CPU, prints this at every start of every rank.
_GLOO_BANNER = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer "
    rb"ranks is : \d+"
)
# From linux/prctl.h.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_prctl: Any = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

OnOutput = Callable[["Child", bytes], None]
OnReport = Callable[["Child", Mapping[str, Any]], None]


class Child:
    """A running process of a rank, or a standby process."""

    def __init__(
        self,
        loop: Loop,
        rank: int,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        cwd: str | None,
        control_fd: int | None = None,
        phase: str | None = None,
        on_output: OnOutput,
        on_report: OnReport,
    ) -> None:
        """Fork and execute a command. A failure of `exec` arrives as a progress message.

        Args:
            loop: Event loop of the agent.
            rank: Rank of the process.
            argv: Command.
            environ: All environment variables of the process.
            cwd: Working directory, or None for that of the agent.
            control_fd: Descriptor that the process inherits.
            phase: Initial phase of the trainer. None for a program that may never report one.
            on_output: Called with each line of output.
            on_report: Called with each progress message.
        """
        self.rank, self.environ = rank, environ
        self.metrics_path, self.stacks_path = environ[contract.METRICS], environ[contract.STACKS]
        self.profile_path = environ[contract.PROFILE]
        self.progress = RankProgress(time.monotonic(), phase)
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.end = ProgramEnd()
        # Notes that were sent to the leader.
        self.notes: set[str] = set()
        # The most memory of one of its processes that have ended.
        self.peak_bytes = 0
        self._on_output, self._on_report = on_output, on_report
        self._output = LinePipe(loop, contract.MAX_LINE, self._take_output)
        pipe_path = environ[contract.PROGRESS]
        self._lock_path = pipe_path + contract.JOIN_LOCK
        self.activation_path = pipe_path + contract.ACTIVATION
        self._reports = LinePipe(loop, contract.MAX_LINE, self._take_report, pipe_path)
        report_fd = self._reports.write_end
        environ = {**environ, contract.PROGRESS_FD: str(report_fd)}
        agent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            inherited_fds = [report_fd] if control_fd is None else [report_fd, control_fd]
            _exec_child(argv, environ, cwd, self._output.write_end, inherited_fds, agent_pid)
        self.tree = ProcessTree(pid, f"{contract.STACKS}={self.stacks_path}")
        self._output.close_write_end()
        self._reports.close_write_end()

    @property
    def tail_text(self) -> str:
        """The last TAIL_LINES lines of output as one text."""
        return b"\n".join(self.tail).decode(errors="replace")

    @property
    def last_lines(self) -> list[str]:
        """The last TAIL_LINES lines of output, but at most MAX_LAST_BYTES bytes of them."""
        lines, size = list[str](), 0
        for line in reversed(self.tail):
            size += len(line)
            if lines and size > MAX_LAST_BYTES:
                break
            lines.append(line.decode(errors="replace"))
        return lines[::-1]

    @property
    def stacks_text(self) -> str:
        """The last MAX_STACKS_BYTES bytes of the stacks that the process has written so far."""
        try:
            data = regular_files.read_bounded(self.stacks_path, MAX_STACKS_BYTES, from_end=True)
        except OSError:
            # The file does not exist yet, or the process has replaced it.
            return ""
        return data.decode(errors="replace")

    def set_output_paused(self, is_paused: bool) -> None:
        """Pause or resume reading the output. While it is paused, the program waits."""
        self._output.set_paused(is_paused)

    def dump_stacks(self) -> None:
        """Ask the program to write its stacks, if it has our site hook."""
        if self.progress.has_hello:
            self.tree.dump_stacks()

    @property
    def has_vanished_program(self) -> bool:
        """Return whether the program ended behind a wrapper, by a signal or by os._exit."""
        return self.tree.has_lost_program and not self.progress.status.left

    @property
    def has_unknown_end(self) -> bool:
        """Return whether the exit code of the program is unknown, and no shell has seen it."""
        return self.end.ended_first and self.end.code is None and not self.tree.is_below_shell

    def resolve_exit(self, code: int, requeue_codes: Collection[int]) -> int:
        """Return the exit code of the rank, as `ProgramEnd.resolve_code` does, after `close`."""
        status = self.progress.status
        if self.end.code is None and status.left:
            self.end.code = status.leaving_code
        if self.tree.is_in_pipeline:
            self.end.overrides_shell = True
        return self.end.resolve_code(
            code,
            is_below_shell=self.tree.is_below_shell,
            has_left=status.left,
            requeue_codes=requeue_codes,
            last_line=self.tail[-1] if self.tail else b"",
        )

    def read_reports(self) -> None:
        """Read the progress messages that have arrived."""
        self._reports.drain()

    def close(self) -> None:
        """Read the rest of the pipes after the process has ended, and remove its files."""
        for pipe in (self._reports, self._output):
            pipe.drain()
            pipe.close()
        for path in (
            self.metrics_path,
            self.stacks_path,
            self.profile_path,
            self._lock_path,
            self.activation_path,
        ):
            # The file may never have existed, or the process has replaced it by a folder.
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _take_output(self, line: bytes) -> None:
        # Keep only the part of a progress bar that a terminal would show.
        text = line.rstrip(b"\r").rpartition(b"\r")[2]
        if _GLOO_BANNER.fullmatch(text):
            return
        self.tail.append(text)
        self._on_output(self, text)

    def _take_report(self, line: bytes) -> None:
        if not line:
            # Senders write an empty line to end a message that a full pipe has cut.
            return
        message = progress.read_line(line, self.rank)
        pid = message.get("pid")
        if "role" in message and pid is not None:
            if not self._take_role(pid, message):
                return
        elif pid is None and "phase" in message:
            # The program writes these lines itself, as docs/environment.md describes.
            self.tree.raise_role(contract.Role.REPORTS)
        elif pid not in (None, self.tree.program_pid):
            self._take_other_report(message)
            return
        now = time.monotonic()
        self.progress.take_message(message, now)
        if "phase" in message:
            # The program continues, so it has handled the exception of the task.
            self.end.task_error = None
        if "error" in message:
            message = self._take_error(message, now)
        self._on_report(self, message)

    def _take_error(self, message: dict[str, Any], now: float) -> dict[str, Any]:
        """Record an exception of the program, and return the message to report.

        If the program only says that its child failed, the exception of the child is reported.
        """
        error, end = message["error"], self.end
        if message.get("handled"):
            end.task_error = error
        elif not self.tree.is_program:
            end.error = error
            if end.code is None and self.tree.has_reported:
                end.code = RAISED
            self.progress.take_message({"atexit": True}, now)
        elif end.other_error is not None and reports_child(error):
            return {**message, "error": end.other_error}
        return message

    def _take_role(self, pid: int, message: Mapping[str, Any]) -> bool:
        """Record the role of a process, and return whether it is the program."""
        is_same_program = pid == self.tree.program_pid
        if not is_same_program and self.tree.has_joined and self.has_vanished_program:
            self._on_report(self, {GONE: True})
        if not self.tree.offer_program(pid, message["role"], message.get("pid_namespace")):
            return False
        if "hello" in message:
            self.end = ProgramEnd()
        if not is_same_program and self.progress.has_hello:
            self.progress.reset_interpreter(time.monotonic())
        return True

    def _take_other_report(self, message: Mapping[str, Any]) -> None:
        """Handle a report of another process: a wrapper, or one that a wrapper has started."""
        if message.get("fatal"):
            self._on_report(self, message)
        elif "child" in message:
            child = message["child"]
            if child["pid"] == self.tree.program_pid and self.tree.has_reported:
                self.end.record_child_end(message["pid"], child["code"])
                self._on_report(self, {CHILD_ENDED: True})
        elif "stops" in message:
            if message["stops"] == self.tree.program_pid:
                self.end.was_signalled = True
        elif "atexit" in message:
            self.end.take_other_exit(message["pid"], message.get("code"))
        elif "error" in message:
            is_killed = self.has_vanished_program
            self.end.take_other_error(message["error"], is_killed=is_killed)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, to receive their exit codes.

    A program that is started by `setsid` outlives the process that started it.
    """
    if _prctl is not None:
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(signal_number: int, parent_pid: int) -> bool:
    """Ask the kernel to send a signal when the parent dies. Return False if it is already dead."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    return os.getppid() == parent_pid


def _exec_child(
    argv: Sequence[str],
    environ: Mapping[str, str],
    cwd: str | None,
    output_fd: int,
    inherited_fds: Sequence[int],
    agent_pid: int,
) -> NoReturn:
    report_fd = inherited_fds[0]
    try:
        # The child shares the wakeup descriptor of the agent, and its signals must not wake the
        # agent.
        signal.set_wakeup_fd(-1)
        os.setsid()
        if not die_with_parent(signal.SIGKILL, agent_pid):
            os._exit(1)
        resources.restore_limits()
        for name in ("SIGTERM", "SIGINT", "SIGQUIT", "SIGCHLD", "SIGPIPE", "SIGXFSZ"):
            signal.signal(signal.Signals[name], signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        for fd in inherited_fds:
            os.set_inheritable(fd, True)
        if cwd is not None:
            os.chdir(cwd)
        os.execvpe(argv[0], list(argv), dict(environ))
    except OSError as error:
        fault = f"workdir {cwd}: {error.strerror}"
        if error.filename != cwd:
            fault = process_tree.explain_exec_error(argv[0], error, environ.get("PATH"))
        contract.send(report_fd, {UNSTARTABLE: fault})
    finally:
        os._exit(127)


# The module that a job without a command runs.
TRAINER_MODULE = "jaxlaunch.trainer"
# A process that waits until it is killed.
_IDLE_COMMAND = (sys.executable, "-I", "-c", "import signal; signal.pause()")
# Interval at which programs are polled after their wrapper has ended.
LEFTOVER_POLL_S = 0.1
# Key of the report that a program was killed after it had joined, and its wrapper started another.
GONE = "gone"
# Key of the report that the parent of the program has reported its exit code.
CHILD_ENDED = "child_ended"
# Time for the killed processes of a rank to end, because one may wait for a device or a disk.
KILLED_TIMEOUT_S, KILLED_POLL_S = 10.0, 0.02
# Time for processes that `setsid` or `nohup … &` leaves running to become a Python that reports.
FIRST_PYTHON_TIMEOUT_S = 10.0
# After this many standby processes were killed, no new one is started: it would be killed, too.
MAX_KILLED_STANDBYS = 3


class Standby:
    """A process that has imported the trainer and waits for the environment of an attempt."""

    def __init__(self, child: Child, control_fd: int) -> None:
        self.child, self._control = child, control_fd

    def activate(self, rank: int, environ: Mapping[str, str]) -> Child:
        """Send the environment of a rank, and return the process, which becomes that rank."""
        self.child.rank = rank
        has_hello = self.child.progress.has_hello
        self.child.progress = RankProgress(time.monotonic(), phase="init")
        self.child.progress.has_hello = has_hello
        self.child.environ = {**self.child.environ, **environ}
        variables = json.dumps(dict(environ)).encode() + b"\n"
        # Only `launcher exec` reads the file.
        with contextlib.suppress(OSError), open(self.child.activation_path, "wb") as file:
            file.write(variables)
        # If the process has just died, this is handled as the crash of a rank.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, variables)
        self.close()
        return self.child

    def close(self) -> None:
        """Close the pipe. A process that still waits for it then exits."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1


class Processes:
    """All processes that this agent has started, and their output."""

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
        may_restart: Callable[[], bool],
    ) -> None:
        # Processes of this attempt by rank, including those that have ended.
        self.children: dict[int, Child] = {}
        self._config, self._loop = config, loop
        self._site_folder, self._stdout = site_folder, stdout
        self._say, self._on_report, self._on_end = say, on_report, on_end
        # Returns whether another attempt may follow in the same pods.
        self._may_restart = may_restart
        # Standby processes by local rank, since the rank is not known before the next attempt.
        self._standbys: dict[int, Standby] = {}
        self._killed_standbys = 0
        self._has_failed_standby = False
        # Exit codes of orphans by pid. One of them may be a program that outlived its command.
        self._orphan_codes: dict[int, int] = {}
        self._logs: dict[int, RankLog] = {}
        # Idle processes in place of those of a failed attempt.
        self._place_pids: list[int] = []
        # Whether the output is not read, because stdout is behind.
        self._is_paused = False
        stdout.on_room = lambda: self._set_outputs_paused(False)
        self._argv = config.job.command or site_folder.module_command(TRAINER_MODULE)
        loop.on_child_exit(self._kill_leftovers, self._on_reaped)

    # --- an attempt -------------------------------------------------------------------------------

    def start_ranks(
        self,
        members: Members,
        attempt: int,
        coordinator: str,
        bind_address: str | None,
        start_number: int,
        saved_step: int | None,
    ) -> None:
        """Start the ranks of this host, from standby processes if there are any.

        Args:
            members: Hosts that hold ranks.
            attempt: Number of the attempt.
            coordinator: Address of JAX's coordinator, as host:port.
            bind_address: Address of this host at which the coordinator listens. None if it runs on
                another host.
            start_number: Number of the start, whose folder gets the logs.
            saved_step: Newest step that earlier attempts saved, as in
                `environment.attempt_variables`.
        """
        run_dir, log_bytes = self._config.run_dir, self._config.job.log_bytes
        folder = None if run_dir is None else start_folder(run_dir, start_number)
        ranks = members.ranks_of(self._config.host)

        def on_error(error: OSError) -> None:
            self._say(f"cannot write a log in the run folder: {error}")

        self._logs = {
            rank: self._logs.get(rank) or RankLog(folder, rank, log_bytes, on_error)
            for rank in ranks
        }
        attempt_variables = environment.attempt_variables(
            attempt, coordinator, bind_address, saved_step
        )
        self.children, self._orphan_codes = {}, {}
        for local_rank, rank in enumerate(ranks):
            member_variables = environment.member_variables(
                self._config, rank, members.process_count
            )
            if (standby := self._standbys.pop(local_rank, None)) is not None:
                self.children[rank] = standby.activate(rank, attempt_variables | member_variables)
            else:
                self.children[rank] = self._start_child(
                    rank, self._argv, attempt_variables | member_variables
                )

    def alive_children(self) -> list[Child]:
        """Return the processes of this attempt that have not ended."""
        return [child for child in self.children.values() if child.progress.status.exit is None]

    @property
    def have_all_stepped(self) -> bool:
        """Return whether every living process of this attempt has completed a step."""
        return all(child.progress.status.stepped for child in self.alive_children())

    def stop_all(self) -> None:
        """Ask every program to end. A repeated call asks those that have started since."""
        for child in self.alive_children():
            child.tree.stop()

    def kill_all(self) -> None:
        """Kill every process of this attempt and its session."""
        for child in self.alive_children():
            child.tree.kill()
        for child in self.children.values():
            child.tree.kill_detached()

    def flush_logs(self) -> None:
        """Write buffered logs to their files."""
        for log in self._logs.values():
            log.flush()

    def keep_places(self) -> None:
        """Start an idle process in the folder and with the environment of each rank.

        By it, `launcher exec` finds a rank whose own processes have ended.
        """
        agent_pid, cwd = os.getpid(), self._config.job.workdir
        null_fd = os.open(os.devnull, os.O_WRONLY)
        for child in self.children.values():
            try:
                pid = os.fork()
            except OSError as error:
                self._say(f"`launcher exec` will not find rank {child.rank}: {error.strerror}")
                continue
            if pid == 0:
                _exec_child(_IDLE_COMMAND, child.environ, cwd, null_fd, [null_fd], agent_pid)
            self._place_pids.append(pid)
        os.close(null_fd)

    def shut_down(self) -> None:
        """Kill every process, including standby processes."""
        self.kill_all()
        for pid in self._place_pids:
            # It may have ended.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for standby in self._standbys.values():
            standby.child.tree.kill()
            standby.close()
        self._standbys.clear()

    # --- standby processes ------------------------------------------------------------------------

    def keep_standbys(self) -> None:
        """Start missing standby processes, once the ranks run steps, if the job may restart."""
        job = self._config.job
        if job.command is not None or self._has_failed_standby or not self._may_restart():
            return
        for local_rank in range(self._config.job.processes_per_host):
            if local_rank not in self._standbys:
                control_read, control_write = os.pipe()
                argv = self._site_folder.standby_command(TRAINER_MODULE, control_read)
                # Any rank with this local rank will do, because the environment replaces it later.
                rank_count = len(self.children)
                rank = next(
                    (rank for rank in self.children if rank % rank_count == local_rank), local_rank
                )
                child = self._start_child(rank, argv, {}, control_fd=control_read)
                self._standbys[local_rank] = Standby(child, control_write)
                os.close(control_read)

    # --- one process ------------------------------------------------------------------------------

    def _start_child(
        self,
        rank: int,
        argv: Sequence[str],
        extra_variables: Mapping[str, str],
        control_fd: int | None = None,
    ) -> Child:
        self._site_folder.restore_files()
        environ = environment.rank_variables(self._config, os.environ, rank, self._site_folder.site)
        suffixes = {
            contract.METRICS: "metrics",
            contract.STACKS: "stacks",
            contract.PROFILE: "profile",
            contract.PROGRESS: "progress",
        }
        paths = {name: self._site_folder.new_path(suffix) for name, suffix in suffixes.items()}
        return Child(
            self._loop,
            rank,
            argv,
            {**environ, **paths, **extra_variables},
            cwd=self._config.job.workdir,
            control_fd=control_fd,
            phase="init" if self._config.job.command is None else None,
            on_output=self._write_output,
            on_report=self._take_report,
        )

    def _write_output(self, child: Child, line: bytes, *, is_shown: bool = True) -> None:
        if is_shown:
            self._stdout.write_line(b"[%d] %s" % (child.rank, line))
        if self._stdout.is_behind and not self._is_paused:
            self._set_outputs_paused(True)
        # A spare host has no logs yet.
        if (log := self._logs.get(child.rank)) is not None:
            log.write_line(line)

    def _all_children(self) -> list[Child]:
        standbys = self._standbys.values()
        return [*self.children.values(), *(standby.child for standby in standbys)]

    def _set_outputs_paused(self, is_paused: bool) -> None:
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            for child in self._all_children():
                child.set_output_paused(is_paused)

    def _take_report(self, child: Child, message: Mapping[str, Any]) -> None:
        if (refusal := message.get("refusal")) is not None:
            text = contract.refusal_line(refusal["message"], refusal["code"])
            # `launcher run` shows the refusal in the verdict at the end.
            is_shown = not self._config.is_launched
            self._write_output(child, text.encode(errors="replace"), is_shown=is_shown)
        if self.children.get(child.rank) is child:
            self._on_report(child, message)

    def _kill_leftovers(self, pid: int) -> None:
        """Kill the session of an ended process, unless it has programs that end by themselves."""
        for child in self._all_children():
            tree = child.tree
            if tree.pid != pid:
                continue
            child.end.ended_first = tree.has_lost_program
            is_awaited = tree.awaits_program(0.0, FIRST_PYTHON_TIMEOUT_S)
            if not tree.stop_leftovers() and not is_awaited:
                tree.kill()

    def _on_reaped(self, pid: int, code: int, peak_bytes: int) -> None:
        for child in self.children.values():
            # A program may have outlived the wrapper that started it.
            if pid in (child.tree.pid, child.tree.program_pid):
                child.peak_bytes = max(child.peak_bytes, peak_bytes)
            if child.tree.pid == pid:
                child.tree.mark_reaped()
                self._finish_child(child, code, time.monotonic())
                return
        for local_rank, standby in list(self._standbys.items()):
            if standby.child.tree.pid == pid:
                standby.close()
                standby.child.close()
                del self._standbys[local_rank]
                self._on_standby_end(standby.child.rank, code)
                return
        if any(child.tree.is_reaped for child in self.alive_children()):
            # The orphan may be the program of such a child, whose last messages were not read yet.
            self._orphan_codes[pid] = code

    def _on_standby_end(self, rank: int, code: int) -> None:
        """Log the end of a standby process, and start another if it was killed.

        The new one starts at once if the ranks of this host run steps or the host is a spare, and
        otherwise with the first step.
        """
        self._killed_standbys += 1
        self._has_failed_standby = code >= 0 or self._killed_standbys >= MAX_KILLED_STANDBYS
        consequence = "another is started"
        if self._has_failed_standby:
            consequence = "restarts will take longer"
        self._say(f"the standby process of rank {rank} ended with {code}; {consequence}")
        if self.have_all_stepped:
            self.keep_standbys()

    def _finish_child(self, child: Child, code: int, ended_at: float) -> None:
        """Report the end of a process once the last program that it started has ended.

        Args:
            child: The child.
            code: Exit code of the process that was started, or minus the signal.
            ended_at: When it ended, in monotonic seconds.
        """
        child.read_reports()
        tree, waited_s = child.tree, time.monotonic() - ended_at
        awaits_program = code == contract.DONE and tree.awaits_program(
            waited_s, FIRST_PYTHON_TIMEOUT_S
        )
        if tree.stop_leftovers() or awaits_program:
            self._loop.call_later(
                LEFTOVER_POLL_S, lambda: self._finish_child(child, code, ended_at)
            )
            return
        if not tree.is_killed:
            if (program_code := self._orphan_codes.pop(tree.program_pid, None)) is not None:
                child.end.code, child.end.overrides_shell = program_code, True
            tree.kill()
        # A killed program may still hold devices, ports and locks that the next attempt needs.
        if tree.has_killed_processes() and waited_s < KILLED_TIMEOUT_S:
            self._loop.call_later(KILLED_POLL_S, lambda: self._finish_child(child, code, ended_at))
            return
        child.close()
        code = child.resolve_exit(code, self._config.job.requeue_codes)
        child.progress.record_exit(code)
        self._on_end(child, code)
