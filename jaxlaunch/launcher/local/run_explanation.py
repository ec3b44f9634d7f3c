"""Explanation of a run on this machine, in the form of `explain` for a job on a cluster."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain import failures, gang
from jaxlaunch.launcher.diagnose.explain.answer import Answer
from jaxlaunch.launcher.diagnose.explain.explanation import (
    Diagnosis,
    Explanation,
    describe_memory,
    describe_restarts,
)
from jaxlaunch.launcher.diagnose.explain.situations import STEPS_BY_CODE
from jaxlaunch.launcher.diagnose.text import (
    JOB_NAME,
    SUBMIT_AGAIN,
    Command,
    Text,
    advise_resubmit,
    advise_run,
    advise_wait,
    launcher_command,
)
from jaxlaunch.launcher.jobs.status.job_status import FINAL_STATES, JobStatus, State
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.launcher.local.status import (
    LiveStatus,
    ask_agents,
    run_status,
    run_verdict,
    was_killed,
)
from jaxlaunch.runs import layout
from jaxlaunch.runs.run_folder import RunFolder

# The number of newest attempts whose verdicts are shown as evidence.
_MAX_SHOWN_ENDS = 3


def explain_run(run: Run, live: LiveStatus | None) -> Explanation:
    """Return the most important fact about the run, with evidence and advice."""
    status, verdict = run_status(run, live), run_verdict(run)
    if status.state in FINAL_STATES:
        answer = _explain_end(run, status)
    else:
        answer = _explain_progress(run, status, live)
    code = None if verdict is None else verdict.code
    facts, command = tuple(_list_facts(run, status)), _run_command(run)
    roles = (explain_run(role, ask_agents(role)) for role in run.roles.values())
    facts = (*(Text("role {headline}", headline=role.headline) for role in roles), *facts)
    diagnosis = Diagnosis(run.name, "", answer, facts, answer.next_step, code, run_command=command)
    # A run in another place is not found by its name.
    is_here = run_folders.find_run(run.name) == run.folder
    reference = run.name if is_here else str(run.folder)
    return dataclasses.replace(diagnosis, reference=reference).render()


def _run_command(run: Run) -> Command:
    """Return the command that continues a run from the working folder."""
    command, folder = dict[str, Any](), run_folders.job_folder(run.folder)
    if (job := run.slurm_job) is not None:
        command = {"folder": job.folder, "words": list(job.words)}
    elif (start := run.newest_start) is not None:
        path = layout.start_file(start.start, layout.COMMAND)
        command = RunFolder(run.folder).read_json(path)
    words = command.get("words")
    if not (isinstance(words, list) and words and all(isinstance(word, str) for word in words)):
        # The run was not started by `launcher run`.
        words = [str(run.folder / layout.JOB), "--run-dir", str(run.folder)]
    elif command.get("folder") != os.getcwd():
        words[0] = os.path.join(str(command.get("folder", "")), words[0])
        if "--run-dir" in words:
            position = words.index("--run-dir")
            del words[position : position + 2]
        words += ["--run-dir", str(folder)]
    if job is not None:
        return Command(("launcher", "render", "--slurm", *words), False, reader=("sbatch",))
    return launcher_command("run", *words, is_namespaced=False)


def _explain_end(run: Run, status: JobStatus) -> Answer:
    verdict = run_verdict(run)
    assert verdict is not None, "a run that has ended has a verdict"
    if status.state is State.DONE:
        headline = Text("is done: all of {hosts:host}", hosts=status.hosts)
        if status.step is not None:
            headline += Text(", step {step}", step=status.step)
        if status.lasted_s is not None:
            headline += Text(" in {lasted:age}", lasted=status.lasted_s)
        return Answer("done", headline)
    template = "`{run}` starts it again: it reported no saved step"
    if status.committed is not None:
        template = "`{run}` resumes it from step {step}"
    resume = advise_resubmit(template, run=SUBMIT_AGAIN, step=status.committed)
    if was_killed(run):
        at_step = "" if status.step is None else " at step {step}"
        template = f"was interrupted{at_step}: {{why}}"
        headline = Text(template, step=status.step, why=verdict.message)
        return Answer("failed", headline, next_step=resume)
    if status.state is State.STOPPED:
        return Answer("stopped", Text("is stopped: {why}", why=verdict.message), next_step=resume)
    situation = "deadline" if verdict.code == contract.DEADLINE else "failed"
    retry = advise_run(
        "`{logs}` shows what it wrote; then `{run}`.",
        logs=launcher_command("logs", JOB_NAME),
        run=SUBMIT_AGAIN,
    )
    after = "" if status.lasted_s is None else " after {lasted:age}"
    text = failures.describe_verdict(verdict)
    headline = Text(f"failed{after}: {{verdict}}", lasted=status.lasted_s, verdict=text)
    # The steps by errno are about pods and do not apply here.
    next_step = STEPS_BY_CODE.get(verdict.code, retry)
    return Answer(situation, headline, failures.traceback_tail(verdict.traceback), next_step)


def _explain_progress(run: Run, status: JobStatus, live: LiveStatus | None) -> Answer:
    if run.holder is not None and not run.holder.is_here:
        headline = Text(
            "runs on another machine, or in a container whose processes cannot be seen from here"
        )
        return Answer("running", headline)
    if status.state is State.STOPPING:
        headline = Text("is stopping: {agents:agent} still saving", agents=status.ready or 0)
        return Answer("stopping", headline, next_step=advise_wait())
    if status.state in (State.STARTING, State.GATHERING):
        headline = Text("is starting: its agents have not all connected")
        return Answer("starting", headline, next_step=advise_wait())
    verdict = run_verdict(run)
    if status.state is State.HELD and verdict is not None:
        return failures.explain_held_verdict(verdict, status)
    template = "attempt {end.attempt}: {end.cause}: {end.verdict.message}"
    ends = [Text(template, end=end) for end in run.attempt_records[-_MAX_SHOWN_ENDS:]]
    if run.is_requeued and (job := run.slurm_job) is not None:
        next_step = advise_run(command=Command(("squeue", f"--jobs={job.id}"), is_namespaced=False))
        headline = Text("waits until Slurm starts job {id} again", id=job.id)
        return Answer("restarting", headline, tuple(ends), next_step)
    if status.state is State.RESTARTING:
        next_step = advise_run(command=launcher_command("logs", JOB_NAME))
        return Answer("restarting", Text("is between two attempts"), tuple(ends), next_step)
    evidence = list(reversed(ends))
    ranks_by_phase: dict[str, list[int]] = {}
    for rank, phase in () if live is None else live.phases.items():
        ranks_by_phase.setdefault(phase, []).append(rank)
    if len(ranks_by_phase) > 1:
        template = "in {phase}: rank {ranks}"
        parts = [
            Text(template, phase=phase, ranks=ranks_by_phase[phase])
            for phase in sorted(ranks_by_phase)
        ]
        evidence.append(Text("{parts:; }", parts=parts))
    situation, headline = "running", Text("runs")
    if run.attempt_records:
        situation = "restarted"
        headline += Text(" again after {cause}", cause=run.attempt_records[-1].cause)
    headline += Text(": {phase}", phase=gang.describe_phase(status))
    preparing_step = gang.PREPARING_STEP if status.phase == "prepare" else None
    return Answer(situation, headline, tuple(evidence), preparing_step)


def _list_facts(run: Run, status: JobStatus) -> Iterator[Text]:
    if status.restarts:
        yield Text("restarts: {restarts}", restarts=describe_restarts(status))
    if status.committed is not None:
        yield Text("last good checkpoint: step {step}", step=status.committed)
    if status.goodput is not None:
        yield Text("goodput: {goodput:.1%}", goodput=status.goodput)
    if run.attempt_records and (memory := run.attempt_records[-1].memory) is not None:
        yield describe_memory(memory)
    if (refusal := status.refused_start) is not None:
        template = "start {start} was refused (exit {code}): {message}"
        yield Text(template, **{name: refusal[name] for name in ("start", "code", "message")})
    yield Text("run folder: {folder}", folder=str(run.folder))
