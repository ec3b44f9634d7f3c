"""Run a sweep on this machine: several runs at a time, each in its own `launcher run` process.

The state of each run is in its folder. A sweep that was killed can therefore continue: it finds
there which runs have ended and which still train. With rungs, the worse half of the runs is stopped
early (see `table`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxlaunch import contract
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.kubernetes.objects import format_age
from jaxlaunch.launcher.local import run_folders, status
from jaxlaunch.launcher.report.run import RunReader
from jaxlaunch.launcher.sweep.table import (
    Member,
    RunState,
    SweepTable,
    count_decided,
    find_worse_half,
)
from jaxlaunch.runs.layout import Holder, Lock, find_holder

# Reading the files of all runs takes a while.
SHOW_PERIOD_S = 2.0
POLL_S = 0.25
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END_STATES = (RunState.DONE, RunState.FAILED, RunState.CUT)


@dataclass(frozen=True)
class SweepPlan:
    """Settings of a sweep."""

    # The largest number of runs at a time.
    parallel: int
    metric: str
    is_higher_better: bool
    # Fractions of the steps if below 1, otherwise steps. Without rungs, no run is stopped early.
    rungs: Sequence[float]
    # Whether a run that waits for others at a rung may be stopped, and resumed from its save later.
    may_pause: bool
    # Returns the command of a run. Raises UserError if its job has changed since the sweep began.
    make_command: Callable[[Member], Sequence[str]]


class SweepRunner:
    """Starts the runs, follows them and stops the worse ones early."""

    def __init__(
        self,
        table: SweepTable,
        members: Sequence[Member],
        plan: SweepPlan,
        say: Callable[[str], None],
        show: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """Create the runner. `show` gets a line for each run that trains, every SHOW_PERIOD_S."""
        self._table, self._members, self._plan, self._say = table, members, plan, say
        self._show, self._shown_at = show, 0.0
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._running: set[str] = set()
        # Runs that this process has asked to stop.
        self._stop_requested: set[str] = set()
        self._readers: dict[str, RunReader] = {}
        self._signal_count = self._forwarded_count = 0

    def run_members(self, lock: Lock) -> None:
        """Run all members. A signal makes running ones save and end, a second one kills them."""

        def handle_signal(number: int, frame: types.FrameType | None) -> None:
            self._signal_count += 1
            if self._signal_count == 1:
                lock.note_stopping()

        handlers = {number: signal.signal(number, handle_signal) for number in _SIGNALS}
        try:
            self._find_running()
            while self._advance():
                self._show_progress()
                time.sleep(POLL_S)
        finally:
            if self._show is not None:
                self._show(())
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _show_progress(self) -> None:
        now = time.monotonic()
        if self._show is None or now < self._shown_at + SHOW_PERIOD_S:
            return
        self._shown_at = now
        members = [member for member in self._running_members() if member.folder.is_dir()]
        self._show([self.describe_progress(member) for member in members])

    def describe_progress(self, member: Member) -> str:
        """Return `digits-sweep-003: 120/600, eval/loss 0.25, 4m left`, as far as known."""
        report = self._readers.setdefault(member.name, RunReader(member.folder)).read_report()
        steps, curve = report.total_steps(), report.named_curves().get(self._plan.metric)
        parts = []
        if report.brief.step is not None:
            parts.append(f"{report.brief.step}/{'?' if steps is None else steps}")
        if curve is not None and curve.points:
            parts.append(f"{self._plan.metric} {curve.points[-1][2]:.4g}")
        if (left_s := report.remaining_s()) is not None:
            parts.append(f"{format_age(left_s)} left")
        return f"{member.name}: {', '.join(parts) or 'starting'}"

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal ended the sweep."""
        return self._signal_count > 0

    def _advance(self) -> bool:
        """Start, stop and record runs as due now. Return False when nothing is left to do."""
        for member in self._running_members():
            child = self._children.get(member.name)
            # A run that an earlier command has started is not our child.
            is_alive = _find_holder(member) is not None if child is None else child.poll() is None
            if not is_alive:
                self._record_end(member)
        if self._signal_count:
            # Runs get at most two signals: the first makes them save, and the second kills them.
            while self._forwarded_count < min(self._signal_count, 2):
                self._forwarded_count += 1
                for member in self._running_members():
                    if self._forwarded_count > 1 or member.name not in self._stop_requested:
                        self._send_stop(member)
            return bool(self._running)
        decided_rungs = self._decide_rungs() if self._plan.rungs else 0
        candidates = [member for member in self._members if self._may_start(member, decided_rungs)]
        candidates.sort(key=lambda member: member.state is RunState.PAUSED)
        for member in candidates[: max(0, self._plan.parallel - len(self._running))]:
            self._start_run(member)
        return bool(self._running or candidates)

    def _running_members(self) -> list[Member]:
        return [member for member in self._members if member.name in self._running]

    # --- one run ----------------------------------------------------------------------------------

    def _find_running(self) -> None:
        """Restore the states of all runs from their folders."""
        for member in self._members:
            if _find_holder(member) is not None:
                self._running.add(member.name)
                if member.standing.cut_rung is not None:
                    self._request_stop(member)
                else:
                    self._record_state(member, RunState.RUNNING, "an earlier command started it")
            elif member.state in _END_STATES:
                member.standing.is_over = True
            elif member.folder.is_dir():
                self._record_end(member)
                # This command continues the run.
                if member.state is RunState.STOPPED:
                    member.standing.is_over, member.state = False, RunState.WAITING
            else:
                member.state = RunState.WAITING

    def _may_start(self, member: Member, decided_rungs: int) -> bool:
        is_waiting = member.state in (RunState.WAITING, RunState.PAUSED)
        is_running = member.name in self._running
        return is_waiting and not is_running and len(member.standing.values) <= decided_rungs

    def _start_run(self, member: Member) -> None:
        try:
            command = self._plan.make_command(member)
        except UserError as error:
            member.standing.is_over = True
            self._record_state(member, RunState.FAILED, error.message)
            return
        with open(member.folder.with_suffix(".log"), "ab") as log:
            self._children[member.name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._running.add(member.name)
        self._record_state(member, RunState.RUNNING, " ".join(member.changes))

    def _record_end(self, member: Member) -> None:
        """Record how a run ended, or that it is paused."""
        self._running.discard(member.name)
        child = self._children.pop(member.name, None)
        is_cut = member.standing.cut_rung is not None
        is_pause = member.name in self._stop_requested and not is_cut and not self._signal_count
        self._stop_requested.discard(member.name)
        if self._plan.rungs:
            self._read_values(member)
        code, message = _read_end(member, None if child is None else child.returncode)
        if is_pause and contract.outcome_for_code(code).is_stop:
            self._record_state(member, RunState.PAUSED, "waits for the others")
            return
        member.standing.is_over = True
        # The run was killed, or stopped by somebody else.
        is_stopped = code < 0 or code in (contract.PREEMPTED, contract.LOST, contract.KILLED)
        if code == contract.DONE:
            _, value = newest_values(member, self._plan.metric)
            note = "" if value is None else f"{self._plan.metric} {value:.4g}"
            self._record_state(member, RunState.DONE, note)
        elif is_stopped and not is_cut:
            self._record_state(member, RunState.STOPPED, "the same command continues it")
        elif not is_cut:
            self._record_state(member, RunState.FAILED, f"exit {code}: {message}")

    def _record_state(
        self, member: Member, state: RunState, note: str = "", **fields: object
    ) -> None:
        self._table.record_state(member, state, note, **fields)
        self._say(f"{member.name}: {state}{f', {note}' if note else ''}")

    # --- stopping early ---------------------------------------------------------------------------

    def _decide_rungs(self) -> int:
        """Stop the worse half at each decided rung, and pause runs to make room for others.

        Returns the number of rungs that are decided.
        """
        for member in self._running_members():
            self._read_values(member)
        standings = {member.name: member.standing for member in self._members}
        for rung in range(count_decided(standings, len(self._plan.rungs))):
            worse_names = find_worse_half(
                standings, rung, is_higher_better=self._plan.is_higher_better
            )
            for member in self._members:
                is_over = member.standing.cut_rung is not None or member.state is RunState.DONE
                if member.name in worse_names and not is_over:
                    value = f"{self._plan.metric} {member.standing.values[rung]:.4g}"
                    note = f"{value} is in the worse half at rung {rung + 1}"
                    self._record_state(member, RunState.CUT, note, rung=rung)
                    member.standing.is_over = True
                    self._request_stop(member)
        # Count again without the runs that were just stopped.
        decided_rungs = count_decided(standings, len(self._plan.rungs))
        waiting_count = sum(self._may_start(member, decided_rungs) for member in self._members)
        free_slots = self._plan.parallel - len(self._running)
        for member in self._running_members() if self._plan.may_pause else ():
            if waiting_count > free_slots and len(member.standing.values) > decided_rungs:
                free_slots += self._request_stop(member)
        return decided_rungs

    def _read_values(self, member: Member) -> None:
        """Record the first value of the metric at or after each rung."""
        values = member.standing.values
        if len(values) == len(self._plan.rungs):
            return
        report = self._readers.setdefault(member.name, RunReader(member.folder)).read_report()
        curve, steps = report.named_curves().get(self._plan.metric), report.total_steps()
        points = curve.points if curve else ()
        for rung_index in range(len(values), len(self._plan.rungs)):
            rung = self._plan.rungs[rung_index]
            from_step = rung if rung >= 1 else math.inf if steps is None else rung * steps
            point = next((point for point in points if point[0] >= from_step), None)
            if point is None:
                return
            step, value = int(point[0]), point[2]
            self._table.record_state(member, member.state, rung=rung_index, step=step, value=value)

    def _request_stop(self, member: Member) -> bool:
        """Make a run save and end. Return False if it does not run or was asked before."""
        if member.name in self._stop_requested or member.name not in self._running:
            return False
        self._stop_requested.add(member.name)
        self._send_stop(member)
        return True

    def _send_stop(self, member: Member) -> None:
        """Ask a run to stop as `launcher stop` does; kill it if it was asked before."""
        child = self._children.get(member.name)
        if child is not None and (self._forwarded_count > 1 or _find_holder(member) is None):
            child.send_signal(signal.SIGTERM)
            return
        # The error means that the run has ended.
        with contextlib.suppress(UserError):
            run_folders.stop_run(run_folders.open_run(member.folder))


def newest_values(member: Member, metric: str) -> tuple[str, float | None]:
    """Return the step of a run as text, such as `120/600`, and the newest value of a metric."""
    report = RunReader(member.folder).read_report()
    step, steps = report.brief.step, report.total_steps()
    text = "-" if step is None else str(step) if steps is None else f"{step}/{steps}"
    curve = report.named_curves().get(metric)
    return text, curve.points[-1][2] if curve is not None and curve.points else None


def count_fitting_runs(processes: int, platform: str) -> int:
    """Return the number of runs that the CPUs allow, or 1 if the runs need GPUs or TPUs."""
    return 1 if platform != "cpu" else max(1, len(os.sched_getaffinity(0)) // processes)


def _find_holder(member: Member) -> Holder | None:
    try:
        return find_holder(member.folder)
    except OSError:
        return None


def _read_end(member: Member, exit_code: int | None) -> tuple[int, str]:
    """Return the exit code and the reason of a run that ended, from its verdict or its process."""
    verdict = None
    if member.folder.is_dir():
        verdict = status.run_verdict(run_folders.open_run(member.folder))
    if verdict is not None and exit_code in (None, verdict.code):
        return verdict.code, verdict.message
    code = contract.LOST if exit_code is None else exit_code
    return code, f"see {member.folder.with_suffix('.log')}"
