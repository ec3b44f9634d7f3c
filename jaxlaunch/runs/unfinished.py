"""An attempt that was started and has no end on record: its agents were killed before they could write one.

It counts as lost, and as fruitless unless it committed a step. What is known of it is its last summary.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxlaunch import contract
from jaxlaunch.records.attempt import Record
from jaxlaunch.records.failure import Failure, FailureKind, LostHost
from jaxlaunch.records.summary import Of, Summary
from jaxlaunch.records.verdict import Verdict, verdict_for_code
from jaxlaunch.runs.run_folder import RunFolder


def find(folder: RunFolder, uid: str, records: Sequence[Record]) -> tuple[Summary, Of] | None:
    """The last summary of the attempt of run `uid` that has no end among its `records`; None where each has one."""
    found = folder.summary(uid)
    if found is None or found.of is None or found.verdict is not None:
        return None
    if records and found.of.attempt <= records[-1].attempt:
        return None
    return found, found.of


def close(of: Of, verdict: Verdict) -> Record:
    """The record of an unfinished attempt: what was decided on it before its agents died, else `verdict`.

    Its steps since the last commit are lost work. It ended some time after its last summary; the seconds from there to
    the next start count as down.
    """
    end = of.judged or verdict
    seconds = dict(of.seconds)
    lost = min(of.unsafe_s, seconds.get("step", 0.0))
    seconds["step"] = seconds.get("step", 0.0) - lost
    seconds["lost_work"] = seconds.get("lost_work", 0.0) + lost
    return Record(
        uid=of.uid,
        generation=of.generation,
        attempt=of.attempt,
        cause=end.cause,
        rank=end.rank,
        first_committed=of.first_committed,
        last_committed=of.last_committed,
        seconds={cause: round(spent, 3) for cause, spent in seconds.items()},
        verdict=end,
        started=of.started,
        ended=of.at,
        restart=of.restart,
    )


def settle(folder: RunFolder, uid: str) -> list[Record]:
    """Every attempt of run `uid`, oldest first. One without an end gets it, on storage too: its host was lost."""
    records = folder.records(uid)
    unfinished = find(folder, uid, records)
    if unfinished is None:
        return records
    found, of = unfinished
    facts = Failure(FailureKind.HOST_LOST, lost_hosts=(LostHost(0),))
    record = close(of, verdict_for_code(contract.LOST, facts, rank=0, host=0, step=found.step))
    folder.append(record)
    return [*records, record]
