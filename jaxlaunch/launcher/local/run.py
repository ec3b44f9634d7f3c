"""Run a job on this machine: one agent per host, with the same environment as in pods.

This module prepares the run folder and the agents' environment, and starts new generations of
agents as JobSet would on a cluster. The agents (launcher/agent) do everything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import stat
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob, Limit
from jaxlaunch.launcher.agent.gang.clock import process_age_s
from jaxlaunch.launcher.agent.host import folders
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.jobs.logs.lines import Line
from jaxlaunch.launcher.local import agents, bookkeeping, trainer_process
from jaxlaunch.launcher.local import paths as local_paths
from jaxlaunch.launcher.local.agents import Gang
from jaxlaunch.launcher.local.held_output import HeldOutput
from jaxlaunch.launcher.local.paths import Paths
from jaxlaunch.launcher.local.run_folders import hold_lock, read_role_table
from jaxlaunch.launcher.wording import format_count, format_size
from jaxlaunch.records.summary import Summary
from jaxlaunch.runs import layout
from jaxlaunch.runs.layout import CHECKPOINTS, COMMAND, JOB, Lock
from jaxlaunch.runs.run_folder import RunFolder, RunStarts, start_rows

if TYPE_CHECKING:
    from jaxlaunch.launcher.local.ssh import SshHosts

# How long programs wait for a reader of their output that has stalled, if it is a pipe.
_PIPE_PATIENCE_S = 10.0
# The memory of a Python process that has imported almost nothing.
_MIN_PROCESS_BYTES = 16 << 20
# What the user reads at the first signal, and at each further one.
STOP_MESSAGES = (
    "saving and stopping; a second signal kills",
    "killing the agents and their processes",
)


@dataclasses.dataclass(frozen=True)
class LocalRun:
    """Place and options of a run on this machine."""

    # The run folder.
    folder: Path
    # The folder that relative paths of the job start at.
    base: Path
    # Folders for volumes, by name.
    volumes: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    # Whether CPU devices replace GPUs or TPUs.
    simulate: bool = False
    # Whether to take the checkpoint folder from the run that holds it.
    take_over: bool = False
    # The arguments of `launcher run`, without options that only concern its output.
    words: Sequence[str] = ()
    # Whether to hide what surviving ranks print about the failure of another.
    hides_echoes: bool = False
    # When the run was asked for; by default when this process started.
    asked_at: float | None = None
    # Variables of all processes that the job does not set.
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Other machines that run the agents, one for each host.
    remote: SshHosts | None = None


@dataclasses.dataclass(frozen=True)
class RunEnd:
    """Result of a run that has ended."""

    code: int
    # The content of summary.json.
    summary: Mapping[str, Any]
    # The step that earlier starts reached, if this one trained nothing.
    reached_step: int | None = None
    # The status that the run keeps, because this start was refused before it trained.
    kept_status: str | None = None
    # The number of this start.
    start: int = 1
    # The role whose end decided on the result of a job with roles.
    role: str | None = None


_OTHER_FOLDER_HINT = "name another folder with --run-dir."


def refuse_own_folder(job_file: Path, folder: Path) -> None:
    """Raise UserError if the run would overwrite the user's job file."""
    is_run_job = os.path.realpath(job_file) == os.path.realpath(folder / layout.JOB)
    # The job.yaml in the folder of a run may be used to start the run again.
    if is_run_job and not (folder / layout.LOCK).exists():
        subject = f"The run folder {folder} is the job file's own"
        raise UserError(f"{subject}: the run would overwrite {job_file}.", _OTHER_FOLDER_HINT)


