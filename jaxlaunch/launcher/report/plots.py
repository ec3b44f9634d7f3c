"""Draw the timeline and the curves of a run: as SVG and PNG files, and in a terminal."""

from __future__ import annotations

import html
import importlib.util
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.wording import os_error_reason

WIDTH, HEIGHT = 900, 360
# Margins around the frame of a curve.
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 40, 50
COLOUR = "#0b5cad"
CAUSE_COLOURS: Mapping[str, str] = {
    "step": "#2f9e6e",
    "data": "#6aaed6",
    "eval": "#9b7fd1",
    "save": "#e3c04b",
    "lost_work": "#d6453d",
    "compile": "#e08a3c",
    "restore": "#7fb7b0",
    "down": "#4b5560",
}
_OTHER_COLOUR, _INK, _GRID = "#b9c2cb", "#1c2126", "#d4dae0"
# The size of a plot in a terminal, in characters. Each character has 4 × 2 dots.
_COLUMNS, _MIN_COLUMNS, _ROWS = 60, 20, 14
# Bits of Unicode's braille patterns, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARKS = "●○■□▲△◆◇"
# Columns between two marks of a curve.
_MARK_EVERY = 12

# ("line", colour, [(x, y), …]), ("box", colour, x, y, width, height) or ("text", x, y, anchor,
# text)
Shape = tuple[Any, ...]
# The name of a run, and its curve.
Line = tuple[str, Sequence[float], Sequence[float]]


