"""Faulty data blocks and files, and what the user is told."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet
from tokenizers import Tokenizer, models

from jaxlaunch.trainer.data import records
from tests.trainer.text import chat_corpora, corpora
from tests.trainer.text.chat_corpora import CHATML, TOOLS

Files = dict[str, bytes | Callable[[Path], Any]]


class Case(NamedTuple):
    """A case with its exit code and words of the message; `data` extends the default block."""

    name: str
    code: int
    words: str
    data: dict[str, Any] = {}
    files: Files = {}
    model: dict[str, Any] = {}
    task: str = "lm"


def rows(*values: Any) -> bytes:
    """JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in values).encode()


def table(name: str, *, ending: int | None = None, **columns: Any) -> Files:
    """A Parquet or Arrow file, cut at `ending`."""

    def write(path: Path) -> None:
        content = pa.table(columns)
        if path.suffix == ".parquet":
            parquet.write_table(content, path, row_group_size=4)
        else:
            with pa.ipc.new_stream(str(path), content.schema) as writer:
                writer.write_table(content)
        if ending is not None:
            path.write_bytes(path.read_bytes()[:ending])

    return {name: write}


def zstd(path: Path) -> None:
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write(rows(*[GOOD] * 500))
    path.write_bytes(path.read_bytes()[:-9])


def not_utf8(path: Path) -> None:
    """A column of messages with bytes that are not UTF-8, which pyarrow does not write."""
    roles = pa.array([b"user", b"\xff"])
    texts = pa.Array.from_buffers(pa.string(), 2, roles.buffers())
    parquet.write_table(
        pa.table({"messages": pa.StructArray.from_arrays([texts], names=["role"])}), path
    )


def twice(path: Path) -> None:
    parquet.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path
    )


def damaged(name: str, first: int, last: int) -> Files:
    """A table of which these bytes are others."""

    def write(path: Path) -> None:
        table(name, text=["abc"] * 900)[name](path)  # type: ignore[operator]
        data = bytearray(path.read_bytes())
        data[first:last] = bytes(byte ^ 0x5A for byte in data[first:last])
        path.write_bytes(data)

    return {name: write}


def without_unknown(path: Path) -> None:
    """A tokenizer that has no token for most words, and none for those."""
    path.mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(path / "tokenizer.json"))


def other_keys(path: Path) -> None:
    records.write(path, iter([{"ids": [1, 2]}]))


def token_300(path: Path) -> None:
    records.write(path, iter([{"tokens": [1, 2, 300, 4, 5, 6, 7, 8, 9]}]))


def tokenizer(kind: str = "bpe", **config: Any) -> Files:
    """A tokenizer with another tokenizer_config.json."""
    return {"tokenizer": lambda path: corpora.save_tokenizer(path, kind, **config)}


def template(text: Any) -> Files:
    """A tokenizer with this chat template."""
    return {"tokenizer": lambda path: chat_corpora.save_chat_tokenizer(path, text)}


def inside(name: str, content: bytes) -> Files:
    """A tokenizer of which one file holds this."""

    def write(path: Path) -> None:
        corpora.save_tokenizer(path)
        (path / name).write_bytes(content)

    return {"tokenizer": write}


# A token, which nothing predicts.
FIRST = "{% generation %}{{ messages[0].content[0] }}{% endgeneration %}"
RECORDS = {"source": "array_record", "path": "PATH/a.array_record", "tokenizer": None}
RECORD = "a.array_record"
GOOD = {"text": "fine words"}
A = "a.jsonl, row "
FEW = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
CHAT = {"format": "chat"}
MANY = rows(*[GOOD] * 99)
WITH_NULL = ["a"] * 5 + [None]
PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}
DPO = "dpo"
PAIRS: dict[str, Any] = {"format": "preference", "tokenizer": "bytes"}
MIX: dict[str, Any] = {"source": "mixture", "path": None, "tokenizer": "bytes"}


