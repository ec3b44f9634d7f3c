"""The explanation of a job: what it does or why it waits, and the next step. Pure functions.

`diagnose_job` checks the causes in the order of a job's life, from its admission to its end. The
first cause that applies is the answer. The texts are data until `Diagnosis.render` turns them into
strings for the screen and for JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
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
from jaxlaunch.launcher.jobs.status import hosts, roles
from jaxlaunch.launcher.jobs.status.job_status import (
    FINAL_STATES,
    JobStatus,
    State,
    derive_status,
    describe_as_of,
)
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.records.summary import RankMemory
from jaxlaunch.records.verdict import render_numbers
from jaxlaunch.spelling import find_completions, find_nearest

MAX_EVIDENCE = 24

CAUSES: tuple[Cause, ...] = (
    termination.explain_finished,
    failures.explain_failure,
    queue.explain_queue,
    explain_unread_pods,
    failures.explain_hold,
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
        facts: Facts that do not depend on the situation: restarts, the checkpoint, unknowns.
        next_move: The next step as text, or None if there is nothing to do.
        see: Command that shows the section of docs/troubleshooting.md, if something is wrong.
        action: Kind of `next_move`: "wait", "run", "change", "resubmit" or "ask".
        commands: Commands in `next_move`, each as a tuple of words.
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
        """Return the fields as JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The answer about one job, as data.

    Attributes:
        namespace: Namespace of the job, empty for a run on this machine.
        facts: Facts that do not depend on the situation.
        next_step: Next step, or None if there is nothing to do.
        code: Exit code of the last attempt, if it has ended.
        job_words: Arguments with which the job was submitted.
        run_command: Command of a run on this machine.
        reference: Argument that selects the job in commands, or None for its name.
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
        """Render all texts."""
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
            # A command with a placeholder cannot be run.
            commands=tuple(tuple(words) for words in commands if JOB_FILE not in words),
        )


def _render_lines(renderer: Renderer, texts: Iterable[Text | str]) -> Iterable[str]:
    return (text if isinstance(text, str) else renderer.render(text) for text in texts)


def explain_job(job: Snapshot | NoSuchJob) -> Explanation:
    """Return the rendered explanation of a job."""
    return diagnose_job(job).render()


def diagnose_job(job: Snapshot | NoSuchJob) -> Diagnosis:
    """Return the answer of the first cause that applies, with the facts and the next step."""
    if isinstance(job, NoSuchJob):
        unknown = _explain_unknown_job(job)
        return Diagnosis(job.name, job.namespace, unknown, job.unread, unknown.next_step)
    parts = roles.split_roles(job)
    return _diagnose_roles(job, parts) if parts else _diagnose_part(job)


def _diagnose_roles(job: Snapshot, parts: Mapping[str, Snapshot]) -> Diagnosis:
    """Return the answer about the role that decides, or while that waits, about the first one."""
    decisive = roles.find_decisive_role(job) or next(iter(parts))
    status = derive_status(job)
    diagnoses = {name: _diagnose_part(part) for name, part in parts.items()}
    chosen = decisive
    if status.state not in FINAL_STATES and status.state is not State.QUEUED:
        # Roles are in the order in which they start, so that the first waits for no other.
        waiting = (
            name
            for name, role in status.roles.items()
            if role.state not in (State.RUNNING, *FINAL_STATES)
        )
        chosen = next(waiting, decisive)
    diagnosis = diagnoses[chosen]
    if status.state is not State.QUEUED:
        headline = Text("(role {role}) {headline}", role=chosen, headline=diagnosis.answer.headline)
        answer = dataclasses.replace(diagnosis.answer, headline=headline)
        diagnosis = dataclasses.replace(diagnosis, answer=answer)
    others = (
        Text("role {name}: {headline}", name=name, headline=diagnoses[name].answer.headline)
        for name, role in status.roles.items()
        if name != chosen and role.state is not State.STOPPED
    )
    facts = diagnosis.facts if status.state is State.QUEUED else (*others, *diagnosis.facts)
    return dataclasses.replace(diagnosis, facts=facts)


def _diagnose_part(job: Snapshot) -> Diagnosis:
    answer = first_answer(CAUSES, job) or _explain_creation(job)
    last_end, status = job.report.attempt_end, derive_status(job)
    facts: Evidence = (*_list_facts(status, job.now), *_list_unknowns(job))
    if last_end is not None and last_end.memory is not None:
        facts = (describe_memory(last_end.memory), *facts)
    step = answer.next_step or SITUATIONS[answer.situation].next_step
    if status.state not in FINAL_STATES and (step is None or step.action is Action.WAIT):
        # A user who is advised to wait should also see what Kubernetes warns about.
        evidence = (*answer.evidence, *describe_event(job.newest_warning))
        answer = dataclasses.replace(answer, evidence=evidence)
    exit_code = None if last_end is None else last_end.verdict.code
    return Diagnosis(job.name, job.namespace, answer, facts, step, exit_code, job.submitted_words)