def write_pictures(run: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the pictures of a run into a folder and return their paths.

    Raises UserError if the folder cannot be written.
    """
    pictures = {"time": list(draw_timeline(run))}
    for name in run["drawn"]:
        steps, _, values = run["curves"][name]
        pictures[name] = list(draw_curve(steps, values))
    paths = list[Path]()
    for name, shapes in pictures.items():
        stem = re.sub(r"[^\w-]+", "-", name)[:80] or "curve"
        titled = [*shapes, ("text", LEFT, 22, "start", f"{run['name']}: {name}"[:110])]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths.append(folder / f"{stem}.svg")
            paths[-1].write_text(render_svg(titled), encoding="utf-8")
            if importlib.util.find_spec("PIL") is not None:
                paths.append(folder / f"{stem}.png")
                write_png(titled, paths[-1])
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written: {os_error_reason(error)}.", "name another folder."
            ) from None
    return paths


def draw_curve(xs: Sequence[float], ys: Sequence[float]) -> Iterator[Shape]:
    """Draw a curve over the steps in a frame with a grid."""
    if not xs:
        return
    to_x = _make_scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    to_y = _make_scale(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    for part in range(5):
        x = min(xs) + (max(xs) - min(xs)) * part / 4
        # The difference of two large values could overflow.
        y = min(ys) + (max(ys) / 4 - min(ys) / 4) * part
        yield "line", _GRID, [(LEFT, to_y(y)), (WIDTH - RIGHT, to_y(y))]
        yield "text", LEFT - 8, to_y(y) + 4, "end", f"{y:.3g}"
        yield "text", to_x(x), HEIGHT - BOTTOM + 18, "middle", f"{x:.4g}"
    yield "text", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "middle", "step"
    yield "line", COLOUR, [(to_x(x), to_y(y)) for x, y in zip(xs, ys, strict=True)]


def draw_timeline(run: Mapping[str, Any]) -> Iterator[Shape]:
    """Draw the seconds of a run by cause, with the end of each attempt, and the sums by cause."""
    to_x = _make_scale(0.0, max(run["wall_s"], 1e-9), LEFT, WIDTH - RIGHT)
    for begin, end, cause in run["strip"]:
        colour, width = CAUSE_COLOURS.get(cause, _OTHER_COLOUR), to_x(end) - to_x(begin)
        yield "box", colour, to_x(begin), 70, max(0.3, width), 50
    free_x = 0.0
    for attempt in run["attempts"]:
        x = to_x(attempt["from"])
        yield "line", _INK, [(x, 58), (x, 120)]
        if x >= free_x:
            text = f"{attempt['number']} {attempt['cause']}"
            yield "text", x + 3, 64, "start", text
            free_x = x + 8 * len(text)
    for part in range(5):
        time_s = run["wall_s"] * part / 4
        yield "text", to_x(time_s), 138, "middle", f"{time_s:.0f} s"
    seconds = [(spent, cause) for cause, spent in run["seconds"].items() if spent > 0]
    for index, (spent, cause) in enumerate(sorted(seconds, reverse=True)):
        x, y = LEFT + 270 * (index // 5), 170 + 30 * (index % 5)
        yield "box", CAUSE_COLOURS.get(cause, _OTHER_COLOUR), x, y, 18, 14
        text = f"{cause} {spent:.1f} s, {spent / max(run['wall_s'], 1e-9):.1%}"
        yield "text", x + 26, y + 12, "start", text


def _make_scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """Return the linear function that maps the values low to high to the positions begin to end.

    It subtracts halves, because the difference of two large values could overflow.
    """
    if high == low:
        return lambda value: (begin + end) / 2
    return lambda value: begin + (end - begin) * ((value / 2 - low / 2) / (high / 2 - low / 2))


def render_svg(shapes: Sequence[Shape]) -> str:
    """Return the shapes as the text of an SVG file."""
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui">',
        "<style>text { font-size: 13px }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for kind, *attributes in shapes:
        if kind == "line":
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in attributes[1])
            style = f'fill="none" stroke="{attributes[0]}" stroke-width="1.5"'
            rows.append(f'<polyline {style} points="{points}"/>')
        elif kind == "box":
            colour, x, y, width, height = attributes
            size = f'width="{width:.2f}" height="{height:.1f}"'
            rows.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>')
        else:
            x, y, anchor, text = attributes
            place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
            rows.append(f'<text {place} fill="{_INK}">{html.escape(text)}</text>')
    return "\n".join([*rows, "</svg>", ""])


def write_png(shapes: Sequence[Shape], path: Path) -> None:
    """Write the shapes as a PNG file, with twice the resolution of the SVG."""
    from PIL import Image, ImageDraw, ImageFont

    scale = 2
    image = Image.new("RGB", (WIDTH * scale, HEIGHT * scale), "#ffffff")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(13 * scale)
    for kind, *attributes in shapes:
        if kind == "line":
            points = [(x * scale, y * scale) for x, y in attributes[1]]
            draw.line(points, fill=attributes[0], width=3)
        elif kind == "box":
            colour, *edges = attributes
            x, y, width, height = (edge * scale for edge in edges)
            draw.rectangle((x, y, x + max(0, width - 1), y + height), fill=colour)
        else:
            x, y, anchor, text = attributes
            pillow_anchor = {"start": "ls", "middle": "ms", "end": "rs"}[anchor]
            draw.text((x * scale, y * scale), text, fill=_INK, font=font, anchor=pillow_anchor)
    image.save(path)


def draw_plot(lines: Sequence[Line], x_label: str, max_width: int | None = None) -> list[str]:
    """Draw curves in one plot of text. Each has its own mark, at intervals and at its end.

    The last row is the legend. The others have at most `max_width` columns.
    """
    xs = [x for _, line_xs, _ in lines for x in line_xs]
    ys = [y for _, _, line_ys in lines for y in line_ys]
    if not xs:
        return []
    labels = [f"{max(ys):.4g}", *[""] * (_ROWS - 2), f"{min(ys):.4g}"]
    margin = max(map(len, labels))
    # The axis takes two columns.
    room = _COLUMNS if max_width is None else max_width - margin - 2
    column_count = max(_MIN_COLUMNS, min(_COLUMNS, room))
    to_column = _make_scale(min(xs), max(xs), 0, 2 * column_count - 1)
    to_row = _make_scale(min(ys), max(ys), 4 * _ROWS - 1, 0)
    cells = [[0] * column_count for _ in range(_ROWS)]
    marks = dict[tuple[int, int], str]()
    for index, (_, line_xs, line_ys) in enumerate(lines):
        finite = [(x, y) for x, y in zip(line_xs, line_ys, strict=True) if math.isfinite(y)]
        points = [(round(to_column(x)), round(to_row(y))) for x, y in finite]
        for x, y in _trace_dots(points):
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
        mark = _MARKS[index % len(_MARKS)]
        if len(lines) > 1:
            # All curves have the same dots, so each has marks, in different columns.
            offset = index * _MARK_EVERY // len(lines)
            for x, y in points:
                if (x // 2 + offset) % _MARK_EVERY == 0:
                    marks.setdefault((y // 4, x // 2), mark)
        x, y = points[-1]
        marks[y // 4, x // 2] = mark
    rows = []
    for row, (label, dots_of_row) in enumerate(zip(labels, cells, strict=True)):
        text = "".join(
            marks.get((row, column)) or chr(0x2800 + dots)
            for column, dots in enumerate(dots_of_row)
        )
        rows.append(f"{label:>{margin}} ┤{text}".rstrip("\u2800 "))
    first_x, last_x = f"{min(xs):.4g}", f"{max(xs):.4g} {x_label}"
    rows.append(f"{'':>{margin}}  {first_x}{last_x:>{max(1, column_count - len(first_x))}}")
    names = [f"{mark} {name}" for mark, (name, _, _) in zip(itertools.cycle(_MARKS), lines)]  # noqa: B905
    return [*rows, "  ".join(names)]


def _trace_dots(points: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the dots on straight lines from each point to the next."""
    dots = set(points)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        steps = max(abs(x1 - x0), abs(y1 - y0))
        for k in range(steps):
            dots.add((round(x0 + (x1 - x0) * k / steps), round(y0 + (y1 - y0) * k / steps)))
    return dots
