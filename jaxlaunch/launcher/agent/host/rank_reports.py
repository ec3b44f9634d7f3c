"""Reports of a host's processes to the leader, metrics of its rank 0, and requests for profiles.

`RankReports` turns messages and ends of processes into heartbeats and events for the leader.
`ProgramMetrics` writes the metrics that a user's program reports. `Profiles` passes requests of
`launcher profile` to the processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from jaxlaunch import atomic_file, contract
from jaxlaunch.launcher.agent.gang.clock import Clock
from jaxlaunch.launcher.agent.gang.config import Config, read_tracker_name
from jaxlaunch.launcher.agent.gang.memory import HostMemory
from jaxlaunch.launcher.agent.gang.nccl import NcclQuery, should_query_nccl
from jaxlaunch.launcher.agent.gang.progress import UNSTARTABLE, StatusChanges
from jaxlaunch.launcher.agent.gang.root_cause import EventKind, is_signal_exit_code
from jaxlaunch.launcher.agent.host.leader_connection import LeaderConnection, MemberState
from jaxlaunch.launcher.agent.host.processes import CHILD_ENDED, GONE, Child, Processes
from jaxlaunch.launcher.agent.io import resources
from jaxlaunch.launcher.agent.io.link import HEARTBEAT_S
from jaxlaunch.records import codec
from jaxlaunch.records.verdict import HangFacts
from jaxlaunch.runs import host_load, layout
from jaxlaunch.runs.host_load import HostLoad
from jaxlaunch.runs.journal import STEP, Journal, TensorBoard, replace_non_finite

# Largest number of notes of one process.
MAX_NOTES = 50
MAX_NOTE_CHARS = 2000
# The stacks of one rank, and the end of its output, are cut to this length in messages.
MAX_STACKS_CHARS = 16_000
# A program that has ended behind a wrapper is reported as lost after this time.
LOST_PROGRAM_S = 0.5
# Time between two reads of the memory of the processes and of this host.
MEMORY_PERIOD_S = 2.0
# Processes must write their stacks within this time.
STACKS_TIMEOUT_S = 2.0
# Cause in contract.RESTART_CAUSES by phase of rank 0, if their names differ.
_RESTART_CAUSE_BY_PHASE = {"init": "rendezvous", "step": "first_step"}
_NO_HOOK_WARNING = (
    "rank {rank} has not loaded jaxlaunch's sitecustomize.py: it runs `python -I` or `python -S`, "
    "has another PYTHONPATH, or is not Python. So jax.distributed.initialize() without arguments "
    "does not find the other processes, and neither progress nor exceptions are reported"
)


class RankReports:
    """Reports the statuses, events and ends of this host's processes to the leader."""

    def __init__(
        self,
        config: Config,
        state: MemberState,
        processes: Processes,
        clock: Clock | None,
        *,
        leader: LeaderConnection,
        say: Callable[[str], None],
        metrics: ProgramMetrics,
    ) -> None:
        self.timeouts_s = config.job.phase_timeouts_s
        self.profiles = Profiles(config.job.command is None, processes.alive_children)
        self._config, self._state, self._processes, self._clock = config, state, processes, clock
        self._leader, self._say, self._metrics = leader, say, metrics
        self._stacks: _StackDump | None = None
        self._beat_at = self._memory_read_at = time.monotonic()
        self._oom_kills = resources.count_oom_kills()
        self._changes = StatusChanges()
        # Ranks of this attempt whose exceeded timeout was reported, and ranks whose missing site
        # hook was.
        self._overdue_ranks: set[int] = set()
        self._ranks_without_hook: set[int] = set()
        # By rank, when its program ended behind a wrapper; infinite once reported.
        self._lost_at: dict[int, float] = {}
        # Ranks with a process that the OOM killer killed in this attempt.
        self._oom_ranks: set[int] = set()
        # The memory in this attempt, and what the leader knows of it.
        self._memory = self._sent_memory = HostMemory()

    def start_attempt(self) -> None:
        """Reset the state of the previous attempt."""
        self._overdue_ranks.clear()
        self._lost_at.clear()
        self._oom_ranks.clear()
        self._memory = self._sent_memory = HostMemory()
        self._ranks_without_hook.clear()
        self._metrics.unsent, self._changes = None, StatusChanges()
        if self._clock is not None:
            self._clock.enter_cause("init", time.monotonic())

    def take_report(self, child: Child, message: Mapping[str, Any]) -> None:
        """Handle a message from the progress pipe of a process."""
        self._update_clock(child, message)
        if not message.keys().isdisjoint(("error", GONE, CHILD_ENDED)):
            self._send_program_end(child, message)
        if UNSTARTABLE in message:
            self._ranks_without_hook.add(child.rank)
            self.send_event(EventKind.UNSTARTABLE, child, text=message[UNSTARTABLE])
        is_leaving = "atexit" in message or bool(message.get("waits"))
        if is_leaving and (child.tree.is_program or child.progress.status.waits):
            self.send_event(EventKind.LEFT, child)
        if "note" in message and self._leader.is_admitted:
            # Each note is sent only once.
            note = str(message["note"])[:MAX_NOTE_CHARS]
            if note not in child.notes and len(child.notes) < MAX_NOTES:
                child.notes.add(note)
                self._leader.send("note", text=note)
        if isinstance(message.get("profile"), dict):
            self.profiles.update(child, message["profile"])
        if "metrics" in message and child.rank == 0:
            step = message.get("of", child.progress.status.step)
            self._metrics.add_step(step, message["metrics"])
        # This may be the last report of the process, so it is sent at once.
        if "stopped" in message or "committed" in message or message.get("phase") == "done":
            self.send_beat()
        if "phase" in message and not self._state.is_stopping and self._processes.have_all_stepped:
            self._processes.keep_standbys()

    def take_end(self, child: Child, code: int) -> None:
        """Report the end of a process."""
        self.check_hellos([child])
        if child.rank == 0:
            self._metrics.finish()
        # The OOM killer sends SIGKILL. A wrapper of the program may hide that signal.
        is_killed = code == -signal.SIGKILL or (code != 0 and child.has_vanished_program)
        is_oom = is_killed and self._is_oom_kill(child)
        if is_oom:
            code = -signal.SIGKILL
        # The record of the attempt has the memory of the rank that ended it.
        self._memory = self._memory.with_peak(child.rank, child.peak_bytes)
        self._send_memory()
        # The failure must precede the exit event: the exit code 0 of a shell would mean success.
        self._report_hidden_failure(child, code)
        self.send_beat()
        text = child.tail_text[-MAX_STACKS_CHARS:]
        self.send_event(EventKind.EXIT, child, exit=code, oom=is_oom, text=text)

    def _report_hidden_failure(self, child: Child, code: int) -> None:
        """Report a failure of the program that the exit code of its wrapper does not show."""
        tree, status = child.tree, child.progress.status
        is_failure = code > 0 and not is_signal_exit_code(code)
        is_lost = code == 0 and not status.left and not self._state.is_stopping
        if is_failure and (error := child.end.find_error(code)) is not None:
            self.send_event(EventKind.ERROR, child, error=error)
        elif code == 0 and (error := child.end.error) is not None:
            fault = f"{error.get('type')}: {error.get('message')}".splitlines()[0]
            note = (
                f"rank {child.rank} counts as finished, because its command ended with exit code 0 "
                f"after a Python process of it had raised {fault}"
            )
            self._leader.send("note", text=note[:MAX_NOTE_CHARS])
        elif is_lost and tree.is_in_pipeline and status.jax is not None:
            text = child.tail_text[-MAX_STACKS_CHARS:]
            self.send_event(EventKind.UNFINISHED, child, text=text)
        elif is_lost and tree.has_joined and child.has_unknown_end:
            self._send_lost_program(child, is_handled=False)

    def send_event(self, kind: EventKind, child: Child, **fields: Any) -> None:
        """Report an event of a process, with its status."""
        self._leader.send("event", kind=kind.value, **self._status_fields(child), **fields)

    def check_hellos(self, children: Sequence[Child]) -> None:
        """Warn once about each process of this attempt that has not loaded our site hook."""
        for child in children:
            is_current = self._processes.children.get(child.rank) is child
            has_hook = child.progress.has_hello or child.rank in self._ranks_without_hook
            # A process that is stopped while Python starts never loads the hook.
            is_ending = self._state.is_stopping or self._state.verdict is not None
            if has_hook or not is_current or is_ending:
                continue
            self._ranks_without_hook.add(child.rank)
            note = _NO_HOOK_WARNING.format(rank=child.rank)
            self._say(f"warning: {note}")
            self._leader.send("note", text=note)

    def dump_stacks(self) -> None:
        """Ask every process to write its stacks, and query NCCL."""
        for child in self._processes.alive_children():
            child.dump_stacks()
        nccl_query = None
        if should_query_nccl(self._config.job.platform, self._config.host):
            nccl_query = NcclQuery(os.environ)
        self._stacks = _StackDump(time.monotonic() + STACKS_TIMEOUT_S, nccl_query)

    def tick(self, now: float) -> None:
        """Send reports that are due."""
        if now - self._memory_read_at >= MEMORY_PERIOD_S:
            self._memory_read_at = now
            self._read_memory()
        if now - self._beat_at >= HEARTBEAT_S:
            self.send_beat()
        if self._state.verdict is None:
            self._check_timeouts(now)
            self._check_lost_programs(now)
        if (dump := self._stacks) is None:
            return
        # Stacks are read only while they are awaited, because each process has a file of its own.
        if dump.is_awaited:
            children = self._processes.alive_children()
            if dump.is_complete({child.rank: child.stacks_text for child in children}, now):
                for rank, text in dump.take_texts().items():
                    fields = self._status_fields(self._processes.children[rank])
                    self._leader.send("stacks", **fields, text=text[-MAX_STACKS_CHARS:])
        if (answer := dump.take_nccl()) is not None:
            self._leader.send("nccl", attempt=self._state.attempt, text=answer)

    def _read_memory(self) -> None:
        """Record the memory of the processes and of this host."""
        memory = host_load.read_memory()
        in_use, limit = memory["in_use"], memory["limit"]
        if in_use is not None and limit is not None:
            self._memory = self._memory.with_use(in_use, limit)
        for child in self._processes.alive_children():
            peak_bytes = host_load.read_peak_bytes(child.tree.program_pid or child.tree.pid)
            if peak_bytes is not None:
                self._memory = self._memory.with_peak(child.rank, peak_bytes)
        if self._memory.has_grown_from(self._sent_memory):
            self._send_memory()

    def _send_memory(self) -> None:
        if self._leader.is_admitted and self._processes.children:
            self._sent_memory = self._memory
            fields = self._memory.to_wire()
            self._leader.send("memory", attempt=self._state.attempt, memory=fields)

    def send_beat(self) -> None:
        """Send the changes in the status of the ranks, and the newest metrics."""
        self._beat_at = time.monotonic()
        if not self._leader.is_admitted:
            return
        children = self._processes.children.items()
        statuses = {rank: child.progress.status for rank, child in children}
        changes = self._changes.take_changes(statuses)
        metrics, self._metrics.unsent = self._metrics.unsent, None
        self._leader.send("beat", attempt=self._state.attempt, ranks=changes, metrics=metrics)

    def _send_program_end(self, child: Child, message: Mapping[str, Any]) -> None:
        """Report an exception or a kill of the program, which a wrapper may handle."""
        is_handled = not child.tree.is_program or message.get("handled", False)
        is_decisive = not is_handled or message.get("fatal", False)
        if GONE in message:
            self.send_event(EventKind.GONE, child, is_handled=True)
        elif CHILD_ENDED in message:
            if child.tree.has_joined and child.end.error is None:
                self._lost_at[child.rank] = math.inf
                self._send_lost_program(child)
        elif is_decisive or child.tree.has_joined:
            error = message["error"]
            self.send_event(EventKind.ERROR, child, error=error, is_handled=not is_decisive)

    def _send_lost_program(self, child: Child, *, is_handled: bool = True) -> None:
        """Report the end of a program behind its wrapper, unless the wrapper ended it."""
        code = child.end.code
        if child.end.was_signalled and (code is None or code < 0):
            return
        is_killed = code in (None, -signal.SIGKILL)
        fields = {"is_handled": is_handled, "oom": is_killed and self._is_oom_kill(child)}
        if code is None:
            self.send_event(EventKind.GONE, child, **fields)
        elif code != contract.DONE:
            text = child.tail_text[-MAX_STACKS_CHARS:]
            self.send_event(EventKind.EXIT, child, exit=code, text=text, **fields)

    def _is_oom_kill(self, child: Child) -> bool:
        """Return whether the OOM killer has killed a process of the rank in this attempt.

        Its counter has no pids, so an increase since the last call counts for this rank. Outside of
        a container the counter is ignored, because it is for the whole machine.
        """
        kills_before, self._oom_kills = self._oom_kills, resources.count_oom_kills()
        if self._config.is_pod and self._oom_kills > kills_before:
            self._oom_ranks.add(child.rank)
        return child.rank in self._oom_ranks

    def _check_lost_programs(self, now: float) -> None:
        """Report programs that have ended behind a wrapper that is still running.

        The wrapper may handle this, so the event alone is not a fault. It explains failures of the
        peers.
        """
        for child in self._processes.alive_children():
            if not (child.tree.has_joined and child.has_vanished_program):
                self._lost_at.pop(child.rank, None)
            # Reports that the program wrote before its end may not have been read yet.
            elif now - self._lost_at.setdefault(child.rank, now) > LOST_PROGRAM_S:
                self._lost_at[child.rank] = math.inf
                self._send_lost_program(child)

    def _status_fields(self, child: Child) -> dict[str, Any]:
        """Return the fields of a message that carries the complete status of a rank."""
        status = child.progress.status
        self._changes.mark_sent(child.rank, status)
        return {"attempt": self._state.attempt, "rank": child.rank, "status": status.to_wire()}

    def _update_clock(self, child: Child, message: Mapping[str, Any]) -> None:
        """Pass rank 0's phases to the clock, on host 0."""
        if self._clock is None or child.rank != 0 or self._state.verdict is not None:
            return
        now, status = time.monotonic(), child.progress.status
        # These messages begin the next cause of contract.RESTART_CAUSES.
        if message.get("hello") == "site":
            self._clock.restart.enter_cause("import", now)
        elif "joined" in message:
            self._clock.restart.enter_cause("init", now)
        elif "phase" in message and status.phase is not None:
            cause = _RESTART_CAUSE_BY_PHASE.get(status.phase, status.phase)
            self._clock.restart.enter_cause(cause, now)
        step = status.step if status.phase == "step" else None
        if step is not None and step >= (status.first_step or 0):
            self._clock.restart.complete_first_step(now)
        if "phase" in message and status.phase is not None:
            self._clock.enter_cause(status.phase, now)
            if step is not None:
                self._clock.record_step(step, now)
        if "committed" in message and status.committed is not None:
            self._clock.record_commit(status.committed)

    def _check_timeouts(self, now: float) -> None:
        for child in self._processes.alive_children():
            timeout = child.progress.find_deadline(self.timeouts_s, now)
            is_reported = child.rank in self._overdue_ranks
            if is_reported or timeout is None or timeout.left_s >= 0:
                continue
            # The phase is outdated once the program that reported it has ended.
            if child.tree.has_lost_program and timeout.key != contract.FIRST_STEP:
                continue
            self._overdue_ranks.add(child.rank)
            hang = HangFacts(*timeout, child.rank)
            fields = codec.to_json(hang)
            self.send_event(EventKind.HANG, child, hang=fields, unseen_s=timeout.elapsed_s)


