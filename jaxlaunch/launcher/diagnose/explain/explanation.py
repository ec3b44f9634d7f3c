"""The explanation of a job: what it does or why it waits, and the next step. Pure.

Causes are checked in the order in which a job passes them, and the first one that applies is the
answer. Everything is data until `Diagnosis.render` renders the texts for the screen and for JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from jaxlaunch.launcher.diagnose.explain import (
    admission,
    containers,
    failures,
    gang,
    queue,
    scheduling,
    termination,
)
from jaxlaunch.launcher.diagnose.explain.answer import (
    Answer,
    Cause,
    Evidence,
    explain_unread_pods,
    first_answer,
    unread_answer,
)
from jaxlaunch.launcher.diagnose.explain.situations import SITUATIONS, section_link
from jaxlaunch.launcher.diagnose.text import (
    EMPTY_TEXT,
    JOB_FILE,
    Action,
    Command,
    NextStep,
    Renderer,
    Text,
    advise_change,
    advise_run,
    describe_event,
    launcher_command,
)
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.job_status import (
    FINAL_STATES,
    JobStatus,
    derive_status,
    describe_as_of,
)
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.records.verdict import render_numbers
from jaxlaunch.spelling import find_completions, find_nearest

MAX_EVIDENCE = 24

CAUSES: tuple[Cause, ...] = (
    termination.explain_finished,
    failures.explain_failure,
    queue.explain_queue,
    explain_unread_pods,
    gang.explain_blocked_completion,
    gang.explain_lost_host,
    admission.explain_missing_jobs,
    admission.explain_missing_pods,
    scheduling.explain_unscheduled,
    gang.explain_silent_node,
    gang.explain_deleted_node,
    containers.explain_image_pull,
    containers.explain_not_started,
    containers.explain_outliving_sidecar,
    gang.explain_node_lost,
    gang.explain_unhealthy,
    gang.explain_disruption,
    gang.explain_crash_loop,
    gang.explain_restart,
    gang.explain_hang,
    containers.explain_failing_sidecar,
    gang.explain_rendezvous,
    gang.explain_running,
)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer about one job, as texts.

    Attributes:
        facts: What is true whatever the situation is: restarts, checkpoint, what is not known.
        next_move: What to do next, if anything.
        see: The section of docs/troubleshooting.md, where something is wrong.
        action: The kind of `next_move`: "wait", "run", "change", "resubmit" or "ask".
        commands: The commands that `next_move` names, each as its words.
    """

    name: str
    namespace: str
    situation: str
    headline: str
    evidence: tuple[str, ...]
    facts: tuple[str, ...]
    next_move: str | None
    see: str | None
    action: str | None
    commands: tuple[tuple[str, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields under their own names."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The answer about one job, as data.

    Attributes:
        namespace: Empty for a run on this machine.
        facts: What is true whatever the situation is.
        next_step: What to do next, if anything.
        code: The exit code of the last attempt, if it has one.
        job_words: The words with which the job was submitted.
        run_command: The command of a run on this machine.
        reference: What commands call the job, or None for its name.
    """

    name: str
    namespace: str
    answer: Answer
    facts: Evidence
    next_step: NextStep | None = None
    code: int | None = None
    job_words: tuple[str, ...] = (JOB_FILE,)
    run_command: Command | None = None
    reference: str | None = None

    def render(self) -> Explanation:
        """Return the texts."""
        renderer = Renderer(
            self.reference or self.name,
            self.namespace,
            job_words=self.job_words,
            run_command=self.run_command,
        )
        template = "job {name} {what}" if self.answer.situation == "unknown" else "{name} {what}"
        headline = Text(template, name=self.name, what=self.answer.headline)
        evidence = dict.fromkeys(_render_lines(renderer, self.answer.evidence))
        step = self.next_step
        commands = [] if step is None else map(renderer.command_words, step.list_commands())
        return Explanation(
            name=self.name,
            namespace=self.namespace,
            situation=self.answer.situation,
            headline=renderer.render(headline),
            evidence=tuple(evidence)[:MAX_EVIDENCE],
            facts=tuple(_render_lines(renderer, self.facts)),
            next_move=None if step is None else renderer.render(step.full_text()),
            see=section_link(self.answer.situation, self.code),
            action=None if step is None else step.action.value,
            # A command can be run only if it is known how the job was submitted.
            commands=tuple(tuple(words) for words in commands if JOB_FILE not in words),
        )


def _render_lines(renderer: Renderer, texts: Iterable[Text | str]) -> Iterable[str]:
    return (text if isinstance(text, str) else renderer.render(text) for text in texts)


def explain_job(job: Snapshot | NoSuchJob) -> Explanation:
    """Return the rendered explanation of a job."""
    return diagnose_job(job).render()


def diagnose_job(job: Snapshot | NoSuchJob) -> Diagnosis:
    """Return the answer of the first cause that applies, with facts and the next step."""
    if isinstance(job, NoSuchJob):
        unknown = _explain_unknown_job(job)
        return Diagnosis(job.name, job.namespace, unknown, job.unread, unknown.next_step)
    answer = first_answer(CAUSES, job) or _explain_creation(job)
    last, status = job.report.attempt_end, derive_status(job)
    facts = (*_list_facts(status, job.now), *_list_limits(job))
    step = answer.next_step or SITUATIONS[answer.situation].next_step
    if status.state not in FINAL_STATES and (step is None or step.action is Action.WAIT):
        # Advice to wait comes with the newest warning.
        evidence = (*answer.evidence, *describe_event(job.newest_warning))
        answer = dataclasses.replace(answer, evidence=evidence)
    code = None if last is None else last.verdict.code
    return Diagnosis(job.name, job.namespace, answer, facts, step, code, job.submitted_words)


def _explain_unknown_job(job: NoSuchJob) -> Answer:
    """Explain that no JobSet has that name."""
    near = find_nearest(job.name, job.other_jobs, 3)
    if near := near or find_completions(job.name, job.other_jobs, 3):
        step = advise_change("did you mean {names: or }?", names=near)
    else:
        template = "`{jobs}` shows the jobs of the namespace; -n NAMESPACE selects another."
        step = advise_run(template, jobs=launcher_command("list"))
    template = "{kind} {object}: {reason}: {text}"
    evidence: Evidence = tuple(
        Text(template, **event, object=event["names"][0], text=event["message"][:200])
        for event in job.events[:3]
    )
    headline = Text("not found in namespace {namespace}", namespace=job.namespace)
    if job.ending_namespace is not None:
        headline += Text(", which is being deleted")
        evidence += termination.terminating_namespace(job.ending_namespace)
    remaining = [pod for kind, pod in job.leftovers if kind == "pod"]
    remaining = [
        pod for pod in remaining if pod["status"].get("phase") not in ("Succeeded", "Failed")
    ]
    completed = next((event for event in job.events if event["reason"] == "AllJobsCompleted"), None)
    if (stuck := termination.first_stuck(job.leftovers, job.now)) is not None:
        headline += Text(": it is deleted, and {what}", what=stuck.description)
    elif completed is not None:
        template = ": it completed at {at}, and was deleted since (by its ttl, or by hand)"
        headline += Text(template, at=completed["last"])
    elif remaining:
        # The garbage collector deletes them after their JobSet.
        template = ": it was deleted, and {pods:pod} still {pods:terminates|terminate}"
        headline += Text(template, pods=len(remaining))
    return Answer("unknown", headline, evidence, step)


def _explain_creation(snapshot: Snapshot) -> Answer:
    """Explain that the controllers have not created all objects yet, and nothing blocks them."""
    template = "is being created: {pods} of {expected} pods exist"
    headline = Text(template, pods=len(snapshot.hosts), expected=snapshot.expected_hosts)
    # Events about the JobSet have their own causes.
    if (warning := snapshot.newest_warning) is not None and warning["kind"] != "JobSet":
        headline += Text("; the newest warning: {reason}: {message}", **warning)
    if unread := {"events", "jobs"} & snapshot.unread_reasons.keys():
        return unread_answer(snapshot, min(unread), headline)
    return Answer("creating", headline)


def _list_facts(status: JobStatus, now: datetime) -> list[Text]:
    """Return restarts by cause, ranks, the last checkpoint, and the time of recorded numbers."""
    facts = []
    if status.restart_counts.total or status.restarts:
        facts.append(Text("restarts: {restarts}", restarts=describe_restarts(status)))
    if status.members is not None and status.state not in FINAL_STATES:
        facts.append(Text("ranks {ranks}", ranks=describe_ranks(status)))
    saved = Text("last good checkpoint: step {step}", step=status.committed)
    if status.as_of is not None:
        template = "no step is known" if status.step is None else "step {step}"
        numbers = [Text(template, step=status.step)]
        if status.committed is not None:
            numbers.append(saved)
        if status.goodput is not None:
            numbers.append(Text("goodput {goodput:.1%}", goodput=status.goodput))
        when = describe_as_of(status, now)
        facts.append(Text("as of {when}: {numbers}", when=when, numbers=numbers))
    elif status.committed is not None:
        age_s = status.committed_age_s
        since = ", before these pods started" if age_s is None else ", {age:age} ago"
        facts.append(saved + Text(since, age=age_s))
    return facts


def describe_ranks(status: JobStatus) -> Text:
    """Return "on hosts 0, 3, 2; spare: host 1", or no text for a job whose ranks never move."""
    if status.members is None:
        return EMPTY_TEXT
    template = "on host {members}; " if status.members.isdecimal() else "on hosts {members}; "
    template += "spare: {spares}" if status.spares else "no spare is ready"
    members = status.members.replace(",", ", ")
    return Text(template, members=members, spares=render_numbers(status.spares))


def describe_restarts(status: JobStatus) -> Text:
    """Return "3, of which 2 in the same pods; 1 of 5 (restarts.crash); attempts ended by crash 3".

    How many preemptions in a row were without progress follows.
    """
    restarts = status.restart_counts
    template = (
        "{restarts.total}, of which {in_place} in the same pods; {restarts.charged} of "
        "{restarts.limit} (restarts.crash)"
    )
    in_place = max(0, restarts.total - status.generation)
    text = Text(template, restarts=restarts, in_place=in_place)
    if status.restarts:
        ends = [f"{cause} {number}" for cause, number in sorted(status.restarts.items())]
        text += Text("; attempts ended by {ends}", ends=ends)
    if restarts.preempted:
        template = "; {restarts.preempted}"
        if restarts.preempted_limit is not None:
            template += " of {restarts.preempted_limit}"
        template += " free restarts in a row without a newly saved step"
        text += Text(template, restarts=restarts)
    return text


def _list_limits(snapshot: Snapshot) -> Iterator[Text | str]:
    """Yield the limits of the answer: the objects that could not be read."""
    if not snapshot.is_ours:
        yield Text(
            "this JobSet was not submitted by launcher: its steps and checkpoints are not known"
        )
    if why := snapshot.report.unknown_reason:
        yield Text("earlier attempts are not known: {why}", why=why)
    elif snapshot.is_job_new and not hosts.has_run_folder(snapshot.jobset):
        template = (
            "attempts before {at} are not known: its Job was deleted then and made again, and the "
            "job keeps nothing outside of its pods"
        )
        created = (job["metadata"].get("creationTimestamp", "") for job in snapshot.jobs)
        yield Text(template, at=max(created))
    yield from snapshot.unread
