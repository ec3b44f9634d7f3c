"""Lines and tables that fit the width of a terminal, and the colours of states.

A `Paragraph` is broken at words. A table becomes narrower by shortening its longest texts, and if
that is not enough, its last columns follow below. In a pipe both stay as they are, for scripts.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxlaunch.launcher.wording import escape_controls

# Texts in a table are not shortened below this width.
_MIN_TEXT_CHARS = 12
_ELLIPSIS = "…"
# The end of a row inside a shell command, which the shell reads on in the next row.
_CONTINUATION = " \\"
_NUMBER = re.compile(r"[-+]?[\d.,]+.{0,4}")


class Colour(enum.IntEnum):
    """SGR codes of the colours of states."""

    RED = 31
    GREEN = 32
    YELLOW = 33


# The states of jobs, runs, ranks and runs of a sweep that a person looks for, in lower case.
STATE_COLOURS = {
    "done": Colour.GREEN,
    "failed": Colour.RED,
    "held": Colour.RED,
    "killed": Colour.RED,
    **dict.fromkeys(
        ("queued", "creating", "pending", "starting", "gathering", "restarting", "waiting"),
        Colour.YELLOW,
    ),
}


class Paragraph(str):
    """A line that a terminal shows in as many rows as it needs, broken at words.

    Attributes:
        indent: Number of spaces before the second row and those that follow.
        coloured: Part of the text that has a colour.
        colour: Its colour, or None.
        commands: Shell commands in the text. They are not broken if they fit in a row; the rows of
            a longer one end with a backslash, so that it can be copied.
    """

    indent: int
    coloured: str
    colour: Colour | None
    commands: Sequence[str]

    def __new__(
        cls,
        text: str,
        *,
        indent: int = 2,
        coloured: str = "",
        colour: Colour | None = None,
        commands: Sequence[str] = (),
    ) -> Paragraph:
        """Create a paragraph."""
        self = super().__new__(cls, text)
        self.indent, self.coloured, self.colour, self.commands = indent, coloured, colour, commands
        return self


def make_paragraph(line: str) -> Paragraph:
    """Return a line as a paragraph, whose further rows are indented by two spaces more."""
    if isinstance(line, Paragraph):
        return line
    return Paragraph(line, indent=2 + len(line) - len(line.lstrip(" ")))


def render_line(line: str, width: int | None, *, has_colours: bool) -> list[str]:
    """Return the rows of a line, with escaped control characters. Only paragraphs are broken.

    Args:
        line: The text.
        width: Columns of the terminal, or None for a pipe.
        has_colours: Whether to colour the text.
    """
    text = escape_controls(line)
    if not isinstance(line, Paragraph):
        return [text]
    rows = [Row(0, len(text))] if width is None else list(_break_rows(text, line, width))
    coloured = escape_controls(line.coloured)
    colour_begin = text.find(coloured)
    colour_end = colour_begin + len(coloured)
    rendered = []
    for row in rows:
        row_text = text[row.begin : row.end]
        if has_colours and line.colour is not None and colour_begin >= 0:
            left = max(colour_begin, row.begin) - row.begin
            right = min(colour_end, row.end) - row.begin
            if left < right:
                code, middle = f"\x1b[{line.colour:d}m", row_text[left:right]
                row_text = f"{row_text[:left]}{code}{middle}\x1b[0m{row_text[right:]}"
        rendered.append(f"{' ' * row.indent}{row_text}{row.suffix}")
    return rendered


class Row(NamedTuple):
    """A row of a paragraph: the part of the text, and what is before and after it."""

    begin: int
    end: int
    indent: int = 0
    suffix: str = ""


def _break_rows(text: str, line: Paragraph, width: int) -> Iterator[Row]:
    """Yield the rows of a text."""
    whole, continued = set[int](), set[int]()
    for command in map(escape_controls, line.commands):
        begin = text.find(command)
        spaces = (
            {begin + match.start() for match in re.finditer(" ", command)} if begin >= 0 else ()
        )
        (whole if len(command) <= width - line.indent else continued).update(spaces)
    begin = indent = 0
    while len(text) - begin > (room := width - indent):
        places = [
            place
            for place in range(begin + 1, len(text))
            if text[place] == " " and text[begin:place].strip(" ") and place not in whole
        ]
        # A row that ends inside a command has room for the backslash.
        fitting = [
            place
            for place in places
            if place + len(_CONTINUATION) * (place in continued) <= begin + room
        ]
        # A label and its first word stay together where they can.
        fitting = [place for place in fitting if begin or place >= line.indent] or fitting
        # A word that is longer than the terminal is left to the terminal.
        place = fitting[-1] if fitting else places[0] if places else -1
        if place < 0:
            break
        suffix = _CONTINUATION if place in continued else ""
        yield Row(begin, begin + len(text[begin:place].rstrip(" ")), indent, suffix)
        begin = place + len(text[place:]) - len(text[place:].lstrip(" "))
        # A word that fits in the terminal, but not below the indent, begins further to the left.
        room = width - len(text[begin:].partition(" ")[0])
        indent = line.indent if room < 0 else min(line.indent, room)
    if begin < len(text) or begin == 0:
        yield Row(begin, len(text), indent)


def fit_table(rows: Sequence[Sequence[str]], width: int, gap: int) -> list[list[list[str]]]:
    """Return a table as one or more narrower tables, each of which begins with the first column.

    Args:
        rows: Rows of the same length.
        width: Columns of the terminal.
        gap: Number of spaces between two columns.
    """
    if not rows or not rows[0]:
        return [[list(row) for row in rows]]
    columns = [list(column) for column in zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    min_widths = list(map(_min_width, columns, widths))
    tables = list[list[list[str]]]()
    rest = list(range(1, len(columns)))
    while True:
        indices = [0]
        while rest and _width_of([min_widths[i] for i in [*indices, rest[0]]], gap) <= width:
            indices.append(rest.pop(0))
        if len(indices) == 1 and rest:
            # The terminal breaks the rows of a column that is wider than itself.
            indices.append(rest.pop(0))
        fitted = _shrink([widths[i] for i in indices], [min_widths[i] for i in indices], width, gap)
        cells = [
            [_shorten(cell, limit) for cell in columns[i]]
            for i, limit in zip(indices, fitted, strict=True)
        ]
        tables.append([list(row) for row in zip(*cells, strict=True)])
        if not rest:
            return tables


def _min_width(column: Sequence[str], width: int) -> int:
    """Return the width to which a column may be shortened. Numbers are shown in full."""
    values = [cell for cell in column if _NUMBER.fullmatch(cell)]
    return max([min(width, _MIN_TEXT_CHARS), *map(len, values)])


def _width_of(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _shrink(widths: list[int], min_widths: Sequence[int], width: int, gap: int) -> list[int]:
    """Return widths that fit, by making the widest column narrower."""
    widths = list(widths)
    while _width_of(widths, gap) > width:
        shrinkable = [i for i, minimum in enumerate(min_widths) if widths[i] > minimum]
        if not shrinkable:
            break
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
    return widths


def _shorten(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 1].rstrip() + _ELLIPSIS


def colour_of(state: Any) -> Colour | None:
    """Return the colour of a state, or None."""
    return STATE_COLOURS.get(str(state).lower())
