"""Runs a job on this machine: one agent per host of the job, with the same contract as the pods of a JobSet.

Owns the run folder, the agents' environment and the generations; the rest is in launcher/agent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import selectors
import signal
import stat
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from jaxlaunch import contract
from jaxlaunch.contract import Action, AgentJob
from jaxlaunch.launcher.agent.gang.clock import process_age_s
from jaxlaunch.launcher.agent.host import temporary_folder
from jaxlaunch.launcher.agent.io.ports import free_port
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.jobs.logs.lines import Line, parse
from jaxlaunch.launcher.local import agent_file, ending, folders, new_start, orphans, trainer_process
from jaxlaunch.launcher.local.paths import Paths, of
from jaxlaunch.launcher.local.run_folders import locked
from jaxlaunch.launcher.wording import count, size
from jaxlaunch.records.lines import Lines
from jaxlaunch.records.summary import Summary
from jaxlaunch.runs.layout import CHECKPOINTS, JOB
from jaxlaunch.runs.lock import Lock
from jaxlaunch.runs.run_folder import RunFolder
from jaxlaunch.runs.starts import Starts

Show = Callable[[Line], None]
_LONGEST_LINE = 2 * contract.MAX_LINE  # the agents cut at the half, and put the rank before it
_PATIENCE_S = 10.0  # with a pipe whose reader takes nothing
_LEAST_MEMORY = 16 << 20  # bytes of a process: of a Python that has imported next to nothing
STOPPING = (signal.SIGINT, signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class LocalRun:
    """Where and how a job runs on this machine."""

    folder: Path  # the run folder
    base: Path  # what relative paths of the job are relative to
    volumes: Mapping[str, Path] = dataclasses.field(default_factory=dict)  # folders given for volumes, by name
    simulate: bool = False  # CPU devices in place of GPUs or TPUs
    take_over: bool = False  # of the checkpoint folder, from the run that holds it


def agent_job(job: JobSpec, paths: Paths, simulate: bool) -> AgentJob:
    """The job as an agent on this machine gets it."""
    folder = paths.workdir(job)
    return job.agent_job(
        command=None if job.command is None else [paths.argument(part) for part in job.command],
        platform="cpu" if simulate else job.accelerator.platform,
        workdir=None if folder is None else str(folder),
    )


def environment(job: JobSpec, paths: Paths, local: LocalRun, uid: str) -> dict[str, str]:
    """The environment variables that all agents share. Raises UserError when a secret is not set here."""
    # `python` in a command is the one that runs us, activated or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environ = {**os.environ, "PATH": path, **paths.given(job.env)}
    missing = [name for name in job.secrets if name not in os.environ]
    if missing:
        raise UserError(
            f"secrets: not set in the environment: {', '.join(missing)}.",
            hint="export them before `launcher run`; on a cluster they come from the Secret.",
        )
    if job.code_folder:
        environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(paths.base / job.code_folder), os.environ.get("PYTHONPATH")))
        )
        environ[contract.CODE_ROOT] = str(paths.base / job.code_folder)
    if local.simulate or job.accelerator.platform == "cpu":
        environ["JAX_PLATFORMS"] = "cpu"
    if job.train is not None:
        environ[contract.TRAIN_SPEC] = paths.train(job.train).model_dump_json(exclude_unset=True)
    return (
        environ
        | job.tracking
        | {
            contract.JOB: agent_job(job, paths, local.simulate).to_json(),
            contract.HOSTS: str(job.pods),
            contract.SLICES: str(job.slices),
            contract.UID: uid,
            contract.RUN_DIR: str(local.folder),
            contract.TAKE_OVER: "1" if local.take_over else "0",
            contract.PARENT: str(os.getpid()),
            contract.PATIENCE: str(_patience(sys.stdout)),
        }
    )


def _patience(stream: TextIO) -> float:
    """Seconds that programs wait for who reads a stream and takes nothing: a plain file takes all in the end, a program
    behind a pipe may have stopped, and a terminal is held up for as long as somebody likes."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # closed, or none of the system's
        return 0.0
    return math.inf if stat.S_ISREG(mode) else _PATIENCE_S if stat.S_ISFIFO(mode) else 0.0


