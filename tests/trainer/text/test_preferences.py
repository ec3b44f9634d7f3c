"""Rows of preferences in all forms that trl reads become pairs; others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.spec import DPO, LM, Text, TrainSpec
from jaxlaunch.trainer.tasks.dpo import Preference
from jaxlaunch.trainer.text import preferences, tokenizer
from tests.trainer.text import chat_corpora, corpora

LENGTH = 127
ASK = [{"role": "user", "content": "Is it?"}]
YES, NO = [{"role": "assistant", "content": "Yes."}], [{"role": "assistant", "content": "No!"}]


def make_data(folder: Path, rows: list[Any], **keys: Any) -> Text:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"path": f"{folder}/a.jsonl", "eval_split": 0.0}
    return Text(source="text", format="preference", **(options | keys))


def open_pairs(source_data: Text, split: Any = "train", length: int = LENGTH) -> preferences.Pairs:
    result = preferences.open_source(source_data, length, split)
    assert result is not None
    return result


def read_rows(source_data: Text, split: Any = "train") -> list[dict[str, Any]]:
    result = open_pairs(source_data, split)
    return [result[at] for at in range(len(result))]


def decode_targets(row: dict[str, Any], index: int) -> list[int]:
    result: list[int] = row["tokens"][index, 1:][row["mask"][index] > 0].tolist()
    return result


def decode_text(row: dict[str, Any], index: int) -> list[int]:
    result: list[int] = row["tokens"][index, : row["length"][index]].tolist()
    return result


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Is it? ", "chosen": "Yes é.", "rejected": "No!"},
        {"messages": "Is it? ", "chosen": "Yes é.", "rejected": "No!", "score": 3},
        {"chosen": "Is it? Yes é.", "rejected": "Is it? No!"},
    ],
)
def test_prompt_is_not_predicted(tmp_path: Path, row: dict[str, Any]) -> None:
    (built,) = read_rows(make_data(tmp_path, [row]))
    actual = [bytes(decode_text(built, at)).decode() for at in (0, 1)]
    assert actual == ["Is it? Yes é.", "Is it? No!"]
    # As in trl, the space before the answers of an implicit prompt belongs to them.
    space = "" if "prompt" in row or "messages" in row else " "
    targets = [bytes(decode_targets(built, at)).decode() for at in (0, 1)]
    assert targets == [f"{space}Yes é.", f"{space}No!"]
    assert built["length"].tolist() == [14, 10] and not built["mask"][1, 9:].any()


def test_plain_text_gets_bos_and_eos(tmp_path: Path) -> None:
    place = corpora.save_tokenizer(tmp_path / "tokenizer", bos_token=corpora.BEGIN)
    row = {"prompt": "the quick", "chosen": " brown fox", "rejected": " lazy dog"}
    (built,) = read_rows(make_data(tmp_path, [row], tokenizer=place))
    source_data = tokenizer.load_tokenizer(place)
    for at, field in enumerate(("chosen", "rejected")):
        assert decode_text(built, at) == [
            source_data.bos,
            *source_data.encode_batch([row["prompt"] + row[field]])[0],
            source_data.eos,
        ]
        assert decode_targets(built, at)[-1] == source_data.eos
        assert source_data.decode(decode_targets(built, at)) == row[field]


@pytest.mark.parametrize(
    "template", [chat_corpora.llama(marked=True), chat_corpora.llama(marked=False)]
)
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASK, "chosen": YES, "rejected": NO},
        {"messages": ASK, "chosen": "Yes.", "rejected": "No!"},
        {"chosen": ASK + YES, "rejected": ASK + NO},
        {"prompt": ASK + YES + ASK, "chosen": YES, "rejected": NO},
    ],
)
def test_only_the_last_turn_of_messages_is_predicted(
    tmp_path: Path, template: str, row: dict[str, Any]
) -> None:
    place = chat_corpora.save_chat_tokenizer(tmp_path / "tokenizer", template)
    (built,) = read_rows(make_data(tmp_path, [row], tokenizer=place))
    options = row.get("prompt", ASK)
    for at, last in enumerate((YES, NO)):
        ((ids, mask),) = chat_corpora.encode_chat(place, [options + last])
        assert decode_text(built, at) == ids.tolist()
        actual = tokenizer.load_tokenizer(place).decode(decode_targets(built, at))
        assert actual == last[0]["content"]
        assert decode_targets(built, at) == ids[mask].tolist()[-len(decode_targets(built, at)) :]


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"system": "Be brief.", "question": "Is it?"}, [SYSTEM, *ASK]),
        ({"system": "", "question": "Is it?"}, ASK),
        ({"system": "Be brief.", "prompt": "Is it?"}, [SYSTEM, *ASK]),
        ({"system": "Be brief.", "prompt": [SYSTEM, *ASK]}, [SYSTEM, *ASK]),
        # Datasets have the question in a column and in the conversations.
        ({"prompt": "Is it?", "chosen": ASK + YES, "rejected": ASK + NO}, ASK),
        ({"prompt": ASK, "chosen": ASK + YES, "rejected": ASK + NO}, ASK),
        ({"system": "Be brief.", "chosen": ASK + YES, "rejected": ASK + NO}, [SYSTEM, *ASK]),
    ],
)
def test_row_may_be_a_conversation(tmp_path: Path, row: dict[str, Any], prompt: list[Any]) -> None:
    row = {"chosen": "Yes.", "rejected": "No!"} | row
    # A prompt of several turns may continue with one of the user.
    why = [{"role": "user", "content": "Why?"}]
    longer = {"prompt": ASK + YES, "chosen": ASK + YES, "rejected": why + NO}
    place = chat_corpora.save_chat_tokenizer(tmp_path / "tokenizer", chat_corpora.CHATML)
    built, built_longer = read_rows(make_data(tmp_path, [row, longer], tokenizer=place))
    for at, last in enumerate((YES, NO)):
        ((ids, _),) = chat_corpora.encode_chat(place, [ASK + YES + (ASK + YES, why + NO)[at]])
        assert decode_text(built_longer, at) == ids.tolist()
        ((ids, mask),) = chat_corpora.encode_chat(place, [prompt + last])
        assert decode_text(built, at) == ids.tolist()
        assert decode_targets(built, at) == ids[mask].tolist()[-len(decode_targets(built, at)) :]


def test_conversations_need_a_template_and_their_prompt(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    orca = {"system": "S", "question": "P", "chosen": "GOOD", "rejected": "BAD"}
    with pytest.raises(SpecError, match="a row with 'system' or 'question' is a conversation"):
        open_pairs(make_data(tmp_path, [orca]))
    place = chat_corpora.save_chat_tokenizer(tmp_path / "tokenizer", chat_corpora.CHATML)
    other = {"prompt": "Why?", "chosen": ASK + YES, "rejected": ASK + NO}
    with pytest.raises(DataError, match="role 'user', and none of their messages is its prompt"):
        open_pairs(make_data(tmp_path, [other], tokenizer=place))
    wrong = orca | {"prompt": [SYSTEM, *ASK]}
    with pytest.raises(DataError, match="its 'system' differs from its first message"):
        open_pairs(make_data(tmp_path, [wrong], tokenizer=place))
    capfd.readouterr()
    noted = [orca | {"history": [["a", "b"]]}, orca | {"chosen": YES, "prompt": "Q", "score": None}]
    assert len(open_pairs(make_data(tmp_path, noted, tokenizer=place))) == 2
    assert capfd.readouterr().err.splitlines() == [
        "preferences: the field 'history' is not read, in 1 row",
        "preferences: the field 'question' is not read, in 1 row",
    ]


def test_table_pairs_are_held_out(tmp_path: Path) -> None:
    options = [
        {"prompt": f"{at}: ", "chosen": "a", "rejected": "b", "other": at} for at in range(10)
    ]
    lines = make_data(tmp_path, options, eval_split=0.3)
    parquet.write_table(pa.Table.from_pylist(options), tmp_path / "a.parquet", row_group_size=4)
    table = lines.model_copy(update={"path": f"{tmp_path}/a.parquet"})
    result = []
    for split in ("train", "eval"):
        assert open_pairs(lines, split).fingerprint() != open_pairs(table, split).fingerprint()
        for mine, yours in zip(read_rows(lines, split), read_rows(table, split), strict=True):
            assert all(np.array_equal(mine[key], yours[key]) for key in mine)
            result.append(bytes(decode_text(mine, 0)).decode())
    assert sorted(result) == [f"{at}: a" for at in range(10)] and len(result) == 10
    actual = preferences.open_source(lines.model_copy(update={"eval_split": 0.0}), LENGTH, "eval")
    assert actual is None
    apart = lines.model_copy(update={"eval_path": f"{tmp_path}/a.parquet"})
    assert [len(open_pairs(apart, split)) for split in ("train", "eval")] == [10, 10]


def test_fingerprint_has_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = open_pairs(make_data(tmp_path, [GOOD]))
    fingerprint = pairs.fingerprint()
    monkeypatch.setattr(preferences, "PAIRS_VERSION", preferences.PAIRS_VERSION + 1)
    assert pairs.fingerprint() != fingerprint


def test_unfit_pairs_are_skipped_and_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [
        {"prompt": "p", "chosen": "a" * count, "rejected": "b"} for count in (LENGTH, LENGTH + 1)
    ]
    assert len(open_pairs(make_data(tmp_path, options))) == 1
    assert (
        "preferences: 1 of 2 pairs are left out, one of whose texts is longer"
        in capfd.readouterr().err
    )
    with pytest.raises(
        DataError,
        match=r"a.jsonl .* hold 0 pairs that fit into train.model.length = 127 \(1 are long",
    ):
        open_pairs(make_data(tmp_path, options[1:]))


GOOD = {"prompt": "p", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "rejected": "b"}, "it has no 'chosen'; it has prompt, rejected"),
        (
            {"prompt": "p", "good": "b"},
            "it has the columns prompt, good, and data.format = preference reads the layouts "
            "preference: chosen/chosen_response/response_j and rejected",
        ),
        (GOOD | {"rejected": None}, "it has no 'rejected'"),
        (GOOD | {"prompt": {}}, "its 'prompt' is an object, neither a text nor a list of messages"),
        (GOOD | {"chosen": ASK}, "its 'chosen': it has no words of the role 'assistant'"),
        (GOOD | {"chosen": [{"content": "a"}]}, "its 'chosen': its message 2 has no role"),
        (GOOD | {"chosen": YES, "tools": "{"}, "its 'chosen': the row's tools are not JSON"),
    ],
)
def test_invalid_pair_is_reported_with_its_row(
    tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    place = chat_corpora.save_chat_tokenizer(tmp_path / "tokenizer", chat_corpora.CHATML)
    with pytest.raises(DataError) as raised:
        open_pairs(make_data(tmp_path, [GOOD, row], tokenizer=place))
    assert str(raised.value).startswith(f"{tmp_path}/a.jsonl, row 2: {words}")


def test_messages_need_a_template_and_rows(tmp_path: Path) -> None:
    words = "data.tokenizer = bytes has no chat template, which messages need"
    with pytest.raises(SpecError, match=words):
        open_pairs(make_data(tmp_path, [{"chosen": YES, "rejected": NO}]))
    (tmp_path / "a.txt").write_text("hi")
    with pytest.raises(DataError, match="a.txt is plain text; preferences are rows of JSON lines"):
        open_pairs(make_data(tmp_path, [], path=f"{tmp_path}/a.txt"))


@pytest.mark.parametrize(
    ("task", "keys", "words"),
    [
        (LM, {}, "format: preference has pairs of texts, which the task dpo trains on"),
        (DPO, {"format": "text"}, "has no pairs of texts, which dpo trains on; give source"),
        (
            DPO,
            {"packing": "none"},
            "packing does not apply to format: preference, whose rows have chosen and rejected",
        ),
        (DPO, {"field": "chosen"}, "field does not apply to format: preference"),
    ],
)
def test_task_and_rows_must_match(task: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options = {"source": "text", "path": "a.jsonl", "format": "preference", **keys}
        TrainSpec.model_validate({"task": task, "data": options})


def test_task_reads_the_pairs_of_a_job(tmp_path: Path) -> None:
    text = make_data(tmp_path, [GOOD, GOOD], eval_split=0.5)
    spec = TrainSpec(task=DPO, model=specs.Decoder(length=15, vocab=256), data=text)
    task = Preference()
    for split in ("train", "eval"):
        source = task.source(spec, split)
        assert source is not None and len(source) == 1
        example = task.example(source[0])
        actual = {key: value.shape for key, value in example.items()}
        assert actual == {"tokens": (2, 16), "mask": (2, 15), "length": (2,)}
    few = spec.model_copy(update={"model": specs.Decoder(length=15, vocab=200)})
    words = "vocab = 200 is less than the 256 of data.tokenizer = bytes"
    with pytest.raises(SpecError, match=words):
        task.source(few, "train")
