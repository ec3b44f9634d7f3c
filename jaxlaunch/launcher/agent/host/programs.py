"""Which of a child's processes is the program, as far as /proc tells: a wrapper such as `sh -c` only waits for it."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import signal as signals
from collections.abc import Collection, Iterator
from pathlib import Path

SHELLS = frozenset({"ash", "bash", "busybox", "dash", "ksh", "mksh", "sh", "zsh"})


def signal(pid: int, number: int) -> None:
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
