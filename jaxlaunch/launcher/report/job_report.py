"""Report of one job on a cluster, with the same page as a run on this machine.

What a run folder has comes from the objects of the job and from the log of its leader. What the
viewer may not read, or what could not be read, is a sentence at its place of the page.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from jaxlaunch import contract
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.job_status import JobStatus, State, list_host_rows
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.labels import MANAGED_BY, RESERVED_DOMAINS
from jaxlaunch.launcher.kubernetes.objects import replicated_jobs
from jaxlaunch.launcher.report import headline
from jaxlaunch.launcher.report.leader_log import LeaderLog
from jaxlaunch.launcher.report.run import Report
from jaxlaunch.launcher.report.run_files import RunBrief
from jaxlaunch.launcher.report.timeline import build_timeline
from jaxlaunch.launcher.wording import escape_controls
from jaxlaunch.records import codec
from jaxlaunch.records.summary import StartRecord

_MAX_TEXT_CHARS = 2000
_MAX_LINE_CHARS, _MAX_TAIL_LINES, _MAX_RANKS = 500, 60, 64
# The situations of a gang that trains.
_RUNNING_SITUATIONS = ("running", "restarted")
# Kinds of objects that belong to no namespace.
_CLUSTER_KINDS = ("nodes", "namespaces", "clusterqueues")


class ExplanationTexts(Protocol):
    """The texts of `launcher explain` about a job."""

    @property
    def situation(self) -> str:
        """Name of the situation."""

    @property
    def headline(self) -> str:
        """The answer in one line, which begins with the name of the job."""

    @property
    def evidence(self) -> Sequence[str]:
        """The observations that support the headline."""

    @property
    def facts(self) -> Sequence[str]:
        """Facts that do not depend on the situation."""

    @property
    def next_move(self) -> str | None:
        """The next step, if there is something to do."""

    @property
    def see(self) -> str | None:
        """The command that shows the section of the troubleshooting page."""


@dataclasses.dataclass(frozen=True)
class RankLogs:
    """The ends of the ranks' logs.

    Attributes:
        lines: The last lines of each rank.
        earlier: The last lines of each rank in earlier pods.
        unread: Why the logs of some hosts are not here, as sentences.
    """

    lines: Mapping[int, Sequence[str]] = dataclasses.field(default_factory=dict)
    earlier: Mapping[int, Sequence[str]] = dataclasses.field(default_factory=dict)
    unread: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobReport(Report):
    """State of a job on a cluster."""

    snapshot: Snapshot
    status: JobStatus
    explanation: ExplanationTexts
    logs: RankLogs
    # Why the curves are unknown, or "".
    unread_log: str
    log_seconds: Mapping[str, float]
    has_lag: ClassVar[bool] = False

    @functools.cached_property
    def job(self) -> Mapping[str, Any]:
        """The job as its JobSet describes it."""
        return read_job(self.snapshot)

    @property
    def seconds_by_cause(self) -> dict[str, float]:
        """Seconds of the whole run by cause, of which the log may have only a part."""
        return dict(self.log_seconds) or self.timeline.seconds_by_cause

    def describe_state(self) -> dict[str, str]:
        """Return the state with the result, and the next step of `launcher explain`."""
        status, results = self.status, self.describe_results()
        name, wall_s = f"Job {escape_controls(status.name)}", self.timeline.wall_s
        text = f"Job {escape_controls(self.explanation.headline)[:_MAX_TEXT_CHARS]}".rstrip(".")
        if status.state is State.DONE:
            duration_s = wall_s or status.lasted_s or status.age_s
            text = f"{name} is done in {headline.format_span(duration_s)}{results}"
        elif self.explanation.situation in _RUNNING_SITUATIONS and wall_s:
            steps, step = self.total_steps(), status.step
            at_step = "" if step is None else f" at step {step}"
            of_steps = "" if step is None or steps is None else f" of {steps}"
            duration = headline.format_span(wall_s)
            text = f"{name} has been running for {duration}{at_step}{of_steps}{results}"
        elif results:
            text += f". Newest{results}"
        next_move = escape_controls(self.explanation.next_move or "")[:_MAX_TEXT_CHARS]
        return {"state": self.brief.state, "text": f"{text}.", "todo": next_move}

    def list_sections(self) -> dict[str, Any]:
        """Return the sections of the page that are read from the cluster."""
        explanation, status = self.explanation, self.status
        where = f"{status.name} -n {status.namespace}"
        commands = [
            ["Say why it is where it is", f"launcher explain {where}"],
            ["Read a rank's log", f"launcher logs {where} --rank 0 --tail 100"],
            ["Show its state", f"launcher status {where}"],
        ]
        see = [] if explanation.see is None else [explanation.see]
        return {
            "ranks": self._list_ranks(),
            "hosts": list_host_rows(self.snapshot),
            "commands": commands,
            "explanation": {
                "headline": _clean(explanation.headline),
                "lines": [*map(_clean, (*explanation.evidence, *explanation.facts))],
                "see": [*map(_clean, see)],
            },
            "unread": self._list_unread(),
        }

    def _list_ranks(self) -> list[dict[str, Any]]:
        """Return the end of each rank's log, the failed rank first."""
        verdict = self.status.verdict or {}
        failed_rank, lines, earlier = verdict.get("rank"), self.logs.lines, self.logs.earlier
        ranks = sorted({*lines, *earlier}, key=lambda rank: (rank != failed_rank, rank))
        return [
            {
                "rank": rank,
                "tail": _clean_lines(lines.get(rank, ())),
                "earlier": _clean_lines(earlier.get(rank, ())),
                "stack": "",
                "is_cause": rank == failed_rank,
            }
            for rank in ranks[:_MAX_RANKS]
        ]

    def _list_unread(self) -> dict[str, list[str]]:
        """Return the sentences about what could not be read, by the place of the page."""
        reasons, namespace = self.snapshot.unread_reasons, self.status.namespace
        unread = dict[str, list[str]]()
        if "pods" in reasons:
            unread["hosts"] = [self._explain_unread("pods", reasons["pods"])]
        elif self.unread_log:
            for place in ("time", "curves"):
                unread[place] = [self.unread_log]
        if self.logs.unread:
            unread["ranks"] = list(self.logs.unread)
        # An explanation depends on all other kinds.
        if kinds := [kind for kind in reasons if kind not in ("pods", "log")]:
            unread["explanation"] = [self._explain_unread(kind, reasons[kind]) for kind in kinds]
        if self.status.committed is not None:
            unread["checkpoints"] = [
                f"Step {self.status.committed} is saved. The files of checkpoints are on the "
                f"job's storage in namespace {namespace}, which the dashboard does not read."
            ]
        return {place: [*map(_clean, texts)] for place, texts in unread.items()}

    def _explain_unread(self, kind: str, reason: str) -> str:
        if kind in self.snapshot.forbidden:
            return describe_missing_right(kind, self.status.namespace)
        return reason


