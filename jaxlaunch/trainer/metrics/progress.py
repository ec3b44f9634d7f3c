"""The trainer's reports to its agent, as lines on the progress pipe that never block the loop.

Reports of steps and metrics are cheap, because a thread sends only the newest ones, at most ten
times per second. Everything else is sent immediately and in order. Without a pipe no call has an
effect.
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

# Minimum time between two updates of the same phase.
PERIOD_S = 0.1
# Changes of phase that may be sent at once before they also wait for the thread.
MAX_BURST = 10


class Progress:
    """The child's end of the progress pipe, safe to call from any thread."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        # Nothing has been sent yet.
        self._state = self._sent = ("", 0)
        # Newest metrics that have not been sent.
        self._metrics: Mapping[str, Any] | None = None
        # Own time that has not been sent.
        self._own: int | None = None
        # Bounded, so that an agent that stalls does not exhaust memory.
        self._outbox: deque[Mapping[str, Any]] = deque(maxlen=64)
        self._credit = float(MAX_BURST)
        self._credited = time.monotonic()
        self._lock = threading.RLock()
        self._due = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_updates, name="progress", daemon=True)
        if fd is not None:
            self._thread.start()

    def report_hello(self) -> None:
        """Identify the built-in trainer, whose exit codes are those of the contract."""
        versions = {"python": platform.python_version(), "jax": importlib.metadata.version("jax")}
        self._post_message({"hello": "trainer", **versions})

    def report_joined(self) -> None:
        """Report that the process has joined all others."""
        self._post_message({"joined": True})

    def report_phase(self, name: str, step: int) -> None:
        """Report that the process is in phase `name` after `step` steps. Cheap."""
        if self._fd is None:
            return
        previous, self._state = self._state, (name, step)
        reporting.set_step(step)
        now = time.monotonic()
        self._credit = min(MAX_BURST, self._credit + (now - self._credited) / PERIOD_S)
        self._credited = now
        if previous[0] != name and self._credit >= 1:
            self._credit -= 1
            self._flush_outbox()
        elif not self._due.is_set():
            self._due.set()

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
        """Report the steps of the whole run."""
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
            self._due.set()

    def report_own_time(self, permille: int) -> None:
        """Report the thousandths of the newest steps that this process spent by itself."""
        if self._fd is not None:
            with self._lock:
                self._own = permille
            self._due.set()

    def report_stopped(self, step: int, saved: bool, note: str = "") -> None:
        """Report that the process stopped after `step` on SIGTERM, and whether it saved."""
        self._post_message({"stopped": {"step": step, "saved": saved, "note": note}})

    def report_profile(self, values: Mapping[str, Any]) -> None:
        """Report the state of a profile that the agent requested."""
        self._post_message({"profile": values})

    def report_note(self, text: str) -> None:
        """Report a sentence for summary.json."""
        self._post_message({"note": text})

    def report_error(self, exception: BaseException, code: int | None, message: str = "") -> None:
        """Report the exception that ends the process, its exit code, or another message."""
        self._post_message(contract.error_line(exception, code, message))

    def report_refusal(self, message: str, code: int) -> None:
        """Report a fault that the user can fix, for which the process ends with `code`."""
        self._post_message(contract.refusal_record(message[: contract.MESSAGE_CHARS], code))

    def close(self) -> None:
        """Send the remaining messages, as far as the pipe accepts them, without closing it."""
        if self._fd is not None:
            self._closed.set()
            self._due.set()
            self._thread.join()
            self._flush_outbox()
            reporting.flush_samples()

    def _post_message(self, message: Mapping[str, Any]) -> None:
        if self._fd is None:
            return
        with self._lock:
            if self._state != self._sent:
                # The agent must read the step before the message that refers to it.
                self._sent = self._state
                self._outbox.append(_state_line(self._state))
            self._outbox.append(message)
            self._flush_outbox()

    def _flush_outbox(self) -> None:
        """Write the queued messages. What a full pipe refuses is retried by the thread."""
        with self._lock:
            while self._outbox:
                if not self._send(self._outbox[0]):
                    return
                self._outbox.popleft()
            state, metrics = self._state, self._metrics
            if state != self._sent:
                if not self._send(_state_line(state)):
                    return
                self._sent = state
            if metrics is not None and self._send({"metrics": replace_non_finite(metrics)}):
                self._metrics = None
            if self._own is not None and self._send({"own": self._own}):
                self._own = None

    def _send(self, message: Mapping[str, Any]) -> bool:
        assert self._fd is not None
        is_sent = contract.send(self._fd, message)
        if not is_sent:
            self._due.set()
        return is_sent

    def _send_updates(self) -> None:
        while not self._closed.wait(PERIOD_S):
            self._due.wait()
            self._due.clear()
            self._flush_outbox()


def _state_line(state: tuple[str, int]) -> dict[str, Any]:
    return {"phase": state[0], "step": state[1]}
