"""The processes of one rank, as far as /proc shows them.

The process that the agent starts may be the program, or a wrapper of it such as `sh -c`. SIGTERM
must reach each process of the program exactly once. A wrapper that received it too would end before
the program has saved, and the program would be killed with it. `ProcessTree` finds the program in
three ways: by the Python process with the highest `contract.Role`, else by walking down from shells
to their commands, else by taking the started process. The program may run in another session, or
outlive the process that was started (`setsid`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from jaxlaunch import contract

# A script of a shell is read up to this size.
MAX_SCRIPT_BYTES = 256 * 1024


def send_signal(pid: int, signal_number: int) -> None:
    """Send a signal to one process, if it still exists."""
    # The process has ended, or runs as another user.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal_number)


def process_exists(pid: int) -> bool:
    """Return whether a process with this pid exists. A zombie counts."""
    return session_id(pid) is not None


def is_running(pid: int) -> bool:
    """Return whether a process runs. Without /proc, a zombie counts."""
    if not process_exists(pid):
        return False
    return not os.path.exists("/proc/self/stat") or not _is_zombie(pid)


def session_id(pid: int) -> int | None:
    """Return the session id of a process, or None if there is no such process."""
    try:
        return os.getsid(pid)
    except (OSError, OverflowError):
        return None


def has_handler(pid: int, signal_number: int) -> bool:
    """Return whether a process has a handler for a signal. Without /proc the answer is True."""
    mask = _read_signal_mask(pid, "SigCgt")
    if mask is None:
        return not os.path.exists("/proc/self/status")
    return bool(mask >> (signal_number - 1) & 1)


def is_shell(pid: int) -> bool:
    """Return whether the executable of a process is a shell."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in contract.SHELLS
    except OSError:
        return False


def find_targets_below(pid: int, signal_number: int, *, is_wrapper: bool = False) -> Iterator[int]:
    """Yield the processes that must receive a signal for `pid`.

    A shell without a trap would die of the signal, and the command that it runs would be killed
    with it. A shell with a trap runs it after the command that it waits for has ended. Signalling
    its background commands is up to the trap.

    Args:
        pid: The started process, or a descendant.
        signal_number: Number of the signal.
        is_wrapper: Whether the process is known not to be the program.
    """
    is_shell_process = is_shell(pid)
    if not (is_shell_process or is_wrapper):
        yield pid
        return
    has_trap = has_handler(pid, signal_number)
    child_pids = find_children(pid) if is_shell_process or not has_trap else []
    if has_trap:
        child_pids = [child for child in child_pids if not _is_in_background(child, pid)]
    if has_trap or not child_pids:
        yield pid
    for child in child_pids:
        yield from find_targets_below(child, signal_number)


def find_targets_to(program: int, pid: int, signal_number: int) -> Iterator[int]:
    """Yield the shells with a trap between `pid` and a known program, and then the program.

    The other commands of a pipeline end with the program. Signalling the background commands of a
    shell with a trap is up to the trap.
    """
    chain = [program]
    while chain[-1] != pid and (parent := _parent_pid(chain[-1])):
        chain.append(parent)
    for shell, child in itertools.pairwise(reversed(chain if chain[-1] == pid else [program])):
        if is_shell(shell) and has_handler(shell, signal_number):
            yield shell
            if _is_in_background(child, shell):
                return
    yield program


def find_ancestors(pid: int) -> list[int]:
    """Return the parent of a process, its parent and so on. Empty without /proc."""
    ancestors = []
    while parent := _parent_pid(pid):
        ancestors.append(pid := parent)
    return ancestors


def has_exit_trap(pid: int) -> bool:
    """Return whether a process is bash with an EXIT trap, which makes it handle other signals.

    Without a trap for the signal itself, bash would run the EXIT trap while the command that it
    waits for continues.
    """
    return has_handler(pid, signal.SIGXCPU) and is_shell(pid)


def reads_from_pipe(pid: int) -> bool:
    """Return whether a process reads from another command of its pipeline."""
    try:
        return os.readlink(f"/proc/{pid}/fd/0").startswith("pipe:")
    except OSError:
        return False


def is_in_pipeline(pid: int) -> bool:
    """Return whether a shell pipes the output of a process into another command.

    The exit code of the process then has no effect. With a process substitution (`> >(tee log)`)
    the other command is a child of the process, or the shell keeps the pipe open. With `pipefail`
    the exit code counts. A program that captures the output of another one holds the pipe, too.
    """
    pipe = _read_link(f"/proc/{pid}/fd/1")
    if pipe in {_read_link(f"/proc/{child}/fd/0") for child in find_children(pid)}:
        return False
    while pid and pipe.startswith("pipe:"):
        pid = _parent_pid(pid)
        links = {fd: _read_link(f"/proc/{pid}/fd/{fd}") for fd in _list_folder(f"/proc/{pid}/fd")}
        if pipe in {link for fd, link in links.items() if fd not in ("1", "2")}:
            return False
        if links.get("1") != pipe:
            return is_shell(pid) and "pipefail" not in _read_shell_text(pid)
    return False


