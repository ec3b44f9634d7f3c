"""Reads documents from plain text, JSON lines, Parquet, and the Arrow files that `datasets` writes.

Text and JSON may be compressed by gzip or zstd. A file of JSON has an object on each line, or is
one array of objects, which is read into memory as a whole. A text file is one document; a file
larger than 1 MiB is cut at the ends of lines into several. In the other formats each row is a
document, whose text is in `field`. Errors name the file and the row, counted from 1.

A large file is divided into several units that are read separately: bytes of text and lines, row
groups of Parquet, batches of Arrow. A compressed file is one unit, because it can only be read from
its beginning.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import itertools
import json
import os
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from jaxlaunch.spelling import suggest_name
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.spec.data import TEXT_COMPRESSIONS as COMPRESSIONS
from jaxlaunch.trainer.spec.data import TEXT_KINDS as KINDS
from jaxlaunch.trainer.spec.data import TEXT_PIECE_BYTES as PIECE_BYTES
from jaxlaunch.trainer.text.chat_notes import NoteKind, Notes

# Approximate amount that one process reads at a time.
UNIT_BYTES = 16 << 20
# Approximate maximum of units, because packing each shard reads from all of them.
MAX_UNITS = 4096
# Size of a read.
BLOCK_BYTES = 1 << 20
# Number of rows of a table that are read at a time.
BATCH_ROWS = 1024
# Endings of archives and compressed files that are not supported.
ARCHIVES = (".bz2", ".xz", ".lzma", ".lz4", ".br", ".sz", ".zip", ".7z", ".rar", ".tar", ".tgz")
# Files of `datasets` that contain no rows.
DATASET_FILES = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
FOLDER_SUFFIXES = (*KINDS, ".txt")
# Assumed ratio of the size of a text to its compressed size.
COMPRESSION_RATIO = 4
DEFAULT_FIELD = "text"
REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")


class Part(NamedTuple):
    """A part of a file: bytes, row groups of Parquet, batches of Arrow, or a compressed file."""

    path: str
    # One of text, lines, array, parquet and arrow.
    kind: str
    first: int
    last: int
    # Approximate size of the text, in bytes.
    size: int


class Document(NamedTuple):
    """A text to train on."""

    text: str
    # Number of characters that replace invalid UTF-8.
    replaced: int
    # Ranges of the characters that are targets; None if all are.
    spans: tuple[tuple[int, int], ...] | None = None
    # Hash of the row's value or group, by which it is held out; None for plain text.
    identity: int | None = None
    # Counts of the parts of the row that are not trained (`chat_notes`).
    notes: Mapping[tuple[NoteKind, str], int] = types.MappingProxyType({})
    # Whether the text lacks the special tokens that begin and end it.
    is_plain: bool = False


RowItem = TypeVar("RowItem")
# Values of a row by field.
Values = Mapping[str, Any]
# The number of each row, its values, and the number of characters that replace invalid UTF-8.
Rows = Iterator[tuple[int, Values, int]]


class UnfitRowError(Exception):
    """Raised for a row that cannot become a document. The message is the reason."""


class _InvalidRowError(Exception):
    """Raised for a fault in row `row` of a part, counted from 0."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row = row


def find_files(patterns: str | Sequence[str], key: str = "path") -> list[str]:
    """Return all files that match; a local folder matches its files of rows or text.

    Raises DataError for a folder with several kinds of files, and for unsupported compression.
    """
    expanded: list[str] = []
    for pattern in files.as_list(patterns):
        expanded += _folder_patterns(pattern) if os.path.isdir(pattern) else [pattern]
    paths = files.match_files(expanded, key)
    for path in paths:
        check_compression(path)
    return paths