def check_run_folder(job: JobSpec, folder: Path, say: Callable[[str], None]) -> None:
    """Raise UserError if the folder has checkpoints of another job."""
    subject, hint = f"The run folder {folder} is", _OTHER_FOLDER_HINT
    if read_role_table(folder) is not None:
        raise UserError(f"{subject} that of a job with roles (jobs:), this job has none.", hint)
    starts = start_rows(RunFolder(folder, say).read_summary())
    if not any(start.has_trained for start in starts):
        return
    try:
        earlier_job = jobs.read_run_job(folder)
    except UserError:
        # The file is invalid, or of another version.
        return
    if earlier_job.name != job.name:
        message = f"{subject} that of job {earlier_job.name}, this job is {job.name}."
        raise UserError(message, hint)
    if (earlier_job.train is None) != (job.train is None):
        earlier_key, key = (
            "train" if spec.train is not None else "command" for spec in (earlier_job, job)
        )
        message = f"{subject} that of a job with {earlier_key}:, this job has {key}:."
        raise UserError(message, hint)


def run_job(
    job: JobSpec,
    local: LocalRun,
    show: Callable[[Line], None],
    say: Callable[[str], None],
    run_context: contextlib.AbstractContextManager[object] | None = None,
    attach: Attach = contextlib.nullcontext,
) -> RunEnd:
    """Run the job on this machine, inside the context `run_context`.

    A SIGINT or SIGTERM makes the gang save and stop, and a second one kills it. In another thread
    than the main thread, `Signals.stop` does so, in the context that `attach` makes. Raises
    UserError if the job cannot start.
    """
    started_at = local.asked_at or time.time() - process_age_s()
    paths, environ = prepare_run(job, local)
    environ[contract.STARTED] = str(started_at)
    job_yaml = jobs.dump_job(paths.map_job(job))
    local_paths.check_folders(local.folder, local.volumes)
    with (
        hold_lock(local.folder) as lock,
        Signals(say, lock) as signals,
        attach(signals),
        _prepare_hosts(job, paths, local) as host_variables,
    ):
        environ |= host_variables
        folder = RunFolder(local.folder, say)
        checkpoint_path = None if job.train is None else paths.map_train(job.train).checkpoint.path
        checkpoints: Path | None = None
        if checkpoint_path is None:
            checkpoints = local.folder / CHECKPOINTS
        # Checkpoints in a bucket are not on this machine.
        elif "://" not in checkpoint_path:
            checkpoints = Path(checkpoint_path)
        bookkeeping.begin_start(local.folder, environ[contract.UID], job_yaml, checkpoints, say)
        command_file = RunStarts(folder, environ[contract.UID]).file_path(COMMAND)
        folder.write_json(command_file, {"folder": os.getcwd(), "words": list(local.words)})
        hint = "name another folder with --volume."
        for mount, volume in paths.mounts.items():
            with local_paths.explain_os_error(f"The volume at {mount}", hint):
                volume.mkdir(parents=True, exist_ok=True)
            say(f"{mount} is {volume}")
        with run_context or contextlib.nullcontext():
            output = HeldOutput(show, hides_echoes=local.hides_echoes)
            summary = run_generations(
                job, folder, checkpoints, environ, signals, lock, output, say, local.remote
            )
        assert summary.verdict is not None, "a generation that ended has a verdict"
        if lock.is_gone:
            say(
                f"{local.folder} was deleted during the run: its summary is written again, the "
                "rest is lost"
            )
            for name in (JOB, RunStarts(folder, environ[contract.UID]).file_path(JOB)):
                folder.replace_file(name, job_yaml.encode())
        reached_step = bookkeeping.find_reached_step(local.folder)
        kept_status, start = bookkeeping.find_kept_status(local.folder)
        code = summary.verdict.code
        return RunEnd(code, summary.to_json(), reached_step, kept_status, start)


