"""The processes inside a pod, as the machine that is its node sees them."""

from __future__ import annotations

import ipaddress
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def agent(pod: Any) -> int:
    """The first process of the pod's container."""
    return min(_within(_container(pod)), key=_inner)


def child(pod: Any) -> int:
    """The trainer that its agent started; a standby process is none."""
    found = {pid: _command(pid) for pid in _within(_container(pod))}
    return next(
        pid
        for pid, words in found.items()
        if "jaxlaunch.trainer" in words and not _is_standby(words)
    )


def everything(pod: Any) -> list[int]:
    """All that runs in the pod, the process that holds its network included."""
    return list(_within(pod["metadata"]["uid"]))


def listens(pid: int, port: int) -> list[str]:
    """The addresses at which the pod of a process listens on a port; an IPv4 one as such."""
    found = []
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]:
            (address, _, number), state = line.split()[1].partition(":"), line.split()[3]
            if state == "0A" and int(number, 16) == port:
                words = (
                    bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)
                )
                whole = ipaddress.ip_address(b"".join(words))
                found.append(str(getattr(whole, "ipv4_mapped", None) or whole))
    return found


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _container(pod: Any) -> str:
    (status,) = pod["status"]["containerStatuses"]
    return str(status["containerID"]).rpartition("/")[2]


def _within(name: str) -> Iterator[int]:
    """The processes whose control group has this in its name."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if name in (entry / "cgroup").read_text():
                    yield int(entry.name)


def _inner(pid: int) -> int:
    """Its number inside its container."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def _is_standby(words: list[str]) -> bool:
    return any(word.endswith("standby.py") for word in words)


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
