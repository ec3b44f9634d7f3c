"""Following the logs of all pods of a job, including the pods of later generations.

Each watch and each followed log runs in a daemon thread, which puts its results into one queue as
callables. The main thread takes them from the queue and calls them, so that only one thread prints
and changes state.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jaxlaunch.launcher.errors import ApiError, UnreachableError, UserError
from jaxlaunch.launcher.jobs.lifecycle import deleted_error
from jaxlaunch.launcher.jobs.logs import lines as logs
from jaxlaunch.launcher.jobs.logs.lines import (
    FULL_WINDOW,
    MAX_STREAMS,
    Line,
    LogSource,
    LogWindow,
    Selection,
)
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, PODS, Kind
from jaxlaunch.launcher.kubernetes.labels import NAME_LABEL, REPLICATED_LABEL
from jaxlaunch.launcher.kubernetes.objects import Obj, is_suspended, terminal_state
from jaxlaunch.launcher.kubernetes.watch import Outage, is_transient

POLL_PERIOD_S = 1.0
# Pause before a broken stream is opened again.
RECONNECT_PAUSE_S = 1.0
# Limit for reading the rest of the logs at the end, counted from the last line.
DRAIN_TIMEOUT_S = 10.0
# Status of the API server's response if the pod of a log no longer exists.
NOT_FOUND_STATUS = 404
# If the terminal is slow, the threads wait when it is this many lines behind.
MAX_QUEUED_LINES = 10_000

Show = Callable[[Line], None]
Say = Callable[[str], None]
# Called with the type of the watch event and the object.
OnEvent = Callable[[str, dict[str, Any]], None]


def follow_logs(
    cluster: Cluster,
    namespace: str,
    name: str,
    *,
    selection: Selection,
    show: Show,
    say: Say,
    window: LogWindow = FULL_WINDOW,
    should_stop: Callable[[], bool] = lambda: False,
    role: str | None = None,
) -> None:
    """Show the selected lines of a job as they are written, until its JobSet ends.

    Pods of later generations are followed too, and a broken stream is continued where it broke. At
    the end the rest of the logs of ended pods is read: until no line comes for DRAIN_TIMEOUT_S or,
    if the JobSet continues, for at most that time.

    Args:
        cluster: The cluster.
        namespace: Namespace of the JobSet.
        name: Name of the JobSet.
        selection: Lines to show.
        show: Called with each line, on the calling thread.
        say: Called with messages about generations, outages and logs that were not read to the end.
        window: Start of the lines.
        should_stop: Called once a second. If it returns True, no more lines are waited for.
        role: The role whose pods are followed, in a job with roles.

    Raises:
        ClusterError: If the JobSet is deleted, the cluster rejects a request or cannot be reached.
        UserError: If more than MAX_STREAMS pods are selected.
    """
    _Follower(cluster, namespace, name, selection, show, say, window, role).run(should_stop)


class Notices:
    """Messages about generations and suspension, derived from changes of pods and the JobSet."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._ended: set[int] = set()
        self._is_suspended = False

    def host_notices(self, host: Host) -> Iterator[str]:
        """Yield a message if a generation has begun, and one if it has ended, each only once."""
        if self._generation is None or host.generation > self._generation:
            if host.generation > 0:
                yield f"generation {host.generation} begins"
            self._generation = host.generation
        if host.termination_report is not None and host.generation not in self._ended:
            self._ended.add(host.generation)
            yield f"generation {host.generation} ended: {host.termination_report.verdict.message}"

    def jobset_notices(self, jobset: Obj) -> Iterator[str]:
        """Yield a message if the JobSet was suspended since the last call."""
        if is_suspended(jobset) and not self._is_suspended:
            yield "suspended: no pods until it is resumed"
        self._is_suspended = is_suspended(jobset)


