"""Diagnosis of a hang with NCCL's RAS subsystem, which answers even if all Python threads hang.

Since NCCL 2.24, each process that has initialized NCCL runs a RAS thread. It listens on
localhost:28028 (or `NCCL_RAS_ADDR`), reads lines of text, and answers for all processes of the job
(NVIDIA, NCCL user guide, "RAS", read in November 2026). The kernel log adds Xid messages of GPUs,
which most containers may not read.

The answer is written for people and changes between releases. `describe_faults` parses the forms of
NCCL 2.24 to 2.32 (src/ras/client_support.cc and the user guide). It ignores other lines; the whole
text is kept in the summary of the run.
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

# Number of faults that a summary names, and of ranks in each.
MAX_FAULTS, MAX_RANKS = 6, 10
_COMMUNICATOR = re.compile(r"(#\d+-\d+) \([0-9a-f]+\) (INCOMPLETE|ERROR|MISMATCH)$")
_SECTION = re.compile(r"(INCOMPLETE|DEAD|TIMEOUT|Errors|Warnings|Communicators\b.*)$")
_PROCESS = re.compile(r"  Process (\d+ on node \S+ managing GPUs? \S+)")
_MISSING_RANKS = re.compile(r"  The missing ranks?: ([\d, ]+)$")
_MISSING_COUNT = re.compile(r"  Missing communicator data from (\d+) ranks?$")
_SUBJECT = re.compile(
    r"  Communicator ranks have different (?:(?:collective|(\w+)) operation counts|status)$"
)
_GROUP = re.compile(
    r"  (\d+) ranks (have (?:launched up to operation \d+|not launched .*|status \w+)|reported .+)$"
)
_RANK = re.compile(
    r"  Rank (\d+)(?: (has (?:launched up to operation \d+|not launched .*?|status "
    r"\w+)|reported .+?))? --"
)
_OPERATION = re.compile(r"launched up to operation (\d+)$")


def should_query_nccl(platform: str, host: int) -> bool:
    """Return whether a host queries NCCL about a hang.

    Two hosts suffice, because RAS on each of them answers for all processes.
    """
    return platform == "cuda" and host < 2


@dataclasses.dataclass
class RankGroup:
    """Ranks of a communicator about which RAS makes the same statement.

    Attributes:
        communicator: Identity of the communicator.
        subject: Operation whose counts differ. Empty for other statements.
        statement: Statement about the ranks.
        count: Number of ranks.
        ranks: Ranks that RAS names.
    """

    communicator: str
    subject: str
    statement: str
    count: int
    ranks: list[int] = dataclasses.field(default_factory=list)

    @property
    def last_operation(self) -> int | None:
        """Number of the last launched operation, 0 before the first, None for other statements."""
        if "not launched" in self.statement:
            return 0
        match = _OPERATION.search(self.statement)
        return int(match[1]) if match else None

    def __str__(self) -> str:
        subject, count = f"{self.count} ranks", len(self.ranks)
        if count:
            listed = ", ".join(map(str, self.ranks[:MAX_RANKS]))
            more = ", …" if count > MAX_RANKS else ""
            subject = f"rank{'s' if count > 1 else ''} {listed}{more}"
        return f"{self.communicator}: {subject} {self.statement}"


def describe_faults(text: str) -> str:
    """Summarize the faults in one line, those of processes first; empty if RAS sees none.

    For example "#0-0: rank 21 gives no answer; #0-0: rank 5 is behind in AllReduce (6649 of 6650)".
    """
    faults = [*_process_faults(text), *_group_faults(list(_parse_groups(text)))]
    more = f"; {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
    return "; ".join(faults[:MAX_FAULTS]) + more


def _process_faults(text: str) -> Iterator[str]:
    """Yield the processes that do not answer, or that RAS considers dead."""
    state = ""
    for line in text.splitlines():
        if _COMMUNICATOR.match(line):
            state = ""
        elif section := _SECTION.match(line):
            state = {"INCOMPLETE": "gives no answer", "DEAD": "is dead"}.get(section[1], "")
        elif state and (process := _PROCESS.match(line)):
            yield f"process {process[1]} {state}"


def _parse_groups(text: str) -> Iterator[RankGroup]:  # noqa: C901 - a branch per form of line
    """Parse the statements about the ranks of communicators."""
    communicator, subject, group = "", "", None
    for line in text.splitlines():
        if header := _COMMUNICATOR.match(line):
            communicator, subject, group = header[1], "", None
        elif _SECTION.match(line):
            communicator = ""
        elif not communicator:
            continue
        elif subject_match := _SUBJECT.match(line):
            subject, group = subject_match[1] or "", None
        elif count_match := _MISSING_COUNT.match(line):
            count = int(count_match[1])
            statement = "gives no answer" if count == 1 else "give no answer"
            group = RankGroup(communicator, "", statement, count)
            yield group
        elif group_match := _GROUP.match(line):
            group = RankGroup(communicator, subject, group_match[2], int(group_match[1]))
            yield group
        elif (missing_match := _MISSING_RANKS.match(line)) and group is not None:
            group.ranks += [int(name) for name in re.findall(r"\d{1,9}", missing_match[1])]
        elif rank_match := _RANK.match(line):
            if rank_match[2]:
                yield RankGroup(communicator, subject, rank_match[2], 1, [int(rank_match[1])])
            elif group is not None:
                group.ranks.append(int(rank_match[1]))


def _group_faults(groups: list[RankGroup]) -> Iterator[str]:
    """Yield the groups that are at fault.

    These are groups that are behind in an operation, all but the largest group with a status, and
    every group with an error.
    """
    for group in groups:
        key = group.communicator, group.subject
        peers = [peer for peer in groups if (peer.communicator, peer.subject) == key]
        if group.last_operation is not None:
            last_operation = max(peer.last_operation or 0 for peer in peers)
            if group.last_operation < last_operation:
                verb = "is" if group.count == 1 else "are"
                place = f" in {group.subject}" if group.subject else ""
                statement = f"{verb} behind{place} ({group.last_operation} of {last_operation})"
                yield str(dataclasses.replace(group, statement=statement))
        elif "status" in group.statement:
            peers_with_status = [peer for peer in peers if "status" in peer.statement]
            if group is not max(peers_with_status, key=lambda peer: peer.count):
                yield str(group)
        else:
            yield str(group)


ADDRESS_VARIABLE, ENABLE_VARIABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
RAS_PORT = 28028
# RAS must answer within this time.
QUERY_TIMEOUT_S = 3.0
# TIMEOUT is the number of seconds for which RAS waits for the other processes.
RAS_QUERY = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nVERBOSE STATUS\n"
# Largest size of an answer. Each communicator without a fault adds one line.
MAX_ANSWER_BYTES = 32_000
KERNEL_LOG = "/dev/kmsg"
MAX_XIDS, MAX_XID_AGE_S = 20, 3600.0
_XID = re.compile(rb"^\d+,\d+,(\d+),[^;\n]*;(NVRM: .*)", re.M)


class NcclQuery:
    """A query in a thread, so that neither a name lookup nor a peer can block the caller."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._deadline = time.monotonic() + QUERY_TIMEOUT_S
        self._answer: str | None = None
        arguments = (dict(environ),)
        threading.Thread(target=self._run_query, args=arguments, daemon=True).start()

    @property
    def answer(self) -> str | None:
        """The answer, empty if there was none, or None while it may still arrive."""
        return "" if self._answer is None and time.monotonic() >= self._deadline else self._answer

    def _run_query(self, environ: Mapping[str, str]) -> None:
        ras_text = query_ras(environ, self._deadline)
        self._answer = "\n".join(filter(None, (ras_text, read_xids(KERNEL_LOG))))


