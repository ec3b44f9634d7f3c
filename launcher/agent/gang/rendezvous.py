"""Who belongs to the gang. Pure: a hello and those before it in, a refusal by name and value out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainer import contract


@dataclasses.dataclass(frozen=True)
class Hello:
    """How an agent introduces itself."""

    host: int
    uid: str
    generation: int
    pod: str
    hostname: str
    node: str
    versions: Mapping[str, str | None]
    spec: str
    pid: int
    metrics_port: int
    fault: str | None = None

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Hello:
        """Raises KeyError or TypeError when this is no hello."""
        hello = cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})
        if not isinstance(hello.host, int) or not isinstance(hello.versions, Mapping):
            raise TypeError("not a hello")
        return hello

    def to_wire(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def name(self) -> str:
        node = f" on {self.node}" if self.node else ""
        return f"host {self.host} ({self.hostname}{node}, pod {self.pod})"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why an agent may not join."""

    message: str
    ends_gang: bool = False  # no gang can come of this: everyone ends with BAD_SPEC
    may_retry: bool = False  # a leader of another generation may still be answering to the name

    @property
    def code(self) -> int:
        return contract.BAD_SPEC if self.ends_gang else contract.LOST


def refusal(hello: Hello, leader: Hello, present: Mapping[int, Hello], hosts: int) -> Refusal | None:
    """Why `hello` is refused, or None. `leader` is what host 0's agent says of itself."""
    if (hello.uid, hello.generation) != (leader.uid, leader.generation):
        theirs, ours = (f"uid {each.uid} generation {each.generation}" for each in (hello, leader))
        return Refusal(f"{hello.name} is a stranger: it has {theirs}, this gang {ours}", may_retry=True)
    if not 0 <= hello.host < hosts:
        return Refusal(f"{hello.name} is not below the number of hosts, {hosts}")
    other = present.get(hello.host)
    if other is not None and other.pod != hello.pod:
        return Refusal(f"{hello.name} came, but {other.name} is here already: two hosts have one index")
    if hello.fault is not None:
        return Refusal(f"{hello.name}: {hello.fault}", ends_gang=True)
    for name, ours_version in leader.versions.items():
        theirs_version = hello.versions.get(name)
        if theirs_version != ours_version:
            message = f"host {hello.host} has {name} {theirs_version or 'none'}, host 0 has {ours_version or 'none'}"
            return Refusal(message, ends_gang=True)
    if hello.spec != leader.spec:
        message = f"host {hello.host} has another job: spec {hello.spec[:12]}, host 0 has {leader.spec[:12]}"
        return Refusal(message, ends_gang=True)
    return None


def names(hosts: list[int]) -> str:
    """ "host 3" or "hosts 2, 5"; a long list is cut."""
    if len(hosts) == 1:
        return f"host {hosts[0]}"
    shown = ", ".join(map(str, hosts[:20]))
    return f"hosts {shown}" + (f" and {len(hosts) - 20} more" if len(hosts) > 20 else "")
