import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.text import corpora
from trainer.data.sources import array_record, packed
from trainer.errors import DataError, SpecError
from trainer.spec import Text
from trainer.text import build, documents, parts, recipe, shards, tokenizer

TEXTS = list(filter(None, corpora.texts(220, seed=3)))[:200]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    corpora.saved(folder / "tokenizer")
    corpora.lines(folder / "a.jsonl", TEXTS[:120])
    corpora.lines(folder / "b.jsonl", TEXTS[120:])
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units and shards of a corpus of a few kilobytes."""
    monkeypatch.setattr(documents, "UNIT", 4000)
    monkeypatch.setattr(build, "SHARD_BYTES", 8000)
    monkeypatch.setattr(parts, "BATCH", 8)
    monkeypatch.setattr(parts, "HELD", 500)


def text(corpus: Path, to: Path, **keys: Any) -> Text:
    given = {"path": f"{corpus}/*.jsonl", "tokenizer": f"{corpus}/tokenizer", "data_dir": str(to), "eval_split": 0.1}
    return Text(source="text", **(given | keys))


def built(data: Text, length: int = 32) -> Path:
    made = recipe.of(data, length)
    folder = Path(recipe.root(data)) / made.address
    build.build(made, folder)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def split(folder: Path, name: str) -> list[dict[str, Any]]:
    found = array_record.Records(sorted(str(path) for path in folder.glob(f"{name}-*")))
    return [found[index] for index in range(len(found))]


def segments(folder: Path, name: str) -> list[tuple[int, ...]]:
    cut = (np.split(row["tokens"], np.cumsum(row["lengths"])[:-1]) for row in split(folder, name))
    return [tuple(segment.tolist()) for row in cut for segment in row]


def test_whole_documents_come_out_once_and_in_the_split_that_is_theirs(corpus: Path, tmp_path: Path) -> None:
    folder = built(text(corpus, tmp_path, packing="none"), 1000)
    ours = tokenizer.load(f"{corpus}/tokenizer")
    wanted = Counter((*ids, ours.eos) for ids in ours.encode_batch(TEXTS))
    train, held_out = segments(folder, "train"), segments(folder, "eval")
    assert Counter(train) + Counter(held_out) == wanted and len(held_out) == 20
    index = build.check(folder, whole=True)
    assert (index["documents"], index["tokens"]) == (200, sum(map(len, wanted.elements())))
    assert index["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert sum(index["lengths"]) == 200 and len(index["files"]) > 5


@pytest.mark.parametrize("packing", ["concat", "first-fit"])
def test_every_token_is_a_target_once_and_its_bytes_are_counted(corpus: Path, tmp_path: Path, packing: str) -> None:
    folder = built(text(corpus, tmp_path, packing=packing, eval_split=0.0))
    ours = tokenizer.load(f"{corpus}/tokenizer")
    found = Counter(pair for segment in segments(folder, "train") for pair in zip(segment, segment[1:], strict=False))
    whole = [[*ids, ours.eos] for ids in ours.encode_batch(TEXTS)]
    assert found == Counter(pair for ids in whole for pair in zip(ids, ids[1:], strict=False))
    first = sum(int(ours.byte_counts[ids[0]]) for ids in whole)
    counted = sum(float(row["bytes"]) for row in split(folder, "train"))
    assert counted == pytest.approx(sum(len(text.encode()) for text in TEXTS) - first)


def test_the_order_is_that_of_the_seed_and_of_no_process(corpus: Path, tmp_path: Path) -> None:
    one = built(text(corpus, tmp_path / "one"))
    made = recipe.of(text(corpus, tmp_path / "two"), 32)
    again = tmp_path / "two" / made.address
    build.build(made, again)
    assert content(one) == content(again) and not (one / "parts").exists()
    other = built(text(corpus, tmp_path / "one", seed=1))
    assert other != one and segments(other, "train") != segments(one, "train")


def test_what_is_made_of_something_else_is_at_another_place(corpus: Path, tmp_path: Path) -> None:
    corpora.saved(tmp_path / "tokenizer", "unigram")
    keys: list[dict[str, Any]] = [
        {},
        {"packing": "none"},
        {"eval_split": 0.2},
        {"seed": 5},
        {"field": "id"},
        {"path": f"{corpus}/a.jsonl"},
        {"tokenizer": f"{tmp_path}/tokenizer"},
        {"tokenizer": "bytes", "packing": "concat"},
    ]
    found = {recipe.of(text(corpus, tmp_path, **each), 32).address for each in keys}
    assert len(found | {recipe.of(text(corpus, tmp_path), 33).address}) == len(keys) + 1
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in corpus.glob("*.jsonl"):
        (moved / path.name).write_bytes(path.read_bytes())
    assert recipe.of(text(corpus, tmp_path, path=f"{moved}/*.jsonl"), 32).address in found


class Killed(BaseException):
    """The end of a process, at whatever point."""


def test_what_was_killed_goes_on_and_gives_the_same_bytes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, data = content(built(text(corpus, tmp_path / "whole"))), text(corpus, tmp_path / "killed")
    renamed = [0]

    def dying(rename: Callable[..., Any]) -> Callable[..., Any]:
        def until(*args: Any) -> Any:
            renamed[0] += 1
            if renamed[0] in (1, 2, 3, 6, 11, 16, 22, 27, 33, 38):
                raise Killed
            return rename(*args)

        return until

    kills = 0
    with monkeypatch.context() as patched:
        for owner in (Path, os):
            patched.setattr(owner, "replace", dying(owner.replace))
        while True:
            try:
                folder = built(data)
                break
            except Killed:
                kills += 1
                (made,) = (path for path in (tmp_path / "killed").iterdir() if path.is_dir())
                (made / "train-00000-of-00004.array_record.77.tmp").write_text("of one that was killed while it wrote")
    assert kills >= 8
    assert content(folder) == whole


def test_a_process_that_is_killed_leaves_what_the_next_goes_on_from(corpus: Path, tmp_path: Path) -> None:
    data = text(corpus, tmp_path / "killed")
    made = recipe.of(data, 32)
    folder = tmp_path / "killed" / made.address
    command = [sys.executable, "-m", "trainer.text.build", str(folder), str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        process.stdin.write(made.to_json().encode())
        process.stdin.close()
        while not (folder / "parts").exists() and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert packed.prepared(data, made) == folder
    # That process made units and shards of the usual size.
    assert sorted(path.name for path in folder.iterdir()) == [
        "eval-00000-of-00001.array_record",
        "index.json",
        "train-00000-of-00001.array_record",
    ]


def test_a_damaged_and_a_missing_shard_are_found_by_name(corpus: Path, tmp_path: Path) -> None:
    folder = built(text(corpus, tmp_path))
    one, other = sorted(folder.glob("train-*"))[:2]
    data = bytearray(one.read_bytes())
    data[len(data) // 2] ^= 1
    one.write_bytes(data)
    build.check(folder)
    with pytest.raises(DataError, match=f"{one.name} is damaged"):
        build.check(folder, whole=True)
    one.write_bytes(data[:-1])
    with pytest.raises(DataError, match=f"{one.name} is damaged: .* bytes where"):
        build.check(folder)
    one.write_bytes(data)
    other.unlink()
    with pytest.raises(DataError, match=f"{other.name} is missing"):
        packed.prepared(text(corpus, tmp_path), recipe.of(text(corpus, tmp_path), 32))


@pytest.mark.parametrize("packing", ["concat", "first-fit", "none"])
def test_a_document_that_encodes_to_no_tokens_is_empty(tmp_path: Path, packing: str) -> None:
    named = corpora.saved(tmp_path / "tokenizer", "wordpiece", eos_token=None)
    corpora.lines(tmp_path / "a.jsonl", ["   ", "quick fox", "\n", "lazy dog", " \t"])
    data = text(tmp_path, tmp_path, packing=packing, tokenizer=named, eval_split=0.0)
    folder = built(data, 64)
    assert (build.read(folder)["documents"], build.read(folder)["empty"]) == (2, 3)
    ours = tokenizer.load(named)
    assert Counter(segments(folder, "train")) == Counter(map(tuple, ours.encode_batch(["quick fox", "lazy dog"])))


@pytest.mark.parametrize(("ending", "left"), [(".tokens", -8), (".tokens", None), (".index", 0), (".index", -40)])
def test_a_part_that_a_loss_of_power_cut_short_is_made_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, left: int | None
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shards, "write", None)  # the second pass ends
        with pytest.raises(TypeError):
            built(text(corpus, tmp_path / "cut"))
    (path,) = (tmp_path / "cut").glob(f"*/parts/part-000001{ending}")
    if left is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:left])
    assert content(built(text(corpus, tmp_path / "cut"))) == content(built(text(corpus, tmp_path / "whole")))


def test_what_is_prepared_is_synced_before_it_has_its_name(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    sync, rename = os.fsync, Path.replace

    def syncing(number: int) -> None:
        synced.add(os.fstat(number).st_ino)
        sync(number)

    def renaming(path: Path, to: Path) -> Path:
        assert path.stat().st_ino in synced, to
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Path, "replace", renaming)
    folder = built(text(corpus, tmp_path))
    assert {path.stat().st_ino for path in folder.iterdir()} <= synced


def test_two_at_once_do_not_disturb_each_other(corpus: Path, tmp_path: Path) -> None:
    made = recipe.of(text(corpus, tmp_path), 32)
    folder = tmp_path / made.address
    command = [sys.executable, "-m", "trainer.text.build", str(folder), str(os.getpid())]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for process in both:
        assert process.stdin is not None
        process.stdin.write(made.to_json())
        process.stdin.close()
    said = []
    for process in both:
        with process:
            assert process.stdout is not None
            said.append((process.stdout.read(), process.wait()))
    assert said == [("", 0), ("", 0)]
    build.check(folder, whole=True)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_wrong_in_a_file_is_said_from_whatever_process(tmp_path: Path, processes: int) -> None:
    for name in "abcd":
        corpora.lines(tmp_path / f"{name}.jsonl", ["x" * 2500] * 2)  # a unit each
    (tmp_path / "c.jsonl").write_text('{"text": 1}\n')
    made = recipe.of(Text(source="text", path=f"{tmp_path}/*.jsonl", packing="concat"), 32)
    with pytest.raises(DataError, match="c.jsonl, row 1: its field 'text' is the number 1"):
        build.build(made, tmp_path / "out", processes)


@pytest.mark.parametrize(
    ("files", "keys", "words"),
    [
        ({"a.txt": "", "b.txt": ""}, {}, "hold no document with a text in it"),
        ({"a.jsonl": '{"text": ""}\n'}, {}, "hold no document with a text in it"),
        ({"a.txt": "one"}, {}, "data.eval_split = 0.05 of one document leaves none to train on"),
        ({"a.txt": "one"}, {"path": "{}/b.txt"}, "b.txt' matches no file; .* holds a.txt"),
    ],
)
def test_a_corpus_that_leaves_nothing_is_refused(
    tmp_path: Path, files: dict[str, str], keys: dict[str, str], words: str
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_text(data)
    path = keys.get("path", "{}/*").format(tmp_path)
    with pytest.raises(DataError, match=words):
        made = recipe.of(Text(source="text", path=path, packing="concat"), 8)
        build.build(made, tmp_path / "out" / "x")


def test_the_process_that_prepares_hands_its_sentence_on(corpus: Path, tmp_path: Path) -> None:
    made = recipe.of(text(corpus, tmp_path), 32)
    corpora.lines(tmp_path / "a.jsonl", ["fine", "too"])
    (tmp_path / "b.jsonl").write_text('{"text": 1}')
    with pytest.raises(DataError, match="b.jsonl, row 1: its field 'text' is the number 1"):
        packed._build(recipe.of(text(corpus, tmp_path, path=f"{tmp_path}/*.jsonl"), 32), tmp_path / "wrong")
    gone = recipe.Recipe.from_json(json.dumps(json.loads(made.to_json()) | {"tokenizer": f"{tmp_path}/gone"}))
    with pytest.raises(SpecError, match="neither bytes nor a folder or file of a tokenizer.json"):
        packed._build(gone, tmp_path / "out")
    assert shards.name("train", 3, 12) == "train-00003-of-00012.array_record"
