"""Reads tables as columns: .csv, .tsv, .jsonl, .parquet, .arrow, .npy, .npz.

A column of numbers, booleans or times is an array of numbers, [N] or [N, …], with NaN for missing
values; a column of texts is an array of objects, with None. N rows, F files.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.data.files import printable_path
from jaxlaunch.trainer.data.source import Split
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import build, listing
from jaxlaunch.trainer.sources.images.index import join_path

ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".arrow", ".npy", ".npz")
DELIMITERS = ",;\t|"
# Words for a missing number in a column of numbers, in upper or lower case.
MISSING_WORDS = ("", "na", "n/a", "nan", "null", "none", "?", "-")
QUOTE = b'"'
# Name of an index column that pandas writes to Parquet and Arrow.
PANDAS_INDEX = r"__index_level_\d+__"
# Formats of files that are sometimes named .csv, by their first bytes.
FOREIGN_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"\x28\xb5\x2f\xfd": "zstd",
}
# The messages of pyarrow may contain a whole row.
MAX_ERROR_CHARACTERS = 200
# Numbers with separated thousands: 1 234.5, 1'234.5, 1.234,5.
THOUSANDS_PATTERN = r"^\s*[+-]?\d{1,3}(([ \x{a0}\x{202f}'’]\d{3})+([.,]\d+)?|(\.\d{3})+,\d+)\s*$"
PERCENTAGE_PATTERN = r"\s*([+-]?\d+(?:[.,]\d+)?)\s*%\s*"
NUMBER_PATTERN = r"\s*[+-]?\d+([.,]\d+)?\s*"
# A decimal comma, as in 0,5.
DECIMAL_COMMA_PATTERN = r"^\s*([+-]?\d+),(\d+)\s*$"
Column = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Columns:
    """The concatenated columns of one or more files."""

    paths: tuple[str, ...]
    # Cumulative number of rows up to the end of each file.
    ends_F: npt.NDArray[np.int64]
    values: Mapping[str, Column]
    # Class names that `datasets` records for a column of class labels.
    classes: Mapping[str, tuple[str, ...]]
    # Columns that are neither numbers nor texts, with the reason.
    unusable: Mapping[str, str]
    # What columns of texts were read as, for messages.
    readings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The texts of these columns, which may be names of classes.
    texts: Mapping[str, Column] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.ends_F[-1])

    @property
    def name(self) -> str:
        """The path of the first file, for messages."""
        return printable_path(self.paths[0])

    def locate_row(self, row: int) -> str:
        """Return the file of a row and its number in the file from 1, for messages."""
        file = int(np.searchsorted(self.ends_F, row, side="right"))
        file_start = int(self.ends_F[file - 1]) if file else 0
        return f"{printable_path(self.paths[file])}, row {row - file_start + 1}"


def find_tables(patterns: str | Sequence[str], split: Split, key: str) -> tuple[list[str], bool]:
    """Return the files of a split, and whether the names of files contain splits."""
    first, *others = files.as_list(patterns)
    if others or is_table(first) or not listing.is_folder(first):
        return files.match_files(patterns, key), False
    folder = first.rstrip("/") or "/"
    names = [name for name in sorted(listing.walk_files(folder)) if is_table(name)]
    # save_to_disk of `datasets` leaves cache files next to the rows.
    names = [name for name in names if not os.path.basename(name).startswith("cache-")]
    if not names:
        problem = f"data.{key} = {printable_path(folder)} holds no table"
        raise DataError(f"{problem}; {', '.join(ENDINGS)} can be read")
    split_names, has_splits = listing.select_split(names, split)
    return [join_path(folder, name) for name in split_names], has_splits


def is_table(path: str) -> bool:
    """Return whether a file is a table by its name."""
    return os.path.splitext(path)[1].lower() in ENDINGS


def read_tables(paths: Sequence[str], text_columns: Collection[str] = ()) -> Columns:
    """Read the columns of all files. Raises DataError naming the file, and the row if possible.

    `text_columns` are read as texts, even if they contain only digits.
    """
    parts = [_read_table(path, text_columns) for path in paths]
    # A column that has only digits in one file, such as 01234, is read as texts if it has texts in
    # another file.
    text_names = {
        name for part in parts for name, values in part.values.items() if _has_texts(values)
    }
    for number, path in enumerate(paths):
        columns = parts[number].values.items()
        number_columns = {name for name, values in columns if values.dtype.kind in "if"}
        digit_columns = number_columns & text_names
        if digit_columns:
            parts[number] = _read_table(path, {*text_columns, *digit_columns})
    return concatenate_columns(parts)


def _has_texts(values: Column) -> bool:
    return values.dtype.kind == "O" and any(parse_number(value) is None for value in values)


def parse_number(value: Any) -> float | None:
    """Parse a number, NaN if it is missing, or None if it is not a number."""
    if value is None or isinstance(value, str) and value.strip().lower() in MISSING_WORDS:
        return np.nan
    try:
        if isinstance(value, int | float) or (isinstance(value, str) and "_" not in value):
            return float(value)
        return None
    except ValueError:
        return None
    except OverflowError:
        # An integer that is too large for a float counts as infinite, like 1e400.
        return np.inf


def concatenate_columns(parts: Sequence[Columns]) -> Columns:
    """Concatenate the rows of all parts. Raises DataError if their columns differ."""
    first, paths = parts[0], [path for part in parts for path in part.paths]
    for part in parts:
        names, other_names = {*first.values, *first.unusable}, {*part.values, *part.unusable}
        if differing := sorted(names ^ other_names):
            shorter, longer = (part, first) if differing[0] in names else (first, part)
            problem = f"has no column {differing[0]!r}, which {longer.name} has"
            raise DataError(f"{shorter.name} {problem}")
        for name, class_names in first.classes.items():
            if part.classes.get(name, class_names) != class_names:
                problem = f"has other names for the classes in {name!r} than {first.name}"
                hint = "read them as the parts of a mixture, or write the names in the column"
                raise DataError(f"{part.name} {problem}; {hint}")
    unusable = {name: reason for part in parts for name, reason in part.unusable.items()}
    usable = [name for name in first.values if name not in unusable]
    try:
        values = {name: np.concatenate([part.values[name] for part in parts]) for name in usable}
    except ValueError as error:
        problem = "and the other files have columns of different shapes"
        raise DataError(f"{first.name} {problem}: {error}") from None
    ends_F = np.cumsum(np.concatenate([np.diff(part.ends_F, prepend=0) for part in parts]))
    readings = {name: reading for part in parts for name, reading in part.readings.items()}
    texts = {
        name: np.concatenate([part.texts.get(name, part.values[name]) for part in parts])
        for name in readings
    }
    return Columns(tuple(paths), ends_F, values, first.classes, unusable, readings, texts)


def _read_table(path: str, text_columns: Collection[str]) -> Columns:
    ending = os.path.splitext(path)[1].lower()
    if ending not in ENDINGS:
        hint = f"{', '.join(ENDINGS)} can be read"
        raise DataError(f"{printable_path(path)} is not a table by its name; {hint}")
    classes: Mapping[str, tuple[str, ...]] = {}
    unusable: dict[str, str] = {}
    with files.report_damage(path, "cannot be read"):
        if ending in (".npy", ".npz"):
            values = _read_numpy(path)
        elif ending in (".jsonl", ".ndjson"):
            rows = [row for _, row in build.read_rows(path)]
            names = dict.fromkeys(itertools.chain.from_iterable(rows))
            values = {name: _convert_json(name, [row.get(name) for row in rows]) for name in names}
        else:
            values, classes, unusable = _read_arrow(path, ending, text_columns)
    if len({len(column) for column in values.values()}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in list(values.items())[:4])
        raise DataError(f"{printable_path(path)} has arrays of different lengths: {lengths}")
    count = len(next(iter(values.values()), ()))
    if not count:
        missing = "rows" if values or unusable else "columns"
        raise DataError(f"{printable_path(path)} has no {missing}")
    readings, texts = {}, {}
    for name in values.keys() - {*text_columns}:
        for reading, parse in (("percentages", parse_percentage), ("dates", parse_date)):
            numbers = _parse_texts(values[name], parse)
            if numbers is not None:
                texts[name], values[name], readings[name] = values[name], numbers, reading
                break
    return Columns((path,), np.array([count]), values, classes, unusable, readings, texts)


def parse_percentage(text: str) -> float | None:
    """Return the number before a percent sign, or None if the text is not a percentage."""
    match = re.fullmatch(PERCENTAGE_PATTERN, text)
    return None if match is None else float(match[1].replace(",", "."))


def parse_date(text: str) -> float | None:
    """Return the seconds since 1970 of a date or time by ISO 8601, or None if it is not one."""
    # Python reads numbers without separators as dates, too.
    if not re.match(r"\s*\d{4}-\d{2}", text):
        return None
    try:
        date = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return (date if date.tzinfo else date.replace(tzinfo=datetime.UTC)).timestamp()


def _parse_texts(values: Column, parse: Callable[[str], float | None]) -> Column | None:
    """Return the numbers of a column of texts, or None if one of them is not of this kind."""
    if values.dtype.kind != "O":
        return None
    numbers = []
    for value in values:
        is_missing = value is None or (isinstance(value, str) and not value.strip())
        number = np.nan if is_missing else parse(value) if isinstance(value, str) else None
        if number is None:
            return None
        numbers.append(number)
    result = np.array(numbers, np.float64)
    return None if np.isnan(result).all() else result


def _read_numpy(path: str) -> dict[str, Column]:
    with open(files.local_path(path), "rb") as file:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            columns = {name: np.asarray(loaded[name]) for name in loaded.files}
        elif loaded.dtype.names:
            columns = {name: loaded[name] for name in loaded.dtype.names}
        elif loaded.ndim == 2:
            columns = {str(number): loaded[:, number] for number in range(loaded.shape[1])}
        else:
            shape = list(loaded.shape)
            raise ValueError(f"an array of shape {shape}, and a table has rows and columns")
    for name, array in columns.items():
        kind = array.dtype.kind
        if array.ndim < 1 or kind not in "biufUSMm":
            problem = f"{name!r} is {array.dtype}{list(array.shape)}"
            raise ValueError(f"{problem}; columns are numbers or texts, a row each")
        if kind in "Mm":
            seconds = array.astype(f"{kind}8[us]").astype(np.int64) / 1e6
            columns[name] = np.where(np.isnat(array), np.nan, seconds)
        elif kind == "S":
            row = _find_invalid_utf8(array.ravel().tolist())
            if row is not None:
                raise ValueError(f"row {row}: its {name!r} is not UTF-8")
            columns[name] = np.char.decode(array, "utf-8").astype(object)
        elif kind == "U":
            columns[name] = array.astype(object)
    return columns


def _find_invalid_utf8(values: Iterable[bytes | None]) -> int | None:
    """Return the number of the first value that is not UTF-8, from 1."""
    for row, value in enumerate(values, 1):
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            return row
    return None


def _convert_json(name: str, values: list[Any]) -> Column:
    """Convert JSON values to a column: lists of numbers to [N, …], and other values to objects."""
    for row, value in enumerate(values, 1):
        if isinstance(value, dict):
            problem = f"its {name!r} is an object, and a table has numbers and texts"
            raise ValueError(f"row {row}: {problem}")
    if any(isinstance(value, list) for value in values):
        try:
            return np.array(values, np.float64)
        except (ValueError, TypeError):
            shapes = [_list_shape(value) for value in values]
            for row, shape in enumerate(shapes, 1):
                if shape != shapes[0]:
                    problem = f"its {name!r} has another shape than that of row 1"
                    raise ValueError(f"row {row}: {problem}") from None
            problem = "lists of texts or objects, and a table has lists of numbers alone"
            raise ValueError(f"its {name!r} has {problem}") from None
    return np.array([*values, None], object)[:-1]


def _list_shape(value: Any) -> tuple[int, ...]:
    try:
        return np.shape(value)
    except ValueError:
        # The value is a list of lists of different lengths.
        return (-1,)


# --- Parquet, Arrow and CSV -----------------------------------------------------------------------


def _read_arrow(
    path: str, ending: str, text_columns: Collection[str]
) -> tuple[dict[str, Column], Mapping[str, tuple[str, ...]], dict[str, str]]:
    import pyarrow
    from pyarrow import parquet

    local_copy = files.local_path(path)
    if ending == ".parquet":
        table = parquet.ParquetFile(local_copy).read()
    elif ending == ".arrow":
        schema, batches = files.arrow_batches(pyarrow.memory_map(local_copy))
        table = pyarrow.Table.from_batches(list(batches), schema)
    else:
        table = _read_csv(path, local_copy, ending, text_columns)
    names = table.column_names
    # Skip the index of pandas, and the nameless columns that spreadsheets write at the end of each
    # row.
    ignored_names = {name for name in names if re.fullmatch(PANDAS_INDEX, name)}
    ignored_names |= {""} if names.count("") > 1 else set()
    table = table.select([index for index, name in enumerate(names) if name not in ignored_names])
    names = table.column_names
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{printable_path(path)} has two columns {duplicate!r}; rename one")
    values: dict[str, Column] = {}
    unusable: dict[str, str] = {}
    for name in names:
        try:
            values[name] = _convert_column(table.column(name))
        except _UnusableColumnError as error:
            unusable[name] = str(error)
    features = files.arrow_features(table.schema)
    class_names = {name: feature.get("names") for name, feature in features.items()}
    classes = {name: tuple(names) for name, names in class_names.items() if isinstance(names, list)}
    return values, classes, unusable


class _UnusableColumnError(Exception):
    """Raised for a column of other values. The message continues "its column 'a'"."""


def _convert_column(column: Any) -> Column:
    import pyarrow
    from pyarrow import compute

    kind, types = column.type, pyarrow.types
    if types.is_dictionary(kind):
        return _convert_column(column.cast(kind.value_type))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        counts = compute.list_value_length(column).to_numpy()
        if column.null_count or len({*counts.tolist()}) > 1:
            raise _UnusableColumnError("has lists of different lengths, unlike a table")
        flat = _convert_column(compute.list_flatten(column))
        return flat.reshape(len(column), int(counts[0]) if len(counts) else 0, *flat.shape[1:])
    if types.is_string_view(kind) or types.is_binary_view(kind):
        copied_type = pyarrow.string() if types.is_string_view(kind) else pyarrow.binary()
        return _convert_column(column.cast(copied_type))
    if types.is_string(kind) or types.is_large_string(kind):
        return np.asarray(column.to_pylist() + [None], object)[:-1]
    if types.is_binary(kind) or types.is_large_binary(kind):
        row = _find_invalid_utf8(column.to_pylist())
        problem = "has bytes, not numbers or texts"
        raise _UnusableColumnError(problem if row is None else f"is not UTF-8 in row {row}")
    if types.is_null(kind):
        return np.full(len(column), np.nan)
    return _convert_numbers(column)


def _convert_numbers(column: Any) -> Column:
    import pyarrow

    kind, types = column.type, pyarrow.types
    if types.is_timestamp(kind) or types.is_date(kind):
        microseconds = column.cast(pyarrow.timestamp("us"), safe=False).cast(pyarrow.int64())
        return np.asarray(_convert_numbers(microseconds) / 1e6)
    if types.is_time32(kind) or types.is_time64(kind) or types.is_duration(kind):
        unit = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[kind.unit]
        numbers = column.cast(pyarrow.int32() if types.is_time32(kind) else pyarrow.int64())
        return np.asarray(_convert_numbers(numbers) / unit)
    if types.is_boolean(kind):
        column = column.cast(pyarrow.uint8())
    elif types.is_decimal(kind):
        column = column.cast(pyarrow.float64())
    elif not (types.is_integer(kind) or types.is_floating(kind)):
        raise _UnusableColumnError(f"is of {kind}, not numbers or texts")
    array: Column = column.to_numpy()
    return array


def _read_csv(path: str, local_copy: str, ending: str, text_columns: Collection[str]) -> Any:
    """Read a .tsv file, or a .csv file with the delimiter that gives its header most columns."""
    import pyarrow
    from pyarrow import csv as arrow_csv

    with open(local_copy, "rb") as file:
        beginning = file.read(1 << 20)
    for magic, format_name in FOREIGN_MAGIC.items():
        if beginning.startswith(magic):
            raise DataError(
                f"{printable_path(path)} is not text, but {format_name}; unpack or rename it"
            )
    if beginning[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in beginning.partition(b"\n")[0]:
        raise DataError(f"{printable_path(path)} is not UTF-8, but UTF-16; save it as UTF-8")
    header = beginning.decode("utf-8-sig", errors="replace").lstrip("\r\n").splitlines()[:1]

    def count_columns(delimiter: str) -> int:
        return len(next(csv.reader(header, delimiter=delimiter), []))

    delimiter = "\t" if ending == ".tsv" else max(DELIMITERS, key=count_columns)
    null_values = {
        spelling for word in MISSING_WORDS for spelling in (word, word.upper(), word.title())
    }
    text_types = dict.fromkeys(text_columns, pyarrow.string())
    # A row must fit into one block.
    block_bytes = min(max(os.path.getsize(local_copy), 1 << 20), 1 << 28)
    try:
        table = arrow_csv.read_csv(
            local_copy,
            arrow_csv.ReadOptions(use_threads=False, block_size=block_bytes),
            arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            arrow_csv.ConvertOptions(
                null_values=sorted({*null_values, "NaN"}), column_types=text_types
            ),
        )
    except pyarrow.ArrowInvalid as error:
        # pyarrow counts the header as row 1.
        row = re.match(r".*?Row #(\d+):(.*)", str(error), re.DOTALL)
        reason = f"row {int(row[1]) - 1}:{row[2]}" if row else str(error)
        reason = printable_path(reason)[:MAX_ERROR_CHARACTERS]
        raise DataError(f"{printable_path(path)} cannot be read: {reason}") from None
    _check_quotes(path, local_copy, table)
    return _convert_commas(path, table, delimiter)


def _check_quotes(path: str, local_copy: str, table: Any) -> None:
    """Raise DataError if a quote is never closed, so that the rest of the file is one value."""
    import pyarrow

    with open(local_copy, "rb") as file:
        if not sum(block.count(QUOTE) for block in iter(lambda: file.read(1 << 24), b"")) % 2:
            return
    for column in table.columns:
        is_text = pyarrow.types.is_string(column.type) and len(column) > 0
        if is_text and "\n" in (column[-1].as_py() or ""):
            location = f"{printable_path(path)}, row {len(column)}"
            raise DataError(f"{location}: a quote is opened and never closed")


def _convert_commas(path: str, table: Any, delimiter: str) -> Any:
    """Replace decimal commas by points.

    Raises DataError for separated thousands, and for a quoted 1,500 in a file with commas as
    delimiters, which is ambiguous.
    """
    import pyarrow
    from pyarrow import compute

    for column_index, (name, column) in enumerate(
        zip(table.column_names, table.columns, strict=True)
    ):
        if not pyarrow.types.is_string(column.type):
            continue
        has_thousands = compute.match_substring_regex(column, THOUSANDS_PATTERN)
        if compute.any(has_thousands).as_py():
            is_other = compute.invert(compute.fill_null(has_thousands, True))
            others = column.filter(is_other).to_pylist()
            if all(re.fullmatch(NUMBER_PATTERN, value) for value in others if value):
                hint = "write the numbers without them, or leave the column out of data.columns"
                fault = f"with separated thousands; {hint}"
                raise _value_error(path, name, column, has_thousands, fault)
        has_comma = compute.match_substring_regex(column, DECIMAL_COMMA_PATTERN)
        if not compute.any(has_comma).as_py():
            continue
        if delimiter == ",":
            hint = "write numbers with a point, or columns with semicolons"
            fault = f"whose comma may separate decimals or thousands; {hint}"
            raise _value_error(path, name, column, has_comma, fault)
        numbers = compute.replace_substring_regex(column, DECIMAL_COMMA_PATTERN, r"\1.\2")
        table = table.set_column(column_index, name, numbers)
    return table


def _value_error(path: str, name: str, column: Any, is_wrong: Any, problem: str) -> DataError:
    row = is_wrong.to_pylist().index(True)
    location = f"{printable_path(path)}, row {row + 1}"
    return DataError(f"{location}: its {name!r} is {column[row].as_py()!r}, {problem}")
