"""Reports of a run by host 0: summary and records, log lines of its pod, the JobSet's annotation, the webhook.

`RunState` reads the state of the gang, and `Reporter` writes it. Storage and servers may stall for longer than a host
may be silent, so threads write the newest value to them (`publishers`). The event loop waits for a write only if
something must be on storage first, and never for long. When host 0 is lost, `record_end_without_leader` writes the end
of the attempt on another host.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Action
from jaxlaunch.launcher.agent.gang.clock import Clock
from jaxlaunch.launcher.agent.gang.config import Config, describe_versions, versions
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.gang.protocol import Hello
from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.launcher.agent.leader import publishers
from jaxlaunch.launcher.agent.leader.gang import Gang, Stage
from jaxlaunch.launcher.agent.leader.publishers import JobSet, LatestWriter, Notifier, PodLog, RankSampler, View
from jaxlaunch.records import checked
from jaxlaunch.records.log_lines import Recorded
from jaxlaunch.records.summary import Of, Record, Summary, furthest, ratio
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import history
from jaxlaunch.runs.layout import AGENTS
from jaxlaunch.runs.run_folder import RunFolder, Starts, close_unfinished, find_unfinished, settle_records

# Seconds between two writes of the summary, on this machine and on shared storage, which may be slow.
WRITE_LOCAL_S, WRITE_SHARED_S = 1.0, 10.0
# Seconds between two writes on the JobSet, and how long the end waits for the last of them.
ANNOTATE_S, ANNOTATE_WAIT_S = 60.0, 10.0
MAX_NOTES, MAX_NOTE_CHARS = 50, 2_000


class RunState:
    """State of the run, from the gang, the clock and earlier starts.

    Attributes:
        starts: The starts of the run.
        metrics: The newest metrics of rank 0.
        notes: Notes of the summary.
        started_at: Unix time at which the attempt began.
        seconds_before: Seconds of the run by cause, without those of the attempt.
    """

    def __init__(self, config: Config, gang: Gang, clock: Clock, run_folder: RunFolder) -> None:
        self._config, self._gang, self._clock, self._run_folder = config, gang, clock, run_folder
        self._made_of = describe_versions(versions(), os.environ)
        self.starts = Starts(run_folder, config.uid)
        self.metrics: Mapping[str, Any] | None = None
        self.notes: list[str] = []
        self.started_at = time.time()
        self.seconds_before: Mapping[str, float] = clock.seconds(clock.began)

    @property
    def newest_attempt(self) -> int:
        """Number of the attempt that runs, or in GATHER of the next one."""
        return self._gang.number + (self._gang.stage is Stage.GATHER)

    @property
    def saved_step(self) -> int | None:
        """Newest step on storage, from all sources."""
        steps = (record.last_committed for record in self._gang.records)
        return furthest(self.starts.known, *steps, self._gang.attempt.ranks.committed)

    def start_fields(self) -> dict[str, int | None]:
        """Return the number of this start of the run, and the newest step that attempts before this one saved.

        The step is 0 if they only trained, and None if none did.
        """
        saved = history.saved(self._gang.records, self._config.generation)
        if saved is None and self.starts.has_written:
            saved = 0
        return {"start": self.starts.number, "saved": furthest(saved, self._gang.members.saved_step)}

    def attempt_seconds(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of this attempt, given those of the run."""
        return {cause: round(spent - self.seconds_before.get(cause, 0.0), 3) for cause, spent in seconds.items()}

    def gang_state(self, now: float) -> dict[str, Any]:
        """Return the state of all hosts, for the metrics of every agent."""
        seconds = self._clock.seconds(now)
        last_message_at = self._gang.members.last_message_at
        oldest = next((at for host, at in last_message_at.items() if host != self._config.host), now)
        return {
            "attempt": self._gang.number,
            # The uid is part of the key of the gang and is never sent.
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
        ranks = gang.attempt.ranks
        return View(
            stage=gang.stage.name.lower(),
            attempt=gang.number,
            members=gang.members.table.to_wire(),
            missing=gang.members.missing,
            refused=list(gang.gathering.refusals)[-3:],
            # Until the attempt has completed a step, it is at the saved one.
            step=ranks.first_step or self.saved_step or ranks.first_step,
            committed=ranks.committed,
            statuses=ranks.by_rank,
            overdue=gang.attempt.hang.overdue,
            seconds=self._clock.seconds(now),
            restarts=history.restarts_by_cause(gang.records, self.newest_attempt),
            preempted=None if self._run_folder.gap else history.preemptions_without_progress(gang.records),
            metrics=self.metrics,
            restart=self._restart_seconds(now),
        )

    def summary(self, verdict: Verdict | None) -> Summary:
        """Return the summary of the run, with the verdict if the run ends."""
        gang, now = self._gang, time.monotonic()
        seconds = self._clock.seconds(now)
        return Summary(
            verdict,
            step=gang.attempt.ranks.first_step,
            saved=self.saved_step,
            of=dataclasses.replace(self._progress(seconds, now), made_of=self._made_of),
            seconds=seconds,
            restarts=history.restarts_by_cause(gang.records, self.newest_attempt),
            metrics=self.metrics,
            notes=self.notes,
            stacks=gang.attempt.hang.stacks,
            nccl=gang.attempt.hang.nccl,
            restart_seconds=history.restarts(gang.records, gang.number, self._restart_seconds(now)),
        )

    def recorded(self, when: str, verdict: Verdict | None) -> Recorded:
        """Return the annotation of the JobSet."""
        view, config = self.view(), self._config
        progress = config.uid, time.time(), when, view.attempt, config.generation, view.step, self.saved_step
        # Pods that left are replaced by others, which start the next attempt.
        restarts = history.restarts_by_cause(self._gang.records, self.newest_attempt + (when == "left"))
        return Recorded(*progress, ratio({"step": 0.0, **view.seconds}), restarts, verdict)

    def _progress(self, seconds: Mapping[str, float], now: float) -> Of:
        """Return the progress of the attempt for a summary."""
        gang, ranks = self._gang, self._gang.attempt.ranks
        return Of(
            uid=self._config.uid,
            generation=self._config.generation,
            attempt=self.newest_attempt,
            started=self.started_at,
            at=time.time(),
            seconds=self.attempt_seconds(seconds),
            first_committed=ranks.first_committed,
            last_committed=gang.attempt.last_committed,
            unsafe_s=round(self._clock.unsafe_s(now), 3),
            first_step=ranks.by_rank[0].first_step if ranks.by_rank else None,
            judged=gang.verdict if gang.stage is Stage.KILL else None,
            restart=self._restart_seconds(now),
        )

    def _restart_seconds(self, now: float) -> Mapping[str, float]:
        has_ended = self._gang.stage in (Stage.KILL, Stage.LEAVE)
        return self._clock.restart.last if has_ended else self._clock.restart.seconds(now)


class Reporter:
    """Writes the state of the gang to storage, logs and servers."""

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

        self.state = RunState(config, gang, clock, run_folder)
        self._config, self._gang, self._clock = config, gang, clock
        self._run_folder, self._pod_log = run_folder, pod_log
        self._summary_writer = LatestWriter[Summary](self.state.starts.write)
        self._annotator: LatestWriter[Recorded] | None = None
        if config.is_pod and publishers.has_token():
            self._annotator = LatestWriter(JobSet(config.job.name, say_from_thread).annotate)
        self._notifier = Notifier(config.job.name, os.environ, say)
        self._sampler = RankSampler(run_folder)
        # Newest committed step and stage in the summary, and the monotonic times of the last writes.
        self._written: tuple[int | None, Stage] | None = None
        self._summary_at = self._annotated_at = time.monotonic()

    def begin(self, now: float) -> None:
        """Write the state before the first host joins."""
        self.log_past()
        self.state.starts.keep_job(job_fields(self._config, os.environ))
        self._write_summary(now)

    def log_past(self) -> None:
        """Write the attempts of earlier pods to the pod's log."""
        ranks = self._config.job.processes_per_host, self._config.processes
        self._pod_log.begin(self._gang.records, self._run_folder, self.state.starts.number, *ranks)

    def add_metrics(self, metrics: Any) -> None:
        """Keep the newest metrics of rank 0."""
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics are {metrics!r}")
        self.state.metrics = metrics or self.state.metrics

    def add_note(self, text: str) -> None:
        """Add a note to the summary, unless it is a duplicate or there are too many."""
        text, notes = text[:MAX_NOTE_CHARS], self.state.notes
        if text not in notes and len(notes) < MAX_NOTES:
            notes.append(text)

    def start_attempt(self, now: float) -> None:
        """Write that the gang starts an attempt."""
        self.state.started_at = time.time()
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
        """Record the attempt. Return host 1's record if it ended the attempt while this process was stalled."""
        if verdict.code == contract.DONE:
            self._clock.ended(now)
        else:
            self._clock.died(now)
        gang, table = self._gang, self._gang.members.table
        seconds = self._clock.seconds(now)
        record = Record(
            uid=self._config.uid,
            generation=self._config.generation,
            attempt=gang.number,
            cause=verdict.cause,
            rank=verdict.rank,
            first_committed=gang.attempt.ranks.first_committed,
            last_committed=gang.attempt.last_committed,
            seconds=self.state.attempt_seconds(seconds),
            verdict=verdict,
            started=self.state.started_at,
            ended=time.time(),
            restart=self._clock.restart.last,
            members=table.to_wire() if table.have_moved else None,
        )
        self.state.seconds_before = seconds
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
        """Write the last summary, for the run or only for this host 0."""
        if not is_alone:
            self._notifier.ended()
        self._summary_writer.finish()
        self.state.starts.write(self.state.summary(verdict))
        if not is_alone:
            self._pod_log.look(self.state.view, time.monotonic(), is_news=True)

    def publish_end(self, verdict: Verdict, *, is_alone: bool) -> None:
        """Write the end on the JobSet."""
        is_final = contract.outcome(verdict.code).action in (Action.FAIL, Action.COMPLETE)
        self._annotate("ended" if is_final and not is_alone else "left", verdict)

    def look(self, now: float) -> None:
        """Write to the pod's log and notify the webhook, if there is news or it is time."""
        self._pod_log.look(self.state.view, now)
        self._notifier.look(self.state.view, now)

    def keep(self, now: float) -> None:
        """Write the summary, the samples of the ranks and the annotation, if there is news or it is time."""
        stage = self._gang.stage
        every_s = WRITE_LOCAL_S if self._config.is_local else WRITE_SHARED_S
        has_news = (self._gang.attempt.ranks.committed, stage) != self._written
        if stage is not Stage.LEAVE and (has_news or now - self._summary_at >= every_s):
            self._write_summary(now, has_news=has_news)
        if stage is Stage.RUN:
            self._sampler.sample(self._gang.attempt.statuses, every_s)
            if now - self._annotated_at >= ANNOTATE_S:
                self._annotate("running", None)

    def is_busy(self, now: float) -> bool:
        """Return whether the end must still wait for the webhook or the JobSet, each for a limited time."""
        is_annotating = self._annotator is not None and self._annotator.is_busy
        return self._notifier.is_busy(now) or (is_annotating and now < self._annotated_at + ANNOTATE_WAIT_S)

    def list_agents(self, agents: Sequence[tuple[Hello, str]]) -> None:
        """Write the address of each host's agent, from its hello and its IP address, and the ranks of the host."""
        rows = []
        for hello, ip in agents:
            # An IPv4 peer on a dual-stack socket.
            plain = ip.removeprefix("::ffff:")
            address = f"[{plain}]:{hello.metrics_port}" if ":" in plain else f"{plain}:{hello.metrics_port}"
            ranks = list(self._gang.members.table.ranks(hello.host))
            rows.append({"host": hello.host, "address": address, "pid": hello.pid, "ranks": ranks})
        self._run_folder.write(AGENTS, rows)

    def _write_summary(self, now: float, *, is_urgent: bool = False, has_news: bool = True) -> None:
        """Write the state of the run, from which the next start can record its end if every agent is killed.

        This waits for the write for a second at most, and only if it is urgent, or has news and the folder is on this
        machine. A regular write without news waits for nothing, because a busy disk may take longer than that to sync.
        """
        self._written, self._summary_at = (self._gang.attempt.ranks.committed, self._gang.stage), now
        wait_s = WRITE_LOCAL_S if is_urgent or (self._config.is_local and has_news) else 0.0
        self._summary_writer.keep(self.state.summary(None), wait_s=wait_s)

    def _annotate(self, when: str, verdict: Verdict | None) -> None:
        self._annotated_at = time.monotonic()
        if self._annotator is not None:
            self._annotator.keep(self.state.recorded(when, verdict))


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
        # The trainer reports what is wrong with it.
        return fields


# --- when host 0 is lost ----------------------------------------------------------------------------------------------

# Host 0 writes its summary every ten seconds. After three missed writes it no longer counts as alive.
FRESH_S = 30.0


@dataclasses.dataclass(frozen=True)
class Reported:
    """State of the attempt that another host knows when host 0 is lost.

    Attributes:
        attempt: Last attempt that host 0 started on this host, or 0 before the first one.
        agent_started_at: Unix time at which this host's agent started.
        progress: Progress in host 0's last report, or None if it never reported.
        run_seconds: Seconds of the run by cause, as in that report.
    """

    attempt: int
    started: float
    last: Of | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, gang: Mapping[str, Any], attempt: int, started: float) -> Reported:
        """Build the report from host 0's last message, which is empty if there was none."""
        if "of" not in gang:
            return cls(attempt, started)
        return cls(attempt, started, checked.read(Of, gang["of"]), gang["seconds"])


