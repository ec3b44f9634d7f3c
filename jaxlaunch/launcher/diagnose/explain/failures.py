"""Causes: a job that failed or exceeded one of its limits, at which rank, and what to do. Pure.

If memory is exceeded, the kernel kills a whole container or one process. If ephemeral storage is
exceeded, the kubelet evicts the pod.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import signal

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain.answer import (
    Answer,
    Evidence,
    first_answer,
    is_liveness_failure,
    unknown_reason,
)
from jaxlaunch.launcher.diagnose.explain.containers import (
    explain_never_ran,
    explain_sidecar_failure,
)
from jaxlaunch.launcher.diagnose.explain.situations import SITUATIONS, STEPS_BY_CODE
from jaxlaunch.launcher.diagnose.text import (
    EMPTY_TEXT,
    SUBMIT_AGAIN,
    Action,
    HostGroup,
    Text,
    advise_change,
    advise_resubmit,
    describe_event,
)
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.job_status import State, derive_state
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import find_condition, pod_template
from jaxlaunch.records.verdict import FailureKind, Verdict

_TRACEBACK_LINES = 20
_BUS_ERROR = 128 + signal.SIGBUS

# Next steps for an operating system error on a file, which the pod's settings cause and not the
# program.
_STEPS_BY_ERRNO = {
    errno.EACCES: advise_resubmit(
        "let the pods' user (a number: user in the cluster defaults) read and write there; "
        "then `{again}`",
        again=SUBMIT_AGAIN,
    ),
    errno.ENOSPC: advise_resubmit(
        "make room on the file system that it writes to: /dev/shm (resources.shm), the pod's own "
        "disk (resources.ephemeral) or a volume; then `{again}`",
        again=SUBMIT_AGAIN,
    ),
    errno.EROFS: advise_resubmit(
        "have it write below /tmp, or mount a volume there (volumes: in job.yaml), since what the "
        "image brings is read-only; then `{again}`",
        again=SUBMIT_AGAIN,
    ),
}


def explain_failure(snapshot: Snapshot) -> Answer | None:
    """Explain a failed job by the first of these causes that applies."""
    if derive_state(snapshot) is not State.FAILED:
        return None
    causes = (
        _explain_deadline,
        _explain_oom,
        explain_excess_eviction,
        _explain_hook,
        explain_sidecar_failure,
        _explain_verdict,
        _explain_never_ran,
        _explain_exit_code,
        _explain_rejected_pod,
    )
    answer = first_answer(causes, snapshot) or _fallback_answer(snapshot)
    step = (
        answer.next_step or SITUATIONS[answer.situation].next_step or SITUATIONS["failed"].next_step
    )
    if step is not None and step.action is Action.RESUBMIT:
        step = dataclasses.replace(step, resume_step=snapshot.report.committed_step)
    after = EMPTY_TEXT
    if (
        find_condition(snapshot.jobset, "Failed").get("reason") == "ReachedMaxRestarts"
        and snapshot.restarts
    ):
        after = Text(" after {restarts:restart}", restarts=snapshot.restarts)
    headline = Text("failed{after}: {why}", after=after, why=answer.headline)
    return Answer(
        answer.situation, headline, (*answer.evidence, *_describe_conditions(snapshot)), step
    )


def _explain_deadline(snapshot: Snapshot) -> Answer | None:
    """Explain a deadline, of Kubernetes for one generation or of the agents for all."""
    verdict = _final_verdict(snapshot)
    if verdict is not None and verdict.code == contract.DEADLINE:
        return Answer("deadline", Text("{message}", message=verdict.message))
    is_exceeded = any(
        find_condition(job, "Failed").get("reason") == "DeadlineExceeded" for job in snapshot.jobs
    )
    if not is_exceeded and (
        verdict is not None or snapshot.find_event("DeadlineExceeded", kind="Job") is None
    ):
        return None
    deadlines = (job.get("spec", {}).get("activeDeadlineSeconds") for job in snapshot.jobs)
    deadline_s = next((seconds for seconds in deadlines if seconds is not None), None)
    if deadline_s is None:
        return Answer("deadline", Text("its deadline was exceeded"))
    return Answer(
        "deadline", Text("its deadline of {deadline:age} was exceeded", deadline=float(deadline_s))
    )


def _explain_oom(snapshot: Snapshot) -> Answer | None:
    if not is_oom(snapshot):
        return None
    killed, step = _oom_killed(snapshot), None
    if killed and killed[0].is_init:
        step = advise_change(
            "raise the memory limit of init container {name}: under pod: in job.yaml, or in the "
            "webhook that adds it.",
            name=killed[0].container,
        )
    return Answer("oom", describe_oom(snapshot), next_step=step)


def _explain_hook(snapshot: Snapshot) -> Answer | None:
    """Explain a failed postStart hook, after which the kubelet kills the container."""
    event = snapshot.find_event("FailedPostStartHook", kind="Pod")
    verdict = _final_verdict(snapshot)
    host = _first_failed(snapshot)
    if (
        event is None
        or host is None
        or (verdict is not None and verdict.code != contract.PREEMPTED)
    ):
        return None
    headline = Text(
        "the postStart hook of {host} failed: {message}", host=host.name, message=event["message"]
    )
    # An agent's report is JSON and not useful as output.
    output = () if host.termination_report else traceback_tail(host.terminated.get("message"))
    step = advise_change("fix the hook under pod:, or remove it.")
    return Answer("failed", headline, (*describe_event(event), *output), step)


def _explain_verdict(snapshot: Snapshot) -> Answer | None:
    verdict = _final_verdict(snapshot)
    if verdict is None:
        return None
    headline = describe_verdict(verdict) + _describe_join_failure(snapshot, verdict)
    step = _STEPS_BY_ERRNO.get(verdict.failure.errno or 0) or STEPS_BY_CODE.get(verdict.code)
    if (full := describe_full_shm(snapshot, verdict)) is not None:
        headline += Text("; {full}", full=full)
        step = advise_resubmit(
            "raise resources.shm in job.yaml, then `{again}`", again=SUBMIT_AGAIN
        )
    return Answer("failed", headline, traceback_tail(verdict.traceback), step)


def describe_verdict(verdict: Verdict) -> Text:
    """Return "hang (exit 82): rank 1 …"."""
    return Text(
        "{cause} (exit {code}): {message}",
        cause=verdict.cause,
        code=verdict.code,
        message=verdict.message,
    )


def _describe_join_failure(snapshot: Snapshot, verdict: Verdict) -> Text:
    """Return the host's own reason for not joining, which the leader does not know."""
    reports = [
        (host, report.verdict) for host in snapshot.hosts if (report := host.termination_report)
    ]
    join_report = next(
        (pair for pair in reports if pair[1].failure.kind is FailureKind.CANNOT_JOIN), None
    )
    kinds = (FailureKind.NOT_JOINED, FailureKind.CANNOT_JOIN)
    if (
        join_report is None
        or verdict.failure.kind not in kinds
        or join_report[1].failure == verdict.failure
    ):
        return EMPTY_TEXT
    host, failure = join_report[0], join_report[1].failure
    address = "" if failure.rendezvous is None else failure.rendezvous.address
    template = "; {host.name}: cannot join host 0 at {address}: {why}"
    return Text(template, host=host, address=address, why=failure.detail)


