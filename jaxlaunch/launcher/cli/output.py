"""Output of all commands: results on stdout, messages on stderr, data as JSON or YAML.

Tables are plain columns, as in kubectl, which awk can split. On a terminal, tables and paragraphs
fit its width, and states have colours (`screen_lines`). Most texts come from elsewhere (programs,
logs, the API server), so control characters are escaped. The colours of programs are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from jaxlaunch.launcher.cli import screen_lines
from jaxlaunch.launcher.cli.screen_lines import Colour, Paragraph
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.jobs.logs.lines import Line, Selection
from jaxlaunch.launcher.wording import (
    CONTROL,
    escape_character,
    escape_controls,
    escape_except_colours,
    os_error_reason,
)
from jaxlaunch.launcher.yaml import writer

# Erases the line that the cursor is in.
_ERASE_LINE = "\r\x1b[2K"
# Erases the line above the cursor.
_ERASE_LINE_ABOVE = "\x1b[1A\x1b[2K"
# Moves the cursor to the top of the terminal and erases everything below it.
_CLEAR_SCREEN = "\x1b[H\x1b[J"
# Seconds between two looks of --watch, each of which reads the cluster.
WATCH_PERIOD_S = 5.0
_write_lock = threading.RLock()
# The rows of the status, and the same with colours.
_status = _coloured_status = ""


def show_lines(*lines: str, is_result: bool = True) -> None:
    """Write lines of a result to stdout, or with `is_result=False` to stderr."""
    if lines:
        rows = _render_lines(lines, sys.stdout if is_result else sys.stderr)
        _write_line("\n".join(rows), is_result=is_result)


def _render_lines(lines: Iterable[str], stream: TextIO) -> list[str]:
    """Return the rows of lines on a stream, which may be a terminal."""
    width, has_colours = _stream_width(stream), _has_colours(stream)
    rendered = (screen_lines.render_line(line, width, has_colours=has_colours) for line in lines)
    return [row for rows in rendered for row in rows]


def show_piece(text: str) -> None:
    """Write a piece of a result to stdout, without ending the line."""
    with _write_lock:
        print(escape_controls(text), end="", flush=True)


def show_messages(*messages: str) -> None:
    """Write messages to stderr."""
    for message in messages:
        _write_line(escape_controls(f"launcher: {message}"), is_result=False)


def show_outcome(outcome: str, details: str, colour: Colour | None, *, is_plain: bool) -> None:
    """Write a message about the end of a run to stderr.

    On a terminal it is a paragraph whose outcome has a colour, unless `is_plain`.
    """
    if is_plain:
        show_messages(outcome + details)
        return
    prefix = "launcher: "
    text = prefix + outcome + details
    line = Paragraph(text, indent=len(prefix), coloured=outcome, colour=colour)
    _write_line("\n".join(_render_lines([line], sys.stderr)), is_result=False)


def show_result(value: Any, output_format: str | None, lines: Iterable[str]) -> None:
    """Write `value` as `json` or `yaml`, or `lines` in any other format."""
    if output_format in ("json", "yaml"):
        show_data(value, output_format)
    else:
        show_lines(*lines)


def show_data(value: Any, output_format: str) -> None:
    """Write plain data as `json` or `yaml`."""
    # Other encodings do not have all characters.
    is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
    text = _to_json(value, indent=2, ensure_ascii=not is_utf8)
    if output_format == "yaml":
        text = writer.render_document(json.loads(text)).removesuffix("\n")
    _write_line(text)


def show_documents(values: Iterable[Any]) -> None:
    """Write plain data as several YAML documents, for `kubectl apply -f -`."""
    _write_line(writer.render_documents(values).removesuffix("\n"))


def write_page(path: Path, text: str) -> None:
    """Write a page, and print its path. Raises UserError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"{path} cannot be written: {os_error_reason(error)}."
        raise UserError(message, "name another file with -o.") from None
    show_lines(str(path))


