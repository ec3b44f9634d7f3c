"""Protocol between host 0 and the other hosts: handshake, admission and messages. Pure except for nonces.

A host and its leader prove to each other that they have the key of the run, which is never sent:

    leader  challenge {nonce}
    host    hello {nonce, fields, proof}
    leader  welcome or refused {fields, proof}

A proof is HMAC-SHA256 over the message's type, both nonces and the fields, so that none fits another connection,
direction or content. The fields are JSON within a text, so both ends have the same bytes. The handshake protects
against strangers that connect, but not against those that can change data in transit.

A host may run a damaged or an older agent, so both sides check every message strictly: one of the wrong form ends the
connection, but no agent. The reports about ranks are in gang/root_cause (events) and gang/progress (statuses).
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
from jaxlaunch.launcher.agent.gang.config import Config, versions
from jaxlaunch.records import checked
from jaxlaunch.records.checked import Cause, ExitCode, Seconds, Whole, at_most, like, within
from jaxlaunch.records.members import Wire
from jaxlaunch.records.summary import Of
from jaxlaunch.records.verdict import DiskExcess, Verdict

Text = Annotated[str, at_most(1_000)]
Number = Annotated[int, within(0, 2**31)]


@dataclasses.dataclass(frozen=True)
class Hello:
    """First message of an agent to the leader.

    Attributes:
        attempt: Last attempt that the host took part in. A leader that took another's place may not know it.
        saved: Newest step on storage that the host knows of.
    """

    host: Number
    generation: Number
    pod: Text
    hostname: Text
    node: Text
    versions: Mapping[Text, Text | None]
    spec: Text
    pid: Number
    metrics_port: Number
    fault: Text | None = None
    attempt: Number = 0
    saved: Number | None = None

    @classmethod
    def of(cls, config: Config, metrics_port: int) -> Hello:
        """Return the hello of this host."""
        return cls(
            host=config.host,
            generation=config.generation,
            pod=config.pod,
            hostname=socket.gethostname(),
            node=config.node,
            versions=versions(),
            spec=config.spec,
            pid=os.getpid(),
            metrics_port=metrics_port,
            fault=config.fault,
        )

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Hello:
        """Read a hello. Raises Malformed if the fields have another form."""
        return checked.read(cls, fields)

    def to_wire(self) -> dict[str, Any]:
        """Return the fields for a message between agents."""
        return dataclasses.asdict(self)

    @property
    def name(self) -> str:
        """The host with its hostname, node and pod, for a message."""
        node = f" on {self.node}" if self.node else ""
        return f"host {self.host} ({self.hostname}{node}, pod {self.pod})"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Reason why an agent may not join.

    Attributes:
        message: Reason for people.
        ends_gang: Whether the gang cannot start like this, and every host ends with BAD_SPEC.
        may_retry: Whether another try may help: the name may still resolve to the leader of another generation.
    """

    message: str
    ends_gang: bool = False
    may_retry: bool = False

    @property
    def code(self) -> int:
        """Exit code of the refused agent."""
        return contract.BAD_SPEC if self.ends_gang else contract.LOST


def refusal(
    hello: Hello, leader: Hello, present: Mapping[int, Hello], hosts: int, *, replaces: bool = False
) -> Refusal | None:
    """Return why a host may not join, or None if it may. The message names the host and both values that differ.

    Args:
        hello: Hello of the host.
        leader: Hello of host 0 itself.
        joined: Hellos of the hosts that have joined.
        hosts: Number of hosts.
        replaces: Whether lost hosts are replaced. The loss of the previous pod may then not be known yet.
    """
    if hello.generation != leader.generation:
        theirs, ours = (f"generation {side.generation}" for side in (hello, leader))
        return Refusal(
            f"{hello.name} belongs to another set of pods: it has {theirs}, host 0 has {ours}", may_retry=True
        )
    if not 0 <= hello.host < hosts:
        return Refusal(f"{hello.name} has an index that is not below the number of hosts, {hosts}")
    other = present.get(hello.host)
    if other is not None and other.pod != hello.pod:
        return Refusal(f"{hello.name} has the same index as {other.name}, which has already joined", may_retry=replaces)
    if hello.fault is not None:
        return Refusal(f"{hello.name}: {hello.fault}", ends_gang=True)
    for name, ours_version in leader.versions.items():
        theirs_version = hello.versions.get(name)
        if theirs_version != ours_version:
            message = f"host {hello.host} has {name} {theirs_version or 'none'}, host 0 has {ours_version or 'none'}"
            return Refusal(message, ends_gang=True)
    if hello.spec != leader.spec:
        message = f"host {hello.host} has a different job: spec {hello.spec[:12]}, host 0 has {leader.spec[:12]}"
        return Refusal(message, ends_gang=True)
    return None


MessagesText = Annotated[str, at_most(4_000)]