def _explain_never_ran(snapshot: Snapshot) -> Answer | None:
    answer = explain_never_ran(snapshot)
    return (
        None
        if answer is None
        else dataclasses.replace(answer, headline=Text("it {why}", why=answer.headline))
    )


def _explain_exit_code(snapshot: Snapshot) -> Answer | None:
    """Explain the exit code of a container without an agent's verdict."""
    host = _first_failed(snapshot)
    if host is None:
        return None
    code, output = host.terminated["exitCode"], traceback_tail(host.terminated.get("message"))
    if host.reason == "DeadlineExceeded":
        headline = Text(
            "{host} was ended by its own activeDeadlineSeconds: {why}",
            host=host.name,
            why=host.message,
        )
        return Answer(
            "deadline",
            headline,
            output,
            advise_change("leave activeDeadlineSeconds out under pod:; use deadline:."),
        )
    if code != contract.KILLED:
        reason = host.terminated.get("reason", "")
        headline = Text(
            "{host} ended with exit code {code} ({reason})",
            host=host.name,
            code=code,
            reason=reason,
        )
        return Answer("failed", headline, output)
    event = snapshot.find_event("Unhealthy", kind="Pod")
    if event is not None and is_liveness_failure(event) and host.pod in event["names"]:
        headline = Text(
            "{host} was killed by SIGKILL (exit 137): its liveness probe fails", host=host.name
        )
        step = advise_change("fix or remove the probe; jobs need none.")
        return Answer("failed", headline, (*describe_event(event), *output), step)
    # Container runtimes sometimes lose the reason OOMKilled.
    limit = _memory_limit(snapshot)
    headline = Text(
        "{host} was killed by SIGKILL (exit 137), probably out of memory; {limit}",
        host=host.name,
        limit=Text(
            "its memory limit is {limit}" if limit else "it has no memory limit", limit=limit
        ),
    )
    return Answer("killed", headline, output)


