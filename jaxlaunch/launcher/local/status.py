"""Status of a run on this machine, in the same terms as for a job on a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxlaunch import contract
from jaxlaunch.launcher.jobs.status.job_status import (
    FINAL_STATES,
    JobStatus,
    Restarts,
    State,
    add_roles,
    format_hold_end,
)
from jaxlaunch.launcher.local.run_folders import (
    HOSTS_KEY,
    MAX_CRASHES_KEY,
    MAX_HOSTS_KEY,
    SLICES_KEY,
    STEPS_KEY,
    Run,
)
from jaxlaunch.records.run_numbers import RunNumbers
from jaxlaunch.records.summary import furthest_step
from jaxlaunch.records.verdict import Failure, FailureKind, Verdict, verdict_for_code
from jaxlaunch.runs import history, run_folder
from jaxlaunch.runs.run_folder import AgentAddress

# Timeout of a request to an agent of this machine.
TIMEOUT_S = 1.0
# The largest number of agents that are asked.
MAX_AGENTS = 16
_SAMPLE = re.compile(r"^(jaxlaunch_[a-z_]+)\{([^}\n]*)\} (\S+)$", re.MULTILINE)
_RANK = re.compile(r'\brank="(\d+)"')
_PHASE = re.compile(r'\bphase="([^"]*)"')


class LiveStatus(NamedTuple):
    """Live state that the agents of a run report. None or empty values were not reported."""

    # Number of live agents.
    ready: int = 0
    step: int | None = None
    steps: int | None = None
    # The phase of each rank.
    phases: Mapping[int, str] = {}

    @property
    def common_phase(self) -> str | None:
        """The phase of most ranks."""
        phases = list(self.phases.values())
        return max(phases, key=phases.count, default=None)


def run_status(run: Run, live: LiveStatus | None = None) -> JobStatus:
    """Return the status of a run, with live numbers if its agents were asked."""
    job_numbers, summary, start = run.job_numbers, run.summary, run.newest_start
    progress, state, now = None if summary is None else summary.of, _run_state(run), time.time()
    live = None if state in FINAL_STATES else live
    verdict = run_verdict(run)
    began_at, ended_at = now, None
    if start is not None:
        began_at = start.started
        if state in FINAL_STATES:
            ended_at = start.ended or (None if progress is None else progress.at)
    generation = 0 if progress is None else progress.generation
    numbers = RunNumbers() if summary is None else summary
    attempt = None if progress is None else progress.attempt
    restart_total = history.restart_count(generation, numbers.restarts, attempt)
    # The records are read only if the agents were restarted.
    charged = history.charged_generations(run.attempt_records, generation) if generation else 0
    pods = job_numbers.get(MAX_HOSTS_KEY, job_numbers.get(HOSTS_KEY, 1))
    # A run that has restarted and trained no step yet is at its saved step.
    reached_step = furthest_step(numbers.step, live and live.step)
    step = reached_step or numbers.committed or reached_step
    steps = (live and live.steps) or numbers.steps or job_numbers.get(STEPS_KEY)
    restart_seconds = () if summary is None else summary.restart_seconds
    status = JobStatus(
        name=run.name,
        namespace="",
        state=state,
        is_ours=True,
        queue=None,
        hosts=max(1, pods) * max(1, job_numbers.get(SLICES_KEY, 1)),
        ready=None if live is None else live.ready,
        generation=generation,
        attempt=attempt,
        phase=None if live is None or state is not State.RUNNING else live.common_phase,
        phase_s=None,
        missing=(),
        members=None,
        spares=(),
        committed_age_s=None,
        as_of=None,
        restart_counts=Restarts(
            restart_total, charged, job_numbers.get(MAX_CRASHES_KEY, 5), None, None
        ),
        verdict=None if verdict is None or state is State.RUNNING else verdict.to_json(),
        code=None if verdict is None or state not in (State.DONE, State.FAILED) else verdict.code,
        nodes=(),
        age_s=max(0.0, now - began_at),
        lasted_s=None if ended_at is None else max(0.0, ended_at - began_at),
        folder=str(run.folder),
        held_until=format_hold_end(summary, state),
        refused_start=_describe_refusal(run),
        restart_seconds=restart_seconds[-1].seconds if restart_seconds else {},
        **(numbers.run_numbers() | {"step": step, "steps": steps}),
    )
    if (table := run.role_table) is None:
        return status
    roles = {name: run_status(role, ask_agents(role)) for name, role in run.roles.items()}
    return add_roles(dataclasses.replace(status, role=table.decisive), roles, table.lead)


def _describe_refusal(run: Run) -> Mapping[str, Any] | None:
    if (start := run.refused_start) is None or run.holder is not None:
        return None
    return {
        "start": start.start,
        "at": start.started,
        "code": start.code,
        "message": start.refusal,
    }


def _run_state(run: Run) -> State:
    summary = run.summary
    if run.holder is not None:
        if run.holder.is_stopping:
            return State.STOPPING
        if summary is None:
            return State.STARTING
        if summary.verdict is not None:
            return State.RESTARTING if summary.held_until is None else State.HELD
        return State.RUNNING if summary.of is not None else State.GATHERING
    if run.is_requeued:
        return State.RESTARTING
    verdict = run_verdict(run)
    code = contract.LOST if verdict is None else verdict.code
    if contract.outcome_for_code(code).is_stop:
        return State.STOPPED
    return State.DONE if code == contract.DONE else State.FAILED


def run_verdict(run: Run) -> Verdict | None:
    """Return the verdict of a run that has ended or was killed, or None while it runs."""
    summary = run.summary
    if summary is not None and summary.verdict is not None:
        return summary.verdict
    if run.holder is not None:
        return None
    if summary is not None and summary.of is not None and summary.of.judged is not None:
        return summary.of.judged
    step = None if summary is None else summary.step
    return verdict_for_code(contract.LOST, Failure(FailureKind.RUN_KILLED), step=step)


def was_killed(run: Run) -> bool:
    """Return whether the run has no verdict because its launcher or the machine was killed."""
    return run.holder is None and (run.summary is None or run.summary.verdict is None)


def ask_agents(run: Run) -> LiveStatus | None:
    """Return the live state from the first MAX_AGENTS agents, or None if the run is not here."""
    if run.holder is None or not run.holder.is_here:
        return None
    agents = list[AgentAddress]()
    with contextlib.suppress(OSError):
        agents = list_agents(run.folder)
    steps, targets, phases = dict[int, float](), dict[int, float](), dict[int, str]()
    for agent in agents[:MAX_AGENTS]:
        for name, rank, phase, value in _read_samples(agent.address):
            if name == "jaxlaunch_rank_step":
                steps[rank] = value
            elif name == "jaxlaunch_target_step":
                targets[rank] = value
            elif name == "jaxlaunch_phase" and value == 1.0:
                phases[rank] = phase
    step, target = (int(min(values.values())) if values else None for values in (steps, targets))
    return LiveStatus(len(agents), step, target, phases)


def list_agents(folder: Path) -> list[AgentAddress]:
    """Return the agents of a run that are alive on this machine."""
    return [
        agent
        for agent in run_folder.read_agents(folder)
        if agent.address.startswith("127.0.0.1:") and Path(f"/proc/{agent.pid}").exists()
    ]


def read_metrics(address: str) -> str:
    """Return the metrics of an agent on this machine. Raises OSError and ValueError.

    The proxies in the environment are ignored: they cannot reach this machine's loopback.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/metrics", timeout=TIMEOUT_S) as response:
        return str(response.read().decode(errors="replace"))


def _read_samples(address: str) -> Iterator[tuple[str, int, str, float]]:
    """Yield the name, the rank, the phase and the value of each finite sample of a rank."""
    text = ""
    # An error means that the agent has ended or is about to end.
    with contextlib.suppress(OSError, ValueError):
        text = read_metrics(address)
    for name, labels, value in _SAMPLE.findall(text):
        rank, phase = _RANK.search(labels), _PHASE.search(labels)
        with contextlib.suppress(ValueError):
            if rank is not None and math.isfinite(float(value)):
                yield name, int(rank[1]), phase[1] if phase else "", float(value)
