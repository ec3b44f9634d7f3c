"""Why a job waits or failed, or what it does: one answer, its evidence, and what to do next. Pure.

Causes are checked in the order in which a job passes them: the first that applies is what holds it up.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Any

from jaxlaunch.launcher.diagnose.explain import (
    admission,
    containers,
    ended,
    failed,
    gang,
    images,
    queue,
    scheduling,
    sidecars,
    situations,
    unread,
)
from jaxlaunch.launcher.diagnose.explain.answer import Answer, Cause, first, one_line, quoted
from jaxlaunch.launcher.jobs.status.job_status import OVER, JobStatus, as_of_line, status_of
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes.objects import age
from jaxlaunch.launcher.wording import placed
from jaxlaunch.records import messages
from jaxlaunch.spelling import in_full, nearest

MAX_EVIDENCE = 24

CAUSES: tuple[Cause, ...] = (
    ended.over,
    failed.failed,
    queue.suspended_by_queue,
    unread.pods,
    ended.kept_in_namespace,
    gang.kept_from_done,
    gang.lost_host,
    admission.jobs_not_created,
    admission.pods_not_created,
    scheduling.unscheduled,
    gang.silent_node,
    gang.deleted_node,
    images.not_pulled,
    containers.not_started,
    sidecars.outliving,
    gang.node_lost,
    gang.unhealthy,
    gang.disrupted,
    gang.crash_loop,
    gang.restarting,
    gang.hanging,
    sidecars.failing,
    gang.gathering,
    gang.running,
)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer about one job. `facts` are true whatever the situation is: restarts, checkpoint, what is not known.

    `see`: the section of docs/troubleshooting.md, where something is wrong.
    """

    name: str
    namespace: str
    situation: str
    headline: str
    evidence: tuple[str, ...]
    facts: tuple[str, ...]
    next_move: str | None
    see: str | None

    def to_json(self) -> dict[str, Any]:
        """The fields under their own names."""
        return dataclasses.asdict(self)


def explain(job: Snapshot | NoSuchJob) -> Explanation:
    """The one thing that matters about the job now."""
    return _unknown(job) if isinstance(job, NoSuchJob) else _explain(job)


def _explain(snapshot: Snapshot) -> Explanation:
    answer = _with_warning(snapshot, first(CAUSES, snapshot) or _being_created(snapshot))
    last = snapshot.report.verdict
    move = answer.next_move or situations.next_move(answer.situation, snapshot.name)
    return Explanation(
        snapshot.name,
        snapshot.namespace,
        answer.situation,
        f"{snapshot.name} {answer.headline}",
        tuple(dict.fromkeys(answer.evidence))[:MAX_EVIDENCE],
        (*_facts(status_of(snapshot), snapshot.now), *_limits(snapshot)),
        None if move is None else placed(move, snapshot.namespace),
        situations.see(answer.situation, None if last is None else last.verdict.code),
    )


def _with_warning(snapshot: Snapshot, answer: Answer) -> Answer:
    """The same, with the newest warning about its objects as evidence: nobody is told to wait who was warned."""
    move = answer.next_move or situations.next_move(answer.situation, snapshot.name) or "wait"
    is_over = status_of(snapshot).state in OVER
    if is_over or not move.startswith("wait"):
        return answer
    return dataclasses.replace(answer, evidence=(*answer.evidence, *quoted(snapshot.warning)))


def _unknown(job: NoSuchJob) -> Explanation:
    """No JobSet has that name."""
    near = nearest(job.name, job.other_jobs, 3) or in_full(job.name, job.other_jobs, 3)
    move = (
        f"did you mean {' or '.join(near)}?"
        if near
        else "`launcher list` shows the jobs of the namespace; -n NAMESPACE selects another."
    )
    evidence = [f"{one['kind']} {one['names'][0]}: {one['reason']}: {one['message'][:200]}" for one in job.events[:3]]
    headline = f"job {job.name} not found in namespace {job.namespace}"
    if job.ending_namespace is not None:
        headline += ", which is being deleted"
        evidence += ended.terminating(job.ending_namespace)
    headline += _what_is_left(job)
    see = situations.see("unknown")
    return Explanation(
        job.name, job.namespace, "unknown", headline, tuple(evidence), job.unread, placed(move, job.namespace), see
    )


