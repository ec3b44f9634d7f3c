"""Reading and writing of the run folder, which outlives a pod: attempts, summaries and starts.

A run may be started several times. Start K has its own summary and job in starts/K, which no later
start changes. summary.json in the run folder is the summary of the newest start that was not
refused before it trained, with a row for every start. job.yaml next to it is the job of the newest
start that trained, to which the checkpoints belong. `launcher run` writes the resolved job; in a
JobSet, the leader of the first pods writes the job as the pods received it, in JSON.

An attempt is unfinished if its start is on record but its end is not, because its agents were
killed before they could write it. The next start closes the attempt from its last summary: as lost,
and without progress unless it committed a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch import atomic_file, regular_files
from jaxlaunch.records import codec
from jaxlaunch.records.codec import NonNegativeInt
from jaxlaunch.records.summary import (
    AttemptProgress,
    AttemptRecord,
    StartRecord,
    Summary,
    newest_effective_start,
)
from jaxlaunch.records.verdict import Failure, FailureKind, LostHost, Verdict, verdict_for
from jaxlaunch.runs.layout import (
    AGENTS,
    ATTEMPTS,
    JOB,
    STARTS,
    SUMMARY,
    log_path,
    start_file,
    start_folder,
)

# Reads have limits, because anyone who shares the storage may write files of any size.
MAX_ATTEMPTS_BYTES = 8 * 1024 * 1024
# The stacks of thousands of ranks fit into these limits.
MAX_JSON_BYTES, MAX_JSON_VALUES = 32 * 1024 * 1024, 1_000_000
# The limit of the ends of all logs together.
TAIL_BYTES = 64 * 1024
# The smallest shares of the first log, and of any other.
FIRST_TAIL_BYTES, MIN_TAIL_BYTES = 16 * 1024, 2 * 1024


class RunFolder:
    """Reads and writes the files of a run folder.

    The first error of the file system is logged. No error ends the run.

    Args:
        folder: The run folder, or None if the job has none. Then nothing is read or written.
        log: Function that logs a line.
    """

    def __init__(self, folder: Path | None, log: Callable[[str], None] = lambda text: None) -> None:
        self._folder, self._log = folder, log
        self._fault: str | None = None

    @property
    def unknown_reason(self) -> str | None:
        """The reason why earlier attempts are not known, or None if they are."""
        no_folder = "the job has no run folder on storage that outlives its pods"
        return no_folder if self._folder is None else self._fault

    def read_records(self, uid: str) -> list[AttemptRecord]:
        """Return the finished attempts of run `uid`, oldest first.

        Only the last MAX_ATTEMPTS_BYTES are read, which hold thousands of attempts. Invalid and
        truncated lines and those of other runs are skipped.
        """
        if self._folder is None:
            return []
        path = self._folder / ATTEMPTS
        try:
            data = regular_files.read_bounded(
                path, MAX_ATTEMPTS_BYTES, from_end=True, below=self._folder
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            self._note_fault(error)
            return []
        records = (_decode_record(line) for line in data.splitlines())
        return [record for record in records if record is not None and record.uid == uid]

    def append_record(self, record: AttemptRecord) -> None:
        """Append an attempt to attempts.jsonl, and sync the file."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / ATTEMPTS, "a+b", opener=regular_files.open_regular) as file:
                # A writer that was killed may have left an incomplete line.
                if size := file.seek(0, os.SEEK_END):
                    file.seek(size - 1)
                newline = b"" if file.read(1) in (b"", b"\n") else b"\n"
                file.write(newline + _encode_record(record))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._note_fault(error)

    def replace_last_record(self, record: AttemptRecord) -> None:
        """Replace the last attempt in attempts.jsonl by a more complete record of it."""
        if self._folder is None:
            return
        try:
            path = self._folder / ATTEMPTS
            data = regular_files.read_bounded(path, MAX_ATTEMPTS_BYTES, from_end=True)
        except OSError as error:
            self._note_fault(error)
            return
        lines = data.splitlines(keepends=True)
        # A writer that was killed, or a full disk, may have left an incomplete line at the end.
        while lines and _decode_record(lines[-1]) is None:
            del lines[-1]
        self.replace_file(ATTEMPTS, b"".join(lines[:-1]) + _encode_record(record))

    def write_json(self, name: str, value: Mapping[str, Any] | Sequence[Any]) -> None:
        """Replace the content of a file with a value as JSON."""
        self.replace_file(name, json.dumps(value, indent=2, default=str).encode() + b"\n")

    def replace_file(self, name: str, data: bytes) -> None:
        """Replace the content of a file atomically."""
        if self._folder is None:
            return
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.write_file(path, data)
        except OSError as error:
            self._note_fault(error)

    def copy_file(self, name: str, target: str) -> None:
        """Copy file `name` to `target` if it exists."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                data = regular_files.read_bounded(self._folder / name, MAX_JSON_BYTES)
                self.replace_file(target, data)

    def list_starts(self) -> list[int]:
        """Return the numbers of the starts whose record is in the folder."""
        if self._folder is None:
            return []
        try:
            names = [path.parent.name for path in self._folder.glob(f"{STARTS}/*/{SUMMARY}")]
        except OSError as error:
            # Until Python 3.11, `glob` raises an error for a folder that this user may not search.
            self._note_fault(error)
            return []
        return sorted(int(name) for name in names if name.isdecimal())

    def read_summary(self, uid: str | None = None, name: str = SUMMARY) -> Summary | None:
        """Return the summary in a file, or None if it is missing, invalid, or not of run `uid`."""
        try:
            summary = Summary.from_json(self.read_json(name))
        except ValueError:
            return None
        is_of_run = uid is None or (summary.of is not None and summary.of.uid == uid)
        return summary if is_of_run else None

    def read_summary_row(self) -> Summary | None:
        """Return the summary of the run with the fields for a table of runs, or None."""
        try:
            return Summary.row_from_json(self.read_json(SUMMARY))
        except ValueError:
            return None

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file, or an empty one if it is missing or invalid."""
        if self._folder is None:
            return {}
        try:
            value = _read_json(f"{self._folder}/{name}", self._folder)
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def read_log_tails(self, start: int, ranks: Sequence[int]) -> list[tuple[int, list[str]]]:
        """Return ranks with the last lines of their logs, together at most TAIL_BYTES.

        The log of a rank has all attempts of a start. It ends with the previous attempt until a new
        attempt prints.

        Args:
            start: Number of the start.
            ranks: The ranks, most important first. The first one has the largest share, and the
                last ones are omitted if there are too many.
        """
        if self._folder is None:
            return []
        tails, bytes_left = [], TAIL_BYTES
        for rank in ranks:
            minimum = FIRST_TAIL_BYTES if rank == ranks[0] else MIN_TAIL_BYTES
            size = max(minimum, TAIL_BYTES // len(ranks))
            if size > bytes_left:
                break
            path = log_path(start_folder(self._folder, start), rank)
            try:
                data = regular_files.read_bounded(path, size + 1, from_end=True, below=self._folder)
            except OSError:
                continue
            lines = data[-size:].decode(errors="replace").splitlines()
            if len(data) > size:
                # The first line may be incomplete.
                del lines[:1]
            if lines:
                tails.append((rank, lines))
                bytes_left -= size
        return tails

    def _note_fault(self, error: OSError) -> None:
        if self._fault is None:
            self._fault = f"the run folder {self._folder} cannot be used: {error}"
            self._log(f"{self._fault}; its summary and attempts will be incomplete")


def _decode_record(line: bytes) -> AttemptRecord | None:
    """Return the attempt in a line, or None if the line is invalid or incomplete."""
    try:
        return codec.read_record(AttemptRecord, codec.parse_record(line))
    except ValueError:
        return None


def _encode_record(record: AttemptRecord) -> bytes:
    return json.dumps(record.to_json(), default=str).encode() + b"\n"


def _read_json(path: Path | str, below: Path) -> Any:
    """Return the value in a JSON file. Raises OSError, ValueError."""
    data = regular_files.read_bounded(path, MAX_JSON_BYTES + 1, below=below)
    # A value needs at least one byte.
    has_many_values = (
        len(data) > MAX_JSON_VALUES and sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES
    )
    if len(data) > MAX_JSON_BYTES or has_many_values:
        raise ValueError(f"{path} is too large")
    return codec.parse_json(data)


@dataclasses.dataclass(frozen=True)
class AgentAddress:
    """The agent of a host, and the address on which it listens."""

    host: NonNegativeInt
    address: str
    pid: NonNegativeInt


def read_agents(folder: Path) -> list[AgentAddress]:
    """Return the addresses of the agents in agents.json, host 0 first.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        agents: list[AgentAddress] = codec.reader_for(Sequence[AgentAddress])(
            _read_json(folder / AGENTS, folder)
        )
    except ValueError:
        # The content is invalid.
        return []
    return agents


# --- starts ---------------------------------------------------------------------------------------

# The keys of a job whose values may be tokens, so that the run folder does not contain them.
SECRET_KEYS = {"env", "args", "eval_args"}


class RunStarts:
    """The rows of all starts of a run, and the files of the current start.

    A start is new if its `uid` differs from that of the last row. The constructor then saves the
    summary of the previous start in its folder, unless that start has done so itself.
    """

    def __init__(self, folder: RunFolder, uid: str) -> None:
        summary = folder.read_summary()
        self._folder, self._has_job, self._is_new = folder, False, False
        # The newest saved step in the summary of this start, if it is not new.
        self.known_saved_step: int | None = None
        self._rows = start_rows(summary) or [
            _start_row(number, self._read_start_summary(number)) for number in folder.list_starts()
        ]
        if self._rows and self._rows[-1].uid == uid:
            self.known_saved_step = None if summary is None else summary.committed
            return
        if summary is not None and self._rows:
            # The previous start may have been killed before it saved its summary in its folder. If
            # it was killed before its agents began, it has none.
            start_summary, last_row = dataclasses.replace(summary, starts=()), self._rows[-1]
            has_begun = summary.of is not None or not summary.starts
            # If the last start was refused, the summary of the run is that of an earlier start.
            is_of_last = summary.of is None or summary.of.uid in (last_row.uid, "")
            saved_summary = self._read_start_summary(last_row.start)
            if has_begun and is_of_last and saved_summary != start_summary:
                folder.write_json(start_file(last_row.start, SUMMARY), start_summary.to_json())
        self._is_new = True
        last = max((row.start for row in self._rows), default=0)
        self._rows.append(StartRecord(last + 1, uid, started=time.time()))

    @property
    def number(self) -> int:
        """The number of this start, from 1."""
        return self._rows[-1].start

    @property
    def earlier_starts(self) -> Sequence[StartRecord]:
        """The rows of the starts before this one."""
        return self._rows[:-1]

    @property
    def earlier_saved_step(self) -> int:
        """The newest step that earlier starts saved, or 0."""
        summaries = [self._read_start_summary(row.start) for row in self.earlier_starts]
        return max(
            (summary.committed or 0 for summary in summaries if summary is not None), default=0
        )

    @property
    def has_earlier_checkpoints(self) -> bool:
        """Return whether an earlier start trained with the same place of the checkpoints."""
        has_moved = any(key.startswith("train.checkpoint") for key in self._rows[-1].changed)
        return not has_moved and any(row.has_trained for row in self.earlier_starts)

    @property
    def compared_start(self) -> StartRecord | None:
        """The earlier start whose job is compared with the current one.

        It is the newest that trained or, if none did, the newest.
        """
        trained = [row for row in self.earlier_starts if row.has_trained]
        return next(reversed(trained or self.earlier_starts), None)

    def keep_job(self, job: Mapping[str, Any]) -> None:
        """Write the job of a new start to its folder, and the changed keys to its row."""
        if not self._is_new:
            return
        job, compared = without_secrets(job), self.compared_start
        self._folder.write_json(self.file_path(JOB), job)
        earlier_job = {}
        if compared is not None:
            earlier_job = self._folder.read_json(start_file(compared.start, JOB))
        self._set_changed(dict(changed_keys("", earlier_job, job)) if earlier_job else {})

    def begin_start(self, changed: Mapping[str, Sequence[Any]], saved: int | None = None) -> None:
        """Write the row of this start before its agents begin.

        Args:
            changed: Changed keys of the job, each with its old and new value.
            saved: The newest saved step.
        """
        self._set_changed(changed)
        self.write_summary(Summary(None, restarts={}, committed=saved))

    def write_summary(self, summary: Summary) -> None:
        """Write the summary of this start to summary.json of the run and, at its end, of the start.

        If the start was refused, the run keeps the summary of the earlier start, with a new row.
        """
        self._rows[-1] = self._rows[-1].with_summary(summary)
        if self._rows[-1].has_trained and not self._has_job:
            self._folder.copy_file(self.file_path(JOB), JOB)
            self._has_job = True
        if summary.verdict is not None:
            start_summary = dataclasses.replace(summary, starts=())
            self._folder.write_json(self.file_path(SUMMARY), start_summary.to_json())
        if self._rows[-1].refusal:
            summary = self._read_earlier_result() or summary
        self._folder.write_json(SUMMARY, dataclasses.replace(summary, starts=self._rows).to_json())

    def read_own_summary(self) -> Summary | None:
        """Return the summary of this start, even if the start was refused."""
        uid = self._rows[-1].uid
        return self._folder.read_summary(uid) or self._folder.read_summary(
            uid, name=self.file_path(SUMMARY)
        )

    def _read_earlier_result(self) -> Summary | None:
        """Return the summary that the run had before this start, which was refused."""
        summary, uid = self._folder.read_summary(), self._rows[-1].uid
        if summary is not None and summary.of is not None and summary.of.uid != uid:
            # An earlier start may still be running and writing this file.
            return summary
        row = newest_effective_start(self.earlier_starts)
        return None if row is None else self._read_start_summary(row.start)

    def file_path(self, name: str) -> str:
        """Return the path of a file of this start, relative to the run folder."""
        return start_file(self.number, name)

    def _read_start_summary(self, number: int) -> Summary | None:
        return self._folder.read_summary(name=start_file(number, SUMMARY))

    def _set_changed(self, changed: Mapping[str, Sequence[Any]]) -> None:
        """Set the changed keys in the row of this start."""
        self._rows[-1] = dataclasses.replace(self._rows[-1], changed=changed)
        # The job of the run is that of the newest start until one has trained.
        if not any(row.has_trained for row in self.earlier_starts):
            self._folder.copy_file(self.file_path(JOB), JOB)


def changed_keys(path: str, old: Any, new: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield each key whose values differ between two jobs, with both values.

    Lists are compared as a whole, and values that may be tokens are replaced by "…".

    Args:
        path: The dotted key of the two values, "" for whole jobs.
        old: A value of the earlier job.
        new: The value of the later job.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            inner_path = f"{path}.{key}" if path else str(key)
            yield from changed_keys(inner_path, old.get(key), new.get(key))
    elif old != new:
        is_secret = bool(SECRET_KEYS & set(path.split(".")))
        yield path, ["…", "…"] if is_secret else [without_secrets(old), without_secrets(new)]


def without_secrets(job: Any) -> Any:
    """Return the job with "…" instead of values that may be tokens."""
    if not isinstance(job, Mapping):
        return job
    return {
        key: dict.fromkeys(value, "…")
        if key in SECRET_KEYS and isinstance(value, Mapping)
        else without_secrets(value)
        for key, value in job.items()
    }


def start_rows(summary: Summary | None) -> list[StartRecord]:
    """Return the rows of all starts in a summary."""
    return [] if summary is None else list(summary.starts) or [_start_row(1, summary)]


def _start_row(number: int, summary: Summary | None) -> StartRecord:
    """Return the row for a start that is known only from its own summary."""
    if summary is None:
        return StartRecord(number, "", 0.0)
    last_step = summary.step or summary.committed or None
    progress = summary.of or AttemptProgress("", 0, 0, 0.0, 0.0, first_step=1)
    first_step = progress.first_step
    if first_step is not None and (last_step is None or last_step < first_step):
        # The start ended before it completed its first step.
        first_step = None
    return StartRecord(
        start=number,
        uid=progress.uid,
        started=progress.started,
        ended=None if summary.of is None else progress.at,
        code=None if summary.verdict is None else summary.verdict.code,
        first_step=first_step,
        last_step=last_step,
    )


# --- unfinished attempts --------------------------------------------------------------------------


def find_unfinished_attempt(
    folder: RunFolder, uid: str, records: Sequence[AttemptRecord]
) -> tuple[Summary, AttemptProgress] | None:
    """Return the last summary of the unfinished attempt and its progress, or None without one.

    Args:
        folder: The run folder.
        uid: Identity of the run. A summary of another run is ignored.
        records: Attempts of this run that ended, oldest first.
    """
    summary = folder.read_summary(uid)
    if summary is None or summary.of is None or summary.verdict is not None:
        return None
    if records and summary.of.attempt <= records[-1].attempt:
        return None
    return summary, summary.of


def close_unfinished(progress: AttemptProgress, verdict: Verdict) -> AttemptRecord:
    """Return the record that closes an unfinished attempt.

    The time since the last commit is moved from "step" to "lost_work", because those steps are
    computed again. The time between the last summary and the next start counts as "down", which the
    next start adds.

    Args:
        progress: Progress of the attempt in its last summary.
        verdict: Verdict to use if the agents were killed before they reached one.
    """
    final_verdict = progress.judged or verdict
    step_s = progress.seconds.get("step", 0.0)
    lost_s = min(progress.unsafe_s, step_s)
    seconds = {
        **progress.seconds,
        "step": step_s - lost_s,
        "lost_work": progress.seconds.get("lost_work", 0.0) + lost_s,
    }
    return AttemptRecord(
        uid=progress.uid,
        generation=progress.generation,
        attempt=progress.attempt,
        cause=final_verdict.cause,
        rank=final_verdict.rank,
        first_committed=progress.first_committed,
        last_committed=progress.last_committed,
        seconds={cause: round(spent_s, 3) for cause, spent_s in seconds.items()},
        verdict=final_verdict,
        started=progress.started,
        ended=progress.at,
        restart=progress.restart,
        first_step=progress.first_step,
    )


def settle_records(folder: RunFolder, uid: str) -> list[AttemptRecord]:
    """Close an unfinished attempt of run `uid` as lost, and return all attempts, oldest first."""
    records = folder.read_records(uid)
    unfinished = find_unfinished_attempt(folder, uid, records)
    if unfinished is None:
        return records
    summary, progress = unfinished
    facts = Failure(FailureKind.HOST_LOST, lost_hosts=(LostHost(0),))
    record = close_unfinished(progress, verdict_for(facts, rank=0, host=0, step=summary.step))
    folder.append_record(record)
    return [*records, record]