@dataclasses.dataclass(frozen=True)
class Welcome:
    """Message of host 0 that admits a host."""

    epoch: Annotated[str, at_most(64)]


@dataclasses.dataclass(frozen=True)
class Refused:
    """Message of host 0 that refuses a host."""

    message: MessagesText
    code: ExitCode
    may_retry: bool


@dataclasses.dataclass(frozen=True)
class Start:
    """Message of host 0 that starts the processes of a host.

    Attributes:
        attempt: Number of the attempt.
        coordinator: Address of JAX's coordinator.
        start: Number of this start of the run.
        members: Which hosts hold which ranks.
        saved: Newest step that earlier attempts saved, 0 if they only trained, or None if none did.
    """

    attempt: Whole
    coordinator: Annotated[str, like(r"\S{1,300}:\d{1,5}")]
    start: Whole
    members: Wire
    saved: Whole | None = None


@dataclasses.dataclass(frozen=True)
class Judged:
    """Message of host 0 that ends an attempt: a host kills its processes."""

    attempt: Whole
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Leave:
    """Message of host 0 that lets a host exit. If `alone`, only this one leaves, and another takes its place."""

    verdict: Verdict
    alone: bool = False


@dataclasses.dataclass(frozen=True)
class State:
    """State of all hosts, for the metrics of each, and for the record that host 1 writes if host 0 is lost."""

    attempt: Whole
    of: Of
    seconds: Mapping[str, Seconds]
    unsafe_s: Seconds = 0.0
    foremost: Whole | None = None
    silence_s: Seconds = 0.0
    ended: Mapping[Cause, Whole] = dataclasses.field(default_factory=dict)
    left: Mapping[str, Whole] = dataclasses.field(default_factory=dict)
    code: ExitCode | None = None


@dataclasses.dataclass(frozen=True)
class Ping:
    """Message that shows that host 0 lives."""

    gang: State


@dataclasses.dataclass(frozen=True)
class Stop:
    """Message of a host that was told to stop, with the `excess` if it used too much of its node's disk."""

    excess: DiskExcess | None = None


FROM_LEADER: Mapping[str, Any] = {"ping": Ping, "start": Start, "verdict": Judged, "leave": Leave}


NONCE_BYTES = 16
_NONCE_CHARS = 2 * NONCE_BYTES


class NotProven(Exception):
    """A message of the handshake is not from a holder of the key."""


class LeaderSide:
    """Leader's side of the handshake of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key, self._own, self._theirs = key, secrets.token_hex(NONCE_BYTES), ""

    def challenge(self) -> dict[str, Any]:
        """Return the fields of the first message."""
        return {"nonce": self._own}

    def opened(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Verify a hello and return its fields. Raises HandshakeError for any other message."""
        if message.get("type") != "hello":
            raise NotProven("its first message is not a hello")
        self._theirs = _nonce(message)
        return _opened(self._key, self._own, self._theirs, message)

    def sealed(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return the fields of the answer to the hello, a `welcome` or a `refused`."""
        return _sealed(self._key, kind, self._own, self._theirs, fields)


class HostSide:
    """Host's side of the handshake of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key, self._own, self._theirs = key, secrets.token_hex(NONCE_BYTES), ""

    def hello(self, challenge: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the answer to a challenge. Raises HandshakeError for any other message."""
        if challenge.get("type") != "challenge" or self._theirs:
            raise NotProven("its first message is not a challenge")
        self._theirs = _nonce(challenge)
        return {"nonce": self._own, **_sealed(self._key, "hello", self._theirs, self._own, fields)}

    def opened(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Verify the leader's answer and return its fields. Raises HandshakeError if it lacks the key."""
        if message.get("type") not in ("welcome", "refused"):
            raise NotProven("it did not answer the hello")
        return _opened(self._key, self._theirs, self._own, message)


def _nonce(message: Mapping[str, Any]) -> str:
    found = message.get("nonce")
    if not isinstance(found, str) or len(found) != _NONCE_CHARS:
        raise NotProven("it sent no nonce")
    return found


def _proof(key: bytes, *parts: str) -> str:
    return hmac.digest(key, json.dumps(parts).encode(), "sha256").hex()


def _sealed(key: bytes, kind: str, leader: str, host: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(fields)
    return {"fields": text, "proof": _proof(key, kind, leader, host, text)}


def _opened(key: bytes, leader: str, host: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    text, proof = message.get("fields"), message.get("proof")
    if not isinstance(text, str) or not isinstance(proof, str):
        raise NotProven("it sent no proof")
    if not hmac.compare_digest(proof.encode(), _proof(key, message["type"], leader, host, text).encode()):
        raise NotProven("it does not have this run's key")
    try:
        fields = checked.decode_line(text.encode())
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise NotProven("the fields of its message are not JSON")
    return fields
