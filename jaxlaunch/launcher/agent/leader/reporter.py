"""Reports of a run by host 0: summary, records, pod log, annotation and webhook.

`RunState` reads the state of the gang, and `Reporter` writes it. Storage and servers may stall for
longer than a host may be silent, so threads write the newest value to them (`publishers`). The
event loop waits for a write only if its next action depends on it, and never for long. When host 0
is lost, `record_end_without_leader` writes the end of the attempt on another host.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.clock import Clock
from jaxlaunch.launcher.agent.gang.config import Config, describe_versions, read_versions
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.gang.protocol import Hello
from jaxlaunch.launcher.agent.io.link import bracket_ipv6
from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.launcher.agent.leader import publishers
from jaxlaunch.launcher.agent.leader.gang import Gang, Stage
from jaxlaunch.launcher.agent.leader.publishers import (
    GangView,
    JobSetAnnotator,
    LatestWriter,
    Notifier,
    PodLog,
    RankSampler,
)
from jaxlaunch.records import codec, log_lines
from jaxlaunch.records.log_lines import ProgressAnnotation
from jaxlaunch.records.rank_history import CurrentHang
from jaxlaunch.records.run_numbers import TimedNumbers
from jaxlaunch.records.summary import (
    AttemptProgress,
    AttemptRecord,
    RankMemory,
    Summary,
    furthest_step,
)
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import history
from jaxlaunch.runs.layout import AGENTS
from jaxlaunch.runs.run_folder import (
    RunFolder,
    RunStarts,
    close_unfinished,
    find_unfinished_attempt,
    settle_records,
)

# Seconds between two writes of the summary, on this machine and on shared storage, which may be
# slow.
LOCAL_WRITE_INTERVAL_S, SHARED_WRITE_INTERVAL_S = 1.0, 10.0
# Seconds between two writes of the JobSet's annotation, and the longest wait for the last of them.
ANNOTATE_INTERVAL_S, ANNOTATE_WAIT_S = 60.0, 10.0
MAX_NOTES, MAX_NOTE_CHARS = 50, 2_000
# Hosts whose memory is in the summary.
MAX_MEMORY_ROWS = 64


class RunState:
    """State of the run, from the gang, the clock and earlier starts.

    Attributes:
        starts: The starts of the run.
        metrics: The newest metrics of rank 0.
        notes: Notes of the summary.
        started_at: Unix time at which the attempt began.
        held_until: Unix time until which the hosts stay after a failure. None if they do not.
        earlier_seconds: Seconds of the run by cause, up to the end of the previous attempt.
    """

    def __init__(self, config: Config, gang: Gang, clock: Clock, run_folder: RunFolder) -> None:
        self._config, self._gang, self._clock, self._run_folder = config, gang, clock, run_folder
        self._code_versions = describe_versions(read_versions(), os.environ)
        self.starts = RunStarts(run_folder, config.uid)
        self.metrics: Mapping[str, Any] | None = None
        # Number of steps of the run that rank 0 reported, in this attempt or an earlier one.
        self._total_steps: int | None = None
        self.notes: list[str] = []
        self.started_at = time.time()
        self.held_until: float | None = None
        self.earlier_seconds: Mapping[str, float] = clock.seconds_by_cause(clock.started_at)

    @property
    def newest_attempt(self) -> int:
        """Number of the running attempt, or of the next one during GATHER."""
        return self._gang.attempt_number + (self._gang.stage is Stage.GATHER)

    @property
    def saved_step(self) -> int | None:
        """Newest step on storage, from all sources."""
        steps = (record.last_committed for record in self._gang.records)
        committed_step = self._gang.attempt.ranks.committed
        return furthest_step(self.starts.known_saved_step, *steps, committed_step)

    def start_fields(self) -> dict[str, int | None]:
        """Return the fields `start` and `saved` of the message that starts an attempt.

        `saved` is the newest step that earlier attempts saved, 0 if they trained and saved none,
        and None if none trained.
        """
        saved_step = history.newest_saved_step(self._gang.records, self._config.generation)
        if saved_step is None and self.starts.has_earlier_checkpoints:
            saved_step = 0
        saved_step = furthest_step(saved_step, self._gang.members.saved_step)
        return {"start": self.starts.number, "saved": saved_step}

    def attempt_seconds(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of this attempt, given those of the run."""
        return {
            cause: round(spent_s - self.earlier_seconds.get(cause, 0.0), 3)
            for cause, spent_s in seconds.items()
        }

    def gang_state(self, now: float) -> dict[str, Any]:
        """Return the state of all hosts, for the metrics of every agent."""
        seconds = self._clock.seconds_by_cause(now)
        last_message_at = self._gang.members.last_message_at
        other_message_times = (
            message_at for host, message_at in last_message_at.items() if host != self._config.host
        )
        oldest_message_at = next(other_message_times, now)
        return {
            "attempt": self._gang.attempt_number,
            # The uid is part of the key of the gang, so it is never sent.
            "of": {**codec.to_json(self._attempt_progress(seconds, now)), "uid": ""},
            "seconds": seconds,
            "unsafe_s": self._clock.uncommitted_s(now),
            "foremost": self._gang.attempt.ranks.settled_step(now),
            "silence_s": now - oldest_message_at,
            **history.metric_counters(
                self._gang.records, self._config.generation, self._config.job
            ),
        }

    def numbers(self, now: float) -> dict[str, Any]:
        """Return the numbers and the seconds of the run, as fields of TimedNumbers."""
        ranks = self._gang.attempt.ranks
        if ranks.by_rank and ranks.by_rank[0].total is not None:
            self._total_steps = ranks.by_rank[0].total
        return {
            # Until the attempt has completed a step, the run is at the saved step.
            "step": ranks.first_step or self.saved_step or ranks.first_step,
            "steps": self._total_steps,
            "committed": self.saved_step,
            "restarts": history.restarts_by_cause(self._gang.records, self.newest_attempt),
            "metrics": self.metrics,
            "seconds": self._clock.seconds_by_cause(now),
        }

    def build_view(self) -> GangView:
        """Return the state of all hosts, for the pod's log and the webhook."""
        gang, now = self._gang, time.monotonic()
        ranks = gang.attempt.ranks
        return GangView(
            stage=gang.stage.name.lower(),
            attempt=gang.attempt_number,
            members=gang.members.table.to_wire(),
            missing=gang.members.missing_hosts,
            refused=list(gang.gathering.refusals)[-3:],
            statuses=ranks.by_rank,
            overdue=gang.attempt.hang.timeout_message,
            preempted=None
            if self._run_folder.unknown_reason
            else history.preemptions_without_progress(gang.records),
            restart=self._restart_seconds(now),
            held_until=self.held_until,
            # In the pod's log, only checkpoints of these pods have a time.
            **(self.numbers(now) | {"committed": ranks.committed}),
        )

    def build_summary(self, verdict: Verdict | None) -> Summary:
        """Return the summary of the run, with the verdict if the run ends."""
        gang, now = self._gang, time.monotonic()
        step = gang.attempt.ranks.first_step
        if step is None and verdict is not None:
            # The run may end before these pods start an attempt, if it was finished already.
            step = verdict.step
        numbers = self.numbers(now) | {"step": step}
        progress = self._attempt_progress(numbers["seconds"], now)
        return Summary(
            verdict,
            of=dataclasses.replace(progress, made_of=self._code_versions),
            notes=self.notes,
            stacks=gang.attempt.hang.stacks,
            nccl=gang.attempt.hang.nccl,
            restart_seconds=history.restart_rows(
                gang.records, gang.attempt_number, self._restart_seconds(now)
            ),
            memory=gang.attempt.memory.fullest_hosts(MAX_MEMORY_ROWS),
            held_until=self.held_until,
            **numbers,
        )

    def build_annotation(self, event: str, verdict: Verdict | None) -> ProgressAnnotation:
        """Return the annotation of the JobSet."""
        numbers = TimedNumbers(**self.numbers(time.monotonic())).run_numbers()
        # Pods that left are replaced by new ones, which start the next attempt.
        numbers["restarts"] = history.restarts_by_cause(
            self._gang.records, self.newest_attempt + (event == "left")
        )
        config, attempt = self._config, self._gang.attempt_number
        return ProgressAnnotation(
            config.uid, time.time(), event, attempt, config.generation, verdict, **numbers
        )

    def _attempt_progress(self, seconds: Mapping[str, float], now: float) -> AttemptProgress:
        """Return the progress of the attempt for a summary."""
        gang, ranks = self._gang, self._gang.attempt.ranks
        return AttemptProgress(
            uid=self._config.uid,
            generation=self._config.generation,
            attempt=self.newest_attempt,
            started=self.started_at,
            at=time.time(),
            seconds=self.attempt_seconds(seconds),
            first_committed=ranks.first_committed,
            last_committed=gang.attempt.last_committed,
            unsafe_s=round(self._clock.uncommitted_s(now), 3),
            first_step=ranks.trained_step,
            judged=gang.verdict if gang.stage is Stage.KILL else None,
            restart=self._restart_seconds(now),
        )

    def _restart_seconds(self, now: float) -> Mapping[str, float]:
        has_ended = self._gang.stage in (Stage.KILL, Stage.HOLD, Stage.LEAVE)
        if has_ended:
            return self._clock.restart.last_seconds
        return self._clock.restart.seconds_by_cause(now)


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
            # Only the thread of the event loop may use the streams.
            loop.call_later(0.0, lambda: say(text))

        self.state = RunState(config, gang, clock, run_folder)
        self._config, self._gang, self._clock, self._say = config, gang, clock, say
        self._run_folder, self._pod_log = run_folder, pod_log
        self._summary_writer = LatestWriter[Summary](
            self.state.starts.write_summary, "the summary of the run", say_from_thread
        )
        self._annotator: LatestWriter[ProgressAnnotation] | None = None
        # The annotation is that of a job without roles, whose name is that of the JobSet.
        if config.is_pod and not config.job.is_role and publishers.has_token():
            annotator = JobSetAnnotator(config.job.name, say_from_thread)
            subject = "the annotation of the JobSet"
            self._annotator = LatestWriter(annotator.annotate, subject, say_from_thread)
        # Its thread logs the first failure.
        self._notifier = Notifier(config.job.name, os.environ, say_from_thread)
        self._sampler = RankSampler(run_folder)
        # Newest committed step and stage in the last summary, and monotonic times of the last
        # summary and annotation.
        self._written_state: tuple[int | None, Stage] | None = None
        self._summary_written_at = self._annotation_queued_at = time.monotonic()

    def write_start(self, now: float) -> None:
        """Write the state before the first host joins."""
        self.log_past()
        self.state.starts.keep_job(job_fields(self._config, os.environ))
        self._write_summary(now)

    def log_past(self, attempts: int = 0) -> None:
        """Write the attempts of earlier pods to the pod's log, as `PodLog.write_past` does."""
        ranks = self._config.job.processes_per_host, self._config.process_count
        start = self.state.starts.number
        folder = self._run_folder
        self._pod_log.write_past(self._gang.records, folder, start, *ranks, attempts=attempts)

    def add_metrics(self, metrics: Any) -> None:
        """Store the newest metrics of rank 0. Raises TypeError if they are not a mapping."""
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics are {metrics!r}")
        self.state.metrics = metrics or self.state.metrics

    def add_note(self, text: str) -> None:
        """Add a note to the summary, unless it is a duplicate or there are too many."""
        text, notes = text[:MAX_NOTE_CHARS], self.state.notes
        if text not in notes and len(notes) < MAX_NOTES:
            notes.append(text)

    def start_attempt(self, now: float) -> None:
        """Record the start of an attempt."""
        self.state.started_at = time.time()
        self._clock.restart.enter_cause("start", now)
        self._write_summary(now)

    def report_verdict(self, verdict: Verdict, now: float) -> None:
        """Write the verdict on the newest attempt."""
        number, attempt = self._gang.attempt_number, self._gang.attempt
        self._pod_log.write_verdict(verdict, number, self._memory_at_end(verdict))
        self._notifier.notify_verdict(verdict, number)
        if attempt.number == number:
            foremost = attempt.ranks.settled_step(now)
            self._sampler.sample_ranks(attempt.statuses, 0.0, foremost=foremost, is_due=True)
            self._clock.restart.begin(*attempt.end_timing(now), now)
        self._write_summary(now, is_urgent=True)

    def _memory_at_end(self, verdict: Verdict) -> RankMemory | None:
        """Return the memory of the rank that ended the newest attempt, or None if unknown."""
        attempt = self._gang.attempt
        # The gang may end before an attempt has started its ranks.
        is_newest = attempt.number == self._gang.attempt_number
        return attempt.memory.find_rank(verdict.rank) if is_newest else None

    def record_attempt(self, verdict: Verdict, now: float) -> AttemptRecord:
        """Record the attempt, unless host 1 has recorded it, and return its record."""
        if verdict.code == contract.DONE:
            self._clock.end_finished_attempt(now)
        else:
            self._clock.end_failed_attempt(now)
        gang, table = self._gang, self._gang.members.table
        seconds = self._clock.seconds_by_cause(now)
        record = AttemptRecord(
            uid=self._config.uid,
            generation=self._config.generation,
            attempt=gang.attempt_number,
            cause=verdict.cause,
            rank=verdict.rank,
            first_committed=gang.attempt.ranks.first_committed,
            last_committed=gang.attempt.last_committed,
            seconds=self.state.attempt_seconds(seconds),
            verdict=verdict,
            started=self.state.started_at,
            ended=time.time(),
            restart=self._clock.restart.last_seconds,
            members=table.to_wire() if table.has_moved_hosts else None,
            memory=self._memory_at_end(verdict),
            first_step=gang.attempt.ranks.trained_step,
        )
        self.state.earlier_seconds = seconds
        records = self._run_folder.read_records(self._config.uid)
        if records and records[-1].attempt == gang.attempt_number:
            return records[-1]
        self._run_folder.append_record(record)
        return record

    def await_hosts(self, now: float) -> None:
        """Record that the gang waits for the replacement of hosts."""
        self._clock.restart.enter_cause("replace", now)
        self._write_summary(now)

    def write_end(self, verdict: Verdict, *, leaves_alone: bool, hold_s: float = 0.0) -> None:
        """Write the last summary. With `leaves_alone`, the run continues with another host 0."""
        if hold_s:
            self.state.held_until = round(time.time() + hold_s, 1)
        if not leaves_alone:
            self._notifier.begin_closing()
        self._summary_writer.finish()
        self.state.starts.write_summary(self.state.build_summary(verdict))
        if not leaves_alone:
            self._pod_log.write_beat(self.state.build_view, time.monotonic(), is_news=True)
        if self.state.held_until is not None:
            self._say(self._describe_hold(verdict, self.state.held_until))

    def _describe_hold(self, verdict: Verdict, held_until: float) -> str:
        job, folder = self._config.job, self._config.run_dir
        role = os.environ.get(contract.ROLE, "")
        # On a cluster, the commands find the role that is held.
        job_name = run_name = job.name.removesuffix(f"-{role}") if job.is_role else job.name
        if self._config.is_launched and folder is not None:
            # A run on this machine has the name of its folder.
            job_name = run_name = folder.name
            if job.name.endswith(f"-{role}") and folder.name == role:
                # The folder of a role is in that of its job, which stops all roles together.
                job_name = folder.parent.name
                run_name = f"{job_name}/{role}"
        shell = f"`launcher shell {run_name} --rank {verdict.rank or 0}`"
        stop = f"`launcher stop {job_name}`"
        return f"held until {log_lines.format_clock(held_until)}: {shell} enters it, {stop} ends it"

    def publish_end(self, verdict: Verdict, *, leaves_alone: bool) -> None:
        """Write the end to the annotation of the JobSet."""
        is_final = not contract.outcome_for_code(verdict.code).restarts
        self._queue_annotation("ended" if is_final and not leaves_alone else "left", verdict)

    def report_progress(self, now: float) -> None:
        """Write to the pod's log and notify the webhook, if there is news or a line is due."""
        # Readers of the log look for a recent line, in a hold too.
        self._pod_log.write_beat(self.state.build_view, now)
        # A hold is not a stall.
        if self._gang.stage is not Stage.HOLD:
            self._notifier.check_progress(self.state.build_view, now)

    def overdue_since(self, now: float) -> float | None:
        """Return the monotonic time at which the overdue step began, or None if none is overdue."""
        return self._clock.overdue_since(now)

    def save_state(self, now: float) -> None:
        """Write the summary, the samples and the annotation, if there is news or a write is due."""
        stage = self._gang.stage
        interval_s = LOCAL_WRITE_INTERVAL_S if self._config.is_local else SHARED_WRITE_INTERVAL_S
        has_news = (self._gang.attempt.ranks.committed, stage) != self._written_state
        has_ended = stage in (Stage.HOLD, Stage.LEAVE)
        if not has_ended and (has_news or now - self._summary_written_at >= interval_s):
            self._write_summary(now, has_news=has_news)
        if stage is Stage.RUN:
            attempt = self._gang.attempt
            foremost = attempt.ranks.settled_step(now)
            hang = None
            if (suspect := attempt.early_look.suspect) is not None:
                since = time.time() - (now - suspect.since)
                place = suspect.place[:MAX_NOTE_CHARS]
                hang = CurrentHang(suspect.rank, place, since, suspect.has_waiting)
            self._sampler.sample_ranks(attempt.statuses, interval_s, foremost=foremost, hang=hang)
            if now - self._annotation_queued_at >= ANNOTATE_INTERVAL_S:
                self._queue_annotation("running", None)

    def is_busy(self, now: float) -> bool:
        """Return whether the agent must still wait for the webhook or the annotation."""
        is_annotating = self._annotator is not None and self._annotator.is_busy
        may_annotate = now < self._annotation_queued_at + ANNOTATE_WAIT_S
        return self._notifier.is_busy(now) or (is_annotating and may_annotate)

    def list_agents(self, agents: Sequence[tuple[Hello, str]]) -> None:
        """Write the address and the ranks of each host's agent."""
        rows = []
        for hello, ip in agents:
            # An IPv4 address of a dual-stack socket has this prefix.
            address = f"{bracket_ipv6(ip.removeprefix('::ffff:'))}:{hello.metrics_port}"
            ranks = list(self._gang.members.table.ranks_of(hello.host))
            rows.append({"host": hello.host, "address": address, "pid": hello.pid, "ranks": ranks})
        self._run_folder.write_json(AGENTS, rows)

    def _write_summary(self, now: float, *, is_urgent: bool = False, has_news: bool = True) -> None:
        """Queue the summary, so that the attempt is on record even if every agent is killed.

        This waits for the write, for at most a second, if it is urgent, or if it has news and the
        folder is on this machine. It does not wait for a regular write without news, because a busy
        disk may take longer than that to sync.
        """
        self._written_state = (self._gang.attempt.ranks.committed, self._gang.stage)
        self._summary_written_at = now
        must_wait = is_urgent or (self._config.is_local and has_news)
        wait_s = LOCAL_WRITE_INTERVAL_S if must_wait else 0.0
        self._summary_writer.enqueue(self.state.build_summary(None), wait_s=wait_s)

    def _queue_annotation(self, event: str, verdict: Verdict | None) -> None:
        self._annotation_queued_at = time.monotonic()
        if self._annotator is not None:
            self._annotator.enqueue(self.state.build_annotation(event, verdict))