def _what_is_left(job: NoSuchJob) -> str:
    """Of a job that is gone: objects of it that do not go, or that it completed before."""
    if (held := ended.kept(job.left, job.now)) is not None:
        return f": it is deleted, and {held.what}"
    event = next((one for one in job.events if one["reason"] == "AllJobsCompleted"), None)
    return "" if event is None else f": it completed at {event['last']}, and was deleted since (by its ttl, or by hand)"


def _being_created(snapshot: Snapshot) -> Answer:
    """Nothing holds it up: the controllers have not created all of it yet."""
    status = status_of(snapshot)
    here = f"{len(snapshot.hosts)} of {status.hosts} pods exist"
    if (warning := snapshot.warning) is not None and warning["kind"] != "JobSet":  # these have causes of their own
        here += f"; the newest warning: {warning['reason']}: {one_line(warning['message'])}"
    if not_seen := {"events", "jobs"} & snapshot.not_read:
        return unread.reasons(snapshot, min(not_seen), f"is being created: {here}")
    return Answer("creating", f"is being created: {here}")


def _facts(status: JobStatus, now: datetime) -> list[str]:
    """Restarts by cause, the age of the last checkpoint, and from when the numbers are that no pod can give now."""
    facts = []
    restarts = status.restarts
    if restarts.total or restarts.by_cause:
        facts.append(restarts_line(status))
    if (ranks := ranks_line(status)) and status.state not in OVER:
        facts.append(ranks)
    if status.as_of is not None:
        return [*facts, f"as of {as_of_line(status, now)}: {_numbers(status)}"]
    if status.committed is not None:
        since = (
            f", {age(status.committed_age_s)} ago"
            if status.committed_age_s is not None
            else ", before these pods started"
        )
        facts.append(f"last good checkpoint: step {status.committed}{since}")
    return facts


def _numbers(status: JobStatus) -> str:
    """ "step 40, last good checkpoint: step 37, goodput 81.0%", as far as they are known."""
    step = "no step is known" if status.step is None else f"step {status.step}"
    saved = "" if status.committed is None else f", last good checkpoint: step {status.committed}"
    return step + saved + ("" if status.goodput is None else f", goodput {status.goodput:.1%}")


def ranks_line(status: JobStatus) -> str:
    """ "ranks on hosts 0, 3, 2; spare: host 1", of a job whose ranks may move; empty of others."""
    if status.members is None:
        return ""
    spare = f"spare: {messages.names(status.spares)}" if status.spares else "no spare is ready"
    return f"ranks on {'host' if status.members.isdecimal() else 'hosts'} {status.members.replace(',', ', ')}; {spare}"


def restarts_line(status: JobStatus) -> str:
    """ "restarts: 3, of which 1 counts against the limit of 5; attempts ended by crash 2, preempted 1",
    and how many preemptions in a row were without progress."""
    restarts = status.restarts
    verb = "counts" if restarts.charged == 1 else "count"
    text = f"restarts: {restarts.total}, of which {restarts.charged} {verb} against the limit of {restarts.limit}"
    if restarts.by_cause:
        text += "; attempts ended by " + ", ".join(
            f"{cause} {many}" for cause, many in sorted(restarts.by_cause.items())
        )
    if restarts.preempted:
        of = "" if restarts.preempted_limit is None else f" of {restarts.preempted_limit}"
        text += f"; {restarts.preempted}{of} preemptions in a row without a newly saved step"
    return text


def _limits(snapshot: Snapshot) -> list[str]:
    """What could not be read, so that this answer may lack it."""
    limits = []
    if not snapshot.is_ours:
        limits.append("this JobSet was not submitted by launcher: its steps and checkpoints are not known")
    if snapshot.report.unknown:
        limits.append(f"earlier attempts are not known: {snapshot.report.unknown}")
    return [*limits, *snapshot.unread]
