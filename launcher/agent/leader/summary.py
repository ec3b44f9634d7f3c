"""summary.json: the state of a run while it goes on, and how it ended. Its fields are defined here, and written by
launcher/agent/leader/starts alone.

Host 0's agent writes it, host 1's when host 0 is lost, and `launcher run` at the end. It begins as the start record of
an attempt: one whose end is not in attempts.jsonl died with its agent (launcher/agent/leader/unfinished).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang import record_checks
from jaxlaunch.launcher.agent.gang.clock import ratio
from jaxlaunch.launcher.agent.gang.verdict import Verdict
from jaxlaunch.launcher.agent.leader.run_folder import RunFolder

FILE = "summary.json"
_STATUS = {contract.DONE: "done", contract.PREEMPTED: "stopped", contract.DEADLINE: "stopped"}


@dataclasses.dataclass(frozen=True)
class Of:
    """The attempt that a summary is of, and when it was true."""

    uid: str
    generation: int
    attempt: int
    started: float  # Unix time, as `at`
    at: float
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of this attempt alone, by contract.CLOCK
    first_committed: int | None = None  # by this attempt, as the next
    last_committed: int | None = None
    unsafe_s: float = 0.0  # of stepping since the last commit
    first_step: int | None = None  # that it trains; None: it has not said so far
    judged: Mapping[str, Any] | None = None  # the verdict on it, until its end is on record

    def to_json(self, has_ended: bool) -> dict[str, Any]:
        """The fields, without those that only an attempt's record needs once it has one."""
        fields = dataclasses.asdict(self)
        return {name: fields[name] for name in fields if not (has_ended and name in ("seconds", "unsafe_s", "judged"))}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Of:
        """Raises TypeError when a field is missing; unknown fields are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in fields.items() if name in known})


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a reader of the run folder wants to know first."""

    verdict: Verdict | None  # None while the run goes on
    step: int | None  # complete on every rank that reports
    seconds: Mapping[str, float]  # of the whole run, by contract.CLOCK
    restarts: Mapping[str, int]  # by cause
    saved: int | None = None  # the newest step on storage that the run knows of
    metrics: Mapping[str, Any] | None = None  # rank 0's newest
    notes: Sequence[str] = ()
    stacks: Mapping[int, str] = dataclasses.field(default_factory=dict)  # by rank, after a hang
    of: Of | None = None

    @property
    def status(self) -> str:
        """One of running, done, stopped, failed."""
        return "running" if self.verdict is None else _STATUS.get(self.verdict.code, "failed")

    def to_json(self) -> dict[str, Any]:
        """The keys of the file, in its order."""
        seconds = {cause: round(spent, 3) for cause, spent in self.seconds.items()}
        return {
            "status": self.status,
            "step": self.step,
            "saved": self.saved,
            "verdict": self.verdict.to_json() if self.verdict else None,
            "metrics": self.metrics,
            "goodput": {"ratio": ratio(self.seconds), "seconds": seconds},
            "restarts": dict(self.restarts),
            "notes": list(self.notes),
            **({"stacks": {str(rank): self.stacks[rank] for rank in sorted(self.stacks)}} if self.stacks else {}),
            "of": self.of.to_json(has_ended=self.verdict is not None) if self.of else None,
        }

    @classmethod
    def read(cls, folder: RunFolder, uid: str) -> Summary | None:
        """The summary of run `uid` in `folder`; None where there is none, or another run's."""
        found = stored(folder)
        try:
            of = Of.from_json(found["of"])
            verdict = None if found["verdict"] is None else Verdict.from_json(found["verdict"])
            if of.uid != uid:
                return None
            return cls(
                verdict,
                step=found["step"],
                seconds=found["goodput"]["seconds"],
                restarts=found["restarts"],
                saved=found["saved"],
                metrics=found["metrics"],
                notes=found["notes"],
                stacks={int(rank): text for rank, text in found.get("stacks", {}).items()},
                of=of,
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


def stored(folder: RunFolder, name: str = FILE) -> dict[str, Any]:
    """The fields of a summary in `folder`; none where there is none, or where one has another form."""
    found = folder.read(name)
    return found if _FORM(found) else {}


_OF = record_checks.record(
    {},
    {
        "uid": record_checks.text,
        "generation": record_checks.whole,
        "attempt": record_checks.whole,
        "started": record_checks.seconds,
        "at": record_checks.seconds,
        "seconds": record_checks.named(record_checks.seconds),
        "first_committed": record_checks.or_none(record_checks.whole),
        "last_committed": record_checks.or_none(record_checks.whole),
        "unsafe_s": record_checks.seconds,
        "first_step": record_checks.or_none(record_checks.whole),
        "judged": record_checks.or_none(record_checks.VERDICT),
    },
)
_START = record_checks.record(
    {"start": record_checks.whole, "uid": record_checks.text, "started": record_checks.seconds},
    {
        "ended": record_checks.or_none(record_checks.seconds),
        "code": record_checks.or_none(record_checks.whole),
        "first_step": record_checks.or_none(record_checks.whole),
        "last_step": record_checks.or_none(record_checks.whole),
        "changed": record_checks.named(),
    },
)
_FORM = record_checks.record(
    {},
    {
        "status": record_checks.text,
        "step": record_checks.or_none(record_checks.whole),
        "saved": record_checks.or_none(record_checks.whole),
        "verdict": record_checks.or_none(record_checks.VERDICT),
        "metrics": record_checks.or_none(record_checks.named()),
        "goodput": record_checks.record({}, {"seconds": record_checks.named(record_checks.seconds)}),
        "restarts": record_checks.named(record_checks.whole),
        "notes": record_checks.each(record_checks.text),
        "stacks": record_checks.named(record_checks.text),
        "of": record_checks.or_none(_OF),
        "starts": record_checks.each(_START),
    },
)