def prepare_run(job: JobSpec, local: LocalRun) -> tuple[Paths, dict[str, str]]:
    """Return the paths of a job here and the variables of its agents, with a new uid.

    Raises UserError if the job cannot run on this machine.
    """
    uses_devices = job.accelerator.platform != "cpu" and not local.simulate
    if job.host_count > 1 and uses_devices and local.remote is None:
        raise UserError(
            f"The job has {job.host_count} hosts of {job.accelerator.type}; this machine "
            "is one host.",
            hint="name other machines with --hosts, use CPU devices in their place with "
            "--simulate, or run one host with hosts=1 slices=1.",
        )
    if job.train is not None:
        trainer_process.require_trainer("train:")
    if local.remote is None:
        _require_memory(job)
    local_paths.check_utf8_names(local.folder, local.base, local.volumes)
    paths = local_paths.map_paths(job, local.base, local.folder, local.volumes)
    local_paths.check_program(job, paths)
    return paths, make_agent_environ(job, paths, local, uid=str(uuid.uuid4()))


@contextlib.contextmanager
def _prepare_hosts(job: JobSpec, paths: Paths, local: LocalRun) -> Iterator[Mapping[str, str]]:
    """Check the machines of a run, and yield the variables that only other machines need."""
    if local.remote is None:
        yield {}
        return
    for volume in paths.mounts.values():
        volume.mkdir(parents=True, exist_ok=True)
    local.remote.check_hosts(job, local.folder, [local.base, *paths.mounts.values()])
    with local.remote.make_key(local.folder) as variables:
        yield variables


def _require_memory(job: JobSpec) -> None:
    """Raise UserError if this machine has not enough memory for all processes."""
    # Each host also has an agent.
    processes = job.pod_count + job.processes
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if processes * _MIN_PROCESS_BYTES > memory_bytes:
        hosts = format_count(job.host_count, "host")
        max_processes = memory_bytes // _MIN_PROCESS_BYTES
        raise UserError(
            f"{hosts} are {processes} processes here, and this machine's "
            f"{format_size(memory_bytes)} hold at most {max_processes}.",
            hint="run fewer with hosts=… slices=…, or submit the job to a cluster.",
        )


def make_agent_environ(job: JobSpec, paths: Paths, local: LocalRun, uid: str) -> dict[str, str]:
    """Return the variables that all agents share. Raises UserError for a missing secret."""
    # `python` in a command is this interpreter, even if its environment is not activated. Other
    # machines have an environment of their own.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    missing = [name for name in job.secrets if name not in os.environ]
    if missing:
        raise UserError(
            f"secrets: not set in the environment: {', '.join(missing)}.",
            hint="export them before `launcher run`; on a cluster they come from the Secret.",
        )
    variables = {
        contract.UID: uid,
        contract.PARENT: str(os.getpid()),
        contract.OUTPUT_PATIENCE: str(_patience_s(sys.stdout)),
    }
    own_variables = {**os.environ, "PATH": path}
    if local.remote is not None:
        own_variables = {name: os.environ[name] for name in job.secrets}
    job_environ = job_variables(job, paths, local)
    return {**own_variables, **local.variables, **job_environ, **variables}


def job_variables(job: JobSpec, paths: Paths, local: LocalRun) -> dict[str, str]:
    """Return the variables of a job that are the same for all starts and hosts."""
    environ = paths.map_env(job.env)
    if job.code_folder:
        environ[contract.CODE_ROOT] = str(paths.base / job.code_folder)
    if local.simulate or job.accelerator.platform == "cpu":
        environ["JAX_PLATFORMS"] = "cpu"
    if job.train is not None:
        environ[contract.TRAIN_SPEC] = paths.map_train(job.train).model_dump_json(
            exclude_unset=True
        )
    variables = {
        contract.JOB: make_agent_job(job, paths, local.simulate).to_json(),
        contract.HOSTS: str(job.pods),
        contract.SLICES: str(job.slices),
        contract.RUN_DIR: str(local.folder),
        contract.TAKE_OVER: "1" if local.take_over else "0",
    }
    parent = local.folder.parent
    tracking = job.tracking_variables(
        local.base.resolve().name, parent.name if layout.is_sweep(parent) else None
    )
    return environ | tracking | variables


