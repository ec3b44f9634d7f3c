"""The processes of one rank, as /proc shows them.

The process that the agent starts may be the program, or a wrapper of it such as `sh -c`. SIGTERM
must reach each process of the program exactly once. A wrapper that received it, too, would end
before the program has saved, and the program would be killed with it. `ProcessTree` therefore looks
for the program: it is the Python process with the highest `contract.Role`, or else the command of a
shell, or else the started process. The program may run in another session, or outlive the process
that was started (`setsid`).
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

# At most this many bytes of a shell script are read.
MAX_SCRIPT_BYTES = 256 * 1024


def send_signal(pid: int, signal_number: int) -> None:
    """Send a signal to one process, if it still exists."""
    # The process may have ended, or run as another user.
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

    A shell without a trap would die of the signal, and its command would be killed with it, so only
    the command receives the signal. A shell with a trap receives the signal together with its
    foreground command, and runs the trap after the command has ended. Background commands receive
    none, because the trap may signal them.

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

    The other commands of a pipeline end with the program. A program in the background of a shell
    with a trap is omitted, because the trap may signal it.
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
    """Return the parent of a process, the parent of that, and so on. Empty without /proc."""
    ancestors = []
    while parent := _parent_pid(pid):
        ancestors.append(pid := parent)
    return ancestors


def has_exit_trap(pid: int) -> bool:
    """Return whether a process is bash with an EXIT trap.

    An EXIT trap makes bash handle SIGTERM and other signals, SIGXCPU among them. Unless SIGTERM has
    a trap of its own, bash runs the EXIT trap at once, while its command continues.
    """
    return has_handler(pid, signal.SIGXCPU) and is_shell(pid)


def reads_from_pipe(pid: int) -> bool:
    """Return whether the standard input of a process is a pipe."""
    try:
        return os.readlink(f"/proc/{pid}/fd/0").startswith("pipe:")
    except OSError:
        return False


def is_in_pipeline(pid: int) -> bool:
    """Return whether a shell pipes the output of a process into another command.

    The shell then ignores the exit code of the process, unless `pipefail` is set. Two cases are not
    a pipeline: with a process substitution (`> >(tee log)`), the other command is a child of the
    process, or the shell keeps the pipe open; and a program that captures the output of a process
    keeps the pipe open, too.
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
    """Return the running processes that have an environment variable, given as `NAME=VALUE`."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
    return [pid for pid in pids if has_variable(pid, marker) and not _is_zombie(pid)]


def has_variable(pid: int, marker: str) -> bool:
    """Return whether a process was started with an environment variable, given as `NAME=VALUE`.

    During `exec`, a process has no variables for a moment. An orphan that this process has adopted
    then counts as one with the variable.
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
    if error.errno == errno.EACCES and "/" not in program:
        # exec answers so too if it may not search a folder of PATH and no other one has the file.
        folders = _find_unreadable_folders(program, path)
        if folders:
            names = " and ".join(folders)
            missing = "command not found; it is not on PATH"
            return f"{program}: {missing}, where this user may not read {names}"
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        return f"{program}: {error.strerror}"
    file = program if "/" in program else shutil.which(program, path=path)
    if file is None:
        return f"{program}: command not found; it is not on PATH"
    if (interpreter := _read_interpreter(file)) is not None:
        return f"{program}: {interpreter}: bad interpreter: {error.strerror}"
    return f"{program}: {error.strerror}" + ("" if file.startswith("/") else f" in {os.getcwd()}")


