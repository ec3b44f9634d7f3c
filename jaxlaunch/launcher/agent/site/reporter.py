"""Reports of a Python process to the agent, and its role among the Pythons of its rank.

A command may start its program through other Pythons: `conda run`, `accelerate launch`, a launch.py
of the user. Every Python below the agent therefore has a `Reporter`, which takes a higher role when
the process imports JAX, reports progress or joins the other ranks. The agent follows the process
with the highest role. Processes below one that reports progress or has joined report nothing,
unless they join themselves.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import faulthandler
import fcntl
import functools
import io
import os
import signal
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Callable
    from typing import Any

# Arguments with which multiprocessing, and joblib's variant of it, start a worker.
WORKER_ARGUMENTS = ("--multiprocessing-fork", "multiprocessing.forkserver", "loky.backend.popen")
WORKER_MODULES = ("multiprocessing.process", "multiprocess.process", "billiard.process")


def create_reporter(contract: Any, standard_modules: Callable[[], Any]) -> Reporter | None:
    """Return the reporter of this process, or None if there is no pipe to an agent.

    Args:
        contract: The module of the contract.
        standard_modules: Context in which imports find only the standard library.
    """
    names = contract.PROGRESS, contract.PROGRESS_FD
    if not any(name in os.environ for name in names):
        return None
    reporter = Reporter(contract, standard_modules)
    pid = str(reporter.pid)
    if pid in (os.environ.get(contract.FIRST_PYTHON, pid), os.environ.get(contract.REPORTER)):
        # If the pipe is gone, this process reports nothing.
        role = contract.Role.STARTED
        if contract.TRAIN_SPEC in os.environ:
            role = contract.Role.REPORTS
        if not reporter.take_role(role):
            return None
        os.environ.setdefault(contract.FIRST_PYTHON, pid)
    return reporter


class Reporter:
    """Writer of progress messages in one process."""

    def __init__(self, contract: Any, standard_modules: Callable[[], Any]) -> None:
        self._contract, self._standard_modules = contract, standard_modules
        # The pipe is opened when there is something to report.
        self.fd = -1
        # Runs at exit, after the handlers of the program.
        self.clean_up: Callable[[], object] | None = None
        # Code of the last sys.exit. The agent may not see it as the exit code of the process: the
        # process may still wait in JAX's barrier, JAX may abort it, and a wrapper may hide the
        # code.
        self._exit_code: int | None = None
        self._thread = _thread.get_ident()
        self._first_pid = os.getpid()
        self._start_process()
        self._excepthook: Any = None
        if not self.is_below_program:
            self._install_hooks()
        os.register_at_fork(after_in_child=self._start_process)

    def _start_process(self) -> None:
        """Initialize the state of a process that has just started, by `exec` or by a fork."""
        self.pid = os.getpid()
        # The role that was reported to the agent.
        self.role: int | None = None
        self.is_below_program = os.environ.get(self._contract.REPORTER, str(self.pid)) != str(
            self.pid
        )
        self._has_left = False
        # Whether multiprocessing ends this process because of an exception.
        self._is_failed_worker = False
        # Whether this process has waited for a child and has reported how it ended.
        self._is_parent = False
        self._lock_fd = -1

    def _install_hooks(self) -> None:
        if self._excepthook is None:
            self._excepthook = sys.excepthook
            sys.excepthook = self.excepthook
            # This handler runs last, because no other one has been registered yet.
            atexit.register(self._run_exit)
            leave = sys.exit

            # Pickle needs a plain function of the same name.
            @functools.wraps(sys.exit)
            def exit(status: Any = None, /) -> None:
                self._note_exit(status)
                leave(status)

            sys.exit = exit  # type: ignore[assignment]

    @property
    def runs_at_exit(self) -> bool:
        """Return whether `clean_up` runs when this process ends."""
        return self._excepthook is not None

    @property
    def is_in_process(self) -> bool:
        """Return whether this process reports its own end. A fork reports only with a role."""
        pid = os.getpid()
        return pid == self._first_pid or (pid == self.pid and self.role is not None)

    @property
    def has_left(self) -> bool:
        """Return whether the program has ended, so that only `clean_up` follows."""
        return self._has_left

    # --- the role ---------------------------------------------------------------------------------

    def take_role(self, role: int, jax: str | None = None) -> bool:
        """Report a role, and return whether this process reports to the agent.

        Args:
            role: The role. A lower role than the current one changes nothing.
            jax: Version of JAX, once it is imported.
        """
        contract = self._contract
        if self.is_below_program and role < contract.Role.JOINED:
            return False
        if self.role is None and not self._open_pipe():
            return False
        is_first, self.role = self.role is None, max(role, self.role or 0)
        if self.role >= contract.Role.REPORTS:
            os.environ[contract.REPORTER] = str(self.pid)
        if is_first:
            self._set_up_program()
        message = {"role": self.role, "pid_namespace": contract.pid_namespace()}
        if is_first or jax is not None:
            python = sys.version.split()[0]
            message = {"hello": "site", "python": python, "jax": jax, **message}
        self.send(message)
        return True

    def lock_rank(self) -> bool:
        """Lock the rank for this process, which may then join. Return False if another one has it.

        The kernel releases the lock when the process ends.
        """
        pipe = os.environ.get(self._contract.PROGRESS)
        if self._lock_fd >= 0 or not pipe:
            return True
        try:
            lock_fd = os.open(pipe + self._contract.JOIN_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            # The agent has ended.
            return True
        try:
            fcntl.lockf(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock_fd)
            return False
        self._lock_fd = lock_fd
        return True

    def refuse(self, message: str) -> None:
        """End the job because of what this process does, and end this process."""
        code = self._contract.BAD_SPEC
        error = {"type": "RuntimeError", "message": message, "code": code, "traceback": None}
        if self._open_pipe():
            self.send({"error": error, "fatal": True})
        print(f"jaxlaunch: {message}", file=sys.stderr, flush=True)
        raise SystemExit(code)

    def _open_pipe(self) -> bool:
        """Open the pipe to the agent, unless the inherited descriptor is that pipe.

        The inherited descriptor may have been closed, and its number used for another file.
        """
        if self.fd >= 0:
            return True
        contract, path = self._contract, os.environ.get(self._contract.PROGRESS)
        try:
            pipe = None if path is None else os.stat(path)
            fd = int(os.environ.get(contract.PROGRESS_FD, "-1"))
            with contextlib.suppress(OSError):
                status = os.fstat(fd)
                is_same = pipe is None or os.path.samestat(status, pipe)
                if stat.S_ISFIFO(status.st_mode) and is_same:
                    self.fd = fd
            if self.fd < 0 and path is not None:
                self.fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                os.environ[contract.PROGRESS_FD] = str(self.fd)
        except (OSError, ValueError):
            return False
        return self.fd >= 0

    def _set_up_program(self) -> None:
        """Set up output, exceptions and stacks of this process as the program of the rank."""
        self.is_below_program = False
        self._install_hooks()
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Complete lines are written at once. With PYTHONUNBUFFERED, a text and its newline
            # would be two writes, between which another process may write.
            sys.stdout.reconfigure(line_buffering=True, write_through=False)
        # stderr may be closed, and the folder of the agent may have been removed.
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            # A segmentation fault then prints a traceback.
            faulthandler.enable()
            if path := os.environ.get(self._contract.STACKS):
                file = open(path, "w")  # noqa: SIM115  # faulthandler writes to its descriptor
                # The agent may send SIGUSR1 as soon as it knows of this process.
                faulthandler.register(signal.SIGUSR1, file, all_threads=True)

    # --- messages ---------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Add a note to the summary of the run."""
        if self._open_pipe():
            self._contract.send(self.fd, {"note": text})

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message of the rank's program. Return False if the pipe is full or gone."""
        return bool(self._contract.send(self.fd, {**message, "pid": self.pid}))

    def excepthook(
        self,
        error_type: type[BaseException],
        error: BaseException,
        traceback: types.TracebackType | None,
    ) -> None:
        """Report the traceback, and exit without JAX's barrier, which waits for the peers."""
        self._excepthook(error_type, error, traceback)
        if self.is_in_process:
            self._report_error(error)

    def _note_exit(self, status: Any) -> None:
        """Store the code of an exit."""
        if self.is_in_process and _thread.get_ident() == self._thread:
            code = 0 if status is None else status if isinstance(status, int) else 1
            self._exit_code = code & 0xFF

    def _run_exit(self) -> None:
        self.leave()
        if self._is_failed_worker and os.getpid() == self.pid:
            _flush_streams()
            os._exit(self._exit_code or 1)
        self._close_tracker()
        if self.clean_up is not None:
            self.clean_up()

    def leave(self) -> None:
        """Report that the program ends, and whether it waits in JAX's barrier next."""
        if self._has_left or not self.is_in_process:
            return
        error = getattr(sys, "last_value", None)
        # An excepthook of the program has printed the error.
        if error is not None:
            self._report_error(error)
        self._has_left = True
        code = {} if self._exit_code is None else {"code": self._exit_code}
        if self.role is not None:
            self._flush_reports()
            counts = {"waits": _is_distributed(), "processes": _process_count()}
            self.send({"atexit": True, **counts, **code})
        elif self._is_parent:
            self.send({"atexit": True, **code})

    def report_joining(self, *, is_waiting: bool) -> None:
        """Report that `jax.distributed.initialize` waits for the other ranks, or has returned."""
        self.send({"joining": is_waiting})

    def report_wait(self, *, is_waiting: bool) -> None:
        """Report that this process enters or leaves JAX's shutdown barrier."""
        if self.is_in_process and not self._has_left and self.role is not None:
            self.send({"waits": is_waiting})

    @property
    def is_program(self) -> bool:
        """Return whether this process is the rank's program: it has joined or reports progress."""
        return self.role is not None and self.role >= self._contract.Role.REPORTS

    def report_child(self, pid: int, status: int) -> None:
        """Report the wait status of a child, unless this process is the program itself."""
        has_ended = os.WIFEXITED(status) or os.WIFSIGNALED(status)
        if has_ended and not (self.is_program or self.is_below_program) and self._open_pipe():
            self._is_parent = True
            self.send({"child": {"pid": pid, "code": os.waitstatus_to_exitcode(status)}})

    def report_signal(self, pid: int, signal_number: int) -> None:
        """Report that this process ends another one, unless it is the program itself."""
        is_end = signal_number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
        if not is_end or self.is_program or self.is_below_program or _is_ending(abs(pid)):
            return
        if self._open_pipe():
            self.send({"stops": abs(pid)})

    def report_worker_error(self, error: BaseException, *, is_handled: bool = False) -> None:
        """Report an exception in a worker of multiprocessing, if it is the rank's program.

        Args:
            error: The exception.
            is_handled: Whether it is the exception of a task, which the parent may handle and which
                does not end this process.
        """
        if not self.is_program or self._has_left or os.getpid() != self.pid:
            return
        if not is_handled:
            # The process ends without JAX's barrier, which waits for the peers.
            self._has_left = self._is_failed_worker = True
        self._send_error(error, **({"handled": True} if is_handled else {}))

    def _flush_reports(self) -> None:
        """Send pending reports, because os._exit does not run the handlers of atexit."""
        reporting: Any = sys.modules.get("jaxlaunch.reporting")
        if reporting is not None:
            reporting._leave(self.pid)

    def _close_tracker(self) -> None:
        """Close the tracker of the job, which may upload its last numbers without a timeout."""
        reporting: Any = sys.modules.get("jaxlaunch.reporting")
        # Another version of jaxlaunch in the image may lack this function.
        close = getattr(reporting, "_close_tracker", None)
        if close is not None and self.is_in_process:
            close(stops=bool(self._exit_code))

    def _report_error(self, error: BaseException) -> None:
        """Report an exception that ends this process.

        A process without a role has not joined, so it may end as usual.
        """
        if self._has_left or (self.role is None and self.is_below_program):
            return
        self._has_left = True
        self._send_error(error)
        _flush_streams()
        if self.role is not None:
            os._exit(1)

    def _send_error(self, error: BaseException, **fields: Any) -> None:
        self._flush_reports()
        # `traceback` imports more modules while it formats the exception.
        with self._standard_modules():
            code = self._contract.exception_code(error)
            message = self._contract.error_line(error, code)
        if self._open_pipe():
            self.send({**message, **fields})