def make_agent_job(job: JobSpec, paths: Paths, simulate: bool) -> AgentJob:
    """Return the description of a job for its agents on this machine."""
    folder = paths.find_workdir(job)
    return job.agent_job(
        command=None if job.command is None else [paths.map_argument(part) for part in job.command],
        platform="cpu" if simulate else job.accelerator.platform,
        workdir=None if folder is None else str(folder),
    )


def _patience_s(stream: TextIO) -> float:
    """Return how long programs wait for a stalled reader of `stream`.

    A regular file never stalls, and the program at the other end of a pipe may have stopped. A user
    may pause a terminal for any time, so programs do not wait for it.
    """
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        # The stream is closed, or is not a file of the operating system.
        return 0.0
    return math.inf if stat.S_ISREG(mode) else _PIPE_PATIENCE_S if stat.S_ISFIFO(mode) else 0.0


class _SignalTarget(Protocol):
    """The target of a signal: the agents of a gang, or the gangs of all roles."""

    def send_signal(self, number: int) -> None: ...


class Signals:
    """Handles SIGINT and SIGTERM while entered: the first stops the gang, the second kills it."""

    def __init__(self, say: Callable[[str], None], lock: Lock) -> None:
        self.count = 0
        # Whether the first signal was that of Ctrl-C.
        self.is_interrupt = False
        self.gang: _SignalTarget | None = None
        self._say, self._lock = say, lock

    def __enter__(self) -> Signals:
        self._previous_handlers = {}
        # Python handles signals in the main thread alone.
        if threading.current_thread() is not threading.main_thread():
            return self
        self._previous_handlers = {
            number: signal.signal(number, self._handle_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle_signal(self, number: int, frame: types.FrameType | None) -> None:
        message = STOP_MESSAGES[min(self.count, 1)]
        # A thread of another role may hold the lock of stdout, whose reader is slow.
        self.stop(number)
        self._say(message)

    def stop(self, number: int) -> None:
        """Stop the gang as the first signal does, or kill it if it was stopped before."""
        self.count += 1
        if self.count == 1:
            self._lock.note_stopping()
            self.is_interrupt = number == signal.SIGINT
        else:
            number = signal.SIGKILL
        if self.gang is not None:
            # The agents get the first signal itself, so that they know what it means.
            self.gang.send_signal(number)


Attach = Callable[[Signals], contextlib.AbstractContextManager[object]]


def run_generations(
    job: JobSpec,
    folder: RunFolder,
    checkpoints: Path | None,
    environ: Mapping[str, str],
    signals: Signals,
    lock: Lock,
    output: HeldOutput,
    say: Callable[[str], None],
    remote: SshHosts | None = None,
) -> Summary:
    """Start generations of agents, as JobSet would, until one of them ends the run."""
    generation = charged_restarts = 0
    while True:
        signals.gang = gang = Gang(environ, job, generation, lock, remote)
        if signals.count:
            # The signal came while the agents were started.
            gang.send_signal(signal.SIGINT if signals.is_interrupt else signal.SIGTERM)
        codes = gang.follow_output(output, say)
        agents.kill_orphans(environ[contract.UID])
        # Agents that were killed leave temporary folders behind.
        folders.sweep_folders()
        summary = bookkeeping.end_generation(
            folder,
            environ[contract.UID],
            generation,
            codes,
            checkpoints,
            is_stopped=signals.count > 0,
            is_interrupt=signals.is_interrupt,
            started_at=float(environ[contract.STARTED]),
            has_train_block=job.train is not None,
        )
        assert summary.verdict is not None
        outcome = contract.outcome_for_code(summary.verdict.code)
        restart_text = "not counted"
        if outcome.charged_to is Limit.CRASH:
            charged_restarts += 1
            restart_text = f"restart {charged_restarts} of {job.restarts.crash} (restarts.crash)"
        is_last = outcome.ends_local_run or charged_restarts > job.restarts.crash
        # The disk would be just as full for the next agents.
        if signals.count or is_last or summary.verdict.is_full_disk:
            return summary
        generation += 1
        say(f"{outcome.meaning} (exit {outcome.code}): starting new agents, {restart_text}")
