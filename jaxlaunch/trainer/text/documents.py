"""Documents of files: plain text, JSON lines, Parquet, and the Arrow files that `datasets` writes.

Text and lines may be packed by gzip or zstd.
A file of text is one document, and one above PIECE bytes is cut at ends of lines into several. In the others a row is a
document: the text under `field`. What cannot be read is said with the file and the row, counted from 1.

A large file is of several units, each read by itself: bytes of text and lines, row groups of Parquet, batches of Arrow.
One that is packed is of one, since it can only be read from its beginning.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple, TypeVar

from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.errors import DataError, TrainerError

PIECE = 1 << 20  # bytes of a document of plain text
UNIT = 16 << 20  # bytes that one process reads at a time, or more
MOST_UNITS = 4096  # of a corpus, about: every shard is made of some of each
BLOCK = 1 << 20  # bytes of a read
ROWS = 1024  # of a table read at a time
PACKED = {".gz": "gzip", ".zst": "zstd"}
KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
ARCHIVES = (".bz2", ".xz", ".lzma", ".lz4", ".br", ".sz", ".zip", ".7z", ".rar", ".tar", ".tgz")  # not read
ABOUT = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")  # of `datasets`: no rows
IN_FOLDER = (".arrow", ".parquet", ".jsonl", ".ndjson", ".json", ".txt")
GROWTH = 4  # how many times its bytes a compressed file is taken for
FIELD = "text"
REPLACED = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")


class Part(NamedTuple):
    """A part of a file: bytes of text and lines, row groups of Parquet, batches of Arrow; what is packed is whole."""

    path: str
    kind: str  # text, lines, parquet or arrow
    first: int
    last: int
    size: int  # bytes of text, about


class Document(NamedTuple):
    """A text, how many of its characters stand for bytes that are no UTF-8, and those, from and to, that are targets.

    All are where `spans` is None.
    """

    text: str
    replaced: int
    spans: tuple[tuple[int, int], ...] | None = None


Made = TypeVar("Made")
Values = Mapping[str, Any]  # of a row, by field


class Unfit(Exception):
    """Why a row is no document."""


class _Wrong(Exception):
    """What is wrong with row `row` of a part, counted from 0."""

    def __init__(self, row: int, what: str) -> None:
        super().__init__(what)
        self.row = row


def found(patterns: str | Sequence[str], key: str = "path") -> list[str]:
    """All files that match; of a folder here, as `datasets` saves one, those that hold rows or text.

    Raises DataError for a folder of several kinds, and for a file that is packed in a way that is not read.
    """
    wanted: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        wanted += _of_folder(pattern) if os.path.isdir(pattern) else [pattern]
    matched = files.match_files(wanted, key)
    for path in matched:
        check_packing(path)
    return matched


def check_packing(path: str) -> None:
    """Raises DataError for a file that is packed in a way that is not read, by its name."""
    inner = _unpacked(path)
    if _unpacked(inner) != inner:
        raise DataError(f"{path} is packed twice by its name; unpack it once, to {inner}")
    if (ending := os.path.splitext(inner)[1].lower()) in ARCHIVES:
        raise DataError(f"{path}: {ending} is not read; unpack it, or pack its text or JSON lines as .gz or .zst")
    if inner != path and kind_of(path) in ("parquet", "arrow"):
        raise DataError(f"{path}: only text and JSON lines are read as .gz or .zst; unpack it to {inner}")


def _of_folder(folder: str) -> list[str]:
    """Patterns of what a folder holds: the files that `datasets` lists in its state.json, else those of one kind."""
    names = sorted(name for name in os.listdir(folder) if not name.startswith(".") and name not in ABOUT)
    kinds: dict[str, list[str]] = {}
    for name in _listed(folder) or names:
        ending = os.path.splitext(_unpacked(name))[1].lower()
        if ending in IN_FOLDER:
            kinds.setdefault(kind_of(name), []).append(name)
    if len(kinds) > 1:
        said = ", ".join(f"{len(each)} of {kind} such as {each[0]}" for kind, each in kinds.items())
        raise DataError(f"{folder} holds files of several kinds: {said}; name those to read, as {folder}/*.jsonl does")
    return [os.path.join(glob.escape(folder), glob.escape(name)) for each in kinds.values() for name in each] or [
        folder
    ]


def _listed(folder: str) -> list[str]:
    """The files of rows of a folder that `save_to_disk` wrote; beside them lie caches, which hold rows again."""
    try:
        with open(os.path.join(folder, "state.json"), "rb") as file:
            return [str(each["filename"]) for each in json.load(file)["_data_files"]]
    except (FileNotFoundError, ValueError, TypeError, KeyError):  # none of `datasets`, or of an older one
        return []


def kind_of(path: str) -> str:
    """How a file is read, by its name."""
    return KINDS.get(os.path.splitext(_unpacked(path))[1].lower(), "text")


def is_table(path: str) -> bool:
    """Whether a file is none whose bytes are the text: compressed, or of Parquet or Arrow."""
    return _unpacked(path) != path or kind_of(path) in ("parquet", "arrow")


def _unpacked(path: str) -> str:
    stem, ending = os.path.splitext(path)
    return stem if ending.lower() in PACKED else path


def units(paths: Sequence[str]) -> list[list[Part]]:
    """The parts of the files in order, in groups of about UNIT bytes, or of more: a function of the files alone.

    Raises DataError for an empty file of rows, and for what is no Parquet or Arrow file.
    """
    parts = list(itertools.chain.from_iterable(map(_parts, paths)))
    most = max(UNIT, -(-sum(part.size for part in parts) // MOST_UNITS))
    made: list[list[Part]] = []
    size = 0
    for part in parts:
        if not made or size + part.size > most:
            made.append([])
            size = 0
        made[-1].append(part)
        size += part.size
    return made


def _parts(path: str) -> Iterator[Part]:
    kind, size = kind_of(path), files.file_size(path)
    if not size and (kind != "text" or _unpacked(path) != path):
        raise DataError(f"{path} is empty: it has no rows; leave it out, or write it again")
    if _unpacked(path) != path:
        yield Part(path, kind, 0, size, size * GROWTH)
    elif kind == "parquet":
        about = _parquet(path).metadata
        for number in range(about.num_row_groups):
            yield Part(path, kind, number, number + 1, about.row_group(number).total_byte_size)
    elif kind == "arrow":
        yield from _parts_of_arrow(path)
    else:
        for first in range(0, size, UNIT):
            last = min(first + UNIT, size)
            yield Part(path, kind, first, last, last - first)


def _parts_of_arrow(path: str) -> Iterator[Part]:
    """Batches of about UNIT bytes together; of a file without any an empty part, whose columns are judged too."""
    first = size = last = 0
    try:
        for last, batch in enumerate(_batches(path)[1], 1):
            size += batch.nbytes
            if size >= UNIT:
                yield Part(path, "arrow", first, last, size)
                first, size = last, 0
    except _of_damage() as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if first < last or not last:
        yield Part(path, "arrow", first, last, size)


def read(
    part: Part, field: str | None, made: Callable[[Values], Document] | None = None, also: Sequence[str] = ()
) -> Iterator[Document]:
    """The documents of a part in order, empty ones among them. Raises DataError naming file and row.

    `made` makes them of `rows`, whose `field` is their text without it; plain text has no rows.
    """
    if part.kind == "text":
        with _named(part):
            yield from _text(part)
        return
    for document, replaced in rows(part, field or FIELD, made or partial(_plain, field or FIELD), also):
        yield document._replace(replaced=document.replaced + replaced) if replaced else document


def rows(
    part: Part, field: str, made: Callable[[Values], Made], also: Sequence[str] = ()
) -> Iterator[tuple[Made, int]]:
    """What `made`, which raises Unfit, makes of each row of a part that is no plain text, and how many of its
    characters stand for bytes that are no UTF-8.

    A row has `field`, and those of `also` that are there. Raises DataError naming file and row.
    """
    reads = {"lines": _lines, "parquet": _rows_of_parquet, "arrow": _rows_of_arrow}[part.kind]
    with _named(part):
        for number, values, replaced in reads(part, field, also):
            try:
                yield made(values), replaced
            except Unfit as error:
                raise _Wrong(number, str(error)) from None


@contextlib.contextmanager
def _named(part: Part) -> Iterator[None]:
    """Raises DataError for what is wrong in a part, with the file's name and the row."""
    try:
        yield
    except TrainerError:
        raise
    except _Wrong as wrong:
        raise DataError(f"{part.path}, row {wrong.row + 1 + _rows_before(part)}: {wrong}") from None
    except _of_damage() as error:
        packing = "truncated or damaged" if _unpacked(part.path) != part.path else "damaged"
        raise DataError(f"{part.path} is {packing}: {error}") from error


