"""A permission (RBAC) that a user needs on a cluster. Pure."""

from __future__ import annotations

from typing import NamedTuple

from jaxlaunch.launcher.kubernetes.kinds import Kind


class Right(NamedTuple):
    """A verb on a kind of object, or on a subresource of it."""

    verb: str
    kind: Kind
    subresource: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.kind.resource}" + (f"/{self.subresource}" if self.subresource else "")
