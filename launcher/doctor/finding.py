"""What a check of the cluster found: one sentence, why it matters, what to do. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

Level = Literal["ok", "warn", "fail", "unknown"]
Whose = Literal["yours", "cluster"]

YOURS, CLUSTERS = 2, 3  # exit codes, as of every command


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is as it should be, or is not, or cannot be known from here."""

    level: Level
    what: str
    why: str = ""
    fix: str = ""
    whose: Whose = "yours"  # to mend
    check: str = ""  # that found it


Findings = Iterator[Finding]


def ok(what: str) -> Finding:
    return Finding("ok", what)


def warn(what: str, why: str, fix: str) -> Finding:
    """It may go well."""
    return Finding("warn", what, why, fix)


def yours(what: str, why: str, fix: str) -> Finding:
    """It will not go well, and the user can mend it."""
    return Finding("fail", what, why, fix)


def clusters(what: str, why: str, fix: str) -> Finding:
    """It will not go well, and the cluster's owner can mend it."""
    return Finding("fail", what, why, fix, whose="cluster")


def unknown(what: str, why: str, fix: str = "") -> Finding:
    """It cannot be known from here."""
    return Finding("unknown", what, why, fix)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 when nothing fails; the cluster's before the user's: mending one's own would not be enough."""
    failing = {finding.whose for finding in findings if finding.level == "fail"}
    return CLUSTERS if "cluster" in failing else YOURS if failing else 0
