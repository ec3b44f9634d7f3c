"""A submitted job or a run on this machine, as an object."""

from __future__ import annotations

import abc
import contextlib
import html
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlaunch import contract, regular_files
from jaxlaunch.launcher.client import ending, job_view
from jaxlaunch.launcher.client.job_view import ClusterView, JobView, RunView, Say
from jaxlaunch.launcher.errors import ClusterError, JobFailedError, UserError, WaitTimeoutError
from jaxlaunch.launcher.jobs import dependents, lifecycle
from jaxlaunch.launcher.jobs.logs import follow, lines
from jaxlaunch.launcher.jobs.logs.lines import Line, LogWindow, Selection
from jaxlaunch.launcher.jobs.status import collect
from jaxlaunch.launcher.jobs.status.job_status import FINAL_STATES, JobStatus, State
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.local import logs as local_logs
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.records import codec
from jaxlaunch.records.log_lines import BeatLine
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import layout
from jaxlaunch.runs.journal import STEP

if TYPE_CHECKING:
    from jaxlaunch.launcher.diagnose.explain.explanation import Explanation

# Gets the messages that commands print. Without a handler, Python would print its warnings.
LOGGER = logging.getLogger("jaxlaunch")
LOGGER.addHandler(logging.NullHandler())
_MAX_JOURNAL_BYTES = 1 << 30
# The last lines of each rank's log in a bundle.
_MAX_BUNDLE_LINES = 20_000


def attach(name: str, *, namespace: str | None = None, context: str | None = None) -> Handle:
    """Return the handle of a run on this machine, or of a job that was submitted.

    **Arguments:**

    - `name`: the name of a run below runs/, its folder, or the name of a job.
    - `namespace`: the namespace of a job; by default that of the kubeconfig's context.
    - `context`: the context of the kubeconfig; by default the current one. With either, only the
      cluster is asked.

    **Returns:**

    A [`Handle`](#handle).

    **Raises:**

    [`UserError`](#usererror) if there is none, or a run and a job have the name.

    **Example:**

    ```python
    import jaxlaunch

    handle = jaxlaunch.attach("runs/digits")
    print(handle.status().state, handle.explain().headline)
    ```
    """
    handle = find_handle(name, namespace, context, None, LOGGER.info)
    if isinstance(handle, JobHandle):
        handle.require_job()
    return handle


def find_handle(
    name: str, namespace: str | None, context: str | None, location: str | None, say: Say
) -> Handle:
    """Return the handle of a run or of a job, which need not exist."""
    run = job_view.find_local_run(name, namespace, context, location, say)
    if run is not None:
        return RunHandle(run.folder)
    cluster = job_view.connect_cluster(name, context, location, say)
    return JobHandle(cluster, namespace or cluster.namespace, name)


