"""One interface for a job on a cluster and a run on this machine, for whatever shows them."""

from __future__ import annotations

import abc
import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxlaunch import contract
from jaxlaunch.launcher.errors import ClusterError, UserError
from jaxlaunch.launcher.jobs.status import collect, job_status, roles
from jaxlaunch.launcher.jobs.status.job_status import JobStatus
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes import kubeconfig
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local import status as local_status
from jaxlaunch.launcher.local.run_folders import Run

# The explanations are imported late, because the table of jobs must not wait for them.
if TYPE_CHECKING:
    from jaxlaunch.launcher.diagnose.explain.explanation import Explanation

# The largest number of rows in a table of hosts.
MAX_HOSTS = 32
HOST_HEADS = ("HOST", "RANKS", "READY", "STATE", "NODE", "POD")
# Timeout of the check that no job on the cluster has the name of a local run.
NAME_CHECK_TIMEOUT_S = 3.0

Table = Sequence[Sequence[str]]
Say = Callable[[str], None]


def find_view(
    name: str, namespace: str | None, context: str | None, location: str | None, say: Say
) -> JobView:
    """Return the run or the job with a name. Raises UserError and ClusterError."""
    if (run := find_local_run(name, namespace, context, location, say)) is not None:
        return RunView(run)
    cluster = connect_cluster(name, context, location, say)
    return ClusterView(
        collect.read_snapshot(cluster, namespace or cluster.namespace, name), cluster
    )


def find_local_run(
    name: str, namespace: str | None, context: str | None, location: str | None, say: Say
) -> Run | None:
    """Return the run on this machine with a name, or None if the name is that of a job.

    Raises UserError if a run and a job have the name, and neither an option nor a path says which
    is meant.
    """
    asks_cluster = location == "cluster" or namespace is not None or context is not None
    if asks_cluster and location == "local":
        message = "--local selects this machine; -n and --context select a cluster."
        raise UserError(message, "give one of them.")
    if asks_cluster:
        return None
    folder = run_folders.find_run(name)
    if folder is None:
        if location == "local" or os.sep in name:
            reason = run_folders.describe_search(name)
            raise UserError(f"There is no run {name}: {reason}.", "`launcher list` shows them.")
        return None
    if location is None and os.sep not in name:
        _require_no_job(name, say)
    return run_folders.open_run(folder)


def _require_no_job(name: str, say: Say) -> None:
    """Raise UserError if the cluster has a job with the name of a run here."""
    if not kubeconfig.has_kubeconfig():
        return
    try:
        cluster = Cluster.connect(None)
        cluster.limit_call_time(NAME_CHECK_TIMEOUT_S)
        has_job = cluster.get(JOBSETS, name) is not None
    except ClusterError as error:
        question = "whether the cluster has a job of that name is unknown"
        say(f"{name} is the run here; {question}: {error}")
        return
    if has_job:
        places = f"a run on this machine and a job in namespace {cluster.namespace}."
        hint = f"say which: --local or --cluster; a path, such as runs/{name}, selects the run, "
        raise UserError(f"{name} is both {places}", f"{hint}too.")


def connect_cluster(name: str, context: str | None, location: str | None, say: Say) -> Cluster:
    """Connect to the cluster of a job. A ClusterError also says that no local run has the name."""
    try:
        return Cluster.connect(context, say)
    except ClusterError as error:
        if context is not None or location is not None:
            raise
        reason = run_folders.describe_search(name)
        message = f"There is no run {name} here ({reason}). {error.message}"
        raise ClusterError(message, error.hint) from None


class JobView(abc.ABC):
    """One job or run, read once, for every command that shows it.

    Attributes:
        unread: Sentences about what could not be read.
    """

    unread: Sequence[str] = ()

    @property
    @abc.abstractmethod
    def status(self) -> JobStatus:
        """State, numbers and restarts."""

    @property
    @abc.abstractmethod
    def explanation(self) -> Explanation:
        """The reason for the state, and advice."""

    @property
    def reason(self) -> str:
        """The reason for the state, or "" if the status shows it."""
        return ""

    @property
    def as_of(self) -> str:
        """The time of the numbers, or "" if they are live."""
        return ""

    @abc.abstractmethod
    def detail_tables(self) -> list[Table]:
        """Return the tables of -o wide, each with its header row."""


