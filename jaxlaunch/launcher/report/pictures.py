"""Pictures of a run as files: its strip and each of its curves, as SVG, and as PNG where Pillow is installed."""

from __future__ import annotations

import html
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch.launcher.errors import UserError

WIDTH, HEIGHT = 900, 360
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 40, 50  # of the frame around a curve
COLOURS = ("#0b5cad", "#c2410c", "#14693f", "#8b2fb0", "#946200", "#0e7490")
CAUSES: Mapping[str, str] = {
    "step": "#2f9e6e",
    "data": "#6aaed6",
    "eval": "#9b7fd1",
    "save": "#e3c04b",
    "lost_work": "#d6453d",
    "compile": "#e08a3c",
    "restore": "#7fb7b0",
    "down": "#4b5560",
}
_OTHER, _INK, _GRID = "#b9c2cb", "#1c2126", "#d4dae0"

Line = tuple[str, Sequence[float], Sequence[float]]
Shape = tuple[
    Any, ...
]  # ("line", colour, [(x, y), …]), ("box", colour, x, y, width, height), ("text", x, y, anchor, text)


def of_run(run: Mapping[str, Any], to: Path) -> list[Path]:
    """Writes the pictures of a run's page into a folder. Raises UserError where that cannot be."""
    shapes = {"time": list(strip(run))}
    for name, (steps, _, values) in run["curves"].items():
        shapes[name] = list(curves([(name, steps, values)], "step"))
    return written(shapes, f"{run['name']}", to)


def written(pictures: Mapping[str, Sequence[Shape]], title: str, to: Path) -> list[Path]:
    """Writes each picture as SVG and PNG."""
    made = list[Path]()
    for name, shapes in pictures.items():
        file = re.sub(r"[^\w-]+", "-", name)[:80] or "curve"
        titled = [*shapes, ("text", LEFT, 22, "start", f"{title}: {name}"[:110])]
        try:
            to.mkdir(parents=True, exist_ok=True)
            made.append(to / f"{file}.svg")
            made[-1].write_text(svg(titled), encoding="utf-8")
            if importlib.util.find_spec("PIL") is not None:
                made.append(to / f"{file}.png")
                png(titled, made[-1])
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise UserError(f"{to} cannot be written: {why}.", "name another folder.") from None
    return made


def curves(lines: Sequence[Line], x_label: str) -> Iterator[Shape]:
    """Curves in one frame."""
    xs, ys = [x for line in lines for x in line[1]], [y for line in lines for y in line[2]]
    if not xs:
        return
    across, up = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT), _scale(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    for part in range(5):
        x, y = min(xs) + (max(xs) - min(xs)) * part / 4, min(ys) / 1 + (max(ys) / 4 - min(ys) / 4) * part
        yield "line", _GRID, [(LEFT, up(y)), (WIDTH - RIGHT, up(y))]
        yield "text", LEFT - 8, up(y) + 4, "end", f"{y:.3g}"
        yield "text", across(x), HEIGHT - BOTTOM + 18, "middle", f"{x:.4g}"
    yield "text", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "middle", x_label
    for at, (name, x_of, y_of) in enumerate(lines):
        colour = COLOURS[at % len(COLOURS)]
        yield "line", colour, [(across(x), up(y)) for x, y in zip(x_of, y_of, strict=True)]
        if len(lines) > 1:
            yield "box", colour, WIDTH - RIGHT - 200, TOP + 18 * at, 12, 12
            yield "text", WIDTH - RIGHT - 182, TOP + 18 * at + 11, "start", name[:30]


def strip(run: Mapping[str, Any]) -> Iterator[Shape]:
    """The seconds of a run by cause, with what ended each attempt, and their sums."""
    across = _scale(0.0, max(run["wall_s"], 1e-9), LEFT, WIDTH - RIGHT)
    for begin, end, cause in run["strip"]:
        yield "box", CAUSES.get(cause, _OTHER), across(begin), 70, max(0.3, across(end) - across(begin)), 50
    free = 0.0
    for one in run["attempts"]:
        yield "line", _INK, [(across(one["from"]), 58), (across(one["from"]), 120)]
        if across(one["from"]) >= free:
            text = f"{one['number']} {one['cause']}"
            yield "text", across(one["from"]) + 3, 64, "start", text
            free = across(one["from"]) + 8 * len(text)
    for part in range(5):
        yield "text", across(run["wall_s"] * part / 4), 138, "middle", f"{run['wall_s'] * part / 4:.0f} s"
    found = sorted(((spent, cause) for cause, spent in run["seconds"].items() if spent > 0), reverse=True)
    for at, (spent, cause) in enumerate(found):
        x, y = LEFT + 270 * (at // 5), 170 + 30 * (at % 5)
        yield "box", CAUSES.get(cause, _OTHER), x, y, 18, 14
        yield "text", x + 26, y + 12, "start", f"{cause} {spent:.1f} s, {spent / max(run['wall_s'], 1e-9):.1%}"


def _scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """From values to places; half of each, since the difference of two large ones is no number."""
    if high == low:
        return lambda value: (begin + end) / 2
    return lambda value: begin + (end - begin) * ((value / 2 - low / 2) / (high / 2 - low / 2))


def svg(shapes: Sequence[Shape]) -> str:
    """The picture as SVG."""
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui">',
        "<style>text { font-size: 13px }</style>",
    ]
    rows.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>')
    for kind, *rest in shapes:
        if kind == "line":
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in rest[1])
            rows.append(f'<polyline fill="none" stroke="{rest[0]}" stroke-width="1.5" points="{points}"/>')
        elif kind == "box":
            colour, x, y, width, height = rest
            rows.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{colour}"/>')
        else:
            x, y, anchor, text = rest
            rows.append(
                f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_INK}">{html.escape(text)}</text>'
            )
    return "\n".join([*rows, "</svg>", ""])


def png(shapes: Sequence[Shape], to: Path, scale: int = 2) -> None:
    """Writes the picture as PNG, with twice as many pixels."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH * scale, HEIGHT * scale), "#ffffff")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(13 * scale)
    for kind, *rest in shapes:
        if kind == "line":
            draw.line([(x * scale, y * scale) for x, y in rest[1]], fill=rest[0], width=3)
        elif kind == "box":
            colour, *edges = rest
            x, y, width, height = (edge * scale for edge in edges)
            draw.rectangle((x, y, x + max(0, width - 1), y + height), fill=colour)
        else:
            x, y, anchor, text = rest
            draw.text(
                (x * scale, y * scale),
                text,
                fill=_INK,
                font=font,
                anchor={"start": "ls", "middle": "ms", "end": "rs"}[anchor],
            )
    image.save(to)
