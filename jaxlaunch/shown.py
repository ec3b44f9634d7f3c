"""Pictures and texts that a program reports: a file for each step in the run folder, written by a thread.

No step waits for it: of what storage takes too slowly, the oldest that waits is dropped. A run that resumes writes the
files of its steps again. Standard library only, Python >= 3.10, as reporting.py, which travels into users' images.
"""

from __future__ import annotations

import base64
import contextlib
import json
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

FOLDER = "reported"  # of a run folder; STEP.json in it is an object with `step`, `time` and `samples`
FILE = re.compile(r"([0-9]{1,15})\.json")
MOST_ITEMS = 8  # pictures, and texts, of one report
MOST_NAME, MOST_TEXT = 100, 10_000  # characters; what is longer is cut
MOST_SIDE = 1024  # pixels; of a larger picture every second pixel is kept, or every third …
MOST_PNG = 1 << 18  # bytes; a picture that has more is halved until it has not
MOST_STEPS = 100  # that are kept, the newest
MOST_WAITING = 16  # steps that are not written yet
LEAVE_S = 2.0  # for which a process that ends waits for what is not written

_LAYOUTS = {1: 0, 3: 2, 4: 6}  # channels -> PNG's colour type
Item = tuple[str, str, Any]  # "image" or "text", its name, a contiguous uint8 [H, W, C] or the text
_WANTED = "an array [H, W] or [H, W, C] with 1, 3 or 4 channels, uint8 from 0 to 255 or floats from 0 to 1"


def items(image: Any, text: Any, is_kept: bool) -> list[Item]:
    """What `report(image=…, text=…)` was given, copied where `is_kept`. Raises TypeError, ValueError."""
    found = [("image", name, _pixels(name, each, is_kept)) for name, each in _named("image", image)]
    return found + [("text", name, _text(name, each)) for name, each in _named("text", text)]


def _named(kind: str, given: Any) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        return [("", given)]
    if len(given) > MOST_ITEMS:
        raise ValueError(f"report({kind}=…): {len(given)} of them, and one step shows at most {MOST_ITEMS}")
    if wrong := [name for name in given if not isinstance(name, str)]:
        raise TypeError(f"report({kind}=…): a name is text, not {type(wrong[0]).__name__}")
    return [(name[:MOST_NAME], each) for name, each in given.items()]


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"report({_called('text', name)}): a text, not {type(given).__name__}")
    return given[:MOST_TEXT]


def _called(kind: str, name: str) -> str:
    return f"{kind}={{{name!r}: …}}" if name else f"{kind}=…"


def _pixels(name: str, given: Any, is_kept: bool) -> Any:
    """The picture as uint8 [H, W, C], a copy; of one that is not kept only type and shape are looked at."""
    import numpy as np  # whoever has an array has it

    called = f"report({_called('image', name)})"
    if not is_kept and hasattr(given, "shape") and hasattr(given, "dtype"):
        _check(called, tuple(given.shape), str(given.dtype))
        return None
    try:
        found = np.asarray(given)
    except Exception as error:  # any: of a library that has its own arrays
        raise TypeError(f"{called}: {_WANTED}; {type(given).__name__} cannot be read as one ({error})") from None
    _check(called, found.shape, str(found.dtype))
    step = -(-max(found.shape[:2]) // MOST_SIDE)
    found = found[::step, ::step]
    if found.dtype == np.bool_:
        found = found.astype(np.uint8) * 255
    if found.dtype != np.uint8:
        numbers = np.nan_to_num(found.astype(np.float32), nan=0.0, posinf=1.0, neginf=0.0)
        found = np.rint(np.clip(numbers, 0, 1) * 255)
    return np.array(found, np.uint8, order="C").reshape(
        *found.shape[:2], -1
    )  # a copy: the program goes on with its own


def _check(called: str, shape: tuple[int, ...], kind: str) -> None:
    is_picture = len(shape) in (2, 3) and min(shape) > 0 and (len(shape) == 2 or shape[2] in _LAYOUTS)
    if not is_picture:
        raise ValueError(f"{called}: {_WANTED}; this one is {list(shape)}")
    if kind not in ("uint8", "bool") and not kind.startswith(("float", "bfloat")):
        raise TypeError(f"{called}: {_WANTED}; this one has {kind}")


def png(pixels: Any) -> bytes:
    """A picture, uint8 [H, W, C], as the bytes of a PNG file, halved until it has no more than MOST_PNG."""
    while True:
        height, width, channels = pixels.shape
        rows = b"".join(b"\0" + row.tobytes() for row in pixels)
        head = struct.pack(">IIBBBBB", width, height, 8, _LAYOUTS[channels], 0, 0, 0)
        parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
        found = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)
        if len(found) <= MOST_PNG:
            return found
        pixels = pixels[::2, ::2]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


