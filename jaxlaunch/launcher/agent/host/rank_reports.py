"""What a host tells its leader of its processes: events, changes of their states, stacks, notes and metrics."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlaunch.launcher.agent.gang.clock import Clock
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.nccl_status import asks_nccl
from jaxlaunch.launcher.agent.gang.progress import Changes, Status, phase_timeouts
from jaxlaunch.launcher.agent.gang.reports import UNSTARTABLE
from jaxlaunch.launcher.agent.gang.stacks import MAX_CHARS
from jaxlaunch.launcher.agent.gang.verdict import Kind, is_signals
from jaxlaunch.launcher.agent.host import nccl_ras
from jaxlaunch.launcher.agent.host.child import Child
from jaxlaunch.launcher.agent.host.leader_connection import LeaderConnection
from jaxlaunch.launcher.agent.host.member_state import MemberState
from jaxlaunch.launcher.agent.host.processes import Processes
from jaxlaunch.launcher.agent.host.profiles import Profiles
from jaxlaunch.launcher.agent.host.reported_metrics import ReportedMetrics
from jaxlaunch.launcher.agent.io import cgroup
from jaxlaunch.launcher.agent.io.link import BEAT_S
from jaxlaunch.records import checked
from jaxlaunch.records.failure import HangFacts

MAX_NOTES = 50  # of a process
MAX_NOTE_CHARS = 2000
# For the processes to write their stacks.
STACKS_S = 2.0
# What a start spends its first seconds on, by the phase that rank 0 is in.
_RESTART_CAUSES = {"init": "rendezvous", "step": "first_step"}
_NO_HOOK = (
    "rank {rank} has not loaded jaxlaunch's sitecustomize.py: it runs `python -I` or `python -S`, has another "
    "PYTHONPATH, or is not Python. So jax.distributed.initialize() without arguments does not find the other "
    "processes, and neither progress nor exceptions are reported"
)


class RankReports:
    """Turns what the processes report, and how they end, into messages to the leader."""

    def __init__(
        self,
        config: Config,
        state: MemberState,
        processes: Processes,
        clock: Clock | None,
        *,
        leader: LeaderConnection,
        say: Callable[[str], None],
        metrics: ReportedMetrics,
    ) -> None:
        self.timeouts_s = phase_timeouts(config.job.timeouts_s)
        self.profiles = Profiles(config.job.command is None, processes.alive)
        self._config, self._state, self._processes, self._clock = config, state, processes, clock
        self._leader, self._say, self._metrics = leader, say, metrics
        self._stacks: _StackDump | None = None
        self._beat_at = time.monotonic()
        self._oom_kills = cgroup.oom_kills()
        self._changes = Changes()
        # Ranks whose timeout was reported in this attempt, and those without our site hook.
        self._overdue: set[int] = set()
        self._warned_of_hook: set[int] = set()

    def start(self) -> None:
        """Forget what was told of the attempt before."""
        self._overdue.clear()
        self._warned_of_hook.clear()
        self._metrics.unsent, self._changes = None, Changes()
        if self._clock is not None:
            self._clock.enter("init", time.monotonic())

    def take(self, child: Child, message: Mapping[str, Any]) -> None:
        """Pass on a line of a process's progress pipe."""
        self._count(child, message)
        if "error" in message and child.tree.is_program:
            self.send_event(Kind.ERROR, child, error=message["error"])
        if UNSTARTABLE in message:
            self._warned_of_hook.add(child.rank)
            self.send_event(Kind.UNSTARTABLE, child, text=message[UNSTARTABLE])
        if "atexit" in message and (child.tree.is_program or child.progress.status.waits):
            self.send_event(Kind.LEFT, child)
        if "note" in message:
            self._pass_on(child, str(message["note"])[:MAX_NOTE_CHARS])
        if isinstance(message.get("profile"), dict):
            self.profiles.update(child, message["profile"])
        if "metrics" in message and child.rank == 0:
            self._metrics.add(message.get("of", child.progress.status.step), message["metrics"])
        # What may be the last that the leader hears.
        if "stopped" in message or "committed" in message or message.get("phase") == "done":
            self.beat()
        if "phase" in message and not self._state.is_stopping:
            if all(process.progress.status.stepped for process in self._processes.alive()):
                self._processes.keep_standbys()

    def take_end(self, child: Child, code: int) -> None:
        """Report the end of a process."""
        self.check_hellos([child])
        if child.rank == 0:
            self._metrics.end()
        self.beat()
        # The wrapper of a Python that failed passed the failure on.
        if child.handled is not None and code > 0 and not is_signals(code):
            self.send_event(Kind.ERROR, child, error=child.handled)
        self.send_event(Kind.EXIT, child, exit=code, oom=self._is_oom_kill(code), text=child.tail_text[-MAX_CHARS:])

    def send_event(self, kind: Kind, child: Child, **fields: Any) -> None:
        """Report what happened to a process, with its status."""
        self._leader.send("event", kind=kind.value, **self._about(child), **fields)

    def check_hellos(self, children: Sequence[Child]) -> None:
        """Warn once of each process of this attempt that has not loaded our site hook."""
        for child in children:
            is_current = self._processes.children.get(child.rank) is child and self._state.verdict is None
            if not is_current or child.progress.has_hello or child.rank in self._warned_of_hook:
                continue
            self._warned_of_hook.add(child.rank)
            note = _NO_HOOK.format(rank=child.rank)
            self._say(f"warning: {note}")
            self._leader.send("note", text=note)

    def dump_stacks(self) -> None:
        """Have every process write its stacks, and ask NCCL what it knows."""
        self._processes.dump_stacks()
        nccl = nccl_ras.Question(os.environ) if asks_nccl(self._config.job.platform, self._config.host) else None
        self._stacks = _StackDump(time.monotonic() + STACKS_S, nccl)

    def tick(self, now: float) -> None:
        """Send what is due."""
        if now - self._beat_at >= BEAT_S:
            self.beat()
        if self._state.verdict is None:
            self._check_timeouts(now)
        if self._stacks is not None:
            self._send_stacks(self._stacks, now)

    def beat(self) -> None:
        """Send what has changed of the ranks' states, and the newest metrics."""
        self._beat_at = time.monotonic()
        if not self._leader.is_admitted:
            return
        changes = self._changes.take({rank: child.progress.status for rank, child in self._processes.children.items()})
        metrics, self._metrics.unsent = self._metrics.unsent, None
        self._leader.send("beat", attempt=self._state.attempt, ranks=changes, metrics=metrics)

    def _about(self, child: Child) -> dict[str, Any]:
        """Return the fields of a message that carries the whole status of a rank."""
        status = child.progress.status
        self._changes.told(child.rank, status)
        return {"attempt": self._state.attempt, "rank": child.rank, "status": status.to_wire()}

    def _pass_on(self, child: Child, note: str) -> None:
        """Send a note of a process to the leader: each once, and no more of them than the summary holds."""
        if self._leader.is_admitted and note not in child.notes and len(child.notes) < MAX_NOTES:
            child.notes.add(note)
            self._leader.send("note", text=note)

    def _count(self, child: Child, message: Mapping[str, Any]) -> None:
        """Pass rank 0's phases to the clock, on host 0."""
        if self._clock is None or child.rank != 0 or self._state.verdict is not None:
            return
        now, status = time.monotonic(), child.progress.status
        if (cause := _restart_cause(message, status)) is not None:
            self._clock.restart.enter(cause, now)
        if status.phase == "step" and status.step is not None and status.step >= (status.first_step or 0):
            self._clock.restart.stepped(now)
        if "phase" in message and status.phase is not None:
            self._clock.enter(status.phase, now)
            if status.phase == "step" and status.step is not None:
                self._clock.reached(status.step, now)
        if "committed" in message and status.committed is not None:
            self._clock.committed(status.committed)

    def _is_oom_kill(self, code: int) -> bool:
        """Return whether the OOM killer sent this SIGKILL. Outside of a container its count is the whole machine's."""
        kills_before, self._oom_kills = self._oom_kills, cgroup.oom_kills()
        return code == -signal.SIGKILL and self._config.is_pod and self._oom_kills > kills_before

    def _check_timeouts(self, now: float) -> None:
        for child in self._processes.alive():
            progress = child.progress
            if (
                child.rank in self._overdue
                or not progress.overdue(self.timeouts_s, now)
                or child.tree.has_lost_reporter
            ):
                continue
            self._overdue.add(child.rank)
            elapsed_s, limit_s = progress.in_phase_s(now), progress.timeout_s(self.timeouts_s) or 0.0
            hang = HangFacts(progress.status.phase or "", limit_s, elapsed_s, child.rank)
            self.send_event(Kind.HANG, child, hang=checked.to_json(hang), unseen_s=elapsed_s)

    def _send_stacks(self, dump: _StackDump, now: float) -> None:
        # Each look reads a file of every process.
        if dump.is_awaited and dump.is_complete({child.rank: child.stacks for child in self._processes.alive()}, now):
            for rank, text in dump.take_texts().items():
                self._leader.send("stacks", **self._about(self._processes.children[rank]), text=text[-MAX_CHARS:])
        if (answer := dump.take_nccl()) is not None:
            self._leader.send("nccl", attempt=self._state.attempt, text=answer)


