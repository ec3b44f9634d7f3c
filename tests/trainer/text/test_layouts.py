"""Rows of public datasets are recognized, and give the tokens and targets that trl gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources import text as sources
from jaxlaunch.trainer.spec import Mixture, Text
from jaxlaunch.trainer.text import chats, layouts, preferences, shards, tokenizer
from jaxlaunch.trainer.text.chat_notes import NoteKind
from jaxlaunch.trainer.text.documents import UnfitRowError
from tests.trainer.text import layout_rows
from tests.trainer.text.layout_rows import CASES, HELLO, HI, WHY, Case

FIXTURES = Path(__file__).parents[2] / "fixtures" / "layouts"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "trl.json").read_text())["rows"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of the tokenizer of the fixture with each template."""
    folders = layout_rows.save_tokenizers(tmp_path_factory.mktemp("tokenizers"))
    for folder in folders.values():
        shutil.copy(FIXTURES / "tokenizer.json", folder)
    return folders


def encode_row(case: Case, folder: str, path: Path) -> list[list[list[int]]]:
    """Return tokens and targets of each text of a row."""
    if case.format in ("preference", "kto"):
        path.write_text(json.dumps(case.row))
        data = Text.model_validate(
            {"source": "text", "path": str(path), "format": case.format, "tokenizer": folder}
            | {"eval_split": 0.0}
        )
        pairs = preferences.open_source(data, 200, "train")
        assert pairs is not None
        row = pairs[0]
        if case.format == "kto":
            assert row.pop("label") == case.trl["label"]
            row = {name: value[None] for name, value in row.items()}
        return [
            [tokens[:length].tolist(), [0, *mask[: length - 1].astype(int).tolist()]]
            for tokens, mask, length in zip(row["tokens"], row["mask"], row["length"], strict=True)
        ]
    document = chats.read_chat(case.format, None, folder, case.row)
    (tokens_T,) = shards.encode_documents([document], tokenizer.load_tokenizer(folder))
    return [[shards.token_ids(tokens_T).tolist(), (tokens_T >= 0).astype(int).tolist()]]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_tokens_and_targets_equal_trl(
    case: Case, tokenizers: dict[str, str], tmp_path: Path
) -> None:
    actual = encode_row(case, tokenizers[case.template], tmp_path / "a.jsonl")
    assert actual == EXPECTED[case.name]
    recognized = layouts.recognize_row(case.row)
    assert recognized is not None
    row_format, row = recognized
    assert row_format == ("chat" if case.format == "completion" else case.format)
    assert row.layout.startswith(case.layout)


def test_formats_of_the_schema_are_those_of_the_table() -> None:
    options = {
        value
        for group in get_args(Text.model_fields["format"].annotation)
        for value in get_args(group) or [group]
    }
    assert options - {"text", "label"} == {
        name for layout in layouts.LAYOUTS for name in (layout.name, layout.format)
    }


@pytest.mark.parametrize(
    ("row", "row_format", "words"),
    [
        (
            {"title": "t", "body": "b"},
            "chat",
            "it has the columns title, body, and data.format = chat reads the layouts messages: "
            "messages/conversations/conversation; sharegpt: ",
        ),
        ({"instruction": HI}, "alpaca", "alpaca: instruction and output/response"),
        ({"instruction": 3, "output": 4}, "chat", "it has the columns instruction, output, and"),
        ({"conversations": "hi"}, "sharegpt", "it has the columns conversations, and"),
        (
            {"conversations": []},
            "chat",
            "its 'conversations' is an empty list, and messages are objects with role and content,",
        ),
        (
            {"question": "2+2?", "answer": 4},
            "chat",
            "its 'answer' is the number 4, and the layout question needs a text; it has the ",
        ),
        (
            {"prompt": HI, "completion": HELLO, "label": "true"},
            "kto",
            "its 'label' is a text, and a label is true, false, 0 or 1; it has the columns",
        ),
        ({"prompt": 3, "completion": []}, "chat", "the message of its user is the number 3"),
        ({"prompt": HI, "completion": HELLO, "label": 0.5}, "kto", "it has the columns prompt,"),
        (
            {"instruction": HI, "output": HELLO, "history": ["x"]},
            "chat",
            "its 'history' has a text as round 1, not a list of a question and an answer",
        ),
    ],
)
def test_rows_in_no_layout_are_refused(row: dict[str, Any], row_format: str, words: str) -> None:
    with pytest.raises(UnfitRowError) as raised:
        layouts.read_row(row, row_format)
    assert words in str(raised.value)


