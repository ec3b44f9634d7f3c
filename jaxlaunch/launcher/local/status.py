"""Status of a run on this machine, in the same terms as for a job on a cluster."""

from __future__ import annotations

import contextlib
import math
import re
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from jaxlaunch import contract
from jaxlaunch.launcher.jobs.status.job_status import OVER, JobStatus, Restarts, State
from jaxlaunch.launcher.local.run_folders import CRASHES, HOSTS, MAX_HOSTS, SLICES, STEPS, Run
from jaxlaunch.records.summary import furthest, ratio
from jaxlaunch.records.verdict import Failure, FailureKind, Verdict, verdict_for_code
from jaxlaunch.runs import history, run_folder
from jaxlaunch.runs.run_folder import Listed

# Timeout of a request to an agent of this machine.
TIMEOUT_S = 1.0
# The largest number of agents that are asked.
MAX_ASKED = 16
_SAMPLE = re.compile(r"^(jaxlaunch_[a-z_]+)\{([^}\n]*)\} (\S+)$", re.MULTILINE)
_RANK = re.compile(r'\brank="(\d+)"')
_PHASE = re.compile(r'\bphase="([^"]*)"')


class Live(NamedTuple):
    """Live state that the agents of a run report. None or empty values were not reported."""

    # Number of agents that live.
    ready: int = 0
    step: int | None = None
    steps: int | None = None
    phases: Mapping[int, str] = {}  # by rank

    @property
    def phase(self) -> str | None:
        """The phase of most ranks."""
        phases = list(self.phases.values())
        return max(phases, key=phases.count, default=None)


def status_of(run: Run, live: Live | None = None) -> JobStatus:
    """Return the status of a run, with live numbers if its agents were asked."""
    job, summary, start = run.numbers, run.summary, run.start
    of, state, now = None if summary is None else summary.of, _state_of(run), time.time()
    live = None if state in OVER else live
    verdict = verdict_of(run)
    began = now if start is None else start.started
    ended = None if start is None or state not in OVER else start.ended or (None if of is None else of.at)
    generation, by_cause = 0 if of is None else of.generation, None if summary is None else dict(summary.restarts)
    crashes = job.get(CRASHES, 5)
    restarts = Restarts(history.restart_count(generation, by_cause), generation, crashes, by_cause, None, None)
    # While the run restarts and has trained no step yet, its step is the saved one.
    saved = None if summary is None else summary.saved
    reached = furthest(None if summary is None else summary.step, live and live.step)
    return JobStatus(
        name=run.name,
        namespace="",
        state=state,
        is_ours=True,
        queue=None,
        hosts=max(1, job.get(MAX_HOSTS, job.get(HOSTS, 1))) * max(1, job.get(SLICES, 1)),
        ready=None if live is None else live.ready,
        generation=generation,
        attempt=None if of is None else of.attempt,
        phase=None if live is None or state is not State.RUNNING else live.phase,
        phase_s=None,
        missing=(),
        members=None,
        spares=(),
        step=reached or saved or reached,
        steps=(live and live.steps) or job.get(STEPS),
        committed=saved,
        committed_age_s=None,
        goodput=None if summary is None else ratio(summary.seconds),
        as_of=None,
        restarts=restarts,
        verdict=None if verdict is None or state is State.RUNNING else verdict.to_json(),
        code=None if verdict is None or state not in (State.DONE, State.FAILED) else verdict.code,
        nodes=(),
        age_s=max(0.0, now - began),
        lasted_s=None if ended is None else max(0.0, ended - began),
        folder=str(run.folder),
        restart_seconds=summary.restart_seconds[-1].seconds if summary is not None and summary.restart_seconds else {},
    )


def _state_of(run: Run) -> State:
    summary = run.summary
    if run.holder is not None:
        if run.holder.is_stopping:
            return State.STOPPING
        if summary is None:
            return State.STARTING
        if summary.verdict is not None:
            return State.RESTARTING
        return State.RUNNING if summary.of is not None else State.GATHERING
    code = getattr(verdict_of(run), "code", contract.LOST)
    return {contract.DONE: State.DONE, contract.PREEMPTED: State.STOPPED}.get(code, State.FAILED)


def verdict_of(run: Run) -> Verdict | None:
    """Return the verdict of a run, also of one that was killed with its launcher, or None while it runs."""
    summary = run.summary
    if summary is not None and summary.verdict is not None:
        return summary.verdict
    if run.holder is not None:
        return None
    judged = None if summary is None or summary.of is None else summary.of.judged
    step = None if summary is None else summary.step
    return judged or verdict_for_code(contract.LOST, Failure(FailureKind.RUN_KILLED), step=step)


def was_killed(run: Run) -> bool:
    """Return whether the run ended without a verdict: with its launcher, or with the machine."""
    return run.holder is None and (run.summary is None or run.summary.verdict is None)


def ask_agents(run: Run) -> Live | None:
    """Return what the first MAX_ASKED agents of this machine report now, or None if no process runs it here."""
    if run.holder is None or not run.holder.is_here:
        return None
    try:
        agents = list_agents(run.folder)
    except OSError:
        agents = []
    steps, targets, phases = dict[int, float](), dict[int, float](), dict[int, str]()
    for agent in agents[:MAX_ASKED]:
        for name, rank, phase, value in _read_samples(agent.address):
            if name == "jaxlaunch_rank_step":
                steps[rank] = value
            elif name == "jaxlaunch_target_step":
                targets[rank] = value
            elif name == "jaxlaunch_phase" and value == 1.0:
                phases[rank] = phase
    step, target = (int(min(values.values())) if values else None for values in (steps, targets))
    return Live(len(agents), step, target, phases)


def list_agents(folder: Path) -> list[Listed]:
    """Return the agents of a run that live on this machine: a job on a cluster lists agents of other hosts."""
    agents = run_folder.read_agents(folder)
    return [agent for agent in agents if agent.address.startswith("127.0.0.1:") and Path(f"/proc/{agent.pid}").exists()]


def _read_samples(address: str) -> Iterator[tuple[str, int, str, float]]:
    """Yield the name, the rank, the phase and the value of each finite sample of a rank."""
    text = ""
    # The agent has ended, or is about to.
    with contextlib.suppress(OSError, ValueError):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read().decode(errors="replace")
    for name, labels, value in _SAMPLE.findall(text):
        rank, phase = _RANK.search(labels), _PHASE.search(labels)
        with contextlib.suppress(ValueError):
            if rank is not None and math.isfinite(float(value)):
                yield name, int(rank[1]), phase[1] if phase else "", float(value)