class RunView(JobView):
    """A run on this machine, from its folder and the live state of its agents."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @functools.cached_property
    def _live_status(self) -> local_status.LiveStatus | None:
        return local_status.ask_agents(self.run)

    @functools.cached_property
    def status(self) -> JobStatus:
        """State, numbers and restarts, from the files and the agents."""
        return local_status.run_status(self.run, self._live_status)

    @property
    def explanation(self) -> Explanation:
        """The reason for the state, and advice."""
        from jaxlaunch.launcher.local import run_explanation

        return run_explanation.explain_run(self.run, self._live_status)

    def detail_tables(self) -> list[Table]:
        """Return the phases of the ranks, and the seconds of each restart."""
        phases = {} if self._live_status is None else self._live_status.phases
        ranks = [("RANK", "PHASE"), *((str(rank), phases[rank]) for rank in sorted(phases))]
        return [table for table in (ranks, self._restart_table()) if len(table) > 1]

    def _restart_table(self) -> list[tuple[str, ...]]:
        """Return a row for each start and restart: the seconds until its first step, by cause."""
        restarts = () if self.run.summary is None else self.run.summary.restart_seconds
        used_causes = {cause for restart in restarts for cause in restart.seconds}
        causes = [cause for cause in contract.RESTART_CAUSES if cause in used_causes]
        table = [("ATTEMPT", "AFTER", "SECONDS", *(cause.upper() for cause in causes))]
        for restart in restarts:
            seconds = [restart.seconds.get(cause, 0.0) for cause in causes]
            cells = [f"{spent_s:.2f}" for spent_s in (sum(restart.seconds.values()), *seconds)]
            table.append((str(restart.attempt), restart.after or "-", *cells))
        return table


class ClusterView(JobView):
    """A job on a cluster, from its objects and logs."""

    def __init__(self, snapshot: Snapshot | NoSuchJob, cluster: Cluster | None = None) -> None:
        self._lookup, self.unread, self.cluster = snapshot, snapshot.unread, cluster

    @property
    def has_job(self) -> bool:
        """Whether the job exists."""
        return isinstance(self._lookup, Snapshot)

    @property
    def snapshot(self) -> Snapshot:
        """The objects of the job in the cluster. Raises UserError if there is no such job."""
        if isinstance(self._lookup, NoSuchJob):
            raise UserError(f"{self.explanation.headline}.", self.explanation.next_move)
        return self._lookup

    @functools.cached_property
    def status(self) -> JobStatus:
        """State, numbers and restarts, from the objects and the logs."""
        return job_status.derive_status(self.snapshot)

    @functools.cached_property
    def explanation(self) -> Explanation:
        """The reason for the state, and advice."""
        from jaxlaunch.launcher.diagnose.explain.explanation import explain_job

        return explain_job(self._lookup)

    @property
    def reason(self) -> str:
        """The reason for the state, or "" if the status shows it."""
        from jaxlaunch.launcher.diagnose.explain.explanation import diagnose_job
        from jaxlaunch.launcher.diagnose.explain.failures import explain_excess_eviction, is_oom
        from jaxlaunch.launcher.diagnose.text import Renderer

        answer, status = diagnose_job(self.snapshot).answer, self.status
        # Agents do not know who sent a signal, or what another container of their pod does.
        part = roles.decisive_part(self.snapshot)
        is_cause_unknown = is_oom(part) or explain_excess_eviction(part) is not None
        has_full_verdict = status.verdict is not None and not is_cause_unknown
        if (status.phase is not None or has_full_verdict) and answer.situation != "sidecar":
            return ""
        return Renderer(status.name, status.namespace).render(answer.headline)

    @property
    def as_of(self) -> str:
        """The time of the numbers, or "" if they are live."""
        return job_status.describe_as_of(self.status, self.snapshot.now)

    def detail_tables(self) -> list[Table]:
        """Return the table of hosts of each role. Those that are not ready are first."""
        tables = list[Table]()
        for part in roles.split_roles(self.snapshot).values() or (self.snapshot,):
            tables.append([HOST_HEADS, *job_status.list_host_rows(part, MAX_HOSTS)])
            if (hidden := len(part.hosts) - MAX_HOSTS) > 0:
                tables.append([(f"… and {hidden} more hosts",)])
        return tables