def check_compression(path: str) -> None:
    """Raise DataError if the name of a file implies unsupported compression."""
    uncompressed = _uncompressed_name(path)
    if _is_compressed(uncompressed):
        raise DataError(
            f"{path} is compressed twice, by its name; decompress it once, to {uncompressed}"
        )
    if (ending := os.path.splitext(uncompressed)[1].lower()) in ARCHIVES:
        hint = "unpack it, or pack its text or JSON lines as .gz or .zst"
        raise DataError(f"{path}: {ending} is not supported; {hint}")
    if uncompressed != path and file_kind(path) in ("parquet", "arrow"):
        problem = "only text and JSON lines are read as .gz or .zst"
        raise DataError(f"{path}: {problem}; unpack it to {uncompressed}")


def check_rows(paths: Sequence[str], content: str) -> None:
    """Raise DataError if one of the files is plain text, which has no rows."""
    for path in paths:
        if file_kind(path) == "text":
            rows = "rows of JSON lines (.jsonl), Parquet or Arrow"
            raise DataError(f"{path} is plain text; {content} are {rows}")


def _folder_patterns(folder: str) -> list[str]:
    """Return the files that the state.json of `datasets` lists, or else those of one kind."""
    visible = (name for name in os.listdir(folder) if not name.startswith("."))
    names = sorted(name for name in visible if name not in DATASET_FILES)
    # `save_to_disk` leaves cache files, which repeat rows, next to the files that it lists. Folders
    # of older versions, and other folders, have no list.
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        state = json.loads(Path(folder, "state.json").read_bytes())
        names = [str(entry["filename"]) for entry in state["_data_files"]] or names
    kinds: dict[str, list[str]] = {}
    for name in names:
        if os.path.splitext(_uncompressed_name(name))[1].lower() in FOLDER_SUFFIXES:
            kinds.setdefault(file_kind(name), []).append(name)
    if len(kinds) > 1:
        examples = (f"{len(names)} of {kind} such as {names[0]}" for kind, names in kinds.items())
        problem = f"{folder} holds files of several kinds: {', '.join(examples)}"
        raise DataError(f"{problem}; name those to read, as {folder}/*.jsonl does")
    matches = [name for names in kinds.values() for name in names]
    return [os.path.join(glob.escape(folder), glob.escape(name)) for name in matches] or [folder]


def file_kind(path: str) -> str:
    """Return the format of a file by its name."""
    return KINDS.get(os.path.splitext(_uncompressed_name(path))[1].lower(), "text")


def is_table(path: str) -> bool:
    """Return whether a file is compressed, Parquet or Arrow, and not plain bytes of text."""
    return _is_compressed(path) or file_kind(path) in ("parquet", "arrow")


def _uncompressed_name(path: str) -> str:
    stem, ending = os.path.splitext(path)
    return stem if ending.lower() in COMPRESSIONS else path


def _is_compressed(path: str) -> bool:
    return _uncompressed_name(path) != path


