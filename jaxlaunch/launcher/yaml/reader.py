"""Reader for a strict subset of YAML 1.2: one document of plain data with the line of every value.

Anchors, aliases, custom tags and duplicate keys are refused. The data is built from the parser's
events. All faults are reported at once, each with the path of the value that it makes unusable, so
that later checks can skip it.

Scalars are those of the core schema (yaml.org/spec/1.2.2, section 10.3.2). YAML 1.1, which PyYAML
implements, reads `no` as false and `12:30` as 750.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from yaml.reader import ReaderError

from jaxlaunch.launcher.errors import Fault, KeyPath, UserError, keys_overlap
from jaxlaunch.launcher.wording import format_key_path, shorten_text
from jaxlaunch.spelling import find_nearest

# The type of the argument `opener` of `open`.
Opener = Callable[[str, int], int]
# The parser takes 1 s per MiB.
MAX_BYTES = 1024 * 1024
MAX_DEPTH = 64
# A job has about a hundred values.
MAX_VALUES = 10_000
# Faults of overrides sort after those of the file by this line.
LINE_AFTER_FILE = 10**9
_OVERRIDE_SUFFIX = " (override)"

# Without libyaml, PyYAML is ten times slower.
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_REFERENCE_FAULT = (
    "uses an anchor, an alias or a merge key (&, * or <<).",
    "write the value out in each place, or quote it.",
)
_CORE_TAG = "tag:yaml.org,2002:"
# Python types of the core schema's tags.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "null": type(None),
    "map": dict,
    "seq": list,
}


@dataclasses.dataclass
class Document:
    """Plain data with the positions of its values, and the faults of its text.

    Attributes:
        name: Name in messages, usually the path of the file.
        data: Mappings, lists and scalars. None if the text is not YAML.
        lines: Line of each path.
        texts: Plain scalars as written, by path.
        overrides: Arguments of the command line, by the path that each one sets.
        faults: Faults of the text.
    """

    name: str
    data: Any = None
    lines: dict[KeyPath, int] = dataclasses.field(default_factory=dict)
    texts: dict[KeyPath, str] = dataclasses.field(default_factory=dict)
    overrides: dict[KeyPath, str] = dataclasses.field(default_factory=dict)
    faults: list[Fault] = dataclasses.field(default_factory=list)

    def locate(self, fault: Fault) -> Fault:
        """Return the fault with its location: a line, or an override.

        If an override set one of several keys that a fault relies on, the fault is attributed to
        the override, because the file was written for the value that it replaced.
        """
        located = self._locate_path(fault)
        arguments = [
            argument
            for path, argument in self.overrides.items()
            if any(keys_overlap(path, key) for key in fault.related_paths)
        ]
        if not arguments or located.line == LINE_AFTER_FILE:
            return located
        location = f"{', '.join(arguments)}{_OVERRIDE_SUFFIX} with {located.location}"
        return dataclasses.replace(located, location=location, line=LINE_AFTER_FILE)

    def _locate_path(self, fault: Fault) -> Fault:
        if fault.location:
            return fault
        for end in range(len(fault.path), 0, -1):
            path = fault.path[:end]
            if path in self.lines and path not in self.overrides:
                line = self.lines[path]
                return dataclasses.replace(fault, location=f"{self.name}:{line}", line=line)
            # An override may also have created the block.
            for override_path, argument in self.overrides.items():
                if override_path[:end] == path:
                    location = f"{argument}{_OVERRIDE_SUFFIX}"
                    return dataclasses.replace(fault, location=location, line=LINE_AFTER_FILE)
        return dataclasses.replace(fault, location=self.name)

    def forget_path(self, path: KeyPath) -> None:
        """Drop the lines and texts at and below a path that an override has replaced."""
        entries: dict[KeyPath, Any]
        for entries in (self.lines, self.texts, self.overrides):
            for key in [key for key in entries if key[: len(path)] == path]:
                del entries[key]


def read_document(path: Path, opener: Opener | None = None) -> Document:
    """Read a file, or with the path `-` stdin.

    Raises UserError if it cannot be read, is too large or not UTF-8.
    """
    source = Path("/dev/stdin") if str(path) == "-" and not path.exists() else path
    try:
        with open(source, "rb", buffering=0, opener=opener or _open_without_waiting) as file:
            content = _read_content(file)
    except FileNotFoundError:
        hint = "create one with `launcher init`."
        if (neighbour := _find_neighbour(path)) is not None:
            hint = f"did you mean {neighbour}?"
        raise UserError(f"{path}: no such file.", hint) from None
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or 'cannot be read').lower()}.") from None
    if len(content) > MAX_BYTES:
        message = f"{path}: is larger than 1 MiB."
        raise UserError(message, "a job is a page of text; keep data in other files.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"{path}:{line}: is not UTF-8 (byte 0x{content[error.start]:02x})."
        raise UserError(message, "save the file as UTF-8.") from None
    return parse_document(text, str(path))


def _find_neighbour(path: Path) -> Path | None:
    """Return the YAML file in the same folder whose name is nearest, or None."""
    try:
        names = [file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml")]
    except OSError:
        return None
    same_stem = [name for name in names if name.rpartition(".")[0] in (path.stem, path.name)]
    nearest = same_stem or find_nearest(path.name, names)
    return path.with_name(nearest[0]) if nearest else None


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _read_content(file: io.FileIO) -> bytes:
    """Read a file, or a pipe such as `<(command)`, up to one byte more than is allowed.

    Raises OSError for a pipe without a writer.
    """
    # None: a pipe has a writer, which has not written yet.
    chunk = file.read(MAX_BYTES + 1)
    if chunk == b"" and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
        raise OSError(errno.EPIPE, "is a pipe that nothing writes to")
    os.set_blocking(file.fileno(), True)
    content = chunk or b""
    while len(content) <= MAX_BYTES and (chunk := file.read(MAX_BYTES + 1 - len(content))):
        content += chunk
    return content


def parse_document(text: str, name: str, base_path: KeyPath = ()) -> Document:
    """Parse a text into a document with its faults; if it is not YAML, the data is None.

    If the text is a part of another document, `base_path` is its path there, with which all paths
    begin.
    """
    reader = _Reader(name, base_path)
    try:
        reader.read_events(yaml.parse(text, Loader=_LOADER))
    except _Abort:
        pass
    except yaml.MarkedYAMLError as error:
        reader.add_syntax_fault(error, text)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        message = f"contains the control character 0x{code:02x}."
        reader.add_fault((), line, message, "delete it, or write it as an escape.")
    return reader.document


def read_whole_numbers(text: str, paths: Sequence[KeyPath]) -> Mapping[KeyPath, int]:
    """Return the integers at these paths, without those that are missing or of another type."""
    data = parse_document(text, "").data
    numbers: dict[KeyPath, int] = {}
    for path in paths:
        value = data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int) and not isinstance(value, bool):
            numbers[path] = value
    return numbers


class _Abort(Exception):
    """Raised to stop reading, after a fault has been added to the document."""


class _Reader:
    """Builds the data of one document from the parser's events."""

    def __init__(self, name: str, base_path: KeyPath) -> None:
        self.document = Document(name)
        self._base_path = base_path
        self._events: Iterator[Any] = iter(())
        self._value_count = 0
        self._reported: set[tuple[int, str]] = set()

    def add_fault(
        self, path: KeyPath, line: int, message: str, hint: str, not_finite: str | None = None
    ) -> None:
        """Add a fault, once per line and message."""
        if (line, message) not in self._reported:
            self._reported.add((line, message))
            location = f"{self.document.name}:{line}"
            fault = Fault(path, message, hint, location, line, not_finite=not_finite)
            self.document.faults.append(fault)

    def add_syntax_fault(self, error: yaml.MarkedYAMLError, text: str) -> None:
        """Add the fault of a text that is not YAML. The line is not shown: it may be secret."""
        self.document.data = None
        message, hint = _syntax_message(error, text)
        self.add_fault((), _line_number(error.problem_mark), message, hint)

    def read_events(self, events: Iterator[Event]) -> None:
        """Read the first document; a second one is a fault."""
        self._events = events
        for event in events:
            if isinstance(event, NodeEvent):
                self.document.data = self._read_node(event, self._base_path, 0)
                break
        for event in events:
            if isinstance(event, DocumentStartEvent):
                hint = "keep one job in a file; remove the `---`."
                self._abort(_line_number(event.start_mark), "starts a second document.", hint)

    def _abort(self, line: int, message: str, hint: str) -> NoReturn:
        self.add_fault((), line, message, hint)
        raise _Abort

    def _read_node(self, event: NodeEvent, path: KeyPath, depth: int) -> Any:
        line = _line_number(event.start_mark)
        if depth > MAX_DEPTH:
            hint = "no part of a job is; look for a bracket that is never closed."
            self._abort(line, f"is nested deeper than {MAX_DEPTH} levels.", hint)
        self._value_count += 1
        if self._value_count > MAX_VALUES:
            hint = "a job is a page of text; keep data in other files."
            self._abort(line, f"contains more than {MAX_VALUES} values.", hint)
        self.document.lines.setdefault(path, line)
        if event.anchor is not None:
            self.add_fault(path, line, *_REFERENCE_FAULT)
        if isinstance(event, AliasEvent):
            return None
        assert isinstance(event, ScalarEvent | CollectionStartEvent)
        value: Any
        if isinstance(event, ScalarEvent):
            value = self._read_scalar(event, path, line)
        elif isinstance(event, SequenceStartEvent):
            value = []
            while not isinstance(item := next(self._events), SequenceEndEvent):
                value.append(self._read_node(item, (*path, len(value)), depth + 1))
        else:
            value = self._read_mapping(path, depth)
        if event.tag is not None:
            self._check_tag(event.tag, value, path, line)
        return value

    def _check_tag(self, tag: str, value: Any, path: KeyPath, line: int) -> None:
        name = tag.removeprefix(_CORE_TAG)
        expected_type = _TYPES.get(name) if tag.startswith(_CORE_TAG) else None
        if expected_type is None:
            hint = "delete the tag; a job is plain data."
            self.add_fault(path, line, "has a YAML tag (!…).", hint)
        # A bool is an int in Python.
        elif not isinstance(value, expected_type) or isinstance(value, bool) != (name == "bool"):
            self.add_fault(path, line, f"is tagged !!{name} and is not one.", "delete the tag.")

    def _read_scalar(self, event: ScalarEvent, path: KeyPath, line: int) -> Scalar:
        # A quoted or block scalar, or one that is tagged as text.
        if not event.implicit[0] and event.tag in (None, f"{_CORE_TAG}str"):
            return str(event.value)
        self.document.texts[path] = event.value
        try:
            return resolve_scalar(event.value)
        except ValueError as error:
            subject, not_finite = format_key_path(path), None
            if _NOT_FINITE.fullmatch(event.value):
                subject, not_finite = f"{subject} = {shorten_text(event.value)}", event.value
            self.add_fault(path, line, f"{subject} {error}.", "quote it if it is text.", not_finite)
            return None

    def _read_mapping(self, path: KeyPath, depth: int) -> dict[str, Any]:
        block: dict[str, Any] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            line = _line_number(event.start_mark)
            if not isinstance(event, ScalarEvent):
                hint = "quote braces and brackets that are text."
                self.add_fault(path, line, "has a key that is not text.", hint)
                self._skip_node(event, path, depth)
                self._skip_node(next(self._events), path, depth)
                continue
            key = event.value
            if key == "<<" or event.anchor is not None:
                self.add_fault(path, line, *_REFERENCE_FAULT)
            if key in block:
                first_line = self.document.lines[(*path, key)]
                message = f'duplicate key "{shorten_text(key)}", first in line {first_line}.'
                self.add_fault(path, line, message, "keep one of them.")
                self._skip_node(next(self._events), path, depth)
                continue
            self.document.lines[(*path, key)] = line
            block[key] = self._read_node(next(self._events), (*path, key), depth + 1)
        return block

    def _skip_node(self, event: NodeEvent, path: KeyPath, depth: int) -> None:
        """Read a node for its faults alone, and discard its data and lines."""
        document, self.document = self.document, Document(self.document.name)
        try:
            self._read_node(event, path, depth + 1)
        finally:
            document.faults += self.document.faults
            self.document = document