def test_format_forces_a_layout(tokenizers: dict[str, str]) -> None:
    row = {"messages": [{"role": "user", "content": HI}], "instruction": HI, "output": HELLO}
    for row_format, name in (("chat", "messages"), ("alpaca", "alpaca")):
        assert layouts.read_row(row, row_format).layout.startswith(name)
    # A field that the job names is the only one that is read.
    named = {"turns": layout_rows.speakers(HI, HELLO), "messages": [{"role": "x"}]}
    assert layouts.read_row(named, "chat", "turns").layout == "sharegpt (turns)"
    document = chats.read_chat("chat", None, tokenizers["plain"], row | {"messages": None})
    assert [kind.value for kind, _ in document.notes] == ["layout"]


def test_errors_name_the_column_that_was_read(tokenizers: dict[str, str]) -> None:
    beside = {"messages": layout_rows.CHAT}
    row = layouts.read_row(beside | {"turns": layout_rows.speakers(HI, HELLO)}, "chat", "turns")
    assert row.unread == ("messages",)
    answer = {"instruction": HI, "output": HELLO}
    for row_format, field, wrong, words in (
        ("chat", "turns", beside | {"turns": []}, "^its field 'turns': it is an empty list"),
        ("chat", "output", answer, "^its field 'output': it is a text, not a list of messages"),
        (
            "sharegpt",
            "turns",
            {"turns": []},
            "^its 'turns' is an empty .* sharegpt: turns$",
        ),
        (
            "chat",
            None,
            {"conversation": layout_rows.turns(HI)},
            "^its field 'conversation': it",
        ),
        (
            "chat",
            None,
            answer | {"tools": "{"},
            "^its fields 'instruction' and 'output': the",
        ),
    ):
        with pytest.raises(UnfitRowError, match=words):
            chats.read_chat(row_format, field, tokenizers["plain"], wrong)


@pytest.mark.parametrize("row_format", ["completion", "kto"])
def test_prompt_and_completion_are_read_beside_messages(row_format: str) -> None:
    row = {"prompt": "p", "completion": "c", "messages": layout_rows.CHAT, "label": 1}
    parsed = layouts.read_row(row, row_format)
    document = chats.make_document(parsed, "bytes")
    assert document.text == "pc" and document.is_plain
    unread = {"messages"} if row_format == "kto" else {"messages", "label"}
    assert {name for kind, name in document.notes if kind == NoteKind.UNREAD_FIELD} == unread
    # Tables have a column of nulls.
    parsed = layouts.read_row(row | {"messages": None}, row_format)
    assert chats.make_document(parsed, "bytes").text == "pc"


@pytest.mark.parametrize(
    "answer",
    [
        '{"from": "Berlin", "to": "Paris"}',
        '{"role": "admin"}',
        '[{"role": "user", "content": "a"}, 3]',
        "[]",
        "[" * 100_000,
    ],
    ids=["places", "role", "message", "empty", "deep"],
)
def test_json_without_messages_is_a_text(answer: str) -> None:
    row = layouts.read_row({"prompt": "p", "completion": answer}, "chat")
    assert row.is_plain and row.values["completion"] == answer
    pair = layouts.read_row({"prompt": "p", "chosen": answer, "rejected": "r"}, "preference")
    assert pair.values["chosen"] == answer


