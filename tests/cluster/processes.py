"""The processes inside a pod, as the machine that is its node sees them."""

from __future__ import annotations

import ipaddress
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def find_agent(pod: Any) -> int:
    """Return the first process of the pod's container."""
    return min(_processes_in(_container_id(pod)), key=_inner_pid)


def find_trainer(pod: Any) -> int:
    """Return the trainer that the pod's agent started, not a standby process."""
    commands = {pid: _command_line(pid) for pid in _processes_in(_container_id(pod))}
    return next(
        pid
        for pid, words in commands.items()
        if "jaxlaunch.trainer" in words and not _is_standby(words)
    )


def find_processes(pod: Any) -> list[int]:
    """Return all processes of the pod, including the one that holds its network."""
    return list(_processes_in(pod["metadata"]["uid"]))


def listening_addresses(pid: int, port: int) -> list[str]:
    """Return the addresses at which the pod of a process listens on a port."""
    addresses = []
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]:
            (address, _, number), state = line.split()[1].partition(":"), line.split()[3]
            if state == "0A" and int(number, 16) == port:
                words = (
                    bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)
                )
                whole = ipaddress.ip_address(b"".join(words))
                addresses.append(str(getattr(whole, "ipv4_mapped", None) or whole))
    return addresses


def kill_processes(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _container_id(pod: Any) -> str:
    (status,) = pod["status"]["containerStatuses"]
    return str(status["containerID"]).rpartition("/")[2]


def _processes_in(name: str) -> Iterator[int]:
    """Yield the processes whose control group contains this name."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if name in (entry / "cgroup").read_text():
                    yield int(entry.name)


def _inner_pid(pid: int) -> int:
    """Return a process's pid inside its container."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def _is_standby(words: list[str]) -> bool:
    return any(word.endswith("standby.py") for word in words)


def _command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
