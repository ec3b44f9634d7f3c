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

TEXTS = corpora.make_texts(300, seed=2)


def read_texts(path: Path | str, field: str | None = None) -> list[str]:
    result = documents.split_units(documents.find_files(str(path)))
    return [
        document.text
        for parts in result
        for part in parts
        for document in documents.read_documents(part, field)
    ]


def count_replaced(path: Path) -> int:
    return sum(
        document.replaced
        for part in documents.split_units([str(path)])[0]
        for document in documents.read_documents(part, None)
    )


def write_arrow(path: Path, rows: dict[str, Any], *, is_stream: bool = True) -> Path:
    table = pa.table(rows)
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def write_compressed(path: Path, data: bytes) -> Path:
    with pa.output_stream(
        str(path), compression={".gz": "gzip", ".zst": "zstd"}[path.suffix]
    ) as file:
        file.write(data)
    return path


def test_all_formats_give_the_same_texts(tmp_path: Path) -> None:
    plain = Path(corpora.write_lines(tmp_path / "a.jsonl", TEXTS))
    parquet.write_table(
        pa.table({"id": range(300), "text": TEXTS}), tmp_path / "a.parquet", row_group_size=64
    )
    large = pa.array([text.encode() for text in TEXTS], pa.large_binary())
    for path in (
        plain,
        tmp_path / "a.parquet",
        write_arrow(tmp_path / "a.arrow", {"text": TEXTS}),
        write_arrow(tmp_path / "b.arrow", {"text": large}, is_stream=False),
        write_compressed(tmp_path / "b.jsonl.gz", plain.read_bytes()),
        write_compressed(tmp_path / "b.json.zst", plain.read_bytes()),
    ):
        assert read_texts(path) == TEXTS, path


def test_datasets_folder_gives_its_arrow_files(tmp_path: Path) -> None:
    for number in range(2):
        write_arrow(tmp_path / f"data-{number:05}-of-00002.arrow", {"body": TEXTS[number::2]})
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    assert read_texts(tmp_path, "body") == TEXTS[::2] + TEXTS[1::2]
    write_arrow(tmp_path / "cache-0123456789abcdef.arrow", {"body": TEXTS})  # of a map over it
    names = [{"filename": f"data-{number:05}-of-00002.arrow"} for number in range(2)]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": names}))
    assert read_texts(tmp_path, "body") == TEXTS[::2] + TEXTS[1::2]


def test_folder_gives_files_of_one_kind(tmp_path: Path) -> None:
    corpora.write_lines(tmp_path / "a.jsonl", TEXTS[:3])
    for name in ("a.jsonl.bak", "a.jsonl~", "a.jsonl.idx", ".b.jsonl"):
        corpora.write_lines(tmp_path / name, TEXTS[3:])
    write_compressed(tmp_path / "c.jsonl.gz", rows({"text": "packed"}))
    assert read_texts(tmp_path) == [*TEXTS[:3], "packed"]
    (tmp_path / "b.txt").write_text("text")
    words = "several kinds: 2 of lines such as a.jsonl, 1 of text such as b.txt; name"
    with pytest.raises(DataError, match=words):
        read_texts(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.txt.bz2", ".bz2 is not supported; unpack it"),
        ("a.jsonl.XZ", ".xz is not supported"),
        ("a.tar.gz", ".tar is not supported"),
        ("a.zip", ".zip is not supported"),
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
def test_unsupported_compression_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_bytes(b"bytes of an archive")
    with pytest.raises(DataError, match=words):
        documents.find_files(f"{tmp_path}/*")


def test_byte_order_mark_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", 20)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:5]), "utf-8-sig"
    )
    assert read_texts(tmp_path / "a.jsonl") == TEXTS[:5]
    write_compressed(tmp_path / "b.jsonl.gz", (tmp_path / "a.jsonl").read_bytes())
    assert read_texts(tmp_path / "b.jsonl.gz") == TEXTS[:5]


@pytest.mark.parametrize(
    "kind", [pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.binary_view()]
)
def test_texts_of_all_arrow_types_are_read(tmp_path: Path, kind: pa.DataType) -> None:
    texts = TEXTS[:9] * 2
    plain = (
        pa.array(texts).dictionary_encode()
        if pa.types.is_dictionary(kind)
        else pa.array(texts, kind)
    )
    assert plain.type == kind
    assert read_texts(write_arrow(tmp_path / "a.arrow", {"text": plain}, is_stream=False)) == texts
    if not pa.types.is_binary_view(kind):
        parquet.write_table(pa.table({"text": plain}), tmp_path / "a.parquet")
        assert read_texts(tmp_path / "a.parquet") == texts


@pytest.mark.parametrize("unit", [1, 10, 97, 4096])
def test_lines_are_read_once_for_any_unit_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int
) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", unit)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 13)
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": text}) for text in TEXTS[:20]) + "\n\n" + '{"text": "last"}'
    )
    assert read_texts(path) == [*TEXTS[:20], "last"]
    path.write_text(path.read_text() + '\n{"txt": 1}\n')
    message = r"a.jsonl, row 23: it has no field 'text' \(did you mean 'txt'\?\); it has txt"
    with pytest.raises(DataError, match=message):
        read_texts(path)


