"""What host 0 reports of a run: summary and records, log lines of its pod, the JobSet's annotation, the webhook.

Storage and servers may stall for longer than a host may be silent. What they are sent goes through threads that write
only the newest value; the event loop waits for them where something must be on storage first, and never for long.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jaxlaunch import contract
from jaxlaunch.contract import Action
from jaxlaunch.launcher.agent.gang import made_of
from jaxlaunch.launcher.agent.gang.clock import Clock
from jaxlaunch.launcher.agent.gang.config import Config, versions
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.gang.rendezvous import Hello
from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.launcher.agent.leader import jobset
from jaxlaunch.launcher.agent.leader.gang import Gang, Stage
from jaxlaunch.launcher.agent.leader.jobset import JobSet
from jaxlaunch.launcher.agent.leader.notifier import Notifier
from jaxlaunch.launcher.agent.leader.pod_log import PodLog, View
from jaxlaunch.records import checked, rank_history
from jaxlaunch.records.attempt import Record, furthest
from jaxlaunch.records.progress_annotation import Recorded
from jaxlaunch.records.rank_history import RankHistory
from jaxlaunch.records.summary import Of, Summary, ratio
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import history
from jaxlaunch.runs.layout import AGENTS
from jaxlaunch.runs.run_folder import RunFolder
from jaxlaunch.runs.starts import Starts

# Seconds between two writes of the summary: on this machine, and on storage that outlives a pod, which may be slow.
WRITE_LOCAL_S, WRITE_SHARED_S = 1.0, 10.0
# Seconds between two writes on the JobSet, and how long the end waits for the last of them.
ANNOTATE_S, ANNOTATE_WAIT_S = 60.0, 10.0
MAX_NOTES, MAX_NOTE_CHARS = 50, 2_000

T = TypeVar("T")


class LatestWriter(Generic[T]):
    """Writes values in a background thread; if several are queued, only the newest."""

    def __init__(self, write: Callable[[T], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._next: T | None = None
        self._thread: threading.Thread | None = None

    def keep(self, value: T, wait_s: float = 0.0) -> None:
        """Queue a value, and wait for at most `wait_s` until it is written."""
        with self._lock:
            self._next = value
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_queued, daemon=True)
                self._thread.start()
            thread = self._thread
        if wait_s:
            thread.join(wait_s)

    @property
    def is_busy(self) -> bool:
        """Whether a value is queued or being written."""
        with self._lock:
            return self._thread is not None

    def finish(self) -> None:
        """Wait until nothing is being written. The queued value is dropped: the caller writes a newer one."""
        with self._lock:
            self._next, thread = None, self._thread
        if thread is not None:
            thread.join()

    def _write_queued(self) -> None:
        while True:
            with self._lock:
                value, self._next = self._next, None
                if value is None:
                    self._thread = None
                    return
            self._write(value)


class RankSampler:
    """Samples the phases of all ranks every few seconds, into a file of the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._history = RankHistory.from_json(folder.read(rank_history.FILE))
        self._writer = LatestWriter[bytes](lambda data: folder.replace(rank_history.FILE, data))
        self._written_at = -math.inf

    def sample(self, statuses: Sequence[Status], write_every_s: float, *, is_due: bool = False) -> None:
        """Sample if it is time to or `is_due`, and write the file at most every `write_every_s` seconds."""
        if not statuses or not (is_due or self._history.is_due(time.time())):
            return
        letters, unknown, ended = rank_history.LETTERS, rank_history.UNKNOWN, rank_history.ENDED
        phases = (letters.get(status.phase, unknown) if status.exit is None else ended for status in statuses)
        self._history.add(time.time(), phases, (status.step if status.stepped else None for status in statuses))
        if (now := time.monotonic()) - self._written_at >= write_every_s:
            self._written_at = now
            self._writer.keep(self._history.encoded())


@dataclasses.dataclass
class Written:
    """What was written last, and when.

    Attributes:
        state: Newest committed step and stage in the summary.
        summary_at: Monotonic time of the summary.
        annotated_at: Monotonic time of the JobSet's annotation.
        started_at: Unix time at which the attempt began.
        seconds_before: Seconds of the run by cause, without those of the attempt.
    """

    state: tuple[int | None, Stage] | None
    summary_at: float
    annotated_at: float
    started_at: float
    seconds_before: Mapping[str, float]


