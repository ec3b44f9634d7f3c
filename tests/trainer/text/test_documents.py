import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.text import documents
from tests.trainer.text import corpora

TEXTS = corpora.texts(300, seed=2)


def read(path: Path | str, field: str | None = None) -> list[str]:
    found = documents.split_units(documents.find_files(str(path)))
    return [
        document.text
        for parts in found
        for part in parts
        for document in documents.read_documents(part, field)
    ]


def replaced(path: Path) -> int:
    return sum(
        each.replaced
        for part in documents.split_units([str(path)])[0]
        for each in documents.read_documents(part, None)
    )


def arrow(path: Path, rows: dict[str, Any], *, is_stream: bool = True) -> Path:
    table = pa.table(rows)
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def packed(path: Path, data: bytes) -> Path:
    with pa.output_stream(
        str(path), compression={".gz": "gzip", ".zst": "zstd"}[path.suffix]
    ) as file:
        file.write(data)
    return path


def test_rows_of_every_kind_are_the_same_texts(tmp_path: Path) -> None:
    plain = Path(corpora.lines(tmp_path / "a.jsonl", TEXTS))
    parquet.write_table(
        pa.table({"id": range(300), "text": TEXTS}), tmp_path / "a.parquet", row_group_size=64
    )
    large = pa.array([text.encode() for text in TEXTS], pa.large_binary())
    for path in (
        plain,
        tmp_path / "a.parquet",
        arrow(tmp_path / "a.arrow", {"text": TEXTS}),
        arrow(tmp_path / "b.arrow", {"text": large}, is_stream=False),
        packed(tmp_path / "b.jsonl.gz", plain.read_bytes()),
        packed(tmp_path / "b.json.zst", plain.read_bytes()),
    ):
        assert read(path) == TEXTS, path


def test_a_folder_as_datasets_saves_one_is_its_arrow_files(tmp_path: Path) -> None:
    for number in range(2):
        arrow(tmp_path / f"data-{number:05}-of-00002.arrow", {"body": TEXTS[number::2]})
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    assert read(tmp_path, "body") == TEXTS[::2] + TEXTS[1::2]
    arrow(tmp_path / "cache-0123456789abcdef.arrow", {"body": TEXTS})  # of a map over it
    names = [{"filename": f"data-{number:05}-of-00002.arrow"} for number in range(2)]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": names}))
    assert read(tmp_path, "body") == TEXTS[::2] + TEXTS[1::2]


def test_of_a_folder_the_files_of_one_kind_are_read_by_their_exact_endings(tmp_path: Path) -> None:
    corpora.lines(tmp_path / "a.jsonl", TEXTS[:3])
    for name in ("a.jsonl.bak", "a.jsonl~", "a.jsonl.idx", ".b.jsonl"):
        corpora.lines(tmp_path / name, TEXTS[3:])
    packed(tmp_path / "c.jsonl.gz", rows({"text": "packed"}))
    assert read(tmp_path) == [*TEXTS[:3], "packed"]
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(
        DataError, match="several kinds: 2 of lines such as a.jsonl, 1 of text such as b.txt; name"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.txt.bz2", ".bz2 is not read; unpack it"),
        ("a.jsonl.XZ", ".xz is not read"),
        ("a.tar.gz", ".tar is not read"),
        ("a.zip", ".zip is not read"),
        (
            "a.parquet.gz",
            "only text and JSON lines are read as .gz or .zst; unpack it to .*/a.parquet$",
        ),
        (
            "a.arrow.zst",
            "only text and JSON lines are read as .gz or .zst; unpack it to .*/a.arrow$",
        ),
    ],
)
def test_a_file_that_is_packed_otherwise_is_refused_by_its_ending(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / name).write_bytes(b"bytes of an archive")
    with pytest.raises(DataError, match=words):
        documents.find_files(f"{tmp_path}/*")


def test_a_mark_at_the_beginning_of_lines_is_no_part_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", 20)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:5]), "utf-8-sig"
    )
    assert read(tmp_path / "a.jsonl") == TEXTS[:5]
    packed(tmp_path / "b.jsonl.gz", (tmp_path / "a.jsonl").read_bytes())
    assert read(tmp_path / "b.jsonl.gz") == TEXTS[:5]


@pytest.mark.parametrize(
    "kind", [pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.binary_view()]
)
def test_texts_are_read_however_arrow_stores_them(tmp_path: Path, kind: pa.DataType) -> None:
    texts = TEXTS[:9] * 2
    plain = (
        pa.array(texts).dictionary_encode()
        if pa.types.is_dictionary(kind)
        else pa.array(texts, kind)
    )
    assert plain.type == kind
    assert read(arrow(tmp_path / "a.arrow", {"text": plain}, is_stream=False)) == texts
    if not pa.types.is_binary_view(kind):
        parquet.write_table(pa.table({"text": plain}), tmp_path / "a.parquet")
        assert read(tmp_path / "a.parquet") == texts