def format_columns(rows: Sequence[Sequence[str]], *, gap: int = 3, indent: str = "") -> list[str]:
    """Return rows as lines with aligned columns, separated by kubectl's gap.

    On a terminal that is narrower, long texts are shortened, and the last columns follow below.
    """
    return [indent + line for line in _join_tables(_fit_table(rows, gap, len(indent)), gap)]


def format_notes(rows: Sequence[Sequence[str]], *, gap: int, indent: str) -> list[str]:
    """Return rows as lines with aligned columns, the last of which has sentences.

    On a terminal that is narrower, they continue in the next row.
    """
    note_column = len(indent) + sum(
        max(map(len, column)) + gap for column in list(zip(*rows, strict=True))[:-1]
    )
    return [Paragraph(indent + line, indent=note_column) for line in _align_columns(rows, gap)]


def _join_tables(tables: Sequence[Sequence[Sequence[str]]], gap: int) -> list[str]:
    """Return the lines of tables, with an empty line between two of them."""
    lines = list[str]()
    for table in tables:
        lines += [*([""] if lines else []), *_align_columns(table, gap)]
    return lines


def _fit_table(
    rows: Sequence[Sequence[str]], gap: int, indent_chars: int = 0
) -> list[list[list[str]]]:
    """Return the tables that show these rows on stdout."""
    if (width := _stream_width(sys.stdout)) is None:
        return [[list(row) for row in rows]]
    return screen_lines.fit_table(rows, width - indent_chars, gap)