def mixture(**parts: Any) -> dict[str, Any]:
    """Parts by name; PATH in a path is the folder of the case."""
    return {
        **MIX,
        "parts": {
            name: {"weight": 1, "path": "PATH/a.jsonl", **keys} for name, keys in parts.items()
        },
    }


def lines(name: str, words: str, *values: Any, **keys: Any) -> Case:
    """A file of JSON lines of which a row is wrong."""
    return Case(name, 65, words, files={"a.jsonl": rows(*values)}, **keys)


def only(name: str, words: str, files: Files, **data: Any) -> Case:
    """The first file, which is the path, is wrong."""
    return Case(name, 65, words, {"path": f"PATH/{next(iter(files))}", **data}, files)


def raw(name: str, words: str, content: bytes, file: str = "a.jsonl", **data: Any) -> Case:
    """A file that is wrong as a whole."""
    return only(name, words, {file: content}, **data)


def pair(name: str, words: str, *pairs: dict[str, Any]) -> Case:
    """A row of preferences that is wrong."""
    return lines(name, words, *pairs, data=PAIRS, task=DPO)


def part(name: str, words: str, file: str, content: bytes) -> Case:
    """A mixture with a part whose file is wrong."""
    return Case(name, 65, words, mixture(a={}, b={"path": f"PATH/{file}"}), {file: content})


def token(name: str, words: str, **config: Any) -> Case:
    """A tokenizer_config.json that is wrong."""
    return Case(name, 64, words, files=tokenizer(**config))


def broken(name: str, words: str, file: str, content: bytes) -> Case:
    """A file of the tokenizer that is wrong."""
    return Case(name, 64, words, files=inside(file, content))


def chat(name: str, words: str, row: Any, text: str = CHATML) -> Case:
    """Return a case whose row is not a chat."""
    files: Files = {"a.jsonl": rows({"messages": FEW}, {"messages": row}), **template(text)}
    return Case(name, 65, f"{A}2: its field 'messages': {words}", CHAT, files)


def key(name: str, words: str, **data: Any) -> Case:
    """A key of the data block that is wrong."""
    return Case(name, 64, words, data)


