"""Which of a child's processes is the program, as far as /proc tells: a wrapper such as `sh -c` only waits for it."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

SHELLS = frozenset({"ash", "bash", "busybox", "dash", "ksh", "mksh", "sh", "zsh"})
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)  # a mask: bit 0 is signal 1


def signal(pid: int, number: int) -> None:
    """Sends a signal to one process, which may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended, or it is ours and not reaped yet


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
    try:
        found = _CAUGHT.search(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return not os.path.exists("/proc/self/status")
    return found is None or bool(int(found[1], 16) >> (number - 1) & 1)


def below(pid: int, number: int, *, is_wrapper: bool = False) -> Iterator[int]:
    """The processes that a signal to `pid` is meant for: what it runs, where it is a shell without a trap for it.

    A shell dies of the signal, and what it runs would be killed with it. `is_wrapper`: it is known to be one.
    """
    running = children(pid) if is_wrapper or _is_shell(pid) and not catches(pid, number) else []
    if not running:
        yield pid
    for child in running:
        yield from below(child, number)


def children(pid: int) -> list[int]:
    """The processes that `pid` started and that run; none where the kernel does not tell."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


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


def _is_shell(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in SHELLS
    except OSError:
        return False
