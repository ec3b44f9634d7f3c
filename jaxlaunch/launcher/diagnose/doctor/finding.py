"""The form of a finding of a check: what, why it matters, how to fix it, and who can. Pure.

`launcher doctor` shows all findings; `launcher submit` refuses a job by those that fail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from jaxlaunch.launcher.diagnose.text import Renderer, Text

Level = Literal["ok", "warn", "fail", "unknown"]
Whose = Literal["yours", "cluster"]

# Exit codes, as of every command.
USER, ADMIN = 2, 3
# How a fix of the administrator's begins.
ASK_ADMIN = "ask the cluster administrator to"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is as it should be, or is not, or cannot be known from here.

    Attributes:
        summary: Template of what it is.
        reason: Template of why that matters.
        remedy: Template of how to fix it.
        whose: Who can fix it: the user, or the administrator of the cluster.
        check: The check that found it.
        fields: The fields of the templates.
    """

    level: Level
    summary: str
    reason: str = ""
    remedy: str = ""
    whose: Whose = "yours"
    check: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def what(self) -> str:
        """The summary, as text."""
        return self._render(self.summary)

    @property
    def why(self) -> str:
        """The reason, as text."""
        return self._render(self.reason)

    @property
    def fix(self) -> str:
        """The remedy, as text."""
        return self._render(self.remedy)

    def _render(self, template: str) -> str:
        return Renderer(is_whole=True).render(Text(template, **self.fields)) if template else ""

    def to_json(self) -> dict[str, str]:
        """Return the texts; only of what fails it matters who can fix it."""
        texts = {"check": self.check, "level": self.level, "what": self.what, "why": self.why, "fix": self.fix}
        texts |= {"whose": self.whose} if self.level == "fail" else {}
        return {name: text for name, text in texts.items() if text or name == "check"}


Findings = Iterator[Finding]


def ok(what: str, /, **fields: Any) -> Finding:
    """Return that it is as it should be."""
    return Finding("ok", what, fields=fields)


def warn(what: str, why: str, fix: str, /, **fields: Any) -> Finding:
    """Return what is not as it should be, with which the job may run all the same."""
    return Finding("warn", what, why, fix, fields=fields)


def fail(what: str, why: str, fix: str, /, **fields: Any) -> Finding:
    """Return why the job will not run, where the user can fix it."""
    return Finding("fail", what, why, fix, fields=fields)


def fail_admin(what: str, why: str, fix: str, /, **fields: Any) -> Finding:
    """Return why the job will not run, where the administrator of the cluster can fix it."""
    return Finding("fail", what, why, fix, "cluster", fields=fields)


def unknown(what: str, why: str, fix: str = "", /, **fields: Any) -> Finding:
    """Return what cannot be known from here."""
    return Finding("unknown", what, why, fix, fields=fields)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 when nothing fails, 3 when the administrator must fix something, 2 when the user can fix it all."""
    failing = {finding.whose for finding in findings if finding.level == "fail"}
    return ADMIN if "cluster" in failing else USER if failing else 0
