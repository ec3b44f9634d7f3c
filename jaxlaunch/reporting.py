"""`report`, with which a program tells its agent its progress, and shows pictures and texts.

Progress goes to the agent through a pipe, pictures and texts into the run folder (samples). Outside
a job, and in processes that the program itself starts, a call checks its arguments and does
nothing.

The agent brings this file into images that hold nothing else of ours: standard library only, Python
>= 3.10.
"""

from __future__ import annotations

import atexit
import math
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxlaunch import samples
from jaxlaunch.samples import SampleWriter

# Seconds between two messages: a loop may report each of a thousand steps a second.
MIN_PERIOD_S = 0.1
# The phases of the contract that a program may name.
PHASES = ("restore", "compile", "step", "data", "eval", "save", "done")

# Modules of the site hook, which the agent makes every Python process load.
_CONTRACT, _REPORTER = "_jaxlaunch_contract", "_jaxlaunch_reporter"

Message = Mapping[str, Any]


def report(
    *,
    step: int | None = None,
    total: int | None = None,
    phase: str = "step",
    committed: int | None = None,
    image: Any = None,
    text: str | Mapping[str, str] | None = None,
    **metrics: float | None,
) -> None:
    """Tell the agent how far your program is.

    Call it after every step: at most ten messages a second are sent, and always the newest. Outside
    a job it only checks its arguments.

    From the first call on, the job's [timeouts](job-yaml.md#timeouts) apply to the program: a phase
    or a step that lasts longer counts as a hang, and the job ends with the step and the stacks of
    every rank. A call counts as progress if its phase or its step differs from the last one.
    `launcher status` and `summary.json` show the step and the metrics.

    **Arguments:**

    - `step`: how many steps are complete. Pictures and texts that are reported without it belong to
      the newest step.
    - `total`: the steps of the whole run, including those before a restart, once or with every
      call: `launcher run`, `launcher status` and the page show a bar and the time left.
    - `phase`: what the program does now: `restore`, `compile`, `step`, `data`, `eval`, `save`, or
      `done`, which has no time limit.
    - `committed`: the step of the newest checkpoint that is complete on storage; lost work is
      counted from it.
    - `image`: a picture, or up to 8 by name, which the [page of the run](seeing-runs.md) shows with
      the step: arrays `[H, W]` or `[H, W, C]` with 1, 3 or 4 channels, uint8 from 0 to 255 or
      floats from 0 to 1. The call copies it, after waiting for a device that is still computing it;
      a background thread writes it. Only the pictures of rank 0 and of the 100 newest steps are
      kept. A picture that is larger than 1,024 pixels on a side, or than 256 KiB as PNG, is reduced
      by keeping every second pixel, or fewer.
    - `text`: a text, or up to 8 by name, for the same page: at most 10,000 characters each.
    - `metrics`: numbers by name, or arrays of one number. Those that rank 0 reports with a step are
      written to `metrics.jsonl` and to the TensorBoard events of the run folder, as for `train:`,
      and the job's [tracker](metrics.md#trackers) gets them; the newest are shown.

    **Raises:**

    `TypeError` or `ValueError` if an argument has the wrong type or value.

    **Example:**

    ```python
    import jaxlaunch

    for step in range(1, 101):
        loss = 1 / step
        jaxlaunch.report(step=step, total=100, loss=loss)
        if step % 50 == 0:
            jaxlaunch.report(step=step, image=[[0.0, loss], [loss, 1.0]], text=f"loss {loss}")
    jaxlaunch.report(phase="done")
    ```
    """
    if phase not in PHASES:
        raise ValueError(f"report(phase={phase!r}): a phase is one of {', '.join(PHASES)}")
    reports = _process_reports()
    items = samples.check_items(image, text, is_kept=_open_writer() is not None)
    has_more = any(value is not None for value in (step, total, committed)) or bool(metrics)
    has_phase = has_more or phase != "step" or not items
    messages: dict[str, Message] = {"phase": {"phase": phase}} if has_phase else {}
    if step is not None:
        messages["phase"] = {"phase": phase, "step": _check_count("step", step)}
    if total is not None:
        messages["total"] = {"total": _check_count("total", total)}
    if committed is not None:
        messages["committed"] = {"committed": _check_count("committed", committed)}
    if metrics:
        numbers = {name: _check_number(name, value) for name, value in metrics.items()}
        messages["metrics"] = {"metrics": numbers, "of": step}
    if reports is not None:
        reports.add_messages(messages)
        if step is not None:
            set_step(step)
            if metrics and (tracker := _open_tracker()) is not None:
                tracker.follow_step(step)
        if items and (writer := _open_writer()) is not None:
            writer.add_items(_newest_step if step is None else step, items)