def _plain(field: str, values: Values) -> Document:
    value = values[field]
    if isinstance(value, bytes):
        return decoded(value)
    if not isinstance(value, str):
        raise Unfit(f"its field {field!r} is {kind_of_value(value)}, not a text")
    return Document(*without_surrogates(value))


# --- text and lines ---------------------------------------------------------------------------------------------------


def _stream(path: str) -> BinaryIO:
    packing = PACKED.get(os.path.splitext(path)[1].lower())
    if packing is None:
        return open(files.local_path(path), "rb", buffering=0)
    import pyarrow

    opened: BinaryIO = pyarrow.input_stream(files.local_path(path), compression=packing)
    return opened


def _text(part: Part) -> Iterator[Document]:
    """Pieces of up to about PIECE bytes, each but the last ending with a line where there are lines."""
    rest = b""
    with _stream(part.path) as file:
        for block in _whole_lines(file, part.first, None if _unpacked(part.path) != part.path else part.last):
            rest += block
            while len(rest) > PIECE:
                cut = rest.rfind(b"\n", 0, PIECE) + 1 or _character(rest)
                yield decoded(rest[:cut])
                rest = rest[cut:]
    if rest:
        yield decoded(rest)


def _whole_lines(file: BinaryIO, first: int, last: int | None) -> Iterator[bytes]:
    """The bytes of the lines that begin at `first` … `last` − 1, block by block; one that began before is left out."""
    at = max(first - 1, 0)
    if first:
        file.seek(at)
    block = file.read(BLOCK)
    while first and block and not (cut := block.find(b"\n") + 1):
        at, block = at + len(block), file.read(BLOCK)
    if first and block:
        at, block = at + cut, block[cut:] or file.read(BLOCK)
    is_open = False  # in a line that began before `last`
    while block and (last is None or at < last or is_open):
        is_last = last is not None and at + len(block) >= last
        end = block.find(b"\n", max((last or 0) - 1 - at, 0)) + 1 if is_last else 0
        yield block[:end] if end else block
        if end:
            return
        at, is_open, block = at + len(block), True, file.read(BLOCK)


