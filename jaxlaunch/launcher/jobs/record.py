"""Writes on a JobSet how far its job was, for whoever asks when its pods are gone."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from jaxlaunch.contract import ANNOTATION
from jaxlaunch.launcher.errors import ApiError, ClusterError
from jaxlaunch.launcher.jobs.status import agent_report, leader_log
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.records.log_lines import Beat, Line, Recorded

_GONE = (404, 409)  # the JobSet, or one of its name came after it
_MAX_REFUSAL = 240  # characters


def of(seen: Snapshot, when: str) -> Recorded | None:
    """How far a job is, by what its pods report now; None where they report nothing. `when` is a key of WHEN."""
    report, known = agent_report.merge(seen.records, seen.hosts), seen.recorded
    newest = report.verdict if when in ("stopped", "ended") else report.last
    if report.heartbeat is None and newest is None:
        return None
    beat = report.heartbeat or Beat()
    found = Recorded(
        uid=seen.jobset["metadata"].get("uid", ""),
        at=seen.now.timestamp(),
        when=when,
        attempt=max(beat.attempt, 0 if newest is None else newest.attempt),
        generation=max(beat.generation, 0 if newest is None else newest.generation),
        step=report.step,
        committed=report.committed,
        goodput=report.goodput,
        ends=report.ends_by_cause,
        verdict=None if newest is None else newest.verdict,
    )
    return found if known is None or known.attempt != found.attempt else _completed(found, known)


def _completed(found: Recorded, known: Recorded) -> Recorded:
    """With what was known before of the same attempt, where the leader's log can no longer be read."""
    missing = [name for name in ("step", "committed", "goodput", "ends") if getattr(found, name) is None]
    return dataclasses.replace(found, **{name: getattr(known, name) for name in missing})


def write(cluster: Cluster, seen: Snapshot, when: str, say: Callable[[str], None]) -> None:
    """Writes it as an annotation, if it says anything new; `say` gets why that was refused."""
    found, known = of(seen, when), seen.recorded
    if found is None or (known is not None and dataclasses.replace(found, at=known.at).to_json() == known.to_json()):
        return
    metadata = {"uid": found.uid, "annotations": {ANNOTATION: found.to_json()}}
    try:
        cluster.merge(JOBSETS, seen.name, seen.namespace, {"metadata": metadata})
    except ClusterError as error:
        if not (isinstance(error, ApiError) and error.status in _GONE):
            say(f"how far {seen.name} was is not on its JobSet: {error.message[:_MAX_REFUSAL]}")


class LastWords:
    """What the leader reports while its job is stopped, heard as it is written: its log goes with its pod."""

    def __init__(self, cluster: Cluster, seen: Snapshot) -> None:
        self._cluster, self._namespace, self._records = cluster, seen.namespace, list(seen.records)
        self._leader = next((host for host in seen.hosts if host.number == 0 and host.running), None)
        self._thread = threading.Thread(target=self._listen, name="last words", daemon=True)
        self._thread.start()

    def heard(self, wait_s: float = 2.0) -> tuple[Line, ...]:
        """All records so far; waits for the end of the log, `wait_s` seconds at most."""
        self._thread.join(wait_s)
        return tuple(self._records)

    def _listen(self) -> None:
        if self._leader is None:
            return
        try:
            for record in leader_log.followed(self._cluster, self._namespace, self._leader):
                self._records.append(record)
        except ClusterError:  # what was heard before counts; the pods say the verdict themselves
            return
