"""Rows of one shard, packed from its documents of every part: the second of two passes.

A shard is made bucket by bucket, so that memory is that of one bucket, however large the corpus is. It is two files of
array_record, of training and of what is held out, and a record of both, written last. A row is `tokens` (its segments
one after the other), `lengths` of them, and `bytes` of text that its targets stand for; of chats also `targets`, 1 for
the tokens that are one. A row of chats without a target is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch import atomic_file
from jaxlaunch.trainer.data import records
from jaxlaunch.trainer.data.order import Share
from jaxlaunch.trainer.text import packing, parts
from jaxlaunch.trainer.text.recipe import Recipe
from jaxlaunch.trainer.text.tokenizer import load

SPLITS = ("train", "eval")


class Corpus(NamedTuple):
    """What all shards of a corpus have in common."""

    shards: int
    buckets: int
    first_U: tuple[int, ...]  # number of the first document of each unit, in the corpus
    documents: int
    cut: int | None = None  # of the only document, the tokens to train on; the rest is held out


class _Documents(NamedTuple):
    """The documents of one split of a shard, in their order."""

    tokens: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]  # of each token
    lengths: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]


class _Rows(NamedTuple):
    """How rows are made of documents."""

    recipe: Recipe
    counts: npt.NDArray[np.int64]  # bytes of each token of the vocabulary
    narrow: type[np.generic]  # the dtype of tokens


def name(split: str, shard: int, shards: int) -> str:
    """The file of a shard."""
    return f"{split}-{shard:05}-of-{shards:05}.array_record"


def place(folder: Path, shard: int) -> Path:
    """The record of a shard that is complete."""
    return folder / f"shard-{shard:05}.json"


def write(recipe: Recipe, folder: Path, parts_folder: Path, shard: int, corpus: Corpus) -> None:
    """Packs one shard. Raises OSError where a file cannot be written."""
    vocabulary = load(recipe.tokenizer)
    made = _Rows(recipe, vocabulary.byte_counts, np.uint16 if vocabulary.vocab <= 2**16 else np.int32)
    about: dict[str, Any] = {}
    for split in SPLITS:
        path = folder / name(split, shard, corpus.shards)
        filled: list[int] = []  # positions of each row
        targets: list[int] = []  # of chats
        rows = _of_buckets(made, parts_folder, shard, corpus, split)
        try:
            count = records.write(path, _counting(filled, targets, rows))
        except RuntimeError as error:  # array_record's, of a disk that is full for one
            raise OSError(f"{path} cannot be written: {error}") from error
        counted = {"split": split, "rows": count, "filled": sum(filled)}
        if recipe.template is not None:
            counted["targets"] = sum(targets)
        about[path.name] = counted | {"size": path.stat().st_size, "sha256": digest(path)}
    write_json(place(parts_folder, shard), about)


def _of_buckets(made: _Rows, folder: Path, shard: int, corpus: Corpus, split: str) -> Iterator[dict[str, Any]]:
    """The records of one file, those of a bucket after those of the one before."""
    if split == "eval" and not made.recipe.eval_split:
        return
    first, last = (corpus.buckets * number // corpus.shards for number in (shard, shard + 1))
    for bucket in range(first, last):
        found = _documents(made.recipe, folder, bucket, corpus, split)
        yield from _rows(made, found if corpus.cut is None else _part(found, corpus.cut, split, made.counts), bucket)


def _documents(recipe: Recipe, folder: Path, bucket: int, corpus: Corpus, split: str) -> _Documents:
    """The bucket's documents for training, or those held out, in the order of their keys; one that is cut as it is."""
    share = Share(recipe.eval_split if corpus.cut is None else 0.0, corpus.documents)
    texts: list[npt.NDArray[np.int32]] = []
    key_D: list[npt.NDArray[np.uint64]] = []
    bytes_D: list[npt.NDArray[np.int64]] = []
    for unit, first in enumerate(corpus.first_U):
        for about, tokens_T in parts.of_bucket(folder, unit, bucket):
            is_held_D = share.is_held_out(first + about.number_D)
            is_chosen_D = is_held_D == (split == "eval") if corpus.cut is None else ~is_held_D
            ends_D = np.cumsum(about.length_D)
            begin_D = (ends_D - about.length_D)[is_chosen_D].tolist()
            texts += (tokens_T[low:high] for low, high in zip(begin_D, ends_D[is_chosen_D].tolist(), strict=True))
            key_D.append(about.key_D[is_chosen_D])
            bytes_D.append(about.bytes_D[is_chosen_D])
    order_D = np.argsort(np.concatenate([np.zeros(0, np.uint64), *key_D]), kind="stable")
    tokens = [texts[number] for number in order_D.tolist()]
    lengths_D = np.array([len(each) for each in tokens], np.int64)
    tokens_T = np.concatenate([np.zeros(0, np.int32), *tokens])
    counted_D = np.concatenate([np.zeros(0, np.int64), *bytes_D])[order_D]
    return _Documents(parts.ids_of(tokens_T), tokens_T >= 0, lengths_D, counted_D)


