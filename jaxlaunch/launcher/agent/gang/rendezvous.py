"""Which hosts may join the gang. A refusal names the host and both values that differ."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from typing import Annotated, Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.config import Config, versions
from jaxlaunch.records import checked
from jaxlaunch.records.checked import at_most, within

Text = Annotated[str, at_most(1_000)]
Number = Annotated[int, within(0, 2**31)]


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first message of an agent to the leader."""

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
    attempt: Number = 0  # the last that it took part in: a leader that took another's place may not know it
    saved: Number | None = None  # the newest step on storage that it knows of

    @classmethod
    def of(cls, config: Config, metrics_port: int) -> Hello:
        """The hello of this host."""
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
        """Raises Malformed when the fields are not a hello's."""
        return checked.read(cls, fields)

    def to_wire(self) -> dict[str, Any]:
        """The fields for a message between agents."""
        return dataclasses.asdict(self)

    @property
    def name(self) -> str:
        """The host with its hostname, node and pod, for a message."""
        node = f" on {self.node}" if self.node else ""
        return f"host {self.host} ({self.hostname}{node}, pod {self.pod})"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why an agent may not join."""

    message: str
    ends_gang: bool = False  # the gang cannot start like this: every host ends with BAD_SPEC
    may_retry: bool = False  # the name may still resolve to the leader of another generation

    @property
    def code(self) -> int:
        """The exit code of the agent that is refused."""
        return contract.BAD_SPEC if self.ends_gang else contract.LOST


def refusal(
    hello: Hello, leader: Hello, present: Mapping[int, Hello], hosts: int, *, replaces: bool = False
) -> Refusal | None:
    """Why `hello` is refused, or None. `leader` is host 0's own hello, `present` are those of the hosts that joined.

    Where a lost host is replaced, the pod before it may not be known to be lost yet.
    """
    if hello.generation != leader.generation:
        theirs, ours = (f"generation {each.generation}" for each in (hello, leader))
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