def test_text_file_is_cut_at_lines_if_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 20)
    (tmp_path / "a.txt").write_text("short")
    (tmp_path / "b.txt").write_text("one line\nanother line\na third\n")
    (tmp_path / "c.txt").write_text("é" * 25)
    (tmp_path / "d.txt").touch()
    expected = ["short", "one line\n", "another line\n", "a third\n", "é" * 10, "é" * 10, "é" * 5]
    assert read_texts(tmp_path / "*.txt") == expected


@pytest.mark.parametrize("unit", [1, 9, 40, 4096])
def test_long_text_is_read_once_in_units(
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
        assert "".join(read_texts(tmp_path / "a.txt")) == "\n".join(lines)
    (tmp_path / "a.txt").write_text("a line\n" * 40)
    cut = documents.split_units([f"{tmp_path}/a.txt"])
    assert len(cut) == -(-280 // unit) and read_texts(tmp_path / "a.txt")[0].endswith("\n")


@pytest.mark.parametrize("is_stream", [True, False])
def test_large_arrow_table_has_several_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", 2000)
    path = write_arrow(tmp_path / "a.arrow", {"text": [*TEXTS, None]}, is_stream=is_stream)
    assert len(documents.split_units([str(path)])) > 3
    with pytest.raises(DataError, match="a.arrow, row 301: its field 'text' is null"):
        read_texts(path)
    assert read_texts(write_arrow(path, {"text": TEXTS}, is_stream=is_stream)) == TEXTS
    with pytest.raises(DataError, match="a.arrow has no column 'body'; it has text"):
        read_texts(
            write_arrow(path, {"text": pa.array([], pa.string())}, is_stream=is_stream), "body"
        )


def test_number_of_units_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", 10)
    monkeypatch.setattr(documents, "MAX_UNITS", 4)
    corpora.write_lines(tmp_path / "a.jsonl", TEXTS)
    assert len(documents.split_units([f"{tmp_path}/a.jsonl"])) in (4, 5)
    assert read_texts(tmp_path / "a.jsonl") == TEXTS


def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " + "\ufffd".encode() + b" \xff.")
    expected = (["caf\ufffd \ufffd \ufffd."], 2)
    assert (read_texts(tmp_path / "a.txt"), count_replaced(tmp_path / "a.txt")) == expected
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "a\xff"}\n{"text": "b\\ud800c"}\n{"text": "\\ud83d\\udc4d"}\n'
    )
    expected = (["a\ufffd", "b\ufffdc", "👍"], 2)
    assert (read_texts(tmp_path / "a.jsonl"), count_replaced(tmp_path / "a.jsonl")) == expected


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_invalid_utf8_in_a_column_is_replaced_and_counted(tmp_path: Path, name: str) -> None:
    held_out = pa.array([b"fine", b"\xff\xfe odd", None])
    column = pa.Array.from_buffers(pa.string(), 3, held_out.buffers())
    path = tmp_path / name
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({"text": column}), path)
    else:
        write_arrow(path, {"text": column})
    part = next(document for unit in documents.split_units([str(path)]) for document in unit)
    result = documents.read_documents(part, None)
    assert next(result)[:2] == ("fine", 0)
    assert next(result)[:2] == ("\ufffd\ufffd odd", 2)
    with pytest.raises(DataError, match=f"{name}, row 3: its field 'text' is null"):
        next(result)


def test_units_group_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("no key at all", rows(GOOD, GOOD, {}), "row 3: it has no field 'text'; it has none"),
    ("a truth", rows({"text": True}), "row 1: its field 'text' is true or false, not a text"),
    ("an object", rows({"text": {"a": 1}}), "row 1: its field 'text' is an object, not a text"),
    ("a row that is a text", rows("hello"), "row 1: it is a text, not an object"),
    ("a row that is null", rows(None), "row 1: it is null, not an object"),
    ("blank lines before", b"\n\n" + rows({"x": 1}), "row 3: it has no field"),
]


@pytest.mark.parametrize(
    ("data", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_invalid_row_is_reported_with_its_file(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(DataError) as raised:
        read_texts(tmp_path / "a.jsonl")
    assert str(raised.value).startswith(f"{tmp_path}/a.jsonl") and words in str(raised.value)


def test_invalid_table_is_reported(tmp_path: Path) -> None:
    write_arrow(tmp_path / "column.arrow", {"body": ["x"]})
    write_arrow(tmp_path / "null.arrow", {"text": ["a"] * 20 + [None]})
    for name, words in (
        ("column.arrow", "has no column 'text'; it has body"),
        ("null.arrow", ", row 21: its field 'text' is null, not a text"),
    ):
        with pytest.raises(DataError) as raised:
            read_texts(tmp_path / name)
        assert str(raised.value).startswith(f"{tmp_path}/{name}") and words in str(raised.value)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_damaged_compressed_file_is_reported(tmp_path: Path, ending: str) -> None:
    whole = write_compressed(
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
            read_texts(path)
    (tmp_path / f"e.txt{ending}").touch()
    with pytest.raises(DataError, match="is empty"):
        read_texts(tmp_path / f"e.txt{ending}")


def test_gzip_members_are_concatenated(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(rows(GOOD)) + gzip.compress(rows({"text": "too"}))
    )
    assert read_texts(tmp_path / "a.jsonl.gz") == ["fine", "too"]
