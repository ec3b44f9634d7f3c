"""The answer of `explain` for a run on this machine, as for a job on a cluster."""

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
from jaxlaunch.launcher.local.status import LiveStatus, run_status, run_verdict, was_killed
from jaxlaunch.runs import layout
from jaxlaunch.runs.run_folder import RunFolder

# The number of attempts whose verdicts are shown as evidence.
_MAX_SHOWN_ENDS = 3


def explain_run(record: Run, live: LiveStatus | None) -> Explanation:
    """Return the most important fact about the run, with evidence and advice."""
    status, verdict = run_status(record, live), run_verdict(record)
    if status.state in FINAL_STATES:
        answer = _explain_end(record, status)
    else:
        answer = _explain_progress(record, status, live)
    code = None if verdict is None else verdict.code
    facts, step = tuple(_list_facts(record, status)), answer.next_step
    again = _run_command(record)
    is_here = run_folders.find_run(record.name) == record.folder
    reference = record.name if is_here else str(record.folder)
    diagnosis = Diagnosis(record.name, "", answer, facts, step, code, run_command=again)
    return dataclasses.replace(diagnosis, reference=reference).render()


def _run_command(record: Run) -> Command:
    """Return the command that continues a run, from the folder in which it was started or here."""
    started = dict[str, Any]()
    if (start := record.newest_start) is not None:
        path = layout.start_file(start.start, layout.COMMAND)
        started = RunFolder(record.folder).read_json(path)
    words = started.get("words")
    if not (isinstance(words, list) and words and all(isinstance(word, str) for word in words)):
        # It was not started by the command `launcher run`.
        words = [str(record.folder / layout.JOB), "--run-dir", str(record.folder)]
    elif started.get("folder") != os.getcwd():
        words[0] = os.path.join(str(started.get("folder", "")), words[0])
        if "--run-dir" in words:
            position = words.index("--run-dir")
            del words[position : position + 2]
        words += ["--run-dir", str(record.folder)]
    return launcher_command("run", *words, is_namespaced=False)


def _explain_end(record: Run, status: JobStatus) -> Answer:
    verdict = run_verdict(record)
    assert verdict is not None, "it is over"
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
    if was_killed(record):
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
    # Not the steps by errno, which are about pods.
    step = STEPS_BY_CODE.get(verdict.code, retry)
    return Answer(situation, headline, failures.traceback_tail(verdict.traceback), step)


def _explain_progress(record: Run, status: JobStatus, live: LiveStatus | None) -> Answer:
    if record.holder is not None and not record.holder.is_here:
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
    template = "attempt {end.attempt}: {end.cause}: {end.verdict.message}"
    ends = [Text(template, end=end) for end in record.attempt_records[-_MAX_SHOWN_ENDS:]]
    if status.state is State.RESTARTING:
        step = advise_run(command=launcher_command("logs", JOB_NAME))
        return Answer("restarting", Text("is between two attempts"), tuple(ends), step)
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
    if record.attempt_records:
        situation = "restarted"
        headline += Text(" again after {cause}", cause=record.attempt_records[-1].cause)
    headline += Text(": {phase}", phase=gang.describe_phase(status))
    next_step = gang.PREPARING_STEP if status.phase == "prepare" else None
    return Answer(situation, headline, tuple(evidence), next_step)


def _list_facts(record: Run, status: JobStatus) -> Iterator[Text]:
    if status.restarts:
        yield Text("restarts: {restarts}", restarts=describe_restarts(status))
    if status.committed is not None:
        yield Text("last good checkpoint: step {step}", step=status.committed)
    if status.goodput is not None:
        yield Text("goodput: {goodput:.1%}", goodput=status.goodput)
    if (refused := status.refused_start) is not None:
        template = "start {start} was refused (exit {code}): {message}"
        yield Text(template, **{name: refused[name] for name in ("start", "code", "message")})
    yield Text("run folder: {folder}", folder=str(record.folder))
