"""Tokens of one unit of the files, on the disk until the shards are made of them: the first of two passes.

Which bucket a document goes to, and where in it, is a hash of the seed and of its number: the order of a shuffle that
no memory ever holds. A part is written lot by lot, each sorted by bucket, with a table of where every bucket begins: of
a bucket only what is its own is read. A part appears by a rename of its second file, so a part that is there is whole.

D documents of a part, in the order of its file of tokens; B buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch import atomic_file
from jaxlaunch.trainer.data.order import hash_uint64
from jaxlaunch.trainer.text import chats, documents
from jaxlaunch.trainer.text.documents import Document
from jaxlaunch.trainer.text.recipe import Recipe
from jaxlaunch.trainer.text.tokenizer import HuggingFace, Tokenizer, load

Ints = npt.NDArray[np.int64]

BATCH = 256  # texts that are encoded at once,
BATCH_BYTES = 1 << 20  # or characters
HELD = 4 << 20  # tokens held before they are written
HEADER = 5  # numbers at the beginning of an index: replaced, empty, lots, buckets, documents
COLUMNS = 5  # of the index: key, number, begin, length, bytes
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # what splitmix64 adds


class Index(NamedTuple):
    """Documents of a part's file of tokens."""

    key_D: npt.NDArray[np.uint64]  # sorts the documents of a bucket
    number_D: Ints  # of the document in its unit
    begin_D: Ints  # its first token in the file
    length_D: Ints  # tokens, those put around included
    bytes_D: Ints  # of text

    @classmethod
    def from_rows(cls, rows_D5: Ints) -> Index:
        """Return the documents of rows of an index."""
        key_D, *others = np.ascontiguousarray(rows_D5.T)
        return cls(key_D.view(np.uint64), *others)


class About(NamedTuple):
    """A part as a whole."""

    documents: int
    replaced: int  # characters that stand for bytes that are no UTF-8
    empty: int  # documents without a token, which are left out


def part_path(folder: Path, unit: int) -> Path:
    """Return the index of a part; its tokens are next to it."""
    return folder / f"part-{unit:06}.index"


def write_part(recipe: Recipe, folder: Path, unit: int, parts: list[documents.Part], buckets: int) -> None:
    """Tokenize one unit. Raises DataError naming file and row."""
    path = part_path(folder, unit)
    tables: list[Ints] = []  # of each lot, the first document of each bucket, and the end
    rows: list[Ints] = []
    replaced = empty = first = tokens = 0
    with atomic_file.draft(path.with_suffix(".tokens")) as draft, draft.open("wb") as file:
        for lot in _tokenize(recipe, parts):
            key_D = sort_keys(recipe.seed, unit, first + np.arange(len(lot.ids)))
            bucket_D = (key_D % np.uint64(buckets)).astype(np.int64)
            order_D = np.argsort(bucket_D, kind="stable")
            length_D = np.array([len(ids) for ids in lot.ids], np.int64)[order_D]
            bytes_D = np.array(lot.bytes, np.int64)[order_D]
            begin_D = tokens + np.cumsum(length_D) - length_D
            columns = (key_D[order_D].view(np.int64), first + order_D, begin_D, length_D, bytes_D)
            tables.append(first + np.searchsorted(bucket_D[order_D], np.arange(buckets + 1)))
            rows.append(np.stack(columns, axis=1))
            for number in order_D.tolist():
                file.write(lot.ids[number].data)
            first, tokens = first + len(lot.ids), tokens + lot.tokens
            replaced, empty = replaced + lot.replaced, empty + lot.empty
    with atomic_file.draft(path) as draft:
        header = np.array([replaced, empty, len(tables), buckets, first])
        np.concatenate([header, *tables, *(lot_rows.ravel() for lot_rows in rows)]).astype(np.int64).tofile(draft)


def is_complete(folder: Path, unit: int) -> bool:
    """Tell whether a part is there with all its tokens; one cut short, as by a disk that lost power, is removed."""
    path = part_path(folder, unit)
    tokens = path.with_suffix(".tokens")
    if not path.exists():
        return False
    index = np.fromfile(path, np.int64)
    if len(index) >= HEADER and tokens.exists():
        _, _, lots, buckets, count = index[:HEADER].tolist()
        rows = index[HEADER + lots * (buckets + 1) :]
        if len(rows) == COLUMNS * count and tokens.stat().st_size == 4 * int(rows[3::COLUMNS].sum()):
            return True
    path.unlink(missing_ok=True)
    tokens.unlink(missing_ok=True)
    return False


def read_part(folder: Path, unit: int) -> tuple[About, Index]:
    """Read a part that is there, and all of its documents."""
    index = np.fromfile(part_path(folder, unit), np.int64)
    replaced, empty, lots, buckets, count = index[:HEADER].tolist()
    rows_D5 = index[HEADER + lots * (buckets + 1) :].reshape(count, COLUMNS)
    return About(count, replaced, empty), Index.from_rows(rows_D5)