MAIN = "tokenizer.json"
MODEL_HINT = "name the folder of a tokenizer.json: no other file is read"
MODEL = {"tokenizer": "PATH/t.model"}
RAG = [{"name": "rag", "template": ""}]
EVAL = {"eval_path": "PATH/b.jsonl"}
NOT_UTF8: Files = {"a.parquet": not_utf8, **template(CHATML)}
FOLDER = {"path": "PATH/in"}
KINDS: Files = {"in/a.jsonl": rows(GOOD), "in/b.txt": b"x"}
NO_SPLIT = {**CHAT, "eval_split": 0}
LAST: Files = {"a.jsonl": rows({"messages": [FEW[1] | {"content": "h"}]}), **template(FIRST)}
KEYS = [
    key("no path", "train.data.text.path: Field required", path=None),
    key("unknown key", "train.data.text.feild: Extra inputs are not permitted", feild="text"),
    key("unknown source", "train.data", source="texts"),
    key(
        "path of the web",
        "which cannot be read: only folders, gs:// and s3:// can",
        path="http://x/a.jsonl",
    ),
    key("path that is a number", "train.data.text.path", path=3),
    key("share above 1", "less than", eval_split=1.5),
    key("share below 0", "greater than or equal to 0", eval_split=-0.1),
    key("unknown packing", "Input should be 'concat', 'first-fit' or 'none'", packing="best"),
    key("unknown format", "Input should be 'text', 'chat', 'messages', 'sharegpt'", format="chats"),
    key("seed below 0", "greater than or equal to 0", seed=-1),
    key("apart with a tokenizer", "apart applies to one stream of bytes", apart=True),
    key("bigram with a tokenizer", "bigram applies to one stream of bytes", bigram=True),
    key(
        "eval_path of a stream", "eval_path applies to documents", tokenizer="bytes", eval_path="x"
    ),
    key(
        "bytes for chats",
        "format: chat needs a tokenizer with a chat template",
        tokenizer="bytes",
        format="chat",
    ),
    key(
        "data_dir in a bucket",
        "is not a folder, and data can only be prepared in a folder",
        data_dir="gs://team-a/b",
    ),
    key(
        "tokenizer of the web",
        "which cannot be read: only folders, gs:// and s3:// can",
        tokenizer="hf://a/b",
    ),
    key("pairs for next-token", f"which the task {DPO} trains on", **PAIRS),
    key("no parts", "weights that sum to 0", **MIX, parts={}),
    key("weights of 0", "weights that sum to 0", **mixture(a={"weight": 0}, b={"weight": 0})),
    key("weight below 0", "greater than or equal to 0", **mixture(a={"weight": -1})),
    key("weight that is no number", "weight", **mixture(a={"weight": float("nan")})),
    key("endless weight", "weight", **mixture(a={"weight": float("inf")})),
    key("part without weight", "Field required", **{**MIX, "parts": {"a": {"path": "x"}}}),
    key(
        "part with a tokenizer",
        "holds a with a tokenizer of its own",
        **mixture(a={"tokenizer": "bytes"}),
    ),
    key(
        "chats in a part of bytes",
        "parts.a.format: chat needs a tokenizer",
        **mixture(a={"format": "chat"}),
    ),
    key("part without path", "Field required", **{**MIX, "parts": {"a": {"weight": 1}}}),
    key("part of the web", "cannot be read", **mixture(a={"path": "http://x"})),
    key("empty list of paths", "train.data.text.path: names no file", path=[]),
    key("empty list to evaluate on", "train.data.text.eval_path: names no file", eval_path=[]),
    key("empty path in a list", "contains '', which names no file", path=["PATH/a.jsonl", ""]),
    key("store without a bucket", "contains 'gs://', which names no bucket", path="gs://"),
    key("empty field", "train.data.text.field", field=""),
    key("empty tokenizer", "is empty: write bytes, or the folder or file", tokenizer=""),
    key("seed of more than 64 bits", "train.data.text.seed", seed=2**80),
    key(
        "weights without a sum",
        "weights that sum to inf",
        **mixture(a={"weight": 1e308}, b={"weight": 1e308}),
    ),
    Case("text for preferences", 64, "has no pairs of texts", task=DPO),
    Case(
        "packed preferences",
        64,
        "packing does not apply to format",
        {**PAIRS, "packing": "none"},
        task=DPO,
    ),
]
TOKENIZERS = [
    key(
        "no tokenizer there",
        "is neither bytes nor a folder or file of a tokenizer.json",
        tokenizer="PATH/gone",
    ),
    Case(
        "folder of another tokenizer",
        64,
        "it holds tokenizer.model",
        files={"tokenizer/tokenizer.model": b"x"},
    ),
    key(
        "tokenizer of a hub",
        "a tokenizer.json; it does not exist",
        tokenizer="org/name",
    ),
    Case("tokenizer.model alone", 64, MODEL_HINT, MODEL, {"t.model": b"\n\v"}),
    Case("empty folder", 64, "it holds nothing", files={"tokenizer": Path.mkdir}),
    token("eos that is a list", 'its eos_token is ["a"], not a text', eos_token=["a"]),
    token("eos without content", 'its eos_token is {"x": 1}, not a text', eos_token={"x": 1}),
    token("bos by a text", "add_bos_token is 'false', not true or false", add_bos_token="false"),
    Case(
        "no unknown token",
        64,
        "has no token for a part of the text 'fine",
        files={"tokenizer": without_unknown},
    ),
    broken("broken tokenizer", "tokenizer.json cannot be read", MAIN, b'{"model": 1}'),
    broken("tokenizer of no JSON", "tokenizer.json cannot be read", MAIN, b"\x00\xff"),
    token("eos of another", "its eos_token '<eos>' is not in its", eos_token="<eos>"),
    broken("config of no JSON", "cannot be read", "tokenizer_config.json", b"{"),
    broken("config of no keys", "is not a block of keys", "tokenizer_config.json", b"[]"),
    Case(
        "vocabulary of another",
        64,
        "vocab = 400 is less than the 500 of data.tokenizer",
        model={"vocab": 400},
    ),
    Case(
        "no template",
        64,
        "has no chat template, which messages need",
        CHAT,
        {"a.jsonl": rows({"messages": FEW})},
    ),
    Case(
        "template that is none",
        64,
        "its chat template is not valid, line 1",
        CHAT,
        template("{% if %}"),
    ),
    Case(
        "template that is a number",
        64,
        "its chat_template is the number 3, not a text",
        CHAT,
        template(3),
    ),
    Case("no default template", 64, "none is named default", CHAT, template(RAG)),
]
ROWS = [
    lines("no field", f"{A}2: it has no field 'text'; it has body", GOOD, {"body": "x"}),
    lines(
        "another field", f"{A}1: it has no field 'body'; it has text", GOOD, data={"field": "body"}
    ),
    lines(
        "mixed types",
        f"{A}3: its field 'text' is the number 3, not a text",
        GOOD,
        GOOD,
        {"text": 3},
    ),
    lines("null", f"{A}2: its field 'text' is null, not a text", GOOD, {"text": None}),
    lines("a list", f"{A}1: its field 'text' is a list, not a text", {"text": ["a"]}),
    lines(
        "row that is a list", f"{A}2: it is a list, not an object with the field 'text'", GOOD, [1]
    ),
    raw("no JSON", f"{A}2: it is not JSON", rows(GOOD) + b"text: yaml\n"),
    raw("cut line", f"{A}2: it is not JSON", rows(GOOD) + b'{"text": "ab'),
    raw("one object over many lines", f"{A}1: it is not JSON", json.dumps(GOOD, indent=1).encode()),
    raw("UTF-16", f"{A}1: it is not JSON", rows(GOOD).decode().encode("utf-16")),
    raw("brackets without end", f"{A}1: it is not JSON", b'{"text": ' + b"[" * 100_000 + b"\n"),
    chat("text for messages", "it is a text, not a list of messages", "hi"),
    chat("no message", "it is an empty list, without a message", []),
    chat(
        "message without a role", "its message 1 has no role; it has content", [{"content": "hi"}]
    ),
    chat("no assistant", "it has no words of the role 'assistant'", FEW[:1]),
    chat("role that the template refuses", "the chat template of", [{"role": "king"}], TOOLS),
    chat("content that is null", "the chat template of", [{"role": "user", "content": None}]),
    pair("pair without rejected", f"{A}2: it has no 'rejected'", PAIR, {"chosen": "a"}),
    pair("pair of equals", "are the same text", PAIR | {"rejected": "a"}),
    pair("pair of nothing", "1 have no token to predict", PAIR | {"rejected": ""}),
    pair("one pair", "data.eval_split = 0.05 leaves the eval split none", PAIR),
    pair("pair of numbers", "is the number 3, neither", PAIR | {"chosen": 3}),
    pair("pairs that are too long", "hold 0 pairs that fit into", PAIR | {"chosen": "a" * 99}),
    part("wrong row of a part", "b.jsonl, row 1: it has no field", "b.jsonl", rows({"x": 1})),
    Case(
        "wrong row of eval_path",
        65,
        "b.jsonl, row 1: it has no field",
        EVAL,
        {"b.jsonl": rows({"x": 1})},
    ),
]
FILES = [
    key("no file", "PATH/gone/*.jsonl", path="PATH/gone/*.jsonl")._replace(code=65),
    raw("empty file", "a.jsonl is empty: it has no rows", b""),
    raw("blank lines alone", "hold no document with a text in it", b"\n\n \n"),
    raw("empty text", "hold no document with a text in it", b"", "a.txt"),
    raw("empty gz", "is empty", b"", "a.txt.gz"),
    raw(
        "truncated gz", "a.jsonl.gz is truncated or damaged", gzip.compress(MANY)[:-9], "a.jsonl.gz"
    ),
    raw("gz that is none", "a.jsonl.gz is truncated or damaged", rows(GOOD), "a.jsonl.gz"),
    only("truncated zst", "a.jsonl.zst is truncated or damaged", {"a.jsonl.zst": zstd}),
    raw("packed twice", "is compressed twice, by its name", gzip.compress(b"{}"), "a.jsonl.gz.gz"),
    raw("field of plain text", "and has no field 'text'", b"id,text", "a.csv", field="text"),
    key(
        "nothing to evaluate on",
        "data.eval_path 'PATH/gone' matches no file",
        eval_path="PATH/gone",
    )._replace(code=65),
    only("two columns of a name", "a.parquet has 2 columns 'text'", {"a.parquet": twice}),
    only(
        "damaged footer of Parquet",
        "is not a Parquet file, or is truncated or damaged",
        damaged("a.parquet", -300, -100),
    ),
    only(
        "damaged offsets of Arrow",
        "a.arrow is damaged: Offset invariant failure",
        damaged("a.arrow", 600, 900),
    ),
    only("messages that are not UTF-8", "a.parquet is damaged", NOT_UTF8, **CHAT),
    raw("bz2", ".bz2 is not supported; unpack it", b"BZh9", "a.jsonl.bz2"),
    raw("packed Parquet", "only text and JSON lines are read as .gz", b"PAR1", "a.parquet.gz"),
    raw("no Parquet", "is not a Parquet file, or is truncated", b"PAR1 no", "a.parquet"),
    raw("empty Parquet", "is empty: it has no rows", b"", "a.parquet"),
    raw("no Arrow", "a.arrow is damaged", b"no arrow at all, but text", "a.arrow"),
    raw("chats in plain text", "a.txt is plain text; chats are", b"hi", "a.txt", **CHAT),
    raw("one document", "of one document leaves none to train on", rows(GOOD)),
    only(
        "Parquet without the column",
        "has no column 'text'; it has body",
        table("a.parquet", body=["x"]),
    ),
    only(
        "Parquet of numbers",
        "its column 'text' is of int64, not of text",
        table("a.parquet", text=[1]),
    ),
    only(
        "null in Parquet",
        "a.parquet, row 6: its field 'text' is null",
        table("a.parquet", text=WITH_NULL),
    ),
    only(
        "truncated Parquet",
        "is not a Parquet file, or is truncated",
        table("a.parquet", text=["a"], ending=-20),
    ),
    only("truncated Arrow", "is damaged", table("a.arrow", text=["abc"] * 999, ending=900)),
    Case("files of several kinds", 65, "holds files of several kinds", FOLDER, KINDS),
    part("empty part", "b.jsonl is empty", "b.jsonl", b""),
    part("part without documents", "b.txt and what else matches hold no document", "b.txt", b""),
    key(
        "weight of less than a row",
        "parts.b.weight = 1e-06 is less than one example in 100000",
        **mixture(a={}, b={"weight": 1e-6}),
    ),
    Case("chats without a target", 65, "hold chats without a token to predict", NO_SPLIT, LAST),
    Case(
        "records without tokens",
        65,
        "has no tokens, which the task reads; it has ids",
        RECORDS,
        {RECORD: other_keys},
    ),
    Case("text for images", 64, "texts without a label; give format: label", task="classify"),
    Case(
        "token of another vocabulary", 65, "token 300", RECORDS, {RECORD: token_300}, {"vocab": 256}
    ),
    Case("records that are none", 65, RECORD, RECORDS, {RECORD: b"no records"}),
]
CASES = [*KEYS, *TOKENIZERS, *ROWS, *FILES]
