"""Causes of a failed job: its program, its agents' verdict or an exceeded limit. Pure functions.

If a pod exceeds its memory limit, the kernel kills a whole container or one process. If it exceeds
its limit of ephemeral storage, the kubelet evicts it.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import signal
from datetime import datetime

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain.answer import (
    Answer,
    Evidence,
    describe_unread_kinds,
    find_end_log,
    first_answer,
    is_liveness_failure,
)
from jaxlaunch.launcher.diagnose.explain.containers import (
    explain_sidecar_failure,
    explain_unstarted_program,
)
from jaxlaunch.launcher.diagnose.explain.foreign_messages import find_foreign_message
from jaxlaunch.launcher.diagnose.explain.situations import SITUATIONS, STEPS_BY_CODE
from jaxlaunch.launcher.diagnose.text import (
    EMPTY_TEXT,
    JOB_NAME,
    RENDER,
    SUBMIT_AGAIN,
    Action,
    Command,
    NextStep,
    Text,
    advise_change,
    advise_resubmit,
    advise_run,
    describe_event,
    host_group,
    launcher_command,
    quote_message,
)
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.job_status import (
    JobStatus,
    State,
    derive_state,
    derive_status,
)
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import find_condition, pod_template
from jaxlaunch.records.log_lines import format_clock
from jaxlaunch.records.verdict import FailureKind, Verdict

_TRACEBACK_LINES = 20
_BUS_ERROR = 128 + signal.SIGBUS

# Next steps for errors of the operating system on a file. Settings of the pod cause them.
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
        "let it write below /tmp, or mount a volume there (volumes: in job.yaml), because the "
        "image's file system is read-only; then `{again}`",
        again=SUBMIT_AGAIN,
    ),
}


def explain_failure(snapshot: Snapshot) -> Answer | None:
    """Explain a failed job."""
    if derive_state(snapshot) is not State.FAILED:
        return None
    causes = (
        _explain_deadline,
        _explain_oom,
        explain_excess_eviction,
        _explain_post_start_hook,
        explain_sidecar_failure,
        _explain_verdict,
        _explain_unstarted_program,
        _explain_exit_code,
        _explain_rejected_pod,
    )
    condition = find_condition(snapshot.jobset, "Failed")
    if (answer := first_answer(causes, snapshot)) is None:
        headline = quote_message(condition.get("message", ""))
        if not snapshot.hosts and "pods" not in snapshot.unread_reasons:
            headline += Text("; no pod is left that could say why")
        answer = Answer("failed", headline + describe_unread_kinds(snapshot, "pods", "jobs"))
    step = answer.next_step
    if step is None and answer.situation != "failed":
        step = SITUATIONS[answer.situation].next_step
    step = step or _advise_submitting_again(snapshot)
    if step.action is Action.RESUBMIT:
        step = dataclasses.replace(step, resume_step=snapshot.report.committed_step)
    template = "failed: {why}"
    if condition.get("reason") == "ReachedMaxRestarts" and snapshot.restarts:
        template = "failed after {restarts:restart}: {why}"
    headline = Text(template, restarts=snapshot.restarts, why=answer.headline)
    evidence = (*answer.evidence, *_describe_conditions(snapshot))
    return Answer(answer.situation, headline, evidence, step)


def explain_hold(snapshot: Snapshot) -> Answer | None:
    """Explain a failed job whose pods stay for a look."""
    status, last_end = derive_status(snapshot), snapshot.report.last_end
    if status.state is not State.HELD or last_end is None:
        return None
    return explain_held_verdict(last_end.verdict, status)


def explain_held_verdict(verdict: Verdict, status: JobStatus) -> Answer:
    """Explain a verdict after which the processes stay for a look."""
    answer, commands = explain_verdict(verdict), hold_commands(verdict.rank)
    template = "failed: {verdict}; it is held until {until}"
    headline = Text(template, verdict=answer.headline, until=format_hold(status))
    step = advise_run("`{shell}` enters it, `{stop}` ends it", **commands)
    return Answer("held", headline, answer.evidence, step)


def describe_hold(status: JobStatus) -> Text:
    """Return "until 14:05 UTC: `launcher shell …` enters it, …", or no text without a hold."""
    if status.held_until is None:
        return EMPTY_TEXT
    rank = None if status.verdict is None else status.verdict["rank"]
    template = "until {until}: `{shell}` enters it, `{stop}` ends it"
    return Text(template, until=format_hold(status), **hold_commands(rank))


def hold_commands(rank: int | None) -> dict[str, Command]:
    """Return the commands that enter a failed job, at the rank that failed, and that end it."""
    shell = launcher_command("shell", JOB_NAME, "--rank", str(rank or 0))
    return {"shell": shell, "stop": launcher_command("stop", JOB_NAME)}


def format_hold(status: JobStatus) -> str:
    """Return the end of a hold, such as "14:05 UTC"."""
    if status.held_until is None:
        return "an unknown time"
    return format_clock(datetime.fromisoformat(status.held_until).timestamp())


def _advise_submitting_again(snapshot: Snapshot) -> NextStep:
    if (command := find_end_log(snapshot)) is None:
        return advise_resubmit("fix what the headline names; then `{again}`", again=SUBMIT_AGAIN)
    return advise_resubmit("see `{logs}`; then `{again}`", logs=command, again=SUBMIT_AGAIN)


def _explain_deadline(snapshot: Snapshot) -> Answer | None:
    """Explain an exceeded deadline: the agents' for the run, or Kubernetes' for one generation."""
    verdict = _last_verdict(snapshot)
    if verdict is not None and verdict.code == contract.DEADLINE:
        return Answer("deadline", quote_message(verdict.message))
    has_event = snapshot.find_event("DeadlineExceeded", kind="Job") is not None
    reasons = [find_condition(job, "Failed").get("reason") for job in snapshot.jobs]
    if "DeadlineExceeded" not in reasons and not (verdict is None and has_event):
        return None
    for job in snapshot.jobs:
        if (deadline_s := job.get("spec", {}).get("activeDeadlineSeconds")) is not None:
            template = "its deadline of {deadline:age} was exceeded"
            return Answer("deadline", Text(template, deadline=float(deadline_s)))
    return Answer("deadline", Text("its deadline was exceeded"))


def _explain_oom(snapshot: Snapshot) -> Answer | None:
    if not is_oom(snapshot):
        return None
    killed_hosts, step = _oom_killed_hosts(snapshot), None
    if killed_hosts and killed_hosts[0].is_init:
        step = advise_change(
            "raise the memory limit of init container {name}: under pod: in job.yaml, or in the "
            "webhook that adds it.",
            name=killed_hosts[0].container,
        )
    return Answer("oom", describe_oom(snapshot), next_step=step)


def _explain_post_start_hook(snapshot: Snapshot) -> Answer | None:
    """Explain a failed postStart hook, after which the kubelet kills the container."""
    host, verdict = first_failed_host(snapshot), _last_verdict(snapshot)
    # The agent of the killed container may report that it was preempted.
    if host is None or not (verdict is None or verdict.code == contract.PREEMPTED):
        return None
    failed_hosts = [item for item in snapshot.hosts if item.terminated.get("exitCode")]
    event = snapshot.find_event("FailedPostStartHook", kind="Pod", on_hosts=failed_hosts)
    if event is None:
        return None
    host = next((item for item in failed_hosts if item.pod in event["names"]), host)
    template = "the postStart hook of {host} failed: {message}"
    headline = Text(template, host=host.name, message=event["message"])
    # An agent's report is JSON, which is of no use as evidence.
    output = () if host.termination_report else traceback_tail(host.terminated.get("message"))
    step = advise_change("fix the hook under pod:, or remove it.")
    return Answer("failed", headline, (*describe_event(event), *output), step)


def _explain_verdict(snapshot: Snapshot) -> Answer | None:
    if (verdict := _last_verdict(snapshot)) is None:
        return None
    answer = explain_verdict(verdict)
    headline, step = answer.headline + _describe_join_failure(snapshot, verdict), answer.next_step
    if (shm_note := describe_full_shm(snapshot, verdict)) is not None:
        headline += Text("; {full}", full=shm_note)
        template = "raise resources.shm in job.yaml, then `{again}`"
        step = advise_resubmit(template, again=SUBMIT_AGAIN)
    return dataclasses.replace(answer, headline=headline, next_step=step)


def explain_verdict(verdict: Verdict) -> Answer:
    """Explain a verdict by its facts, and by a known message in its exception or output."""
    step = _STEPS_BY_ERRNO.get(verdict.failure.errno or 0) or STEPS_BY_CODE.get(verdict.code)
    evidence: Evidence = traceback_tail(verdict.traceback)
    if (match := find_foreign_message(verdict)) is not None:
        words, message = match
        meaning = Text('"{words}" means that {meaning}', words=words, meaning=Text(message.meaning))
        evidence, step = (*evidence, meaning), message.step
    return Answer("failed", describe_verdict(verdict), evidence, step)


def describe_verdict(verdict: Verdict) -> Text:
    """Return "hang (exit 82): rank 1 …"."""
    return Text("{verdict.cause} (exit {verdict.code}): {verdict.message}", verdict=verdict)


def _describe_join_failure(snapshot: Snapshot, verdict: Verdict) -> Text:
    """Return why a host could not join, which only the host itself knows and not the leader."""
    kinds = (FailureKind.NOT_JOINED, FailureKind.CANNOT_JOIN)
    for host in snapshot.hosts if verdict.failure.kind in kinds else ():
        report = host.termination_report
        if report is None or report.verdict.failure.kind is not FailureKind.CANNOT_JOIN:
            continue
        failure = report.verdict.failure
        if failure == verdict.failure:
            break
        address = "" if failure.rendezvous is None else failure.rendezvous.address
        template = "; {host.name}: cannot join host 0 at {address}: {why}"
        return Text(template, host=host, address=address, why=failure.detail)
    return EMPTY_TEXT


def _explain_unstarted_program(snapshot: Snapshot) -> Answer | None:
    if (answer := explain_unstarted_program(snapshot)) is None:
        return None
    return dataclasses.replace(answer, headline=Text("it {why}", why=answer.headline))


def _explain_exit_code(snapshot: Snapshot) -> Answer | None:
    """Explain the exit code of a container if no agent has left a verdict."""
    if (host := first_failed_host(snapshot)) is None:
        return None
    output = traceback_tail(host.terminated.get("message"))
    if host.reason == "DeadlineExceeded":
        headline = Text(
            "{host.name} was ended by its own activeDeadlineSeconds: {host.message}", host=host
        )
        step = advise_change("leave activeDeadlineSeconds out under pod:; use deadline:.")
        return Answer("deadline", headline, output, step)
    if (code := host.terminated["exitCode"]) != contract.KILLED:
        template = "{host} ended with exit code {code} ({reason})"
        reason = host.terminated.get("reason", "")
        return Answer("failed", Text(template, host=host.name, code=code, reason=reason), output)
    probe_failures = snapshot.find_events("Unhealthy", kind="Pod", on_hosts=[host])
    if (event := next(filter(is_liveness_failure, probe_failures), None)) is not None:
        template = "{host} was killed by SIGKILL (exit 137): its liveness probe fails"
        step = advise_change("fix or remove the probe; jobs need none.")
        evidence: Evidence = (*describe_event(event), *output)
        return Answer("failed", Text(template, host=host.name), evidence, step)
    # Container runtimes sometimes lose the reason OOMKilled.
    limit = _memory_limit(snapshot)
    template = "{host} was killed by SIGKILL (exit 137), probably out of memory; "
    template += "its memory limit is {limit}" if limit else "it has no memory limit"
    return Answer("killed", Text(template, host=host.name, limit=limit), output)


def first_failed_host(snapshot: Snapshot) -> Host | None:
    """Return the first host whose container ended with an error."""
    return next((host for host in snapshot.hosts if host.terminated.get("exitCode")), None)


def _explain_rejected_pod(snapshot: Snapshot) -> Answer | None:
    """Explain a pod that the kubelet of its node did not admit."""
    for host in snapshot.hosts:
        if host.phase == "Failed" and host.reason and not host.terminated:
            template = "node {host.node} rejected {host.name}: {host.reason}: {host.message}"
            fix = "fix what the message names; `{render}` shows the pod."
            step = advise_change(fix, render=RENDER)
            return Answer("failed", Text(template, host=host), next_step=step)
    return None


def _describe_conditions(snapshot: Snapshot) -> Evidence:
    """Return the condition Failed of the JobSet and of the first Jobs that have it."""
    jobs = [
        (f"Job {job['metadata']['name']}", find_condition(job, "Failed")) for job in snapshot.jobs
    ]
    failed_jobs = [(name, condition) for name, condition in jobs if condition.get("reason")]
    conditions = [("JobSet", find_condition(snapshot.jobset, "Failed")), *failed_jobs[:2]]
    template = "{name}: {reason}: {message}"
    return tuple(
        Text(template, **{"message": "", **condition}, name=name)
        for name, condition in conditions
        if condition.get("reason")
    )


def traceback_tail(text: str | None) -> tuple[str, ...]:
    """Return the last lines of a traceback."""
    lines = (text or "").strip().splitlines()
    return tuple(line.rstrip()[:300] for line in lines[-_TRACEBACK_LINES:])


def _last_verdict(snapshot: Snapshot) -> Verdict | None:
    return None if snapshot.report.attempt_end is None else snapshot.report.attempt_end.verdict


# --- memory ---------------------------------------------------------------------------------------


def is_oom(snapshot: Snapshot) -> bool:
    """Return whether these pods ended because they ran out of memory.

    A verdict has precedence, because a container keeps the reason OOMKilled of a process that was
    killed long before.
    """
    verdict = _last_verdict(snapshot)
    if verdict is None:
        return bool(_oom_killed_hosts(snapshot))
    if verdict.code not in (contract.KILLED, contract.LOST):
        return False
    return bool(_oom_killed_hosts(snapshot)) or verdict.failure.kind is FailureKind.OOM_KILLED


def _oom_killed_hosts(snapshot: Snapshot) -> list[Host]:
    # On cgroup v1 the kernel may kill a single process of a container, so that its agent survives.
    return [
        host
        for host in snapshot.hosts
        if "OOMKilled" in [end.get("reason") for end in (host.terminated, host.last_terminated)]
    ]


def describe_oom(snapshot: Snapshot) -> Text:
    """Return the host or rank that was OOMKilled, and its memory limit."""
    killed_hosts = _oom_killed_hosts(snapshot)
    verdict = _last_verdict(snapshot)
    limit = _memory_limit(snapshot)
    if killed_hosts and killed_hosts[0].is_init:
        limit, container = killed_hosts[0].memory_limit, killed_hosts[0].container
        group = host_group([host for host in killed_hosts if host.container == container], snapshot)
        template = "init container {container} of {hosts} was OOMKilled"
        subject = Text(template, container=container, hosts=group)
    elif verdict is None or verdict.code != contract.KILLED or verdict.rank is None:
        subject = Text(
            "{hosts} {hosts:was|were} OOMKilled", hosts=host_group(killed_hosts, snapshot)
        )
    else:
        template = "rank {verdict.rank} was OOMKilled"
        template += "" if verdict.step is None else " at step {verdict.step}"
        subject = Text(template, verdict=verdict)
    if limit:
        return subject + Text("; its memory limit is {limit}", limit=limit)
    return subject + Text("; it has no memory limit: the node itself ran out of memory")


def _memory_limit(snapshot: Snapshot) -> str | None:
    resources = hosts.jobset_main_container(snapshot.jobset).get("resources") or {}
    limit = (resources.get("limits") or {}).get("memory")
    return None if limit is None else str(limit)


def describe_full_shm(snapshot: Snapshot, verdict: Verdict) -> Text | None:
    """Return a note about /dev/shm if a process ended by SIGBUS, else None.

    A process gets SIGBUS if the file system of a mapped file is full. In a pod that is most often
    /dev/shm.
    """
    if verdict.code != _BUS_ERROR:
        return None
    size = Text("64 MiB, as none is set")
    for volume in pod_template(snapshot.jobset).get("spec", {}).get("volumes") or ():
        if volume.get("name") == "shm":
            limit = (volume.get("emptyDir") or {}).get("sizeLimit")
            size = Text("as large as the pod's memory") if limit is None else quote_message(limit)
    return Text("most often /dev/shm is full, which is {size} (resources.shm)", size=size)


# --- ephemeral storage ----------------------------------------------------------------------------

# The kubelet's messages about a pod that exceeded its own limit. Such a pod has no condition
# DisruptionTarget, unlike other evicted pods.
_EXCESS_MESSAGE = re.compile(
    r"exceeds the total limit of containers|exceeded its local ephemeral storage limit|Usage of "
    r"EmptyDir volume"
)
_EMPTY_DIR_MESSAGE = re.compile(r'EmptyDir volume "(?!shm")')


def explain_excess_eviction(snapshot: Snapshot) -> Answer | None:
    """Explain pods that were evicted because they exceeded their limits of ephemeral storage."""
    evicted_hosts = [
        host
        for host in snapshot.hosts
        if host.reason == "Evicted" and _EXCESS_MESSAGE.search(host.message)
    ]
    if not evicted_hosts:
        return None
    message = evicted_hosts[0].message.rstrip(". \n")
    group, key = host_group(evicted_hosts, snapshot), _limit_key(message)
    template = "{hosts} {hosts:was|were} evicted: {message} ({key})"
    step = advise_change(
        "raise {key} in job.yaml, or keep less on the node: /tmp and volumes of ephemeral: "
        "count, and logs.",
        key=key,
    )
    evidence = (Text("Pod {pod}: Evicted: {message}", pod=evicted_hosts[0].pod, message=message),)
    headline = Text(template, hosts=group, message=message, key=key)
    return Answer("ephemeral-storage", headline, evidence, step)


def describe_earlier_excess(snapshot: Snapshot) -> Text | None:
    """Return which pod was evicted for exceeding its limit, by the newest event about one.

    The pod itself may no longer exist.
    """
    event = snapshot.find_event("Evicted", kind="Pod")
    if event is None or _EXCESS_MESSAGE.search(event["message"]) is None:
        return None
    message = event["message"].rstrip(". \n")
    template = "Pod {pod} was evicted: {message} ({key})"
    return Text(template, pod=event["names"][0], message=message, key=_limit_key(message))


def _limit_key(message: str) -> str:
    """Return the key of job.yaml that sets the limit in a kubelet's message."""
    if "EmptyDir volume" not in message:
        return "resources.ephemeral"
    return "volumes: ephemeral" if _EMPTY_DIR_MESSAGE.search(message) else "resources.shm"