class Shown:
    """Writes what is put into `folder`, in a thread that starts with the first. `note` gets why it could not, once."""

    def __init__(self, folder: str, note: Callable[[str], object]) -> None:
        self._folder, self._note = folder, note
        self._waiting: dict[int, list[Item]] = {}
        self._is_writing = self._has_failed = False
        self._changed = threading.Condition(threading.RLock())  # a signal's handler may report, too
        self._thread: threading.Thread | None = None
        self._newest: tuple[float, list[Item]] = float("inf"), []  # the step that was written last, and what is in it

    def put(self, step: int, found: list[Item]) -> None:
        """Adds items to a step; of two with one name the later one is kept."""
        with self._changed:
            self._waiting[step] = _joined(self._waiting.get(step, []), found)
            while len(self._waiting) > MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jaxlaunch-shown", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all is written, for LEAVE_S at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, LEAVE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                step = next(iter(self._waiting))
                found, self._is_writing = self._waiting.pop(step), True
            try:
                self._write(step, found)
            except Exception as error:  # any: a picture that cannot be kept ends no training
                if not self._has_failed:
                    self._has_failed = True
                    why = str(error.strerror if isinstance(error, OSError) else error).lower()
                    self._note(f"what the program reported at step {step} is not kept in {self._folder}: {why}")

    def _write(self, step: int, found: list[Item]) -> None:
        newest, before = self._newest
        if step < newest:  # the run has gone back: what came later is made again
            self._remove(lambda each: each > step)
        found = _joined(before, found) if step == newest else found
        row = {"step": step, "time": time.time(), "samples": [_row(*item) for item in found]}
        os.makedirs(self._folder, exist_ok=True)
        atomic_file.write(Path(self._folder, f"{step}.json"), json.dumps(row).encode())
        self._newest = step, found
        kept = steps(self._folder)[:MOST_STEPS]
        self._remove(lambda each: each < kept[-1])

    def _remove(self, is_gone: Callable[[int], bool]) -> None:
        for step in steps(self._folder):
            if is_gone(step):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(self._folder, f"{step}.json"))


def _joined(before: list[Item], after: list[Item]) -> list[Item]:
    return list({item[:2]: item for item in [*before, *after]}.values())[: 2 * MOST_ITEMS]


def _row(kind: str, name: str, value: Any) -> dict[str, str]:
    if kind == "image":
        value = "data:image/png;base64," + base64.b64encode(png(value)).decode()
    return {"name": name, kind: value}


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of which `folder` has a file, the newest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted((int(found[1]) for found in map(FILE.fullmatch, names) if found), reverse=True)


class _Process:
    """What this process keeps, and how far it is."""

    kept: Shown | None = None
    pid: int | None = None
    step = 0


def keep(folder: str, note: Callable[[str], object]) -> None:
    """Has this process keep what it reports."""
    _Process.kept, _Process.pid = Shown(folder, note), os.getpid()


def is_kept() -> bool:
    """Whether it does; a process that it forks does not."""
    return _Process.kept is not None and _Process.pid == os.getpid()


def at_step(step: int) -> None:
    """How many steps are complete: what is reported without a step is of this one."""
    _Process.step = step


def put(step: int | None, found: list[Item]) -> None:
    """Keeps what was reported of a step, or of the newest."""
    if step is not None:
        at_step(step)
    if found and is_kept() and _Process.kept is not None:
        _Process.kept.put(_Process.step if step is None else step, found)


def flush() -> None:
    """Waits for what is not written, a moment."""
    if is_kept() and _Process.kept is not None:
        _Process.kept.flush()