def _read_shell_text(pid: int) -> str:
    """Return the command line and the script of a shell, and its options from the environment."""
    folder = f"/proc/{pid}"
    texts = [_read_bytes(f"{folder}/cmdline")]
    for argument in texts[0].split(b"\0")[1:]:
        path = os.path.join(f"{folder}/cwd", os.fsdecode(argument))
        if argument and not argument.startswith(b"-") and os.path.isfile(path):
            texts.append(_read_bytes(path))
            break
    variables = _read_bytes(f"{folder}/environ").split(b"\0")
    texts += [variable for variable in variables if variable.startswith(b"SHELLOPTS=")]
    return b"\n".join(texts).decode(errors="replace")


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _list_folder(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_SCRIPT_BYTES)
    except OSError:
        return b""


def find_session_processes(session_leader: int) -> list[int]:
    """Return the processes in the session of `session_leader`, empty without /proc."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
    return [pid for pid in pids if session_id(pid) == session_leader and not _is_zombie(pid)]


def find_marked_processes(marker: str) -> list[int]:
    """Return the running processes that were started with a variable, `NAME=VALUE`."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
    return [pid for pid in pids if has_variable(pid, marker) and not _is_zombie(pid)]


def has_variable(pid: int, marker: str) -> bool:
    """Return whether a process was started with a variable, `NAME=VALUE`.

    Inside `exec` a process has no variables for a moment. An orphan that this process has adopted
    counts then.
    """
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        # The process has ended, or belongs to another user.
        return False
    if not environ:
        return _parent_pid(pid) == os.getpid() and not _is_zombie(pid)
    return marker.encode() in environ.split(b"\0")


def find_orphans(pids: Collection[int]) -> list[int]:
    """Return the processes whose parent is not in the collection."""
    return [pid for pid in pids if _parent_pid(pid) not in pids]


def find_children(pid: int) -> list[int]:
    """Return the running children of a process. Empty without /proc."""
    try:
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [child for child in map(int, pids) if not _is_zombie(child)]


def explain_exec_error(program: str, error: OSError, path: str | None) -> str:
    """Return why `exec` of a program failed, as a shell would print it."""
    if error.errno == errno.ENOEXEC:
        return f"{program}: Exec format error; a script begins with a line such as #!/bin/sh"
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        return f"{program}: {error.strerror}"
    file = program if "/" in program else shutil.which(program, path=path)
    if file is None:
        return f"{program}: command not found; it is not on PATH"
    if (interpreter := _read_interpreter(file)) is not None:
        return f"{program}: {interpreter}: bad interpreter: {error.strerror}"
    return f"{program}: {error.strerror}" + ("" if file.startswith("/") else f" in {os.getcwd()}")


def _read_interpreter(file: str) -> str | None:
    """Return the interpreter in the first line of a script, or None."""
    try:
        with open(file, "rb") as script:
            match = re.match(rb"#!\s*(\S+)", script.readline(256))
    except OSError:
        return None
    return os.fsdecode(match[1]) if match else None


def _is_in_background(pid: int, shell: int) -> bool:
    """Return whether a shell runs a command in its background.

    POSIX requires a shell to ignore SIGQUIT for such commands.
    """
    ignored, ignored_by_shell = (
        (_read_signal_mask(process, "SigIgn") or 0) >> (signal.SIGQUIT - 1) & 1
        for process in (pid, shell)
    )
    return bool(ignored and not ignored_by_shell)


def _read_signal_mask(pid: int, field: str) -> int | None:
    """Return a signal mask of a process, with bit 0 for signal 1, or None without /proc."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    match = re.search(rf"^{field}:\s*([0-9a-f]+)$", text, re.MULTILINE)
    return None if match is None else int(match[1], 16)


def _parent_pid(pid: int) -> int:
    return int(_read_stat(pid)[1])


def _is_zombie(pid: int) -> bool:
    return _read_stat(pid)[0] == "Z"


def _read_stat(pid: int) -> tuple[str, str]:
    """Return the state of a process and the pid of its parent, as in proc_pid_stat(5)."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        # The process has ended.
        return "Z", "0"
    return state, parent


# Bash gets this long for its EXIT trap after the signalled processes have ended: a signal would cut
# the trap short.
EXIT_TRAP_S = 3.0


