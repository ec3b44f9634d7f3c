"""Tells a webhook what becomes of the job, beside the loop: whoever listens there can neither hold up nor fail a run.

Messages wait in a bounded queue for a thread; what does not fit is dropped, and what cannot be sent is given up.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.leader.pod_log import View
from jaxlaunch.records.verdict import Verdict

MOST_WAITING = 32  # messages
TIMEOUT_S = 10.0  # of each answer that is waited for
AGAIN_S = 2.0  # between three tries
LAST_S = 5.0  # for which the end of a job waits for its last message
LOOK_S = 5.0
_SCHEMES = ("http://", "https://")


class Notifier:
    """What the leader says of the job, to the address that the job names; without one, to nobody."""

    def __init__(self, name: str, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        asked = json.loads(environ.get(contract.NOTIFY, "null")) or {}
        self._events = frozenset(asked.get("events", ()))
        self._is_slack = asked.get("format") == "slack"
        self._stall_s = float(asked.get("stall_s") or 0.0)
        self._url = environ.get(asked.get("url", ""), "")
        self._waiting = queue.Queue[Mapping[str, Any]](MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._until = float("inf")
        self._looked_at = self._changed_at = time.monotonic()
        self._state: Any = None
        self._is_stalled = self._has_failed = False
        self._best: Any = None
        if asked and not self._url.startswith(_SCHEMES):
            self._events = frozenset()
            say(f"notify: {asked.get('url')} holds no http:// or https:// address; nobody is told")

    def look(self, view: Callable[[], View], now: float) -> None:
        """Tells of a job that makes no progress, and of a new best evaluation."""
        if not self._events or now - self._looked_at < LOOK_S:
            return
        self._looked_at, seen = now, view()
        metrics = seen.metrics or {}
        best, self._best = self._best, metrics.get(contract.Key.BEST_STEP)
        if self._best is not None and self._best != best:
            held_out = {key: value for key, value in metrics.items() if key.startswith("eval_")}
            self._tell("best", f"has its best evaluation so far at step {self._best}", metrics=held_out)
        state = seen.stage, seen.attempt, seen.step, sorted({one.phase for one in seen.statuses}, key=str)
        if state != self._state:
            self._state, self._changed_at, self._is_stalled = state, now, False
        elif self._stall_s and not self._is_stalled and now - self._changed_at >= self._stall_s:
            self._is_stalled = True
            where = f"waits for {len(seen.missing)} hosts" if seen.missing else f"is at step {seen.step}"
            self._tell("stall", f"{where} without progress for {now - self._changed_at:.0f} s", step=seen.step)

    def judged(self, verdict: Verdict, attempt: int) -> None:
        """Tells that an attempt ended."""
        is_done = verdict.code == contract.DONE
        fields = {"attempt": attempt, "code": verdict.code, "cause": verdict.cause, "step": verdict.step}
        at = "" if verdict.step is None else f" at step {verdict.step}"
        how = "is done" if is_done else f"ended attempt {attempt}"
        text = f"{how}{at}: {verdict.message} (exit {verdict.code})"
        self._tell("done" if is_done else "failure", text, rank=verdict.rank, **fields)

    def ended(self) -> None:
        """The job is about to end here: what waits is sent within LAST_S, or never."""
        self._until = time.monotonic() + LAST_S

    def is_busy(self, now: float) -> bool:
        """Whether the end has to wait for a message still."""
        return now < self._until and self._waiting.unfinished_tasks > 0 and not self._has_failed

    def _tell(self, event: str, text: str, **fields: Any) -> None:
        if event not in self._events:
            return
        line = f"{self._name} {text}"
        plain = {"event": event, "job": self._name, "text": line, "time": round(time.time(), 3), **fields}
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait({"text": _slack(line)} if self._is_slack else plain)
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="notify", daemon=True)
            self._thread.start()

    def _send_all(self) -> None:
        while True:
            message = self._waiting.get()
            for last in (False, False, True):
                why = self._sent(message)
                if why is not None and not self._has_failed:
                    self._say(f"notify: a message could not be sent: {why}")
                self._has_failed = why is not None
                if why is None or last:
                    break
                time.sleep(AGAIN_S)
            self._waiting.task_done()

    def _sent(self, message: Mapping[str, Any]) -> str | None:
        """Sends a message; why not, in words without the address, which is a secret."""
        body = json.dumps(message).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "jaxlaunch"}
        try:
            request = urllib.request.Request(self._url, body, headers, method="POST")
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            return f"the server answers {error.code}"
        except urllib.error.URLError as error:
            reason = error.reason
            return reason.strerror or type(reason).__name__ if isinstance(reason, OSError) else type(error).__name__
        except Exception as error:  # whatever a library makes of an address or an answer: no run ends by it
            return type(error).__name__


def _slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
