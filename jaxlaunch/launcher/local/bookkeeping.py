"""Records that the launcher writes when a start of a local run begins and a generation ends.

Agents record their own attempts. If they were killed before they could do so, their records are
completed here, from exit codes and from the checkpoints on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch import contract, regular_files
from jaxlaunch.launcher.local import agents
from jaxlaunch.launcher.yaml import reader
from jaxlaunch.records.summary import (
    AttemptProgress,
    AttemptRecord,
    Summary,
    furthest_step,
    newest_effective_start,
)
from jaxlaunch.records.verdict import (
    Failure,
    FailureKind,
    LostHost,
    StopFacts,
    StopOutcome,
    StopReason,
    Verdict,
    verdict_for_code,
)
from jaxlaunch.runs import history, run_folder
from jaxlaunch.runs.layout import JOB, start_folder
from jaxlaunch.runs.run_folder import RunFolder, RunStarts, changed_keys, start_rows


def begin_start(
    folder: Path, uid: str, job_yaml: str, checkpoints: Path | None, say: Callable[[str], None]
) -> None:
    """Begin start `uid` of the run in `folder`, with the resolved job as YAML.

    The records of the last start are closed, and this one gets a folder and a row. A kill at any
    point leaves a folder that the next start can continue from, because `summary.json` is replaced
    last.
    """
    files = RunFolder(folder, say)
    if earlier_starts := start_rows(files.read_summary()):
        # Processes of agents that were killed would write next to this run's.
        agents.kill_orphans(earlier_starts[-1].uid)
    close_summary(files, checkpoints)
    starts = RunStarts(files, uid)
    files.replace_file(starts.file_path(JOB), job_yaml.encode())
    changes = dict[str, Any]()
    if (compared_start := starts.compared_start) is not None:
        previous_job: Any = {}
        file = start_folder(folder, compared_start.start) / JOB
        with contextlib.suppress(OSError):
            text = regular_files.read_bounded(file, reader.MAX_BYTES).decode(errors="replace")
            previous_job = reader.parse_document(text, JOB).data
        job = reader.parse_document(job_yaml, JOB).data
        changes = dict(changed_keys("", previous_job, job))
    starts.begin_start(changes, newest_step(checkpoints))


def find_reached_step(folder: Path) -> int | None:
    """Return the step that earlier starts reached, or None if the newest start has trained."""
    starts = start_rows(RunFolder(folder).read_summary())
    if not starts or starts[-1].has_trained:
        return None
    return next((start.last_step for start in reversed(starts) if start.has_trained), None)


def find_kept_status(folder: Path) -> tuple[str | None, int]:
    """Return the status that a refused newest start left unchanged, and that start's number.

    The status is None if the newest start was not refused.
    """
    summary = RunFolder(folder).read_summary()
    rows = start_rows(summary)
    if summary is None or not rows:
        return None, 1
    is_kept = newest_effective_start(rows) is not rows[-1]
    return summary.status if is_kept else None, rows[-1].start


def end_generation(
    folder: RunFolder,
    uid: str,
    generation: int,
    codes: Sequence[int],
    checkpoints: Path | None,
    *,
    is_stopped: bool,
    started_at: float,
    is_interrupt: bool = False,
    has_train_block: bool = False,
) -> Summary:
    """Record the end of a generation in `folder`, and return the summary.

    Args:
        folder: The run folder.
        uid: The uid of the start.
        generation: The number of the generation that ended.
        codes: The exit codes of its agents, by host.
        checkpoints: The folder of the checkpoints, if it is on this machine.
        is_stopped: Whether the user stopped the run.
        started_at: Unix time from which the seconds of the run are counted.
        is_interrupt: Whether the user stopped the run with Ctrl-C.
        has_train_block: Whether the job has a train block, whose saves are all in `checkpoints`.
    """
    starts, deleted_step = RunStarts(folder, uid), None
    stop_reason = None
    if is_stopped:
        stop_reason = StopReason.INTERRUPT if is_interrupt else StopReason.USER
    records, summary = folder.read_records(uid), starts.read_own_summary()
    is_open = run_folder.find_unfinished_attempt(folder, uid, records) is not None
    # No agent of this generation wrote a summary.
    if summary is None or summary.of is None or summary.of.generation < generation:
        now, attempt = time.time(), len(records) + 1
        if summary is None:
            summary = Summary(None, restarts=history.restarts_by_cause(records, attempt))
        progress = AttemptProgress(uid, generation, attempt, started=now, at=now)
        summary = dataclasses.replace(summary, step=None, stacks={}, of=progress)
        is_open = True
    # The agents were killed after they had recorded the attempt.
    if not is_open and summary.verdict is None:
        summary = _with_recorded_verdict(summary, records[-1].verdict)
        summary = dataclasses.replace(summary, verdict=None) if is_stopped else summary
    if summary.verdict is None:
        summary = _with_saved_step(summary, checkpoints, starts, records)
    if has_train_block and _is_deleted(summary.committed, checkpoints):
        deleted_step = summary.committed
        summary = dataclasses.replace(summary, committed=newest_step(checkpoints))
    if is_open and summary.of is not None:
        verdict = _verdict_for_codes(codes, summary, stop_reason, deleted_step)
        record = run_folder.close_unfinished(summary.of, verdict)
        folder.append_record(record)
        records.append(record)
        seconds = history.sum_seconds(records, time.time(), started_at)
        summary = dataclasses.replace(summary, verdict=record.verdict, seconds=seconds)
    elif summary.verdict is not None:
        summary = _complete_verdict(
            summary, folder, starts, records, codes, checkpoints, deleted_step
        )
    else:
        reason = stop_reason or StopReason.USER
        verdict = _verdict_for_codes(codes, summary, reason, deleted_step)
        summary = dataclasses.replace(summary, verdict=verdict)
    final = summary.verdict
    if final is not None and records and contract.outcome_for_code(final.code).in_place:
        # Agents that were lost could not report that the run makes no progress.
        final = history.decide_next(records, 0, all_hosts_alive=False).verdict
    clock = dict.fromkeys(contract.CLOCK_CAUSES, 0.0) | dict(summary.seconds)
    # The agents took the remaining seconds to end.
    clock["down"] += max(0.0, time.time() - started_at - sum(clock.values()))
    restarts = history.restarts_by_cause(records) if records else summary.restarts
    summary = dataclasses.replace(
        summary, verdict=final, restarts=restarts, seconds=clock, held_until=None
    )
    starts.write_summary(summary)
    return summary


def close_summary(folder: RunFolder, checkpoints: Path | None) -> None:
    """Close the record of a run whose agents and launcher were killed together."""
    summary = folder.read_summary()
    if summary is None or summary.of is None or summary.verdict is not None:
        return
    uid = summary.of.uid
    starts = RunStarts(folder, uid)
    summary = _with_saved_step(summary, checkpoints, starts, folder.read_records(uid))
    starts.write_summary(summary)
    records = run_folder.settle_records(folder, uid)
    if records and summary.of is not None:
        seconds = history.sum_seconds(records, summary.of.at)
        restarts = history.restarts_by_cause(records)
        summary = _with_recorded_verdict(summary, records[-1].verdict)
        starts.write_summary(dataclasses.replace(summary, restarts=restarts, seconds=seconds))


def _with_recorded_verdict(summary: Summary, verdict: Verdict) -> Summary:
    step = furthest_step(summary.step, verdict.step)
    return dataclasses.replace(summary, verdict=verdict, step=step)


def _with_saved_step(
    summary: Summary, checkpoints: Path | None, starts: RunStarts, records: Sequence[AttemptRecord]
) -> Summary:
    """Add a step on disk that the killed agents had no time to report."""
    saved_step = newest_step(checkpoints)
    if saved_step is None or (summary.committed is not None and saved_step <= summary.committed):
        return summary
    summary = dataclasses.replace(summary, committed=saved_step)
    progress = summary.of
    if progress is None:
        return summary
    # An attempt that was killed before it reported its first step began after the newest saved one.
    first_step = progress.first_step or 1 + max(
        history.newest_saved_step(records) or 0, starts.earlier_saved_step
    )
    if saved_step < first_step:
        # An earlier attempt saved it.
        return summary
    progress = dataclasses.replace(
        progress,
        first_step=first_step,
        first_committed=progress.first_committed or saved_step,
        last_committed=saved_step,
    )
    return dataclasses.replace(summary, of=progress, step=max(summary.step or 0, saved_step))


def newest_step(checkpoints: Path | None) -> int | None:
    """Return the newest complete step in a folder of checkpoints, or None.

    A step is complete when it has a manifest, which is written last. Errors of the storage are
    ignored, because the run's own processes report them.
    """
    names: list[str] = []
    if checkpoints is not None:
        with contextlib.suppress(OSError):
            names = [path.parent.name for path in checkpoints.glob(f"*/{contract.MANIFEST}")]
    return max((int(name) for name in names if name.isdecimal()), default=None)


def _is_deleted(step: int | None, checkpoints: Path | None) -> bool:
    """Return whether a step that the agents reported as saved no longer exists."""
    if step is None or checkpoints is None:
        return False
    try:
        (checkpoints / str(step) / contract.MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        # Whether the step is still there is unknown.
        return False
    return False


def _verdict_for_codes(
    codes: Sequence[int],
    summary: Summary,
    stop_reason: StopReason | None,
    deleted_step: int | None,
) -> Verdict:
    """Return the verdict on agents that recorded none, from their exit codes.

    Agents that were not killed exit with the gang's code. `deleted_step` is a saved step that no
    longer exists.
    """
    step, agent_codes = summary.step, [code for code in codes if code >= 0]
    if agent_codes and agent_codes[0] in contract.OUTCOMES:
        facts = Failure(FailureKind.UNRECORDED, exit_code=agent_codes[0])
        host = 0 if contract.outcome_for_code(agent_codes[0]).in_place else None
        return verdict_for_code(agent_codes[0], facts, rank=host, host=host, step=step)
    if stop_reason is not None:
        committed = summary.committed
        stop = StopFacts(stop_reason, committed_step=committed, deleted_step=deleted_step)
        facts = Failure(FailureKind.STOPPED, stop=stop)
        return verdict_for_code(stop.verdict_code, facts, step=step)
    are_killed = len(codes) > 1 and not agent_codes
    kind = FailureKind.AGENTS_KILLED if are_killed else FailureKind.AGENT_ENDED
    facts = Failure(kind, signal=-codes[0]) if codes[0] < 0 else Failure(kind, exit_code=codes[0])
    return verdict_for_code(contract.LOST, facts, rank=0, host=0, step=step)


def _complete_verdict(
    summary: Summary,
    folder: RunFolder,
    starts: RunStarts,
    records: list[AttemptRecord],
    codes: Sequence[int],
    checkpoints: Path | None,
    deleted_step: int | None,
) -> Summary:
    """Add facts to the verdict that the agents could not see.

    These are the signal that killed the agent of a lost host, a step on disk that no process had
    the time to report, and that the recorded step no longer exists (`deleted_step`).
    """
    verdict = summary.verdict
    assert verdict is not None

    def with_signal(lost_host: LostHost) -> LostHost:
        code = codes[lost_host.host] if lost_host.host < len(codes) else 0
        return dataclasses.replace(lost_host, agent_signal=-code) if code < 0 else lost_host

    recorded_summary, failure = summary, verdict.failure.with_lost_hosts(with_signal)
    summary = _with_saved_step(summary, checkpoints, starts, records[:-1])
    has_newer_step = summary.committed != recorded_summary.committed
    if (stop := failure.stop) is not None:
        if stop.outcome is StopOutcome.NOT_SAVED and has_newer_step:
            failure = failure.with_stop(committed_step=summary.committed)
        elif deleted_step is not None and stop.committed_step == deleted_step:
            failure = failure.with_stop(committed_step=None, deleted_step=deleted_step)
    if failure != verdict.failure:
        verdict = verdict.with_failure(failure)
    if 0 in failure.lost_host_numbers:
        verdict = dataclasses.replace(verdict, step=summary.step)
    if records and records[-1].verdict == recorded_summary.verdict and summary.of is not None:
        record = dataclasses.replace(records[-1], verdict=verdict)
        if has_newer_step:
            record = dataclasses.replace(
                record,
                first_committed=summary.of.first_committed,
                last_committed=summary.of.last_committed,
            )
        if record != records[-1]:
            records[-1] = record
            folder.replace_last_record(record)
    return dataclasses.replace(summary, verdict=verdict)
