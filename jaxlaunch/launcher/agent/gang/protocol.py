"""Protocol between host 0 and the other hosts: handshake, admission and messages.

A host and its leader prove to each other that they have the key of the run, which is never sent:

    leader  challenge {nonce}
    host    hello {nonce, fields, proof}
    leader  welcome or refused {fields, proof}

A proof is HMAC-SHA256 over the message's type, both nonces and the fields, so that it is valid only
for its own connection, direction and content. The fields are sent as JSON text, so that both ends
compute the proof of the same bytes. The handshake protects against strangers that connect, but not
against those that can change data in transit.

A host may run a damaged or an older agent, so both sides check every message strictly: a malformed
message ends the connection, but not the agent. The reports about ranks are defined in
gang/root_cause (events) and gang/progress (statuses). This module does no I/O.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import os
import secrets
import socket
from collections.abc import Mapping
from typing import Annotated, Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.config import Config, read_versions
from jaxlaunch.records import codec
from jaxlaunch.records.codec import (
    Bounds,
    Cause,
    ExitCode,
    NonNegativeInt,
    Seconds,
    matches,
    max_length,
)
from jaxlaunch.records.members import HostRanges
from jaxlaunch.records.summary import AttemptProgress
from jaxlaunch.records.verdict import DiskExcess, Verdict

ShortText = Annotated[str, max_length(1_000)]
Number = Annotated[int, Bounds(0, 2**31)]


@dataclasses.dataclass(frozen=True)
class Hello:
    """First message of an agent to the leader.

    Attributes:
        versions: Versions that must be equal on all hosts, from `read_versions`.
        spec: Digest of the job, which must be equal on all hosts.
        fault: An error that only this host can see, for which the leader ends the gang.
        attempt: Last attempt that the host took part in. A leader that replaced another may not
            know it.
        saved: Newest step on storage that the host knows of.
    """

    host: Number
    generation: Number
    pod: ShortText
    hostname: ShortText
    node: ShortText
    versions: Mapping[ShortText, ShortText | None]
    spec: ShortText
    pid: Number
    metrics_port: Number
    fault: ShortText | None = None
    attempt: Number = 0
    saved: Number | None = None

    @classmethod
    def from_config(cls, config: Config, metrics_port: int) -> Hello:
        """Return the hello of this host."""
        return cls(
            host=config.host,
            generation=config.generation,
            pod=config.pod,
            hostname=socket.gethostname(),
            node=config.node,
            versions=read_versions(),
            spec=config.spec_digest,
            pid=os.getpid(),
            metrics_port=metrics_port,
            fault=config.fault,
        )

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Hello:
        """Read a hello. Raises MalformedError if the fields have another form."""
        return codec.read_record(cls, fields)

    def to_wire(self) -> dict[str, Any]:
        """Return the fields for a message between agents."""
        return dataclasses.asdict(self)

    @property
    def description(self) -> str:
        """The host with its hostname, node and pod, for use in messages."""
        node = f" on {self.node}" if self.node else ""
        return f"host {self.host} ({self.hostname}{node}, pod {self.pod})"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Reason why an agent may not join.

    Attributes:
        message: Reason as a sentence.
        ends_gang: Whether the whole gang cannot start, so that every host exits with BAD_SPEC.
        may_retry: Whether the host may try again: the leader's name may still resolve to a pod of
            another generation.
    """

    message: str
    ends_gang: bool = False
    may_retry: bool = False

    @property
    def exit_code(self) -> int:
        """Exit code of the refused agent."""
        return contract.BAD_SPEC if self.ends_gang else contract.LOST