def _align_columns(rows: Sequence[Sequence[str]], gap: int) -> list[str]:
    widths = [max(map(len, column)) + gap for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    return ["".join(cells).rstrip() for cells in padded]


def show_table(rows: Sequence[Sequence[str]], state_column: int) -> None:
    """Write rows to stdout as columns. On a terminal some states are coloured.

    The column of the states must be one of the first, which are never moved below.
    """
    gap = 3
    rows = [list(map(escape_controls, row)) for row in rows]
    colours = [screen_lines.colour_of(row[state_column]) for row in rows]
    tables = _fit_table(rows, gap)
    lines = _join_tables(tables, gap)
    if _has_colours(sys.stdout) and state_column < len(tables[0][0]):
        first_columns = list(zip(*tables[0], strict=True))[:state_column]
        begin = sum(max(map(len, column)) + gap for column in first_columns)
        for index, (row, colour) in enumerate(zip(rows, colours, strict=True)):
            if colour is not None:
                end = begin + len(row[state_column])
                text = lines[index]
                lines[index] = f"{text[:begin]}\x1b[{colour:d}m{text[begin:end]}\x1b[0m{text[end:]}"
    if lines:
        _write_line("\n".join(lines))


def _has_colours(stream: TextIO) -> bool:
    is_dumb = os.environ.get("TERM", "dumb") == "dumb"
    return stream.isatty() and not is_dumb and not os.environ.get("NO_COLOR")


def result_width() -> int | None:
    """Return the columns of the terminal that stdout is, or None if it is none."""
    return _stream_width(sys.stdout)


def _stream_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal that a stream is, or None if it is none."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


class _Page(io.TextIOWrapper):
    """Text in memory, written as to another stream: in its encoding, and with its colours."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(io.BytesIO(), encoding=stream.encoding, errors="replace")
        self._stream = stream

    def isatty(self) -> bool:
        """Return whether the other stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the other stream, whose width is that of a terminal."""
        return self._stream.fileno()


def repeat_output(show: Callable[[], object]) -> NoReturn:
    """Show something again and again, until Ctrl-C, on a terminal always at its top."""
    is_terminal, is_first = sys.stdout.isatty(), True
    while True:
        # What is shown is collected first, so that the terminal is never empty for long.
        with contextlib.redirect_stdout(_Page(sys.stdout)) as page:
            show()
        page.seek(0)
        start = _CLEAR_SCREEN if is_terminal else "" if is_first else "\n"
        _write_line(start + page.read().removesuffix("\n"))
        is_first = False
        time.sleep(WATCH_PERIOD_S)


def show_status(*lines: str) -> None:
    """Replace the status lines, which are at the bottom of the terminal that stderr is.

    Paragraphs have as many rows as they need; other lines are cut.
    """
    global _status, _coloured_status
    width, has_colours = status_width(), _has_colours(sys.stderr)
    plain_rows, rows = list[str](), list[str]()
    for line in lines:
        plain = screen_lines.render_line(line, width, has_colours=False)
        coloured = screen_lines.render_line(line, width, has_colours=has_colours)
        for plain_row, row in zip(plain, coloured, strict=True):
            # What is longer than a row is cut, because the block must be easy to erase.
            plain_rows.append(plain_row[:width])
            rows.append(row if len(plain_row) <= width else plain_row[:width])
    with _write_lock:
        erase = _erase_status()
        _status, _coloured_status = "\n".join(plain_rows), "\n".join(rows)
        print(erase + _coloured_status, end="", file=sys.stderr, flush=True)


def _erase_status() -> str:
    """Return the codes that erase the status, which a narrower terminal shows in more rows."""
    width = max(1, terminal_width())
    rows = sum(max(1, -(-len(line) // width)) for line in _status.split("\n"))
    return _ERASE_LINE + (rows - 1) * _ERASE_LINE_ABOVE


def status_width() -> int:
    """Return the columns of a row of the status. The last column of the terminal stays free."""
    return max(1, terminal_width() - 1)


def terminal_width() -> int:
    """Return the columns of the terminal that stderr is. stdout may be a file."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


@dataclasses.dataclass
class LogRow:
    """A line of a log. The line of an agent has no rank."""

    # The time as in RFC 3339, if it is known.
    time: str | None
    generation: int
    host: int
    rank: int | None
    text: str
    # The role of the process, in a job with roles.
    role: str | None = None


class Printer:
    """Writes lines of selected ranks to stdout and lines of agents to stderr, or all as JSON."""

    def __init__(self, selection: Selection, *, as_json: bool = False, role: str = "") -> None:
        """Create the printer. All lines are of processes of `role`, if it is given."""
        self._selection, self._as_json, self._role = selection, as_json, role
        # On a terminal each line of a program begins with its rank, because a program could imitate
        # lines of the launcher.
        is_one_rank = selection.ranks is not None and len(selection.ranks) == 1
        self._is_plain = is_one_rank and not sys.stdout.isatty()

    def show_line(self, line: Line) -> None:
        """Write a line, unless its rank is not selected."""
        if self._role:
            line = dataclasses.replace(line, role=self._role)
        if self._as_json:
            place = line.at or None, line.generation, line.host, line.rank
            row = LogRow(*place, line.text, line.role or None)
            _write_line(_to_json(vars(row), ensure_ascii=False))
        elif line.rank is None:
            _write_line(escape_controls(line.text_with_rank()), is_result=False)
        elif self._selection.matches_any_rank((line.rank,)):
            text = line.text if self._is_plain and not line.role else line.text_with_rank()
            _write_line(escape_except_colours(text))


def _to_json(value: Any, **options: Any) -> str:
    """Return JSON with all characters of CONTROL escaped."""

    def escape(match: re.Match[str]) -> str:
        if match[0] < "\uffff":
            return escape_character(match[0], "\\u{:04x}")
        # Characters beyond 16 bits become surrogate pairs.
        return json.dumps(match[0])[1:-1]

    return CONTROL.sub(escape, json.dumps(value, **options))


def _write_line(line: str, *, is_result: bool = True) -> None:
    with _write_lock:
        if _status:
            print(_erase_status(), end="", file=sys.stderr, flush=True)
        try:
            print(line, file=sys.stdout if is_result else sys.stderr, flush=True)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise UserError(f"The output cannot be written: {error.strerror}.") from None
        if _status:
            print(_coloured_status, end="", file=sys.stderr, flush=True)
