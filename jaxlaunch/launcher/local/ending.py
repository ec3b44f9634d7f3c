"""How a run on this machine ended: what its agents wrote, completed where they were killed before they could."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from jaxlaunch import contract
from jaxlaunch.records.attempt import Record, furthest
from jaxlaunch.records.failure import Failure, FailureKind, LostHost, StopFacts, StopOutcome, StopReason
from jaxlaunch.records.summary import Of, Summary
from jaxlaunch.records.verdict import Verdict, verdict_for_code
from jaxlaunch.runs import history, unfinished
from jaxlaunch.runs.run_folder import RunFolder
from jaxlaunch.runs.starts import Starts


def ended(
    folder: RunFolder,
    uid: str,
    generation: int,
    codes: Sequence[int],
    checkpoints: Path | None,
    *,
    is_stopped: bool,
    started: float,
    trains: bool = False,
) -> Summary:
    """The end of a generation, whose agents left with `codes`, by host; it is also in `folder` when this returns.

    `is_stopped`: the user stopped it. `started`: when the run did, in Unix time; all seconds since then are counted.
    `trains`: it has a train block, so that every step that it saved was in `checkpoints`.
    """
    records = folder.records(uid)
    found, is_open = folder.summary(uid), unfinished.find(folder, uid, records) is not None
    if found is None or found.of is None or found.of.generation < generation:  # not one agent wrote anything
        of = Of(uid, generation, len(records) + 1, started=time.time(), at=time.time())
        found, is_open = dataclasses.replace(_before(found, records), of=of), True
    if not is_open and found.verdict is None:  # its agents were killed after the record of its attempt
        found = _as_recorded(found, records[-1].verdict)
        found = dataclasses.replace(found, verdict=None) if is_stopped else found
    starts = Starts(folder, uid)
    if found.verdict is None:
        found = _with_saved(found, checkpoints, starts, records)
    gone = found.saved if trains and _is_gone(found.saved, checkpoints) else None
    if gone is not None:
        found = dataclasses.replace(found, saved=newest_step(checkpoints))
    if is_open and found.of is not None:
        record = unfinished.close(found.of, _verdict(codes, found, is_stopped, gone))
        folder.append(record)
        records.append(record)
        found = dataclasses.replace(found, verdict=record.verdict)
        found = dataclasses.replace(found, seconds=history.carried(records, time.time(), started))
    elif found.verdict is not None:
        found = _completed(found, folder, starts, records, codes, checkpoints, gone)
    else:
        found = dataclasses.replace(found, verdict=_verdict(codes, found, True, gone))
    summary = dataclasses.replace(
        found,
        verdict=_given_up(found.verdict, records),
        restarts=history.restarts_by_cause(records) if records else found.restarts,
        seconds=_until_now(found, started),
    )
    starts.write(summary)
    return summary


def close(folder: RunFolder, checkpoints: Path | None) -> None:
    """Ends the record of a run whose agents and launcher were killed together: it is no longer running."""
    found = folder.summary()
    if found is None or found.of is None or found.verdict is not None:
        return
    uid = found.of.uid
    starts = Starts(folder, uid)
    found = _with_saved(found, checkpoints, starts, folder.records(uid))
    starts.write(found)
    records = unfinished.settle(folder, uid)
    if records and found.of is not None:
        seconds = history.carried(records, found.of.at)
        restarts = history.restarts_by_cause(records)
        found = _as_recorded(found, records[-1].verdict)
        starts.write(dataclasses.replace(found, restarts=restarts, seconds=seconds))


def _as_recorded(found: Summary, verdict: Verdict) -> Summary:
    """The end that is on record, with its step, where the summary was last written before."""
    return dataclasses.replace(found, verdict=verdict, step=furthest(found.step, verdict.step))


def _with_saved(found: Summary, checkpoints: Path | None, starts: Starts, records: Sequence[Record]) -> Summary:
    """The state of a run whose agents were killed, with a step on disk that they had no time to write of."""
    saved = newest_step(checkpoints)
    if saved is None or (found.saved is not None and saved <= found.saved):
        return found
    found = dataclasses.replace(found, saved=saved)
    of = found.of
    if of is None:
        return found
    # What this attempt trains first it may not have had the time to write either: it began at the newest step then.
    first = of.first_step or 1 + max(history.saved(records) or 0, starts.saved)
    if saved < first:
        return found  # an earlier attempt saved it
    of = dataclasses.replace(of, first_step=first, first_committed=of.first_committed or saved, last_committed=saved)
    return dataclasses.replace(found, of=of, step=max(found.step or 0, saved))


def newest_step(checkpoints: Path | None) -> int | None:
    """The newest step that is whole in a folder of checkpoints: its manifest is written last. None where there is none,
    and where the storage does not answer: what becomes of the run its own processes say."""
    try:
        manifests = [] if checkpoints is None else list(checkpoints.glob(f"*/{contract.MANIFEST}"))
    except OSError:
        return None
    return max((int(path.parent.name) for path in manifests if path.parent.name.isdecimal()), default=None)


def _is_gone(step: int | None, checkpoints: Path | None) -> bool:
    """Whether a step that was saved is no longer there: who deletes it may do so after the agents last looked."""
    if step is None or checkpoints is None:
        return False
    try:
        (checkpoints / str(step) / contract.MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # nobody knows
    return False


def _before(found: Summary | None, records: Sequence[Record]) -> Summary:
    """The state of the run before a generation that wrote nothing."""
    if found is not None:
        return dataclasses.replace(found, step=None, stacks={})
    return Summary(None, step=None, seconds={}, restarts=history.restarts_by_cause(records, len(records) + 1))


def _verdict(codes: Sequence[int], found: Summary, is_stopped: bool, gone: int | None) -> Verdict:
    """Of agents that wrote none, by their exit codes: those that lived leave with the code of the gang's.

    `gone`: a step that was saved and that somebody has deleted.
    """
    lived = [code for code in codes if code >= 0]
    if lived and lived[0] in contract.OUTCOMES:
        facts = Failure(FailureKind.UNRECORDED, exit_code=lived[0])
        host = 0 if contract.outcome(lived[0]).in_place else None
        return verdict_for_code(lived[0], facts, rank=host, host=host, step=found.step)
    if is_stopped:
        stop = StopFacts(StopReason.USER, committed_step=found.saved, deleted_step=gone)
        return verdict_for_code(stop.code, Failure(FailureKind.STOPPED, stop=stop), step=found.step)
    kind = FailureKind.AGENTS_KILLED if len(codes) > 1 and not lived else FailureKind.AGENT_ENDED
    facts = Failure(kind, signal=-codes[0]) if codes[0] < 0 else Failure(kind, exit_code=codes[0])
    return verdict_for_code(contract.LOST, facts, rank=0, host=0, step=found.step)


def _completed(
    found: Summary,
    folder: RunFolder,
    starts: Starts,
    records: list[Record],
    codes: Sequence[int],
    saved: Path | None,
    gone: int | None,
) -> Summary:
    """The end, with what its agents could not see: the signal that the agent of a lost host died of, a step on disk of
    which no process had the time to tell, and that a step on record is `gone`."""
    if (verdict := found.verdict) is None:
        return found

    def with_signal(lost: LostHost) -> LostHost:
        code = codes[lost.host] if lost.host < len(codes) else 0
        return dataclasses.replace(lost, agent_signal=-code) if code < 0 else lost

    before, failure = found, verdict.failure.with_lost_hosts(with_signal)
    found = _with_saved(found, saved, starts, records[:-1])
    stop = failure.stop
    if stop is not None and stop.outcome is StopOutcome.NOT_SAVED and found.saved != before.saved:
        failure = failure.with_stop(committed_step=found.saved)
    elif stop is not None and gone is not None and stop.committed_step == gone:
        failure = failure.with_stop(committed_step=None, deleted_step=gone)
    if failure != verdict.failure:
        verdict = verdict.with_failure(failure)
    if 0 in failure.lost_host_numbers:
        verdict = dataclasses.replace(verdict, step=found.step)
    if records and records[-1].verdict == before.verdict and found.of is not None:
        record = dataclasses.replace(records[-1], verdict=verdict)
        if found.saved != before.saved:
            first, last = found.of.first_committed, found.of.last_committed
            record = dataclasses.replace(record, first_committed=first, last_committed=last)
        if record != records[-1]:
            records[-1] = record
            folder.amend(record)
    return dataclasses.replace(found, verdict=verdict)


def _given_up(verdict: Verdict | None, records: Sequence[Record]) -> Verdict | None:
    """The verdict on the generation, or that the run makes no progress: agents that were lost could not say so."""
    if verdict is None or not records or not contract.outcome(verdict.code).in_place:
        return verdict
    return history.next_move(records, 0, everyone_lives=False).verdict


def _until_now(found: Summary, started: float) -> dict[str, float]:
    """The seconds of the run, with those that its agents took to end."""
    seconds = dict.fromkeys(contract.CLOCK, 0.0) | dict(found.seconds)
    seconds["down"] += max(0.0, time.time() - started - sum(seconds.values()))
    return seconds
