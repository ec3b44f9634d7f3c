"""`jaxlaunch.report`, with which a program reports its progress, pictures and texts.

Progress is sent to the agent through the pipe of the site hook, and pictures and texts are written
to the run folder (jaxlaunch/samples.py). Outside a job, and in processes that the program itself
starts, a call only checks its arguments.

The agent brings this file into images without jaxlaunch, so it needs only the standard library and
Python >= 3.10.
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

# The shortest time between two messages. A loop may report a thousand steps per second.
MIN_PERIOD_S = 0.1
# The shortest time between two reads of the place where the tracker shows the run.
PLACE_PERIOD_S = 1.0
# The phases of jaxlaunch.contract that a program may report.
PHASES = ("restore", "compile", "step", "data", "eval", "save", "done")

# Modules of the site hook, which every Python process below the agent imports at its start.
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
    """Report the progress of your program to the agent.

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
      kept, and the job's tracker gets them. A picture that is larger than 1,024 pixels on a side,
      or than 256 KiB as PNG, is reduced by keeping every second pixel, or fewer.
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
    queue = _open_queue()
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
    if queue is not None:
        queue.add_messages(messages)
        if step is not None:
            set_step(step)
        _follow_with_tracker(step if metrics else None, has_items=bool(items))
        if items and (writer := _open_writer()) is not None:
            writer.add_items(_newest_step if step is None else step, items)


def _check_count(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"report({name}={value!r}): must be a whole number, not {kind}") from None
    if number < 0:
        raise ValueError(f"report({name}={value!r}): must be a number of steps, at least 0")
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

# Each of the next three has the id of its process, because a forked process must not use those of
# its parent.

# The queue of messages to the agent, or None if this process does not report.
_queue: tuple[int, ReportQueue | None] | None = None
# The writer of pictures and texts, in the program of rank 0.
_writer: tuple[int, SampleWriter] | None = None
# The tracker of the job, in the program of rank 0.
_tracker: tuple[int, LazyTracker] | None = None
_newest_step = 0


def become_program() -> Any:
    """Make this process the program of its rank, and return the reporter of its site hook.

    Returns:
        The reporter, or None outside a job and in processes that the program itself has started.
    """
    contract: Any = sys.modules.get(_CONTRACT)
    reporter = getattr(sys.modules.get(_REPORTER), "reporter", None)
    if contract is None or reporter is None or not reporter.take_role(contract.Role.REPORTS):
        return None
    return reporter


def _open_queue() -> ReportQueue | None:
    """Return the queue of this process, or None if it does not report."""
    global _queue, _writer, _tracker
    pid = os.getpid()
    if _queue is not None and _queue[0] == pid:
        return _queue[1]
    if (reporter := become_program()) is None:
        _queue = pid, None
        return None
    contract: Any = sys.modules[_CONTRACT]
    queue = ReportQueue(reporter.send)
    run_folder = os.environ.get(contract.RUN_DIR)
    if run_folder and os.environ.get(contract.PROCESS_ID, "0") == "0":
        if contract.TRACKER in os.environ:
            _tracker = pid, LazyTracker(run_folder, reporter.note)
        _writer = pid, SampleWriter(os.path.join(run_folder, samples.FOLDER), reporter.note)
    atexit.register(_leave, pid)
    _queue = pid, queue
    return queue


def _open_writer() -> SampleWriter | None:
    """Return the writer of this process, or None if it has none."""
    return _writer[1] if _writer is not None and _writer[0] == os.getpid() else None


def _open_tracker() -> LazyTracker | None:
    """Return the tracker of this process, or None if it has none."""
    return _tracker[1] if _tracker is not None and _tracker[0] == os.getpid() else None


def _follow_with_tracker(metrics_step: int | None, *, has_items: bool) -> None:
    """Have the tracker follow a report with metrics of a step, or with pictures and texts."""
    if (tracker := _open_tracker()) is None:
        return
    if metrics_step is not None:
        tracker.follow_step(metrics_step)
    elif has_items:
        tracker.start()


def set_step(step: int) -> None:
    """Set the step of pictures and texts that are reported without one."""
    global _newest_step
    _newest_step = step


def flush_samples() -> None:
    """Wait briefly until all pictures and texts are written."""
    if (writer := _open_writer()) is not None:
        writer.flush()


def _leave(pid: int) -> None:
    """Send the pending messages of process `pid`. Called at its end by atexit and the site hook."""
    queue_pid, queue = _queue or (None, None)
    if queue_pid == pid == os.getpid() and queue is not None:
        queue.flush()
        flush_samples()