@dataclasses.dataclass
class PythonProcess:
    """A Python of a rank that has told its role.

    Attributes:
        pid: Its pid. In another PID namespace, no process with this pid exists here.
        role: Its newest role.
        is_here: Whether the process is in the PID namespace of the agent.
    """

    pid: int
    role: int
    is_here: bool

    @property
    def has_ended(self) -> bool:
        """Return whether the process is one of this PID namespace and has ended."""
        return self.is_here and not is_running(self.pid)


class ProcessTree:
    """The processes of a rank: the one that was started, and those that it starts."""

    def __init__(self, pid: int, marker: str) -> None:
        """Start without a program.

        Args:
            pid: The process that was started, the leader of its session.
            marker: A variable, `NAME=VALUE`, that only processes of this rank have.
        """
        self.pid, self._marker = pid, marker
        self.is_killed = self.is_reaped = False
        self._program: PythonProcess | None = None
        # The program before a Python that only imports JAX, such as one that counts devices.
        self._outer_program: PythonProcess | None = None
        self._python_pids: set[int] = set()
        # The wrappers of the program.
        self._wrapper_pids: set[int] = set()
        # Whether the exit code of the program is lost in a pipeline.
        self.is_in_pipeline = False
        # Whether a shell has started the program or one of its wrappers.
        self.is_below_shell = False
        # Processes that were sent SIGTERM, and the last time at which one of them existed.
        self._signalled: set[int] = set()
        self._signalled_alive_at = -math.inf
        # Whether the started process was a wrapper at the time of the stop.
        self._is_wrapper = False

    # --- the program ------------------------------------------------------------------------------

    @property
    def program_pid(self) -> int:
        """The pid of the program, 0 while no Python has told its role."""
        program = self._find_program()
        return 0 if program is None else program.pid

    @property
    def is_program(self) -> bool:
        """Return whether the started process is the program.

        A wrapper (`sh -c "python a.py || python b.py"`) may handle the exit and continue with
        something else.
        """
        return self.program_pid in (0, self.pid)

    @property
    def has_lost_program(self) -> bool:
        """Return whether a wrapper outlived the program."""
        program = self._find_program()
        return program is not None and program.pid != self.pid and program.has_ended

    @property
    def has_reported(self) -> bool:
        """Return whether the program has joined the other ranks or reports progress."""
        return self._program is not None and self._program.role >= contract.Role.REPORTS

    @property
    def has_joined(self) -> bool:
        """Return whether the program has joined the other ranks."""
        return self._program is not None and self._program.role >= contract.Role.JOINED

    def offer_program(self, pid: int, role: int, pid_namespace: int | None) -> bool:
        """Return whether a process with this role is the program from now on.

        Of several Pythons the one with the highest role is the program, and of equals the one that
        started the other. The first Pythons of commands that follow each other take turns.

        Args:
            pid: Pid of the process. It may have ended since it sent its role.
            role: Its role.
            pid_namespace: Its PID namespace, as `contract.pid_namespace` returns it.
        """
        program = self._find_program()
        candidate = PythonProcess(pid, role, pid_namespace == contract.pid_namespace())
        self._python_pids.add(pid)
        if program is not None and program.pid != pid and program.is_here:
            is_outranked = program.role > role
            if program.role == role and role > contract.Role.STARTED:
                is_outranked = pid not in find_ancestors(program.pid)
            if is_outranked and not program.has_ended:
                return False
            self._outer_program = None if program.has_ended else program
        if program is None or program.pid != pid:
            is_below = pid != self.pid and candidate.is_here
            self.is_in_pipeline = is_below and is_in_pipeline(pid)
            self._wrapper_pids = set(find_ancestors(pid))
            self.is_below_shell = is_below and self._has_shell_above(pid)
        self._program = candidate
        return True

    def _has_shell_above(self, pid: int) -> bool:
        """Return whether a process of this rank above another one is a shell."""
        for ancestor in find_ancestors(pid):
            if is_shell(ancestor):
                return True
            if ancestor == self.pid:
                break
        return False

    def raise_role(self, role: int) -> None:
        """Raise the role of the program, if a Python has told one, to at least this."""
        if self._program is not None:
            self._program.role = max(self._program.role, role)

    def awaits_program(self, waited_s: float, timeout_s: float) -> bool:
        """Return whether the program lives on after the started process has ended with 0.

        Args:
            waited_s: Seconds since then.
            timeout_s: How long processes of this rank may take to become the first Python.
        """
        if self.is_killed:
            return False
        if self._program is None:
            return waited_s < timeout_s and bool(self._find_remaining())
        is_only_python = self._python_pids == {self._program.pid}
        is_helper = self._program.role == contract.Role.STARTED and not is_only_python
        pid = self._program.pid
        # An orphan in any state: its exit code arrives once it is reaped.
        is_adopted = pid != self.pid and _parent_pid(pid) == os.getpid()
        return not is_helper and (is_adopted or self._owns(pid))

    def _find_program(self) -> PythonProcess | None:
        program, outer = self._program, self._outer_program
        if program is None or outer is None or program.role > contract.Role.IMPORTED_JAX:
            return program
        if program.has_ended and not outer.has_ended:
            self._program, self._outer_program = outer, None
        return self._program

    def _owns(self, pid: int) -> bool:
        """Return whether a pid is a running process of this rank."""
        return is_running(pid) and self._is_ours(pid)

    def _is_ours(self, pid: int) -> bool:
        return session_id(pid) == self.pid or has_variable(pid, self._marker)

    def _find_remaining(self) -> list[int]:
        """Return the running processes of this rank."""
        pids = {*find_session_processes(self.pid), *find_marked_processes(self._marker)}
        return sorted(pids)

    # --- signals ----------------------------------------------------------------------------------

    def mark_reaped(self) -> None:
        """Record that the pid is free, so that the kernel may give it to another process."""
        self.is_reaped = True

    def stop(self) -> None:
        """Send SIGTERM once to each process of the program.

        The caller repeats this until the process has ended: a shell may continue with another
        program, which receives the signal once it has a handler.
        """
        self._is_wrapper = self._is_wrapper or not self.is_program or is_shell(self.pid)
        is_first_stop = not self._signalled
        alive_pids = {pid for pid in self._signalled if session_id(pid) is not None}
        if alive_pids:
            self._signalled_alive_at = time.monotonic()
        targets = [pid for pid in self._stop_targets() if pid not in alive_pids]
        if is_first_stop:
            preferred = [
                pid
                for pid in targets
                if has_handler(pid, signal.SIGTERM) or not reads_from_pipe(pid)
            ]
            targets = preferred or targets
        else:
            targets = [pid for pid in targets if has_handler(pid, signal.SIGTERM)]
        without_exit_trap = [pid for pid in targets if not has_exit_trap(pid)]
        if without_exit_trap or time.monotonic() - self._signalled_alive_at < EXIT_TRAP_S:
            targets = without_exit_trap
        for pid in targets:
            self._terminate(pid)

    def _stop_targets(self) -> Iterator[int]:
        """Yield the processes to stop: the program, else the commands of a wrapper."""
        program_pid = self.program_pid
        if program_pid not in (0, self.pid) and self._owns(program_pid):
            yield from find_targets_to(program_pid, self.pid, signal.SIGTERM)
        elif self.is_reaped:
            yield from find_orphans(self._find_remaining())
        else:
            is_wrapper = self.has_lost_program
            # A wrapper whose program was stopped ends by itself.
            done_pids = self._wrapper_pids if is_wrapper and self._signalled else set()
            for pid in find_targets_below(self.pid, signal.SIGTERM, is_wrapper=is_wrapper):
                if pid not in done_pids or is_shell(pid):
                    yield pid

    def _terminate(self, pid: int) -> None:
        send_signal(pid, signal.SIGTERM)
        self._signalled.add(pid)

    def leaves_programs(self) -> bool:
        """Return whether programs still run after a stop, while the started process has ended.

        A shell may exit in its trap and leave a program in the background. That program receives
        SIGTERM now.
        """
        if self.is_killed or not self._signalled or not self._is_wrapper:
            return False
        remaining = find_orphans(self._find_remaining())
        for pid in remaining if self.pid in self._signalled else ():
            if pid not in self._signalled:
                self._terminate(pid)
        return not self._signalled.isdisjoint(remaining)

    def dump_stacks(self) -> None:
        """Ask the program, if it has our site hook, to write its stacks.

        Without the handler of the hook, the signal would end the program.
        """
        program_pid = self.program_pid
        pid = program_pid if program_pid and self._owns(program_pid) else self.pid
        if has_handler(pid, signal.SIGUSR1):
            send_signal(pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the process and its session, which may have several process groups."""
        self.is_killed = True
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            # Between fork and setsid there is no group yet.
            if not self.is_reaped:
                os.kill(self.pid, signal.SIGKILL)
        for pid in find_session_processes(self.pid):
            send_signal(pid, signal.SIGKILL)
        if self._program is not None and self._owns(self._program.pid):
            send_signal(self._program.pid, signal.SIGKILL)

    def has_killed_processes(self) -> bool:
        """Return whether the program or a process of the session still runs after `kill`."""
        program_pid = self.program_pid
        is_program_left = program_pid not in (0, self.pid) and self._owns(program_pid)
        return is_program_left or bool(find_session_processes(self.pid))

    def kill_detached(self) -> None:
        """Kill the processes of this rank in other sessions.

        A helper in a session of its own, such as one that uploads metrics, may outlive its rank but
        not the attempt.
        """
        for pid in find_marked_processes(self._marker):
            send_signal(pid, signal.SIGKILL)
