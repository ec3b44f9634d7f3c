"""Tokenizes a corpus into parts, and packs the parts into shards of rows.

The first pass writes parts. A part contains the tokens of one unit of the files, and stays on the
disk until the shards are complete. A hash of the seed and the document's number determines the
bucket of a document and its position there, which shuffles the corpus without keeping it in memory.
A part is written in lots. Each lot is sorted by bucket and has a table of the positions of its
buckets, so that the second pass reads only the documents of one bucket. A part is complete when its
index is renamed, which is written after its tokens.

The second pass packs shards, bucket by bucket, so that it needs the memory of one bucket for any
size of the corpus. A shard consists of two array_record files, for training and evaluation, and a
JSON record of both, which is written last. A row has `tokens`, the `lengths` of its segments, and
`bytes`, the size of the text of its targets. Rows of chats also have `targets`, 1 for the tokens
that are targets; rows of chats without targets are left out.

Documents are packed into rows of a fixed length, each as a separate segment. A row has up to L + 1
tokens, of which all but the first of each segment are targets. Every token of a document but its
first is a target exactly once: if a document is cut, the next row begins with the last token of the
previous one.

D documents of a part, in the order of its file of tokens; T tokens; C chunks; L length.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch import atomic_file
from jaxlaunch.trainer.data import records
from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.data.order import hash_uint64
from jaxlaunch.trainer.data.split import GOLDEN
from jaxlaunch.trainer.text import chat_notes, chats, documents, layouts
from jaxlaunch.trainer.text.chat_notes import NoteKind, Notes
from jaxlaunch.trainer.text.documents import Document
from jaxlaunch.trainer.text.recipe import Recipe
from jaxlaunch.trainer.text.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    add_ends,
    load_tokenizer,
)

Ints = npt.NDArray[np.int64]

# A batch is encoded when it has this many texts or this many characters.
BATCH_TEXTS, BATCH_CHARACTERS = 256, 1 << 20
# A lot is written when it has this many tokens.
LOT_TOKENS = 4 << 20
# Count of numbers at the beginning of an index: replaced, empty, lots, buckets, documents.
HEADER_NUMBERS = 5
# Count of columns of an index: key, rank, begin, length, bytes.
INDEX_COLUMNS = 5
SPLITS = ("train", "eval")


class PartIndex(NamedTuple):
    """The documents of a part or a lot, in the order of the file of tokens."""

    # Sort key of the documents of a bucket.
    key_D: npt.NDArray[np.uint64]
    # Rank of the document's identity, by which it is held out.
    rank_D: npt.NDArray[np.uint64]
    # First token of the document in the file.
    begin_D: Ints
    # Number of tokens, including bos and eos.
    length_D: Ints
    # Bytes of text.
    bytes_D: Ints

    @classmethod
    def from_rows(cls, rows_D5: Ints) -> PartIndex:
        """Convert rows of an index."""
        key_D, rank_D, *columns = np.ascontiguousarray(rows_D5.T)
        return cls(key_D.view(np.uint64), rank_D.view(np.uint64), *columns)


class PartCounts(NamedTuple):
    """The counts of a part."""

    documents: int
    # Number of characters that replace invalid UTF-8.
    replaced: int
    # Number of documents without a token, which are left out.
    empty: int


def part_path(folder: Path, unit: int) -> Path:
    """Return the path of a part's index, which is next to its tokens."""
    return folder / f"part-{unit:06}.index"


def write_part(
    recipe: Recipe, folder: Path, unit: int, parts: list[documents.Part], buckets: int
) -> None:
    """Tokenize a unit and write its part. Raises DataError naming file and row."""
    path = part_path(folder, unit)
    # For each lot, the first document of each bucket, and the end of the last bucket.
    tables: list[Ints] = []
    rows: list[Ints] = []
    replaced = empty = first = tokens = 0
    notes: Notes = Counter()
    with atomic_file.open_draft(path.with_suffix(".tokens")) as draft, draft.open("wb") as file:
        for lot in _tokenize_parts(recipe, parts):
            key_D = sort_keys(recipe.seed, unit, first + np.arange(len(lot.ids)))
            bucket_D = (key_D % np.uint64(buckets)).astype(np.int64)
            order_D = np.argsort(bucket_D, kind="stable")
            length_D = np.array([len(ids) for ids in lot.ids], np.int64)[order_D]
            bytes_D = np.array(lot.bytes, np.int64)[order_D]
            begin_D = tokens + np.cumsum(length_D) - length_D
            rank_D = splits.rank_keys(np.array(lot.identities, np.uint64), recipe.split_seed)
            hashes = (key_D[order_D].view(np.int64), rank_D[order_D].view(np.int64))
            columns = (*hashes, begin_D, length_D, bytes_D)
            tables.append(first + np.searchsorted(bucket_D[order_D], np.arange(buckets + 1)))
            rows.append(np.stack(columns, axis=1))
            for number in order_D.tolist():
                file.write(lot.ids[number].data)
            first, tokens = first + len(lot.ids), tokens + lot.tokens
            replaced, empty = replaced + lot.replaced, empty + lot.empty
            notes.update(lot.notes)
    if recipe.has_targets:
        notes.pop((NoteKind.UNREAD_FIELD, recipe.group or ""), None)
        write_json(path.with_suffix(".notes"), chat_notes.notes_to_json(notes))
    with atomic_file.open_draft(path) as draft:
        header = np.array([replaced, empty, len(tables), buckets, first])
        numbers = np.concatenate([header, *tables, *(lot_rows.ravel() for lot_rows in rows)])
        numbers.astype(np.int64).tofile(draft)


