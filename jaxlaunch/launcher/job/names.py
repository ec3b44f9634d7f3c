"""The texts of a job that Kubernetes restricts: names, labels, paths, as types that say in a message what is wanted."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, WithJsonSchema

from jaxlaunch.launcher.job.introspection import Words

_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_NO_TEXT = re.compile(r"[0-9.]+(e-?[0-9]+)?|0[xo][0-9a-f]+|true|false|null")  # of YAML, written without quotes
_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


def _suggested(pattern: str, longest: int, kept: str = "") -> Callable[[str], str | None]:
    """Return what proposes a valid name for a text: lower case, no accents, a dash for anything else but `kept`.

    Nothing is proposed where a letter would be lost, or where the result would not be a name.
    """

    def suggest(written: str) -> str | None:
        folded = unicodedata.normalize("NFKD", written.casefold())
        plain = "".join(letter for letter in folded if not unicodedata.combining(letter))
        name = re.sub(rf"[^a-z0-9{kept}]+", "-", plain).strip("-.")
        is_lossy = any(letter.isalnum() and not letter.isascii() for letter in plain)
        is_valid = len(name) <= longest and re.match(pattern, name) and not _NO_TEXT.fullmatch(name)
        return f"write {name}." if is_valid and not is_lossy else None

    return suggest


def _as_absolute(written: str) -> str | None:
    is_plain = re.fullmatch(r"[\w./-]*[\w-]", written) is not None and ".." not in written.split("/")
    return f"write /{written.removeprefix('./')}." if is_plain else None


JobName = Annotated[
    str,
    Field(pattern=_NAME),
    Words("a name: lower-case letters, digits and inner dashes, a letter first", _suggested(_NAME, 63)),
]
Label = Annotated[
    str,
    Field(pattern=_LABEL, max_length=63),
    Words("a name of at most 63 lower-case letters, digits and inner dashes", _suggested(_LABEL, 63)),
]
ObjectName = Annotated[
    str,
    Field(pattern=_SUBDOMAIN, max_length=253),
    Words("a Kubernetes name: lower-case letters, digits, and inner dashes and dots", _suggested(_SUBDOMAIN, 253, ".")),
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
