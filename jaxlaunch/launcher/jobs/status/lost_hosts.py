"""Hosts of a gang that are lost while its other pods stay: which they are, and who holds their ranks. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import parse_time


def has_begun(snapshot: Snapshot) -> bool:
    """Whether the processes of these pods have started once, so that a pod that is not there is a lost one.

    Without the leader's log that is known of the leader alone: Kubernetes makes its pod before all others.
    """
    if not snapshot.waits_for_pods or not snapshot.hosts:
        return False
    beat, generation = snapshot.report.heartbeat, snapshot.hosts[0].generation
    if beat is not None and beat.stage is not None:
        return beat.stage != "gather" or any(one.generation == generation for one in snapshot.report.earlier)
    others = [host for host in snapshot.hosts if host.number != 0]
    leader = snapshot.hosts[0] if snapshot.hosts[0].number == 0 else None
    if not any(host.has_started for host in others):
        return False
    if leader is None or leader.left_alone:
        return True
    return not leader.has_started and leader.created > min(host.created for host in others)


def is_table_known(snapshot: Snapshot) -> bool:
    """Whether it is known which hosts hold ranks: not while the leader of a gang that has begun is away."""
    has_said = snapshot.report.heartbeat is not None and snapshot.report.recorded is None
    return has_said or not has_begun(snapshot)


def lost(snapshot: Snapshot) -> list[int]:
    """The hosts without a pod, or with one that failed; none of a gang that is done, whose Job deletes pods."""
    here = {host.number: host for host in snapshot.hosts}
    if is_done(snapshot):
        return []
    return [number for number in range(snapshot.expected_hosts) if number not in here or here[number].phase == "Failed"]


def is_done(snapshot: Snapshot) -> bool:
    """Whether the gang is done: the leader's pod ends so when all ranks have."""
    return any(host.number == 0 and host.phase == "Succeeded" for host in snapshot.hosts)


def are_members_lost(snapshot: Snapshot) -> bool:
    """Whether a host that holds ranks is lost: the gang waits, or is about to."""
    return any(number in snapshot.members for number in lost(snapshot))


def away(snapshot: Snapshot) -> list[int]:
    """The hosts that are lost, those whose new pod has not started, and those that are there and not heard of."""
    late = [host.number for host in snapshot.hosts if not host.has_started]
    if snapshot.report.stage == "gather":
        cut = [host for host in (*cut_off(snapshot), *mute(snapshot)) if host.number in snapshot.report.missing]
    else:
        cut = [host for host in cut_off(snapshot) if host.number not in snapshot.members]
    return sorted({*lost(snapshot), *late, *(host.number for host in cut)})


def cut_off(snapshot: Snapshot) -> list[Host]:
    """The hosts whose pods read as running on a node that does not answer or is deleted: by the node, where it could be
    read, or by what the node controller makes of its pods, which are then not ready without a reason."""
    return [
        host
        for host in snapshot.hosts
        if snapshot.is_on_silent_node(host) or (host.running and not host.is_ready and not host.unready)
    ]


def heard(snapshot: Snapshot) -> list[Host]:
    """The hosts with ranks on a node that is known not to answer, although their agents do: their attempt runs, and the
    leader misses an agent sooner than Kubernetes does a node."""
    if not has_begun(snapshot) or snapshot.report.stage != "run" or snapshot.report.is_judged:
        return []
    deleted = None if snapshot.deleted_node is None else snapshot.deleted_node.name
    there = [host for host in cut_off(snapshot) if host.number in snapshot.members and host.node != deleted]
    return [
        host
        for host in there
        if snapshot.is_on_silent_node(host) or snapshot.event("NodeNotReady", kind="Pod", of=[host])
    ]


def mute(snapshot: Snapshot) -> list[Host]:
    """The hosts for which the leader waits, although their containers have run since before the last attempt ended."""
    last, missing = snapshot.report.last, snapshot.report.missing
    if last is None or last.at is None:
        return []
    ended = datetime.fromtimestamp(last.at, UTC)
    there = [host for host in snapshot.hosts if host.number in missing and host.has_started and not host.has_ended]
    return [
        host for host in there if (began := parse_time(host.running.get("startedAt"))) is not None and began < ended
    ]


def spares(snapshot: Snapshot) -> list[int]:
    """The hosts that are there and hold no rank, of a job whose ranks may move; none where the table is not known."""
    if not hosts.moves(snapshot.jobset) or not is_table_known(snapshot):
        return []
    there = [host for host in snapshot.hosts if host.has_started and not host.has_ended and not host.is_leaving]
    silent = {host.number for host in cut_off(snapshot)}
    return [host.number for host in there if host.number not in snapshot.members and host.number not in silent]
