"""Jobs of a cluster for the dashboard: the rows of the table, and the page of each job and sweep.

All calls are made with the rights of one user, the viewer of a page or the owner of a kubeconfig.
An instance keeps the curves that it has read from the logs of leaders, so that later reads take
only the newest part of each log. It therefore lives as long as one request or one stream of a
viewer, and is never shared between viewers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from jaxlaunch.launcher.errors import ApiError, ClusterError
from jaxlaunch.launcher.jobs.logs import lines as pod_lines
from jaxlaunch.launcher.jobs.status import collect, roles
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.job_status import JobStatus, State, derive_status
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.labels import SWEEP_LABEL
from jaxlaunch.launcher.kubernetes.objects import parse_time
from jaxlaunch.launcher.report import headline, job_report, run_files, sweep_page
from jaxlaunch.launcher.report.job_report import ExplanationTexts, JobReport, RankLogs
from jaxlaunch.launcher.report.leader_log import LeaderLog
from jaxlaunch.launcher.report.run import Report
from jaxlaunch.launcher.report.sweep_page import RunMetric, SweepRow
from jaxlaunch.launcher.wording import escape_controls
from jaxlaunch.records.run_numbers import select_metrics

# Jobs with a small curve in the table, and the points of each of their curves.
MAX_CURVES, MAX_TABLE_POINTS = 32, 100
# Points of each curve on the page of a job, and in a comparison.
MAX_JOB_POINTS = 1000
# The same on the page of a sweep.
MAX_SWEEP_CURVES, MAX_SWEEP_POINTS = 100, 500
# A read of the table begins to read no further logs after this time. The next read continues.
HISTORY_TIMEOUT_S = 2.0
# Jobs whose pages are open, in one stream or on one machine.
MAX_PAGE_LOGS = 8
# Hosts whose logs are on the page of a job, and the lines that are read from each of them.
MAX_LOG_HOSTS, LOG_LINES = 8, 400
LOG_TIMEOUT_S = 5.0
# Keys that a sweep sets for each of its jobs.
_SWEEP_KEYS = ("name", "namespace", f"labels.{SWEEP_LABEL}")

Explain = Callable[[Snapshot], ExplanationTexts]


class JobTable(NamedTuple):
    """The jobs of a namespace as rows, their sweeps, and what could not be read."""

    rows: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    unread: list[str]


class JobPages(Protocol):
    """The reader of a cluster for a dashboard. Every method raises ClusterError."""

    def read_table(self, namespace: str) -> JobTable:
        """Return the jobs of a namespace."""

    def read_job(self, namespace: str, name: str, *, has_rank_logs: bool = True) -> Report | None:
        """Return the report of a job, or None if it does not exist.

        With `has_rank_logs`, it has the ends of the ranks' logs.
        """

    def read_sweep(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Return the data of a sweep's page, or None if no job has its label."""