def _part(found: _Documents, cut: int, split: str, counts: npt.NDArray[np.int64]) -> _Documents:
    """The beginning of the only document, to train on, or its end; nothing of a bucket without it."""
    if not len(found.lengths):
        return found
    kept = slice(None, cut) if split == "train" else slice(cut, None)
    share = counts[found.tokens[kept]].sum() / max(counts[found.tokens].sum(), 1)
    bytes_D = np.round(found.bytes * share).astype(np.int64)
    tokens_T = found.tokens[kept]
    return _Documents(tokens_T, found.is_target[kept], np.array([len(tokens_T)]), bytes_D)


def _rows(made: _Rows, found: _Documents, bucket: int) -> Iterator[dict[str, Any]]:
    recipe = made.recipe
    upto_T = _bytes_upto(found, made.counts)
    for row in packing.rows(recipe.packing, found.lengths, recipe.length, recipe.seed + bucket):
        ends = row.starts + row.lengths
        inside = [slice(start, end) for start, end in zip(row.starts.tolist(), ends.tolist(), strict=True)]
        # The first token of a segment is not a target.
        targets = (upto_T[ends] - upto_T[row.starts + 1]).sum()
        tokens = np.concatenate([found.tokens[each] for each in inside]).astype(made.narrow)
        record = {"tokens": tokens, "lengths": row.lengths.astype(np.int32), "bytes": np.float32(targets)}
        if recipe.template is None:
            yield record
            continue
        is_target = np.concatenate([found.is_target[each] for each in inside])
        is_target[np.cumsum(row.lengths) - row.lengths] = False
        if is_target.any():
            yield record | {"targets": is_target.astype(np.uint8)}


def _counting(filled: list[int], targets: list[int], rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same rows; `filled` gets the tokens of each, `targets` those that are one, of chats."""
    for row in rows:
        filled.append(len(row["tokens"]))
        if "targets" in row:
            targets.append(int(row["targets"].sum()))
        yield row


def _bytes_upto(found: _Documents, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Bytes of text of the targets before each token and of all, [T + 1].

    Those of a document's tokens add up to its own, whatever its tokenizer normalizes away.
    """
    upto_T = np.zeros(len(found.tokens) + 1)
    bytes_T = upto_T[1:]
    np.take(counts.astype(np.float64), found.tokens, out=bytes_T, mode="clip")  # what raises would copy it first
    if len(found.lengths):
        counted_D = np.add.reduceat(bytes_T, np.cumsum(found.lengths) - found.lengths)
        scale_D = np.divide(found.bytes, counted_D, out=np.ones(len(counted_D)), where=counted_D > 0)
        bytes_T *= np.repeat(scale_D.astype(np.float32), found.lengths)
    bytes_T *= found.is_target
    return np.cumsum(upto_T, out=upto_T)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Writes a file of JSON, whole or not at all."""
    with atomic_file.draft(path) as draft:
        draft.write_text(json.dumps(content, indent=1) + "\n")
