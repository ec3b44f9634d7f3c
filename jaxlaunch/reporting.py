"""`report`, with which a program tells its agent its progress, and shows pictures and texts.

Progress goes to the agent through a pipe. Pictures and texts go into a file for each step in the run folder, written by
a thread. No step waits for it: if storage is too slow, the oldest step that waits is dropped. A run that resumes writes
the files of its steps again. Outside a job, and in processes that the program itself starts, a call checks its
arguments and does nothing.

The agent brings this file into images that hold nothing else of ours: standard library only, Python >= 3.10.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import math
import operator
import os
import re
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxlaunch import atomic_file

# Seconds between two messages: a loop may report each of a thousand steps a second.
PERIOD_S = 0.1
# The phases of the contract that a program may name.
PHASES = ("restore", "compile", "step", "data", "eval", "save", "done")

# A folder in the run folder. STEP.json in it is an object with `step`, `time` and `samples`.
FOLDER = "reported"
# Pictures, and as many texts, of one report.
MAX_ITEMS = 8
# Longer names and texts are cut.
MAX_NAME_CHARS, MAX_TEXT_CHARS = 100, 10_000
# Pixels. Of a larger picture every second pixel is kept, or every third, and so on.
MAX_SIDE = 1024
# A picture with more bytes is halved until it fits.
MAX_PNG_BYTES = 1 << 18
# The number of newest steps that are kept.
MAX_STEPS = 100
# Steps that have not been written yet.
MAX_WAITING = 16
# Seconds for which a process that ends waits until everything is written.
LEAVE_S = 2.0

# The module of the site hook, which the agent makes every Python process load.
_CONTRACT = "_jaxlaunch_contract"
_FILE = re.compile(r"([0-9]{1,15})\.json")
# Channels -> the colour type of PNG.
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
_PICTURE = "an array [H, W] or [H, W, C] with 1, 3 or 4 channels, uint8 from 0 to 255 or floats from 0 to 1"

Message = Mapping[str, Any]
# "image" or "text", its name, and a contiguous uint8 [H, W, C] or the text.
Item = tuple[str, str, Any]


def report(
    *,
    step: int | None = None,
    phase: str = "step",
    committed: int | None = None,
    image: Any = None,
    text: str | Mapping[str, str] | None = None,
    **metrics: float | None,
) -> None:
    """Tell the agent how far your program is. Call it after every step: at most ten messages a second are sent, and
    always the newest. Outside a job it only checks its arguments.

    From the first call on, the job's [timeouts](job-yaml.md#timeouts) apply to the program: a phase or a step that
    lasts longer counts as a hang, and the job ends with the step and the stacks of every rank. A call counts as
    progress if its phase or its step differs from the last one. `launcher status` and `summary.json` show the step and
    the metrics.

    **Arguments:**

    - `step`: how many steps are complete. Pictures and texts that are reported without it belong to the newest step.
    - `phase`: what the program does now: `restore`, `compile`, `step`, `data`, `eval`, `save`, or `done`, which has no
        time limit.
    - `committed`: the step of the newest checkpoint that is complete on storage; lost work is counted from it.
    - `image`: a picture, or up to 8 by name, which the [page of the run](seeing-runs.md) shows with the step: arrays
        `[H, W]` or `[H, W, C]` with 1, 3 or 4 channels, uint8 from 0 to 255 or floats from 0 to 1. The call copies it,
        after waiting for a device that is still computing it; a background thread writes it. Only the pictures of rank
        0 and of the 100 newest steps are kept. A picture that is larger than 1,024 pixels on a side, or than 256 KiB as
        PNG, is reduced by keeping every second pixel, or fewer.
    - `text`: a text, or up to 8 by name, for the same page: at most 10,000 characters each.
    - `metrics`: numbers by name, or arrays of one number. Those that rank 0 reports with a step are written to
        `metrics.jsonl` and to the TensorBoard events of the run folder, as for `train:`; the newest are shown.

    **Raises:**

    `TypeError` or `ValueError` if an argument has the wrong type or value.

    **Example:**

    ```python
    import jaxlaunch

    for step in range(1, 101):
        loss = 1 / step
        jaxlaunch.report(step=step, loss=loss)
        if step % 50 == 0:
            jaxlaunch.report(step=step, image=[[0.0, loss], [loss, 1.0]], text={"so far": f"the loss is {loss}"})
    jaxlaunch.report(phase="done")
    ```
    """
    if phase not in PHASES:
        raise ValueError(f"report(phase={phase!r}): a phase is one of {', '.join(PHASES)}")
    reports = _reports()
    items = check_items(image, text, is_kept=_open_writer() is not None)
    has_more = step is not None or phase != "step" or committed is not None or bool(metrics)
    messages: dict[str, Message] = {"phase": {"phase": phase}} if has_more or not items else {}
    if step is not None:
        messages["phase"] = {"phase": phase, "step": _check_count("step", step)}
    if committed is not None:
        messages["committed"] = {"committed": _check_count("committed", committed)}
    if metrics:
        numbers = {name: _check_number(name, value) for name, value in metrics.items()}
        messages["metrics"] = {"metrics": numbers, "of": step}
    if reports is not None:
        reports.put(messages)
        if step is not None:
            set_step(step)
        if items and (writer := _open_writer()) is not None:
            writer.put(_newest_step if step is None else step, items)


def _check_count(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"report({name}={value!r}): a whole number, not {type(value).__name__}") from None
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


# --- the reports of this process --------------------------------------------------------------------------------------

# The process id, and the reports of that process.
_of_process: tuple[int, Reports | None] | None = None
# The process id, and the writer of its pictures and texts.
_writer: tuple[int, SampleWriter] | None = None
_newest_step = 0


def _reports() -> Reports | None:
    """Return the reports of this process, or None outside a job and in processes that the program started."""
    global _of_process, _writer
    pid = os.getpid()
    if _of_process is not None and _of_process[0] == pid:
        return _of_process[1]
    contract: Any = sys.modules.get(_CONTRACT)
    if contract is None or os.environ.get(contract.REPORTER) != str(pid):
        _of_process = pid, None
        return None
    fd = int(os.environ[contract.PROGRESS_FD])
    reports = Reports(lambda message: contract.send(fd, message))
    if os.environ.get(contract.PROCESS_ID, "0") == "0" and (folder := os.environ.get(contract.RUN_DIR)):
        folder = os.path.join(folder, FOLDER)
        _writer = pid, SampleWriter(folder, lambda text: contract.send(fd, {"note": text}))
    atexit.register(_leave, pid)
    _of_process = pid, reports
    return reports


def _open_writer() -> SampleWriter | None:
    """Return the writer of this process, or None in a forked process."""
    return _writer[1] if _writer is not None and _writer[0] == os.getpid() else None


def set_step(step: int) -> None:
    """Set the number of complete steps, which pictures and texts without a step belong to."""
    global _newest_step
    _newest_step = step


def flush_samples() -> None:
    """Wait a moment for pictures and texts that have not been written."""
    if (writer := _open_writer()) is not None:
        writer.flush()


def _leave(pid: int) -> None:
    """Send pending reports when their process ends: by atexit, or by the site hook before os._exit."""
    if _of_process is not None and _of_process[0] == pid == os.getpid() and _of_process[1] is not None:
        _of_process[1].flush()
        flush_samples()


class Reports:
    """The newest reports by kind, sent at once, or PERIOD_S after the previous message.

    `send` returns False for a message that it could not write now. Safe to call from any thread.
    """

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._send = send
        # Messages that have not been sent, by the only key of each or by "phase".
        self._newest: dict[str, Message] = {}
        # The newest step that was sent.
        self._step: int | None = None
        self._sent_at = -math.inf
        self._is_timed = False
        # A signal handler may report while this thread is inside a report.
        self._lock = threading.RLock()

    def put(self, messages: Mapping[str, Message]) -> None:
        """Add messages by kind to the pending ones. Of two values of a key, the later one is sent."""
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
                is_of_newest = "of" in message and message["of"] in (None, self._step)
                if not self._send({key: message[key] for key in message if key != "of" or not is_of_newest}):
                    self._newest[kind] = _merge_messages(message, self._newest.get(kind, {}))

    def _send_or_wait(self) -> None:
        if self._is_timed:
            return
        wait_s = self._sent_at + PERIOD_S - time.monotonic()
        if wait_s <= 0:
            self.flush()
        if self._newest:
            timer = threading.Timer(wait_s if wait_s > 0 else PERIOD_S, self._send_late)
            timer.daemon = True
            timer.start()
            self._is_timed = True

    def _send_late(self) -> None:
        with self._lock:
            self._is_timed = False
            self._send_or_wait()


def _merge_messages(before: Message, after: Message) -> dict[str, Any]:
    merged = {**before, **{key: value for key, value in after.items() if key != "of" or value is not None}}
    if "metrics" in merged:
        merged["metrics"] = {**before.get("metrics", {}), **after.get("metrics", {})}
    return merged


# --- pictures and texts -----------------------------------------------------------------------------------------------


def check_items(image: Any, text: Any, *, is_kept: bool) -> list[Item]:
    """Return what `report(image=…, text=…)` was given, copied where `is_kept`. Raises TypeError, ValueError."""
    items: list[Item] = [("image", name, _check_pixels(name, value, is_kept)) for name, value in _name("image", image)]
    for name, value in _name("text", text):
        if not isinstance(value, str):
            raise TypeError(f"report({_argument('text', name)}): a text, not {type(value).__name__}")
        items.append(("text", name, value[:MAX_TEXT_CHARS]))
    return items


def _name(kind: str, value: Any) -> list[tuple[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, Mapping):
        return [("", value)]
    if len(value) > MAX_ITEMS:
        raise ValueError(f"report({kind}=…): {len(value)} of them, and one step shows at most {MAX_ITEMS}")
    if wrong := [name for name in value if not isinstance(name, str)]:
        raise TypeError(f"report({kind}=…): a name is text, not {type(wrong[0]).__name__}")
    return [(name[:MAX_NAME_CHARS], item) for name, item in value.items()]


def _argument(kind: str, name: str) -> str:
    return f"{kind}={{{name!r}: …}}" if name else f"{kind}=…"


def _check_pixels(name: str, value: Any, is_kept: bool) -> Any:
    """Return the picture as uint8 [H, W, C], a copy; of one that is not kept only type and shape are checked."""
    # A program that has an array has imported numpy already.
    import numpy as np

    call = f"report({_argument('image', name)})"
    if not is_kept and hasattr(value, "shape") and hasattr(value, "dtype"):
        _check_array(call, tuple(value.shape), str(value.dtype))
        return None
    try:
        pixels = np.asarray(value)
    except Exception as error:
        # Any error: the array may be of another library.
        raise TypeError(f"{call}: {_PICTURE}; {type(value).__name__} cannot be read as one ({error})") from None
    _check_array(call, pixels.shape, str(pixels.dtype))
    stride = -(-max(pixels.shape[:2]) // MAX_SIDE)
    pixels = pixels[::stride, ::stride]
    if pixels.dtype == np.bool_:
        pixels = pixels.astype(np.uint8) * 255
    if pixels.dtype != np.uint8:
        numbers = np.nan_to_num(pixels.astype(np.float32), nan=0.0, posinf=1.0, neginf=0.0)
        pixels = np.rint(np.clip(numbers, 0, 1) * 255)
    # A copy: the program goes on with its own.
    return np.array(pixels, np.uint8, order="C").reshape(*pixels.shape[:2], -1)


def _check_array(call: str, shape: tuple[int, ...], dtype: str) -> None:
    is_picture = len(shape) in (2, 3) and min(shape) > 0 and (len(shape) == 2 or shape[2] in _COLOUR_TYPES)
    if not is_picture:
        raise ValueError(f"{call}: {_PICTURE}; this one is {list(shape)}")
    if dtype not in ("uint8", "bool") and not dtype.startswith(("float", "bfloat")):
        raise TypeError(f"{call}: {_PICTURE}; this one has {dtype}")


def encode_png(pixels: Any) -> bytes:
    """Return a picture, uint8 [H, W, C], as the bytes of a PNG file, halved until it has at most MAX_PNG_BYTES."""
    while True:
        height, width, channels = pixels.shape
        rows = b"".join(b"\0" + row.tobytes() for row in pixels)
        header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
        png = b"\x89PNG\r\n\x1a\n"
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b"")):
            png += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        if len(png) <= MAX_PNG_BYTES:
            return png
        pixels = pixels[::2, ::2]


class SampleWriter:
    """Writes pictures and texts into `folder`, in a thread that starts with the first.

    `note` gets the reason why one could not be written, once.
    """

    def __init__(self, folder: str, note: Callable[[str], object]) -> None:
        self._folder, self._note = folder, note
        self._waiting: dict[int, list[Item]] = {}
        self._is_writing = self._has_failed = False
        # A signal handler may report, too.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        # The step that was written last, and its items.
        self._newest: tuple[float, list[Item]] = math.inf, []

    def put(self, step: int, items: list[Item]) -> None:
        """Add items to a step; of two with one name the later one is kept."""
        with self._changed:
            self._waiting[step] = _merge_items(self._waiting.get(step, []), items)
            while len(self._waiting) > MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jaxlaunch-samples", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written, for at most LEAVE_S."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, LEAVE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                step = next(iter(self._waiting))
                items, self._is_writing = self._waiting.pop(step), True
            try:
                self._write(step, items)
            except Exception as error:
                # Any error: a picture that cannot be kept must not end the training.
                if not self._has_failed:
                    self._has_failed = True
                    reason = str(error.strerror if isinstance(error, OSError) else error).lower()
                    self._note(f"what the program reported at step {step} is not kept in {self._folder}: {reason}")

    def _write(self, step: int, items: list[Item]) -> None:
        newest, before = self._newest
        # The run has gone back to an earlier step: later steps will be reported again.
        if step < newest:
            self._remove(lambda written: written > step)
        items = _merge_items(before, items) if step == newest else items
        samples = []
        for kind, name, value in items:
            if kind == "image":
                value = "data:image/png;base64," + base64.b64encode(encode_png(value)).decode()
            samples.append({"name": name, kind: value})
        row = {"step": step, "time": time.time(), "samples": samples}
        os.makedirs(self._folder, exist_ok=True)
        atomic_file.write(Path(self._folder, f"{step}.json"), json.dumps(row).encode())
        self._newest = step, items
        oldest = list_steps(self._folder)[:MAX_STEPS][-1]
        self._remove(lambda written: written < oldest)

    def _remove(self, is_gone: Callable[[int], bool]) -> None:
        for step in list_steps(self._folder):
            if is_gone(step):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(self._folder, f"{step}.json"))


def _merge_items(before: list[Item], after: list[Item]) -> list[Item]:
    return list({item[:2]: item for item in [*before, *after]}.values())[: 2 * MAX_ITEMS]


def list_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps that have a file in `folder`, the newest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted((int(match[1]) for match in map(_FILE.fullmatch, names) if match), reverse=True)