def _close_tracker(*, stops: bool) -> None:
    """Wait until the tracker has every line, but only briefly if the program was stopped.

    The site hook calls this after it has told the agent that the program ends, so that no timeout
    applies any longer.
    """
    if (tracker := _open_tracker()) is not None:
        tracker.close(stops=stops)


class LazyTracker:
    """The tracker of the job, which is started with the first reported metrics.

    `note` is called with the reason if the tracker cannot be started, or does not have every line
    at the end.
    """

    def __init__(self, folder: str, note: Callable[[str], object]) -> None:
        self._folder, self._note = folder, note
        self._is_started = False
        self._feed: Any = None
        self._place_read_at = -math.inf

    def follow_step(self, step: int) -> None:
        """Start the tracker on the first call. At its end it waits for the line of `step`."""
        self.start()
        if self._feed is not None:
            self._feed.last_step = step

    def start(self) -> None:
        """Start the tracker on the first call, and print once where it shows the run."""
        if self._is_started:
            self._print_place()
            return
        self._is_started = True
        try:
            # An image without jaxlaunch has only the files that the agent brings.
            from jaxlaunch import tracker_feed
        except ImportError:
            hint = "install it there, next to the package of the tracker"
            self._print_note(f"no tracker: this image has no jaxlaunch: {hint}")
            return
        try:
            self._feed = tracker_feed.start_feed(self._folder, is_reported=True)
        except (OSError, ModuleNotFoundError) as error:
            self._print_note(f"no tracker: {error}")

    def _print_place(self) -> None:
        if self._feed is None or time.monotonic() < self._place_read_at + PLACE_PERIOD_S:
            return
        self._place_read_at = time.monotonic()
        if (line := self._feed.announce_place()) is not None:
            print(line, file=sys.stderr, flush=True)

    def close(self, *, stops: bool) -> None:
        """Wait until the tracker has every line, unless the training loop has done so."""
        if self._feed is not None and not self._feed.is_closed:
            note = self._feed.close_at_stop() if stops else self._feed.close()
            if note is not None:
                self._print_note(note)

    def _print_note(self, text: str) -> None:
        self._note(text)
        print(text, file=sys.stderr, flush=True)


class ReportQueue:
    """Messages to the agent, which are sent at once, or MIN_PERIOD_S after the previous ones.

    Of messages of the same kind only the newest is sent. Methods may be called from any thread.
    `send` returns False for a message that it cannot write now.
    """

    def __init__(self, send: Callable[[dict[str, Any]], bool]) -> None:
        self._send = send
        # Messages that have not been sent, by kind.
        self._pending: dict[str, Message] = {}
        # The newest step that was sent.
        self._sent_step: int | None = None
        self._sent_at = -math.inf
        self._has_timer = False
        # Reentrant, because a signal handler may report while its thread is inside a report.
        self._lock = threading.RLock()

    def add_messages(self, messages: Mapping[str, Message]) -> None:
        """Add messages by kind. They are merged with pending messages of the same kind."""
        with self._lock:
            for kind, message in messages.items():
                self._pending[kind] = _merge_messages(self._pending.get(kind, {}), message)
            self._send_or_wait()

    def flush(self) -> None:
        """Send the pending messages. Those that `send` cannot write now stay pending."""
        with self._lock:
            self._sent_at = time.monotonic()
            pending, self._pending = self._pending, {}
            # Metrics are sent after their step.
            for kind, message in sorted(pending.items(), key=lambda item: item[0] == "metrics"):
                self._sent_step = message.get("step", self._sent_step)
                # Metrics need the key of their step only if another step was sent last.
                fields = dict(message)
                if fields.get("of") in (None, self._sent_step):
                    fields.pop("of", None)
                if not self._send(fields):
                    self._pending[kind] = _merge_messages(message, self._pending.get(kind, {}))

    def _send_or_wait(self) -> None:
        if self._has_timer:
            return
        wait_s = self._sent_at + MIN_PERIOD_S - time.monotonic()
        if wait_s <= 0:
            self.flush()
        if self._pending:
            timer = threading.Timer(wait_s if wait_s > 0 else MIN_PERIOD_S, self._handle_timer)
            timer.daemon = True
            timer.start()
            self._has_timer = True

    def _handle_timer(self) -> None:
        with self._lock:
            self._has_timer = False
            self._send_or_wait()


def _merge_messages(earlier: Message, later: Message) -> dict[str, Any]:
    merged = {**earlier, **later}
    if later.get("of") is None and "of" in earlier:
        merged["of"] = earlier["of"]
    if "metrics" in merged:
        merged["metrics"] = {**earlier.get("metrics", {}), **later.get("metrics", {})}
    return merged
