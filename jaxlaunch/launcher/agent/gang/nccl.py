"""Diagnosis of a hang by NCCL's RAS subsystem, which answers even if every Python thread is stuck.

Since NCCL 2.24, each process that has initialized NCCL runs a RAS thread. It listens on localhost:28028 (or
`NCCL_RAS_ADDR`), reads lines of text, and answers for all processes of the job (NVIDIA, NCCL user guide, "RAS", read in
November 2026). The kernel log adds Xid messages of GPUs, which most containers may not read.

The answer is written for people and changes between releases. `describe_faults` parses the forms of NCCL 2.24 to 2.32
(src/ras/client_support.cc and the user guide). Other lines are not summarized, but the whole text is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping

# Faults, and ranks of each, that a summary names.
MAX_FAULTS, MAX_RANKS = 6, 10
_COMMUNICATOR = re.compile(r"(#\d+-\d+) \([0-9a-f]+\) (INCOMPLETE|ERROR|MISMATCH)$")
_SECTION = re.compile(r"(INCOMPLETE|DEAD|TIMEOUT|Errors|Warnings|Communicators\b.*)$")
_PROCESS = re.compile(r"  Process (\d+ on node \S+ managing GPUs? \S+)")
_MISSING = re.compile(r"  The missing ranks?: ([\d, ]+)$")
_COUNT = re.compile(r"  Missing communicator data from (\d+) ranks?$")
_SUBJECT = re.compile(r"  Communicator ranks have different (?:(?:collective|(\w+)) operation counts|status)$")
_GROUP = re.compile(r"  (\d+) ranks (have (?:launched up to operation \d+|not launched .*|status \w+)|reported .+)$")
_RANK = re.compile(
    r"  Rank (\d+)(?: (has (?:launched up to operation \d+|not launched .*?|status \w+)|reported .+?))? --"
)
_OPERATION = re.compile(r"launched up to operation (\d+)$")


def asks_nccl(platform: str, host: int) -> bool:
    """Return whether a host asks NCCL about a hang: every host knows all processes, so the first two are enough."""
    return platform == "cuda" and host < 2


@dataclasses.dataclass
class Group:
    """Ranks of a communicator about which RAS makes the same statement.

    Attributes:
        communicator: Identity of the communicator.
        subject: Operation whose counts differ.
        statement: Statement about the ranks.
        count: Number of ranks.
        ranks: Ranks that RAS names.
    """

    communicator: str
    subject: str
    said: str
    count: int
    ranks: list[int] = dataclasses.field(default_factory=list)

    @property
    def operation(self) -> int | None:
        """Number of the last launched operation, 0 before the first, or None for other statements."""
        if "not launched" in self.said:
            return 0
        found = _OPERATION.search(self.said)
        return int(found[1]) if found else None

    def __str__(self) -> str:
        named = ", ".join(map(str, self.ranks[:MAX_RANKS])) + (", …" if len(self.ranks) > MAX_RANKS else "")
        who = f"{self.count} ranks" if not self.ranks else f"rank{'s' if len(self.ranks) > 1 else ''} {named}"
        return f"{self.communicator}: {who} {self.said}"


def describe(text: str) -> str:
    """Summarize the faults in one line, those of processes first; empty if RAS sees none.

    For example "#0-0: rank 21 gives no answer; #0-0: rank 5 is behind in AllReduce (6649 of 6650)".
    """
    faults = [*_processes(text), *_outliers(list(_groups(text)))]
    more = f"; {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
    return "; ".join(faults[:MAX_FAULTS]) + more


def _processes(text: str) -> Iterator[str]:
    """Yield the processes that do not answer, or that RAS has given up."""
    state = ""
    for line in text.splitlines():
        if _COMMUNICATOR.match(line):
            state = ""
        elif section := _SECTION.match(line):
            state = {"INCOMPLETE": "gives no answer", "DEAD": "is dead"}.get(section[1], "")
        elif state and (process := _PROCESS.match(line)):
            yield f"process {process[1]} {state}"


def _groups(text: str) -> Iterator[Group]:
    """Parse the statements about the ranks of communicators."""
    communicator, subject, group = "", "", None
    for line in text.splitlines():
        if header := _COMMUNICATOR.match(line):
            communicator, subject, group = header[1], "", None
        elif _SECTION.match(line):
            communicator = ""
        elif not communicator:
            continue
        elif about := _SUBJECT.match(line):
            subject, group = about[1] or "", None
        elif missing := _COUNT.match(line):
            group = Group(
                communicator, "", "gives no answer" if missing[1] == "1" else "give no answer", int(missing[1])
            )
            yield group
        elif several := _GROUP.match(line):
            group = Group(communicator, subject, several[2], int(several[1]))
            yield group
        elif (names := _MISSING.match(line)) and group is not None:
            group.ranks += [int(name) for name in re.findall(r"\d{1,9}", names[1])]
        elif one := _RANK.match(line):
            if one[2]:
                yield Group(communicator, subject, one[2], 1, [int(one[1])])
            elif group is not None:
                group.ranks.append(int(one[1]))


def _outliers(groups: list[Group]) -> Iterator[str]:
    """Yield the groups that are a fault.

    These are groups that are behind in an operation, all but the largest group of a status, and every error.
    """
    for group in groups:
        alike = [peer for peer in groups if (peer.communicator, peer.subject) == (group.communicator, group.subject)]
        if group.operation is not None:
            most = max(peer.operation or 0 for peer in alike)
            if group.operation < most:
                verb = "is" if group.count == 1 else "are"
                of = f" in {group.subject}" if group.subject else ""
                yield str(dataclasses.replace(group, said=f"{verb} behind{of} ({group.operation} of {most})"))
        elif "status" in group.said:
            same = [peer for peer in alike if "status" in peer.said]
            if group is not max(same, key=lambda peer: peer.count):
                yield str(group)
        else:
            yield str(group)


ADDRESS, ENABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
PORT = 28028
# An answer that takes longer is not awaited.
ASKED_S = 3.0
# TIMEOUT is the time in seconds after which RAS answers without the processes that do not answer it.
QUESTION = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nVERBOSE STATUS\n"
# Bytes of an answer. Each communicator without a fault adds one line.
MAX_TEXT = 32_000
KERNEL = "/dev/kmsg"
MAX_XIDS, XID_S = 20, 3600.0
_XID = re.compile(rb"^\d+,\d+,(\d+),[^;\n]*;(NVRM: .*)", re.M)


class Question:
    """A query in a thread, so that neither a name lookup nor a peer can block the caller."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._until = time.monotonic() + ASKED_S
        self._answer: str | None = None
        threading.Thread(target=self._ask, args=(dict(environ),), name="nccl-ras", daemon=True).start()

    @property
    def answer(self) -> str | None:
        """The answer, empty if there was none, or None while it may still arrive."""
        return "" if self._answer is None and time.monotonic() >= self._until else self._answer

    def _ask(self, environ: Mapping[str, str]) -> None:
        found = status(environ, self._until)
        self._answer = "\n".join(filter(None, (found, xids(KERNEL))))


def status(environ: Mapping[str, str], until: float) -> str:
    """Return the answer of RAS before a deadline in monotonic seconds, or an empty text without RAS."""
    if environ.get(ENABLE) == "0":
        return ""
    text = b""
    # The port may be closed, or the address invalid.
    with contextlib.suppress(OSError, ValueError):
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
    """Return the newest kernel messages about GPUs of the last hour, empty if they cannot be read."""
    found: list[str] = []
    # Most containers have no /dev/kmsg or may not read it.
    with contextlib.suppress(OSError):
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
    """Parse `[host]:port`; an empty text means the default. Raises ValueError."""
    host, _, port = named.rpartition(":")
    return (host.strip("[]"), int(port)) if named else ("localhost", PORT)