def _line_number(mark: Any) -> int:
    return 1 if mark is None else int(mark.line) + 1


# Pattern of the parser's message, our description of the problem, and a hint. The messages of
# libyaml and of the parser in Python differ.
_SYNTAX: tuple[tuple[str, str, str], ...] = (
    (
        "mapping values are not allowed",
        "a `: ` where none is allowed",
        "quote a value that contains `: `, or end the key above with one.",
    ),
    ("unexpected end of stream", "a quote that is never closed", "close it."),
    (
        "expected ',' or",
        "a bracket that is never closed, or a missing comma",
        "check the line where it was opened.",
    ),
    ("node content", "a bracket that is never closed", "close it."),
    (
        "expected key|<block end>|'-' indicator",
        "an indentation that matches no block",
        "indent all keys of a block alike.",
    ),
    ("expected ':'", "a line that is neither `key: value` nor `- item`", "put `: ` after the key."),
    ("alphabetic or numeric", "a value that begins with `*` or `&`", "quote it."),
    (
        "escape character",
        "an unknown escape in double quotes",
        "use single quotes, or double the backslash.",
    ),
    ("tag handle", "a YAML tag (!…)", "delete the tag; a job is plain data."),
)


def _tab_column(error: yaml.MarkedYAMLError, text: str) -> int | None:
    """Return the 1-based column of the tab at which the parser stopped, or None.

    A tab is wrong in the indentation of a line or an item, and after the colon of a key. Inside
    brackets, lines may be indented with tabs, so the fault is in the bracket.
    """
    mark, lines, problem = error.problem_mark, text.split("\n"), error.problem or ""
    if mark is None or re.search("expected ',' or|node content", problem):
        return None
    if "cannot start any token" in problem and text[mark.index : mark.index + 1] == "\t":
        return int(mark.column) + 1
    line = lines[mark.line] if mark.line < len(lines) else ""
    match = re.match(r"[ -]*\t", line)
    if match is None and "mapping values are not allowed" in problem:
        match = re.match(r"[^'\"#]*?:\t", line)
    return None if match is None else match.end()


