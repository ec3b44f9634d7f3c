"""Reads what NCCL's RAS said of a job: which processes and ranks do not answer, which are behind the others. Pure.

The text is meant for people and changes from release to release; read are the forms of NCCL 2.24 to 2.32 (src/ras/
client_support.cc and the user guide's "RAS"). What has another form is not mentioned, and is still kept whole.

Asks NCCL on this host what it knows of a hang: its RAS threads answer although every Python is stuck.

RAS is a thread of each process that has initialized NCCL, from 2.24 on. It listens on localhost:28028 (or
`NCCL_RAS_ADDR`), takes lines of text, and answers for all processes of the job (NVIDIA, NCCL user guide, "RAS", read in
November 2026). The kernel is asked for Xid messages of GPUs, which most containers have no right to read.
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

MAX_FAULTS, MAX_RANKS = 6, 10  # that are named
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
    """Whether a host asks NCCL when a rank hangs: each knows of all processes, so the first two are enough."""
    return platform == "cuda" and host < 2


@dataclasses.dataclass
class Group:
    """Ranks of a communicator of which RAS says the same: how many, and those that it names."""

    communicator: str
    subject: str  # the operation whose counts differ
    said: str
    count: int
    ranks: list[int] = dataclasses.field(default_factory=list)

    @property
    def operation(self) -> int | None:
        """The last operation that they launched, 0 before the first; None: this is not about operations."""
        if "not launched" in self.said:
            return 0
        found = _OPERATION.search(self.said)
        return int(found[1]) if found else None

    def __str__(self) -> str:
        named = ", ".join(map(str, self.ranks[:MAX_RANKS])) + (", …" if len(self.ranks) > MAX_RANKS else "")
        who = f"{self.count} ranks" if not self.ranks else f"rank{'s' if len(self.ranks) > 1 else ''} {named}"
        return f"{self.communicator}: {who} {self.said}"


def describe(text: str) -> str:
    """The faults in one line, those of processes first; empty where RAS sees none.

    For example "#0-0: rank 21 gives no answer; #0-0: rank 5 is behind in AllReduce (6649 of 6650)".
    """
    faults = [*_processes(text), *_outliers(list(_groups(text)))]
    more = f"; {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
    return "; ".join(faults[:MAX_FAULTS]) + more


def _processes(text: str) -> Iterator[str]:
    """Processes that do not answer, or that RAS has given up."""
    state = ""
    for line in text.splitlines():
        if _COMMUNICATOR.match(line):
            state = ""
        elif section := _SECTION.match(line):
            state = {"INCOMPLETE": "gives no answer", "DEAD": "is dead"}.get(section[1], "")
        elif state and (process := _PROCESS.match(line)):
            yield f"process {process[1]} {state}"


def _groups(text: str) -> Iterator[Group]:
    """What is said of the ranks of communicators."""
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
    """The groups that are a fault: of operations those behind, of states all but the largest, and every error."""
    for group in groups:
        alike = [one for one in groups if (one.communicator, one.subject) == (group.communicator, group.subject)]
        if group.operation is not None:
            most = max(one.operation or 0 for one in alike)
            if group.operation < most:
                verb = "is" if group.count == 1 else "are"
                of = f" in {group.subject}" if group.subject else ""
                yield str(dataclasses.replace(group, said=f"{verb} behind{of} ({group.operation} of {most})"))
        elif "status" in group.said:
            same = [one for one in alike if "status" in one.said]
            if group is not max(same, key=lambda one: one.count):
                yield str(group)
        else:
            yield str(group)


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
