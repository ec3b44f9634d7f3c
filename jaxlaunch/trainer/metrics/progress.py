"""The trainer's reports to its agent, as lines on the progress pipe.

No report blocks the loop. Steps, metrics and the process's own time change often, so a thread sends
their newest values, at most ten times per second. All other messages are sent immediately and in
order. Without a pipe the methods do nothing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from jaxlaunch import contract, reporting
from jaxlaunch.runs.journal import replace_non_finite

# Time between two updates that the thread sends.
PERIOD_S = 0.1
# Changes of the phase that may be sent immediately, one after the other. Further ones wait for the
# thread. One more is allowed after each period.
MAX_BURST = 10


class Progress:
    """The trainer's end of the progress pipe, safe to use from any thread."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        # The newest (phase, step), and the last one that was sent.
        self._state = self._sent_state = ("", 0)
        # The newest metrics and own time, until they are sent.
        self._metrics: Mapping[str, Any] | None = None
        self._own_permille: int | None = None
        # Bounded, so that an agent that stalls does not exhaust memory.
        self._outbox: deque[Mapping[str, Any]] = deque(maxlen=64)
        # Changes of the phase that may be sent immediately, as of the time after it.
        self._burst_credit = float(MAX_BURST)
        self._credit_time_s = time.monotonic()
        self._lock = threading.RLock()
        self._has_updates = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._send_updates, name="progress", daemon=True)
        if fd is not None:
            self._thread.start()

    def report_hello(self) -> None:
        """Report that this program uses the exit codes of the contract, and its versions."""
        versions = {"python": platform.python_version(), "jax": importlib.metadata.version("jax")}
        self._post_message({"hello": "trainer", **versions})

    def report_joined(self) -> None:
        """Report that the process has joined all others."""
        self._post_message({"joined": True})

    def report_phase(self, name: str, step: int) -> None:
        """Report that the process is in phase `name` after `step` steps."""
        if self._fd is None:
            return
        previous, self._state = self._state, (name, step)
        reporting.set_step(step)
        now = time.monotonic()
        new_credit = (now - self._credit_time_s) / PERIOD_S
        self._burst_credit = min(MAX_BURST, self._burst_credit + new_credit)
        self._credit_time_s = now
        if previous[0] != name and self._burst_credit >= 1:
            self._burst_credit -= 1
            self._flush_outbox()
        elif not self._has_updates.is_set():
            self._has_updates.set()

    @contextlib.contextmanager
    def temporary_phase(self, name: str, step: int) -> Iterator[None]:
        """Report phase `name` for the duration of a block, so that errors are attributed to it."""
        previous = self._state
        self.report_phase(name, step)
        try:
            yield
        finally:
            self.report_phase(*previous)

    def report_total(self, steps: int) -> None:
        """Report the number of steps of the whole run."""
        self._post_message({"total": steps})

    def report_found(self, step: int) -> None:
        """Report that the checkpoint of `step` is on storage, before the decision to restore it."""
        self._post_message({"found": step})

    def report_restored(self, step: int) -> None:
        """Report that training resumes from the checkpoint of `step`."""
        self._post_message({"restored": step})

    def report_committed(self, step: int) -> None:
        """Report that the checkpoint of `step` is complete on storage."""
        self._post_message({"committed": step})

    def report_metrics(self, values: Mapping[str, Any]) -> None:
        """Report the newest metrics. Values that are not finite become null in valid JSON."""
        if self._fd is not None:
            with self._lock:
                self._metrics = values
            self._has_updates.set()

    def report_own_time(self, permille: int) -> None:
        """Report the share of the newest step times that this process spent on its own work."""
        if self._fd is not None:
            with self._lock:
                self._own_permille = permille
            self._has_updates.set()

    def report_stopped(self, step: int, saved: bool, note: str = "") -> None:
        """Report that the process stops after `step` because of a SIGTERM, and if it saved."""
        self._post_message({"stopped": {"step": step, "saved": saved, "note": note}})

    def report_profile(self, values: Mapping[str, Any]) -> None:
        """Report the state of a profile that the agent requested."""
        self._post_message({"profile": values})

    def report_note(self, text: str) -> None:
        """Report a sentence for summary.json."""
        self._post_message({"note": text})

    def report_error(self, exception: BaseException, code: int | None, message: str = "") -> None:
        """Report the exception that ends the process, and its exit code.

        A `message` replaces that of the exception.
        """
        self._post_message(contract.error_line(exception, code, message))

    def report_refusal(self, message: str, code: int) -> None:
        """Report an error that the user can fix, and the exit code `code` of the process."""
        self._post_message(contract.refusal_record(message[: contract.MESSAGE_CHARS], code))

    def close(self) -> None:
        """Send the remaining messages, as far as the pipe accepts them, and end the thread."""
        if self._fd is not None:
            self._is_closed.set()
            self._has_updates.set()
            self._thread.join()
            self._flush_outbox()
            reporting.flush_samples()

    def _post_message(self, message: Mapping[str, Any]) -> None:
        if self._fd is None:
            return
        with self._lock:
            if self._state != self._sent_state:
                # The agent must read the step before the message that refers to it.
                self._sent_state = self._state
                self._outbox.append(_state_line(self._state))
            self._outbox.append(message)
            self._flush_outbox()

    def _flush_outbox(self) -> None:
        """Send all messages and updates. If the pipe is full, the thread retries the rest."""
        with self._lock:
            while self._outbox:
                if not self._send(self._outbox[0]):
                    return
                self._outbox.popleft()
            state, metrics = self._state, self._metrics
            if state != self._sent_state:
                if not self._send(_state_line(state)):
                    return
                self._sent_state = state
            if metrics is not None and self._send({"metrics": replace_non_finite(metrics)}):
                self._metrics = None
            if self._own_permille is not None and self._send({"own": self._own_permille}):
                self._own_permille = None

    def _send(self, message: Mapping[str, Any]) -> bool:
        assert self._fd is not None
        is_sent = contract.send(self._fd, message)
        if not is_sent:
            self._has_updates.set()
        return is_sent

    def _send_updates(self) -> None:
        while not self._is_closed.wait(PERIOD_S):
            self._has_updates.wait()
            self._has_updates.clear()
            self._flush_outbox()


def _state_line(state: tuple[str, int]) -> dict[str, Any]:
    return {"phase": state[0], "step": state[1]}
