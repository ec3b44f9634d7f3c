"""The answer of `explain` for a run on this machine, in the same terms as for a job on a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain import failed, gang
from jaxlaunch.launcher.diagnose.explain.answer import Answer
from jaxlaunch.launcher.diagnose.explain.explanation import Diagnosis, Explanation, describe_restarts
from jaxlaunch.launcher.diagnose.explain.situations import STEPS_BY_CODE
from jaxlaunch.launcher.diagnose.text import NAME, NOTHING, Text, launcher, resubmit, run, wait
from jaxlaunch.launcher.jobs.status.job_status import OVER, JobStatus, State
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.launcher.local.status import Live, status_of, verdict_of, was_killed

# The number of attempts whose verdicts are shown as evidence.
_ENDS = 3
_RUN_AGAIN = launcher("run", is_namespaced=False)


def explain(record: Run, live: Live | None) -> Explanation:
    """Return the most important fact about the run, with evidence and advice."""
    status, verdict = status_of(record, live), verdict_of(record)
    answer = _explain_end(record, status) if status.state in OVER else _explain_progress(record, status, live)
    code = None if verdict is None else verdict.code
    facts = tuple(_facts(record, status))
    return Diagnosis(record.name, "", answer, facts, answer.next_step, code, again=_RUN_AGAIN).render()


def _explain_end(record: Run, status: JobStatus) -> Answer:
    verdict = verdict_of(record)
    assert verdict is not None, "it is over"
    if status.state is State.DONE:
        headline = Text("is done: all of {hosts:host}", hosts=status.hosts)
        headline += NOTHING if status.step is None else Text(", step {step}", step=status.step)
        headline += NOTHING if status.lasted_s is None else Text(" in {lasted:age}", lasted=status.lasted_s)
        return Answer("done", headline)
    resume = resubmit("`{run}` of the same file resumes it", run=_RUN_AGAIN)
    if status.committed is not None:
        resume = resubmit("`{run}` of the same file resumes it from step {step}", run=_RUN_AGAIN, step=status.committed)
    if was_killed(record):
        at = NOTHING if status.step is None else Text(" at step {step}", step=status.step)
        return Answer("failed", Text("was interrupted{at}: {why}", at=at, why=verdict.message), next_step=resume)
    if status.state is State.STOPPED:
        return Answer("stopped", Text("is stopped: {why}", why=verdict.message), next_step=resume)
    situation = "deadline" if verdict.code == contract.DEADLINE else "failed"
    again = run("`{logs}` shows what it wrote; then `{run}` it again.", logs=launcher("logs", NAME), run=_RUN_AGAIN)
    after = NOTHING if status.lasted_s is None else Text(" after {lasted:age}", lasted=status.lasted_s)
    headline = Text("failed{after}: {verdict}", after=after, verdict=failed.describe_verdict(verdict))
    # Not the steps by errno, which are about pods.
    step = STEPS_BY_CODE.get(verdict.code, again)
    return Answer(situation, headline, failed.traceback_tail(verdict.traceback), step)


def _explain_progress(record: Run, status: JobStatus, live: Live | None) -> Answer:
    if record.holder is not None and not record.holder.is_here:
        headline = Text("runs on another machine, or in a container whose processes cannot be seen from here")
        return Answer("running", headline)
    if status.state is State.STOPPING:
        headline = Text("is stopping: {agents:agent} still saving", agents=status.ready or 0)
        return Answer("stopping", headline, next_step=wait())
    if status.state in (State.STARTING, State.GATHERING):
        return Answer("starting", Text("is starting: its agents have not all connected"), next_step=wait())
    template = "attempt {end.attempt}: {end.cause}: {end.verdict.message}"
    ends = [Text(template, end=end) for end in record.records[-_ENDS:]]
    if status.state is State.RESTARTING:
        logs = launcher("logs", NAME, "--previous")
        return Answer("restarting", Text("is between two attempts"), tuple(ends), run(command=logs))
    phases = {} if live is None else dict(live.phases)
    kinds = sorted(set(phases.values()))
    ranks = [
        Text("in {kind}: rank {ranks}", kind=kind, ranks=[rank for rank in phases if phases[rank] == kind])
        for kind in kinds
    ]
    again = Text(" again after {cause}", cause=record.records[-1].cause) if record.records else NOTHING
    headline = Text("runs{again}: {phase}", again=again, phase=gang.describe_phase(status))
    evidence = (*reversed(ends), *([Text("{ranks:; }", ranks=ranks)] if len(kinds) > 1 else []))
    step = gang.PREPARING if status.phase == "prepare" else None
    return Answer("restarted" if record.records else "running", headline, evidence, step)


def _facts(record: Run, status: JobStatus) -> Iterator[Text]:
    if status.restarts.by_cause:
        yield Text("restarts: {restarts}", restarts=describe_restarts(status))
    if status.committed is not None:
        yield Text("last good checkpoint: step {step}", step=status.committed)
    if status.goodput is not None:
        yield Text("goodput: {goodput:.1%}", goodput=status.goodput)
    yield Text("run folder: {folder}", folder=str(record.folder))