class _StackDump:
    """Stacks that the processes write and NCCL's answer, until both were sent."""

    def __init__(self, until: float, nccl: nccl_ras.Question | None) -> None:
        self._until: float | None = until
        self._nccl = nccl
        self._texts: Mapping[int, str] = {}

    @property
    def is_awaited(self) -> bool:
        """Whether the stacks are still to be sent."""
        return self._until is not None

    def is_complete(self, texts: Mapping[int, str], now: float) -> bool:
        """Return whether the stacks are to be sent: no text grows, or a process cannot write any."""
        if self._until is None:
            return False
        texts_before, self._texts = self._texts, texts
        is_growing = any(not text or text != texts_before.get(rank) for rank, text in texts.items())
        return not is_growing or now >= self._until

    def take_texts(self) -> Mapping[int, str]:
        """Return the stacks by rank, once."""
        self._until = None
        return self._texts

    def take_nccl(self) -> str | None:
        """Return what NCCL answered, once; "" where it did not, None while it may still."""
        answer = None if self._nccl is None else self._nccl.answer
        if answer is not None:
            self._nccl = None
        return answer


def _restart_cause(message: Mapping[str, Any], status: Status) -> str | None:
    """Return the part of a start that begins with a line of rank 0's, of contract.RESTART; None if none begins."""
    if message.get("hello") == "site":
        return "import"
    if "joined" in message:
        return "init"
    return _RESTART_CAUSES.get(status.phase or "", status.phase) if "phase" in message else None