def find_refusal(
    hello: Hello,
    leader: Hello,
    joined: Mapping[int, Hello],
    host_count: int,
    *,
    replaces: bool = False,
) -> Refusal | None:
    """Return the reason why a host may not join, or None if it may.

    Args:
        hello: Hello of the host.
        leader: Hello of host 0 itself.
        joined: Hellos of the hosts that have joined.
        host_count: Number of hosts.
        replaces: Whether lost hosts are replaced. The previous pod of the host may then still
            count as joined, so the new pod may try again.
    """
    name = hello.description
    if hello.generation != leader.generation:
        theirs, ours = (f"generation {side.generation}" for side in (hello, leader))
        message = f"{name} belongs to another set of pods: it has {theirs}, host 0 has {ours}"
        return Refusal(message, may_retry=True)
    if not 0 <= hello.host < host_count:
        return Refusal(f"{name} has an index that is not below the number of hosts, {host_count}")
    other = joined.get(hello.host)
    if other is not None and other.pod != hello.pod:
        message = f"{name} has the same index as {other.description}, which has already joined"
        return Refusal(message, may_retry=replaces)
    if hello.fault is not None:
        return Refusal(f"{name}: {hello.fault}", ends_gang=True)
    for package, version in leader.versions.items():
        if hello.versions.get(package) != version:
            theirs, ours = hello.versions.get(package) or "none", version or "none"
            message = f"host {hello.host} has {package} {theirs}, host 0 has {ours}"
            return Refusal(message, ends_gang=True)
    if hello.spec != leader.spec:
        theirs, ours = hello.spec[:12], leader.spec[:12]
        message = f"host {hello.host} has a different job: spec {theirs}, host 0 has {ours}"
        return Refusal(message, ends_gang=True)
    return None


MessageText = Annotated[str, max_length(4_000)]


@dataclasses.dataclass(frozen=True)
class Welcome:
    """Message of host 0 that admits a host.

    Attributes:
        epoch: Random identity of this leader process, which every later message carries.
    """

    epoch: Annotated[str, max_length(64)]


@dataclasses.dataclass(frozen=True)
class Refused:
    """Message of host 0 that refuses a host."""

    message: MessageText
    code: ExitCode
    may_retry: bool


@dataclasses.dataclass(frozen=True)
class Start:
    """Message of host 0 that starts the processes of a host.

    Attributes:
        attempt: Number of the attempt.
        coordinator: Address of JAX's coordinator.
        start: Number of this start of the run, which selects the folder of its logs.
        members: Assignment of ranks to hosts.
        saved: Newest step that earlier attempts saved, 0 if they only trained, or None if none did.
    """

    attempt: NonNegativeInt
    coordinator: Annotated[str, matches(r"\S{1,300}:\d{1,5}")]
    start: NonNegativeInt
    members: HostRanges
    saved: NonNegativeInt | None = None


@dataclasses.dataclass(frozen=True)
class AttemptVerdict:
    """Message of host 0 that ends an attempt. The receiving host kills its processes."""

    attempt: NonNegativeInt
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Leave:
    """Message of host 0 that lets a host exit.

    Attributes:
        verdict: Verdict on the run, or on the attempt if only this host leaves.
        alone: Whether only this host leaves and another takes its place.
    """

    verdict: Verdict
    alone: bool = False


@dataclasses.dataclass(frozen=True)
class State:
    """State of all hosts, for their metrics and for the record that host 1 writes without host 0.

    Attributes:
        attempt: Number of the attempt.
        of: Progress of the attempt.
        seconds: Seconds of the run by cause.
        unsafe_s: Seconds of steps since the last commit.
        foremost: Step of the foremost rank, as `RankStatuses.settled_step` returns it.
        silence_s: Seconds since the last message of the host that has been silent for longest.
        ended: Number of attempts that ended, by cause.
        left: Number of restarts that are left, by limit.
        code: Exit code of the last attempt.
    """

    attempt: NonNegativeInt
    of: AttemptProgress
    seconds: Mapping[str, Seconds]
    unsafe_s: Seconds = 0.0
    foremost: NonNegativeInt | None = None
    silence_s: Seconds = 0.0
    ended: Mapping[Cause, NonNegativeInt] = dataclasses.field(default_factory=dict)
    left: Mapping[str, NonNegativeInt] = dataclasses.field(default_factory=dict)
    code: ExitCode | None = None