def _check_count(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"report({name}={value!r}): a whole number, not {kind}") from None
    if number < 0:
        raise ValueError(f"report({name}={value!r}): a number of steps, at least 0")
    return number


def _check_number(name: str, value: Any) -> float | None:
    """Return a finite number, or None for others, which JSON does not support."""
    if value is None:
        return None
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        raise TypeError(f"report({name}=…): a number, not {type(value).__name__}") from None
    return number if math.isfinite(number) else None


# --- the reports of this process ------------------------------------------------------------------

# The process id, and the reports of that process.
_of_process: tuple[int, Reports | None] | None = None
# The process id, and the writer of its pictures and texts.
_writer: tuple[int, SampleWriter] | None = None
# The process id, and the job's tracker, in the program of rank 0.
_tracker: tuple[int, TrackerStart] | None = None
_newest_step = 0


def become_program() -> Any:
    """Return the site hook's reporter of this process as the program of its rank, else None.

    The answer is None outside a job, and in processes that the program itself has started.
    """
    contract: Any = sys.modules.get(_CONTRACT)
    reporter = getattr(sys.modules.get(_REPORTER), "reporter", None)
    if contract is None or reporter is None or not reporter.take_role(contract.Role.REPORTS):
        return None
    return reporter


def _process_reports() -> Reports | None:
    """Return the reports of this process, or None outside a job."""
    global _of_process, _writer, _tracker
    pid = os.getpid()
    if _of_process is not None and _of_process[0] == pid:
        return _of_process[1]
    if (reporter := become_program()) is None:
        _of_process = pid, None
        return None
    contract: Any = sys.modules[_CONTRACT]
    reports = Reports(reporter.send)
    is_first, folder = (
        os.environ.get(contract.PROCESS_ID, "0") == "0",
        os.environ.get(contract.RUN_DIR),
    )
    if is_first and folder:
        if contract.TRACKER in os.environ:
            _tracker = pid, TrackerStart(folder, reporter.note)
        folder = os.path.join(folder, samples.FOLDER)
        _writer = pid, SampleWriter(folder, reporter.note)
    atexit.register(_leave, pid)
    _of_process = pid, reports
    return reports


def _open_writer() -> SampleWriter | None:
    """Return the writer of this process, or None in a forked process."""
    return _writer[1] if _writer is not None and _writer[0] == os.getpid() else None


def _open_tracker() -> TrackerStart | None:
    """Return the tracker of this process, or None in a forked process."""
    return _tracker[1] if _tracker is not None and _tracker[0] == os.getpid() else None


def set_step(step: int) -> None:
    """Set the number of complete steps, which pictures and texts without a step belong to."""
    global _newest_step
    _newest_step = step


def flush_samples() -> None:
    """Wait a moment for pictures and texts that have not been written."""
    if (writer := _open_writer()) is not None:
        writer.flush()


def _leave(pid: int) -> None:
    """Send pending reports when their process ends: by atexit or the site hook."""
    process, reports = _of_process or (None, None)
    if process == pid == os.getpid() and reports is not None:
        reports.flush()
        flush_samples()