class Reporter:
    """Reads the state of the gang, and writes what happened to it."""

    def __init__(
        self,
        config: Config,
        gang: Gang,
        loop: Loop,
        clock: Clock,
        run_folder: RunFolder,
        pod_log: PodLog,
        say: Callable[[str], None],
    ) -> None:
        def say_from_thread(text: str) -> None:
            # The streams belong to the thread of the event loop.
            loop.after(0.0, lambda: say(text))

        self._config, self._gang, self._clock = config, gang, clock
        self._run_folder, self._pod_log = run_folder, pod_log
        self._starts = Starts(run_folder, config.uid)
        self._summary_writer = LatestWriter[Summary](self._starts.write)
        self._annotator: LatestWriter[Recorded] | None = None
        if config.is_pod and jobset.has_token():
            self._annotator = LatestWriter(JobSet(config.job.name, say_from_thread).annotate)
        self._notifier = Notifier(config.job.name, os.environ, say)
        self._sampler = RankSampler(run_folder)
        self._made_of = made_of.of(versions(), os.environ)
        self._metrics: Mapping[str, Any] | None = None
        self._notes: list[str] = []
        now = time.monotonic()
        self._written = Written(None, now, now, time.time(), clock.seconds(clock.began))

    # --- events -------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Write what is known before the first host joins."""
        self.log_past()
        self._starts.keep_job(job_fields(self._config, os.environ))
        self._write_summary(now)

    def log_past(self) -> None:
        """Write the attempts of earlier pods to the pod's log."""
        ranks = self._config.job.processes_per_host, self._config.processes
        self._pod_log.begin(self._gang.records, self._run_folder, self._starts.number, *ranks)

    def add_metrics(self, metrics: Any) -> None:
        """Keep the newest metrics of rank 0."""
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics are {metrics!r}")
        self._metrics = metrics or self._metrics

    def add_note(self, text: str) -> None:
        """Add a note to the summary, unless it has it or is full."""
        text = text[:MAX_NOTE_CHARS]
        if text not in self._notes and len(self._notes) < MAX_NOTES:
            self._notes.append(text)

    def start_attempt(self, now: float) -> None:
        """Write that the gang starts an attempt."""
        self._written.started_at = time.time()
        self._clock.restart.enter("start", now)
        self._write_summary(now)

    def judge(self, verdict: Verdict, now: float) -> None:
        """Write the verdict on the newest attempt."""
        number, attempt = self._gang.number, self._gang.attempt
        self._pod_log.judged(verdict, number)
        self._notifier.judged(verdict, number)
        if attempt.number == number:
            self._sampler.sample(attempt.statuses, 0.0, is_due=True)
            self._clock.restart.begin(*attempt.end_timing(now), now)
        self._write_summary(now, is_urgent=True)

    def record(self, verdict: Verdict, now: float) -> Record:
        """Put the attempt on record. Return host 1's record if it ended the attempt while this process stood still."""
        if verdict.code == contract.DONE:
            self._clock.ended(now)
        else:
            self._clock.died(now)
        gang, ranks, table = self._gang, self._gang.attempt.ranks, self._gang.members.table
        seconds = self._clock.seconds(now)
        record = Record(
            uid=self._config.uid,
            generation=self._config.generation,
            attempt=gang.number,
            cause=verdict.cause,
            rank=verdict.rank,
            first_committed=ranks.first_committed,
            last_committed=gang.attempt.last_committed,
            seconds=self._attempt_seconds(seconds),
            verdict=verdict,
            started=self._written.started_at,
            ended=time.time(),
            restart=self._clock.restart.last,
            members=table.to_wire() if table.have_moved else None,
        )
        self._written.seconds_before = seconds
        records = self._run_folder.records(self._config.uid)
        if records and records[-1].attempt == gang.number:
            return records[-1]
        self._run_folder.append(record)
        return record

    def await_hosts(self, now: float) -> None:
        """Write that the gang waits for the replacement of hosts."""
        self._clock.restart.enter("replace", now)
        self._write_summary(now)

    def write_end(self, verdict: Verdict, *, is_alone: bool) -> None:
        """Write the last summary, of the run or of this host 0."""
        if not is_alone:
            self._notifier.ended()
        self._summary_writer.finish()
        self._starts.write(self._summary(verdict))
        if not is_alone:
            self._pod_log.look(self.view, time.monotonic(), is_news=True)

    def publish_end(self, verdict: Verdict, *, is_alone: bool) -> None:
        """Write the end on the JobSet."""
        is_final = contract.outcome(verdict.code).action in (Action.FAIL, Action.COMPLETE)
        self._annotate("ended" if is_final and not is_alone else "left", verdict)

    def look(self, now: float) -> None:
        """Write to the pod's log and tell the webhook, if there is news or it is time."""
        self._pod_log.look(self.view, now)
        self._notifier.look(self.view, now)

    def keep(self, now: float) -> None:
        """Write the summary, the samples of the ranks and the annotation, if there is news or it is time."""
        stage, written = self._gang.stage, self._written
        every_s = WRITE_LOCAL_S if self._config.is_local else WRITE_SHARED_S
        has_news = (self._gang.attempt.ranks.committed, stage) != written.state
        if stage is not Stage.LEAVE and (has_news or now - written.summary_at >= every_s):
            self._write_summary(now, has_news=has_news)
        if stage is Stage.RUN:
            self._sampler.sample(self._gang.attempt.statuses, every_s)
            if now - written.annotated_at >= ANNOTATE_S:
                self._annotate("running", None)

    def is_busy(self, now: float) -> bool:
        """Return whether the end still waits for the webhook or the JobSet; it waits for neither without limit."""
        if self._notifier.is_busy(now):
            return True
        is_annotating = self._annotator is not None and self._annotator.is_busy
        return is_annotating and now < self._written.annotated_at + ANNOTATE_WAIT_S

    # --- reports ------------------------------------------------------------------------------------------------------

    def start_fields(self) -> dict[str, int | None]:
        """Return the number of this start of the run, and the newest step that attempts before this one saved.

        The step is 0 if they only trained, and None if none did.
        """
        saved = history.saved(self._gang.records, self._config.generation)
        if saved is None and self._starts.has_written:
            saved = 0
        return {"start": self._starts.number, "saved": furthest(saved, self._gang.members.saved_step)}

    def gang_state(self, now: float) -> dict[str, Any]:
        """Return the state of all hosts, for the metrics of every agent."""
        seconds = self._clock.seconds(now)
        last_message_at = self._gang.members.last_message_at
        oldest = next((at for host, at in last_message_at.items() if host != self._config.host), now)
        return {
            "attempt": self._gang.number,
            # The uid is the key of the gang, and never sent.
            "of": {**checked.to_json(self._progress(seconds, now)), "uid": ""},
            "seconds": seconds,
            "unsafe_s": self._clock.unsafe_s(now),
            "foremost": self._gang.attempt.ranks.last_step,
            "silence_s": now - oldest,
            **history.counters(self._gang.records, self._config.generation, self._config.job),
        }

    def view(self) -> View:
        """Return the state of all hosts, for the pod's log and the webhook."""
        gang, now = self._gang, time.monotonic()
        ranks, records = gang.attempt.ranks, gang.records
        return View(
            stage=gang.stage.name.lower(),
            attempt=gang.number,
            members=gang.members.table.to_wire(),
            missing=gang.members.missing,
            refused=list(gang.gathering.refusals)[-3:],
            # Until the attempt has completed a step, it is at the one that is saved.
            step=ranks.first_step or self._saved_step or ranks.first_step,
            committed=ranks.committed,
            statuses=ranks.by_rank,
            overdue=gang.attempt.hang.overdue,
            seconds=self._clock.seconds(now),
            restarts=self._restarts,
            preempted=None if self._run_folder.gap else history.preemptions_without_progress(records),
            metrics=self._metrics,
            restart=self._restart_seconds(now),
        )

    def list_agents(self, agents: Sequence[tuple[Hello, str]]) -> None:
        """Write where the agent of each host answers, by its hello and its IP address, and which ranks it has."""
        rows = []
        for hello, ip in agents:
            # An IPv4 peer on a dual-stack socket.
            plain = ip.removeprefix("::ffff:")
            address = f"[{plain}]:{hello.metrics_port}" if ":" in plain else f"{plain}:{hello.metrics_port}"
            ranks = list(self._gang.members.table.ranks(hello.host))
            rows.append({"host": hello.host, "address": address, "pid": hello.pid, "ranks": ranks})
        self._run_folder.write(AGENTS, rows)

    def _write_summary(self, now: float, *, is_urgent: bool = False, has_news: bool = True) -> None:
        """Write the state of the run, from which its end is known if every agent is killed.

        Storage that stalls delays this by a second at most, and only if it is urgent or the folder is on this machine.
        A write every second, without news, delays nothing: a busy disk may take longer than that to sync.
        """
        self._written.state = self._gang.attempt.ranks.committed, self._gang.stage
        self._written.summary_at = now
        wait_s = WRITE_LOCAL_S if is_urgent or (self._config.is_local and has_news) else 0.0
        self._summary_writer.keep(self._summary(None), wait_s=wait_s)

    def _annotate(self, when: str, verdict: Verdict | None) -> None:
        self._written.annotated_at = time.monotonic()
        if self._annotator is None:
            return
        view, gang, config = self.view(), self._gang, self._config
        progress = config.uid, time.time(), when, gang.number, config.generation, view.step, self._saved_step
        goodput = ratio({"step": 0.0, **view.seconds})
        # These pods left for others, which start the next attempt.
        restarts = history.restarts_by_cause(gang.records, self._newest_attempt + (when == "left"))
        self._annotator.keep(Recorded(*progress, goodput, restarts, verdict))

    def _attempt_seconds(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of this attempt alone, of those of the run."""
        before = self._written.seconds_before
        return {cause: round(spent - before.get(cause, 0.0), 3) for cause, spent in seconds.items()}

    def _progress(self, seconds: Mapping[str, float], now: float) -> Of:
        """Return the attempt that a summary is about; in GATHER that is the next one."""
        gang, ranks = self._gang, self._gang.attempt.ranks
        return Of(
            uid=self._config.uid,
            generation=self._config.generation,
            attempt=self._newest_attempt,
            started=self._written.started_at,
            at=time.time(),
            seconds=self._attempt_seconds(seconds),
            first_committed=ranks.first_committed,
            last_committed=gang.attempt.last_committed,
            unsafe_s=round(self._clock.unsafe_s(now), 3),
            first_step=ranks.by_rank[0].first_step if ranks.by_rank else None,
            judged=gang.verdict if gang.stage is Stage.KILL else None,
            restart=self._restart_seconds(now),
        )

    @property
    def _newest_attempt(self) -> int:
        return self._gang.number + (self._gang.stage is Stage.GATHER)

    @property
    def _restarts(self) -> Mapping[str, int]:
        return history.restarts_by_cause(self._gang.records, self._newest_attempt)

    def _restart_seconds(self, now: float) -> Mapping[str, float]:
        has_ended = self._gang.stage in (Stage.KILL, Stage.LEAVE)
        return self._clock.restart.last if has_ended else self._clock.restart.seconds(now)

    @property
    def _saved_step(self) -> int | None:
        """Newest step on storage, by everything that is known."""
        steps = (record.last_committed for record in self._gang.records)
        return furthest(self._starts.known, *steps, self._gang.attempt.ranks.committed)

    def _summary(self, verdict: Verdict | None) -> Summary:
        gang, now = self._gang, time.monotonic()
        seconds = self._clock.seconds(now)
        return Summary(
            verdict,
            step=gang.attempt.ranks.first_step,
            saved=self._saved_step,
            of=dataclasses.replace(self._progress(seconds, now), made_of=self._made_of),
            seconds=seconds,
            restarts=self._restarts,
            metrics=self._metrics,
            notes=self._notes,
            stacks=gang.attempt.hang.stacks,
            nccl=gang.attempt.hang.nccl,
            restart_seconds=history.restarts(gang.records, gang.number, self._restart_seconds(now)),
        )


def job_fields(config: Config, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the job as its pods received it, under those keys of job.yaml that pods read."""
    job, slices = config.job, int(environ.get(contract.SLICES, "1"))
    devices = {} if job.platform == "tpu" else {"per_host": job.devices_per_process * job.processes_per_host}
    hosts = job.sizes[-1] if job.sizes else config.hosts // slices
    fields: dict[str, Any] = {
        "name": job.name,
        "hosts": {"min": job.sizes[0], "max": hosts} if len(job.sizes) > 1 else hosts,
        "slices": slices,
        "processes_per_host": job.processes_per_host,
        "accelerator": {"type": job.accelerator, **devices},
        "restarts": {"crash": job.crash_limit, "in_place": job.in_place_limit},
        "timeouts": {phase: round(limit_s) for phase, limit_s in job.timeouts_s.items() if limit_s is not None},
        "grace": round(job.grace_s),
        "deadline": None if job.deadline_s is None else round(job.deadline_s),
        "workdir": job.workdir,
    }
    if job.command is not None:
        return fields | {"command": list(job.command)}
    try:
        return fields | {"train": json.loads(environ.get(contract.TRAIN_SPEC, "{}"))}
    except ValueError:
        # The trainer says what is wrong with it.
        return fields