def query_ras(environ: Mapping[str, str], deadline: float) -> str:
    """Return the answer of RAS before a deadline in monotonic seconds, empty without RAS."""
    if environ.get(ENABLE_VARIABLE) == "0":
        return ""
    answer = b""
    # The port may be closed, or the address invalid.
    with contextlib.suppress(OSError, ValueError):
        # `create_connection` raises ValueError for a negative timeout, and leaks its socket.
        remaining_s = max(deadline - time.monotonic(), 0.0)
        address = _parse_address(environ.get(ADDRESS_VARIABLE, ""))
        with socket.create_connection(address, timeout=remaining_s) as peer:
            peer.sendall(RAS_QUERY)
            while (remaining_s := deadline - time.monotonic()) > 0:
                peer.settimeout(remaining_s)
                chunk = peer.recv(MAX_ANSWER_BYTES - len(answer))
                answer += chunk
                if not chunk or len(answer) >= MAX_ANSWER_BYTES:
                    break
    answer_text = re.sub(r"[^\n -~]", "?", answer.decode("ascii", "replace"))
    if "\nCommunicators..." in answer_text:
        return re.sub(r"\A(?:SERVER PROTOCOL .*\n|OK\n)*", "", answer_text)
    return ""


def read_xids(path: str) -> str:
    """Return the kernel messages about GPUs of the last hour, empty if they cannot be read."""
    messages: list[str] = []
    # Most containers have no /dev/kmsg or may not read it.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while record := os.read(descriptor, 8192):
                for since_boot_us, message in _XID.findall(record):
                    if time.monotonic() - int(since_boot_us) / 1e6 < MAX_XID_AGE_S:
                        messages.append(re.sub(r"[^ -~]", "?", message.decode("ascii", "replace")))
        finally:
            os.close(descriptor)
    return "\n".join(messages[-MAX_XIDS:])


def _parse_address(text: str) -> tuple[str, int]:
    """Parse `[host]:port`; an empty text means the default. Raises ValueError."""
    host, _, port = text.rpartition(":")
    return (host.strip("[]"), int(port)) if text else ("localhost", RAS_PORT)