def _close_tracker(*, stops: bool) -> None:
    """Wait until the tracker has every line, only briefly if the program `stops`: by the hook.

    The agent knows by then that the program has finished, so that no timeout applies.
    """
    if (tracker := _open_tracker()) is not None:
        tracker.close(stops=stops)


class TrackerStart:
    """The job's tracker, which follows the run folder from the first numbers on.

    `note` gets the reason if it cannot be started, or does not have every line at the end.
    """

    def __init__(self, folder: str, note: Callable[[str], object]) -> None:
        self._folder, self._note = folder, note
        self._is_started = False
        self._feed: Any = None

    def follow_step(self, step: int) -> None:
        """Start the tracker, if this is the first call, and expect a row of `step`."""
        if not self._is_started:
            self._is_started = True
            try:
                # An image without jaxlaunch has only this file.
                from jaxlaunch import tracker_feed
            except ImportError:
                hint = "install it there, next to the package of the tracker"
                self._print_note(f"no tracker: this image has no jaxlaunch: {hint}")
                return
            try:
                self._feed = tracker_feed.start_feed(self._folder, is_reported=True)
            except (OSError, ModuleNotFoundError) as error:
                self._print_note(f"no tracker: {error}")
        if self._feed is not None:
            self._feed.last_step = step

    def close(self, *, stops: bool) -> None:
        """Wait until the tracker has every line, unless the training loop has done so."""
        if self._feed is not None and not self._feed.is_closed:
            note = self._feed.close_at_stop() if stops else self._feed.close()
            if note is not None:
                self._print_note(note)

    def _print_note(self, text: str) -> None:
        self._note(text)
        print(text, file=sys.stderr, flush=True)


class Reports:
    """The newest reports by kind, sent at once, or PERIOD_S after the previous message.

    `send` returns False for a message that it could not write now. Safe to call from any thread.
    """

    def __init__(self, send: Callable[[dict[str, Any]], bool]) -> None:
        self._send = send
        # Messages that have not been sent, by the only key of each or by "phase".
        self._newest: dict[str, Message] = {}
        # The newest step that was sent.
        self._step: int | None = None
        self._sent_at = -math.inf
        self._is_timed = False
        # A signal handler may report while this thread is inside a report.
        self._lock = threading.RLock()

    def add_messages(self, messages: Mapping[str, Message]) -> None:
        """Add messages by kind. Of two values of a key, the later one is sent."""
        with self._lock:
            for kind, message in messages.items():
                self._newest[kind] = _merge_messages(self._newest.get(kind, {}), message)
            self._send_or_wait()

    def flush(self) -> None:
        """Send the pending messages, as far as the pipe takes them."""
        with self._lock:
            self._sent_at = time.monotonic()
            pending, self._newest = self._newest, {}
            # Metrics are sent after their step.
            for kind, message in sorted(pending.items(), key=lambda item: item[0] == "metrics"):
                self._step = message.get("step", self._step)
                # Metrics say which step they are of where it is not the newest.
                sent = dict(message)
                if sent.get("of") in (None, self._step):
                    sent.pop("of", None)
                if not self._send(sent):
                    self._newest[kind] = _merge_messages(message, self._newest.get(kind, {}))

    def _send_or_wait(self) -> None:
        if self._is_timed:
            return
        wait_s = self._sent_at + MIN_PERIOD_S - time.monotonic()
        if wait_s <= 0:
            self.flush()
        if self._newest:
            timer = threading.Timer(wait_s if wait_s > 0 else MIN_PERIOD_S, self._send_late)
            timer.daemon = True
            timer.start()
            self._is_timed = True

    def _send_late(self) -> None:
        with self._lock:
            self._is_timed = False
            self._send_or_wait()


def _merge_messages(earlier: Message, later: Message) -> dict[str, Any]:
    merged = {**earlier, **later}
    if later.get("of") is None and "of" in earlier:
        merged["of"] = earlier["of"]
    if "metrics" in merged:
        merged["metrics"] = {**earlier.get("metrics", {}), **later.get("metrics", {})}
    return merged