class Gang:
    """One generation: the agents of a job as child processes, and their output."""

    def __init__(self, environ: Mapping[str, str], job: JobSpec, generation: int, lock: Lock) -> None:
        self._selector = selectors.DefaultSelector()
        self._environ, self._job, self._lock = environ, job, lock
        self._leader, self._generation = f"127.0.0.1:{free_port()}", generation
        self._packed = agent_file.path(lock.folder)
        self._open = [0] * job.pod_count  # streams of each host's agent
        self._lost = [0] * job.pod_count  # agents of each host that were killed
        self._is_ending = False
        self._agents = [self._start(host) for host in range(job.pod_count)]

    def _start(self, host: int) -> subprocess.Popen[bytes]:
        agent = subprocess.Popen(
            [sys.executable, "-I", str(self._packed)],
            env=dict(self._environ)
            | {
                contract.LEADER: self._leader,
                contract.SLICE: str(host // self._job.pods),
                contract.INDEX: str(host % self._job.pods),
                contract.GENERATION: str(self._generation),
                contract.POD_UID: str(uuid.uuid4()),
            },
            # Nothing reads it: the folder stays locked while an agent lives; its processes do not inherit this.
            stdin=self._lock.descriptor,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C reaches them through us alone
        )
        for stream in (agent.stdout, agent.stderr):
            self._selector.register(stream, selectors.EVENT_READ, (host, Lines(_LONGEST_LINE)))  # type: ignore[arg-type]
        self._open[host] = 2
        return agent

    def signal(self, number: int) -> None:
        """Signals every agent that lives: none is replaced any more."""
        self._is_ending = True
        for agent in self._agents:
            if agent.poll() is None:
                agent.send_signal(number)

    def follow(self, show: Show, say: Callable[[str], None]) -> list[int]:
        """Shows every line until the last agent has ended; returns their exit codes, by host. One that is lost alone is
        started again, as a Job does with a pod."""
        while self._selector.get_map():
            for key, _ in self._selector.select():
                host, lines = key.data
                data = os.read(key.fd, 65536)
                for text in lines.feed(data) if data else lines.end():
                    show(parse(host, text.decode(errors="replace")))
                if not data:
                    self._selector.unregister(key.fileobj).fileobj.close()  # type: ignore[union-attr]
                    self._open[host] -= 1
                    if not self._open[host] and self._is_lost(host, self._agents[host].wait()):
                        say(f"starting another agent for host {host}")
                        self._agents[host] = self._start(host)
        return [agent.wait() for agent in self._agents]

    def _is_lost(self, host: int, code: int) -> bool:
        """Whether the agent of a host ended without its gang, which waits for another."""
        if self._is_ending or not self._job.replaces_hosts:
            return False
        if code in contract.OUTCOMES:
            self._is_ending = True  # with the gang's verdict
            return False
        self._lost[host] += code != contract.LEFT
        return self._lost[host] <= self._job.restarts.crash


class Signals:
    """SIGINT and SIGTERM, while entered: the first stops the gang, the second kills it."""

    def __init__(self, say: Callable[[str], None], lock: Lock) -> None:
        self.received = 0
        self.gang: Gang | None = None
        self._say, self._lock = say, lock

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._handle) for number in STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        self.received += 1
        is_first = self.received == 1
        if is_first:
            self._lock.note_stopping()
        self._say(
            "saving and stopping; a second signal kills" if is_first else "killing the agents and their processes"
        )
        if self.gang is not None:
            self.gang.signal(signal.SIGTERM if is_first else signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    summary: Mapping[str, Any]  # as in summary.json
    stands_at: int | None = None  # the step that an earlier start reached, where this one trained nothing


def run(
    job: JobSpec,
    local: LocalRun,
    show: Show,
    say: Callable[[str], None],
    during: contextlib.AbstractContextManager[object] | None = None,
) -> Ended:
    """Runs the job on this machine; `during` is entered while it does.

    A SIGINT or SIGTERM has the gang save and stop, a second one kills it. Raises UserError when the job cannot start.
    """
    started = time.time() - process_age_s()
    if job.host_count > 1 and job.accelerator.platform != "cpu" and not local.simulate:
        raise UserError(
            f"The job has {job.host_count} hosts of {job.accelerator.type}; this machine is one host.",
            hint="use CPU devices in their place with --simulate, or run one host with hosts=1 slices=1.",
        )
    if job.train is not None:
        trainer_process.require("train:")
    _has_room(job)
    folders.check_names(local.folder, local.base, local.volumes)
    paths = of(job, local.base, local.folder, local.volumes)
    folders.program(job, paths)
    environ = environment(job, paths, local, uid=str(uuid.uuid4())) | {contract.STARTED: str(started)}
    resolved = jobs.dump(paths.anywhere(job))
    folders.check(local.folder, local.volumes)
    with locked(local.folder) as lock, Signals(say, lock) as signals:
        folder, checkpoints = RunFolder(local.folder, say), _checkpoints(job, paths, local.folder)
        new_start.begin(local.folder, environ[contract.UID], resolved, checkpoints, say)
        _make(paths, say)
        with during or contextlib.nullcontext():
            summary = generations(job, folder, checkpoints, environ, signals, lock, show, say)
        assert summary.verdict is not None, "a generation that ended has a verdict"
        if lock.is_gone:
            say(f"{local.folder} was deleted during the run: its summary is written again, the rest is lost")
            for name in (JOB, Starts(folder, environ[contract.UID]).path(JOB)):
                folder.replace(name, resolved.encode())
        return Ended(summary.verdict.code, summary.to_json(), new_start.standing(local.folder))


def _has_room(job: JobSpec) -> None:
    """Raises UserError for more processes than this machine has memory for, before the first is started."""
    processes = job.pod_count + job.processes  # an agent for each host, too
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if processes * _LEAST_MEMORY > has:
        hosts, most = count(job.host_count, "host"), has // _LEAST_MEMORY
        raise UserError(
            f"{hosts} are {processes} processes here, and this machine's {size(has)} hold at most {most}.",
            hint="run fewer with hosts=… slices=…, or submit the job to a cluster.",
        )


def _checkpoints(job: JobSpec, paths: Paths, folder: Path) -> Path | None:
    """The folder of the run's checkpoints; None where they are in a bucket."""
    given = None if job.train is None else paths.train(job.train).checkpoint.path
    if given is not None and "://" in given:
        return None
    return folder / CHECKPOINTS if given is None else Path(given)


def generations(
    job: JobSpec,
    folder: RunFolder,
    checkpoints: Path | None,
    environ: Mapping[str, str],
    signals: Signals,
    lock: Lock,
    show: Show,
    say: Callable[[str], None],
) -> Summary:
    """Starts sets of agents as JobSet would, until a set ends for good; a restart is charged to restarts.crash."""
    generation = 0
    while True:
        signals.gang = gang = Gang(environ, job, generation, lock)
        if signals.received:
            gang.signal(signal.SIGTERM)  # it came while they were started
        codes = gang.follow(show, say)
        orphans.end(environ[contract.UID])
        temporary_folder.sweep()  # of agents that were killed
        summary = ending.ended(
            folder,
            environ[contract.UID],
            generation,
            codes,
            checkpoints,
            is_stopped=signals.received > 0,
            started=float(environ[contract.STARTED]),
            trains=job.train is not None,
        )
        assert summary.verdict is not None
        outcome = contract.outcome(summary.verdict.code)
        is_last = outcome.action is not Action.RESTART or generation >= job.restarts.crash
        if signals.received or is_last or summary.verdict.is_full_disk:  # a disk here is as full for the next agents
            return summary
        generation += 1
        restarts = f"restart {generation} of {job.restarts.crash} (restarts.crash)"
        say(f"{outcome.meaning} (exit {outcome.code}): starting new agents, {restarts}")


def _make(paths: Paths, say: Callable[[str], None]) -> None:
    """Makes the folders of the volumes."""
    for mount, folder in paths.mounts.items():
        with folders.told(f"The volume at {mount}", "name another folder with --volume."):
            folder.mkdir(parents=True, exist_ok=True)
        say(f"{mount} is {folder}")