def _first_failed(snapshot: Snapshot) -> Host | None:
    return next((host for host in snapshot.hosts if host.terminated.get("exitCode")), None)


def _explain_rejected_pod(snapshot: Snapshot) -> Answer | None:
    """Explain a pod that the kubelet of its node did not admit."""
    host = next(
        (
            host
            for host in snapshot.hosts
            if host.phase == "Failed" and host.reason and not host.terminated
        ),
        None,
    )
    if host is None:
        return None
    template = "node {host.node} rejected {host.name}: {host.reason}: {host.message}"
    step = advise_change("fix what the message names; `launcher render` shows the pod.")
    return Answer("failed", Text(template, host=host), next_step=step)


def _fallback_answer(snapshot: Snapshot) -> Answer:
    headline = Text(
        "{message}", message=find_condition(snapshot.jobset, "Failed").get("message", "")
    )
    if not snapshot.hosts and "pods" not in snapshot.unread_reasons:
        headline += Text("; no pod is left that could say why")
    return Answer("failed", headline + unknown_reason(snapshot, "pods", "jobs"))


def _describe_conditions(snapshot: Snapshot) -> Evidence:
    """Return the condition Failed of the JobSet and of the first Jobs that have it."""
    states = [(Text("JobSet"), find_condition(snapshot.jobset, "Failed"))]
    ends = [
        (Text("Job {name}", name=job["metadata"]["name"]), find_condition(job, "Failed"))
        for job in snapshot.jobs
    ]
    states += [(name, state) for name, state in ends if state.get("reason")][:2]
    return tuple(
        Text(
            "{name}: {reason}: {message}",
            name=name,
            reason=state["reason"],
            message=state.get("message", ""),
        )
        for name, state in states
        if state.get("reason")
    )


def traceback_tail(text: str | None) -> tuple[str, ...]:
    """Return the end of a traceback, line by line."""
    return tuple(
        line.rstrip()[:300] for line in (text or "").strip().splitlines()[-_TRACEBACK_LINES:]
    )


def _final_verdict(snapshot: Snapshot) -> Verdict | None:
    return None if snapshot.report.attempt_end is None else snapshot.report.attempt_end.verdict


# --- memory ---------------------------------------------------------------------------------------


def is_oom(snapshot: Snapshot) -> bool:
    """Return whether these pods ended because they ran out of memory.

    A verdict has precedence, because a container keeps the reason OOMKilled of a process that was
    killed long before.
    """
    verdict = _final_verdict(snapshot)
    if verdict is not None and verdict.code not in (contract.KILLED, contract.LOST):
        return False
    return bool(_oom_killed(snapshot)) or (
        verdict is not None and verdict.failure.kind is FailureKind.OOM_KILLED
    )


def _oom_killed(snapshot: Snapshot) -> list[Host]:
    # On cgroup v1 the kernel may kill only one process, and the agent survives.
    return [
        host
        for host in snapshot.hosts
        if "OOMKilled" in [end.get("reason") for end in (host.terminated, host.last_terminated)]
    ]