# PF_EXITING of Linux (include/linux/sched.h), a flag in /proc/PID/stat.
EXITING_FLAG = 0x4


def _is_ending(pid: int) -> bool:
    """Return whether a child has ended, or the kernel ends it now.

    A pool may still signal such a child: it notices the end of a worker by a pipe, which the kernel
    closes before the worker becomes a zombie.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *_, flags = file.read().rpartition(")")[2].split()[:7]
    except (OSError, ValueError):
        return False
    return state == "Z" or bool(int(flags) & EXITING_FLAG)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The stream may be closed or None.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def is_worker() -> bool:
    """Return whether multiprocessing has started this process, or is starting it now.

    While a worker imports the main module of its parent, only a private attribute shows this.
    """
    for name in WORKER_MODULES:
        module: Any = sys.modules.get(name)
        if module is None:
            continue
        if module.parent_process() is not None:
            return True
        if getattr(module.current_process(), "_inheriting", False):
            return True
    arguments = getattr(sys, "orig_argv", [])
    return any(text in argument for argument in arguments for text in WORKER_ARGUMENTS)


def _is_distributed() -> bool:
    """Return whether this process has joined a gang, so that JAX waits for the others at exit."""
    module: Any = sys.modules.get("jax._src.distributed")
    return module is not None and module.global_state.client is not None


def _process_count() -> int:
    """Return the number of processes with which this one used JAX, 0 if it used no device."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    if bridge is None or not getattr(bridge, "_backends", None):
        return 0
    try:
        return int(bridge.process_count())
    except Exception:
        # A failed backend must not change how the program ends.
        return 0


# The reporter of this interpreter, for jaxlaunch.reporting.
reporter: Reporter | None = None
