"""A job that failed: why, at which rank, and what to do before it is submitted again. Pure."""

from __future__ import annotations

import dataclasses
import re

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain import sidecars, unread
from jaxlaunch.launcher.diagnose.explain.answer import Answer, first, is_liveness, one_line, quoted
from jaxlaunch.launcher.diagnose.explain.containers import never_ran
from jaxlaunch.launcher.diagnose.explain.memory import (
    evicted_for_excess,
    full_shared_memory,
    is_oom,
    killed_sentence,
    more_memory,
    oom_sentence,
)
from jaxlaunch.launcher.diagnose.explain.situations import next_move
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.job_status import State, state_of
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import age, condition
from jaxlaunch.launcher.wording import count

_TRACEBACK_LINES = 20

# What to do after an end with that code. Codes that JobSet restarts end a job only once its restarts are used up.
MOVES = {
    contract.BAD_SPEC: "fix what the message names in job.yaml, then `launcher submit --replace`.",
    contract.BAD_DATA: "fix the data or its path, then `launcher submit --replace`.",
    contract.STARTUP: "fix the program: the traceback shows where; then `launcher submit --replace`.",
    contract.NOT_FINITE: "fix the data if it is named, else lower the learning rate; then `launcher submit --replace`.",
    contract.NO_CHECKPOINT: "check the checkpoint folder: is it complete, and does no other run own it?",
    contract.NO_PROGRESS: "fix the first error; another try does not help.",
}


# By what the operating system says of a file: the program is right, and its pod is not what it expects.
_OF_FILES = {
    "[Errno 13]": "let the pods' user (a number: user in the cluster defaults) read and write there; then "
    "`launcher submit --replace`.",
    "[Errno 28]": "make room on the file system that it writes to: /dev/shm (resources.shm), the pod's own disk "
    "(resources.ephemeral) or a volume; then `launcher submit --replace`.",
    "[Errno 30]": "have it write below /tmp, or mount a volume there (volumes: in job.yaml), since what the image "
    "brings is read-only; then `launcher submit --replace`.",
}

_POD_DEADLINE = "DeadlineExceeded"  # a pod's own reason, by its kubelet
_RESUMES = re.compile(r"submit --replace`\.$|submit it again\.$")
_CANNOT_JOIN = "rendezvous: cannot join host 0"  # as launcher/agent/host/member says it


def failed(snapshot: Snapshot) -> Answer | None:
    """It failed for good: the first of these causes that applies."""
    if state_of(snapshot) is not State.FAILED:
        return None
    causes = (
        _overdue,
        _out_of_memory,
        evicted_for_excess,
        _hooked,
        sidecars.failed,
        _by_verdict,
        _never_ran,
        _exited,
        _rejected,
    )
    answer = first(causes, snapshot) or _unexplained(snapshot)
    move = answer.next_move or next_move(answer.situation, snapshot.name) or next_move("failed", snapshot.name)
    if move is not None and (saved := snapshot.report.committed) is not None and _RESUMES.search(move):
        move = f"{move.rstrip('.')}: it resumes from step {saved}."
    headline = f"failed{_spent(snapshot)}: {answer.headline}"
    return Answer(answer.situation, headline, (*answer.evidence, *_conditions(snapshot)), move)


def _overdue(snapshot: Snapshot) -> Answer | None:
    """By Kubernetes, which counts one generation, or by the agents, which count all of them and save."""
    last = snapshot.report.verdict
    if last is not None and last.verdict.code == contract.DEADLINE:
        return Answer("deadline", one_line(last.verdict.message))
    if not _is_overdue(snapshot):
        return None
    return Answer("deadline", f"{_deadline(snapshot)} was exceeded")


def _out_of_memory(snapshot: Snapshot) -> Answer | None:
    return Answer("oom", oom_sentence(snapshot), next_move=more_memory(snapshot)) if is_oom(snapshot) else None


def _hooked(snapshot: Snapshot) -> Answer | None:
    """By its postStart hook: the kubelet then kills the container, whose agent may say that it was stopped."""
    event = snapshot.event("FailedPostStartHook", kind="Pod")
    last = snapshot.report.verdict
    if event is None or (last is not None and last.verdict.code != contract.PREEMPTED):
        return None
    host = _first_that_failed(snapshot)
    if host is None:
        return None
    headline = f"the postStart hook of {host.name} failed: {one_line(event['message'])}"
    output = () if host.termination_report else traceback(host.ended.get("message"))  # an agent's report is JSON
    return Answer("failed", headline, (*quoted(event), *output), "fix the hook under pod:, or remove it.")


def _by_verdict(snapshot: Snapshot) -> Answer | None:
    """By the verdict of its agents."""
    if snapshot.report.verdict is None:
        return None
    verdict = snapshot.report.verdict.verdict
    headline = f"{verdict.cause} (exit {verdict.code}): {one_line(verdict.message)}{_not_joined(snapshot)}"
    move = next((move for sign, move in _OF_FILES.items() if sign in verdict.message), MOVES.get(verdict.code))
    if (full := full_shared_memory(snapshot, verdict)) is not None:
        headline, move = f"{headline}; {full}", "raise resources.shm in job.yaml, then `launcher submit --replace`."
    return Answer("failed", headline, traceback(verdict.traceback), move)