def describe_oom(snapshot: Snapshot) -> Text:
    """Return the host or rank that was OOMKilled, and its memory limit."""
    killed = _oom_killed(snapshot)
    verdict = _final_verdict(snapshot)
    expected = snapshot.expected_hosts
    is_init = bool(killed) and killed[0].is_init
    limit = killed[0].memory_limit if is_init else _memory_limit(snapshot)
    if is_init:
        same = [host for host in killed if host.container == killed[0].container]
        template = "init container {container} of {hosts} was OOMKilled"
        subject = Text(
            template, container=killed[0].container, hosts=HostGroup.from_hosts(same, expected)
        )
    elif verdict is None or verdict.code != contract.KILLED or verdict.rank is None:
        subject = Text(
            "{hosts} {hosts:was|were} OOMKilled", hosts=HostGroup.from_hosts(killed, expected)
        )
    else:
        template = "rank {verdict.rank} was OOMKilled" + (
            "" if verdict.step is None else " at step {verdict.step}"
        )
        subject = Text(template, verdict=verdict)
    if limit:
        return subject + Text("; its memory limit is {limit}", limit=limit)
    return subject + Text("; it has no memory limit: the node itself ran out of memory")


def _memory_limit(snapshot: Snapshot) -> str | None:
    main = hosts.main_container(pod_template(snapshot.jobset).get("spec", {}))
    limit = ((main.get("resources") or {}).get("limits") or {}).get("memory")
    return None if limit is None else str(limit)


def describe_full_shm(snapshot: Snapshot, verdict: Verdict) -> Text | None:
    """Return the likely reason of a SIGBUS, or None for another end.

    A mapped file has no room, in a pod most often one in /dev/shm.
    """
    if verdict.code != _BUS_ERROR:
        return None
    volumes = pod_template(snapshot.jobset).get("spec", {}).get("volumes") or ()
    volume = next(
        (volume.get("emptyDir") or {} for volume in volumes if volume.get("name") == "shm"), None
    )
    size = (
        Text("64 MiB, as none is set") if volume is None else Text("as large as the pod's memory")
    )
    if volume and "sizeLimit" in volume:
        size = Text("{size}", size=volume["sizeLimit"])
    return Text("most often /dev/shm is full, which is {size} (resources.shm)", size=size)


# --- ephemeral storage ----------------------------------------------------------------------------

# A pod that is evicted because it exceeded its own limit has no condition DisruptionTarget, unlike
# other evicted pods.
_EXCESS_MESSAGE = re.compile(
    r"exceeds the total limit of containers|exceeded its local ephemeral storage limit|Usage of "
    r"EmptyDir volume"
)
_EMPTY_DIR_MESSAGE = re.compile(r'EmptyDir volume "(?!shm")')


def explain_excess_eviction(snapshot: Snapshot) -> Answer | None:
    """Explain pods that were evicted because they exceeded their limit of ephemeral storage."""
    evicted = [
        host
        for host in snapshot.hosts
        if host.reason == "Evicted" and _EXCESS_MESSAGE.search(host.message)
    ]
    if not evicted:
        return None
    message = evicted[0].message.rstrip(". \n")
    headline = Text(
        "{hosts} {hosts:was|were} evicted: {message} ({key})",
        hosts=HostGroup.from_hosts(evicted, snapshot.expected_hosts),
        message=message,
        key=_limit_key(message),
    )
    step = advise_change(
        "raise {key} in job.yaml, or keep less on the node: /tmp and volumes of ephemeral: "
        "count, and logs.",
        key=_limit_key(message),
    )
    evidence = (Text("Pod {pod}: Evicted: {message}", pod=evicted[0].pod, message=message),)
    return Answer("ephemeral-storage", headline, evidence, step)


def describe_earlier_excess(snapshot: Snapshot) -> Text | None:
    """Return the same for pods that no longer exist, by the newest event."""
    event = snapshot.find_event("Evicted", kind="Pod")
    if event is None or _EXCESS_MESSAGE.search(event["message"]) is None:
        return None
    message = event["message"].rstrip(". \n")
    template = "Pod {pod} was evicted: {message} ({key})"
    return Text(template, pod=event["names"][0], message=message, key=_limit_key(message))


def _limit_key(message: str) -> str:
    """Return the key of job.yaml that sets the limit."""
    if "EmptyDir volume" not in message:
        return "resources.ephemeral"
    return "volumes: ephemeral" if _EMPTY_DIR_MESSAGE.search(message) else "resources.shm"