def _find_unreadable_folders(program: str, path: str | None) -> list[str]:
    """Return the folders of PATH that may not be searched, or none if another one has the file."""
    folders = []
    for folder in (os.defpath if path is None else path).split(os.pathsep):
        try:
            os.stat(os.path.join(folder, program))
        except PermissionError:
            folders.append(folder)
        except OSError:
            continue
        else:
            return []
    return folders


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

    POSIX requires that such commands ignore SIGQUIT.
    """
    ignored, ignored_by_shell = (
        (_read_signal_mask(process, "SigIgn") or 0) >> (signal.SIGQUIT - 1) & 1
        for process in (pid, shell)
    )
    return bool(ignored and not ignored_by_shell)


def _read_signal_mask(pid: int, field: str) -> int | None:
    """Return a signal mask of a process, whose bit 0 is signal 1, or None if it is unknown."""
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
        # The process has ended, which counts as a zombie.
        return "Z", "0"
    return state, parent


# Bash may run its EXIT trap for this long after the signalled processes have ended. Another signal
# would interrupt the trap.
EXIT_TRAP_S = 3.0


@dataclasses.dataclass
class PythonProcess:
    """A Python process of a rank that has reported its role.

    Attributes:
        pid: Its pid, which means nothing here if it is in another PID namespace.
        role: Its newest role.
        is_in_our_namespace: Whether the process is in the PID namespace of the agent.
    """

    pid: int
    role: int
    is_in_our_namespace: bool

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended. In another PID namespace the answer is False."""
        return self.is_in_our_namespace and not is_running(self.pid)


