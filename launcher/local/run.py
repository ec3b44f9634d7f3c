"""Runs a job here: one agent per host of the job, under the very contract that a JobSet's pods get.

Owns the run folder, the agents' environment and the generations; the gang itself lives in launcher.agent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from launcher import agentjob
from launcher import job as jobs
from launcher.agent.ports import free_port
from launcher.errors import UserError
from launcher.job import JobSpec
from launcher.logs import Line, Lines, parse
from launcher.paths import Paths, of
from trainer import contract
from trainer.contract import Action, AgentJob

Show = Callable[[Line], None]
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@dataclasses.dataclass(frozen=True)
class Here:
    """How a job is fitted to this machine."""

    folder: Path  # the run folder
    base: Path  # what relative paths of the job are relative to
    volumes: Mapping[str, Path] = dataclasses.field(default_factory=dict)  # by claim, bucket or name
    simulate: bool = False
    take_over: bool = False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a run folder. Raises UserError when another run holds it: two would write one set of files."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{folder} is in use by the run with pid {file.read().strip() or 'unknown'}.",
                hint="wait for it, stop it with Ctrl-C, or name another folder with --run-dir.",
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def agent_job(job: JobSpec, paths: Paths, simulate: bool) -> AgentJob:
    """What an agent here is told of the job."""
    folder = job.workdir or job.code
    return agentjob.of(
        job,
        command=None if job.command is None else [paths.argument(part) for part in job.command],
        platform="cpu" if simulate else job.accelerator.platform,
        workdir=str(paths.base / folder) if folder else None,
    )


def environment(job: JobSpec, paths: Paths, here: Here, uid: str) -> dict[str, str]:
    """What every agent's environment holds, beside what tells the hosts apart."""
    # `python` in a command is the one that runs us, activated or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environ = {**os.environ, "PATH": path, **job.env}
    missing = [name for name in job.secrets if name not in os.environ]
    if missing:
        raise UserError(
            f"secrets: {', '.join(missing)} is not in the environment.",
            hint="on a cluster it comes from the Secret; here, export it before `launcher run`.",
        )
    if job.code:
        code = str(paths.base / job.code)
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH"))))
    if here.simulate or job.accelerator.platform == "cpu":
        environ["JAX_PLATFORMS"] = "cpu"
    if job.train is not None:
        environ[contract.TRAIN_SPEC] = paths.train(job.train).model_dump_json(exclude_unset=True)
    return environ | {
        contract.JOB: agent_job(job, paths, here.simulate).to_json(),
        contract.HOSTS: str(job.hosts),
        contract.SLICES: str(job.slices),
        contract.UID: uid,
        contract.RUN_DIR: str(here.folder),
        contract.TAKE_OVER: "1" if here.take_over else "0",
        contract.PARENT: str(os.getpid()),
    }


class Gang:
    """One generation: the agents of a job as processes of this one, and their lines."""

    def __init__(self, environ: Mapping[str, str], hosts: int, slices: int, generation: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._agents: list[subprocess.Popen[bytes]] = []
        leader = f"127.0.0.1:{free_port()}"
        for host in range(hosts * slices):
            agent = subprocess.Popen(
                [sys.executable, "-m", "launcher.agent"],
                env=dict(environ)
                | {
                    contract.LEADER: leader,
                    contract.SLICE: str(host // hosts),
                    contract.INDEX: str(host % hosts),
                    contract.GENERATION: str(generation),
                    contract.POD_UID: str(uuid.uuid4()),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is ours to pass on, once
            )
            self._agents.append(agent)
            for stream in (agent.stdout, agent.stderr):
                self._selector.register(stream, selectors.EVENT_READ, (host, Lines()))  # type: ignore[arg-type]

    def signal(self, number: int) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                agent.send_signal(number)

    def follow(self, show: Show) -> list[int]:
        """Shows every line until the last agent is gone; returns their exit codes, by host."""
        while self._selector.get_map():
            for key, _ in self._selector.select():
                host, lines = key.data
                data = os.read(key.fd, 65536)
                for text in lines.feed(data) if data else lines.end():
                    show(parse(host, text))
                if not data:
                    self._selector.unregister(key.fileobj)
        return [agent.wait() for agent in self._agents]


@contextlib.contextmanager
def passing_signals(gang: Gang, say: Callable[[str], None], deadline_at: float | None) -> Iterator[Callable[[], bool]]:
    """Passes SIGINT and SIGTERM on to the gang: the first stops it, the second kills it. Yields whether one came.

    At `deadline_at` (monotonic seconds) it is stopped as well.
    """
    told = 0

    def heard(number: int, frame: types.FrameType | None) -> None:
        nonlocal told
        told += 1
        if number == signal.SIGALRM:
            say("the deadline has passed")
        say("saving and stopping; once more kills" if told == 1 else "killed")
        gang.signal(signal.SIGTERM if told == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, heard) for number in STOPPING}
    if deadline_at is not None:
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, deadline_at - time.monotonic()))
    try:
        yield lambda: told > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


def run(job: JobSpec, here: Here, show: Show, say: Callable[[str], None]) -> int:
    """Trains the job here; returns the exit code of its verdict.

    A SIGINT or SIGTERM makes the gang save and stop, a second one kills it. Raises UserError for what one can mend.
    """
    if job.host_count > 1 and job.accelerator.platform != "cpu" and not here.simulate:
        raise UserError(
            f"{job.host_count} hosts of {job.accelerator.type} are more than this machine.",
            hint="--simulate stands in for them with CPU devices, or run one host: hosts=1 slices=1.",
        )
    with locked(here.folder):
        paths = of(job, here.base, here.folder, here.volumes)
        for mount, folder in paths.mounts.items():
            folder.mkdir(parents=True, exist_ok=True)
            say(f"{mount} is {folder}")
        (here.folder / "job.yaml").write_text(jobs.dump(job))
        return generations(job, here.folder, environment(job, paths, here, uid=str(uuid.uuid4())), show, say)


def generations(job: JobSpec, folder: Path, environ: Mapping[str, str], show: Show, say: Callable[[str], None]) -> int:
    """Starts sets of agents as JobSet would, until one ends for good; what it restarts is charged to restarts.crash."""
    deadline_at = None if job.deadline is None else time.monotonic() + job.deadline
    for generation in itertools.count():
        gang = Gang(environ, job.hosts, job.slices, generation)
        with passing_signals(gang, say, deadline_at) as told:
            codes = gang.follow(show)
        if all(code < 0 for code in codes):
            speak_for_the_dead(folder, -codes[0])
        ended = contract.outcome(verdict_code(codes))
        if told() or ended.action is not Action.RESTART or generation >= job.restarts.crash:
            return ended.code
        say(f"{ended.meaning} (exit {ended.code}): new agents, restart {generation + 1} of {job.restarts.crash}")
    raise AssertionError("generations end")


def verdict_code(codes: Sequence[int]) -> int:
    """The gang's code. All agents that lived leave with it; one that was killed knows no better than the signal."""
    return next((code for code in codes if code >= 0), contract.KILLED)


def speak_for_the_dead(folder: Path, number: int) -> None:
    """Writes the verdict that no agent could: every one of them was killed, host 0's by signal `number`."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    message = f"host 0's agent was killed by {signal.Signals(number).name}"
    verdict = {"cause": "lost", "code": contract.LOST, "host": 0, "rank": 0, "message": message, "traceback": None}
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps({"step": None} | summary | {"status": "failed", "verdict": verdict}, indent=2))
    written.replace(path)
