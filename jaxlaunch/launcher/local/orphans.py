"""Ends what the agents of a run left running. In a pod nothing outlives the container; here a program does outlive an
agent that is killed, where a wrapper such as `sh -c` is between them: only the wrapper dies with the agent.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from jaxlaunch import contract

GONE_S = 10.0  # after which a process that SIGKILL does not end is given up
POLL_S = 0.02
_PROC = Path("/proc")  # where there is none, as on macOS, nothing is found
_AGENT = re.compile(rb"\0-I\0[^\0]*/agent-\w+\.pyz\0$")  # the end of its command line


def end(uid: str) -> int:
    """Kills every process of this user that belongs to run `uid`, and waits for them to be gone; returns how many.

    None while an agent of that run lives: they are its processes.
    """
    killed: set[int] = set()
    until = time.monotonic() + GONE_S
    while uid and (found := set(_of(uid))) and time.monotonic() < until:
        if any(_AGENT.search(_read(pid, "cmdline")) for pid in found):
            break
        for pid in found:
            _kill(pid, uid)
        killed |= found  # what they start meanwhile is found the next time
        time.sleep(POLL_S)
    return len(killed)


def _of(uid: str) -> Iterator[int]:
    """The processes that were started with the variables of run `uid`; a zombie has none."""
    for entry in os.scandir(_PROC) if _PROC.is_dir() else ():
        if entry.name.isdecimal() and int(entry.name) != os.getpid() and _belongs(int(entry.name), uid):
            yield int(entry.name)


def _belongs(pid: int, uid: str) -> bool:
    try:
        is_ours = (_PROC / str(pid)).stat().st_uid == os.geteuid()
    except OSError:
        return False
    return is_ours and f"{contract.UID}={uid}".encode() in _read(pid, "environ").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:  # it has ended, or it is not for us to read
        return b""


def _kill(pid: int, uid: str) -> None:
    """Kills a process if it is still of the run: its number may be another's by now."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _belongs(pid, uid):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except OSError:
        pass  # it has ended
    finally:
        os.close(process)
