"""Pictures and texts that a program reports, in one file per step in the run folder.

A thread writes the files, so that no step waits for storage. If storage is too slow, the oldest
steps that have not been written are dropped. A run that resumes replaces the files of the steps
that it repeats.

The agent brings this file into images without jaxlaunch, so it needs only the standard library and
Python >= 3.10. Only pictures need numpy, which a program that has an array has imported already.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxlaunch import atomic_file

# A folder in the run folder. Each file in it, STEP.json, has the keys `step`, `time` and `samples`.
FOLDER = "reported"
# The largest number of pictures in one report, and of texts.
MAX_ITEMS = 8
# Longer names and texts are cut.
MAX_NAME_CHARS, MAX_TEXT_CHARS = 100, 10_000
# In pixels. A larger picture is reduced to every second pixel, every third, and so on.
MAX_SIDE = 1024
# A larger picture is halved until it fits.
MAX_PNG_BYTES = 1 << 18
# The newest steps, whose files are kept.
MAX_STEPS = 100
# The largest number of steps that wait to be written.
MAX_WAITING = 16
# A process that ends waits for at most this time until everything is written.
EXIT_WAIT_S = 2.0

_STEP_FILE = re.compile(r"([0-9]{1,15})\.json")
# The colour type in PNG by the number of channels.
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
_PICTURE_FORMAT = (
    "an array [H, W] or [H, W, C] with 1, 3 or 4 channels, uint8 from 0 to 255 or "
    "floats from 0 to 1"
)

# The kind "image" or "text", the name, and the value: a uint8 array [H, W, C] or a string.
Item = tuple[str, str, Any]


def check_items(image: Any, text: Any, *, is_kept: bool) -> list[Item]:
    """Check the arguments `image` and `text` of `report`, and return them as items.

    Args:
        image: A picture, or pictures by name.
        text: A text, or texts by name.
        is_kept: Whether the items will be written. Otherwise pictures are checked but not copied.

    Raises:
        TypeError: A name or a value has the wrong type.
        ValueError: There are too many items, or an array has the wrong shape.
    """
    items: list[Item] = []
    for name, value in _list_named("image", image):
        items.append(("image", name, _convert_picture(name, value, is_kept)))
    for name, value in _list_named("text", text):
        if not isinstance(value, str):
            call = f"report({_format_argument('text', name)})"
            raise TypeError(f"{call}: a text, not {type(value).__name__}")
        items.append(("text", name, value[:MAX_TEXT_CHARS]))
    return items


def _list_named(kind: str, value: Any) -> list[tuple[str, Any]]:
    """Return the name and the value of each item. A value that is not a mapping has the name ""."""
    if value is None:
        return []
    if not isinstance(value, Mapping):
        return [("", value)]
    if len(value) > MAX_ITEMS:
        limit = f"one step may have at most {MAX_ITEMS}"
        raise ValueError(f"report({kind}=…): there are {len(value)} items, and {limit}")
    if invalid_names := [name for name in value if not isinstance(name, str)]:
        kind_of_name = type(invalid_names[0]).__name__
        raise TypeError(f"report({kind}=…): names must be text, not {kind_of_name}")
    return [(name[:MAX_NAME_CHARS], item) for name, item in value.items()]


def _format_argument(kind: str, name: str) -> str:
    return f"{kind}={{{name!r}: …}}" if name else f"{kind}=…"


def _convert_picture(name: str, value: Any, is_kept: bool) -> Any:
    """Return a copy of a picture as uint8 [H, W, C], or None if it is only to be checked."""
    # Imported here, because an image need not have numpy.
    import numpy as np

    call = f"report({_format_argument('image', name)})"
    if not is_kept and hasattr(value, "shape") and hasattr(value, "dtype"):
        _check_array(call, tuple(value.shape), str(value.dtype))
        return None
    try:
        pixels = np.asarray(value)
    except Exception as error:
        # The array may be from any library, so the conversion may raise anything.
        reason = f"{type(value).__name__} cannot be read as one ({error})"
        raise TypeError(f"{call}: {_PICTURE_FORMAT}; {reason}") from None
    _check_array(call, pixels.shape, str(pixels.dtype))
    stride = -(-max(pixels.shape[:2]) // MAX_SIDE)
    pixels = pixels[::stride, ::stride]
    if pixels.dtype == np.bool_:
        pixels = pixels.astype(np.uint8) * 255
    if pixels.dtype != np.uint8:
        numbers = np.nan_to_num(pixels.astype(np.float32), nan=0.0, posinf=1.0, neginf=0.0)
        pixels = np.rint(np.clip(numbers, 0, 1) * 255)
    # The copy is necessary because the program may change its array.
    return np.array(pixels, np.uint8, order="C").reshape(*pixels.shape[:2], -1)


def _check_array(call: str, shape: tuple[int, ...], dtype: str) -> None:
    has_channels = len(shape) == 2 or (len(shape) == 3 and shape[2] in _COLOUR_TYPES)
    if not has_channels or min(shape) <= 0:
        raise ValueError(f"{call}: {_PICTURE_FORMAT}; this one is {list(shape)}")
    if dtype not in ("uint8", "bool") and not dtype.startswith(("float", "bfloat")):
        raise TypeError(f"{call}: {_PICTURE_FORMAT}; this one has {dtype}")


def encode_png(pixels: Any) -> bytes:
    """Return a picture, uint8 [H, W, C], as a PNG file of at most MAX_PNG_BYTES.

    A picture that is too large is halved, by dropping every second pixel, until it fits.
    """
    while True:
        height, width, channels = pixels.shape
        rows = b"".join(b"\0" + row.tobytes() for row in pixels)
        header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
        png = b"\x89PNG\r\n\x1a\n"
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b"")):
            size, checksum = len(data), zlib.crc32(kind + data)
            png += struct.pack(">I", size) + kind + data + struct.pack(">I", checksum)
        if len(png) <= MAX_PNG_BYTES:
            return png
        pixels = pixels[::2, ::2]


class SampleWriter:
    """Writes pictures and texts into `folder`, in a thread that starts with the first of them.

    `note` is called with the reason for the first one that cannot be written.
    """

    def __init__(self, folder: str, note: Callable[[str], object]) -> None:
        self._folder, self._note = folder, note
        # Items that wait to be written, by step.
        self._waiting: dict[int, list[Item]] = {}
        self._is_writing = self._has_failed = False
        # Reentrant, because a signal handler may report, too.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        # The step that was written last, and its items.
        self._last_written: tuple[float, list[Item]] = math.inf, []

    def add_items(self, step: int, items: list[Item]) -> None:
        """Add items to a step. An item replaces an earlier one of the same kind and name."""
        with self._changed:
            self._waiting[step] = _merge_items(self._waiting.get(step, []), items)
            while len(self._waiting) > MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_waiting, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written, for at most EXIT_WAIT_S."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, EXIT_WAIT_S)

    def _write_waiting(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                step = next(iter(self._waiting))
                items, self._is_writing = self._waiting.pop(step), True
            try:
                self._write_step(step, items)
            except Exception as error:
                # No error of a picture or of storage may end the training.
                if not self._has_failed:
                    self._has_failed = True
                    reason = str(error.strerror if isinstance(error, OSError) else error).lower()
                    self._note(
                        f"the pictures and texts of step {step} could not be written to "
                        f"{self._folder}: {reason}"
                    )

    def _write_step(self, step: int, items: list[Item]) -> None:
        last_step, last_items = self._last_written
        if step < last_step:
            # The run has returned to an earlier step and will report the later ones again.
            self._remove_steps(lambda written: written > step)
        elif step == last_step:
            items = _merge_items(last_items, items)
        samples = []
        for kind, name, value in items:
            if kind == "image":
                value = "data:image/png;base64," + base64.b64encode(encode_png(value)).decode()
            samples.append({"name": name, kind: value})
        row = {"step": step, "time": time.time(), "samples": samples}
        os.makedirs(self._folder, exist_ok=True)
        atomic_file.write_file(Path(self._folder, f"{step}.json"), json.dumps(row).encode())
        self._last_written = step, items
        oldest = list_steps(self._folder)[:MAX_STEPS][-1]
        self._remove_steps(lambda written: written < oldest)

    def _remove_steps(self, should_remove: Callable[[int], bool]) -> None:
        for step in list_steps(self._folder):
            if should_remove(step):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(self._folder, f"{step}.json"))


def _merge_items(earlier: list[Item], later: list[Item]) -> list[Item]:
    return list({item[:2]: item for item in [*earlier, *later]}.values())[: 2 * MAX_ITEMS]


def list_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps that have a file in `folder`, the newest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(
        (int(match[1]) for match in map(_STEP_FILE.fullmatch, names) if match), reverse=True
    )