def read_bucket(folder: Path, unit: int, bucket: int) -> Iterator[tuple[Index, npt.NDArray[np.int32]]]:
    """Yield the documents of a bucket in a part, and their tokens in a row, lot by lot, as in the file."""
    path = part_path(folder, unit)
    with path.open("rb", buffering=0) as index, path.with_suffix(".tokens").open("rb", buffering=0) as tokens:
        _, _, lots, buckets, _ = _read_numbers(index, 0, HEADER).tolist()
        table = HEADER + lots * (buckets + 1)
        for lot in range(lots):
            low, high = _read_numbers(index, HEADER + lot * (buckets + 1) + bucket, 2).tolist()
            if high == low:
                continue
            rows = _read_numbers(index, table + COLUMNS * low, COLUMNS * (high - low)).reshape(-1, COLUMNS)
            found = Index.from_rows(rows)
            first, last = int(found.begin_D[0]), int(found.begin_D[-1] + found.length_D[-1])
            tokens.seek(4 * first)
            yield found, np.frombuffer(tokens.read(4 * (last - first)), np.int32)


def _read_numbers(file: BinaryIO, first: int, count: int) -> Ints:
    file.seek(8 * first)
    return np.frombuffer(file.read(8 * count), np.int64)


def token_ids(tokens_T: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the ids of tokens of a part, where one that is no target is written as ~id, below 0."""
    return np.where(tokens_T < 0, ~tokens_T, tokens_T)


def sort_keys(seed: int, unit: int, number_D: Ints) -> npt.NDArray[np.uint64]:
    """Return a hash of seed, unit and number for each document."""
    unit_hash = hash_uint64(hash_uint64(np.array([seed], np.uint64), GOLDEN) ^ np.uint64(unit), GOLDEN)
    return hash_uint64(unit_hash ^ number_D.astype(np.uint64), GOLDEN)


class _Lot:
    """Documents that are encoded and not yet written."""

    def __init__(self) -> None:
        self.ids: list[npt.NDArray[np.int32]] = []
        self.bytes: list[int] = []
        self.tokens = self.replaced = self.empty = 0

    def add(self, batch: list[Document], tokenizer: Tokenizer) -> None:
        """Encode a batch; a document without a token, such as one of spaces for some tokenizers, is only counted."""
        texts = [document for document in batch if document.text]
        for document, ids in zip(texts, _encode(texts, tokenizer), strict=True):
            if not len(ids):
                self.empty += 1
                continue
            text_bytes = len(document.text.encode())
            if document.spans is not None:  # names of special tokens, which a chat's template wrote, are no text
                assert isinstance(tokenizer, HuggingFace)
                text_bytes -= int(tokenizer.special_bytes[token_ids(ids)].sum())
            self.ids.append(ids)
            self.bytes.append(text_bytes)
            self.tokens += len(ids)
        self.replaced += sum(document.replaced for document in batch)
        self.empty += len(batch) - len(texts)


def _encode(texts: list[Document], tokenizer: Tokenizer) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the tokens of each document, none of one that is empty; ~id, for `token_ids`, for one that is no target.

    Around a chat its template has put what belongs there.
    """
    words, spans = [text.text for text in texts], [text.spans for text in texts if text.spans is not None]
    if spans:
        for ids_T, is_target_T in tokenizer.encode_spans(words, spans):
            yield np.where(is_target_T, ids_T, ~ids_T)
        return
    before = [] if tokenizer.bos is None else [tokenizer.bos]
    after = [] if tokenizer.eos is None else [tokenizer.eos]
    for ids in tokenizer.encode_batch(words):
        yield np.array([*before, *ids, *after] if ids else [], np.int32)


def _tokenize(recipe: Recipe, parts: list[documents.Part]) -> Iterator[_Lot]:
    """Yield the unit's documents, in lots of about HELD tokens: at least one lot, which may hold none."""
    tokenizer, lot, make = load(recipe.tokenizer), _Lot(), None
    if recipe.template is not None:
        make = partial(chats.load(recipe.tokenizer).of_row, recipe.field or chats.FIELD)
    batch: list[Document] = []
    size = 0
    for part in parts:
        for document in documents.read_documents(part, recipe.field, make, chats.ALSO):
            batch.append(document)
            size += len(document.text)
            if len(batch) == BATCH or size >= BATCH_BYTES:
                lot.add(batch, tokenizer)
                batch, size = [], 0
                if lot.tokens >= HELD:
                    yield lot
                    lot = _Lot()
    lot.add(batch, tokenizer)
    yield lot