def _explain_unknown_job(job: NoSuchJob) -> Answer:
    """Explain that no JobSet has that name."""
    suggestions = find_nearest(job.name, job.other_jobs, 3)
    suggestions = suggestions or find_completions(job.name, job.other_jobs, 3)
    if suggestions:
        step = advise_change("did you mean {names: or }?", names=suggestions)
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
        evidence += termination.describe_terminating_namespace(job.ending_namespace)
    remaining_pods = [
        obj
        for kind, obj in job.leftovers
        if kind == "pod" and obj["status"].get("phase") not in ("Succeeded", "Failed")
    ]
    completion = next(
        (event for event in job.events if event["reason"] == "AllJobsCompleted"), None
    )
    if (stuck_object := termination.first_stuck_object(job.leftovers, job.now)) is not None:
        headline += Text(": it is deleted, and {what}", what=stuck_object.description)
    elif remaining_pods:
        # The garbage collector deletes pods after their JobSet.
        template = ": it was deleted, and {pods:pod} still {pods:terminates|terminate}"
        headline += Text(template, pods=len(remaining_pods))
    elif completion is not None:
        # A later job of the same name may have been deleted before it completed.
        template = ": a job of this name completed at {at}, and was deleted since, by its ttl or "
        headline += Text(f"{template}by hand", at=completion["last"])
    return Answer("unknown", headline, evidence, step)


def _explain_creation(snapshot: Snapshot) -> Answer:
    """Explain that the controllers have not created all objects yet, for no other reason."""
    template = "is being created: {pods} of {expected} pods exist"
    headline = Text(template, pods=len(snapshot.hosts), expected=snapshot.expected_hosts)
    # Other causes explain the warnings about the JobSet itself.
    if (warning := snapshot.newest_warning) is not None and warning["kind"] != "JobSet":
        headline += Text("; the newest warning: {reason}: {message}", **warning)
    if unread_kinds := {"events", "jobs"} & snapshot.unread_reasons.keys():
        return unread_answer(snapshot, min(unread_kinds), headline)
    return Answer("creating", headline)


def _list_facts(status: JobStatus, now: datetime) -> list[Text]:
    """Return the restarts, the hosts with ranks, the last checkpoint and the age of the numbers."""
    facts = []
    if status.restart_counts.total or status.restarts:
        facts.append(Text("restarts: {restarts}", restarts=describe_restarts(status)))
    if status.members is not None and status.state not in FINAL_STATES:
        facts.append(Text("ranks {ranks}", ranks=describe_ranks(status)))
    checkpoint = Text("last good checkpoint: step {step}", step=status.committed)
    if status.as_of is not None:
        template = "no step is known" if status.step is None else "step {step}"
        numbers = [Text(template, step=status.step)]
        if status.committed is not None:
            numbers.append(checkpoint)
        if status.goodput is not None:
            numbers.append(Text("goodput {goodput:.1%}", goodput=status.goodput))
        moment = describe_as_of(status, now)
        facts.append(Text("as of {when}: {numbers}", when=moment, numbers=numbers))
    elif status.committed is not None:
        age_s = status.committed_age_s
        since = ", before these pods started" if age_s is None else ", {age:age} ago"
        facts.append(checkpoint + Text(since, age=age_s))
    return facts


def describe_memory(memory: RankMemory) -> Text:
    """Return "most memory of rank 3: process 7.1 GiB, host 1: 7.9 of 8 GiB (99 %)"."""
    template = "most memory of rank {rank}: {memory}"
    return Text(template, rank=memory.rank, memory=memory.describe())


def describe_ranks(status: JobStatus) -> Text:
    """Return "on hosts 0, 3, 2; spare: host 1", or no text if the ranks of the job never move."""
    if status.members is None:
        return EMPTY_TEXT
    template = "on host {members}; " if status.members.isdecimal() else "on hosts {members}; "
    template += "spare: {spares}" if status.spares else "no spare is ready"
    members = status.members.replace(",", ", ")
    return Text(template, members=members, spares=render_numbers(status.spares))


def describe_restarts(status: JobStatus) -> Text:
    """Return "3, of which 2 in the same pods; 1 of 5 (restarts.crash); attempts ended by crash 3".

    If the job was preempted, the number of preemptions in a row without progress is added.
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


def _list_unknowns(snapshot: Snapshot) -> Iterator[Text | str]:
    """Yield what is not known about the job, and why."""
    if not snapshot.is_ours:
        yield Text(
            "this JobSet was not submitted by launcher: its steps and checkpoints are not known"
        )
    if reason := snapshot.report.unknown_reason:
        yield Text("earlier attempts are not known: {why}", why=reason)
    elif snapshot.is_job_recreated and not hosts.has_run_folder(snapshot.jobset):
        template = (
            "attempts before {at} are not known: its Job was deleted then and created again, and "
            "the job keeps nothing outside of its pods"
        )
        created = (job["metadata"].get("creationTimestamp", "") for job in snapshot.jobs)
        yield Text(template, at=max(created))
    yield from snapshot.unread