def record_lost_leader(
    folder: RunFolder, config: Config, reported: Reported, statuses: Sequence[Status], verdict: Verdict
) -> None:
    """Write the end of the attempt on another host after host 0 was lost.

    The sources are host 0's last report; the last summary in the folder, if it describes the same attempt; and the
    statuses of this host's own processes. The folder may be this host's copy, without what host 0 wrote since the pods
    started. Nothing is written if this host never joined a host 0 that still writes summaries, or if the end is already
    on record.
    """
    summary = folder.summary(config.uid)
    has_joined = reported.attempt > 0 or reported.last is not None
    is_fresh = summary is not None and _is_fresh(summary)
    if not has_joined and summary is not None and summary.of is not None:
        if is_fresh and summary.of.generation == config.generation:
            return
        if summary.of.generation != config.generation:
            # Host 0 would have settled them.
            settle_records(folder, config.uid)
    records = folder.records(config.uid)
    if has_joined and records and records[-1].attempt >= reported.attempt > 0:
        # Host 0 continued without this host, which was stalled, and has recorded the end of the attempt; or no other
        # host 0 took its place.
        if config.job.replaces and summary is not None and summary.verdict is None and not is_fresh:
            Starts(folder, config.uid).write(dataclasses.replace(summary, verdict=verdict))
        return
    summary, of = _last_known(folder, config, reported, records)
    committing = [status for status in statuses if status.first_committed is not None]
    of = dataclasses.replace(
        of,
        first_committed=_least(of.first_committed, *(status.first_committed for status in committing)),
        last_committed=furthest(of.last_committed, *(status.committed for status in committing)),
    )
    own_step = _least(*(status.step for status in statuses))
    step = summary.step if own_step is None else own_step
    record = close_unfinished(of, dataclasses.replace(verdict, step=step))
    folder.append(record)
    previous = records[-1].attempt if records else 0
    records.append(record)
    if reported.last is None or previous == of.attempt - 1:
        # The attempts before this one have their records here.
        seconds = history.carried(records, time.time(), config.started)
    else:
        # Begin with host 0's last report, and add the lost work of the attempt that it was in.
        seconds = dict(reported.seconds)
        for cause, spent in record.seconds.items() if reported.last.attempt == record.attempt else ():
            seconds[cause] = seconds.get(cause, 0.0) + spent - reported.last.seconds.get(cause, 0.0)
    ended = dataclasses.replace(
        summary,
        # If hosts are replaced, another host 0 continues.
        verdict=None if config.job.replaces and has_joined else record.verdict,
        step=step,
        seconds=seconds,
        restarts=history.restarts_by_cause(records),
        saved=furthest(summary.saved, *(status.committed for status in statuses)),
        of=of,
    )
    Starts(folder, config.uid).write(ended)


