"""Leads a sweep on this machine: as many runs at once as it is told, each a `launcher run` of its own.

What is true of a run stands in its own folder: a sweep that was killed finds there which of its runs have ended, and
which still train, and goes on.
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
from jaxlaunch.launcher.local import run_folders, status, stop
from jaxlaunch.launcher.report.run import Followed
from jaxlaunch.launcher.sweep import halving
from jaxlaunch.launcher.sweep.table import Member, Table
from jaxlaunch.runs.lock import Holder, Lock, find_holder

POLL_S = 0.25
_STOPPING = (signal.SIGINT, signal.SIGTERM)
ENDED = ("done", "failed", "cut")


@dataclass(frozen=True)
class Plan:
    """How a sweep is led."""

    parallel: int
    metric: str
    is_higher_better: bool
    rungs: Sequence[float]  # fractions of the steps below 1, steps from there on; none: no run is stopped early
    may_pause: bool  # a run that waits for the others at a rung may end and go on later from what it saved
    command: Callable[[Member], Sequence[str]]  # starts a run. Raises UserError where its job is another by now


class Leader:
    """Starts the runs, follows them and stops what its rule says."""

    def __init__(self, table: Table, members: Sequence[Member], plan: Plan, say: Callable[[str], None]) -> None:
        self._table, self._members, self._plan, self._say = table, members, plan, say
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._running: set[str] = set()
        self._asked: set[str] = set()  # to stop, by us
        self._followed: dict[str, Followed] = {}
        self._signals = self._passed_on = 0

    def run(self, own: Lock) -> None:
        """Until every run has ended, or a signal has come: then every run saves and ends; a second one kills them."""

        def handle(number: int, frame: types.FrameType | None) -> None:
            self._signals += 1
            if self._signals == 1:
                own.note_stopping()

        before = {number: signal.signal(number, handle) for number in _STOPPING}
        try:
            self._find_running()
            while self._step():
                time.sleep(POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal ended it."""
        return self._signals > 0

    def _step(self) -> bool:
        """What there is to do now; False when nothing is left."""
        for member in self._members:
            if member.name in self._running and not self._is_alive(member):
                self._end(member)
        if self._signals:
            self._pass_on()
            return bool(self._running)
        decided = self._judge() if self._plan.rungs else 0
        candidates = [member for member in self._members if self._may_start(member, decided)]
        candidates.sort(key=lambda member: member.state == "paused")
        for member in candidates[: max(0, self._plan.parallel - len(self._running))]:
            self._start(member)
        return bool(self._running or candidates)

    # --- one run ------------------------------------------------------------------------------------------------------

    def _find_running(self) -> None:
        """Takes up the runs as their folders have them."""
        for member in self._members:
            if _holder(member) is not None:
                self._running.add(member.name)
                if member.standing.cut is not None:
                    self._ask(member)
                else:
                    self._note(member, "running", "an earlier command started it")
            elif member.state in ENDED:
                member.standing.is_over = True
            elif member.folder.is_dir():
                self._end(member)
                if member.state == "stopped":  # which this command continues
                    member.standing.is_over, member.state = False, "waiting"
            else:
                member.state = "waiting"

    def _is_alive(self, member: Member) -> bool:
        child = self._children.get(member.name)
        return child.poll() is None if child is not None else _holder(member) is not None

    def _may_start(self, member: Member, decided: int) -> bool:
        is_ready = member.name not in self._running and member.state in ("waiting", "paused")
        return is_ready and len(member.standing.values) <= decided

    def _start(self, member: Member) -> None:
        try:
            command = self._plan.command(member)
        except UserError as error:
            member.standing.is_over = True
            return self._note(member, "failed", error.message)
        with open(member.folder.with_suffix(".log"), "ab") as output:
            self._children[member.name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._running.add(member.name)
        self._note(member, "running", " ".join(member.changes))

    def _end(self, member: Member) -> None:
        """Notes how a run ended."""
        self._running.discard(member.name)
        child = self._children.pop(member.name, None)
        is_pause = member.name in self._asked and member.standing.cut is None and not self._signals
        self._asked.discard(member.name)
        if self._plan.rungs:
            self._look(member)
        code, message = _ending(member, None if child is None else child.returncode)
        if is_pause and code == contract.PREEMPTED:
            return self._note(member, "paused", "waits for the others")
        member.standing.is_over = True
        if code == contract.DONE:
            self._note(member, "done", self._value(member))
        elif member.standing.cut is None and _goes_on(code):
            self._note(member, "stopped", "the same command continues it")
        elif member.standing.cut is None:
            self._note(member, "failed", f"exit {code}: {message}")

    def _value(self, member: Member) -> str:
        value = newest(member, self._plan.metric)
        return "" if value is None else f"{self._plan.metric} {value:.4g}"

    def _note(self, member: Member, state: str, note: str = "", **more: object) -> None:
        self._table.note(member, state, note, **more)
        self._say(f"{member.name}: {state}{f', {note}' if note else ''}")

    # --- stopping early -----------------------------------------------------------------------------------------------

    def _judge(self) -> int:
        """Stops the worse half at each rung that is decided, and lets who waits at one make room; how many are."""
        for member in self._members:
            if member.name in self._running:
                self._look(member)
        standings = {member.name: member.standing for member in self._members}
        for rung in range(halving.decided(standings, len(self._plan.rungs))):
            names = halving.worse(standings, rung, is_higher_better=self._plan.is_higher_better)
            for member in self._members:
                if member.name in names and member.standing.cut is None and member.state != "done":
                    value = f"{self._plan.metric} {member.standing.values[rung]:.4g}"
                    self._note(member, "cut", f"{value} is in the worse half at rung {rung + 1}", rung=rung)
                    member.standing.is_over = True
                    self._ask(member)
        decided = halving.decided(standings, len(self._plan.rungs))  # without those that were just stopped
        waiting = sum(self._may_start(member, decided) for member in self._members)
        free = self._plan.parallel - len(self._running)
        for member in self._members:
            if self._plan.may_pause and waiting > free:
                if member.name in self._running and len(member.standing.values) > decided:
                    free += self._ask(member)
        return decided

    def _look(self, member: Member) -> None:
        """Notes the first value of the metric from each rung on."""
        reached = member.standing.values
        if len(reached) == len(self._plan.rungs):
            return
        seen = self._followed.setdefault(member.name, Followed(member.folder)).read()
        curve, steps = seen.curves().get(self._plan.metric), seen.steps()
        for rung in range(len(reached), len(self._plan.rungs)):
            at = self._plan.rungs[rung]
            from_step = at if at >= 1 else math.inf if steps is None else at * steps
            point = next((point for point in curve.points if point[0] >= from_step), None) if curve else None
            if point is None:
                return
            self._table.note(member, member.state, rung=rung, step=int(point[0]), value=point[2])

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _ask(self, member: Member) -> bool:
        """Has a run save and end; False where it was asked before."""
        if member.name in self._asked or member.name not in self._running:
            return False
        self._asked.add(member.name)
        self._signal(member)
        return True

    def _pass_on(self) -> None:
        """Sends the runs each signal that has come since: the first has them save and end, another kills."""
        while self._passed_on < min(self._signals, 2):
            self._passed_on += 1
            for member in self._members:
                if member.name in self._running and (self._passed_on > 1 or member.name not in self._asked):
                    self._signal(member)

    def _signal(self, member: Member) -> None:
        """Asks a run to stop as `launcher stop` does, unless it has not begun; a second time it is killed."""
        child = self._children.get(member.name)
        if child is not None and (self._passed_on > 1 or _holder(member) is None):
            return child.send_signal(signal.SIGTERM)
        with contextlib.suppress(UserError):  # it has ended
            stop.stop(run_folders.open_run(member.folder))


def newest(member: Member, metric: str) -> float | None:
    """The newest value of a metric of a run."""
    curve = Followed(member.folder).read().curves().get(metric)
    return curve.points[-1][2] if curve is not None and curve.points else None


def fitting(processes: int, platform: str) -> int:
    """How many runs of so many processes fit this machine: its CPUs, or one where they need its GPUs or TPUs."""
    return 1 if platform != "cpu" else max(1, len(os.sched_getaffinity(0)) // processes)


def _holder(member: Member) -> Holder | None:
    try:
        return find_holder(member.folder)
    except OSError:
        return None


def _ending(member: Member, left_with: int | None) -> tuple[int, str]:
    """The code of a run that ended, and why: what its own folder says, and its command where that says nothing."""
    verdict = status.verdict_of(run_folders.open_run(member.folder)) if member.folder.is_dir() else None
    if left_with is None:
        left_with = contract.LOST if verdict is None else verdict.code
    is_told = verdict is not None and verdict.code == left_with
    return left_with, verdict.message if verdict is not None and is_told else f"see {member.folder.with_suffix('.log')}"


def _goes_on(code: int) -> bool:
    """Whether the same command continues a run that ended so: stopped from outside, or killed."""
    return code in (contract.PREEMPTED, contract.LOST, contract.KILLED) or code < 0
