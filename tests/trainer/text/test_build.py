import errno
import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlaunch import contract
from jaxlaunch.trainer.errors import DataError, SpecError, Stopped, StorageError
from jaxlaunch.trainer.prepare import text as prepare
from jaxlaunch.trainer.sources import array_record
from jaxlaunch.trainer.sources import text as sources
from jaxlaunch.trainer.spec import LM, Text
from jaxlaunch.trainer.text import build, documents, recipe, shards, tokenizer
from tests.trainer.held_out import held_out_texts
from tests.trainer.text import corpora, dying

TEXTS = list(filter(None, corpora.make_texts(220, seed=3)))[:200]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    corpora.save_tokenizer(folder / "tokenizer")
    corpora.write_lines(folder / "a.jsonl", TEXTS[:120])
    corpora.write_lines(folder / "b.jsonl", TEXTS[120:])
    return folder


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units and shards of a corpus of a few kilobytes."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 4000)
    monkeypatch.setattr(build, "SHARD_BYTES", 8000)
    monkeypatch.setattr(build, "BUCKET_BYTES", 3000)
    monkeypatch.setattr(shards, "BATCH_TEXTS", 8)
    monkeypatch.setattr(shards, "LOT_TOKENS", 500)


def make_text(corpus: Path, folder: Path, **keys: Any) -> Text:
    options = {
        "path": f"{corpus}/*.jsonl",
        "tokenizer": f"{corpus}/tokenizer",
        "data_dir": str(folder),
        "eval_split": 0.1,
    }
    return Text(source="text", **(options | keys))


def build_corpus(data: Text, length: int = 32) -> Path:
    built = recipe.make_recipe(data, length)
    folder = Path(recipe.prepared_root(data)) / built.address
    build.build_rows(built, folder)
    return folder