def _last_known(folder: RunFolder, config: Config, reported: Reported, records: Sequence[Record]) -> tuple[Summary, Of]:
    """Return the summary and the progress of the attempt that host 0 was in, from its last report if there is one."""
    last = reported.last
    number = max(reported.attempt, 0 if last is None else last.attempt, records[-1].attempt + 1 if records else 1)
    summary, of = find_unfinished(folder, config.uid, records) or (None, None)
    if summary is None or of is None or (of.generation, of.attempt) != (config.generation, number):
        now = time.time()
        # A host without any report has only waited.
        waited = {"rendezvous": max(0.0, now - reported.started)} if last is None else {}
        of = Of(config.uid, config.generation, number, reported.started, at=now, seconds=waited)
        summary = Summary(None, step=None, seconds={}, restarts={})
    if last is not None and last.attempt == number:
        of = dataclasses.replace(
            of,
            started=last.started,
            at=last.at,
            seconds=last.seconds,
            unsafe_s=last.unsafe_s,
            first_committed=_least(of.first_committed, last.first_committed),
            last_committed=furthest(of.last_committed, last.last_committed),
            first_step=of.first_step or last.first_step,
            judged=of.judged or last.judged,
            restart=of.restart or last.restart,
        )
    return summary, of


def _is_fresh(summary: Summary) -> bool:
    """Return whether the host 0 that wrote a summary is alive."""
    return summary.verdict is None and summary.of is not None and abs(time.time() - summary.of.at) < FRESH_S


def _least(*steps: int | None) -> int | None:
    return min((step for step in steps if step is not None), default=None)