@pytest.mark.parametrize("unit", [1, 10, 97, 4096])
def test_lines_are_read_once_wherever_a_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int
) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", unit)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 13)
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": text}) for text in TEXTS[:20]) + "\n\n" + '{"text": "last"}'
    )
    assert read(path) == [*TEXTS[:20], "last"]
    path.write_text(path.read_text() + '\n{"txt": 1}\n')
    with pytest.raises(DataError, match="a.jsonl, row 23: it has no field 'text'; it has txt"):
        read(path)


def test_a_file_of_text_is_one_document_and_a_long_one_is_cut_at_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 20)
    (tmp_path / "a.txt").write_text("short")
    (tmp_path / "b.txt").write_text("one line\nanother line\na third\n")
    (tmp_path / "c.txt").write_text("é" * 25)
    (tmp_path / "d.txt").touch()
    assert read(tmp_path / "*.txt") == [
        "short",
        "one line\n",
        "another line\n",
        "a third\n",
        "é" * 10,
        "é" * 10,
        "é" * 5,
    ]


@pytest.mark.parametrize("unit", [1, 9, 40, 4096])
def test_a_long_text_is_cut_into_units_at_lines_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int
) -> None:
    for name, value in (("UNIT_BYTES", unit), ("PIECE_BYTES", 25), ("BLOCK_BYTES", 13)):
        monkeypatch.setattr(documents, name, value)
    for lines in (
        ["", "a", "", "second line, a longer one", "é" * 40, "x", "last"],
        ["one " * 30],
        ["\n\n"],
    ):
        (tmp_path / "a.txt").write_text("\n".join(lines))
        assert "".join(read(tmp_path / "a.txt")) == "\n".join(lines)
    (tmp_path / "a.txt").write_text("a line\n" * 40)
    cut = documents.split_units([f"{tmp_path}/a.txt"])
    assert len(cut) == -(-280 // unit) and read(tmp_path / "a.txt")[0].endswith("\n")


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_large_table_of_arrow_is_several_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", 2000)
    path = arrow(tmp_path / "a.arrow", {"text": [*TEXTS, None]}, is_stream=is_stream)
    assert len(documents.split_units([str(path)])) > 3
    with pytest.raises(DataError, match="a.arrow, row 301: its field 'text' is null"):
        read(path)
    assert read(arrow(path, {"text": TEXTS}, is_stream=is_stream)) == TEXTS
    with pytest.raises(DataError, match="a.arrow has no column 'body'; it has text"):
        read(arrow(path, {"text": pa.array([], pa.string())}, is_stream=is_stream), "body")


def test_a_corpus_is_of_a_bounded_number_of_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", 10)
    monkeypatch.setattr(documents, "MAX_UNITS", 4)
    corpora.lines(tmp_path / "a.jsonl", TEXTS)
    assert (
        len(documents.split_units([f"{tmp_path}/a.jsonl"])) in (4, 5)
        and read(tmp_path / "a.jsonl") == TEXTS
    )


def test_what_is_no_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " + "\ufffd".encode() + b" \xff.")
    assert (read(tmp_path / "a.txt"), replaced(tmp_path / "a.txt")) == (
        ["caf\ufffd \ufffd \ufffd."],
        2,
    )
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "a\xff"}\n{"text": "b\\ud800c"}\n{"text": "\\ud83d\\udc4d"}\n'
    )
    assert (read(tmp_path / "a.jsonl"), replaced(tmp_path / "a.jsonl")) == (
        ["a\ufffd", "b\ufffdc", "👍"],
        2,
    )


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_what_is_no_utf8_in_a_column_of_texts_is_replaced_and_counted(
    tmp_path: Path, name: str
) -> None:
    held = pa.array([b"fine", b"\xff\xfe odd", None])
    column = pa.Array.from_buffers(pa.string(), 3, held.buffers())
    path = tmp_path / name
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({"text": column}), path)
    else:
        arrow(path, {"text": column})
    part = next(each for unit in documents.split_units([str(path)]) for each in unit)
    found = documents.read_documents(part, None)
    assert next(found) == documents.Document("fine", 0)
    assert next(found) == documents.Document("\ufffd\ufffd odd", 2)
    with pytest.raises(DataError, match=f"{name}, row 3: its field 'text' is null"):
        next(found)


def test_units_are_of_a_bounded_size_and_hold_many_small_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", 100)
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("x" * 30)
    sizes = [
        sum(part.size for part in unit)
        for unit in documents.split_units(documents.find_files(f"{tmp_path}/*.txt"))
    ]
    assert sizes == [90, 90, 90, 30]


def rows(*lines: Any) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


