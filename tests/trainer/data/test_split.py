"""Splits of periodic, sorted, copied, grouped and growing sets of every kind, on any host."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import Text, TrainSpec
from jaxlaunch.trainer.text import build, recipe, tokenizer
from tests.trainer.held_out import held_out_texts
from tests.trainer.text import chat_corpora
from tests.trainer.text.chat_corpora import CHATML

PATTERNS = ("periodic", "sorted", "copied", "grouped", "appended")
KINDS = ("table", "images", "text", "chats")
CLASSES, COUNT, COPIES, GROUP_SIZE = 5, 200, 3, 4
# Seeds and shares of the splits of each set.
SPLIT = (3, 0.2)
MORE_SPLITS = ((0, 0.35), (1, 0.2), (2**63, 0.35), (12345, 0.2))


class Item(NamedTuple):
    """An item of a set. Copies have one content."""

    content: int
    label: int
    group: int


def make_items(pattern: str) -> list[Item]:
    """Return a set of 200 items, or of 600 with copies."""
    labels = [number % CLASSES for number in range(COUNT)]
    if pattern == "sorted":
        labels.sort()
    items = [Item(n, labels[n], n // GROUP_SIZE) for n in range(COUNT)]
    return items * COPIES if pattern == "copied" else items


def write_set(folder: Path, kind: str, items: list[Item]) -> None:
    """Write the items in two files, or as images in folders; a file name tells the item."""
    folder.mkdir(parents=True)
    halves = {"a": items[: len(items) // 2], "b": items[len(items) // 2 :]}
    if kind == "table":
        for name, half in halves.items():
            rows = (f"{item.content / 3},{item.group},c{item.label}" for item in half)
            (folder / f"{name}.csv").write_text("\n".join(["x,group,label", *rows]) + "\n")
    elif kind == "images":
        for name, half in halves.items():
            for number, item in enumerate(half):
                path = folder / "photos" / f"c{item.label}" / f"{name}{number}-{item.content}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                # Only the index is read. Many files have one size.
                path.write_bytes(b"%d" % (10_000 + item.content))
                with (folder / "list.csv").open("a") as file:
                    header = "" if file.tell() else "image,label,group\n"
                    name_in_list = path.relative_to(folder)
                    file.write(f"{header}{name_in_list},c{item.label},{item.group}\n")
    else:
        for name, half in halves.items():
            rows = (make_row(kind, item) for item in half)
            (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def make_row(kind: str, item: Item) -> dict[str, Any]:
    text = f"item {item.content} end"
    if kind == "text":
        return {"text": text, "group": item.group}
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
    return {"messages": messages, "group": item.group}


def make_block(folder: Path, kind: str, tokenizer_folder: str, **keys: Any) -> dict[str, Any]:
    """Return the data block of a set."""
    match kind:
        case "table":
            return {"source": "table", "path": f"{folder}/*.csv", "label": "label", **keys}
        case "images":
            name = "list.csv" if "group" in keys else "photos"
            return {"source": "images", "path": f"{folder}/{name}", **keys}
    chat = {"format": "chat", "tokenizer": tokenizer_folder}
    form = chat if kind == "chats" else {"field": "text"}
    options = {"packing": "none", "data_dir": f"{folder}/out"}
    return {"source": "text", "path": f"{folder}/*.jsonl", **form, **options, **keys}


def read_contents(folder: Path, block: dict[str, Any], split: str) -> list[int]:
    """Return the content of each example of a split."""
    if block["source"] != "text":
        spec = TrainSpec.model_validate({"task": "classify", "data": block})
        source = open_source(spec, split)  # type: ignore[arg-type]
        assert source is not None
        places = [str(source.locate_example(at)) for at in range(len(source))]
        if block["source"] == "images":
            return [int(re.findall(r"-(\d+)\.png", place)[0]) for place in places]
        matches = (re.search(r"(.*\.csv), row (\d+)", place) for place in places)
        rows = {path: path.read_text().splitlines() for path in folder.glob("*.csv")}
        found_rows = (rows[Path(match[1])][int(match[2])] for match in matches if match)
        return [round(float(row.split(",")[0]) * 3) for row in found_rows]
    from jaxlaunch.trainer.sources.text import PackedRows

    data = Text.model_validate(block)
    made = recipe.make_recipe(data, 200)
    rows_folder = Path(recipe.prepared_root(data)) / made.address
    build.build_rows(made, rows_folder)
    packed = PackedRows(rows_folder, split)
    decode = tokenizer.load_tokenizer(data.tokenizer).decode
    texts = (decode(packed[at]["tokens"].tolist()) for at in range(len(packed)))
    return [int(re.findall(r"item (\d+)", text)[0]) for text in texts]


@functools.cache
def chat_tokenizer(folder: str) -> str:
    return chat_corpora.save_chat_tokenizer(Path(folder) / "tokenizer", CHATML)


def check_split(root: Path, kind: str, pattern: str, seed: int, share: float) -> None:
    """Check the shares, classes, copies, groups and the growth of one split."""
    items, folder = make_items(pattern), root / f"{kind}-{pattern}"
    first = items[: COUNT // 2] if pattern == "appended" else items
    if not folder.exists():
        write_set(folder, kind, first)
    keys: dict[str, Any] = {"eval_split": share, "split_seed": seed}
    if pattern == "grouped":
        keys["group"] = "group"
    block = make_block(folder, kind, chat_tokenizer(str(root)), **keys)
    sides = {split: Counter(read_contents(folder, block, split)) for split in ("train", "eval")}
    assert sides["train"] + sides["eval"] == Counter(item.content for item in first)
    held_out, train = set(sides["eval"]), set(sides["train"])
    assert not held_out & train, "a copy is on both sides"
    if pattern == "grouped":
        groups = [{items[content].group for content in side} for side in (held_out, train)]
        assert not groups[0] & groups[1]
    units = len(first) / (COPIES if pattern == "copied" else GROUP_SIZE if "group" in keys else 1)
    sampling_error = np.sqrt(share * (1 - share) / units)
    assert abs(sum(sides["eval"].values()) / len(first) - share) < 4 * sampling_error
    if kind in ("table", "images"):
        for side in (held_out, train):
            assert {items[content].label for content in side} == {*range(CLASSES)}
    if pattern == "appended":
        grown = root / f"{kind}-grown"
        if not grown.exists():
            # The first half has the same names as before, and the second others.
            write_set(grown, kind, first)
            write_set(root / f"{kind}-more", kind, items[COUNT // 2 :])
            for path in sorted((root / f"{kind}-more").rglob("*.*")):
                target = grown / path.relative_to(root / f"{kind}-more")
                if path.name != "list.csv":
                    # Some names are before those of the first half, and some behind.
                    path.rename(target.with_name(f"{'0z'[len(path.name) % 2]}{target.name}"))
        block = make_block(grown, kind, chat_tokenizer(str(root)), **keys)
        more = {split: set(read_contents(grown, block, split)) for split in ("train", "eval")}
        # An item that was moved so that its class has one held out returns when others are drawn.
        held_out_by_class = Counter(items[content].label for content in held_out)
        moved = (more["eval"] & (held_out | train)) ^ held_out
        assert moved <= held_out
        assert all(held_out_by_class[items[content].label] == 1 for content in moved)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("splits")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
def test_items_are_divided_by_their_identity(root: Path, kind: str, pattern: str) -> None:
    check_split(root, kind, pattern, *SPLIT)


@pytest.mark.extended
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
def test_more_splits_divide_items_by_their_identity(root: Path, kind: str, pattern: str) -> None:
    for seed, share in MORE_SPLITS:
        check_split(root, kind, pattern, seed, share)


READ = """
import json, sys
from pathlib import Path
from tests.trainer.data import test_split
for folder, block in json.loads(sys.argv[1]):
    print(test_split.read_contents(Path(folder), block, "eval"))
