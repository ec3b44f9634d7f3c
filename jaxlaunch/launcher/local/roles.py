"""Run a job with roles on this machine: a run for each role, and one result.

Each role is an ordinary run in the subfolder with its name, in a thread of this process. The main
thread starts a role when those that it needs have started, and follows all of them. The first end
that decides on the job makes it stop the others: that of the last role with `ends`, or the failure
of a role that may not fail. The run folder of the job has the summary of the role that decided.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.clock import process_age_s
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job.load import JobFile, RoleJob
from jaxlaunch.launcher.jobs.logs.lines import Line
from jaxlaunch.launcher.local import bookkeeping, run
from jaxlaunch.launcher.local import paths as local_paths
from jaxlaunch.launcher.local.run import LocalRun, RunEnd, Signals
from jaxlaunch.launcher.local.run_folders import hold_lock, read_role_table
from jaxlaunch.launcher.yaml import writer
from jaxlaunch.records.summary import AttemptProgress, Summary
from jaxlaunch.records.verdict import (
    Failure,
    FailureKind,
    StopFacts,
    StopReason,
    Verdict,
    verdict_for_code,
)
from jaxlaunch.runs import layout
from jaxlaunch.runs.layout import COMMAND, JOB, ROLES
from jaxlaunch.runs.run_folder import RunFolder, RunStarts, start_rows

POLL_S = 0.1
# The variable that shows a process only some devices of a machine.
_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
# The folders of a job's run folder that are not those of roles.
_RESERVED_NAMES = (layout.STARTS, local_paths.VOLUMES)


class RoleBoard:
    """Decides which roles start and when the job ends, from the starts and ends of its roles."""

    def __init__(self, roles: Sequence[RoleJob], lead: str) -> None:
        self.roles = roles
        # The first role that ends the job.
        self.lead = lead
        # Roles that were started, and those whose agents run or have run.
        self.begun: set[str] = set()
        self.started: set[str] = set()
        # The exit codes of the roles that have ended, in the order of their ends.
        self.codes: dict[str, int] = {}

    def find_startable(self) -> list[RoleJob]:
        """Return the roles that may start now."""
        return [
            role
            for role in self.roles
            if role.name not in self.begun and self.started.issuperset(role.role.needs)
        ]

    def find_decisive_role(self) -> str | None:
        """Return the role whose end ends the job, or None while the job continues."""
        may_fail = {role.name for role in self.roles if role.role.may_fail}
        for name, code in self.codes.items():
            if code != contract.DONE and name not in may_fail:
                return name
        return None if self.list_unfinished_roles() else self.lead

    def list_unfinished_roles(self) -> list[str]:
        """Return the roles that end the job and are not done, the lead first."""
        names = sorted(role.name for role in self.roles if role.role.ends)
        names.sort(key=lambda name: name != self.lead)
        return [name for name in names if self.codes.get(name) != contract.DONE]


class _RoleRun:
    """A role in its thread, which the main thread stops."""

    def __init__(self, role: RoleJob, local: LocalRun) -> None:
        self.role, self.local = role, local
        # None before the run has its lock, and after it.
        self._signals: Signals | None = None
        self._has_started = False
        # The signals of the user that it was to get: 0, 1 to stop or 2 to be killed.
        self._signal_count, self._number = 0, signal.SIGTERM
        # A signal handler of the main thread may interrupt `send_signal` there.
        self._mutex = threading.RLock()

    @property
    def has_started(self) -> bool:
        """Whether its agents run or have run."""
        with self._mutex:
            if self._signals is not None and self._signals.gang is not None:
                self._has_started = True
            return self._has_started

    def run(self, show: Callable[[Line], None], say: Callable[[str], None]) -> RunEnd:
        """Run the role to its end, in the thread of the caller."""
        name = self.role.name
        return run.run_job(
            self.role.file.spec,
            dataclasses.replace(self.local, asked_at=time.time()),
            lambda line: show(dataclasses.replace(line, role=name)),
            lambda message: say(f"{name}: {message}"),
            attach=self._attach,
        )

    def send_signal(self, number: int) -> None:
        """Make the role save and stop if it was not asked before, or with SIGKILL kill it."""
        with self._mutex:
            if not self._signal_count:
                self._number = signal.Signals(number)
            self._signal_count = max(self._signal_count, 2 if number == signal.SIGKILL else 1)
            self._forward_signals()

    @contextlib.contextmanager
    def _attach(self, signals: Signals) -> Iterator[None]:
        """Forward signals to the run while it has its lock."""
        with self._mutex:
            self._signals = signals
            self._forward_signals()
        try:
            yield
        finally:
            with self._mutex:
                self._has_started = signals.gang is not None
                self._signals = None

    def _forward_signals(self) -> None:
        while self._signals is not None and self._signals.count < self._signal_count:
            self._signals.stop(self._number)


class _RoleGangs:
    """The runs of all roles, which get signals as the gang of an ordinary run does."""

    def __init__(self, board: RoleBoard, runs: Mapping[str, _RoleRun], signals: Signals) -> None:
        self.board, self._runs, self._signals = board, runs, signals
        self.ends: dict[str, RunEnd] = {}
        # The role that ended the job, if the user has not stopped it before.
        self.decisive: str | None = None
        self._names: dict[futures.Future[RunEnd], str] = {}
        # The error of the first role that could not run.
        self._error: BaseException | None = None

    def send_signal(self, number: int) -> None:
        """Stop or kill all roles."""
        for role_run in self._runs.values():
            role_run.send_signal(number)

    def follow(self, show: Callable[[Line], None], say: Callable[[str], None]) -> None:
        """Start all roles and wait until all have ended. Raises UserError if one cannot start."""
        with futures.ThreadPoolExecutor(len(self._runs), "role") as pool:
            try:
                self._start_or_stop_roles(pool, show, say)
                while self._names:
                    ended, _ = futures.wait(self._names, POLL_S, futures.FIRST_COMPLETED)
                    for future in ended:
                        self._record_end(future, say)
                    self._start_or_stop_roles(pool, show, say)
            except BaseException:
                # The output cannot be written, and the pool waits for its threads.
                self.send_signal(signal.SIGTERM)
                raise
        if self._error is not None:
            raise self._error

    def _start_or_stop_roles(
        self, pool: futures.Executor, show: Callable[[Line], None], say: Callable[[str], None]
    ) -> None:
        """Start the roles that may start now, or stop all if the job ends."""
        if self._signals.count:
            # A role may have started at the same time as the signal came.
            self.send_signal(signal.SIGINT if self._signals.is_interrupt else signal.SIGTERM)
            return
        if self._error or self.decisive:
            self.send_signal(signal.SIGTERM)
            return
        self.board.started |= {name for name, role in self._runs.items() if role.has_started}
        for role in self.board.find_startable():
            self.board.begun.add(role.name)
            self._names[pool.submit(self._runs[role.name].run, show, say)] = role.name

    def _record_end(self, future: futures.Future[RunEnd], say: Callable[[str], None]) -> None:
        name = self._names.pop(future)
        if (error := future.exception()) is not None:
            self._error = self._error or error
            return
        end = self.ends[name] = future.result()
        self.board.codes[name] = end.code
        if not (self.decisive or self._signals.count):
            self.decisive = self.board.find_decisive_role()
        verdict = end.summary["verdict"]
        say(f"{name}: {end.summary['status']}: {verdict['message']} (exit {end.code})")


def run_roles(
    file: JobFile,
    local: LocalRun,
    show: Callable[[Line], None],
    say: Callable[[str], None],
) -> RunEnd:
    """Run a job with roles on this machine, as `run.run_job` runs any other job."""
    assert file.lead is not None, "a job with roles has a lead"
    has_trained = any(row.has_trained for row in start_rows(RunFolder(local.folder).read_summary()))
    if has_trained and read_role_table(local.folder) is None:
        message = f"The run folder {local.folder} is that of a job without roles (jobs:)."
        raise UserError(message, "name another folder with --run-dir.")
    lead, started_at = file.lead.name, local.asked_at or time.time() - process_age_s()
    runs = _make_runs(file, local)
    job_yaml = writer.render_document(file.source.data)
    local_paths.check_folders(local.folder, local.volumes)
    with hold_lock(local.folder) as lock, Signals(say, lock) as signals:
        folder, uid = RunFolder(local.folder, say), str(uuid.uuid4())
        bookkeeping.begin_start(local.folder, uid, job_yaml, None, say)
        starts = RunStarts(folder, uid)
        command = {"folder": os.getcwd(), "words": list(local.words)}
        folder.write_json(starts.file_path(COMMAND), command)
        table = {"names": [role.name for role in file.roles], "lead": lead}
        folder.write_json(ROLES, table)
        progress = AttemptProgress(uid, 0, 1, started_at, time.time())
        starts.write_summary(Summary(None, restarts={}, of=progress))
        gangs = _RoleGangs(RoleBoard(file.roles, lead), runs, signals)
        signals.gang = gangs
        if signals.count:
            # The signal came before there was something to stop.
            gangs.send_signal(signal.SIGINT if signals.is_interrupt else signal.SIGTERM)
        try:
            gangs.follow(show, say)
        except UserError as error:
            verdict = verdict_for_code(contract.BAD_SPEC, error.message)
            starts.write_summary(Summary(verdict, restarts={}, of=progress))
            raise
        decisive, summary = _find_result(gangs, signals, progress)
        folder.write_json(ROLES, table | {"decisive": decisive})
        if lock.is_gone:
            folder.replace_file(JOB, job_yaml.encode())
        starts.write_summary(summary)
        assert summary.verdict is not None
        reached_step = bookkeeping.find_reached_step(local.folder)
        kept_status, start = bookkeeping.find_kept_status(local.folder)
        code = summary.verdict.code
        return RunEnd(code, summary.to_json(), reached_step, kept_status, start, decisive)


def _find_result(
    gangs: _RoleGangs, signals: Signals, progress: AttemptProgress
) -> tuple[str | None, Summary]:
    """Return the role that decides on the result of the job, and the summary of the job."""
    decisive = gangs.decisive
    if decisive is None:
        # The user has stopped the job.
        decisive = (gangs.board.list_unfinished_roles() or [gangs.board.lead])[0]
    if decisive not in gangs.ends:
        reason = StopReason.INTERRUPT if signals.is_interrupt else StopReason.USER
        failure = Failure(FailureKind.STOPPED, stop=StopFacts(reason))
        verdict: Verdict | None = verdict_for_code(contract.PREEMPTED, failure)
        return None, Summary(verdict, restarts={}, of=progress)
    summary = Summary.from_json(gangs.ends[decisive].summary)
    role_progress = dataclasses.replace(summary.of or progress, uid=progress.uid)
    return decisive, dataclasses.replace(summary, starts=(), of=role_progress)


# --- preparation ----------------------------------------------------------------------------------


def _make_runs(file: JobFile, local: LocalRun) -> dict[str, _RoleRun]:
    """Return the runs of all roles by name. Raises UserError if one cannot run here."""
    if local.remote is not None:
        message = "--hosts: a job with roles (jobs:) runs on one machine or on a cluster."
        raise UserError(message, "leave --hosts out, or `launcher submit`.")
    for name in _RESERVED_NAMES:
        if any(role.name == name for role in file.roles):
            message = f"jobs.{name}: a role cannot be called {name} here, where it is a folder."
            raise UserError(message, "give the role another name.")
    _check_volumes(file, local)
    variables = {}
    for role in file.roles:
        hosts = ["127.0.0.1"] * role.file.spec.host_count
        variables[contract.role_addresses_variable(role.name)] = ",".join(hosts)
        variables[contract.role_folder_variable(role.name)] = str(local.folder / role.name)
    devices = {} if local.simulate else share_devices(file.roles, os.environ)
    runs = {}
    for role in file.roles:
        job = role.file.spec
        # A volume is the same folder for all roles.
        names = {volume.name for volume in job.volumes} | {volume.path for volume in job.volumes}
        volumes = {name: path for name, path in local.volumes.items() if name in names}
        mounts = local_paths.map_paths(job, local.base, local.folder, volumes).mounts
        role_local = dataclasses.replace(
            local,
            folder=local.folder / role.name,
            volumes={str(mount): path for mount, path in mounts.items()},
            variables=variables | devices.get(role.name, {}) | {contract.ROLE: role.name},
        )
        run.check_run_folder(job, role_local.folder, lambda message: None)
        run.prepare_run(job, role_local)
        runs[role.name] = _RoleRun(role, role_local)
    return runs


def _check_volumes(file: JobFile, local: LocalRun) -> None:
    """Raise UserError for a --volume that no role has."""
    volumes = [volume for role in file.roles for volume in role.file.spec.volumes]
    names = {volume.name for volume in volumes} | {volume.path for volume in volumes}
    for name in local.volumes:
        if name not in names:
            shown = ", ".join(dict.fromkeys(volume.name for volume in volumes)) or "none"
            message = f"--volume {name}: no role has a volume of that name."
            raise UserError(message, f"their volumes: {shown}.")


def share_devices(
    roles: Sequence[RoleJob], environ: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return the variables that give each role its own GPUs of this machine.

    Raises UserError if the GPUs that `environ` shows are too few, or if several roles use TPUs.
    """
    by_platform = dict[str, list[RoleJob]]()
    for role in roles:
        by_platform.setdefault(role.file.spec.accelerator.platform, []).append(role)
    variables = dict[str, dict[str, str]]()
    for platform, users in by_platform.items():
        if platform == "cpu" or len(users) == 1:
            continue
        names = ", ".join(role.name for role in users)
        hint = "use CPU devices in their place with --simulate, or submit the job to a cluster."
        if (variable := _VISIBLE_DEVICES.get(platform)) is None:
            message = f"Roles {names} all use {users[0].file.spec.accelerator.type} here"
            raise UserError(f"{message}, and one process takes all chips of this machine.", hint)
        total = sum(role.file.spec.accelerator.per_host for role in users)
        devices = list(map(str, range(total)))
        if (visible := environ.get(variable)) is not None:
            devices = [device for device in visible.split(",") if device]
        if len(devices) < total:
            shown = f"{variable} shows {len(devices)}"
            raise UserError(f"Roles {names} use {total} GPUs, and {shown}.", hint)
        remaining = iter(devices)
        for role in users:
            role_devices = [next(remaining) for _ in range(role.file.spec.accelerator.per_host)]
            variables[role.name] = {variable: ",".join(role_devices)}
    return variables