class Handle(abc.ABC):
    """A run on this machine, or a job on a cluster; in a notebook it shows its state.

    `name` is its name, and `namespace` that of its cluster, empty for a run on this machine.

    **Example:**

    ```python
    import jaxlaunch

    handle = jaxlaunch.attach("runs/digits")
    print(handle.result["cause"])
    for line in handle.logs(rank=0, tail=3):
        print(line)
    ```
    """

    def __init__(self, name: str, namespace: str) -> None:
        self.name, self.namespace = name, namespace

    def __repr__(self) -> str:
        place = f", namespace={self.namespace!r}" if self.namespace else ""
        return f"jaxlaunch.attach({self.name!r}{place})"

    def _repr_html_(self) -> str:
        """Return the state for a notebook."""
        try:
            status = self.status()
        except UserError as error:
            return f"<b>{html.escape(self.name)}</b>: {html.escape(error.message)}"
        text = f"<b>{html.escape(self.name)}</b>: {status.state.value}"
        if status.step is not None:
            text += f", step {status.step}" + (
                "" if status.steps is None else f" of {status.steps}"
            )
        for label, value in status.describe_numbers():
            text += f"<br>{html.escape(label)}: {html.escape(value)}"
        if status.verdict is not None and status.code != contract.DONE:
            text += f"<br>{html.escape(status.verdict['message'])}"
        return text

    @abc.abstractmethod
    def _read_view(self) -> JobView:
        """Read the job once."""

    @abc.abstractmethod
    def _await_end(self, timeout_s: float | None, show: Callable[[Line], None] | None) -> JobStatus:
        """Return the status of the job when it has ended."""

    @abc.abstractmethod
    def _read_lines(self, selection: Selection, tail: int | None, report_unread: Say) -> list[Line]:
        """Return the selected lines. `report_unread` is called with what could not be read."""

    def status(self) -> JobStatus:
        """Return the state and the numbers: the fields of `launcher status -o json`."""
        return self._read_view().status

    def explain(self) -> Explanation:
        """Return why it waits, what it does or how it ended: the fields of `launcher explain`."""
        return self._read_view().explanation

    def wait(
        self, timeout_s: float | None = None, *, on_line: Callable[[str], None] | None = None
    ) -> JobStatus:
        """Wait for the end, and return the status. `on_line` is called with each line of the log.

        Raises [`JobFailedError`](#jobfailederror) if it fails or is stopped, and
        [`WaitTimeoutError`](#waittimeouterror) after `timeout_s` seconds, while it continues.
        """
        status = self.status()
        if status.state not in FINAL_STATES or on_line is not None:
            status = self._await_end(timeout_s, show_texts(on_line))
        if status.state is State.DONE:
            return status
        code = contract.PREEMPTED if status.code is None else status.code
        reason = f": {status.verdict['message']}" if status.verdict else ""
        message = f"{self.name} {status.state.value}{reason}"
        raise JobFailedError(message, code, status.verdict)

    def logs(
        self, rank: int | None = None, *, tail: int | None = None, grep: str | None = None
    ) -> list[str]:
        """Return the lines of all ranks, each after its `[RANK]`, or those of one `rank`.

        `tail` is the number of last lines, and `grep` a regular expression that lines match.
        """
        selection = lines.parse_selection(None if rank is None else str(rank), grep)
        log = self._read_lines(selection, tail, LOGGER.warning)
        return [line.text if rank is not None else line.text_with_rank() for line in log]

    @property
    def result(self) -> Mapping[str, Any] | None:
        """The result of the newest attempt, a dict with `cause`, `code`, `message` and `rank`.

        It is None while there is none.
        """
        return self.status().verdict

    @abc.abstractmethod
    def metrics(self) -> list[dict[str, Any]]:
        """Return a row for each report of metrics: `step` and numbers by name.

        Of a job on a cluster, these are the rows that the log of host 0 still has.
        """

    def bundle(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write all information about the job to an archive, and return its path.

        It has the job, its objects, events, the ends of its logs, summaries and versions; by
        default it is NAME.bundle.tar.gz. Values of environment variables are left out, and what
        looks like a credential is hidden: read the files before you send them. `launcher explain`
        reads it.
        """
        from jaxlaunch.launcher.client import bundle

        file = Path(f"{self.name}{bundle.SUFFIX}" if path is None else path)
        view = self._read_view()
        bundle.write_bundle(view, self._list_logs(), file)
        return file

    def _list_logs(self) -> Iterator[tuple[str, str]]:
        """Yield the log of each rank, as the name of a file and a text."""
        log, unread = list[Line](), list[str]()
        try:
            log = self._read_lines(Selection(), _MAX_BUNDLE_LINES, unread.append)
        except UserError as error:
            unread.append(str(error))
        if unread:
            yield "logs/unread.txt", "\n".join([*unread, ""])
        texts = dict[str, list[str]]()
        for line in log:
            texts.setdefault(
                f"agent-{line.host}" if line.rank is None else f"rank-{line.rank}", []
            ).append(line.text)
        for name, rank_lines in sorted(texts.items()):
            yield f"logs/{name}.log", "\n".join([*rank_lines, ""])

    @abc.abstractmethod
    def stop(self, *, timeout_s: float | None = None) -> None:
        """Make it save and end, and wait until it has; by default for its grace and a minute.

        Raises [`WaitTimeoutError`](#waittimeouterror) if that takes longer.
        """

    @abc.abstractmethod
    def delete(self) -> None:
        """Delete the job, or the run's folder below runs/ with its checkpoints.

        Raises [`UserError`](#usererror) for a run that is running.
        """


def show_texts(on_line: Callable[[str], None] | None) -> Callable[[Line], None] | None:
    """Return the function of a line that calls a function of its text."""
    return None if on_line is None else lambda line: on_line(line.text_with_rank())


class RunHandle(Handle):
    """A run on this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.name, "")
        self.folder = folder

    def __repr__(self) -> str:
        return f"jaxlaunch.attach({str(self.folder)!r})"

    def _read_view(self) -> RunView:
        return RunView(run_folders.open_run(self.folder))

    def _await_end(self, timeout_s: float | None, show: Callable[[Line], None] | None) -> JobStatus:
        limit_s = math.inf if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        run = run_folders.open_run(self.folder)
        if show is not None:
            per_host = 1 if run.job is None else run.job.process_count_per_host
            local_logs.follow_logs(run, Selection(), None, per_host, show, timeout_s)
        self._wait(limit_s, deadline)
        return self.status()

    def _wait(self, limit_s: float, deadline: float) -> None:
        run = run_folders.open_run(self.folder)
        if not run_folders.wait_for_end(run, deadline - time.monotonic()):
            message = f"Run {self.name} has not ended after {limit_s:.0f} s."
            raise WaitTimeoutError(message, "it continues.")

    def _read_lines(self, selection: Selection, tail: int | None, report_unread: Say) -> list[Line]:
        run = run_folders.open_run(self.folder)
        per_host = 1 if run.job is None else run.job.process_count_per_host
        logs = local_logs.read_logs(run, run.start_folder, selection, tail, per_host)
        return [line for _, _, rank_lines in logs for line in rank_lines]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl."""
        rows = list[dict[str, Any]]()
        with contextlib.suppress(FileNotFoundError):
            path = self.folder / layout.METRICS
            data = regular_files.read_bounded(path, _MAX_JOURNAL_BYTES, below=self.folder)
            for line in data.splitlines():
                # The last line may be incomplete.
                with contextlib.suppress(ValueError):
                    rows.append(codec.parse_json(line, drop_huge=True))
        return rows

    def stop(self, *, timeout_s: float | None = None) -> None:
        """Make it save and end, as Ctrl-C does."""
        run = run_folders.open_run(self.folder)
        limit_s = ending.stop_limit_s(run) if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        run_folders.stop_run(run)
        self._wait(limit_s, deadline)

    def delete(self) -> None:
        """Delete its folder."""
        ending.check_deletable(self.folder)
        ending.delete_folder(self.folder)


class JobHandle(Handle):
    """A job on a cluster."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        super().__init__(name, namespace)
        self._cluster = cluster

    def require_job(self) -> Obj:
        """Return the JobSet. Raises UserError if there is none, or another tool made it."""
        return dependents.get_managed_jobset(self._cluster, self.name, self.namespace)

    def _read_view(self) -> ClusterView:
        snapshot = collect.read_snapshot(self._cluster, self.namespace, self.name)
        return ClusterView(snapshot, self._cluster)

    def _await_end(self, timeout_s: float | None, show: Callable[[Line], None] | None) -> JobStatus:
        jobset = self.require_job()
        if show is None:
            return lifecycle.wait_for_end(self._cluster, jobset, timeout_s, LOGGER.info)
        wait = lifecycle.BackgroundWait(self._cluster, jobset, timeout_s)
        follow.follow_logs(
            self._cluster,
            self.namespace,
            self.name,
            selection=Selection(),
            show=show,
            say=LOGGER.info,
            should_stop=wait.is_over,
        )
        return wait.result()

    def _read_lines(self, selection: Selection, tail: int | None, report_unread: Say) -> list[Line]:
        snapshot = self._read_view().snapshot
        sources = [
            source
            for host in snapshot.hosts
            if host.has_started
            and (source := lines.log_source(snapshot.jobset, host, snapshot.members)).may_match(
                selection
            )
        ]
        unread = list[str]()
        log = lines.read_logs(
            self._cluster,
            self.namespace,
            sources,
            selection,
            LogWindow(tail=tail),
            report_unread=unread.append,
            say=LOGGER.info,
        )
        shown = [line for line in log if line.rank is not None or selection.ranks is None]
        if unread and len(unread) >= len(sources):
            raise ClusterError("\n".join(unread))
        for message in unread:
            report_unread(message)
        return shown

    def metrics(self) -> list[dict[str, Any]]:
        """Return the newest metrics of the heartbeats in the log of host 0."""
        rows = dict[int, dict[str, Any]]()
        for record in self._read_view().snapshot.records:
            if isinstance(record, BeatLine) and record.step is not None and record.metrics:
                rows[record.step] = {STEP: record.step, **record.metrics, "time": record.at}
        return list(rows.values())

    def stop(self, *, timeout_s: float | None = None) -> None:
        """Suspend its JobSet, and wait until its pods have ended."""
        say = LOGGER.info
        end = ending.stop_job(
            self._cluster, self.namespace, self.name, timeout_s, should_wait=True, say=say
        )
        if not end.is_over:
            message = f"The pods of {self.name} are not gone after {end.limit_s:.0f} s."
            raise WaitTimeoutError(message, f"see `launcher explain {self.name}`.")

    def delete(self) -> None:
        """Delete its JobSet, and wait until it is gone."""
        jobset = self.require_job()
        dependents.delete_job(self._cluster, jobset)
        if not ending.wait_until_deleted(self._cluster, jobset):
            message = f"Job {self.name} is still being deleted."
            raise WaitTimeoutError(message, f"see `launcher explain {self.name}`.")


def failure_of_run(name: str, verdict: Verdict) -> JobFailedError:
    """Return the error for a run on this machine that did not complete."""
    message = f"{name}: {verdict.message}"
    return JobFailedError(message, verdict.code, verdict.to_json())
