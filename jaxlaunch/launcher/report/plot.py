"""Curves in a terminal, by dots of braille, eight in a character. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 60, 14  # characters of the plot itself
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of Unicode's braille patterns, by row and column
_MARKS = "●○■□▲△◆◇"

Line = tuple[str, Sequence[float], Sequence[float]]


def drawn(lines: Sequence[Line], x_label: str, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """The curves in one plot. Each has its mark at its newest point, and in the line of names below."""
    xs = [x for _, each, _ in lines for x in each]
    ys = [y for _, _, each in lines for y in each]
    if not xs:
        return []
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    cells = [[0] * width for _ in range(height)]
    marks = dict[tuple[int, int], str]()
    for at, (_, x, y) in enumerate(lines):
        for px, py in _pixels(x, y, (left, right, low, high), 2 * width, 4 * height):
            cells[py // 4][px // 2] |= _DOTS[py % 4][px % 2]
        px, py = _pixel(x[-1], y[-1], (left, right, low, high), 2 * width, 4 * height)
        marks[py // 4, px // 2] = _MARKS[at % len(_MARKS)]
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    rows = []
    for label, (row, found) in zip(labels, enumerate(cells), strict=True):
        text = "".join(marks.get((row, column)) or chr(0x2800 + dots) for column, dots in enumerate(found))
        rows.append(f"{label:>{margin}} ┤{text}".rstrip("\u2800 "))
    ends = f"{left:.4g}", f"{right:.4g} {x_label}"
    rows.append(f"{'':>{margin}}  {ends[0]}{ends[1]:>{max(1, width - len(ends[0]))}}")
    rows.append("  ".join(f"{_MARKS[at % len(_MARKS)]} {name}" for at, (name, _, _) in enumerate(lines)))
    return rows


def _pixel(x: float, y: float, box: tuple[float, float, float, float], width: int, height: int) -> tuple[int, int]:
    left, right, low, high = box
    across = 0.5 if right == left else (x / 2 - left / 2) / (right / 2 - left / 2)
    up = 0.5 if high == low else (y / 2 - low / 2) / (high / 2 - low / 2)
    return round(across * (width - 1)), round((1 - up) * (height - 1))


def _pixels(
    xs: Sequence[float], ys: Sequence[float], box: tuple[float, float, float, float], width: int, height: int
) -> set[tuple[int, int]]:
    """The dots on the way from each point to the next."""
    points = [_pixel(x, y, box, width, height) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    found = set(points)
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        steps = max(abs(x1 - x0), abs(y1 - y0))
        found |= {(round(x0 + (x1 - x0) * k / steps), round(y0 + (y1 - y0) * k / steps)) for k in range(steps)}
    return found
