"""Asks NCCL on this host what it knows of a hang: its RAS threads answer although every Python is stuck.

RAS is a thread of each process that has initialized NCCL, from 2.24 on. It listens on localhost:28028 (or
`NCCL_RAS_ADDR`), takes lines of text, and answers for all processes of the job (NVIDIA, NCCL user guide, "RAS", read in
November 2026). The kernel is asked for Xid messages of GPUs, which most containers have no right to read.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Mapping

ADDRESS, ENABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
PORT = 28028
ASKED_S = 3.0  # after which there is an answer, or none
# RAS answers with what it has after as many seconds without a process that does not answer it, and then some more.
QUESTION = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nVERBOSE STATUS\n"
MAX_TEXT = 32_000  # bytes of an answer: those of communicators without a fault are a line each
KERNEL = "/dev/kmsg"
MAX_XIDS, XID_S = 20, 3600.0
_XID = re.compile(rb"^\d+,\d+,(\d+),[^;\n]*;(NVRM: .*)", re.M)


class Question:
    """A question under way, in a thread: neither a name to look up nor a peer can hold up the caller."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._until = time.monotonic() + ASKED_S
        self._answer: str | None = None
        threading.Thread(target=self._ask, args=(dict(environ),), name="nccl-ras", daemon=True).start()

    @property
    def answer(self) -> str | None:
        """What was answered, empty where nothing was; None while it may still come."""
        return "" if self._answer is None and time.monotonic() >= self._until else self._answer

    def _ask(self, environ: Mapping[str, str]) -> None:
        found = status(environ, self._until)
        self._answer = "\n".join(filter(None, (found, xids(KERNEL))))


def status(environ: Mapping[str, str], until: float) -> str:
    """What RAS says of the job before the monotonic time `until`; empty where nothing that is RAS answers."""
    if environ.get(ENABLE) == "0":
        return ""
    text = b""
    with contextlib.suppress(OSError, ValueError):  # a closed port; an address that is none
        # A negative timeout is a ValueError, after which `create_connection` leaves its socket open.
        left = max(until - time.monotonic(), 0.0)
        with socket.create_connection(_address(environ.get(ADDRESS, "")), timeout=left) as peer:
            peer.sendall(QUESTION)
            while len(text) < MAX_TEXT and (left := until - time.monotonic()) > 0:
                peer.settimeout(left)
                part = peer.recv(MAX_TEXT - len(text))
                if not part:
                    break
                text += part
    said = re.sub(r"[^\n -~]", "?", text.decode("ascii", "replace"))
    return re.sub(r"\A(?:SERVER PROTOCOL .*\n|OK\n)*", "", said) if "\nCommunicators..." in said else ""


def xids(path: str) -> str:
    """The newest messages of the kernel about GPUs, of the last hour; empty where they cannot be read."""
    found: list[str] = []
    with contextlib.suppress(OSError):  # most containers have no /dev/kmsg; of those that do, most may not read it
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while record := os.read(file, 8192):
                for since_boot_us, message in _XID.findall(record):
                    if time.monotonic() - int(since_boot_us) / 1e6 < XID_S:
                        found.append(re.sub(r"[^ -~]", "?", message.decode("ascii", "replace")))
        finally:
            os.close(file)
    return "\n".join(found[-MAX_XIDS:])


def _address(named: str) -> tuple[str, int]:
    """Host and port of `[host]:port`. Raises ValueError."""
    host, _, port = named.rpartition(":")
    return (host.strip("[]"), int(port)) if named else ("localhost", PORT)