class _StackDump:
    """Stacks of the processes and the answer of NCCL, until both are sent."""

    def __init__(self, deadline: float, nccl: NcclQuery | None) -> None:
        self._deadline, self._nccl = deadline, nccl
        self.is_awaited = True
        self._texts: Mapping[int, str] = {}

    def is_complete(self, texts: Mapping[int, str], now: float) -> bool:
        """Return whether to send the stacks: no text grows any more, or the time is over."""
        previous_texts, self._texts = self._texts, texts
        is_growing = any(
            not text or text != previous_texts.get(rank) for rank, text in texts.items()
        )
        return not is_growing or now >= self._deadline

    def take_texts(self) -> Mapping[int, str]:
        """Return the stacks by rank, once."""
        self.is_awaited = False
        return self._texts

    def take_nccl(self) -> str | None:
        """Return the answer of NCCL once: "" if it did not answer, None while it still may."""
        answer = None if self._nccl is None else self._nccl.answer
        if answer is not None:
            self._nccl = None
        return answer


# --- metrics --------------------------------------------------------------------------------------

# Time between two lines on the screen.
PRINT_PERIOD_S = 10.0
# While storage stalls, at most this many rows are queued and further ones are dropped.
MAX_QUEUED_ROWS = 1000
# Time to write the queued rows after the program has ended.
FINAL_WRITE_S = 5.0

