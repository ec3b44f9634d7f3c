"""A job's lines as they are written: attaches to every pod that starts, and to those of the next generation."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from launcher import hosts, podlogs
from launcher.cluster import Cluster
from launcher.errors import ApiError, Unreachable, UserError
from launcher.hosts import Host
from launcher.jobset import NAME_LABEL
from launcher.kinds import JOBSETS, PODS, Kind
from launcher.logs import Line, Select
from launcher.objects import Obj
from launcher.podlogs import EVERYTHING, Source, Window

TICK_S = 1.0
REATTACH_S = 1.0  # after a stream broke
DRAIN_S = 10.0  # for what ended pods have still to say
GONE = 404  # the pod, and its log with it
MAX_QUEUED = 10_000  # lines a slow terminal may be behind

Show = Callable[[Line], None]
Say = Callable[[str], None]
See = Callable[[str, dict[str, Any]], None]


def follow(
    cluster: Cluster,
    namespace: str,
    name: str,
    *,
    select: Select,
    show: Show,
    say: Say,
    window: Window = EVERYTHING,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Gives `show` every line that `select` wants, on the calling thread, until JobSet `name` ends or is deleted.

    Restarts are lived through: `say` hears how a generation ended and that the next begins. `until` is asked once a
    second and ends it earlier. What pods that have ended still have to say is shown first, for at most DRAIN_S.
    A stream that breaks is taken up where it broke. Raises ClusterError when the cluster refuses or cannot be reached,
    UserError when more than podlogs.STREAMS pods are wanted at once.
    """
    _Follower(cluster, namespace, name, select, show, say, window).run(until)


class Scenes:
    """What is to be said as pods and the JobSet change. Knows no cluster."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._judged: set[int] = set()
        self._is_suspended = False

    def of_host(self, host: Host) -> Iterator[str]:
        """That a newer generation begins, and how one ended: each once."""
        if self._generation is None or host.generation > self._generation:
            if host.generation > 0:
                yield f"generation {host.generation} begins"
            self._generation = host.generation
        if host.farewell is not None and host.generation not in self._judged:
            self._judged.add(host.generation)
            yield f"generation {host.generation} ended: {host.farewell['verdict']['message']}"

    def of_jobset(self, jobset: Obj) -> Iterator[str]:
        is_suspended = bool(jobset["spec"].get("suspend"))
        if is_suspended and not self._is_suspended:
            yield "suspended: no pods until it is resumed"
        self._is_suspended = is_suspended


def has_ended(jobset: Obj) -> bool:
    """Whether a JobSet is Completed or Failed for good."""
    return bool(jobset.get("status", {}).get("terminalState"))


class _Follower:
    def __init__(
        self, cluster: Cluster, namespace: str, name: str, select: Select, show: Show, say: Say, window: Window
    ) -> None:
        self._cluster, self._namespace, self._name = cluster, namespace, name
        self._select, self._show, self._say, self._window = select, show, say, window
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue(MAX_QUEUED)
        self._scenes = Scenes()
        self._jobset: Obj = {}
        self._attached: set[str] = set()  # pods, ended ones too
        self._open: set[str] = set()
        self._is_over = False

    def run(self, until: Callable[[], bool]) -> None:
        self._jobset = self._cluster.get(JOBSETS, self._name, self._namespace) or {}
        if not self._jobset:
            return
        self._start(self._watch, JOBSETS, "", f"metadata.name={self._name}", self._see_jobset)
        self._start(self._watch, PODS, f"{NAME_LABEL}={self._name}", "", self._see_pod)
        asked_at = time.monotonic()
        while not self._is_over:
            self._take(TICK_S)
            if time.monotonic() - asked_at >= TICK_S:
                self._is_over, asked_at = self._is_over or until(), time.monotonic()
        self._drain()

    def _drain(self) -> None:
        """The pods' own watch may be behind the JobSet's: they are asked for once more."""
        for pod in self._cluster.list(PODS, self._namespace, labels=f"{NAME_LABEL}={self._name}"):
            self._see_pod("MODIFIED", pod)
        end = time.monotonic() + DRAIN_S
        while self._open and time.monotonic() < end:
            self._take(0.1)

    def _take(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=seconds)()

    # --- what is seen -------------------------------------------------------------------------------------------------

    def _see_jobset(self, event: str, jobset: dict[str, Any]) -> None:
        if event == "DELETED" or has_ended(jobset):
            self._is_over = True
        else:
            for text in self._scenes.of_jobset(jobset):
                self._say(text)

    def _see_pod(self, event: str, pod: dict[str, Any]) -> None:
        if "spec" not in pod:
            return  # gone while the watch was away: nothing but its name is known
        (host,) = hosts.newest(self._jobset, [pod])
        for text in self._scenes.of_host(host):
            self._say(text)
        source = podlogs.source(self._jobset, host)
        if host.has_started and host.pod not in self._attached and self._select.wants_any(source.ranks):
            self._attach(source)

    def _attach(self, source: Source) -> None:
        if len(self._open) >= podlogs.STREAMS:
            raise UserError(
                f"more than {podlogs.STREAMS} pods are to be followed at once.",
                f"name the ranks: --rank 0-{podlogs.STREAMS - 1}.",
            )
        self._attached.add(source.pod)
        self._open.add(source.pod)
        self._start(self._read, source)

    def _close(self, source: Source) -> None:
        self._open.discard(source.pod)

    # --- threads ------------------------------------------------------------------------------------------------------

    def _start(self, body: Callable[..., None], *args: Any) -> None:
        """A daemon: a stream that says nothing more cannot be ended from here."""

        def guarded() -> None:
            try:
                body(*args)
            except Exception as error:  # raised again where somebody listens
                self._inbox.put(partial(_raise, error))

        threading.Thread(target=guarded, name=f"follow {body.__name__}", daemon=True).start()

    def _watch(self, kind: Kind, labels: str, fields: str, see: See) -> None:
        for event, found in self._cluster.watch(kind, self._namespace, labels=labels, fields=fields):
            self._inbox.put(partial(see, event, found))

    def _read(self, source: Source) -> None:
        """One pod's lines to their end. Broken off, it goes on after the last line that came."""
        newest, window = "", self._window
        while True:
            try:
                for line in podlogs.lines(self._cluster, self._namespace, source, self._select, window, follow=True):
                    if line.at > newest:
                        newest = line.at
                        self._inbox.put(partial(self._show, line))
                break
            except Unreachable:
                pass
            except ApiError as error:
                if error.status < 500:  # else its node may come back
                    self._give_up(source, error)
                    break
            time.sleep(REATTACH_S)
            window = Window(since=newest) if newest else window
        self._inbox.put(partial(self._close, source))

    def _give_up(self, source: Source, error: ApiError) -> None:
        if error.status != GONE:
            self._inbox.put(partial(self._say, podlogs.unreadable(source.pod, error)))


def _raise(error: Exception) -> None:
    raise error
