"""The trainer's reports to its agent: lines on the progress pipe, newest state first, never blocking the loop.

Steps and metrics cost nothing to report: a thread sends the newest at most ten times a second. Everything else is
sent at once and in order. Without a pipe every call does nothing.
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
from jaxlaunch.runs.journal import finite

PERIOD_S = 0.1  # between two updates of the same phase
BURST = 10  # changes of phase that may be sent at once before they too wait for the thread


class Progress:
    """The child's end of the progress pipe, safe to call from any thread."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._state = self._sent = ("", 0)  # nothing sent yet
        self._metrics: Mapping[str, Any] | None = None  # not sent yet
        self._outbox: deque[Mapping[str, Any]] = deque(maxlen=64)  # an agent that stalls costs us bounded memory
        self._credit = float(BURST)
        self._credited = time.monotonic()
        self._lock = threading.RLock()
        self._due = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        if fd is not None:
            self._thread.start()

    def hello(self) -> None:
        """Identify the built-in trainer: from now on the agent reads the exit code as one of the contract."""
        self._post({"hello": "trainer", "python": platform.python_version(), "jax": importlib.metadata.version("jax")})

    def joined(self) -> None:
        """Report that the process knows all others."""
        self._post({"joined": True})

    def phase(self, name: str, step: int) -> None:
        """Report that the process is in `name` and has completed `step` steps. Cheap enough for every step."""
        if self._fd is None:
            return
        before, self._state = self._state, (name, step)
        reporting.set_step(step)
        now = time.monotonic()
        self._credit = min(BURST, self._credit + (now - self._credited) / PERIOD_S)
        self._credited = now
        if before[0] != name and self._credit >= 1:
            self._credit -= 1
            self._flush()
        elif not self._due.is_set():
            self._due.set()

    @contextlib.contextmanager
    def within(self, name: str, step: int) -> Iterator[None]:
        """Report that the process is in `name` for a while, where an error is said to be; then where it was before."""
        before = self._state
        self.phase(name, step)
        try:
            yield
        finally:
            self.phase(*before)

    def found(self, step: int) -> None:
        """Report that the checkpoint of `step` is on storage; whether training goes on from it is not decided yet."""
        self._post({"found": step})

    def restored(self, step: int) -> None:
        """Report that training goes on from the checkpoint of `step`."""
        self._post({"restored": step})

    def committed(self, step: int) -> None:
        """Report that the checkpoint of `step` is complete on storage."""
        self._post({"committed": step})

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Report the newest metrics; what is not finite becomes null, so that the line is JSON to every reader."""
        if self._fd is not None:
            with self._lock:
                self._metrics = values
            self._due.set()

    def stopped(self, step: int, saved: bool, note: str = "") -> None:
        """Report that the process stopped after `step`, as SIGTERM asked; `saved`: whether it saved a checkpoint."""
        self._post({"stopped": {"step": step, "saved": saved, "note": note}})

    def profile(self, values: Mapping[str, Any]) -> None:
        """Report the state of a profile that the agent requested."""
        self._post({"profile": values})

    def note(self, text: str) -> None:
        """Report a sentence for the reader of summary.json."""
        self._post({"note": text})

    def error(self, exception: BaseException, code: int | None, said: str = "") -> None:
        """Report the exception that ends the process, and the exit code that follows; `said` in place of its words."""
        self._post(contract.error_line(exception, code, said))

    def refusal(self, message: str, code: int) -> None:
        """Report why the process ends with `code`, where a person can fix that: a line of its log."""
        self._post(contract.refusal_record(message[: contract.MESSAGE_CHARS], code))

    def close(self) -> None:
        """Send what is left, as far as the pipe takes it. Leaves the pipe open: its owner closes it."""
        if self._fd is not None:
            self._closed.set()
            self._due.set()
            self._thread.join()
            self._flush()
            reporting.flush_samples()

    def _post(self, message: Mapping[str, Any]) -> None:
        if self._fd is None:
            return
        with self._lock:
            if self._state != self._sent:  # the agent reads the step before what follows from it
                self._sent = self._state
                self._outbox.append(_line(self._state))
            self._outbox.append(message)
            self._flush()

    def _flush(self) -> None:
        """Write what waits; what a full pipe refuses stays queued, and the thread tries again."""
        assert self._fd is not None
        with self._lock:
            while self._outbox:
                if not contract.send(self._fd, self._outbox[0]):
                    return self._due.set()
                self._outbox.popleft()
            state, metrics = self._state, self._metrics
            if state != self._sent:
                if not contract.send(self._fd, _line(state)):
                    return self._due.set()
                self._sent = state
            if metrics is not None:
                if not contract.send(self._fd, {"metrics": finite(metrics)}):
                    return self._due.set()
                self._metrics = None

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            self._due.wait()
            self._due.clear()
            self._flush()


def _line(state: tuple[str, int]) -> dict[str, Any]:
    return {"phase": state[0], "step": state[1]}
