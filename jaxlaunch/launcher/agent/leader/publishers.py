"""Publishers of the job's state: pod log, samples of ranks, JobSet annotation and webhook.

Storage and servers may stall for longer than a host may be silent, so threads write to them. They
can neither delay nor fail a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import math
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.config import NotifyOptions, read_notify_options
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.records import log_lines, rank_history
from jaxlaunch.records.log_lines import (
    BeatLine,
    Line,
    PastLine,
    ProgressAnnotation,
    TailLine,
    VerdictLine,
)
from jaxlaunch.records.members import parse_members
from jaxlaunch.records.rank_history import CurrentHang, RankHistory
from jaxlaunch.records.run_numbers import TimedNumbers
from jaxlaunch.records.summary import AttemptRecord, RankMemory, furthest_step
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import history, layout
from jaxlaunch.runs.run_folder import RunFolder

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class GangView(TimedNumbers):
    """State of all hosts, as the leader knows it now.

    Attributes:
        stage: Stage of the gang.
        attempt: Number of the newest attempt.
        members: Assignment of ranks to hosts, in the format of jaxlaunch/records/members.
        missing: Hosts that are missing.
        refused: Newest refusals.
        statuses: Status of every rank.
        overdue: Message about an exceeded timeout, or None.
        preempted: Number of preemptions in a row without a newly committed step, or None if
        unknown.
        restart: Seconds until the first step of the attempt, by cause.
        held_until: Unix time until which the hosts stay after a failure, or None.
    """

    stage: str
    attempt: int
    members: str
    missing: Sequence[int]
    refused: Sequence[str]
    statuses: Sequence[Status]
    overdue: str | None
    preempted: int | None
    restart: Mapping[str, float]
    held_until: float | None = None


# --- the pod's log --------------------------------------------------------------------------------

# Number of attempts of earlier pods that get a line each.
MAX_PAST_ATTEMPTS = 3
# Shortest time between two lines if the state changes, and the time between two lines otherwise.
CHANGE_INTERVAL_S, BEAT_INTERVAL_S = 2.0, 15.0
# Phases of the training loop. A transition between two of them does not count as a change.
LOOP_PHASES = frozenset({"step", "data", "eval", "save"})


class PodLog:
    """Writes machine-readable lines (jaxlaunch/records/log_lines) to the log of the pod.

    Outside of a pod, `write` is None and nothing is written.
    """

    def __init__(self, generation: int, write: Callable[[str], None] | None) -> None:
        self._generation, self._write = generation, write
        # Number of records at the last `write_past`.
        self._past_count = -1
        self._checked_at = self._beat_at = -math.inf
        # State in the last beat. If it changes, the next beat is written early.
        self._beat_state: Any = None
        self._phase: Any = None
        self._phase_since = time.time()
        self._committed: int | None = None
        self._committed_at: float | None = None

    def write_past(
        self,
        records: Sequence[AttemptRecord],
        run_folder: RunFolder,
        start: int,
        ranks_per_host: int,
        processes: int,
        *,
        attempts: int = 0,
    ) -> None:
        """Write the attempts of earlier pods, and the ends of their deleted logs.

        They may be of the same generation, if the job was suspended.

        Args:
            records: Finished attempts, oldest first.
            run_folder: Folder of the run.
            start: Number of this start of the run.
            ranks_per_host: Ranks that each host holds.
            processes: Largest number of ranks.
            attempts: Number of attempts that the other hosts have taken part in. Without a run
                folder, a new host 0 has no records of them.
        """
        last_attempt = records[-1].attempt if records else 0
        is_complete = attempts <= last_attempt and bool(
            records and records[0].generation == 0 and records[0].attempt <= 1
        )
        is_written = self._past_count == len(records)
        if self._write is None or is_written or not (self._generation or records or attempts):
            return
        self._past_count = len(records)
        self._committed = furthest_step(*(record.last_committed for record in records))
        last_record = records[-1] if records else None
        number, generation = 0, max(0, self._generation - 1)
        if last_record is not None:
            number, generation = last_record.attempt, last_record.generation
        ends = history.restarts_by_cause(records, number + 1)
        self._write_line(
            PastLine(
                **self._line_fields(number),
                ends=ends,
                attempts=len(records),
                unknown=None if is_complete else run_folder.unknown_reason,
            )
        )
        for record in records[-MAX_PAST_ATTEMPTS:]:
            field_names = ("verdict", "seconds", "first_committed", "last_committed", "ended")
            fields = {name: getattr(record, name) for name in field_names}
            place = self._line_fields(record.attempt, record.generation)
            self._write_line(PastLine(**place, **fields))
        # A record has members only if hosts held other ranks than their indexes imply.
        members = None
        if last_record is not None and last_record.members is not None:
            members = parse_members(last_record.members, ranks_per_host, processes)
        failed_rank = last_record and last_record.rank
        fields = self._line_fields(number, generation)
        ranks = sorted(range(processes), key=lambda rank: rank != failed_rank)
        for rank, lines in run_folder.read_log_tails(start, ranks):
            host = None if members is None else members.host_of(rank)
            self._write_line(TailLine(**fields, rank=rank, lines=lines, host=host))

    def write_beat(
        self, read_view: Callable[[], GangView], now: float, is_news: bool = False
    ) -> None:
        """Write a beat if the state changed or a beat is due.

        Args:
            read_view: Returns the state of all hosts.
            now: Monotonic seconds.
            is_news: Whether to write a beat in any case.
        """
        is_due = is_news or now - self._beat_at >= BEAT_INTERVAL_S
        if self._write is None or not (is_due or now - self._checked_at >= CHANGE_INTERVAL_S):
            return
        self._checked_at, view = now, read_view()
        phases = _ranks_by_phase(view.statuses)
        phase = max(phases, key=lambda name: len(phases[name]), default=None)
        if (view.attempt, phase) != self._phase:
            self._phase, self._phase_since = (view.attempt, phase), time.time()
        committed = -1 if self._committed is None else self._committed
        if view.committed is not None and view.committed > committed:
            self._committed, self._committed_at = view.committed, time.time()
        phase_group = "loop" if phase in LOOP_PHASES else phase
        missing = tuple(view.missing)
        state = view.stage, view.attempt, view.members, missing, view.overdue, phase_group
        if state == self._beat_state and not is_due:
            return
        self._beat_state, self._beat_at = state, now
        numbers = view.run_numbers() | {"committed": self._committed}
        beat = BeatLine(
            **self._line_fields(view.attempt),
            **numbers,
            stage=view.stage,
            members=view.members,
            missing=view.missing[: log_lines.MAX_LISTED],
            missing_count=len(view.missing),
            refused=view.refused,
            phase=phase,
            since=round(self._phase_since, 1),
            phases={name: ranks[: log_lines.MAX_LISTED] for name, ranks in phases.items()},
            counts={name: len(ranks) for name, ranks in phases.items()},
            committed_at=self._committed_at and round(self._committed_at, 1),
            seconds={cause: round(spent, 1) for cause, spent in view.seconds.items() if spent},
            preempted=view.preempted,
            overdue=view.overdue,
            restart=view.restart,
            held_until=view.held_until,
        )
        self._write_line(beat)

    def write_verdict(self, verdict: Verdict, attempt: int, memory: RankMemory | None) -> None:
        """Write the verdict on an attempt, with the memory of the rank that ended it."""
        line = VerdictLine(**self._line_fields(attempt), verdict=verdict, memory=memory)
        self._write_line(line)

    def _line_fields(self, attempt: int, generation: int | None = None) -> dict[str, Any]:
        generation = self._generation if generation is None else generation
        return {"at": round(time.time(), 1), "attempt": attempt, "generation": generation}

    def _write_line(self, line: Line) -> None:
        if self._write is not None:
            self._write(log_lines.format_line(line))


def _ranks_by_phase(statuses: Sequence[Status]) -> dict[str, list[int]]:
    """Return the ranks by phase, or under "joining", "unsaid" (no phase yet) or "ended"."""
    phases: dict[str, list[int]] = {}
    previous = None
    for rank, status in enumerate(statuses):
        # The ranks of a host mostly share one `Status` object.
        if status is not previous:
            phase = status.phase or ("joining" if status.joining else "unsaid")
            if status.exit is not None:
                phase = "ended"
            ranks, previous = phases.setdefault(phase, []), status
        ranks.append(rank)
    return phases


# --- files and servers, by threads ----------------------------------------------------------------


# Pause of a writer after a write that raised, which doubles up to the longest one.
WRITE_PAUSE_S, MAX_WRITE_PAUSE_S = 1.0, 60.0


class LatestWriter(Generic[T]):
    """Writes values in a background thread. A queued value is replaced by a newer one.

    After a write that raised, the thread logs the first exception, pauses, and writes the newest
    value. An urgent value ends the pause.
    """

    def __init__(
        self,
        write: Callable[[T], None],
        subject: str = "a value",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create the writer; its thread starts with the first value.

        Args:
            write: Writes a value. It is called in the thread.
            subject: What is written, for the message about an exception.
            say: Writes a message for people. It is called in the thread.
        """
        self._write, self._subject, self._say = write, subject, say
        self._changed = threading.Condition()
        self._next: T | None = None
        self._thread: threading.Thread | None = None
        # Whether the next value must not wait for the end of a pause.
        self._is_urgent = False
        self._is_finishing = self._has_failed = False
        self._pause_s = WRITE_PAUSE_S

    def enqueue(self, value: T, wait_s: float = 0.0) -> None:
        """Queue a value, and wait for at most `wait_s` seconds until it is written."""
        with self._changed:
            self._next = value
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_queued, daemon=True)
                self._thread.start()
            thread = self._thread
            if wait_s:
                self._is_urgent = True
                self._changed.notify_all()
        if wait_s:
            thread.join(wait_s)

    @property
    def is_busy(self) -> bool:
        """Return whether a value is queued or being written."""
        with self._changed:
            return self._thread is not None

    def finish(self) -> None:
        """Drop the queued value, and wait until nothing is being written."""
        with self._changed:
            self._next, thread, self._is_finishing = None, self._thread, True
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        self._is_finishing = False

    def _write_queued(self) -> None:
        while True:
            with self._changed:
                value, self._next, self._is_urgent = self._next, None, False
                if value is None:
                    self._thread = None
                    return
            try:
                self._write(value)
            except Exception as error:
                # The thread must not end, because nobody would notice that nothing is written.
                self._pause_after(error, value)
            else:
                self._pause_s = WRITE_PAUSE_S

    def _pause_after(self, error: Exception, value: T) -> None:
        """Log the first exception, keep the value if there is no newer one, and pause."""
        if not self._has_failed:
            self._has_failed = True
            fault = f"{self._subject} could not be written: {type(error).__name__}: {error}"
            self._say(f"{fault}; further attempts follow")
        with self._changed:
            if self._next is None and not self._is_finishing:
                self._next = value
            self._changed.wait_for(lambda: self._is_urgent or self._is_finishing, self._pause_s)
        self._pause_s = min(2 * self._pause_s, MAX_WRITE_PAUSE_S)


