"""Containers that run next to the program, as `pod:` or somebody's webhook adds them: one fails, or does not end. Pure.

A Job counts a pod as finished when all its containers have ended, and as failed when one of them has; init containers
with restartPolicy Always (native sidecars) are not counted, and end with the program.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain.answer import Answer, one_line, quoted, which
from jaxlaunch.launcher.jobs.status.hosts import Container, Host
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import age, seconds_since

_ENDING_S = 15.0  # that the other containers of a pod have after the program
_NATIVE = "make it an init container with restartPolicy: Always (a native sidecar)"


def failed(snapshot: Snapshot) -> Answer | None:
    """The program is not to blame for the job's end: another container of a pod failed."""
    verdict = snapshot.report.verdict
    if (verdict is not None and verdict.verdict.code != contract.DONE) or _is_any_program_failed(snapshot):
        return None
    found = _hosts_with(snapshot, lambda one: bool(one.ended.get("exitCode")))
    if found is None:
        return None
    there, one = found
    headline = f"{_of(there, one, snapshot)} {ending(one)}; the program itself finished"
    evidence = (f"{one.name}: {one_line(one.ended['message'])}",) if one.ended.get("message") else ()
    move = f"kubectl logs {there[0].pod} -c {one.name}; if it may fail, {_NATIVE}."
    return Answer("sidecar", headline, evidence, move)


def outliving(snapshot: Snapshot) -> Answer | None:
    """The program has ended, and another container keeps its pod."""
    late = [host for host in snapshot.hosts if _has_program_ended(host) and not host.has_ended and not host.is_leaving]
    found = _hosts_with(snapshot, lambda one: bool(one.running), late)
    if found is None:
        return None
    there, one = found
    code = there[0].ended.get("exitCode", 0)
    spent = seconds_since(there[0].ended.get("finishedAt"), snapshot.now)
    if spent is not None and spent < _ENDING_S:
        return None
    since = "" if spent is None else f" {age(spent)} ago"
    headline = f"does not end: its program ended{since} (exit {code}), but {_of(there, one, snapshot)} still runs"
    move = f"`launcher stop {snapshot.name}` ends it; to have container {one.name} end with the program, {_NATIVE}."
    return Answer("sidecar", headline, next_move=move)


def failing(snapshot: Snapshot) -> Answer | None:
    """The program runs, and another container of its pods has failed, which fails the job in the end."""
    found = _hosts_with(snapshot, lambda one: bool(one.ended.get("exitCode")))
    if found is None:
        return _restarting(snapshot)
    there, one = found
    headline = f"runs, but {_of(there, one, snapshot)} {ending(one)}: the job fails when its program ends"
    return Answer("sidecar", headline, next_move=f"kubectl logs {there[0].pod} -c {one.name}")


def _restarting(snapshot: Snapshot) -> Answer | None:
    """A native sidecar that its kubelet starts again and again; its ends are not counted."""
    pairs = [
        (host, one)
        for host in snapshot.hosts
        for one in host.beside
        if one.is_sidecar and not one.running and (one.ended or one.before)
    ]
    if not pairs:
        return None
    one = pairs[0][1]
    there = [host for host, other in pairs if other.name == one.name]
    headline = (
        f"runs, but sidecar {one.name} of {which(there, snapshot.expected_hosts)} ends again and again: exit code "
    )
    event = snapshot.event("BackOff", kind="Pod")
    move = f"kubectl logs {there[0].pod} -c {one.name} --previous"
    return Answer("sidecar", f"{headline}{(one.ended or one.before).get('exitCode')}", quoted(event), move)


def ending(one: Container) -> str:
    """ "ended with exit code 7", "was OOMKilled; its memory limit is 40Mi"."""
    if one.ended.get("reason") != "OOMKilled":
        return f"ended with exit code {one.ended['exitCode']}"
    limit = "it has no memory limit" if one.memory_limit is None else f"its memory limit is {one.memory_limit}"
    return f"was OOMKilled; {limit}"


def _hosts_with(
    snapshot: Snapshot, is_one: Callable[[Container], bool], hosts: list[Host] | None = None
) -> tuple[list[Host], Container] | None:
    """The first container that counts and of which this is true, and all hosts that have one of its name."""
    pairs = [
        (host, one)
        for host in (snapshot.hosts if hosts is None else hosts)
        for one in host.beside
        if not one.is_init and is_one(one)
    ]
    if not pairs:
        return None
    first = pairs[0][1]
    return [host for host, one in pairs if one.name == first.name], first


def _of(there: list[Host], one: Container, snapshot: Snapshot) -> str:
    return f"container {one.name} of {which(there, snapshot.expected_hosts)}"


def _has_program_ended(host: Host) -> bool:
    return not host.is_init and bool(host.ended)


def _is_any_program_failed(snapshot: Snapshot) -> bool:
    return any(host.ended.get("exitCode") for host in snapshot.hosts)
