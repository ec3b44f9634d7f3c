"""Rows of one shard, packed from its documents of every part: the second of two passes.

A shard is two files of array_record, of training and of what is held out, and a record of both, written last. A row is
`tokens` (its segments one after the other), `lengths` of them, and `bytes` of text that its targets stand for; of chats
also `targets`, 1 for the tokens that are one. A row of chats without a target is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data import drafts, records
from trainer.data.sources.share import Share
from trainer.text import packing, parts
from trainer.text.recipe import Recipe
from trainer.text.tokenizer import load

SPLITS = ("train", "eval")
CHUNK = 1 << 20


class Corpus(NamedTuple):
    """What all shards of a corpus have in common."""

    shards: int
    first_U: tuple[int, ...]  # number of the first document of each unit, in the corpus
    documents: int


class _Documents(NamedTuple):
    """The documents of one split of a shard, in their order."""

    tokens: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]  # of each token
    lengths: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]


def name(split: str, shard: int, shards: int) -> str:
    """The file of a shard."""
    return f"{split}-{shard:05}-of-{shards:05}.array_record"


def place(folder: Path, shard: int) -> Path:
    """The record of a shard that is complete."""
    return folder / f"shard-{shard:05}.json"


def write(recipe: Recipe, folder: Path, parts_folder: Path, shard: int, corpus: Corpus) -> None:
    """Packs one shard."""
    weights = load(recipe.tokenizer).byte_counts
    narrow = np.uint16 if load(recipe.tokenizer).vocab <= 2**16 else np.int32
    found = dict(zip(SPLITS, _documents(recipe, parts_folder, shard, corpus), strict=True))
    about: dict[str, Any] = {}
    for split, chosen in found.items():
        path = folder / name(split, shard, corpus.shards)
        filled: list[int] = []  # positions of each row
        targets: list[int] = []  # of chats
        rows = records.write(path, _counting(filled, targets, _rows(recipe, chosen, weights, narrow, shard)))
        counted = {"split": split, "rows": rows, "filled": sum(filled)}
        if recipe.template is not None:
            counted["targets"] = sum(targets)
        about[path.name] = counted | {"size": path.stat().st_size, "sha256": digest(path)}
    write_json(place(parts_folder, shard), about)


def _documents(recipe: Recipe, folder: Path, shard: int, corpus: Corpus) -> tuple[_Documents, _Documents]:
    """The shard's documents for training and those held out, each in the order of their keys."""
    share = Share(recipe.eval_split, corpus.documents)
    texts: list[npt.NDArray[np.int32]] = []
    columns: list[list[npt.NDArray[Any]]] = [[], [], []]
    for unit, first in enumerate(corpus.first_U):
        about = parts.index(folder, unit)
        chosen = about.shard_D == shard
        texts += parts.tokens(folder, unit, about, chosen)
        is_held_D = share.is_held_out(first + about.number_D[chosen])
        for column, each in zip(columns, (about.key_D[chosen], is_held_D, about.bytes_D[chosen]), strict=True):
            column.append(each)
    key_D, is_held_D, bytes_D = (np.concatenate(column) for column in columns)
    order = np.argsort(key_D, kind="stable")
    return (
        _gathered(texts, bytes_D, order[~is_held_D[order]]),
        _gathered(texts, bytes_D, order[is_held_D[order]]),
    )


def _gathered(texts: list[npt.NDArray[np.int32]], bytes_D: npt.NDArray[Any], chosen: npt.NDArray[Any]) -> _Documents:
    tokens = [texts[number] for number in chosen.tolist()]
    lengths = np.array([len(each) for each in tokens], np.int64)
    tokens_T = np.concatenate([np.zeros(0, np.int32), *tokens])
    return _Documents(parts.ids_of(tokens_T), tokens_T >= 0, lengths, bytes_D[chosen])


def _rows(
    recipe: Recipe, found: _Documents, weights: npt.NDArray[np.int64], narrow: Any, shard: int
) -> Iterator[dict[str, Any]]:
    """The records of one file."""
    bytes_T = _bytes(found, weights)
    upto_T = np.concatenate([[0.0], np.cumsum(bytes_T * found.is_target)])
    for row in packing.rows(recipe.packing, found.lengths, recipe.length, recipe.seed + shard):
        ends = row.starts + row.lengths
        inside = [slice(start, end) for start, end in zip(row.starts, ends, strict=True)]
        # The first token of a segment is no target.
        targets = (upto_T[ends] - upto_T[row.starts + 1]).sum()
        tokens = np.concatenate([found.tokens[each] for each in inside]).astype(narrow)
        made = {"tokens": tokens, "lengths": row.lengths.astype(np.int32), "bytes": np.float32(targets)}
        if recipe.template is None:
            yield made
            continue
        is_target = np.concatenate([found.is_target[each] for each in inside])
        is_target[np.cumsum(row.lengths) - row.lengths] = False
        if is_target.any():
            yield made | {"targets": is_target.astype(np.uint8)}


def _counting(filled: list[int], targets: list[int], rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same rows; `filled` gets the tokens of each, `targets` those that are one, of chats."""
    for row in rows:
        filled.append(len(row["tokens"]))
        if "targets" in row:
            targets.append(int(row["targets"].sum()))
        yield row


def _bytes(found: _Documents, weights: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Bytes of text of each token, so that a document's add up to its own, whatever its tokenizer normalizes away."""
    bytes_T = weights[found.tokens].astype(np.float64)
    if not len(found.lengths):
        return bytes_T
    counted_D = np.add.reduceat(bytes_T, np.cumsum(found.lengths) - found.lengths)
    scale_D = np.divide(found.bytes, counted_D, out=np.ones(len(counted_D)), where=counted_D > 0)
    return np.asarray(bytes_T * np.repeat(scale_D, found.lengths))


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            hashed.update(block)
    return hashed.hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Writes a file of JSON, whole or not at all."""
    with drafts.whole(path) as draft:
        draft.write_text(json.dumps(content, indent=1) + "\n")