def describe_missing_right(resource: str, namespace: str) -> str:
    """Return a sentence about a resource that the viewer may not read."""
    if resource in _CLUSTER_KINDS:
        return f"{resource}: you may not read {resource}."
    verb = "read logs" if resource == "pods/log" else f"list {resource}"
    return f"{resource}: you may not {verb} in namespace {namespace}."


def _clean(text: str) -> str:
    return escape_controls(text)[:_MAX_TEXT_CHARS]


def _clean_lines(lines: Sequence[str]) -> list[str]:
    return [escape_controls(line)[:_MAX_LINE_CHARS] for line in lines[-_MAX_TAIL_LINES:]]


def make_report(
    snapshot: Snapshot,
    status: JobStatus,
    explanation: ExplanationTexts,
    log: LeaderLog,
    logs: RankLogs,
    unread_log: str = "",
) -> JobReport:
    """Return the report of a job from its objects and from the log of its leader."""
    uid = str(snapshot.jobset["metadata"].get("uid", ""))
    ends = [*snapshot.report.earlier_ends]
    if snapshot.report.attempt_end is not None:
        ends.append(snapshot.report.attempt_end)
    records = log.list_attempts(ends)
    running = None if status.code is not None else log.running_attempt(records)
    starts = list[StartRecord]()
    began_at = min((record.started for record in records), default=None)
    if began_at is None and running is not None:
        began_at = running.started
    if began_at is not None:
        ended_at = records[-1].ended if records and running is None else None
        starts.append(StartRecord(1, uid, began_at, ended_at, status.code))
    timeline = build_timeline(starts, records, log.metrics.intervals.items, running, {})
    verdict = status.verdict or {}
    brief = RunBrief(
        name=status.name,
        state=status.state.value.lower(),
        message=str(verdict.get("message", "")),
        code=status.code,
        restart_count=status.restart_counts.total,
        began_at=began_at,
        updated_at=None if log.beat is None else log.beat.at,
        owner=status.queue or "",
        **status.run_numbers(),
    )
    return JobReport(
        brief=brief,
        starts=starts,
        timeline=timeline,
        ranks=log.ranks,
        metrics=log.metrics,
        evals=log.evals,
        snapshot=snapshot,
        status=status,
        explanation=explanation,
        logs=logs,
        unread_log=unread_log,
        log_seconds={} if log.beat is None else log.beat.seconds,
    )


def read_labels(snapshot: Snapshot) -> dict[str, str]:
    """Return the labels that the job itself sets, with that of its sweep."""
    labels = snapshot.jobset["metadata"].get("labels") or {}
    return {
        key: str(value)
        for key, value in labels.items()
        if key != MANAGED_BY and not key.partition("/")[0].endswith(RESERVED_DOMAINS)
    }


def has_trainer(snapshot: Snapshot) -> bool:
    """Return whether the job has a `train:` block."""
    return contract.TRAIN_SPEC in hosts.read_environment(snapshot.jobset)


def read_job(snapshot: Snapshot) -> dict[str, Any]:
    """Return the job in the keys of job.yaml, as far as its JobSet has them."""
    environment = hosts.read_environment(snapshot.jobset)
    agent_job = hosts.read_agent_job(snapshot.jobset)
    slices = sum(int(part.get("replicas", 1)) for part in replicated_jobs(snapshot.jobset))
    count = snapshot.expected_hosts // max(1, slices)
    fields: dict[str, Any] = {
        "name": snapshot.name,
        "namespace": snapshot.namespace,
        "image": hosts.jobset_main_container(snapshot.jobset).get("image", ""),
        "hosts": count,
        "slices": slices,
        "processes_per_host": agent_job.processes_per_host,
        "accelerator": {"type": agent_job.accelerator},
    }
    if snapshot.queue is not None:
        fields["queue"] = snapshot.queue
    if labels := read_labels(snapshot):
        fields["labels"] = labels
    if agent_job.command is not None:
        return fields | {"command": list(agent_job.command)}
    try:
        train = codec.parse_record(environment.get(contract.TRAIN_SPEC, "").replace("$$", "$"))
    except ValueError:
        return fields
    return fields | {"train": dict(train)}