def split_units(paths: Sequence[str]) -> list[list[Part]]:
    """Group the parts of the files, in order, into units of about 16 MiB or more.

    Raises DataError for an empty file of rows, and for an invalid Parquet or Arrow file.
    """
    parts = list(itertools.chain.from_iterable(map(_split_file, paths)))
    unit_bytes = max(UNIT_BYTES, -(-sum(part.size for part in parts) // MAX_UNITS))
    units: list[list[Part]] = []
    size = 0
    for part in parts:
        if not units or size + part.size > unit_bytes:
            units.append([])
            size = 0
        units[-1].append(part)
        size += part.size
    return units


def _split_file(path: str) -> Iterator[Part]:
    kind, size = file_kind(path), files.file_size(path)
    if not size and (kind != "text" or _is_compressed(path)):
        raise DataError(f"{path} is empty: it has no rows; leave it out, or write it again")
    if _is_compressed(path):
        kind = "array" if kind == "lines" and _is_array(path) else kind
        yield Part(path, kind, 0, size, size * COMPRESSION_RATIO)
    elif kind == "parquet":
        metadata = _open_parquet(path).metadata
        for number in range(metadata.num_row_groups):
            yield Part(path, kind, number, number + 1, metadata.row_group(number).total_byte_size)
    elif kind == "arrow":
        yield from _split_arrow(path)
    elif kind == "lines" and _is_array(path):
        yield Part(path, "array", 0, size, size)
    else:
        for first in range(0, size, UNIT_BYTES):
            last = min(first + UNIT_BYTES, size)
            yield Part(path, kind, first, last, last - first)


def _is_array(path: str) -> bool:
    """Return whether a file of JSON is an array, by its first character."""
    with files.report_damage(path, "is truncated or damaged"), _open_stream(path) as file:
        beginning = file.read(BLOCK_BYTES).removeprefix(codecs.BOM_UTF8)
    return beginning.lstrip()[:1] == b"["


def _split_arrow(path: str) -> Iterator[Part]:
    """Group batches to the size of a unit. A file without batches is one part, to be checked."""
    first = size = last = 0
    with files.report_damage(path, "is damaged"):
        for last, batch in enumerate(_open_arrow(path)[1], 1):
            size += batch.nbytes
            if size >= UNIT_BYTES:
                yield Part(path, "arrow", first, last, size)
                first, size = last, 0
    if first < last or not last:
        yield Part(path, "arrow", first, last, size)


def read_documents(
    part: Part,
    field: str | None,
    make_document: Callable[[Values], Document] | None = None,
    optional_fields: Sequence[str] = (),
    group: str | None = None,
) -> Iterator[Document]:
    """Yield the documents of a part in order, including empty ones. Raises DataError.

    `make_document` converts rows to documents; by default their text is in `field`. Without a
    `field` it reads any of the `optional_fields`. Plain text has no rows. `group` is the field of
    each row's group.
    """
    if part.kind == "text":
        with _report_faults(part):
            yield from _read_pieces(part)
        return
    if make_document is None:
        field = field or DEFAULT_FIELD
    make = make_document or partial(_make_document, field or DEFAULT_FIELD)
    read_fields = optional_fields if field is None else (field, *optional_fields)

    def make_with_identity(values: Values) -> Document:
        if group is None:
            document = make(values)
            if document.identity is None and field is not None:
                document = document._replace(identity=splits.hash_value(values[field]))
            return document
        identity, values = split_group(values, group, read_fields)
        return make(values)._replace(identity=identity)

    names = (*optional_fields, group) if group else optional_fields
    for document, replaced in read_rows(part, field, make_with_identity, names):
        yield document._replace(replaced=document.replaced + replaced)


def split_group(values: Values, group: str, read_fields: Sequence[str]) -> tuple[int, Values]:
    """Return the hash of a row's group, and the row without it, unless it is one of `read_fields`.

    Raises UnfitRowError if the row has no group.
    """
    value = values.get(group)
    if value is None or value == "":
        names = ", ".join(name for name in values if values[name] is not None)
        raise UnfitRowError(f"it has no group {group!r}; it has {names}")
    remaining = {name: values[name] for name in values if name != group or name in read_fields}
    return splits.hash_value(value), remaining


def read_rows(
    part: Part,
    field: str | None,
    make_item: Callable[[Values], RowItem],
    optional_fields: Sequence[str] = (),
) -> Iterator[tuple[RowItem, int]]:
    """Yield `make_item` of each row, and the number of characters that replace invalid UTF-8.

    The values of a row are those of `field`, which each row must have if it is given, and of the
    `optional_fields` that exist; other columns of a table are None. `make_item` may raise
    UnfitRowError. Raises DataError with file and row.
    """
    with _report_faults(part):
        if part.kind in ("lines", "array"):
            rows = _check_objects(_read_json(part), field)
        else:
            rows = _read_table(part, field, optional_fields)
        for number, values, replaced in rows:
            try:
                yield make_item(values), replaced
            except UnfitRowError as error:
                raise _InvalidRowError(number, str(error)) from None


@contextlib.contextmanager
def _report_faults(part: Part) -> Iterator[None]:
    problem = "is truncated or damaged" if _is_compressed(part.path) else "is damaged"
    try:
        with files.report_damage(part.path, problem):
            yield
    except _InvalidRowError as error:
        row = error.row + 1 + _count_rows_before(part)
        raise DataError(f"{part.path}, row {row}: {error}") from None


def _count_rows_before(part: Part) -> int:
    """Count the rows of the file before the part, for an error message."""
    if part.kind in ("parquet", "arrow"):
        return _count_rows(part, 0, part.first)
    if part.kind != "lines" or not part.first:
        return 0
    # The line that contains the byte before the part is an earlier row.
    count, remaining = 1, part.first - 1
    with _open_stream(part.path) as file:
        while block := file.read(min(BLOCK_BYTES, remaining)):
            count, remaining = count + block.count(b"\n"), remaining - len(block)
    return count


def _count_rows(part: Part, first: int, last: int) -> int:
    """Count the rows in the row groups or batches `first` to `last` of a table."""
    if part.kind == "parquet":
        metadata = _open_parquet(part.path).metadata
        return sum(metadata.row_group(number).num_rows for number in range(first, last))
    batches = itertools.islice(_open_arrow(part.path)[1], first, last)
    return sum(batch.num_rows for batch in batches)


def _make_document(field: str, values: Values) -> Document:
    value = values[field]
    if isinstance(value, bytes):
        return decode_text(value)
    if not isinstance(value, str):
        raise UnfitRowError(f"its field {field!r} is {describe_value(value)}, not a text")
    return Document(*replace_surrogates(value))


def replace_surrogates(text: str) -> tuple[str, int]:
    """Replace lone surrogates, which JSON may contain, by U+FFFD. Return text and count."""
    return (text, 0) if text.isascii() else _SURROGATE.subn(REPLACEMENT, text)


def decode_text(data: bytes) -> Document:
    """Decode UTF-8, replacing and counting invalid bytes."""
    try:
        return Document(data.decode(), 0)
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        return Document(text, text.count(REPLACEMENT) - data.count(REPLACEMENT.encode()))


def describe_value(value: Any) -> str:
    """Describe a JSON value in words."""
    names = {dict: "an object", list: "a list", bool: "true or false", str: "a text"}
    return names.get(type(value), "null" if value is None else f"the number {value}")


# --- text and lines -------------------------------------------------------------------------------


def _open_stream(path: str) -> BinaryIO:
    compression = COMPRESSIONS.get(os.path.splitext(path)[1].lower())
    if compression is None:
        return open(files.local_path(path), "rb", buffering=0)
    import pyarrow

    stream: BinaryIO = pyarrow.input_stream(files.local_path(path), compression=compression)
    return stream


def _read_pieces(part: Part) -> Iterator[Document]:
    """Yield pieces of up to 1 MiB, which end at the end of a line if there are lines."""
    pending = b""
    for block in _whole_lines(part):
        pending += block
        while len(pending) > PIECE_BYTES:
            end = pending.rfind(b"\n", 0, PIECE_BYTES) + 1
            if not end:
                # The text has no lines. Do not cut within a character.
                end = PIECE_BYTES
                while end > PIECE_BYTES - 4 and pending[end] & 0xC0 == 0x80:
                    end -= 1
            yield decode_text(pending[:end])
            pending = pending[end:]
    if pending:
        yield decode_text(pending)


def join_texts(prompt: str, text: str) -> Document:
    """Return the document of a prompt and the text after it, which is its target."""
    full_text, replaced = replace_surrogates(prompt + text)
    return Document(full_text, replaced, ((len(prompt), len(full_text)),), is_plain=True)


def _read_json(part: Part) -> Iterator[tuple[int, Any, int]]:
    """Yield the values of an array, or of each line that is not blank.

    A line belongs to the part where it begins.
    """
    if part.kind == "array":
        with _open_stream(part.path) as file:
            decoded = decode_text(file.read().removeprefix(codecs.BOM_UTF8))
        try:
            values = json.loads(decoded.text)
        except (ValueError, RecursionError) as error:
            raise _InvalidRowError(0, f"the array is not JSON: {error}") from None
        for number, value in enumerate(values):
            yield number, value, 0 if number else decoded.replaced
        return
    for number, line in enumerate(_split_lines(part)):
        if not number and not part.first:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        decoded = decode_text(line)
        try:
            row = json.loads(decoded.text)
        except (ValueError, RecursionError) as error:
            problem = f"it is not JSON: {error}; a file of JSON lines has one object a line"
            raise _InvalidRowError(number, problem) from None
        yield number, row, decoded.replaced


def _check_objects(rows: Iterator[tuple[int, Any, int]], field: str | None) -> Rows:
    """Yield the rows that are objects and have the field. Raises _InvalidRowError."""
    for number, row, replaced in rows:
        if not isinstance(row, dict):
            expected = "an object" if field is None else f"an object with the field {field!r}"
            raise _InvalidRowError(number, f"it is {describe_value(row)}, not {expected}")
        if field is not None and field not in row:
            names = [str(name) for name in row]
            problem = f"it has no field {field!r}{suggest_name(field, names)}"
            raise _InvalidRowError(number, f"{problem}; it has {', '.join(names) or 'none'}")
        yield number, row, replaced


def _split_lines(part: Part) -> Iterator[bytes]:
    pending = b""
    for block in _whole_lines(part):
        *lines, pending = (pending + block).split(b"\n")
        yield from lines
    if pending:
        yield pending


def _whole_lines(part: Part) -> Iterator[bytes]:
    """Yield the bytes of the lines that begin in a part, in blocks."""
    first, last = (0, None) if _is_compressed(part.path) else (part.first, part.last)
    with _open_stream(part.path) as file:
        offset = max(first - 1, 0)
        if first:
            file.seek(offset)
        block = file.read(BLOCK_BYTES)
        while first and block and not (line_end := block.find(b"\n") + 1):
            offset, block = offset + len(block), file.read(BLOCK_BYTES)
        if first and block:
            offset, block = offset + line_end, block[line_end:] or file.read(BLOCK_BYTES)
        # Whether a line that began before `last` continues in the next block.
        is_line_open = False
        while block and (last is None or offset < last or is_line_open):
            is_last = last is not None and offset + len(block) >= last
            end = block.find(b"\n", max((last or 0) - 1 - offset, 0)) + 1 if is_last else 0
            yield block[:end] if end else block
            if end:
                return
            offset, is_line_open, block = offset + len(block), True, file.read(BLOCK_BYTES)


# --- tables ---------------------------------------------------------------------------------------


def _open_parquet(path: str) -> Any:
    from pyarrow import parquet

    with files.report_damage(path, "is not a Parquet file, or is truncated or damaged"):
        return parquet.ParquetFile(files.local_path(path))


def _open_arrow(path: str) -> tuple[Any, Iterator[Any]]:
    """Return the schema and the batches of a mapped file; skipped batches are not read."""
    import pyarrow

    return files.arrow_batches(pyarrow.memory_map(files.local_path(path)))


def note_columns(parts: Sequence[Part], fields: Sequence[str]) -> Notes:
    """Count the rows of tables that have columns other than `fields`, by column."""
    notes: Notes = Counter()
    for part in parts:
        names: list[str] = []
        if part.kind == "parquet":
            names = _open_parquet(part.path).schema_arrow.names
        elif part.kind == "arrow":
            names = _open_arrow(part.path)[0].names
        unread = [name for name in names if name not in fields]
        rows = _count_rows(part, part.first, part.last) if unread else 0
        notes.update({(NoteKind.UNREAD_FIELD, name): rows for name in unread})
    return notes


def _read_table(part: Part, field: str | None, optional_fields: Sequence[str]) -> Rows:
    if part.kind == "parquet":
        file = _open_parquet(part.path)
        schema = file.schema_arrow
        columns = _choose_columns(part.path, schema, field, optional_fields)
        groups = list(range(part.first, part.last))
        batches = file.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns)
    else:
        schema, batches = _open_arrow(part.path)
        columns = _choose_columns(part.path, schema, field, optional_fields)
        batches = itertools.islice(batches, part.first, part.last)
    # Rows that need no field are recognized by their columns, and errors name them all.
    others = {} if field is not None else dict.fromkeys(schema.names)
    first_row = 0
    for batch in batches:
        if not columns:
            yield first_row, others, 0
            return
        values, counts = zip(*(_column_values(batch.column(name)) for name in columns), strict=True)
        for number, row in enumerate(zip(*values, strict=True)):
            replaced = sum(count[number] for count in counts if count)
            yield first_row + number, others | dict(zip(columns, row, strict=True)), replaced
        first_row += batch.num_rows


def _choose_columns(
    path: str, schema: Any, field: str | None, optional_fields: Sequence[str]
) -> list[str]:
    import pyarrow

    columns = [name for name in optional_fields if name in schema.names and name != field]
    if field is not None and field not in schema.names:
        problem = f"has no column {field!r}{suggest_name(field, schema.names)}"
        raise DataError(f"{path} {problem}; it has {', '.join(schema.names)}")
    columns = columns if field is None else [field, *columns]
    for name in columns:
        if (count := schema.names.count(name)) > 1:
            raise DataError(f"{path} has {count} columns {name!r}; rename all but one")
    if field is None:
        return columns
    kind, types = schema.field(field).type, pyarrow.types
    # pandas writes categories as dictionary columns.
    value_type = kind.value_type if types.is_dictionary(kind) else kind
    checks = (types.is_integer, types.is_floating, types.is_boolean, types.is_temporal)
    if any(is_of_kind(value_type) for is_of_kind in checks):
        raise DataError(f"{path}: its column {field!r} is of {kind}, not of text")
    return columns


def _column_values(column: Any) -> tuple[list[Any], list[int]]:
    """Return the values of a column and, if some are invalid UTF-8, the numbers of replacements.

    Structs have only the keys whose value is not null. Raises ValueError for a damaged column,
    because a wrong offset in a mapped file would crash the process.
    """
    import pyarrow

    binary_types = {
        pyarrow.string(): pyarrow.binary(),
        pyarrow.large_string(): pyarrow.large_binary(),
    }
    as_bytes = column.view(binary_types[column.type]) if column.type in binary_types else column
    as_bytes.validate(full=True)
    try:
        values = column.to_pylist(maps_as_pydicts="strict")
    except UnicodeDecodeError:
        if column.type not in binary_types:
            raise
        texts = [None if value is None else decode_text(value) for value in as_bytes.to_pylist()]
        counts = [text.replaced if text else 0 for text in texts]
        return [text and text.text for text in texts], counts
    if pyarrow.types.is_nested(column.type):
        values = [_remove_absent(value, column.type) for value in values]
    return values, []


def _remove_absent(value: Any, kind: Any) -> Any:
    """Remove the nulls that a struct of a table has for keys that are missing in the row.

    Nulls in lists and maps are values of the row.
    """
    import pyarrow

    types = pyarrow.types
    if value is None or not types.is_nested(kind):
        return value
    if types.is_struct(kind):
        fields = ((field.name, field.type) for field in kind if value.get(field.name) is not None)
        return {name: _remove_absent(value[name], field_type) for name, field_type in fields}
    if types.is_map(kind):
        return {key: _remove_absent(item, kind.item_type) for key, item in value.items()}
    if hasattr(kind, "value_type"):
        return [_remove_absent(item, kind.value_type) for item in value]
    return value