class ClusterJobs:
    """The jobs of a cluster as one user may see them."""

    def __init__(self, cluster: Cluster, explain: Explain) -> None:
        self._cluster, self._explain = cluster, explain
        self._lock = threading.Lock()
        # The logs of the jobs in the table and of the job of a page, by the uid of the JobSet.
        self._table_logs: dict[str, StoredLog] = {}
        self._page_logs: dict[str, StoredLog] = {}

    def read_table(self, namespace: str) -> JobTable:
        """Return the jobs of a namespace. Raises ClusterError if they cannot be listed."""
        with self._lock:
            jobs = self._read_jobs(namespace)
        rows, groups = list[dict[str, Any]](), dict[str, dict[str, Any]]()
        for job in jobs:
            row = self._make_row(job)
            if (sweep := job.sweep) is not None:
                group_id = _group_id(namespace, sweep)
                is_max = groups.get(group_id, {}).get("is_max", job.is_higher_better)
                page = f"sweep/{namespace}/{sweep}"
                name = escape_controls(sweep)
                group = {"id": group_id, "name": name, "is_max": is_max, "page": page}
                groups.setdefault(group_id, group)
                row |= {"group": group_id, "changes": job.changes}
            rows.append(row)
        reasons = (reason for job in jobs for reason in job.snapshot.unread)
        return JobTable(rows, list(groups.values()), list(dict.fromkeys(reasons)))

    def read_sweep(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Return the data of a sweep's page, or None if no job has its label."""
        with self._lock:
            jobs = [job for job in self._read_jobs(namespace, sweep=name) if job.sweep == name]
        if not jobs:
            return None
        metric = next((job.metric.name for job in jobs if job.metric is not None), "loss")
        rows = [
            SweepRow(
                name=job.status.name,
                changes=job.changes,
                page=f"job/{namespace}/{job.status.name}",
                state=job.status.state.value.lower(),
                why=self._explain(job.snapshot).headline,
                step=job.numbers["step"],
                steps=job.numbers["steps"],
                duration_s=job.duration_s,
                metric=job.metric,
            )
            for job in jobs
        ]
        page = sweep_page.make_page(name, metric, jobs[0].is_higher_better, rows)
        return page | {"is_cluster": True}

    def read_job(
        self, namespace: str, name: str, *, has_rank_logs: bool = True
    ) -> JobReport | None:
        """Return the report of a job, or None if it does not exist. Raises ClusterError."""
        snapshot = collect.read_snapshot(self._cluster, namespace, name)
        if isinstance(snapshot, NoSuchJob):
            return None
        status, explanation = derive_status(snapshot), self._explain(snapshot)
        snapshot = roles.decisive_part(snapshot)
        leader = _find_leader(snapshot)
        with self._lock:
            log, unread_log = self._read_page_log(snapshot, leader)
        logs = self._read_rank_logs(snapshot, status, log) if has_rank_logs else RankLogs()
        return job_report.make_report(snapshot, status, explanation, log, logs, unread_log)

    def _read_jobs(self, namespace: str, sweep: str | None = None) -> list[TableJob]:
        """Read all jobs of a namespace, with the curves of as many as time allows.

        With `sweep`, only its jobs have curves, with more points.
        """
        max_curves, max_points = (
            (MAX_CURVES, MAX_TABLE_POINTS)
            if sweep is None
            else (MAX_SWEEP_CURVES, MAX_SWEEP_POINTS)
        )
        snapshots = collect.read_snapshots(self._cluster, namespace)
        deadline, may_read = time.monotonic() + HISTORY_TIMEOUT_S, True
        used_logs, jobs = dict[str, StoredLog](), list[TableJob]()
        for job_snapshot in snapshots:
            snapshot = roles.decisive_part(job_snapshot)
            leader, log = _find_leader(snapshot), None
            is_shown = sweep is None or job_report.read_labels(snapshot).get(SWEEP_LABEL) == sweep
            if is_shown and leader is not None and len(used_logs) < max_curves:
                uid, may_read_log = _job_uid(snapshot), "log" not in snapshot.unread_reasons
                stored = self._table_logs.get(uid) or StoredLog(
                    _make_log(snapshot, max_points, has_ranks=False), namespace
                )
                is_new = leader.pod not in stored.pods
                if is_new and may_read and may_read_log and time.monotonic() < deadline:
                    timeout_s = collect.LIST_TIMEOUT_S
                    try:
                        stored.read_history(self._cluster, leader, timeout_s)
                    except ClusterError as error:
                        # A viewer who may not read one log may not read the others. Another log is
                        # not read again while its pod is the same.
                        may_read = not _is_forbidden(error)
                if stored.pods:
                    stored.log.add_records(snapshot.records)
                    used_logs[uid], log = stored, stored.log
            job = TableJob(snapshot, derive_status(job_snapshot), log)
            if log is not None:
                sweep_page.keep_metric(log.metrics, log.evals, job.metric)
            jobs.append(job)
        others = {
            uid: stored for uid, stored in self._table_logs.items() if stored.namespace != namespace
        }
        self._table_logs = others | used_logs
        return jobs

    def _make_row(self, job: TableJob) -> dict[str, Any]:
        status = job.status
        name, why = escape_controls(status.name), self._explain(job.snapshot).headline
        page = f"job/{status.namespace}/{status.name}"
        return {
            "id": page,
            "page": page,
            "name": name,
            "state": status.state.value.lower(),
            "why": escape_controls(why)[:300],
            "step": job.numbers["step"],
            "steps": job.numbers["steps"],
            "goodput": job.numbers["goodput"],
            "restarts": status.restart_counts.total,
            "age_s": status.age_s,
            "duration_s": job.duration_s,
            "owner": status.queue or "",
            "where": f"namespace {status.namespace}",
            "tags": sweep_page.format_labels(job.tags),
            "metric": job.shown_metric(),
        }

    def _read_page_log(self, snapshot: Snapshot, leader: Host | None) -> tuple[LeaderLog, str]:
        """Return what the leader's log says, and why it could not be read."""
        if leader is None:
            reason = (
                "" if "pods" in snapshot.unread_reasons else "No pod of this job has a log yet."
            )
            if derive_status(snapshot).code is not None:
                reason = "The pods of this job are gone, and their logs with them."
            return _make_log(snapshot), reason
        uid, unread = _job_uid(snapshot), ""
        stored = self._page_logs.get(uid) or StoredLog(_make_log(snapshot), snapshot.namespace)
        if leader.pod not in stored.pods:
            try:
                stored.read_history(self._cluster, leader, collect.LOG_TIMEOUT_S)
            except ClusterError as error:
                unread = _explain_unread_log(error, leader, snapshot.namespace)
                # The next read of a page that is open tries again.
                stored.pods.discard(leader.pod)
        self._page_logs.pop(uid, None)
        self._page_logs[uid] = stored
        if len(self._page_logs) > MAX_PAGE_LOGS:
            del self._page_logs[next(iter(self._page_logs))]
        stored.log.add_records(snapshot.records)
        return stored.log, unread

    def _read_rank_logs(self, snapshot: Snapshot, status: JobStatus, log: LeaderLog) -> RankLogs:
        """Return the last lines of the ranks, first those on the host of the failed rank."""
        started_hosts = [host for host in snapshot.hosts if host.has_started]
        failed_rank = (status.verdict or {}).get("rank")
        if type(failed_rank) is int:
            failed_host = snapshot.members.host_of(failed_rank)
            started_hosts.sort(key=lambda host: (host.number != failed_host, host.number))
        lines, unread = dict[int, list[str]](), list[str]()
        for host in started_hosts[:MAX_LOG_HOSTS]:
            try:
                for rank, texts in self._read_tail(snapshot.namespace, host).items():
                    lines.setdefault(rank, []).extend(texts)
            except ClusterError as error:
                unread.append(_explain_unread_log(error, host, snapshot.namespace))
                if _is_forbidden(error):
                    break
        hidden = len(started_hosts) - MAX_LOG_HOSTS
        if hidden > 0:
            command = f"launcher logs {snapshot.name} -n {snapshot.namespace} --rank RANK"
            unread.append(f"The logs of {hidden} more hosts are not shown here: {command}")
        return RankLogs(lines, log.tails, unread)

    def _read_tail(self, namespace: str, host: Host) -> dict[int, list[str]]:
        """Return the last lines of a host's log by rank."""
        texts = self._cluster.log(
            namespace,
            host.pod,
            container=host.container,
            tail=LOG_LINES,
            timestamps=True,
            timeout_s=LOG_TIMEOUT_S,
        )
        lines_by_rank, line = dict[int, list[str]](), None
        for text in texts:
            line = pod_lines.parse_stamped_line(host.number, host.generation, text, line)
            if line.rank is not None:
                lines_by_rank.setdefault(line.rank, []).append(line.text)
        return lines_by_rank


@dataclasses.dataclass
class StoredLog:
    """The records in the logs of a job's leaders, and the pods whose logs were read."""

    log: LeaderLog
    namespace: str
    pods: set[str] = dataclasses.field(default_factory=set)

    def read_history(self, cluster: Cluster, leader: Host, timeout_s: float) -> None:
        """Read the log of a leader for the first time. Raises ClusterError."""
        self.pods.add(leader.pod)
        self.log.add_records(collect.read_history(cluster, self.namespace, leader, timeout_s))


@dataclasses.dataclass(frozen=True)
class TableJob:
    """A job of the table, with what its leader's log says if it was read."""

    snapshot: Snapshot
    status: JobStatus
    log: LeaderLog | None

    @property
    def sweep(self) -> str | None:
        """Name of the sweep that submitted the job."""
        return job_report.read_labels(self.snapshot).get(SWEEP_LABEL)

    @property
    def tags(self) -> Mapping[str, str]:
        """The job's own labels."""
        labels = job_report.read_labels(self.snapshot)
        return {key: value for key, value in labels.items() if key != SWEEP_LABEL}

    @property
    def changes(self) -> dict[str, str]:
        """The overrides with which the job was submitted, without those of every sweep."""
        pairs = (word.partition("=") for word in self.snapshot.submitted_words[1:])
        return {
            escape_controls(key)[: sweep_page.MAX_KEY_CHARS]: escape_controls(value)[
                : sweep_page.MAX_VALUE_CHARS
            ]
            for key, equals, value in pairs
            if equals and key not in _SWEEP_KEYS
        }

    @functools.cached_property
    def job(self) -> Mapping[str, Any]:
        """The job as its JobSet describes it."""
        return job_report.read_job(self.snapshot)

    @functools.cached_property
    def numbers(self) -> Mapping[str, Any]:
        """The numbers of the run. The log of a job that has ended may have more than its record."""
        numbers = self.status.run_numbers()
        if self.log is None or self.log.beat is None:
            return numbers
        newest = self.log.beat.run_numbers()
        return {name: newest[name] if value is None else value for name, value in numbers.items()}

    @functools.cached_property
    def metric(self) -> RunMetric | None:
        """The metric of the result, with its curve."""
        if self.log is None:
            return None
        return sweep_page.find_metric(self.log.metrics, self.log.evals, self.job, None)

    def shown_metric(self) -> dict[str, Any] | None:
        """Return the metric of the row: with a curve, or the newest value alone."""
        if (metric := self.metric) is not None:
            return metric.to_json()
        metrics = select_metrics(self.numbers["metrics"])
        if job_report.has_trainer(self.snapshot):
            metrics = {name.replace("eval_", "eval/", 1): value for name, value in metrics.items()}
        best, _ = run_files.best_metric(self.job)
        names = headline.result_names(metrics, best)
        if not names:
            return None
        value = float(f"{metrics[names[0]]:.6g}")
        return {"name": escape_controls(names[0]), "value": value, "spark": []}

    @property
    def is_higher_better(self) -> bool:
        """Whether higher values of the metric are better."""
        best, mode = run_files.best_metric(self.job)
        name = (self.shown_metric() or {}).get("name")
        return mode == "max" if name == best else bool(headline.is_higher_better(name or "loss"))

    @property
    def duration_s(self) -> float | None:
        """Seconds between the start of the pods and the end of the job, or now."""
        if self.status.lasted_s is not None:
            return self.status.lasted_s
        starts = (host.running.get("startedAt") for host in self.snapshot.hosts)
        times = [at for at in map(parse_time, starts) if at is not None]
        if not times or self.status.state is State.QUEUED:
            return None
        seconds = (self.snapshot.now.astimezone(UTC) - min(times)).total_seconds()
        return round(max(0.0, seconds), 1)


def _make_log(
    snapshot: Snapshot, max_points: int = MAX_JOB_POINTS, *, has_ranks: bool = True
) -> LeaderLog:
    return LeaderLog(
        _job_uid(snapshot),
        has_trainer=job_report.has_trainer(snapshot),
        max_points=max_points,
        has_ranks=has_ranks,
    )


def _find_leader(snapshot: Snapshot) -> Host | None:
    """Return host 0 if its main container has started, so that it has a log."""
    if not snapshot.is_ours:
        return None
    return next((host for host in snapshot.hosts if host.number == 0 and host.has_started), None)


def _job_uid(snapshot: Snapshot) -> str:
    return str(snapshot.jobset["metadata"].get("uid", ""))


def _group_id(namespace: str, sweep: str) -> str:
    return hashlib.sha256(f"{namespace}/{sweep}".encode()).hexdigest()[:24]


def _is_forbidden(error: ClusterError) -> bool:
    return isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN


def _explain_unread_log(error: ClusterError, host: Host, namespace: str) -> str:
    if _is_forbidden(error):
        return job_report.describe_missing_right("pods/log", namespace)
    reason = collect.explain_unread(error, host.node or "")
    return f"The log of pod {host.pod} could not be read: {reason}"