def _is_deeper(mark: Any, text: str) -> bool:
    """Return whether a line is indented deeper than the one above, which has a value."""
    lines = text.splitlines()
    if mark is None or mark.line >= len(lines):
        return False
    lines_above = (line for line in reversed(lines[: mark.line]) if line.strip())
    line_above = next((line for line in lines_above if not line.strip().startswith("#")), "")

    def indentation(line: str) -> int:
        return len(line) - len(line.lstrip())

    is_deeper = indentation(lines[mark.line]) > indentation(line_above)
    return is_deeper and ":" in line_above and not line_above.rstrip().endswith(":")


def _syntax_message(error: yaml.MarkedYAMLError, text: str) -> tuple[str, str]:
    """Return the message and the hint for a text that is not YAML."""
    mark, parser_problem = error.problem_mark, error.problem or ""
    if (column := _tab_column(error, text)) is not None:
        return f"is not YAML: a tab in column {column}.", "use spaces instead."
    if "mapping values are not allowed" in parser_problem and _is_deeper(mark, text):
        hint = "look at this line's indentation: keys of one block begin in one column."
        return "is not YAML: it is indented deeper than the line above, which has a value.", hint
    if "cannot start any token" in parser_problem:
        character = "" if mark is None else text[mark.index : mark.index + 1]
        return f"is not YAML: a value that begins with `{character}`.", "quote it."
    first_line, context = _line_number(error.context_mark or mark), ""
    if first_line != _line_number(mark):
        context = f", in a block that begins in line {first_line}"
    for pattern, problem, hint in _SYNTAX:
        if re.search(pattern, parser_problem):
            return f"is not YAML: {problem}{context}.", hint
    return f"is not YAML{context}.", "check the indentation, the quotes and the brackets."


Scalar = str | int | float | bool | None

_CONSTANTS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TWO_READINGS = re.compile(r"[-+]?0[0-9]+")
# int() takes quadratic time, and no number in a job has more digits.
_MAX_INTEGER_DIGITS = 40


def resolve_scalar(text: str) -> Scalar:
    """Return the value of a plain scalar. Raises ValueError for .inf, .nan and long numbers."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > _MAX_INTEGER_DIGITS:
            raise ValueError(f"is a number of {len(text)} digits")
        return int(text, 0 if text.startswith(("0o", "0x")) else 10)
    if _NOT_FINITE.fullmatch(text):
        raise ValueError("is not a finite number")
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise ValueError("is too large for a number")
        return number
    return text


def has_two_readings(text: str) -> bool:
    """Return whether YAML 1.1 and 1.2 read a number differently: 010 is 8 in 1.1 and 10 in 1.2."""
    return _TWO_READINGS.fullmatch(text) is not None
