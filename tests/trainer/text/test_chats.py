"""Ids and targets of chats equal those of transformers; ambiguous chats are refused."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxlaunch.trainer.checkpoint import saved_files
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.spec import Mixture, Text
from jaxlaunch.trainer.text import chats, documents, recipe, tokenizer
from jaxlaunch.trainer.text.chat_notes import NoteKind
from tests import environments, needs
from tests.trainer.text import chat_corpora, corpora
from tests.trainer.text.chat_corpora import CALLS, CHATML, TOOLS, llama

FEW = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello \ud83d"}]


def encode_chat(
    folder: str, conversations: list[Any], tools: list[Any] | None = None
) -> tuple[list[Any], list[Any]]:
    """Ids and masks of chats."""
    pairs = chat_corpora.encode_chat(folder, conversations, tools)
    return [ids.tolist() for ids, _ in pairs], [mask.astype(int).tolist() for _, mask in pairs]


def encode_with_transformers(
    folder: Path, conversations: list[Any], tools: list[Any], tokenizers: list[str]
) -> list[Any]:
    """Ids and masks of the chats by each tokenizer."""
    try:
        environments.find_python("torch")
    except environments.MissingEnvironmentError as error:
        needs.absent(str(error))
    (folder / "chats.json").write_text(json.dumps(list(zip(conversations, tools, strict=True))))
    program = str(Path(__file__).with_name("transformers_chats.py"))
    answers = environments.run_program(
        "torch", program, str(folder / "chats.json"), *tokenizers
    ).splitlines()
    return [tuple(json.loads(line)) for line in answers]


@pytest.mark.extended
def test_ids_and_targets_equal_transformers(tmp_path: Path) -> None:
    result = chat_corpora.make_chats(450)
    assert sum(map(len, result)) > 2000
    named = [{"name": "default", "template": TOOLS}, {"name": "rag", "template": "{{ no }}"}]
    folders = {
        "chatml": chat_corpora.save_chat_tokenizer(tmp_path / "chatml", CHATML),
        "llama": chat_corpora.save_chat_tokenizer(tmp_path / "llama", llama(marked=True)),
        "tools": chat_corpora.save_chat_tokenizer(tmp_path / "tools", named),
        "unigram": chat_corpora.save_chat_tokenizer(tmp_path / "unigram", CHATML, "unigram"),
        "wordpiece": chat_corpora.save_chat_tokenizer(tmp_path / "wordpiece", CHATML, "wordpiece"),
        "calls": chat_corpora.save_chat_tokenizer(
            tmp_path / "calls",
            [
                {"name": "default", "template": CHATML},
                {"name": "tool_use", "template": CALLS + CHATML},
            ],
        ),
        "beside": chat_corpora.save_chat_tokenizer(tmp_path / "beside", None),
    }
    (tmp_path / "chatml" / chats.TEMPLATE_FILE).write_text(CHATML)
    (tmp_path / "beside" / chats.TEMPLATE_FILE).write_text(CHATML)
    (tmp_path / "beside" / saved_files.TEMPLATES_FOLDER).mkdir()
    (tmp_path / "beside" / saved_files.TEMPLATES_FOLDER / "tool_use.jinja").write_text(
        CALLS + CHATML
    )
    tools = [chat_corpora.make_tools(number) for number in range(len(result))]
    answers = encode_with_transformers(tmp_path, result, tools, list(folders.values()))
    for (name, folder), (ids, masks) in zip(folders.items(), answers, strict=True):
        actual = encode_chat(folder, result, tools)
        assert actual[0] == ids, name
        # transformers marks nothing from a turn on that begins with what WordPiece leaves out, such
        # as a space.
        message = [
            at
            for at, chat in enumerate(result)
            if name != "wordpiece" or all(map(_begins_with_a_letter, chat))
        ]
        assert len(message) > 150 and [actual[1][at] for at in message] == [
            masks[at] for at in message
        ], name
        assert all(map(any, actual[1])) and not any(map(all, actual[1]))
        if name == "llama":  # without marks, turn by turn
            assert encode_chat(
                chat_corpora.save_chat_tokenizer(tmp_path / "plain", llama(marked=False)), result
            ) == (ids, masks)
        if name == "beside":  # as in one file, by name
            assert actual == encode_chat(folders["calls"], result, tools)
            assert chats.load_chats(folder).digest == chats.load_chats(folders["calls"]).digest
            saved_files.save_tokenizer(
                str(tmp_path / "run"), tokenizer.load_tokenizer(folder).files
            )
            assert saved_files.read_saved_tokenizer(str(tmp_path / "run")).keys() >= {
                f"{saved_files.TEMPLATES_FOLDER}tool_use.jinja",
                chats.TEMPLATE_FILE,
            }
            saved_files.save_tokenizer(
                str(tmp_path / "run"), tokenizer.load_tokenizer(folders["calls"]).files
            )
            expected = {"tokenizer.json", "tokenizer_config.json"}
            assert set(saved_files.read_saved_tokenizer(str(tmp_path / "run"))) == expected


def _begins_with_a_letter(message: dict[str, Any]) -> bool:
    return message["role"] != "assistant" or message["content"][:1].isalpha()


def test_tools_are_a_list_or_json(tmp_path: Path) -> None:
    built = partial(
        *(chats.read_chat, "chat", None),
        chat_corpora.save_chat_tokenizer(tmp_path, CALLS + CHATML),
    )
    tools = chat_corpora.make_tools(0)
    first = built({"messages": FEW, "tools": tools})
    assert first == built({"messages": FEW, "tools": json.dumps(tools)})
    assert first.text.startswith('[\n  {\n    "type"')
    assert built({"messages": FEW}) == built({"messages": FEW, "tools": None}) != first
    for wrong, words in (
        ("[", "are not JSON"),
        ({"a": 1}, "are not a list of objects"),
        (["f"], "are not a list of objects"),
    ):
        message = f"its field 'messages': the row's tools {words}"
        with pytest.raises(documents.UnfitRowError, match=message):
            built({"messages": FEW, "tools": wrong})


def test_token_with_an_assistant_character_is_a_target(tmp_path: Path) -> None:
    # Tokens of `abc`, a space that was trimmed to nothing, a character of two tokens, and what is
    # behind.
    offsets = [(0, 3), (4, 4), (4, 5), (4, 5), (5, 6)]
    is_inside_T = tokenizer._tokens_in_spans(offsets, [(3, 5)])
    assert is_inside_T.tolist() == [False, True, True, True, False]
    is_inside_T = tokenizer._tokens_in_spans(offsets, [(1, 4)])
    assert is_inside_T.tolist() == [True, True, False, False, False]
    assert tokenizer._tokens_in_spans([], [(0, 1)]).tolist() == []
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    )
    folder = chat_corpora.save_chat_tokenizer(tmp_path, template)
    ((_, mask),) = zip(
        *encode_chat(folder, [[{"role": "assistant", "content": "👍🏽"}]]), strict=True
    )
    assert mask == [1] * (len(mask) - 1) + [
        0
    ]  # transformers leaves out the last bytes of such a character


def test_lone_surrogate_is_replaced_and_counted(tmp_path: Path) -> None:
    built = chats.load_chats(chat_corpora.save_chat_tokenizer(tmp_path, CHATML)).render_document(
        FEW
    )
    assert built.replaced == 1 and built.spans is not None
    assert [built.text[start:end] for start, end in built.spans] == ["hello \ufffd<|end|>"]
    row = (
        json.dumps({"messages": [{"role": "assistant", "content": "caf?"}]})
        .encode()
        .replace(b"?", b"\xe9")
    )
    (tmp_path / "a.jsonl").write_bytes(row)
    ((part,),) = documents.split_units([f"{tmp_path}/a.jsonl"])
    (bad,) = documents.read_documents(
        part, "messages", partial(chats.read_chat, "chat", None, str(tmp_path))
    )
    assert bad.replaced == 1 and "caf\ufffd" in bad.text


def test_table_rows_may_be_chats(tmp_path: Path) -> None:
    folder = chat_corpora.save_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    result = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 2
    table = pa.table({"turns": result})
    parquet.write_table(table, tmp_path / "a.parquet")
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    chat_corpora.write_lines(tmp_path / "a.jsonl", result, "turns")
    built = partial(chats.read_chat, "chat", "turns", folder)
    for name in ("a.parquet", "a.arrow", "a.jsonl"):
        ((part,),) = documents.split_units([str(tmp_path / name)])
        actual = list(documents.read_documents(part, "turns", built, chats.OPTIONAL_FIELDS))
        # Lines have a number, which is not read.
        row = {"turns": result[0]} | ({"id": 1} if name == "a.jsonl" else {})
        assert actual == [built(row)] * 2


def test_nulls_of_a_table_are_absent_keys(tmp_path: Path) -> None:
    """A struct has the keys of all rows, and the chats are those of lines without the nulls."""
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role + ':' }}"
        "{% for key, value in m | dictsort %}{% if key != 'role' %}{{ {key: value} | tojson }}"
        "{% endif %}{% endfor %}|{% endfor %}"
    )
    built = partial(
        *(chats.read_chat, "chat", None),
        chat_corpora.save_chat_tokenizer(tmp_path / "tokenizer", template),
    )
    rows = []
    for name, arguments in (("rain", {"city": "Rome"}), ("add", {"a": 2, "more": [1, None]})):
        call = {"id": "x", "function": {"name": name, "arguments": arguments}}
        messages = [
            {"role": "user", "content": f"ask {name}"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "yes"},
            {"role": "assistant", "content": "done"},
        ]
        properties = {key: {"type": "string"} for key in arguments}
        schema = {"type": "function", "function": {"name": name, "parameters": properties}}
        rows.append({"messages": messages, "tools": [schema]})
    rows.append({"messages": FEW[:1] + [{"role": "assistant", "content": "hello"}]})
    table = pa.Table.from_pylist([row | {"origin": "web"} for row in rows])
    parquet.write_table(table, tmp_path / "a.parquet")
    ((part,),) = documents.split_units([str(tmp_path / "a.parquet")])
    actual = list(documents.read_documents(part, "messages", built, chats.OPTIONAL_FIELDS))
    assert actual == [built(row) for row in rows]
    assert all("None" not in document.text for document in actual)
    assert "null" not in actual[0].text and '"more": [1, null]' in actual[1].text
    fields = ("messages", *chats.OPTIONAL_FIELDS)
    assert documents.note_columns([part], fields) == {(NoteKind.UNREAD_FIELD, "origin"): 3}
    # A map keeps its keys, and what is null there is the row's value.
    kind = pa.map_(pa.string(), pa.struct([("x", pa.int64()), ("y", pa.int64())]))
    column = pa.array([[("a", {"x": 1}), ("b", None)]], kind)
    assert documents._column_values(column) == ([{"a": {"x": 1}, "b": None}], [])


@pytest.mark.parametrize(
    ("template", "row", "words"),
    [
        (CHATML, "hi", "it is a text, not a list of messages"),
        (CHATML, [], "it is an empty list, without a message"),
        (CHATML, ["hi"], "its message 1 is a text, not an object with a role"),
        (CHATML, [FEW[0], {"content": "hi"}], "its message 2 has no role; it has content"),
        (
            CHATML,
            FEW[:1],
            "it has no words of the role 'assistant', which are the targets; its roles: user",
        ),
        (
            llama(marked=False),
            FEW[:1],
            "it has no words of the role 'assistant', which are the targets; its roles: user",
        ),
        (CHATML, [{"role": "user", "content": None}], "no attribute 'content'; a message has no"),
        (TOOLS, [{"role": "king", "content": "hi"}], "refuses its messages: no role king"),
        ("{{ messages[0].x.y }}", FEW, "refuses its messages: .* has no attribute 'x'"),
        (
            "{{ messages.clear() }}",
            FEW,
            "refuses its messages: access to attribute 'clear' of 'list' object is unsafe",
        ),
        (
            "{{ messages | length }} {{ messages[-1].content }}",
            FEW,
            "renders message 2 or those before it otherwise",
        ),
        (
            "{% macro say(m) %}({% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}{{ "
            "say(messages[1]) }}",
            FEW,
            "is inside of a macro or a set block",
        ),
    ],
)
def test_invalid_chat_is_reported_with_its_row(
    tmp_path: Path, template: str, row: Any, words: str
) -> None:
    built = partial(
        *(chats.read_chat, "chat", None),
        chat_corpora.save_chat_tokenizer(tmp_path / "tokenizer", template),
    )
    good = "{{ messages" not in template and "macro" not in template
    path = chat_corpora.write_lines(tmp_path / "a.jsonl", [FEW, row] if good else [row])
    ((part,),) = documents.split_units([path])
    message = rf"a.jsonl, row {1 + good}: its field 'messages': .*{words}"
    with pytest.raises(DataError, match=message) as raised:
        list(documents.read_documents(part, "messages", built))
    assert raised.value.code == 65


def test_keys_and_files_unsuited_to_chats_are_refused(tmp_path: Path) -> None:
    words = "format: chat needs a tokenizer with a chat template; bytes have none"
    with pytest.raises(ValueError, match=words):
        make_chat(tmp_path, "bytes")
    words = "parts.b.format: chat needs a tokenizer with a chat template"
    with pytest.raises(ValueError, match=words):
        Mixture.model_validate(
            {"source": "mixture", "parts": {"b": {"weight": 1, "path": "x", "format": "chat"}}}
        )
    (tmp_path / "a.txt").write_text("hi")
    with pytest.raises(DataError, match="a.txt is plain text; chats are rows of JSON lines"):
        recipe.make_recipe(
            make_chat(
                tmp_path, corpora.save_tokenizer(tmp_path / "tokenizer"), path=f"{tmp_path}/a.txt"
            ),
            32,
        )


def test_recipe_depends_on_the_template(tmp_path: Path) -> None:
    chat_corpora.write_lines(tmp_path / "a.jsonl", [FEW])
    folders = [
        chat_corpora.save_chat_tokenizer(tmp_path / name, text)
        for name, text in (("a", CHATML), ("b", CHATML), ("c", TOOLS))
    ]
    first, same, second = (
        recipe.make_recipe(make_chat(tmp_path, folder), 32) for folder in folders
    )
    assert first.address == same.address != second.address
    assert first.field == "messages" and recipe.Recipe.from_json(first.to_json()) == first
    # Texts are found again as long as the format is the same.
    plain = recipe.Recipe(("a",), "digest", "bytes", "bytes", None, "concat", 32, 0.0, 0)
    assert plain.address == "ec566a7a59290a7f"
    # Where documents are held out, the seed and the group tell which.
    split = dataclasses.replace(plain, eval_split=0.1)
    variants = [split, dataclasses.replace(split, split_seed=1)]
    variants.append(dataclasses.replace(split, group="author"))
    assert len({variant.address for variant in variants}) == 3
    assert dataclasses.replace(plain, split_seed=1).address == plain.address


def test_template_date_is_fixed(tmp_path: Path) -> None:
    template = (
        "{{ strftime_now('%d %b %Y') }}{% generation %}{{ messages[-1].content }}{% "
        "endgeneration %}"
    )
    assert (
        chats.load_chats(chat_corpora.save_chat_tokenizer(tmp_path, template))
        .render_document(FEW)
        .text.startswith("26 Jul 2024hello")
    )


def make_chat(folder: Path, tokenizer: str, **keys: Any) -> Text:
    options = {
        "path": f"{folder}/a.jsonl",
        "tokenizer": tokenizer,
        "data_dir": f"{folder}/out",
    } | keys
    return Text(source="text", format="chat", **options)