class ShownLines:
    """Detects lines of one log that were shown before.

    A stream can be opened again at a whole second, so it repeats the lines since then.
    """

    def __init__(self) -> None:
        # Timestamp of the newest line.
        self.newest = ""
        # Number of lines with that timestamp, which the pieces of one long line share.
        self._count = 0
        # Number of these that the stream has yet to repeat, or None after the repeated lines.
        self._repeated_count: int | None = None

    def restart_stream(self) -> None:
        """Prepare for a reopened stream, which begins at the newest line or before it."""
        self._repeated_count = self._count if self.newest else None

    def is_new(self, line: Line) -> bool:
        """Return whether a line is new, and count it as shown if it is."""
        if self._repeated_count is not None:
            if line.at < self.newest:
                return False
            if line.at == self.newest and self._repeated_count:
                self._repeated_count -= 1
                return False
            self._repeated_count = None
        if line.at > self.newest:
            self.newest, self._count = line.at, 0
        self._count += line.at == self.newest
        return True


class _Follower:
    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        selection: Selection,
        show: Show,
        say: Say,
        window: LogWindow,
        role: str | None,
    ) -> None:
        self._cluster, self._namespace, self._name = cluster, namespace, name
        self._selection, self._show, self._say, self._window = selection, show, say, window
        self._metadata, self._role = {"name": name, "namespace": namespace}, role
        role_label = "" if role is None else f",{REPLICATED_LABEL}={role}"
        self._pod_labels = f"{NAME_LABEL}={name}{role_label}"
        self._outage = Outage(cluster, say)
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue(MAX_QUEUED_LINES)
        self._notices = Notices()
        self._jobset: Obj = {}
        # Names of the pods whose logs were opened, and of those whose logs are still read.
        self._attached_pods: set[str] = set()
        self._open_pods: set[str] = set()
        # Whether to stop waiting for new lines.
        self._is_over = False
        # Whether the JobSet has ended, so that its pods write no more.
        self._has_ended = False
        # Whether the JobSet was deleted before it had ended, so that its result is unknown.
        self._is_deleted = False

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Show lines until the JobSet ends or the callback returns True."""
        jobset = self._outage.call_with_retries(
            partial(self._cluster.get, JOBSETS, self._name, self._namespace)
        )
        if jobset is None:
            raise deleted_error(self._cluster, self._metadata)
        self._jobset = jobset if self._role is None else hosts.select_role(jobset, self._role)
        fields, labels = f"metadata.name={self._name}", self._pod_labels
        self._start_thread(self._watch_objects, JOBSETS, "", fields, self._on_jobset)
        self._start_thread(self._watch_objects, PODS, labels, "", self._on_pod)
        checked_at = time.monotonic()
        while not self._is_over:
            self._handle_next(POLL_PERIOD_S)
            if time.monotonic() - checked_at >= POLL_PERIOD_S:
                self._outage.report_outage()
                self._is_over, checked_at = self._is_over or should_stop(), time.monotonic()
        self._drain_logs()
        if self._is_deleted:
            raise deleted_error(self._cluster, self._metadata)

    def _drain_logs(self) -> None:
        """Read the rest of the logs, also of pods that the watch has not reported yet."""
        labels, deadline = self._pod_labels, time.monotonic() + DRAIN_TIMEOUT_S
        list_pods = partial(self._cluster.list, PODS, self._namespace, labels=labels)
        try:
            pods = self._outage.call_with_retries(list_pods, deadline)
        except TimeoutError:
            pods = []
        for pod in pods:
            self._on_pod("MODIFIED", pod)
        # The log of a pod that still runs has no end.
        current_hosts = [host for pod in pods for host in hosts.newest_hosts(self._jobset, [pod])]
        running_pods = {
            host.pod for host in current_hosts if not (host.has_ended or host.is_leaving)
        }
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while unfinished_pods := self._open_pods - (set() if self._has_ended else running_pods):
            if time.monotonic() >= deadline:
                break
            if self._handle_next(0.1) and self._has_ended:
                deadline = time.monotonic() + DRAIN_TIMEOUT_S
        if unfinished_pods:
            hint = f"`launcher logs -n {self._namespace} {self._name}` reads them again"
            self._say(f"not read to the end: {', '.join(sorted(unfinished_pods))}; {hint}")

    def _handle_next(self, timeout_s: float) -> bool:
        """Handle the next item of the queue. Return False if none comes within this time."""
        try:
            callback = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return False
        callback()
        return True

    # --- events of the watches --------------------------------------------------------------------

    def _on_jobset(self, event: str, jobset: dict[str, Any]) -> None:
        is_replaced = jobset["metadata"].get("uid") not in (None, self._jobset["metadata"]["uid"])
        if event == "DELETED" or is_replaced:
            # If the JobSet had ended before, it was deleted by its ttl.
            self._is_deleted = not (self._has_ended or terminal_state(jobset))
            self._is_over = self._has_ended = True
        elif terminal_state(jobset) is not None:
            self._is_over = self._has_ended = True
        else:
            for text in self._notices.jobset_notices(jobset):
                self._say(text)

    def _on_pod(self, event: str, pod: dict[str, Any]) -> None:
        if "spec" not in pod:
            # The pod was deleted while the watch was interrupted, so only its name is known.
            return
        for host in hosts.newest_hosts(self._jobset, [pod]):
            for text in self._notices.host_notices(host):
                self._say(text)
            source = logs.log_source(self._jobset, host)
            is_new = host.has_started and host.pod not in self._attached_pods
            if not is_new or not source.may_match(self._selection):
                continue
            if len(self._open_pods) >= MAX_STREAMS:
                limit = f"--follow reads at most {MAX_STREAMS} pods at once"
                hint = f"select ranks: --rank 0-{MAX_STREAMS - 1}."
                raise UserError(f"{limit}, and more are selected.", hint)
            self._attached_pods.add(source.pod)
            self._open_pods.add(source.pod)
            self._start_thread(self._read_log, source)

    # --- threads ----------------------------------------------------------------------------------

    def _start_thread(self, target: Callable[..., None], *args: Any) -> None:
        """Run `target` in a daemon thread, because a stream without new lines cannot be stopped."""

        def run_guarded() -> None:
            try:
                target(*args)
            except Exception as error:
                # The main thread raises it again in run().
                self._inbox.put(partial(_raise_error, error))

        threading.Thread(target=run_guarded, name=f"follow {target.__name__}", daemon=True).start()

    def _watch_objects(self, kind: Kind, labels: str, fields: str, on_event: OnEvent) -> None:
        for event, obj in self._cluster.watch(kind, self._namespace, labels=labels, fields=fields):
            self._inbox.put(partial(on_event, event, obj))

    def _read_log(self, source: LogSource) -> None:
        """Read one pod's log to its end. A broken stream is continued after the last line.

        A stream also ends without an error, for example when the kubelet is started again. What the
        container wrote between that and its own end is read by one more request.
        """
        shown, window = ShownLines(), self._window
        is_last_read = False
        while True:
            pause_s = RECONNECT_PAUSE_S
            try:
                lines = logs.read_pod_log(
                    self._cluster, self._namespace, source, self._selection, window, follow=True
                )
                for line in lines:
                    if shown.is_new(line):
                        self._inbox.put(partial(self._show, line))
                if is_last_read:
                    break
                if self._has_ended or not self._is_running(source):
                    is_last_read, pause_s = True, 0.0
            except UnreachableError:
                pass
            except ApiError as error:
                # After a transient error, such as a node that does not answer, it tries again.
                if not is_transient(error):
                    if error.status != NOT_FOUND_STATUS:
                        message = logs.describe_unreadable(source.pod, error, source.node)
                        self._inbox.put(partial(self._say, message))
                    break
            time.sleep(pause_s)
            window = LogWindow(since=shown.newest) if shown.newest else window
            shown.restart_stream()
        self._inbox.put(partial(self._open_pods.discard, source.pod))

    def _is_running(self, source: LogSource) -> bool:
        """Return whether the container of a log runs, so that it may write more."""
        # A user who may follow logs may list pods, but perhaps not get one.
        fields = f"metadata.name={source.pod}"
        pods = self._cluster.list(PODS, self._namespace, fields=fields)
        return any(host.running for host in hosts.newest_hosts(self._jobset, pods))


def _raise_error(error: Exception) -> None:
    raise error
