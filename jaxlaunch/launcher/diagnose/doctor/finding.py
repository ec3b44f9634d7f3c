"""The form of a finding of a check: what, why it matters, how to fix it, and who can. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

Level = Literal["ok", "warn", "fail", "unknown"]
Whose = Literal["yours", "cluster"]

USER, ADMIN = 2, 3  # exit codes, as of every command
ASK_ADMIN = "ask the cluster administrator to"  # how a fix of theirs begins


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is as it should be, or is not, or cannot be known from here."""

    level: Level
    what: str
    why: str = ""
    fix: str = ""
    whose: Whose = "yours"  # to fix: the user's, or the cluster administrator's
    check: str = ""  # that found it


Findings = Iterator[Finding]


def ok(what: str) -> Finding:
    """It is as it should be."""
    return Finding("ok", what)


def warn(what: str, why: str, fix: str) -> Finding:
    """The job may run all the same."""
    return Finding("warn", what, why, fix)


def fail(what: str, why: str, fix: str) -> Finding:
    """The job will not run, and the user can fix it."""
    return Finding("fail", what, why, fix)


def fail_admin(what: str, why: str, fix: str) -> Finding:
    """The job will not run, and the administrator of the cluster can fix it."""
    return Finding("fail", what, why, fix, whose="cluster")


def unknown(what: str, why: str, fix: str = "") -> Finding:
    """It cannot be known from here."""
    return Finding("unknown", what, why, fix)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 when nothing fails, 3 when the administrator must fix something, 2 when the user alone can fix it all."""
    failing = {finding.whose for finding in findings if finding.level == "fail"}
    return ADMIN if "cluster" in failing else USER if failing else 0
