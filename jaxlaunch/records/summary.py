"""summary.json: the state of a run while it goes on, and how it ended. Pure.

Host 0's agent writes it, host 1's when host 0 is lost, and `launcher run` at the end. It begins as the start record of
an attempt: one whose end is not in attempts.jsonl died with its agent (launcher/agent/leader/unfinished).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.records import checked
from jaxlaunch.records.checked import Seconds, Time, Whole
from jaxlaunch.records.verdict import Verdict, is_unstartable

FILE = "summary.json"
_REFUSALS = (contract.BAD_SPEC, contract.BAD_DATA, contract.STARTUP, contract.NO_CHECKPOINT)
_STATUS = {contract.DONE: "done", contract.PREEMPTED: "stopped", contract.DEADLINE: "stopped"}


@dataclasses.dataclass(frozen=True)
class Of:
    """The attempt that a summary is of, and when it was true."""

    uid: str
    generation: Whole
    attempt: Whole
    started: Time
    at: Time
    seconds: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)  # of this attempt alone, by contract.CLOCK
    first_committed: Whole | None = None  # by this attempt, as the next
    last_committed: Whole | None = None
    unsafe_s: Seconds = 0.0  # of stepping since the last commit
    judged: Verdict | None = None  # on it, until its end is on record

    def to_json(self, has_ended: bool) -> dict[str, Any]:
        """The fields, without those that only an attempt's record needs once it has one."""
        fields = dataclasses.asdict(self)
        return {name: fields[name] for name in fields if not (has_ended and name in ("seconds", "unsafe_s", "judged"))}


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a reader of the run folder wants to know first."""

    verdict: Verdict | None  # None while the run goes on
    step: Whole | None  # complete on every rank that reports
    seconds: Mapping[str, Seconds]  # of the whole run, by contract.CLOCK
    restarts: Mapping[str, Whole]  # by cause
    saved: Whole | None = None  # the newest step on storage that the run knows of
    metrics: Mapping[str, Any] | None = None  # rank 0's newest
    notes: Sequence[str] = ()
    stacks: Mapping[int, str] = dataclasses.field(default_factory=dict)  # by rank, after a hang
    of: Of | None = None

    @property
    def status(self) -> str:
        """One of running, done, stopped, failed."""
        return "running" if self.verdict is None else _STATUS.get(self.verdict.code, "failed")

    @property
    def has_done_anything(self) -> bool:
        """Whether the run stepped, or committed a step."""
        has_committed = self.of is not None and self.of.first_committed is not None
        return has_committed or self.seconds.get("step", 0.0) + self.seconds.get("lost_work", 0.0) > 0

    def is_refused(self, is_train: bool) -> bool:
        """Whether the run ended as wrong in itself before its first step; `is_train`: it is one of the trainer.

        A job's own program that ran has done something, although it need not report a step.
        """
        if self.verdict is None or self.verdict.code not in _REFUSALS or self.has_done_anything:
            return False
        has_run = bool(self.restarts) or (self.verdict.code == contract.STARTUP and not is_unstartable(self.verdict))
        return is_train or not has_run

    def is_void(self, is_train: bool) -> bool:
        """Whether the run left nothing that is worth the record of one before it: however it ended, a run of the
        trainer that neither stepped nor finished is."""
        is_done = self.verdict is not None and self.verdict.code == contract.DONE
        return self.is_refused(is_train) or (is_train and not is_done and not self.has_done_anything)

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
    def from_json(cls, fields: Any) -> Summary:
        """What `to_json` gave. Raises Malformed where a field is wrong."""
        goodput = checked.read(_Goodput, fields.get("goodput") if isinstance(fields, dict) else None)
        return checked.read(cls, {**fields, "seconds": goodput.seconds})

    def or_earlier(self, earlier: Summary | None, is_train: bool) -> Summary:
        """The summary to keep: `earlier`, another run's, where this run is refused and that one stands."""
        is_other = earlier is not None and (earlier.of and earlier.of.uid) != (self.of and self.of.uid)
        return earlier if earlier is not None and is_other and earlier.stands and self.is_refused(is_train) else self

    @property
    def stands(self) -> bool:
        """Whether the run left anything that is worth keeping."""
        return self.status == "done" or bool(self.step or self.saved)


@dataclasses.dataclass(frozen=True)
class _Goodput:
    seconds: Mapping[str, Seconds]


def ratio(seconds: Mapping[str, float]) -> float | None:
    """The goodput ratio: the share of all seconds in steps that count; None before the first step."""
    total, steps = sum(seconds.values()), seconds.get("step", 0.0)
    return steps / total if total > 0 and steps > 0 else None