def is_complete(folder: Path, unit: int) -> bool:
    """Return whether a part is complete, and remove a truncated part, as after a power failure."""
    path = part_path(folder, unit)
    tokens = path.with_suffix(".tokens")
    if not path.exists():
        return False
    index = np.fromfile(path, np.int64)
    if len(index) >= HEADER_NUMBERS and tokens.exists():
        _, _, lots, buckets, count = index[:HEADER_NUMBERS].tolist()
        rows = index[HEADER_NUMBERS + lots * (buckets + 1) :]
        token_bytes = 4 * int(rows[3::INDEX_COLUMNS].sum())
        if len(rows) == INDEX_COLUMNS * count and tokens.stat().st_size == token_bytes:
            return True
    path.unlink(missing_ok=True)
    tokens.unlink(missing_ok=True)
    return False


def read_notes(folder: Path, unit: int) -> Notes:
    """Read the counts of what the targets of a complete part lack."""
    path = part_path(folder, unit).with_suffix(".notes")
    return chat_notes.notes_from_json(json.loads(path.read_text()))


def read_part(folder: Path, unit: int) -> tuple[PartCounts, PartIndex]:
    """Read the counts and the index of a complete part."""
    index = np.fromfile(part_path(folder, unit), np.int64)
    replaced, empty, lots, buckets, count = index[:HEADER_NUMBERS].tolist()
    rows_D5 = index[HEADER_NUMBERS + lots * (buckets + 1) :].reshape(count, INDEX_COLUMNS)
    return PartCounts(count, replaced, empty), PartIndex.from_rows(rows_D5)


def read_bucket(
    folder: Path, unit: int, bucket: int
) -> Iterator[tuple[PartIndex, npt.NDArray[np.int32]]]:
    """Yield the documents of a bucket in a part and their concatenated tokens, lot by lot."""
    path = part_path(folder, unit)
    with (
        path.open("rb", buffering=0) as index,
        path.with_suffix(".tokens").open("rb", buffering=0) as tokens,
    ):
        _, _, lots, buckets, _ = _read_numbers(index, 0, HEADER_NUMBERS).tolist()
        table = HEADER_NUMBERS + lots * (buckets + 1)
        for lot in range(lots):
            position = HEADER_NUMBERS + lot * (buckets + 1) + bucket
            low, high = _read_numbers(index, position, 2).tolist()
            if high == low:
                continue
            position, count = table + INDEX_COLUMNS * low, INDEX_COLUMNS * (high - low)
            rows_D5 = _read_numbers(index, position, count).reshape(-1, INDEX_COLUMNS)
            lot_index = PartIndex.from_rows(rows_D5)
            first = int(lot_index.begin_D[0])
            last = int(lot_index.begin_D[-1] + lot_index.length_D[-1])
            tokens.seek(4 * first)
            yield lot_index, np.frombuffer(tokens.read(4 * (last - first)), np.int32)


def _read_numbers(file: BinaryIO, first: int, count: int) -> Ints:
    file.seek(8 * first)
    return np.frombuffer(file.read(8 * count), np.int64)