def read_folder(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def read_split(folder: Path, name: str) -> list[dict[str, Any]]:
    result = array_record.Records(sorted(str(path) for path in folder.glob(f"{name}-*")))
    return [result[index] for index in range(len(result))]


def read_segments(folder: Path, name: str) -> list[tuple[int, ...]]:
    cut = (
        np.split(row["tokens"], np.cumsum(row["lengths"])[:-1]) for row in read_split(folder, name)
    )
    return [tuple(segment.tolist()) for row in cut for segment in row]


def test_documents_are_packed_once_in_their_split(corpus: Path, tmp_path: Path) -> None:
    folder = build_corpus(make_text(corpus, tmp_path, packing="none"), 1000)
    actual = tokenizer.load_tokenizer(f"{corpus}/tokenizer")
    expected = Counter((*ids, actual.eos) for ids in actual.encode_batch(TEXTS))
    train, held_out = read_segments(folder, "train"), read_segments(folder, "eval")
    assert Counter(train) + Counter(held_out) == expected
    assert len(held_out) == sum(held_out_texts(TEXTS, 0.1))
    build.check_folder(folder, verify=True)
    index = build.read_index(folder)
    assert (index["documents"], index["tokens"]) == (200, sum(map(len, expected.elements())))
    assert index["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert sum(index["lengths"]) == 200 and len(index["files"]) > 5


@pytest.mark.parametrize("packing", ["concat", "first-fit"])
def test_each_token_is_a_target_once_with_its_bytes(
    corpus: Path, tmp_path: Path, packing: str
) -> None:
    folder = build_corpus(make_text(corpus, tmp_path, packing=packing, eval_split=0.0))
    actual = tokenizer.load_tokenizer(f"{corpus}/tokenizer")
    result = Counter(
        pair
        for segment in read_segments(folder, "train")
        for pair in zip(segment, segment[1:], strict=False)
    )
    whole = [[*ids, actual.eos] for ids in actual.encode_batch(TEXTS)]
    assert result == Counter(pair for ids in whole for pair in zip(ids, ids[1:], strict=False))
    first = sum(int(actual.byte_counts[ids[0]]) for ids in whole)
    counted = sum(float(row["bytes"]) for row in read_split(folder, "train"))
    assert counted == pytest.approx(sum(len(text.encode()) for text in TEXTS) - first)


def test_order_depends_on_the_seed_not_on_processes(corpus: Path, tmp_path: Path) -> None:
    first = build_corpus(make_text(corpus, tmp_path / "one"))
    built = recipe.make_recipe(make_text(corpus, tmp_path / "two"), 32)
    repeated = tmp_path / "two" / built.address
    build.build_rows(built, repeated)
    assert read_folder(first) == read_folder(repeated) and not (first / "parts").exists()
    second = build_corpus(make_text(corpus, tmp_path / "one", seed=1))
    assert second != first and read_segments(second, "train") != read_segments(first, "train")


def test_address_depends_on_the_recipe(corpus: Path, tmp_path: Path) -> None:
    corpora.save_tokenizer(tmp_path / "tokenizer", "unigram")
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
    result = {recipe.make_recipe(make_text(corpus, tmp_path, **item), 32).address for item in keys}
    actual = len(result | {recipe.make_recipe(make_text(corpus, tmp_path), 33).address})
    assert actual == len(keys) + 1
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in corpus.glob("*.jsonl"):
        (moved / path.name).write_bytes(path.read_bytes())
    assert (
        recipe.make_recipe(make_text(corpus, tmp_path, path=f"{moved}/*.jsonl"), 32).address
        in result
    )


# Of all renames of a build, each of which is begun again where it ended.
MOMENTS = sorted(random.Random(5).sample(range(1, 60), 20))


class Killed(BaseException):
    """The end of a process, at whatever point."""


def test_killed_build_resumes_with_the_same_bytes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_folder(build_corpus(make_text(corpus, tmp_path / "whole")))
    data = make_text(corpus, tmp_path / "killed")
    renamed = [0]

    def dying(rename: Callable[..., Any]) -> Callable[..., Any]:
        def until(*args: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return rename(*args)  # of a run's thread that an earlier test left behind
            renamed[0] += 1
            if renamed[0] in MOMENTS:
                raise Killed
            return rename(*args)

        return until

    kills = 0
    with monkeypatch.context() as patched:
        for owner in (Path, os):
            patched.setattr(owner, "replace", dying(owner.replace))
        while True:
            try:
                folder = build_corpus(data)
                break
            except Killed:
                kills += 1
                for parts in (tmp_path / "killed").glob("*/parts"):
                    draft = parts.with_name("train-00000-of-00004.array_record.77.tmp")
                    draft.write_text("of one that was killed while it wrote")
    assert kills == len(MOMENTS) == 20
    assert read_folder(folder) == whole


def test_damaged_or_missing_shard_is_reported(corpus: Path, tmp_path: Path) -> None:
    folder = build_corpus(make_text(corpus, tmp_path))
    first, second = sorted(folder.glob("train-*"))[:2]
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    build.check_folder(folder)
    with pytest.raises(DataError, match=f"{first.name} is damaged"):
        build.check_folder(folder, verify=True)
    first.write_bytes(data[:-1])
    with pytest.raises(DataError, match=f"{first.name} is damaged: .* bytes are there"):
        build.check_folder(folder)
    first.write_bytes(data)
    second.unlink()
    with pytest.raises(DataError, match=f"{second.name} is missing"):
        sources.prepare_rows(
            make_text(corpus, tmp_path), recipe.make_recipe(make_text(corpus, tmp_path), 32)
        )


@pytest.mark.parametrize("packing", ["concat", "first-fit", "none"])
def test_document_without_tokens_is_empty(tmp_path: Path, packing: str) -> None:
    named = corpora.save_tokenizer(tmp_path / "tokenizer", "wordpiece", eos_token=None)
    corpora.write_lines(tmp_path / "a.jsonl", ["   ", "quick fox", "\n", "lazy dog", " \t"])
    data = make_text(tmp_path, tmp_path, packing=packing, tokenizer=named, eval_split=0.0)
    folder = build_corpus(data, 64)
    assert (build.read_index(folder)["documents"], build.read_index(folder)["empty"]) == (2, 3)
    actual = tokenizer.load_tokenizer(named)
    result = Counter(read_segments(folder, "train"))
    assert result == Counter(map(tuple, actual.encode_batch(["quick fox", "lazy dog"])))


@pytest.mark.parametrize(
    ("ending", "remaining"), [(".tokens", -8), (".tokens", None), (".index", 0), (".index", -40)]
)
def test_truncated_part_is_built_again(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    remaining: int | None,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shards, "write_shard", None)  # the second pass ends
        with pytest.raises(TypeError):
            build_corpus(make_text(corpus, tmp_path / "cut"))
    (path,) = (tmp_path / "cut").glob(f"*/parts/part-000001{ending}")
    if remaining is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:remaining])
    actual = read_folder(build_corpus(make_text(corpus, tmp_path / "cut")))
    assert actual == read_folder(build_corpus(make_text(corpus, tmp_path / "whole")))


def test_files_are_synced_before_they_are_renamed(
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
    folder = build_corpus(make_text(corpus, tmp_path))
    assert {path.stat().st_ino for path in folder.iterdir()} <= synced


def test_change_of_one_byte_gives_another_address(tmp_path: Path) -> None:
    data = bytearray(b"a line of a text\n" * 60_000)
    places = set()
    for at in (None, 10_000, len(data) - 2):
        data[at or 0] ^= 2
        (tmp_path / "a.txt").write_bytes(data)
        places.add(
            recipe.make_recipe(
                make_text(tmp_path, tmp_path, path=f"{tmp_path}/a.txt", tokenizer="bytes"), 32
            ).address
        )
    assert len(places) == 3


def test_file_digest_is_cached_by_size_and_time(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    hash_, paths = recipe._hash_file, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    monkeypatch.setattr(
        recipe,
        "_hash_file",
        lambda path, *rest: hashed.append(Path(path).name) or hash_(path, *rest),
    )
    for path in paths:
        path.write_text("one")
        os.utime(path, (1e9, 1e9))

    def found() -> str:
        recipe._process_digests.clear()
        return recipe.digest_files([str(path) for path in paths], tmp_path / "out")

    first = found()
    assert found() == first and sorted(hashed) == ["a.jsonl", "b.jsonl"]
    os.utime(paths[0])  # a moment ago: its next change may bear the same time
    assert (found(), found()) == (first, first) and hashed[2:] == ["a.jsonl"] * 2
    paths[1].write_text("two")
    os.utime(paths[1], (1e9 + 1, 1e9))
    os.utime(paths[1], ns=(0, 10**18 + 1))  # by a nanosecond
    assert found() != first and hashed[-1] == "b.jsonl"


def test_memory_is_bounded_by_a_bucket(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "MAX_SHARDS", 2)
    sizes, read = [], []
    documents_, numbers = shards._read_documents, shards._read_numbers

    def gathered(*args: Any) -> Any:
        part = documents_(*args)
        sizes.append(len(part.tokens))
        return part

    monkeypatch.setattr(shards, "_read_documents", gathered)
    monkeypatch.setattr(
        shards, "_read_numbers", lambda *args: read.append(args[1:]) or numbers(*args)
    )
    folder = build_corpus(make_text(corpus, tmp_path, eval_split=0.0))
    build.check_folder(folder)
    index = build.read_index(folder)
    assert len(list(folder.glob("train-*"))) == 2  # a reader holds each open
    assert len(sizes) > 8 and max(sizes) < index["tokens"] / 4 and sum(sizes) == index["tokens"]
    # And headers, tables.
    assert sum(count for first, count in read if first and count != 2) == shards.INDEX_COLUMNS * 200


@pytest.mark.parametrize(
    "blocks", [2, 80]
)  # of 512 bytes: a part's file, a shard's, which another library writes
def test_full_disk_is_reported(corpus: Path, tmp_path: Path, blocks: int) -> None:
    built = recipe.make_recipe(make_text(corpus, tmp_path), 32)
    program = [sys.executable, "-m", "jaxlaunch.trainer.text.build"]
    command = [*program, str(tmp_path / built.address), str(os.getpid())]
    limited = ["sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh", *command]
    # A bytecode file would be cut at the limit, and break every import after it.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(limited, input=built.to_json(), capture_output=True, text=True, env=env)
    message = json.loads(ended.stdout)
    assert (ended.returncode, message["code"], ended.stderr) == (84, 84, "")
    assert (
        "File too large" in message["message"] and "what is complete is kept" in message["message"]
    )
    full = build._describe_failure(tmp_path, OSError(errno.ENOSPC, "No space left on device"))
    assert "MiB free; make room or set data.data_dir" in full


def test_killed_worker_leaves_fewer_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [(os.getpid(), tmp_path / str(number)) for number in range(3)]
    build._run_tasks("packed", "shards", dying.in_a_worker, tasks, 2, 3)
    assert len(list(tmp_path.iterdir())) == 3
    message = "a process was killed, probably because memory ran out; 1 continue"
    assert capsys.readouterr().err.count(message) == 1


def test_killed_or_stopped_build_is_reported(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = recipe.make_recipe(make_text(corpus, tmp_path), 32)
    monkeypatch.setattr(sources, "POLL_S", 0.01)
    with pytest.raises(Stopped, match="what is complete is kept, and the next start resumes"):
        sources._run_build(built, tmp_path / built.address, lambda: True)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sources.sys, "executable", str(program))  # type: ignore[attr-defined]
    words = r"was killed \(SIGKILL\), probably because memory ran out"
    with pytest.raises(StorageError, match=words):
        sources._run_build(built, tmp_path / built.address)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_build_with_a_message(corpus: Path, tmp_path: Path, number: int) -> None:
    built = recipe.make_recipe(make_text(corpus, tmp_path), 32)
    program = (
        "import os; from jaxlaunch.trainer.text import build, shards\nshards.write_part = lambda "
        f"*_: os.kill(os.getpid(), {number})\nbuild.main()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / built.address), str(os.getpid())]
    ended = subprocess.run(command, input=built.to_json(), capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (80, "")
    assert (
        "what is complete is kept, and the next start resumes"
        in json.loads(ended.stdout)["message"]
    )
    actual = read_folder(build_corpus(make_text(corpus, tmp_path)))
    assert actual == read_folder(build_corpus(make_text(corpus, tmp_path / "whole")))


def test_leftovers_of_a_killed_process_are_removed(corpus: Path, tmp_path: Path) -> None:
    folder = build_corpus(make_text(corpus, tmp_path))
    whole = read_folder(folder)
    (folder / "parts").mkdir()
    (folder / "parts" / "part-000000.index").touch()
    (folder / "index.json.0123.tmp").touch()
    data = make_text(corpus, tmp_path)
    assert sources.prepare_rows(data, recipe.make_recipe(data, 32)) == folder
    assert read_folder(folder) == whole


def test_builds_without_file_locks_both_succeed(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    expected = read_folder(build_corpus(make_text(corpus, tmp_path / "whole")))
    monkeypatch.setattr(fcntl, "flock", flock)
    built, write = recipe.make_recipe(make_text(corpus, tmp_path), 32), shards.write_shard

    def overtaken(*args: Any) -> None:
        monkeypatch.setattr(shards, "write_shard", write)
        build.build_rows(built, tmp_path / built.address)  # another host's, which is faster
        write(*args)

    monkeypatch.setattr(shards, "write_shard", overtaken)
    assert read_folder(build_corpus(make_text(corpus, tmp_path))) == expected
    assert f"{tmp_path} has no file locks" in capsys.readouterr().err


def test_text_is_prepared_before_the_processes_join(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sources, "_run_build", lambda made, folder, *_: build.build_rows(made, folder)
    )
    model = {"kind": "gpt2", "layers": 1, "width": 32, "heads": 4, "vocab": 600, "length": 32}
    data = make_text(corpus, tmp_path).model_dump(exclude_unset=True)
    message: list[str] = []

    def start(is_stopped: bool = False, **keys: Any) -> None:
        raw = {"task": LM, "model": model, "data": data} | keys
        prepare.prepare_before_start(
            {contract.TRAIN_SPEC: json.dumps(raw)},
            lambda: is_stopped,
            lambda: message.append("prepare"),
        )

    start(data={"source": "synthetic"})
    start(task="mine.tasks:Own")
    start(batch="wrong")
    recipe._process_digests.clear()
    assert not message and not list(tmp_path.iterdir())
    with pytest.raises(Stopped, match="while the files of the text were hashed"):
        start(is_stopped=True)
    start()
    assert message == ["prepare"] * 2
    assert (tmp_path / recipe.make_recipe(make_text(corpus, tmp_path), 32).address).exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_error_of_a_worker_is_reported(tmp_path: Path, processes: int) -> None:
    for name in "abcd":
        corpora.write_lines(tmp_path / f"{name}.jsonl", ["x" * 2500] * 2)  # a unit each
    (tmp_path / "c.jsonl").write_text('{"text": 1}\n')
    built = recipe.make_recipe(
        Text(source="text", path=f"{tmp_path}/*.jsonl", packing="concat"), 32
    )
    with pytest.raises(DataError, match="c.jsonl, row 1: its field 'text' is the number 1"):
        build.build_rows(built, tmp_path / "out", processes)


@pytest.mark.parametrize(
    ("files", "keys", "words"),
    [
        ({"a.txt": "", "b.txt": ""}, {}, "hold no document with a text in it"),
        ({"a.jsonl": '{"text": ""}\n'}, {}, "hold no document with a text in it"),
        ({"a.txt": "one"}, {}, "data.eval_split = 0.05 of one document leaves none to train on"),
        ({"a.txt": "one"}, {"path": "{}/b.txt"}, "b.txt' matches no file; .* holds a.txt"),
    ],
)
def test_corpus_without_rows_is_refused(
    tmp_path: Path, files: dict[str, str], keys: dict[str, str], words: str
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_text(data)
    path = keys.get("path", "{}/*").format(tmp_path)
    with pytest.raises(DataError, match=words):
        built = recipe.make_recipe(Text(source="text", path=path, packing="concat"), 8)
        build.build_rows(built, tmp_path / "out" / "x")


def test_single_text_is_split_by_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("a" * 90 + "b" * 10)
    keys = {"tokenizer": "bytes", "packing": "concat"}
    folder = build_corpus(
        make_text(tmp_path, tmp_path / "out", path=f"{tmp_path}/mine.txt", **keys), 16
    )
    assert "whose last 10 of 100 tokens are held out" in capsys.readouterr().err
    for name, letter, targets in (("train", b"a", 89), ("eval", b"b", 9)):
        rows = read_split(folder, name)
        assert {bytes([token]) for row in rows for token in row["tokens"].tolist()} == {letter}
        assert (
            sum(len(row["tokens"]) - 1 for row in rows)
            == targets
            == sum(float(row["bytes"]) for row in rows)
        )


def test_build_process_passes_its_message_on(corpus: Path, tmp_path: Path) -> None:
    built = recipe.make_recipe(make_text(corpus, tmp_path), 32)
    corpora.write_lines(tmp_path / "a.jsonl", ["fine", "too"])
    (tmp_path / "b.jsonl").write_text('{"text": 1}')
    with pytest.raises(DataError, match="b.jsonl, row 1: its field 'text' is the number 1"):
        sources._run_build(
            recipe.make_recipe(make_text(corpus, tmp_path, path=f"{tmp_path}/*.jsonl"), 32),
            tmp_path / "wrong",
        )
    gone = recipe.Recipe.from_json(
        json.dumps(json.loads(built.to_json()) | {"tokenizer": f"{tmp_path}/gone"})
    )
    with pytest.raises(SpecError, match="neither bytes nor a folder or file of a tokenizer.json"):
        sources._run_build(gone, tmp_path / "out")
    assert shards.shard_name("train", 3, 12) == "train-00003-of-00012.array_record"