class ProcessTree:
    """The processes of a rank: the started process and its descendants."""

    def __init__(self, pid: int, marker: str) -> None:
        """Start without a program.

        Args:
            pid: The process that was started, the leader of its session.
            marker: Environment variable, `NAME=VALUE`, that only processes of this rank have.
        """
        self.pid, self._marker = pid, marker
        self.is_killed = self.is_reaped = False
        self._program: PythonProcess | None = None
        # The program until a Python below it took over by importing JAX. If that Python ends
        # without joining, such as one that counts devices, the earlier program is the program
        # again.
        self._outer_program: PythonProcess | None = None
        self._python_pids: set[int] = set()
        # Ancestors of the program.
        self._wrapper_pids: set[int] = set()
        # Whether the program is in a pipeline, which hides its exit code.
        self.is_in_pipeline = False
        # Whether a shell has started the program or one of its wrappers.
        self.is_below_shell = False
        # Processes that were sent SIGTERM, and the monotonic time at which one of them last
        # existed.
        self._signalled: set[int] = set()
        self._signalled_alive_at = -math.inf
        # Whether the started process was a wrapper at the time of the stop.
        self._is_wrapper = False

    # --- the program ------------------------------------------------------------------------------

    @property
    def program_pid(self) -> int:
        """Pid of the program, 0 until a Python has reported its role."""
        program = self._find_program()
        return 0 if program is None else program.pid

    @property
    def is_program(self) -> bool:
        """Return whether the started process is the program.

        Otherwise a wrapper (`sh -c "python a.py || python b.py"`) may handle its end and start
        another program.
        """
        return self.program_pid in (0, self.pid)

    @property
    def has_lost_program(self) -> bool:
        """Return whether the program has ended before a wrapper."""
        program = self._find_program()
        return program is not None and program.pid != self.pid and program.has_ended

    @property
    def has_reported(self) -> bool:
        """Return whether the program has reported progress or has joined the other ranks."""
        return self._program is not None and self._program.role >= contract.Role.REPORTS

    @property
    def has_joined(self) -> bool:
        """Return whether the program has joined the other ranks."""
        return self._program is not None and self._program.role >= contract.Role.JOINED

    def offer_program(self, pid: int, role: int, pid_namespace: int | None) -> bool:
        """Record the role of a process, and return whether it is the program from now on.

        Of several Python processes the one with the highest role is the program, and among equals
        the one that started the other. If commands run one after another, the first Python of each
        becomes the program in turn.

        Args:
            pid: Pid of the process. It may have ended since it sent its role.
            role: Its role.
            pid_namespace: Its PID namespace, as `contract.pid_namespace` returns it.
        """
        program = self._find_program()
        candidate = PythonProcess(pid, role, pid_namespace == contract.pid_namespace())
        self._python_pids.add(pid)
        if program is not None and program.pid != pid and program.is_in_our_namespace:
            is_outranked = program.role > role
            if program.role == role and role > contract.Role.STARTED:
                is_outranked = pid not in find_ancestors(program.pid)
            if is_outranked and not program.has_ended:
                return False
            self._outer_program = None if program.has_ended else program
        if program is None or program.pid != pid:
            is_below = pid != self.pid and candidate.is_in_our_namespace
            self.is_in_pipeline = is_below and is_in_pipeline(pid)
            self._wrapper_pids = set(find_ancestors(pid))
            self.is_below_shell = is_below and self._has_shell_above(pid)
        self._program = candidate
        return True

    def _has_shell_above(self, pid: int) -> bool:
        """Return whether an ancestor of a process within this rank is a shell."""
        for ancestor in find_ancestors(pid):
            if is_shell(ancestor):
                return True
            if ancestor == self.pid:
                break
        return False

    def raise_role(self, role: int) -> None:
        """Raise the role of the program, if it has reported one, to at least this role."""
        if self._program is not None:
            self._program.role = max(self._program.role, role)

    def awaits_program(self, waited_s: float, timeout_s: float) -> bool:
        """Return whether the program may still run although the started process has ended with 0.

        Args:
            waited_s: Seconds since the started process ended.
            timeout_s: Seconds after which remaining processes without any Python do not count.
        """
        if self.is_killed:
            return False
        if self._program is None:
            return waited_s < timeout_s and bool(self._find_remaining())
        is_only_python = self._python_pids == {self._program.pid}
        is_helper = self._program.role == contract.Role.STARTED and not is_only_python
        pid = self._program.pid
        # An adopted orphan counts even as a zombie: its exit code arrives once it is reaped.
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
        if not is_running(pid):
            return False
        return session_id(pid) == self.pid or has_variable(pid, self._marker)

    def _find_remaining(self) -> list[int]:
        """Return the running processes of this rank."""
        pids = {*find_session_processes(self.pid), *find_marked_processes(self._marker)}
        return sorted(pids)

    # --- signals ----------------------------------------------------------------------------------

    def mark_reaped(self) -> None:
        """Record that the started process was reaped, so that the kernel may reuse its pid."""
        self.is_reaped = True

    def stop(self) -> None:
        """Send SIGTERM once to each process of the program.

        The caller repeats this until the process has ended, because a shell may start another
        program. That program receives the signal once it has a handler.
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
            # Wrappers end by themselves after their program was stopped.
            done_pids = self._wrapper_pids if is_wrapper and self._signalled else set()
            for pid in find_targets_below(self.pid, signal.SIGTERM, is_wrapper=is_wrapper):
                if pid not in done_pids or is_shell(pid):
                    yield pid

    def _terminate(self, pid: int) -> None:
        send_signal(pid, signal.SIGTERM)
        self._signalled.add(pid)

    def stop_leftovers(self) -> bool:
        """Send SIGTERM to programs that outlive the started process, and return whether one runs.

        After a stop, a shell may exit in its trap and leave a program in the background.
        """
        if self.is_killed or not self._signalled or not self._is_wrapper:
            return False
        remaining = find_orphans(self._find_remaining())
        for pid in remaining if self.pid in self._signalled else ():
            if pid not in self._signalled:
                self._terminate(pid)
        return not self._signalled.isdisjoint(remaining)

    def dump_stacks(self) -> None:
        """Ask the program to write its stacks, if it has the handler of our site hook.

        Without a handler, the signal would end the program.
        """
        program_pid = self.program_pid
        pid = program_pid if program_pid and self._owns(program_pid) else self.pid
        if has_handler(pid, signal.SIGUSR1):
            send_signal(pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the started process, its session and the program.

        The session may have several process groups, so killing one group is not enough.
        """
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
        """Return whether the program or a process of the session is still running after `kill`."""
        program_pid = self.program_pid
        is_program_left = program_pid not in (0, self.pid) and self._owns(program_pid)
        return is_program_left or bool(find_session_processes(self.pid))

    def kill_detached(self) -> None:
        """Kill the processes of this rank in other sessions.

        A helper with its own session, such as one that uploads metrics, may outlive its rank, but
        must not outlive the attempt.
        """
        for pid in find_marked_processes(self._marker):
            send_signal(pid, signal.SIGKILL)