def _character(data: bytes) -> int:
    """Where a character begins at or before PIECE: no character of a text without lines is cut."""
    at = PIECE
    while at > PIECE - 4 and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _lines(part: Part, field: str, also: Sequence[str]) -> Iterator[tuple[int, Values, int]]:
    """One row a line; blank lines are none. A line belongs to the part in which it begins."""
    with _stream(part.path) as file:
        is_whole = _unpacked(part.path) != part.path
        for number, line in enumerate(_split(file, 0, None) if is_whole else _split(file, part.first, part.last)):
            if not number and not part.first:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, *_of_line(line, field, number)


def _split(file: BinaryIO, first: int, last: int | None) -> Iterator[bytes]:
    """The lines that begin at `first` … `last` − 1; a first one that began before is not among them."""
    rest = b""
    for block in _whole_lines(file, first, last):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _of_line(line: bytes, field: str, number: int) -> tuple[Values, int]:
    text = decoded(line)
    try:
        row = json.loads(text.text)
    except (ValueError, RecursionError) as error:
        raise _Wrong(number, f"it is not JSON: {error}; a file of JSON lines has one object a line") from None
    if not isinstance(row, dict):
        raise _Wrong(number, f"it is {kind_of_value(row)}, not an object with the field {field!r}")
    if field not in row:
        raise _Wrong(number, f"it has no field {field!r}; it has {', '.join(map(str, row)) or 'none'}")
    return row, text.replaced


def without_surrogates(text: str) -> tuple[str, int]:
    """The text with U+FFFD for each half of a pair, which JSON may escape alone, and how many there were."""
    return (text, 0) if text.isascii() else _SURROGATE.subn(REPLACED, text)


def decoded(data: bytes) -> Document:
    """The text of UTF-8; what is none becomes U+FFFD, and is counted."""
    try:
        return Document(data.decode(), 0)
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        return Document(text, text.count(REPLACED) - data.count(REPLACED.encode()))