def token_ids(tokens_T: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the ids of the tokens of a part, in which tokens that are not targets are ~id."""
    return np.where(tokens_T < 0, ~tokens_T, tokens_T)


def sort_keys(seed: int, unit: int, number_D: Ints) -> npt.NDArray[np.uint64]:
    """Return the sort key of each document, a hash of seed, unit and number."""
    seed_hash = hash_uint64(np.array([seed], np.uint64), GOLDEN)
    unit_hash = hash_uint64(seed_hash ^ np.uint64(unit), GOLDEN)
    return hash_uint64(unit_hash ^ number_D.astype(np.uint64), GOLDEN)


class _Lot:
    """Encoded documents that are not yet written."""

    def __init__(self) -> None:
        self.ids: list[npt.NDArray[np.int32]] = []
        self.bytes: list[int] = []
        # Hash of each document's row or group, or of its text.
        self.identities: list[int] = []
        self.tokens = self.replaced = self.empty = 0
        self.notes: Notes = Counter()

    def add_batch(self, batch: list[Document], tokenizer: Tokenizer) -> None:
        """Encode and add a batch. Documents without tokens are only counted."""
        texts = [document for document in batch if document.text]
        for document, ids in zip(texts, encode_documents(texts, tokenizer), strict=True):
            if not len(ids):
                self.empty += 1
                continue
            text_bytes = len(document.text.encode())
            if document.spans is not None and not document.is_plain:
                # The names of special tokens that a chat template wrote do not count as text.
                assert isinstance(tokenizer, HuggingFaceTokenizer)
                text_bytes -= int(tokenizer.special_bytes[token_ids(ids)].sum())
            self.ids.append(ids)
            self.bytes.append(text_bytes)
            identity = document.identity
            self.identities.append(
                splits.hash_text(document.text) if identity is None else identity
            )
            self.tokens += len(ids)
        for document in batch:
            self.notes.update(document.notes)
        self.replaced += sum(document.replaced for document in batch)
        self.empty += len(batch) - len(texts)


def encode_documents(
    texts: list[Document], tokenizer: Tokenizer
) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the tokens of each document, ~id for tokens that are not targets.

    Texts get bos and eos tokens, and a text with a prompt an eos token that is a target. Chats
    already have those of their template.
    """
    strings = [text.text for text in texts]
    spans = [text.spans for text in texts if text.spans is not None]
    if spans:
        encodings = tokenizer.encode_spans(strings, spans)
        for text, (ids_T, is_target_T) in zip(texts, encodings, strict=True):
            if text.is_plain:
                ids_T, is_target_T = add_ends(tokenizer, ids_T, is_target_T)
            yield np.where(is_target_T, ids_T, ~ids_T)
        return
    bos_ids = [] if tokenizer.bos is None else [tokenizer.bos]
    eos_ids = [] if tokenizer.eos is None else [tokenizer.eos]
    for ids in tokenizer.encode_batch(strings):
        yield np.array([*bos_ids, *ids, *eos_ids] if ids else [], np.int32)


def _tokenize_parts(recipe: Recipe, parts: list[documents.Part]) -> Iterator[_Lot]:
    """Yield the documents of a unit in lots of about 4 Mi tokens. The last lot may be empty."""
    tokenizer, lot, make = load_tokenizer(recipe.tokenizer), _Lot(), None
    field = recipe.field
    optional_fields: tuple[str, ...] = chats.OPTIONAL_FIELDS
    if recipe.has_targets:
        # The field of the messages is required if the job names another one than the usual.
        field = None if recipe.field == chats.MESSAGES_FIELD else recipe.field
        optional_fields += layouts.list_columns(recipe.format, field)
        make = partial(chats.read_chat, recipe.format, field, recipe.tokenizer)
        read_fields = (*optional_fields, recipe.group or "")
        lot.notes.update(documents.note_columns(parts, read_fields))
    batch: list[Document] = []
    size = 0
    for part in parts:
        for document in documents.read_documents(part, field, make, optional_fields, recipe.group):
            batch.append(document)
            size += len(document.text)
            if len(batch) == BATCH_TEXTS or size >= BATCH_CHARACTERS:
                lot.add_batch(batch, tokenizer)
                batch, size = [], 0
                if lot.tokens >= LOT_TOKENS:
                    yield lot
                    lot = _Lot()
    lot.add_batch(batch, tokenizer)
    yield lot


# --- shards ---------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    """Properties that all shards of a corpus share."""

    shards: int
    buckets: int
    units: int
    # Documents of a lower rank are held out.
    held_out_limit: int
    # Whether all documents are copies of one, so that they are held out by their sort keys.
    has_copies_only: bool = False
    # Number of tokens to train on if there is only one document, whose rest is held out.
    cut: int | None = None


class _Documents(NamedTuple):
    """The documents of one split of a bucket, in the order of their sort keys."""

    # The tokens of all documents, and whether each is a target, [T].
    tokens: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    # The number of tokens and the bytes of text of each document, [D].
    lengths: Ints
    bytes: Ints


def shard_name(split: str, shard: int, shards: int) -> str:
    """Return the file name of a shard."""
    return f"{split}-{shard:05}-of-{shards:05}.array_record"


def record_path(folder: Path, shard: int) -> Path:
    """Return the path of a shard's record, which exists if the shard is complete."""
    return folder / f"shard-{shard:05}.json"


def write_shard(
    recipe: Recipe, folder: Path, parts_folder: Path, shard: int, corpus: Corpus
) -> None:
    """Pack one shard. Raises OSError if a file cannot be written."""
    record: dict[str, Any] = {}
    for split in SPLITS:
        path = folder / shard_name(split, shard, corpus.shards)
        # `filled` counts the positions that hold a token.
        counts: dict[str, Any] = {"split": split, "rows": 0, "filled": 0}
        if recipe.has_targets:
            counts["targets"] = 0
        rows = _shard_rows(recipe, parts_folder, shard, corpus, split, counts)
        try:
            counts["rows"] = records.write(path, rows)
        except RuntimeError as error:
            # array_record raises a RuntimeError, for example if the disk is full.
            raise OSError(f"{path} cannot be written: {error}") from error
        record[path.name] = counts | {"size": path.stat().st_size, "sha256": file_digest(path)}
    write_json(record_path(parts_folder, shard), record)


def _shard_rows(
    recipe: Recipe, folder: Path, shard: int, corpus: Corpus, split: str, counts: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the records of one file of a shard, bucket by bucket, and update `counts`."""
    if split == "eval" and not recipe.eval_split:
        return
    tokenizer = load_tokenizer(recipe.tokenizer)
    dtype = np.uint16 if tokenizer.vocab <= 2**16 else np.int32
    first, last = (corpus.buckets * number // corpus.shards for number in (shard, shard + 1))
    for bucket in range(first, last):
        texts = _read_documents(recipe, folder, bucket, corpus, split)
        if corpus.cut is not None and len(texts.lengths):
            texts = _cut_document(texts, corpus.cut, split, tokenizer.byte_counts)
        bytes_before_T = _count_bytes(texts, tokenizer.byte_counts)
        for row in pack_rows(recipe.packing, texts.lengths, recipe.length, recipe.seed + bucket):
            ends = row.starts + row.lengths
            segments = list(map(slice, row.starts.tolist(), ends.tolist()))
            tokens = np.concatenate([texts.tokens[segment] for segment in segments]).astype(dtype)
            # The first token of a segment is not a target.
            target_bytes = (bytes_before_T[ends] - bytes_before_T[row.starts + 1]).sum()
            record: dict[str, Any] = {"tokens": tokens, "lengths": row.lengths.astype(np.int32)}
            record["bytes"] = np.float32(target_bytes)
            if recipe.has_targets:
                is_target = np.concatenate([texts.is_target[segment] for segment in segments])
                is_target[np.cumsum(row.lengths) - row.lengths] = False
                if not is_target.any():
                    continue
                record["targets"] = is_target.astype(np.uint8)
                counts["targets"] += int(is_target.sum())
            counts["filled"] += len(tokens)
            yield record


def _read_documents(
    recipe: Recipe, folder: Path, bucket: int, corpus: Corpus, split: str
) -> _Documents:
    """Read the documents of a split of a bucket, in the order of their sort keys."""
    texts: list[npt.NDArray[np.int32]] = []
    key_D: list[npt.NDArray[np.uint64]] = []
    bytes_D: list[Ints] = []
    for unit in range(corpus.units):
        for index, tokens_T in read_bucket(folder, unit, bucket):
            rank_D = index.key_D if corpus.has_copies_only else index.rank_D
            is_held_out_D = rank_D < np.uint64(corpus.held_out_limit)
            # A single document that is cut has a part in both splits.
            is_in_split_D = is_held_out_D == (split == "eval" and corpus.cut is None)
            ends_D = np.cumsum(index.length_D)
            begin_D = (ends_D - index.length_D)[is_in_split_D].tolist()
            documents_in_split = map(slice, begin_D, ends_D[is_in_split_D].tolist())
            texts += (tokens_T[document] for document in documents_in_split)
            key_D.append(index.key_D[is_in_split_D])
            bytes_D.append(index.bytes_D[is_in_split_D])
    order_D = np.argsort(np.concatenate([np.zeros(0, np.uint64), *key_D]), kind="stable")
    tokens = [texts[number] for number in order_D.tolist()]
    lengths_D = np.array([len(text) for text in tokens], np.int64)
    tokens_T = np.concatenate([np.zeros(0, np.int32), *tokens])
    text_bytes_D = np.concatenate([np.zeros(0, np.int64), *bytes_D])[order_D]
    return _Documents(token_ids(tokens_T), tokens_T >= 0, lengths_D, text_bytes_D)


def _cut_document(texts: _Documents, cut: int, split: str, counts: Ints) -> _Documents:
    """Return the beginning of the only document for training, or its end for evaluation."""
    span = slice(None, cut) if split == "train" else slice(cut, None)
    share = counts[texts.tokens[span]].sum() / max(counts[texts.tokens].sum(), 1)
    bytes_D = np.round(texts.bytes * share).astype(np.int64)
    tokens_T = texts.tokens[span]
    return _Documents(tokens_T, texts.is_target[span], np.array([len(tokens_T)]), bytes_D)


def _count_bytes(texts: _Documents, counts: Ints) -> npt.NDArray[np.float64]:
    """Return the bytes of text of the targets before each token, and of all targets, [T + 1].

    `counts` are the bytes of each token of the vocabulary. They are scaled so that their sum is the
    size of the document's text, which differs if the tokenizer normalizes it.
    """
    before_T = np.zeros(len(texts.tokens) + 1)
    bytes_T = before_T[1:]
    # The default mode of np.take would buffer the output first.
    np.take(counts.astype(np.float64), texts.tokens, out=bytes_T, mode="clip")
    if len(texts.lengths):
        counted_D = np.add.reduceat(bytes_T, np.cumsum(texts.lengths) - texts.lengths)
        ones_D = np.ones(len(counted_D))
        scale_D = np.divide(texts.bytes, counted_D, out=ones_D, where=counted_D > 0)
        bytes_T *= np.repeat(scale_D.astype(np.float32), texts.lengths)
    bytes_T *= texts.is_target
    return np.cumsum(before_T, out=before_T)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    atomic_file.write_file(path, (json.dumps(content, indent=1) + "\n").encode())


# --- packing --------------------------------------------------------------------------------------


class Row(NamedTuple):
    """The segments of a row. Segment i has `lengths[i]` tokens from `starts[i]` of the stream."""

    starts: Ints
    lengths: Ints


def pack_rows(packing: str, lengths_D: Ints, length: int, seed: int) -> Iterator[Row]:
    """Yield the rows of a stream of documents with `lengths_D` tokens.

    `concat` cuts the stream every `length` tokens. `first-fit` keeps documents whole if they fit
    into a row: it places the longest document first, and each in the fullest row with sufficient
    room. `none` gives each document its own row. `seed` shuffles the rows of `first-fit`.
    """
    if packing == "concat":
        return _pack_concatenated(lengths_D, length)
    # Split documents into chunks of at most `length` + 1 tokens, which overlap by one token.
    parts_D = np.maximum(1, -(-(lengths_D - 1) // length))
    document_C = np.repeat(np.arange(len(lengths_D)), parts_D)
    number_C = np.arange(len(document_C)) - np.repeat(np.cumsum(parts_D) - parts_D, parts_D)
    begin_D = np.cumsum(lengths_D) - lengths_D
    lengths_C = np.minimum(lengths_D[document_C] - number_C * length, length + 1)
    chunks = Row(begin_D[document_C] + number_C * length, lengths_C)
    if packing == "none":
        ranges = (slice(number, number + 1) for number in range(len(lengths_C)))
        return (Row(chunks.starts[chunk], chunks.lengths[chunk]) for chunk in ranges)
    return _pack_first_fit(chunks, length + 1, seed)


def _pack_concatenated(lengths_D: Ints, length: int) -> Iterator[Row]:
    ends_D = np.cumsum(lengths_D)
    total = int(ends_D[-1]) if len(ends_D) else 0
    for first in range(0, max(total - 1, min(total, 1)), length):
        last = min(first + length + 1, total)
        low, high = np.searchsorted(ends_D, (first, last - 1), side="right")
        edges = np.concatenate([[first], ends_D[low:high], [last]])
        yield Row(edges[:-1], np.diff(edges))


def _pack_first_fit(chunks: Row, capacity: int, seed: int) -> Iterator[Row]:
    """Pack by best fit decreasing. A bit set finds the smallest sufficient room."""
    rows: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}
    # Bit r is set if a row has room r.
    room_bits = 0
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
        members = np.array(rows[number])
        yield Row(chunks.starts[members], chunks.lengths[members])