def test_system_of_a_column_is_not_lost() -> None:
    for system in ("", None):
        row = {"system": system, "prompt": "p", "completion": "c"}
        assert layouts.read_row(row, "completion").is_plain
    turns = layout_rows.speakers(HI, HELLO, system="B")
    words = "its 'system_prompt' differs from its first message, a system message; keep one of them"
    with pytest.raises(UnfitRowError, match=words):
        layouts.read_row({"system_prompt": "A", "conversations": turns}, "chat")
    row = layouts.read_row({"system": "B", "conversations": turns}, "chat").values
    assert row["messages"] == layout_rows.turns(HI, HELLO, system="B")


@pytest.mark.parametrize(
    ("prompt", "is_read"), [({"instruction": HI}, True), ({"prompt": HI}, False), ({}, False)]
)
def test_input_without_a_question_is_reported(prompt: dict[str, str], is_read: bool) -> None:
    row = layouts.read_row({**prompt, "input": WHY, "chosen": "a", "rejected": "b"}, "preference")
    assert row.unread == (() if is_read else ("input",))
    assert ("input" in row.layout) == is_read


def test_content_of_a_speaker_is_kept() -> None:
    message = {"from": "human", "content": HI}
    row = layouts.read_row({"conversations": [message]}, "sharegpt")
    assert row.values["messages"] == [{"role": "user", "content": HI}]


@pytest.mark.parametrize("row_format", ["alpaca", "question", "completion"])
def test_several_columns_have_no_field(row_format: str) -> None:
    keys = {"path": "a.jsonl", "format": row_format, "field": "text"}
    words = f"field names one column, and .* in several with format: {row_format}; leave it out"
    with pytest.raises(ValueError, match=words):
        Text.model_validate({"source": "text", "tokenizer": "t", **keys})
    with pytest.raises(ValueError, match=f"parts.b.{words}"):
        Mixture.model_validate(
            {"source": "mixture", "tokenizer": "t", "parts": {"b": {"weight": 1, **keys}}}
        )


@pytest.mark.parametrize("name", ["a.json", "a.parquet"])
def test_files_of_mixed_layouts_are_prepared_and_stated(
    name: str, tokenizers: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"instruction": HI, "input": "", "output": HELLO},
        {"question": HI, "answer": HELLO},
        {"prompt": HI, "completion": HELLO},
    ]
    if name.endswith(".json"):
        (tmp_path / name).write_text(json.dumps(rows, indent=1))
    else:
        parquet.write_table(
            pa.Table.from_pylist([row | {"n": 1} for row in rows[:1]]), tmp_path / name
        )
        rows = rows[:1]
    keys = {"tokenizer": tokenizers["plain"], "packing": "none", "data_dir": str(tmp_path / "rows")}
    data = Text.model_validate(
        {"source": "text", "path": str(tmp_path / name), "format": "chat", "eval_split": 0} | keys
    )
    prepared = sources.open_rows(data, 100, "train")
    assert prepared is not None and len(prepared) == len(rows)
    assert all(prepared[index]["mask"].any() for index in range(len(rows)))
    output = capfd.readouterr().err
    assert "chats: 1 row read as alpaca (instruction, output, input)" in output
    assert ("the field 'n' is not read, in 1 row" in output) == name.endswith(".parquet")


def test_faulty_arrays_and_tables_are_named(tokenizers: dict[str, str], tmp_path: Path) -> None:
    keys = {"source": "text", "format": "preference", "tokenizer": tokenizers["plain"]}
    (tmp_path / "a.json").write_text('[{"chosen": "a", "rejected": "b"}, 3]')
    (tmp_path / "b.json").write_text('[{"chosen": "a"')
    parquet.write_table(pa.table({"title": ["t"], "n": [1]}), tmp_path / "c.parquet")
    faults = {
        "a.json": "a.json, row 2: it is the number 3, not an object",
        "b.json": "b.json, row 1: the array is not JSON",
        "c.parquet": "c.parquet, row 1: it has the columns title, n, and data.format = preference",
    }
    for name, words in faults.items():
        data = Text.model_validate({"path": str(tmp_path / name), **keys})
        with pytest.raises(DataError, match=words.replace("(", r"\(")):
            preferences.open_source(data, 100, "train")
