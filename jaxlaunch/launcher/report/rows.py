"""The numbers of a run, as its files of JSON lines hold them: read while they grow, and thinned to what a screen shows.

Others may write these files: what is no number is left out, and neither a line nor a file is read beyond a bound.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxlaunch import regular_files, shown
from jaxlaunch.runs.journal import MAX_LINE, STEP

MOST_POINTS = 1000  # of a curve; twice as many before it is thinned
MOST_CURVES = 100
MOST_NAME = 120  # characters
MOST_REPORTED = 2_500_000  # bytes of pictures and texts on a page, the newest
MOST_BYTES = 1 << 30  # of a file; of a longer one the end is read
LARGEST = 1e300  # beyond it, differences of two numbers overflow
TIME = "time"
_NOT_CURVES = {STEP, TIME}

Point = tuple[float, float, float]  # step, Unix time, value


@dataclasses.dataclass
class Curve:
    """One number over the steps. Of a long one the lowest and highest neighbours stay, the first and last too."""

    points: list[Point] = dataclasses.field(default_factory=list)

    def add(self, point: Point) -> None:
        """Adds the newest point; one of the same step replaces it."""
        if self.points and self.points[-1][0] == point[0]:
            self.points.pop()
        self.points.append(point)
        if len(self.points) > 2 * MOST_POINTS:
            self.points = list(_extremes(self.points))


def _extremes(points: list[Point]) -> Iterator[Point]:
    """The lowest and the highest of each four neighbours, in their order: half of the points, with every spike."""
    yield points[0]
    for at in range(1, len(points) - 1, 4):
        four = points[at : min(at + 4, len(points) - 1)]
        low, high = min(four, key=lambda point: point[2]), max(four, key=lambda point: point[2])
        yield from (low,) if low is high else sorted((low, high))
    yield points[-1]


class Rows:
    """The curves of one file, by name; `read` goes on where it left off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.curves: dict[str, Curve] = {}
        self.last: Mapping[str, Any] = {}  # the newest row
        self._file: tuple[int, int] | None = None  # device and inode: a resumed run writes another file
        self._at = 0  # where the last whole line begins: the next row of its step takes its place
        self.parts: list[tuple[float, float, dict[str, float]]] = []  # time, wall seconds, seconds by part, thinned

    def read(self) -> bool:
        """Reads what is new. Whether the file was begun anew, as a run that resumes does; then all is read again."""
        try:
            file = open(self._path, "rb", opener=regular_files.beneath(self._path.parent))
        except OSError:
            return False
        with file:
            found = os.fstat(file.fileno())
            is_new = self._file != (found.st_dev, found.st_ino) or found.st_size < self._at
            if is_new:
                self._file, self._at = (found.st_dev, found.st_ino), max(0, found.st_size - MOST_BYTES)
                self.curves, self.parts, self.last = {}, [], {}
            file.seek(self._at)
            while line := file.readline(MAX_LINE):
                if line.endswith(b"\n"):
                    self._at = file.tell() - len(line)
                    self._add(line)
        return is_new

    def _add(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            step = row[STEP]
        except (ValueError, TypeError, KeyError, RecursionError):
            return
        if type(step) is not int or not 0 <= step < 2**53:
            return
        time = row.get(TIME)
        time = float(time) if type(time) in (int, float) and math.isfinite(time) else math.nan
        self.last = row
        for name, value in row.items():
            if name in _NOT_CURVES or type(value) not in (int, float) or not abs(value) < LARGEST:
                continue
            curve = self.curves.get(name)
            if curve is None:
                if len(self.curves) >= MOST_CURVES or len(name) > MOST_NAME:
                    continue
                curve = self.curves[name] = Curve()
            curve.add((step, time, value))
        self._part(row, time)

    def _part(self, row: Mapping[str, Any], time: float) -> None:
        """Keeps where the seconds of an interval went, for the strip."""
        names = ("wall_s", "data_s", "eval_s", "save_s")
        seconds = [float(row[name]) if type(row.get(name)) is float else 0.0 for name in names]
        if seconds[0] <= 0 or math.isnan(time) or not all(0 <= each < 1e9 for each in seconds):
            return
        wall, data, held_out, save = seconds
        part = (time, wall, {"data": data, "eval": held_out, "save": save})
        if self.parts and self.parts[-1][0] >= time:  # the same row again
            self.parts.pop()
        self.parts.append(part)
        if len(self.parts) > MOST_POINTS:
            pairs = zip(self.parts[::2], self.parts[1::2], strict=False)
            odd = [self.parts[-1]] if len(self.parts) % 2 else []
            self.parts = [_joined(*pair) for pair in pairs] + odd


def _joined(
    first: tuple[float, float, dict[str, float]], second: tuple[float, float, dict[str, float]]
) -> tuple[float, float, dict[str, float]]:
    sums = {name: spent + second[2][name] for name, spent in first[2].items()}
    return second[0], first[1] + second[1], sums


def reported(run: Path, most: int) -> list[dict[str, Any]]:
    """The newest rows that a program reported of pictures and texts, the oldest first."""
    found, left = list[dict[str, Any]](), MOST_REPORTED
    for step in shown.steps(run / shown.FOLDER)[:most]:
        try:
            text = regular_files.read(run / shown.FOLDER / f"{step}.json", MOST_REPORTED + 1, below=run)
            row = json.loads(text)
        except (OSError, ValueError, RecursionError):
            continue
        left -= len(text)
        if left < 0:
            break
        if isinstance(row, dict):
            found.append({**row, STEP: step})
    return found[::-1]


def samples(path: Path, most: int) -> list[dict[str, Any]]:
    """The newest rows of a file of JSON lines that are objects, the oldest first."""
    try:
        text = regular_files.read(path, 4 * MAX_LINE, True, path.parent)
    except OSError:
        return []
    found = []
    for line in text.splitlines()[-4 * most :]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            found.append(row)
    return found[-most:]