def _not_joined(snapshot: Snapshot) -> str:
    """Why a host did not join, in its own words: the leader only knows that it did not."""
    own = [(host, report.verdict.message) for host in snapshot.hosts if (report := host.termination_report)]
    last = snapshot.report.verdict
    found = next(((host, text) for host, text in own if text.startswith(_CANNOT_JOIN)), None)
    if (
        found is None
        or last is None
        or not last.verdict.message.startswith("rendezvous: ")
        or found[1] == last.verdict.message
    ):
        return ""
    return f"; {found[0].name}: {one_line(found[1].removeprefix('rendezvous: '))}"


def _never_ran(snapshot: Snapshot) -> Answer | None:
    answer = never_ran(snapshot)
    return None if answer is None else dataclasses.replace(answer, headline=f"it {answer.headline}")


def _exited(snapshot: Snapshot) -> Answer | None:
    """By the exit code of a container, where no agent left a verdict."""
    host = _first_that_failed(snapshot)
    if host is None:
        return None
    code, output = host.ended["exitCode"], traceback(host.ended.get("message"))
    if host.reason == _POD_DEADLINE:
        headline = f"{host.name} was ended by its own activeDeadlineSeconds: {one_line(host.message)}"
        return Answer("deadline", headline, output, "leave activeDeadlineSeconds out under pod:; use deadline:.")
    if code == contract.KILLED:
        event = snapshot.event("Unhealthy", kind="Pod")
        if event is not None and is_liveness(event) and host.pod in event["names"]:
            headline = f"{host.name} was killed by SIGKILL (exit 137): its liveness probe fails"
            return Answer("failed", headline, (*quoted(event), *output), "fix or remove the probe; jobs need none.")
        return Answer("killed", killed_sentence(snapshot, host), output)
    return Answer("failed", f"{host.name} ended with exit code {code} ({host.ended.get('reason', '')})", output)


def _first_that_failed(snapshot: Snapshot) -> Host | None:
    return next((host for host in snapshot.hosts if host.ended.get("exitCode")), None)


def _rejected(snapshot: Snapshot) -> Answer | None:
    """By the kubelet of its node, which admits only what it can run."""
    host = next((host for host in snapshot.hosts if host.phase == "Failed" and host.reason and not host.ended), None)
    if host is None:
        return None
    headline = f"node {host.node} rejected {host.name}: {host.reason}: {one_line(host.message)}"
    return Answer("failed", headline, next_move="fix what the message names; `launcher render` shows the pod.")


def _unexplained(snapshot: Snapshot) -> Answer:
    message = one_line(condition(snapshot.jobset, "Failed").get("message", ""))
    lost = "" if snapshot.hosts or "pods" in snapshot.not_read else "; no pod is left that could say why"
    return Answer("failed", f"{message}{lost}{unread.because(snapshot, 'pods', 'jobs')}")


def _conditions(snapshot: Snapshot) -> tuple[str, ...]:
    """The condition Failed of the JobSet and of the first Jobs that have it."""
    found = condition(snapshot.jobset, "Failed")
    ends = [(job["metadata"]["name"], condition(job, "Failed")) for job in snapshot.jobs]
    failed_jobs = [
        f"Job {name}: {one['reason']}: {one_line(one.get('message', ''))}" for name, one in ends if one.get("reason")
    ]
    of_jobset = (f"JobSet: {found['reason']}: {one_line(found.get('message', ''))}",) if found.get("reason") else ()
    return (*of_jobset, *failed_jobs[:2])


def _spent(snapshot: Snapshot) -> str:
    """ " after 5 restarts", when it was given up for them."""
    is_spent = condition(snapshot.jobset, "Failed").get("reason") == "ReachedMaxRestarts"
    return f" after {count(snapshot.restarts, 'restart')}" if is_spent and snapshot.restarts else ""


def _is_overdue(snapshot: Snapshot) -> bool:
    return any(condition(job, "Failed").get("reason") == "DeadlineExceeded" for job in snapshot.jobs) or (
        snapshot.event("DeadlineExceeded", kind="Job") is not None and snapshot.report.verdict is None
    )


def _deadline(snapshot: Snapshot) -> str:
    for job in snapshot.jobs:
        if (seconds := job.get("spec", {}).get("activeDeadlineSeconds")) is not None:
            return f"its deadline of {age(float(seconds))}"
    return "its deadline"


def traceback(text: str | None) -> tuple[str, ...]:
    """The end of a traceback, line by line."""
    return tuple(line.rstrip()[:300] for line in (text or "").strip().splitlines()[-_TRACEBACK_LINES:])
