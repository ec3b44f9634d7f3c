"""Whether a job went beyond a limit of its own. Pure.

Memory: the kernel killed a whole container, or one process in it. Ephemeral storage: the kubelet evicted a pod.
"""

from __future__ import annotations

import re
import signal

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain.answer import Answer, one_line, were, which
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import template
from jaxlaunch.records.verdict import Verdict

_BUS_ERROR = 128 + signal.SIGBUS


def _oom_killed(snapshot: Snapshot) -> list[Host]:
    """Hosts whose container was OOMKilled. On cgroup v1 that may be one process, and the agent lives on."""
    return [host for host in snapshot.hosts if "OOMKilled" in [end.get("reason") for end in (host.ended, host.before)]]


def is_oom(snapshot: Snapshot) -> bool:
    """Whether these pods ended because they ran out of memory.

    A container keeps the reason OOMKilled of a process that was killed long before its end: a verdict counts more.
    """
    verdict = _verdict(snapshot)
    if verdict is not None and verdict.code not in (contract.KILLED, contract.LOST):
        return False
    return bool(_oom_killed(snapshot)) or (verdict is not None and "OOMKilled" in verdict.message)


def oom_sentence(snapshot: Snapshot) -> str:
    """The host or rank that was OOMKilled, and its memory limit."""
    killed = _oom_killed(snapshot)
    limit = killed[0].memory_limit if killed and killed[0].is_init else _limit(snapshot)
    at = f"; its memory limit is {limit}" if limit else "; it has no memory limit: the node itself ran out of memory"
    if killed and killed[0].is_init:
        same = [host for host in killed if host.container == killed[0].container]
        return f"init container {same[0].container} of {which(same, snapshot.expected_hosts)} was OOMKilled{at}"
    verdict = _verdict(snapshot)
    if verdict is None or verdict.code != contract.KILLED or verdict.rank is None:
        return f"{which(killed, snapshot.expected_hosts)} {were(killed)} OOMKilled{at}"
    step = f" at step {verdict.step}" if verdict.step is not None else ""
    return f"rank {verdict.rank} was OOMKilled{step}{at}"


def more_memory(snapshot: Snapshot) -> str | None:
    """What to do about an init container that was OOMKilled; None where the situation's own row says it."""
    killed = _oom_killed(snapshot)
    if not killed or not killed[0].is_init:
        return None
    name = killed[0].container
    return f"raise the memory limit of init container {name}: under pod: in job.yaml, or in the webhook that adds it."


def killed_sentence(snapshot: Snapshot, host: Host) -> str:
    """Of a host that ended with 137 and without the reason OOMKilled, which container runtimes lose now and then."""
    limit = _limit(snapshot)
    at = f"its memory limit is {limit}" if limit else "it has no memory limit"
    return f"{host.name} was killed by SIGKILL (exit 137), probably out of memory; {at}"


def full_shared_memory(snapshot: Snapshot, verdict: Verdict) -> str | None:
    """Of a process that ended by SIGBUS: a file that it maps has no room, in a pod most often one of /dev/shm."""
    if verdict.code != _BUS_ERROR:
        return None
    volumes = template(snapshot.jobset).get("spec", {}).get("volumes") or ()
    volume = next((one.get("emptyDir") or {} for one in volumes if one.get("name") == "shm"), None)
    size = "64 MiB, as none is set" if volume is None else volume.get("sizeLimit", "as large as the pod's memory")
    return f"most often /dev/shm is full, which is {size} (resources.shm)"


def _verdict(snapshot: Snapshot) -> Verdict | None:
    return None if snapshot.report.verdict is None else snapshot.report.verdict.verdict


def _limit(snapshot: Snapshot) -> str | None:
    main = hosts.main_container(template(snapshot.jobset).get("spec", {}))
    found = ((main.get("resources") or {}).get("limits") or {}).get("memory")
    return None if found is None else str(found)


# As the kubelet says it of a pod that is beyond its own limit. Unlike the others that it evicts, such a pod has no
# condition DisruptionTarget.
_EXCESS = re.compile(
    r"exceeds the total limit of containers|exceeded its local ephemeral storage limit|Usage of EmptyDir volume"
)
_OF_VOLUME = re.compile(r'EmptyDir volume "(?!shm")')


def evicted_for_excess(snapshot: Snapshot) -> Answer | None:
    """Pods that the kubelet evicted because they used more ephemeral storage than they may."""
    taken = [host for host in snapshot.hosts if host.reason == "Evicted" and _EXCESS.search(host.message)]
    if not taken:
        return None
    message = one_line(taken[0].message).rstrip(". ")
    headline = f"{which(taken, snapshot.expected_hosts)} {were(taken)} evicted: {message} ({_key(message)})"
    evidence = (f"Pod {taken[0].pod}: Evicted: {message}",)
    return Answer("ephemeral-storage", headline, evidence, _less(message))


def excess_before(snapshot: Snapshot) -> str | None:
    """The same of pods that are gone, by the newest event about it: the message, and the key of job.yaml."""
    event = snapshot.event("Evicted", kind="Pod")
    if event is None or _EXCESS.search(event["message"]) is None:
        return None
    message = one_line(event["message"]).rstrip(". ")
    return f"Pod {event['names'][0]} was evicted: {message} ({_key(message)})"


def _key(message: str) -> str:
    """The key of job.yaml that sets the limit."""
    if "EmptyDir volume" not in message:
        return "resources.ephemeral"
    return "volumes: ephemeral" if _OF_VOLUME.search(message) else "resources.shm"


def _less(message: str) -> str:
    return (
        f"raise {_key(message)} in job.yaml, or keep less on the node: /tmp and volumes of ephemeral: count, and logs."
    )