GOOD = {"text": "fine"}
WRONG: list[tuple[str, bytes, str]] = [
    (
        "no field",
        rows(GOOD, {"body": "x", "id": 1}),
        "a.jsonl, row 2: it has no field 'text'; it has body, id",
    ),
    ("no key at all", rows(GOOD, GOOD, {}), "row 3: it has no field 'text'; it has none"),
    ("a number", rows(GOOD, {"text": 3}), "row 2: its field 'text' is the number 3, not a text"),
    ("a truth", rows({"text": True}), "row 1: its field 'text' is true or false, not a text"),
    ("null", rows(GOOD, {"text": None}), "row 2: its field 'text' is null, not a text"),
    ("a list", rows({"text": ["a"]}), "row 1: its field 'text' is a list, not a text"),
    ("an object", rows({"text": {"a": 1}}), "row 1: its field 'text' is an object, not a text"),
    (
        "a row that is a list",
        rows(GOOD, [1]),
        "row 2: it is a list, not an object with the field 'text'",
    ),
    ("a row that is a text", rows("hello"), "row 1: it is a text, not an object"),
    ("a row that is null", rows(None), "row 1: it is null, not an object"),
    ("no JSON", rows(GOOD) + b"text: yaml\n", "row 2: it is not JSON: "),
    ("a line that is cut", rows(GOOD) + b'{"text": "ab', "row 2: it is not JSON: "),
    ("an object over many lines", json.dumps([GOOD], indent=1).encode(), "row 1: it is not JSON: "),
    ("blank lines before", b"\n\n" + rows({"x": 1}), "row 3: it has no field"),
    ("an empty file", b"", "a.jsonl is empty: it has no rows"),
]


@pytest.mark.parametrize(
    ("data", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_a_wrong_row_is_named_with_its_file(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(DataError) as raised:
        read(tmp_path / "a.jsonl")
    assert str(raised.value).startswith(f"{tmp_path}/a.jsonl") and words in str(raised.value)


def test_a_wrong_table_is_named_with_what_it_has(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": [1], "body": ["x"]}), tmp_path / "column.parquet")
    parquet.write_table(pa.table({"text": [1, 2]}), tmp_path / "type.parquet")
    parquet.write_table(
        pa.table({"text": ["a"] * 9 + [None]}), tmp_path / "null.parquet", row_group_size=4
    )
    (tmp_path / "short.parquet").write_bytes((tmp_path / "column.parquet").read_bytes()[:-20])
    (tmp_path / "none.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "empty.parquet").touch()
    arrow(tmp_path / "column.arrow", {"body": ["x"]})
    arrow(tmp_path / "null.arrow", {"text": ["a"] * 20 + [None]})
    (tmp_path / "short.arrow").write_bytes(
        arrow(tmp_path / "s.arrow", {"text": TEXTS}).read_bytes()[:2000]
    )
    (tmp_path / "none.arrow").write_bytes(b"no arrow at all, but text")
    for name, words in (
        ("column.parquet", "has no column 'text'; it has a, body"),
        ("type.parquet", "its column 'text' is of int64, not of text"),
        ("null.parquet", ", row 10: its field 'text' is null, not a text"),
        ("short.parquet", "is not a Parquet file, or is truncated"),
        ("none.parquet", "is not a Parquet file, or is truncated"),
        ("empty.parquet", "is empty: it has no rows"),
        ("column.arrow", "has no column 'text'; it has body"),
        ("null.arrow", ", row 21: its field 'text' is null, not a text"),
        ("short.arrow", "is damaged: "),
        ("none.arrow", "is damaged: "),
    ):
        with pytest.raises(DataError) as raised:
            read(tmp_path / name)
        assert str(raised.value).startswith(f"{tmp_path}/{name}") and words in str(raised.value)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_packed_file_that_is_cut_or_none_is_named(tmp_path: Path, ending: str) -> None:
    whole = packed(
        tmp_path / f"w.jsonl{ending}", rows(*({"text": text} for text in TEXTS))
    ).read_bytes()
    for name, data in (
        ("cut", whole[:-30]),
        ("half", whole[: len(whole) // 2]),
        ("none", b"plain text\n" * 9),
    ):
        path = tmp_path / f"{name}.jsonl{ending}"
        path.write_bytes(data)
        with pytest.raises(DataError, match=f"{name}.jsonl{ending} is truncated or damaged"):
            read(path)
    (tmp_path / f"e.txt{ending}").touch()
    with pytest.raises(DataError, match="is empty"):
        read(tmp_path / f"e.txt{ending}")


def test_several_members_of_a_gzip_file_are_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(rows(GOOD)) + gzip.compress(rows({"text": "too"}))
    )
    assert read(tmp_path / "a.jsonl.gz") == ["fine", "too"]