class RankSampler:
    """Samples the phases of all ranks every few seconds, into a file of the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._history = RankHistory.from_json(folder.read_json(layout.RANKS))
        self._writer = LatestWriter[bytes](lambda data: folder.replace_file(layout.RANKS, data))
        self._written_at = -math.inf

    def sample_ranks(
        self,
        statuses: Sequence[Status],
        write_every_s: float,
        *,
        foremost: int | None = None,
        hang: CurrentHang | None = None,
        is_due: bool = False,
    ) -> None:
        """Add a sample if one is due, and write the file at most every `write_every_s` seconds.

        Args:
            statuses: Status of every rank.
            write_every_s: Shortest time between two writes.
            foremost: Step of the foremost rank, with which the step of each rank is compared.
            hang: The rank that the others wait for, if it is known.
            is_due: Whether to sample now in any case.
        """
        if not statuses or not (is_due or self._history.is_due(time.time())):
            return
        letters, unknown = rank_history.LETTERS, rank_history.UNKNOWN
        phases = (
            letters.get(status.phase, unknown) if status.exit is None else rank_history.ENDED
            for status in statuses
        )
        steps = (status.step if status.stepped else None for status in statuses)
        own_times = (status.own for status in statuses)
        self._history.add_column(time.time(), phases, steps, foremost, own_times)
        self._history.hang = hang
        if (now := time.monotonic()) - self._written_at >= write_every_s:
            self._written_at = now
            self._writer.enqueue(self._history.to_json_bytes())


# Kubernetes mounts the service account here.
SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_JOBSET_PATH = (
    "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets/{}?fieldManager=jaxlaunch-agent"
)
_API_TIMEOUT_S = 10.0
# The kubelet sets these to the address of the API server.
_API_VARIABLES = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")


def has_token(account: Path = SERVICE_ACCOUNT_DIR) -> bool:
    """Return whether this pod has a token for the API server."""
    return (account / "token").is_file()


class JobSetAnnotator:
    """Writes the progress of the job to an annotation of its JobSet in the pod's namespace."""

    def __init__(
        self,
        name: str,
        say: Callable[[str], None],
        account: Path = SERVICE_ACCOUNT_DIR,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._name, self._say, self._account, self._environ = name, say, account, environ
        self._has_failed = self._is_refused = False

    def annotate(self, progress: ProgressAnnotation) -> None:
        """Replace the annotation. Only the first failure is logged."""
        if self._is_refused:
            return
        annotations = {contract.ANNOTATION: progress.to_json()}
        patch = {"metadata": {"uid": progress.uid, "annotations": annotations}}
        try:
            code, message = self._send_patch(json.dumps(patch).encode())
            self._is_refused = 400 <= code < 500 and code != 429
            fault = f"HTTP {code}: {message}" if code >= 300 else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            fault = str(error) or type(error).__name__
        if fault is not None and not self._has_failed:
            self._has_failed = True
            request = f"patch jobsets {self._name}"
            self._say(
                f"the progress of the job cannot be written to its JobSet ({request}): {fault}"
            )

    def _send_patch(self, body: bytes) -> tuple[int, str]:
        """Send a merge patch, and return the HTTP status and the beginning of the answer."""
        # The import takes 20 ms, and most jobs do not need it.
        import ssl

        context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        host, port = map(self._environ.get, _API_VARIABLES)
        if not host or port is None or not port.isdecimal():
            raise ValueError(f"{' and '.join(_API_VARIABLES)} are {host!r} and {port!r}")
        connection = http.client.HTTPSConnection(
            host, int(port), timeout=_API_TIMEOUT_S, context=context
        )
        path = _JOBSET_PATH.format((self._account / "namespace").read_text().strip(), self._name)
        # The kubelet replaces the token about once an hour.
        token = (self._account / "token").read_text().strip()
        content_type = "application/merge-patch+json"
        headers = {"Content-Type": content_type, "Authorization": f"Bearer {token}"}
        try:
            connection.request("PATCH", path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(300).decode(errors="replace")
        finally:
            connection.close()


MAX_QUEUED_MESSAGES = 32
ANSWER_TIMEOUT_S = 10.0
# Seconds between two of the three attempts to send a message.
RETRY_INTERVAL_S = 2.0
# The job waits this long at its end for its last message to be sent.
LAST_MESSAGE_TIMEOUT_S = 5.0
CHECK_INTERVAL_S = 5.0
_SCHEMES = ("http://", "https://")


class Notifier:
    """Sends messages about the job to a webhook, if the job has one.

    A thread sends them from a bounded queue. A message is dropped if the queue is full, or if it
    could not be sent three times.
    """

    def __init__(self, name: str, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        options = read_notify_options(environ) or NotifyOptions("")
        self._events = frozenset(options.events)
        self._is_slack = options.format == "slack"
        self._stall_s = options.stall_s or 0.0
        self._url = environ.get(options.url, "")
        self._queue = queue.Queue[Mapping[str, Any]](MAX_QUEUED_MESSAGES)
        self._thread: threading.Thread | None = None
        self._close_deadline = math.inf
        self._checked_at = self._changed_at = time.monotonic()
        self._state: Any = None
        self._is_stalled = self._has_failed = False
        self._best_step: Any = None
        if options.url and not self._url.startswith(_SCHEMES):
            self._events = frozenset()
            say(f"notify: {options.url} holds no http:// or https:// address; no message is sent")

    def check_progress(self, read_view: Callable[[], GangView], now: float) -> None:
        """Notify about a job without progress, and about a new best evaluation."""
        if not self._events or now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at, view = now, read_view()
        metrics = view.metrics or {}
        previous_best_step, self._best_step = self._best_step, metrics.get(contract.Key.BEST_STEP)
        if self._best_step is not None and self._best_step != previous_best_step:
            prefix, text = contract.EVAL_PREFIX, "has its best evaluation so far at step"
            means = {key: value for key, value in metrics.items() if key.startswith(prefix)}
            self._queue_message("best", f"{text} {self._best_step}", metrics=means)
        phases = sorted({status.phase for status in view.statuses}, key=str)
        state = (view.stage, view.attempt, view.step, phases)
        if state != self._state:
            self._state, self._changed_at, self._is_stalled = state, now, False
        elif self._stall_s and not self._is_stalled and now - self._changed_at >= self._stall_s:
            self._is_stalled = True
            place, stalled_s = f"is at step {view.step}", now - self._changed_at
            if view.missing:
                place = f"waits for {len(view.missing)} hosts"
            text = f"{place} without progress for {stalled_s:.0f} s"
            self._queue_message("stall", text, step=view.step)

    def notify_verdict(self, verdict: Verdict, attempt: int) -> None:
        """Notify about the end of an attempt."""
        is_done = verdict.code == contract.DONE
        fields = {name: getattr(verdict, name) for name in ("rank", "code", "cause", "step")}
        place = "" if verdict.step is None else f" at step {verdict.step}"
        outcome = "is done" if is_done else f"ended attempt {attempt}"
        text = f"{outcome}{place}: {verdict.message} (exit {verdict.code})"
        self._queue_message("done" if is_done else "failure", text, attempt=attempt, **fields)

    def begin_closing(self) -> None:
        """Limit the time for queued messages, because the job ends now."""
        self._close_deadline = time.monotonic() + LAST_MESSAGE_TIMEOUT_S

    def is_busy(self, now: float) -> bool:
        """Return whether the job must still wait for a message to be sent."""
        has_messages = self._queue.unfinished_tasks > 0
        return has_messages and now < self._close_deadline and not self._has_failed

    def _queue_message(self, event: str, text: str, **fields: Any) -> None:
        if event not in self._events:
            return
        line, now = f"{self._name} {text}", round(time.time(), 3)
        message = {"event": event, "job": self._name, "text": line, "time": now, **fields}
        if self._is_slack:
            message = {"text": line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="notify", daemon=True)
            self._thread.start()

    def _send_all(self) -> None:
        while True:
            message = self._queue.get()
            for is_last in (False, False, True):
                fault = self._post_message(message)
                if fault is not None and not self._has_failed:
                    self._say(f"notify: a message could not be sent: {fault}")
                self._has_failed = fault is not None
                if fault is None or is_last:
                    break
                time.sleep(RETRY_INTERVAL_S)
            self._queue.task_done()

    def _post_message(self, message: Mapping[str, Any]) -> str | None:
        """Send a message, and return the reason of a failure. It must not contain the address."""
        headers = {"Content-Type": "application/json", "User-Agent": "jaxlaunch"}
        try:
            body = json.dumps(message).encode()
            request = urllib.request.Request(self._url, body, headers, method="POST")
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            # The error holds the connection.
            with error:
                return f"the server answers {error.code}"
        except urllib.error.URLError as error:
            reason = error.reason
            if isinstance(reason, OSError):
                return reason.strerror or type(reason).__name__
            return type(error).__name__
        except Exception as error:
            # Libraries may raise any exception for an unusual address or answer. A run must not
            # fail because of it.
            return type(error).__name__
