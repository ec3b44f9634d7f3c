"""The texts of a job that Kubernetes restricts: names, labels, paths, as types that say in a message what is wanted."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, WithJsonSchema

from jaxlaunch.launcher.job.introspection import Words

_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


def _as_name(written: str) -> str | None:
    name = re.sub(r"[^a-z0-9]+", "-", written.lower()).strip("-").lstrip("-0123456789")
    return f"write {name}." if name else None


def _as_absolute(written: str) -> str | None:
    return f"write /{written.removeprefix('./')}." if re.fullmatch(r"[\w./-]*[\w-]", written) else None


JobName = Annotated[
    str,
    Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$"),
    Words("a name: lower-case letters, digits and inner dashes, a letter first", _as_name),
]
Label = Annotated[
    str,
    Field(pattern=_LABEL, max_length=63),
    Words("a name of at most 63 lower-case letters, digits and inner dashes", _as_name),
]
ObjectName = Annotated[
    str,
    Field(pattern=_SUBDOMAIN, max_length=253),
    Words("a Kubernetes name: lower-case letters, digits, and inner dashes and dots", _as_name),
]
AbsolutePath = Annotated[str, Field(pattern=r"^/[^:\s][^:]*$"), Words("an absolute path below /", _as_absolute)]
Variable = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$"), Words("a variable's name: letters, digits and _")
]
# A scalar taken as it is written: `--lr 3e-4` in a command must not become 0.0003.
Text = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]
LabelKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        max_length=253 + 1 + 63,
    ),
    Words("a label's key, such as team or example.com/team"),
]
LabelValue = Annotated[
    Text,
    Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63),
    Words("a label's value: at most 63 letters, digits and inner dashes, dots and _"),
]