Row = tuple[int, Mapping[str, Any]]


class ProgramMetrics:
    """Writes the metrics that rank 0 of a program reports with `jaxlaunch.report`.

    The destinations are those of the built-in trainer: metrics.jsonl, TensorBoard events and, every
    few seconds, the screen. A thread writes the files, because storage may stall for longer than a
    host may be silent.
    """

    def __init__(
        self,
        folder: Path | None,
        say: Callable[[str], None],
        say_from_thread: Callable[[str], None],
    ) -> None:
        """Create the object; it writes nothing to files without a run folder.

        Args:
            folder: Run folder, or None.
            say: Writes a message for people.
            say_from_thread: The same for the writing thread, if a file cannot be written.
        """
        self._folder, self._say, self._say_from_thread = folder, say, say_from_thread
        # The newest metrics that were not sent to the leader yet.
        self.unsent: Mapping[str, Any] | None = None
        self._printed_at = time.monotonic()
        self._unprinted: Row | None = None
        self._host_load = HostLoad()
        self._rows: queue.Queue[Row | None] | None = None
        self._writer: threading.Thread | None = None
        # A TensorBoard tracker of the job writes the events itself, with more than these numbers.
        self._has_events = read_tracker_name(os.environ) != "tensorboard"

    def add_step(self, step: int | None, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step. The built-in loop writes its own to the files."""
        self.unsent = metrics
        types = (int, float, type(None))
        numbers = {name: value for name, value in metrics.items() if isinstance(value, types)}
        if step is None or STEP in metrics or not numbers:
            return
        if self._unprinted is not None and self._unprinted[0] == step:
            self._unprinted = step, {**self._unprinted[1], **numbers}
        else:
            self._unprinted = step, numbers
        if time.monotonic() - self._printed_at >= PRINT_PERIOD_S:
            self._print_newest()
        if self._folder is not None:
            row = {**self._host_load.read_numbers(), "time": time.time()}
            self._enqueue((step, row | replace_non_finite(numbers)))

    def finish(self) -> None:
        """Print the last numbers after the end of the program, and wait until all are written."""
        self._print_newest()
        if self._rows is not None and self._writer is not None:
            self._enqueue(None)
            self._writer.join(FINAL_WRITE_S)
        self._rows = self._writer = None

    def _print_newest(self) -> None:
        if self._unprinted is not None:
            step, numbers = self._unprinted
            texts = "  ".join(
                f"{name} {value:.4g}" for name, value in numbers.items() if value is not None
            )
            self._say(f"step {step}  {texts}")
        self._unprinted, self._printed_at = None, time.monotonic()

    def _enqueue(self, row: Row | None) -> None:
        if self._rows is None:
            self._rows = queue.Queue(MAX_QUEUED_ROWS)
            arguments = (self._rows,)
            self._writer = threading.Thread(target=self._write_rows, args=arguments, daemon=True)
            self._writer.start()
        # The queue is full if storage has not answered for minutes.
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(row)

    def _write_rows(self, rows: queue.Queue[Row | None]) -> None:
        journal, board = None, None
        try:
            while (row := rows.get()) is not None:
                step, values = row
                if journal is None:
                    if self._has_events:
                        board = TensorBoard(f"{self._folder}/{layout.TENSORBOARD}", step - 1)
                    journal = Journal(f"{self._folder}/{layout.METRICS}", step - 1)
                journal.merge_step(step, values)
                scalars = {name: value for name, value in values.items() if name != "time"}
                if board is not None:
                    board.write(step, {f"train/{name}": value for name, value in scalars.items()})
        except Exception as error:
            # Whatever a program reports, its metrics are not lost without a message.
            fault = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._say_from_thread(f"no more metrics.jsonl: {fault}")
        finally:
            for file in (journal, board):
                if file is not None:
                    # Closing it writes the rest of the line, which may fail again.
                    with contextlib.suppress(OSError):
                        file.close()


# --- profiles -------------------------------------------------------------------------------------

DEFAULT_STEPS = 5
# Wrong values are cut to this length in error messages.
MAX_SHOWN_CHARS = 60
# The number of digits is limited because int() raises for thousands of them.
_STEPS_PATTERN = re.compile(r"[0-9]{1,9}")

Reply = tuple[HTTPStatus, Mapping[str, Any]]


class Profiles:
    """The newest request for a profile, and the answers of the processes.

    A request is written to a file of each process. Only clients on this machine may send one:
    `launcher profile` connects through loopback, and in a pod through a port-forward.
    """

    def __init__(self, is_trainer: bool, alive_children: Callable[[], Iterable[Child]]) -> None:
        """Create the object without a request.

        Args:
            is_trainer: Whether the job runs the built-in trainer. Another program can be profiled
                only if it trains by `jaxlaunch.run`.
            alive_children: Returns the processes that have not ended.
        """
        self._is_trainer, self._alive_children = is_trainer, alive_children
        self._numbers = itertools.count(1)
        self._number: int | None = None
        self._requested: dict[int, Child] = {}
        self._answers: dict[int, Mapping[str, Any]] = {}

    def reply(self, method: str, query: str, is_local: bool) -> Reply:
        """Answer an HTTP request: POST requests a profile, GET reads the newest state."""
        if not is_local:
            hint = "connect from this host, or through kubectl port-forward"
            reason = f"profiles are served on loopback only: {hint}"
            return _error_reply(HTTPStatus.FORBIDDEN, reason)
        if method == "GET":
            return HTTPStatus.OK, self._profile_state()
        if method != "POST":
            reason = "use POST to request a profile, GET to read its state"
            return _error_reply(HTTPStatus.METHOD_NOT_ALLOWED, reason)
        text = parse_qs(query).get("steps", [str(DEFAULT_STEPS)])[-1]
        if not _STEPS_PATTERN.fullmatch(text) or not 1 <= int(text) <= contract.PROFILE_STEPS:
            text, limit = text[:MAX_SHOWN_CHARS], contract.PROFILE_STEPS
            reason = f"steps = {text} is not a number from 1 to {limit}"
            return _error_reply(HTTPStatus.BAD_REQUEST, reason)
        if (refusal := self._refusal_reason()) is not None:
            return _error_reply(HTTPStatus.CONFLICT, refusal)
        self._number, self._answers = next(self._numbers), {}
        self._requested = {child.rank: child for child in self._alive_children()}
        request = json.dumps({"id": self._number, "steps": int(text)}).encode()
        try:
            for child in self._requested.values():
                atomic_file.write_file(Path(child.profile_path), request)
        except OSError as error:
            self._requested = {}
            reason = f"cannot write the request: {error}"
            return _error_reply(HTTPStatus.INTERNAL_SERVER_ERROR, reason)
        return HTTPStatus.ACCEPTED, self._profile_state()

    def update(self, child: Child, message: Mapping[str, Any]) -> None:
        """Record the report of a process on its profile."""
        if self._requested.get(child.rank) is child and message.get("id") == self._number:
            answer = {key: value for key, value in message.items() if key != "id"}
            self._answers[child.rank] = answer

    def _refusal_reason(self) -> str | None:
        children = list(self._alive_children())
        if not self._is_trainer and not any(child.progress.status.trainer for child in children):
            others = "and programs that train by jaxlaunch.run"
            only = "only the built-in trainer can be profiled"
            return f"this job runs its own command; {only}, {others}"
        if not children:
            return "no process is running"
        busy_ranks = [
            rank
            for rank, answer in self._profile_state()["ranks"].items()
            if answer["state"] not in contract.PROFILE_END_STATES
        ]
        if not busy_ranks:
            return None
        return f"a profile is already being taken, on rank {', '.join(busy_ranks)}"

    def _profile_state(self) -> dict[str, Any]:
        answers = {}
        for rank, child in self._requested.items():
            answer = self._answers.get(rank, {"state": "asked"})
            is_open = answer["state"] not in contract.PROFILE_END_STATES
            is_gone = is_open and child.progress.status.exit is not None
            answers[str(rank)] = {"state": "gone"} if is_gone else answer
        return {"id": self._number, "ranks": answers}


def _error_reply(status: HTTPStatus, reason: str) -> Reply:
    return status, {"error": reason}