def job_fields(config: Config, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the job as this agent received it, by the keys of job.yaml."""
    job, slices = config.job, int(environ.get(contract.SLICES) or 1)
    accelerator: dict[str, Any] = {"type": job.accelerator}
    if job.platform != "tpu":
        accelerator["per_host"] = job.devices_per_process * job.processes_per_host
    timeouts = {phase: round(limit) for phase, limit in job.timeouts_s.items() if limit is not None}
    restarts: dict[str, Any] = {"crash": job.crash_limit, "in_place": job.in_place_limit}
    if job.requeue_codes:
        codes = {str(code): requeue.value for code, requeue in job.requeue_codes.items()}
        restarts["codes"] = codes
    hosts = job.sizes[-1] if job.sizes else config.hosts // slices
    fields: dict[str, Any] = {
        "name": job.name,
        "hosts": {"min": job.sizes[0], "max": hosts} if len(job.sizes) > 1 else hosts,
        "slices": slices,
        "processes_per_host": job.processes_per_host,
        "accelerator": accelerator,
        "restarts": restarts,
        "timeouts": timeouts,
        "grace": round(job.grace_s),
        "deadline": None if job.deadline_s is None else round(job.deadline_s),
        "workdir": job.workdir,
    }
    if job.command is not None:
        return fields | {"command": list(job.command)}
    try:
        return fields | {"train": json.loads(environ.get(contract.TRAIN_SPEC, "{}"))}
    except ValueError:
        # The trainer will report the error in its specification.
        return fields


# --- when host 0 is lost --------------------------------------------------------------------------

# Host 0 writes its summary every ten seconds. After three missed writes it counts as lost.
SUMMARY_FRESHNESS_S = 30.0


@dataclasses.dataclass(frozen=True)
class LeaderReport:
    """State of the attempt that another host knows when host 0 is lost.

    Attributes:
        attempt: Last attempt that host 0 started on this host, or 0 before the first one.
        agent_started_at: Unix time at which this host's agent started.
        progress: Progress in host 0's last report, or None if it never reported.
        run_seconds: Seconds of the run by cause, as in that report.
    """

    attempt: int
    agent_started_at: float
    progress: AttemptProgress | None = None
    run_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_message(
        cls, gang: Mapping[str, Any], attempt: int, agent_started_at: float
    ) -> LeaderReport:
        """Build the report from host 0's last message, which is empty if there was none."""
        if "of" not in gang:
            return cls(attempt, agent_started_at)
        progress = codec.read_record(AttemptProgress, gang["of"])
        return cls(attempt, agent_started_at, progress, gang["seconds"])


def record_end_without_leader(
    folder: RunFolder,
    config: Config,
    report: LeaderReport,
    statuses: Sequence[Status],
    verdict: Verdict,
) -> None:
    """Write the end of the attempt on another host after host 0 was lost.

    The sources are host 0's last report; the last summary in the folder, if it describes the same
    attempt; and the statuses of this host's own processes. The folder may be this host's copy of a
    bucket, which lacks the files that host 0 has written since the pods started. Nothing is written
    if the end is already on record, or if this host could not join a host 0 that is alive.
    """
    summary = folder.read_summary(config.uid)
    has_joined = report.attempt > 0 or report.progress is not None
    is_fresh = False
    if summary is not None and summary.verdict is None and summary.of is not None:
        # The host 0 that wrote a fresh summary is alive.
        is_fresh = abs(time.time() - summary.of.at) < SUMMARY_FRESHNESS_S
    if not has_joined and summary is not None and summary.of is not None:
        if is_fresh and summary.of.generation == config.generation:
            return
        if summary.of.generation != config.generation:
            # Host 0 has not settled the records of the earlier generation, so this host does.
            settle_records(folder, config.uid)
    records = folder.read_records(config.uid)
    if has_joined and records and records[-1].attempt >= report.attempt > 0:
        # The end of the attempt is on record: host 0 continued without this host, which was
        # stalled. If lost hosts are replaced, a summary that is not fresh shows that no other host
        # 0 has taken its place, and the run ends here.
        if config.job.replaces and summary is not None and summary.verdict is None and not is_fresh:
            end_summary = dataclasses.replace(summary, verdict=verdict)
            RunStarts(folder, config.uid).write_summary(end_summary)
        return
    summary, progress = _last_known_attempt(folder, config, report, records)
    committed_statuses = [status for status in statuses if status.first_committed is not None]
    progress = dataclasses.replace(
        progress,
        first_committed=_min_step(
            progress.first_committed, *(status.first_committed for status in committed_statuses)
        ),
        last_committed=furthest_step(
            progress.last_committed, *(status.committed for status in committed_statuses)
        ),
        first_step=_min_step(progress.first_step, *(status.first_step for status in statuses)),
    )
    local_step = _min_step(*(status.step for status in statuses))
    step = summary.step if local_step is None else local_step
    record = close_unfinished(progress, dataclasses.replace(verdict, step=step))
    folder.append_record(record)
    previous_attempt = records[-1].attempt if records else 0
    records.append(record)
    if report.progress is None or previous_attempt == progress.attempt - 1:
        # The records contain all attempts before this one.
        seconds = history.sum_seconds(records, time.time(), config.run_started_at)
    else:
        # Begin with host 0's last report. The record of its attempt counts the seconds since the
        # last commit as lost work.
        seconds = dict(report.run_seconds)
        if report.progress.attempt == record.attempt:
            for cause, spent_s in record.seconds.items():
                added_s = spent_s - report.progress.seconds.get(cause, 0.0)
                seconds[cause] = seconds.get(cause, 0.0) + added_s
    end_summary = dataclasses.replace(
        summary,
        # If lost hosts are replaced, another host 0 continues the run.
        verdict=None if config.job.replaces and has_joined else record.verdict,
        step=step,
        seconds=seconds,
        restarts=history.restarts_by_cause(records),
        committed=furthest_step(summary.committed, *(status.committed for status in statuses)),
        of=progress,
    )
    RunStarts(folder, config.uid).write_summary(end_summary)


def _last_known_attempt(
    folder: RunFolder, config: Config, report: LeaderReport, records: Sequence[AttemptRecord]
) -> tuple[Summary, AttemptProgress]:
    """Return the last known summary and progress of the attempt that host 0 did not finish."""
    last_progress = report.progress
    number = max(
        report.attempt,
        0 if last_progress is None else last_progress.attempt,
        records[-1].attempt + 1 if records else 1,
    )
    attempt_key = (config.generation, number)
    summary, progress = find_unfinished_attempt(folder, config.uid, records) or (None, None)
    if (
        summary is None
        or progress is None
        or (progress.generation, progress.attempt) != attempt_key
    ):
        now = time.time()
        started_at = report.agent_started_at
        # Without any report of host 0, this host has only waited for it.
        seconds = {"rendezvous": max(0.0, now - started_at)} if last_progress is None else {}
        progress = AttemptProgress(config.uid, *attempt_key, started_at, at=now, seconds=seconds)
        summary = Summary(None, restarts={})
    if last_progress is not None and last_progress.attempt == number:
        progress = dataclasses.replace(
            progress,
            started=last_progress.started,
            at=last_progress.at,
            seconds=last_progress.seconds,
            unsafe_s=last_progress.unsafe_s,
            first_committed=_min_step(progress.first_committed, last_progress.first_committed),
            last_committed=furthest_step(progress.last_committed, last_progress.last_committed),
            first_step=progress.first_step or last_progress.first_step,
            judged=progress.judged or last_progress.judged,
            restart=progress.restart or last_progress.restart,
        )
    return summary, progress


def _min_step(*steps: int | None) -> int | None:
    return min((step for step in steps if step is not None), default=None)