@dataclasses.dataclass(frozen=True)
class Ping:
    """Heartbeat of host 0."""

    gang: State


@dataclasses.dataclass(frozen=True)
class Stop:
    """Message of a host that received a signal to stop.

    Attributes:
        excess: The disk limit that the host exceeds, for which the kubelet evicts its pod.
        is_interrupt: Whether the signal was a Ctrl-C.
    """

    excess: DiskExcess | None = None
    is_interrupt: bool = False


FROM_LEADER: Mapping[str, Any] = {
    "ping": Ping,
    "start": Start,
    "verdict": AttemptVerdict,
    "leave": Leave,
}


NONCE_BYTES = 16
_NONCE_CHARS = 2 * NONCE_BYTES


class HandshakeError(Exception):
    """A message of the handshake is malformed, or its sender does not have the key."""


class _Handshake:
    def __init__(self, key: bytes) -> None:
        self._key, self._own_nonce, self._peer_nonce = key, secrets.token_hex(NONCE_BYTES), ""


class LeaderHandshake(_Handshake):
    """Leader's side of the handshake of one connection."""

    def challenge_fields(self) -> dict[str, Any]:
        """Return the fields of the first message."""
        return {"nonce": self._own_nonce}

    def open_hello(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Verify a hello and return its fields. Raises HandshakeError for any other message."""
        if message.get("type") != "hello":
            raise HandshakeError("its first message is not a hello")
        self._peer_nonce = _read_nonce(message)
        return _open_fields(self._key, self._own_nonce, self._peer_nonce, message)

    def seal_answer(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return the fields of the answer to the hello, a `welcome` or a `refused`."""
        return _seal_fields(self._key, kind, self._own_nonce, self._peer_nonce, fields)


class HostHandshake(_Handshake):
    """Host's side of the handshake of one connection."""

    def answer_challenge(
        self, challenge: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the fields of the answer to a challenge. Raises HandshakeError."""
        if challenge.get("type") != "challenge" or self._peer_nonce:
            raise HandshakeError("its first message is not a challenge")
        self._peer_nonce = _read_nonce(challenge)
        sealed = _seal_fields(self._key, "hello", self._peer_nonce, self._own_nonce, fields)
        return {"nonce": self._own_nonce, **sealed}

    def open_answer(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of the leader's answer. Raises HandshakeError if it lacks the key."""
        if message.get("type") not in ("welcome", "refused"):
            raise HandshakeError("it did not answer the hello")
        return _open_fields(self._key, self._peer_nonce, self._own_nonce, message)


def _read_nonce(message: Mapping[str, Any]) -> str:
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != _NONCE_CHARS:
        raise HandshakeError("it sent no nonce")
    return nonce


def _compute_proof(key: bytes, *parts: str) -> str:
    return hmac.digest(key, json.dumps(parts).encode(), "sha256").hex()


def _seal_fields(
    key: bytes, kind: str, leader_nonce: str, host_nonce: str, fields: Mapping[str, Any]
) -> dict[str, Any]:
    text = json.dumps(fields)
    return {"fields": text, "proof": _compute_proof(key, kind, leader_nonce, host_nonce, text)}


def _open_fields(
    key: bytes, leader_nonce: str, host_nonce: str, message: Mapping[str, Any]
) -> Mapping[str, Any]:
    text, proof = message.get("fields"), message.get("proof")
    if not isinstance(text, str) or not isinstance(proof, str):
        raise HandshakeError("it sent no proof")
    expected = _compute_proof(key, message["type"], leader_nonce, host_nonce, text)
    if not hmac.compare_digest(proof.encode(), expected.encode()):
        raise HandshakeError("it does not have this run's key")
    try:
        fields = codec.parse_json(text.encode())
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise HandshakeError("the fields of its message are not JSON")
    return fields