"""


def test_every_host_holds_out_the_same_items(root: Path, tmp_path: Path) -> None:
    """A host is another process, with other hashes of Python, another folder and other mounts."""
    blocks = []
    for kind in KINDS:
        folder = root / f"hosts-{kind}"
        write_set(folder, kind, make_items("periodic"))
        block = make_block(folder, kind, chat_tokenizer(str(root)), eval_split=0.2)
        blocks.append((str(folder), block))
    expected = [read_contents(Path(folder), block, "eval") for folder, block in blocks]
    moved = tmp_path / "moved"
    root.joinpath("hosts-table").rename(moved)
    blocks[0] = (str(moved), make_block(moved, "table", "", eval_split=0.2))
    environ = os.environ | {"PYTHONHASHSEED": "7", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environ["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", READ, json.dumps(blocks)]
    output = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    assert [json.loads(line) for line in output.stdout.splitlines()] == expected


def test_rule_equals_its_description() -> None:
    texts = [f"document {number}" for number in range(500)]
    key_N = np.array([splits.hash_text(text) for text in texts], np.uint64)
    for share, seed in ((0.1, 0), (0.5, 9), (1e-9, 3), (0.99999, 4)):
        expected = held_out_texts(texts, share, seed)
        assert splits.choose_held_out(key_N, share, seed).tolist() == expected
    assert not splits.choose_held_out(key_N, 0.0, 0).any()


def test_small_classes_keep_an_example_on_each_side() -> None:
    random = np.random.default_rng(0)
    for seed in range(50):
        # Classes of 1 to 40 items, in groups that cross the classes.
        class_N = np.repeat(np.arange(40), np.arange(1, 41))
        key_N = random.permutation(np.arange(len(class_N)) // 2).astype(np.uint64)
        for keys, has_groups in ((np.arange(len(class_N)).astype(np.uint64), False), (key_N, True)):
            is_held_out_N = splits.choose_held_out(keys, 0.1, seed, class_N, has_groups=has_groups)
            assert not set(keys[is_held_out_N]) & set(keys[~is_held_out_N])
            assert (np.bincount(class_N[~is_held_out_N], minlength=40) > 0).all()
            held_out_C = np.bincount(class_N[is_held_out_N], minlength=40)
            assert (held_out_C[9:] > 0).all(), "its share is one item or more"


def test_groups_of_preferences_stay_together(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        {"prompt": f"p{number // 4}", "chosen": f"c{number}", "rejected": "r", "by": number % 5}
        for number in range(100)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    for group, size in (("prompt", 4), ("by", 20)):
        data = {"source": "text", "format": "preference", "path": str(path), "group": group}
        model = {"kind": "decoder", "vocab": 256, "length": 31}
        spec = {"task": "dpo", "model": model}
        spec["data"] = data | {"eval_split": 0.3}
        sides: list[set[int]] = []
        for split in ("train", "eval"):
            source = open_source(TrainSpec.model_validate(spec), split)  # type: ignore[arg-type]
            assert source is not None
            texts = [bytes(source[at]["tokens"][0].astype(np.uint8)) for at in range(len(source))]
            sides.append({int(re.findall(rb"c(\d+)", text)[0]) for text in texts})
        train, held_out = sides
        assert train | held_out == {*range(100)} and not train & held_out
        keys = [{rows[at][group] for at in side} for side in sides]
        assert not keys[0] & keys[1] and len(held_out) % size == 0


def write_rows(path: Path, rows: list[str]) -> dict[str, Any]:
    path.write_text("\n".join(["x,label", *rows]) + "\n")
    return {"source": "table", "path": str(path), "eval_split": 0.2}


def open_eval(block: dict[str, Any]) -> Any:
    return open_source(TrainSpec.model_validate({"task": "classify", "data": block}), "eval")


def test_lost_classes_and_divided_copies_are_noted(tmp_path: Path) -> None:
    rows = [f"{number},{'ab'[number % 2]}" for number in range(40)]
    held_out = open_eval(write_rows(tmp_path / "few.csv", [*rows, "100,c"]))
    (note,) = held_out.notes
    assert "1 of 3 classes have no example held out ('c'): no metric measures them" in note
    # A table of few categories is divided by row, because no class has anything else.
    held_out = open_eval(write_rows(tmp_path / "same.csv", ["1,a", "2,b"] * 30))
    (note,) = held_out.notes
    assert "60 of 60 examples are copies of 2" in note and {*held_out.label_N} == {0, 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": "city"}, "has no column 'city'"),
        ({"group": "x"}, "leaves none to evaluate on: copies and groups are not divided"),
    ],
)
def test_groups_that_cannot_be_used_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    block = write_rows(tmp_path / "t.csv", ["1,a", "1,b"] * 20)
    with pytest.raises(DataError, match=message):
        open_eval(block | {"columns": ["x"]} | change)


def test_keys_of_splits_are_checked(tmp_path: Path) -> None:
    block: Callable[..., dict[str, Any]] = functools.partial(dict, source="table", path="t.csv")
    with pytest.raises(ValueError, match="group applies to eval_split"):
        TrainSpec.model_validate({"task": "classify", "data": block(group="a")})
    text = {"source": "text", "path": "t.txt", "group": "a"}
    with pytest.raises(ValueError, match="group applies to rows of JSON lines"):
        TrainSpec.model_validate({"task": "lm", "data": text})
