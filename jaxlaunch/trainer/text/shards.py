"""Rows of one shard, packed from its documents of every part: the second of two passes.

A shard is made bucket by bucket, so that memory is that of one bucket, however large the corpus is. It is two files of
array_record, of training and of what is held out, and a record of both, written last. A row is `tokens` (its segments
one after the other), `lengths` of them, and `bytes` of text that its targets stand for; of chats also `targets`, 1 for
the tokens that are one. A row of chats without a target is left out.

Documents are put into rows of a fixed length, each a segment of its own. L length: a row has up to L + 1 tokens, of
which all but the first of each segment are targets. Every token of a document but its first is a target exactly once,
whatever the packing: where a document is cut, the next row begins with the last token of the one before.
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
from jaxlaunch.trainer.text import parts
from jaxlaunch.trainer.text.parts import Ints
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
    lengths: Ints
    bytes: Ints


def shard_name(split: str, shard: int, shards: int) -> str:
    """Return the file of a shard."""
    return f"{split}-{shard:05}-of-{shards:05}.array_record"


def record_path(folder: Path, shard: int) -> Path:
    """Return the record of a shard that is complete."""
    return folder / f"shard-{shard:05}.json"


def write_shard(recipe: Recipe, folder: Path, parts_folder: Path, shard: int, corpus: Corpus) -> None:
    """Pack one shard. Raises OSError where a file cannot be written."""
    record: dict[str, Any] = {}
    for split in SPLITS:
        path = folder / shard_name(split, shard, corpus.shards)
        counts: dict[str, Any] = {"split": split, "rows": 0, "filled": 0}  # positions that are filled
        if recipe.template is not None:
            counts["targets"] = 0
        try:
            counts["rows"] = records.write(path, _shard_rows(recipe, parts_folder, shard, corpus, split, counts))
        except RuntimeError as error:  # array_record's, of a disk that is full for one
            raise OSError(f"{path} cannot be written: {error}") from error
        record[path.name] = counts | {"size": path.stat().st_size, "sha256": file_digest(path)}
    write_json(record_path(parts_folder, shard), record)


def _shard_rows(
    recipe: Recipe, folder: Path, shard: int, corpus: Corpus, split: str, counts: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the records of one file, those of a bucket after those of the one before, and count them."""
    if split == "eval" and not recipe.eval_split:
        return
    vocabulary = load(recipe.tokenizer)
    dtype = np.uint16 if vocabulary.vocab <= 2**16 else np.int32
    first, last = (corpus.buckets * number // corpus.shards for number in (shard, shard + 1))
    for bucket in range(first, last):
        documents = _read_documents(recipe, folder, bucket, corpus, split)
        if corpus.cut is not None and len(documents.lengths):
            documents = _cut_document(documents, corpus.cut, split, vocabulary.byte_counts)
        bytes_before_T = _count_bytes(documents, vocabulary.byte_counts)
        for row in pack_rows(recipe.packing, documents.lengths, recipe.length, recipe.seed + bucket):
            ends = row.starts + row.lengths
            inside = [slice(start, end) for start, end in zip(row.starts.tolist(), ends.tolist(), strict=True)]
            tokens = np.concatenate([documents.tokens[segment] for segment in inside]).astype(dtype)
            # The first token of a segment is not a target.
            target_bytes = (bytes_before_T[ends] - bytes_before_T[row.starts + 1]).sum()
            record = {"tokens": tokens, "lengths": row.lengths.astype(np.int32), "bytes": np.float32(target_bytes)}
            if recipe.template is not None:
                is_target = np.concatenate([documents.is_target[segment] for segment in inside])
                is_target[np.cumsum(row.lengths) - row.lengths] = False
                if not is_target.any():
                    continue
                record["targets"] = is_target.astype(np.uint8)
                counts["targets"] += int(is_target.sum())
            counts["filled"] += len(tokens)
            yield record


def _read_documents(recipe: Recipe, folder: Path, bucket: int, corpus: Corpus, split: str) -> _Documents:
    """Read the bucket's documents of a split in the order of their keys; one that is cut as it is."""
    share = Share(recipe.eval_split if corpus.cut is None else 0.0, corpus.documents)
    texts: list[npt.NDArray[np.int32]] = []
    key_D: list[npt.NDArray[np.uint64]] = []
    bytes_D: list[Ints] = []
    for unit, first in enumerate(corpus.first_U):
        for index, tokens_T in parts.read_bucket(folder, unit, bucket):
            is_held_D = share.is_held_out(first + index.number_D)
            is_chosen_D = is_held_D == (split == "eval") if corpus.cut is None else ~is_held_D
            ends_D = np.cumsum(index.length_D)
            begin_D = (ends_D - index.length_D)[is_chosen_D].tolist()
            texts += (tokens_T[low:high] for low, high in zip(begin_D, ends_D[is_chosen_D].tolist(), strict=True))
            key_D.append(index.key_D[is_chosen_D])
            bytes_D.append(index.bytes_D[is_chosen_D])
    order_D = np.argsort(np.concatenate([np.zeros(0, np.uint64), *key_D]), kind="stable")
    tokens = [texts[number] for number in order_D.tolist()]
    lengths_D = np.array([len(text) for text in tokens], np.int64)
    tokens_T = np.concatenate([np.zeros(0, np.int32), *tokens])
    text_bytes_D = np.concatenate([np.zeros(0, np.int64), *bytes_D])[order_D]
    return _Documents(parts.token_ids(tokens_T), tokens_T >= 0, lengths_D, text_bytes_D)


def _cut_document(documents: _Documents, cut: int, split: str, counts: Ints) -> _Documents:
    """Return the beginning of the only document, to train on, or its end."""
    kept = slice(None, cut) if split == "train" else slice(cut, None)
    share = counts[documents.tokens[kept]].sum() / max(counts[documents.tokens].sum(), 1)
    bytes_D = np.round(documents.bytes * share).astype(np.int64)
    tokens_T = documents.tokens[kept]
    return _Documents(tokens_T, documents.is_target[kept], np.array([len(tokens_T)]), bytes_D)


def _count_bytes(documents: _Documents, counts: Ints) -> npt.NDArray[np.float64]:
    """Return the bytes of text of the targets before each token and of all, [T + 1].

    Those of a document's tokens add up to its own, whatever its tokenizer normalizes away.
    """
    before_T = np.zeros(len(documents.tokens) + 1)
    bytes_T = before_T[1:]
    np.take(counts.astype(np.float64), documents.tokens, out=bytes_T, mode="clip")  # what raises would copy it first
    if len(documents.lengths):
        counted_D = np.add.reduceat(bytes_T, np.cumsum(documents.lengths) - documents.lengths)
        scale_D = np.divide(documents.bytes, counted_D, out=np.ones(len(counted_D)), where=counted_D > 0)
        bytes_T *= np.repeat(scale_D.astype(np.float32), documents.lengths)
    bytes_T *= documents.is_target
    return np.cumsum(before_T, out=before_T)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON, whole or not at all."""
    atomic_file.write(path, (json.dumps(content, indent=1) + "\n").encode())


# --- packing ----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """The tokens `starts[i]` … `starts[i]` + `lengths[i]` − 1 of the stream, one segment after the other."""

    starts: Ints
    lengths: Ints


def pack_rows(packing: str, lengths_D: Ints, length: int, seed: int) -> Iterator[Row]:
    """Yield the rows that documents of these lengths, one after the other in a stream, are put into.

    `concat` cuts the stream every `length` tokens; `first-fit` keeps documents whole where they fit into a row, longest
    first, each in the fullest row that has room; `none` gives each a row. `seed` is of the order of first-fit's rows.
    """
    if packing == "concat":
        return _concatenate(lengths_D, length)
    # Documents as parts of at most `length` + 1 tokens, each beginning with the last token of the one before.
    parts_D = np.maximum(1, -(-(lengths_D - 1) // length))
    document_C = np.repeat(np.arange(len(lengths_D)), parts_D)
    number_C = np.arange(len(document_C)) - np.repeat(np.cumsum(parts_D) - parts_D, parts_D)
    begin_D = np.cumsum(lengths_D) - lengths_D
    lengths_C = np.minimum(lengths_D[document_C] - number_C * length, length + 1)
    chunks = Row(begin_D[document_C] + number_C * length, lengths_C)
    if packing == "none":
        return (Row(chunks.starts[at : at + 1], chunks.lengths[at : at + 1]) for at in range(len(chunks.starts)))
    return _fit(chunks, length + 1, seed)


def _concatenate(lengths_D: Ints, length: int) -> Iterator[Row]:
    ends_D = np.cumsum(lengths_D)
    total = int(ends_D[-1]) if len(ends_D) else 0
    for first in range(0, max(total - 1, min(total, 1)), length):
        last = min(first + length + 1, total)
        low, high = np.searchsorted(ends_D, (first, last - 1), side="right")
        edges = np.concatenate([[first], ends_D[low:high], [last]])
        yield Row(edges[:-1], np.diff(edges))


def _fit(chunks: Row, capacity: int, seed: int) -> Iterator[Row]:
    """Pack by best fit decreasing: rows by their free room, the smallest that suffices found in a set of bits."""
    rows: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}
    room_bits = 0  # bit r is set where a row has room r
    for chunk in np.argsort(-chunks.lengths, kind="stable").tolist():
        needed = int(chunks.lengths[chunk])
        fitting = room_bits >> needed
        if fitting:
            room = needed + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                room_bits &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(chunk)
        room -= needed
        if room:
            rows_by_room.setdefault(room, []).append(row)
            room_bits |= 1 << room
    for number in np.random.default_rng(seed).permutation(len(rows)).tolist():
        inside = np.array(rows[number])
        yield Row(chunks.starts[inside], chunks.lengths[inside])