def _rows_before(part: Part) -> int:
    """Rows of the file before the part, found only when one of its rows is wrong."""
    if part.kind == "parquet":
        about = _parquet(part.path).metadata
        return sum(about.row_group(number).num_rows for number in range(part.first))
    if part.kind == "arrow":
        return sum(batch.num_rows for batch in itertools.islice(_batches(part.path)[1], part.first))
    if part.kind != "lines" or not part.first:
        return 0
    count, at = 1, 0  # the line that the part's first byte is of, or that ends before it, began before
    with _stream(part.path) as file:
        while at < part.first - 1 and (block := file.read(min(BLOCK, part.first - 1 - at))):
            count, at = count + block.count(b"\n"), at + len(block)
    return count


# --- tables -----------------------------------------------------------------------------------------------------------


def _parquet(path: str) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(files.local_path(path))
    except (OSError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the file system's
            raise
        raise DataError(f"{path} is not a Parquet file, or is truncated or damaged: {error}") from None


def _rows_of_parquet(part: Part, field: str, also: Sequence[str]) -> Iterator[tuple[int, Values, int]]:
    file = _parquet(part.path)
    chosen = _columns(part.path, file.schema_arrow, field, also)
    yield from _numbered(file.iter_batches(ROWS, row_groups=list(range(part.first, part.last)), columns=chosen), chosen)


def _rows_of_arrow(part: Part, field: str, also: Sequence[str]) -> Iterator[tuple[int, Values, int]]:
    schema, batches = _batches(part.path)
    chosen = _columns(part.path, schema, field, also)
    yield from _numbered(itertools.islice(batches, part.first, part.last), chosen)


def _batches(path: str) -> tuple[Any, Iterator[Any]]:
    """Schema and batches of the streaming format, which `datasets` writes, or of the file format.

    The file is mapped: a batch that is passed over is not read. Raises what pyarrow raises, OSError and ValueError.
    """
    import pyarrow

    return files.arrow_batches(pyarrow.memory_map(files.local_path(path)))


def _columns(path: str, schema: Any, field: str, also: Sequence[str]) -> list[str]:
    """The columns to read. Raises DataError where `field` is not there, there twice, or of numbers."""
    import pyarrow

    if field not in schema.names:
        raise DataError(f"{path} has no column {field!r}; it has {', '.join(schema.names)}")
    chosen = [field, *(name for name in also if name in schema.names and name != field)]
    if twice := next((name for name in chosen if schema.names.count(name) > 1), None):
        raise DataError(f"{path} has {schema.names.count(twice)} columns {twice!r}; rename all but one")
    kind, types = schema.field(field).type, pyarrow.types
    plain = kind.value_type if types.is_dictionary(kind) else kind  # pandas writes categories so
    if any(is_of(plain) for is_of in (types.is_integer, types.is_floating, types.is_boolean, types.is_temporal)):
        raise DataError(f"{path}: its column {field!r} is of {kind}, not of text")
    return chosen


def _numbered(batches: Any, columns: list[str]) -> Iterator[tuple[int, Values, int]]:
    first = 0
    for batch in batches:
        read = [_values(batch.column(name)) for name in columns]
        for number in range(batch.num_rows):
            values = {name: found[number] for name, (found, _) in zip(columns, read, strict=True)}
            yield first + number, values, sum(replaced[number] for _, replaced in read if replaced)
        first += batch.num_rows


def _values(column: Any) -> tuple[list[Any], list[int]]:
    """The values of a column and, of texts that are not all UTF-8, how many characters of each stand for such bytes.

    Raises ValueError for one that is damaged: unchecked, a wrong offset of a mapped file would end the process.
    """
    import pyarrow

    texts = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    as_bytes = column.view(texts[column.type]) if column.type in texts else column
    as_bytes.validate(full=True)
    try:
        return column.to_pylist(), []
    except UnicodeDecodeError:
        if column.type not in texts:
            raise
        found = [None if each is None else decoded(each) for each in as_bytes.to_pylist()]
        return [each and each.text for each in found], [each.replaced if each else 0 for each in found]


def _of_damage() -> tuple[type[Exception], ...]:
    """What reading a damaged file raises; pyarrow has kinds of its own."""
    loaded = sys.modules.get("pyarrow")
    return (OSError, EOFError, ValueError) if loaded is None else (OSError, EOFError, ValueError, loaded.ArrowException)


def kind_of_value(value: Any) -> str:
    """What a value of JSON is, in words."""
    names = {dict: "an object", list: "a list", bool: "true or false", str: "a text"}
    if value is None:
        return "null"
    return names.get(type(value), f"the number {value}")
