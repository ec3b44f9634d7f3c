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
    def of(cls, rows_D5: Ints) -> Index:
        """The documents of rows of an index."""
        key_D, *others = np.ascontiguousarray(rows_D5.T)
        return cls(key_D.view(np.uint64), *others)


class About(NamedTuple):
    """A part as a whole."""

    documents: int
    replaced: int  # characters that stand for bytes that are no UTF-8
    empty: int  # documents without a token, which are left out


def place(folder: Path, unit: int) -> Path:
    """The index of a part; its tokens are beside it."""
    return folder / f"part-{unit:06}.index"


def write(recipe: Recipe, folder: Path, unit: int, parts: list[documents.Part], buckets: int) -> None:
    """Tokenizes one unit. Raises DataError naming file and row."""
    place_of_tokens = place(folder, unit).with_suffix(".tokens")
    tables: list[Ints] = []  # of each lot, the first document of each bucket, and the end
    rows: list[Ints] = []
    replaced = empty = first = tokens = 0
    with atomic_file.draft(place_of_tokens) as draft, draft.open("wb") as file:
        for lot in _tokenized(recipe, parts):
            table_B, rows_D5, order_D = _sorted(lot, keys(recipe.seed, unit, first + np.arange(len(lot.ids))), buckets)
            tables.append(first + table_B)
            rows.append(rows_D5 + np.array([0, first, tokens, 0, 0]))
            for at in order_D.tolist():
                file.write(lot.ids[at].data)
            first, tokens = first + len(lot.ids), tokens + lot.tokens
            replaced, empty = replaced + lot.replaced, empty + lot.empty
    with atomic_file.draft(place(folder, unit)) as draft:
        header = np.array([replaced, empty, len(tables), buckets, first])
        np.concatenate([header, *tables, *(each.ravel() for each in rows)]).astype(np.int64).tofile(draft)


def is_there(folder: Path, unit: int) -> bool:
    """Whether a part is there with all its tokens; one cut short, as by a disk that lost power, is removed."""
    own = place(folder, unit), place(folder, unit).with_suffix(".tokens")
    if not own[0].exists():
        return False
    found = np.fromfile(own[0], np.int64)
    if len(found) >= HEADER and own[1].exists():
        _, _, lots, buckets, count = found[:HEADER].tolist()
        rows_D5 = found[HEADER + lots * (buckets + 1) :]
        if len(rows_D5) == COLUMNS * count and own[1].stat().st_size == 4 * int(rows_D5[3::COLUMNS].sum()):
            return True
    for path in own:
        path.unlink(missing_ok=True)
    return False


def whole(folder: Path, unit: int) -> tuple[About, Index]:
    """A part that is there, and all of its documents."""
    found = np.fromfile(place(folder, unit), np.int64)
    replaced, empty, lots, buckets, count = found[:HEADER].tolist()
    rows_D5 = found[HEADER + lots * (buckets + 1) :].reshape(count, COLUMNS)
    return About(count, replaced, empty), Index.of(rows_D5)


def of_bucket(folder: Path, unit: int, bucket: int) -> Iterator[tuple[Index, npt.NDArray[np.int32]]]:
    """The documents of a bucket in a part, and their tokens one after the other, lot by lot, as in the file."""
    path = place(folder, unit)
    with path.open("rb", buffering=0) as index, path.with_suffix(".tokens").open("rb", buffering=0) as tokens:
        _, _, lots, buckets, _ = _numbers(index, 0, HEADER).tolist()
        table = HEADER + lots * (buckets + 1)
        for lot in range(lots):
            low, high = _numbers(index, HEADER + lot * (buckets + 1) + bucket, 2).tolist()
            if high == low:
                continue
            found = Index.of(_numbers(index, table + COLUMNS * low, COLUMNS * (high - low)).reshape(-1, COLUMNS))
            first, last = int(found.begin_D[0]), int(found.begin_D[-1] + found.length_D[-1])
            tokens.seek(4 * first)
            yield found, np.frombuffer(tokens.read(4 * (last - first)), np.int32)


def _numbers(file: BinaryIO, first: int, count: int) -> Ints:
    file.seek(8 * first)
    return np.frombuffer(file.read(8 * count), np.int64)


def ids_of(tokens_T: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The ids of tokens of a part, where one that is no target is written as ~id, below 0."""
    return np.where(tokens_T < 0, ~tokens_T, tokens_T)


class _Lot:
    """Documents that are encoded and not yet written."""

    def __init__(self) -> None:
        self.ids: list[npt.NDArray[np.int32]] = []
        self.bytes: list[int] = []
        self.tokens = self.replaced = self.empty = 0

    def add(self, batch: list[Document], tokenizer: Tokenizer) -> None:
        """Encodes a batch; a document without a token, such as one of spaces for some tokenizers, is counted alone."""
        found = [each for each in batch if each.text]
        for document, ids in zip(found, _encoded(found, tokenizer), strict=True):
            if not len(ids):
                self.empty += 1
                continue
            self.ids.append(ids)
            self.bytes.append(len(document.text.encode()) - _put_in(document, ids, tokenizer))
            self.tokens += len(ids)
        self.replaced += sum(each.replaced for each in batch)
        self.empty += len(batch) - len(found)


def _encoded(found: list[Document], tokenizer: Tokenizer) -> Iterator[npt.NDArray[np.int32]]:
    """The tokens of each document, none of one that is empty; ~id, for `ids_of`, for one that is no target.

    Around a chat its template has put what belongs there.
    """
    texts, spans = [each.text for each in found], [each.spans for each in found if each.spans is not None]
    if spans:
        for ids_T, is_target_T in tokenizer.encode_spans(texts, spans):
            yield np.where(is_target_T, ids_T, ~ids_T)
        return
    before = [] if tokenizer.bos is None else [tokenizer.bos]
    behind = [] if tokenizer.eos is None else [tokenizer.eos]
    for ids in tokenizer.encode_batch(texts):
        yield np.array([*before, *ids, *behind] if ids else [], np.int32)


def _put_in(document: Document, ids: npt.NDArray[np.int32], tokenizer: Tokenizer) -> int:
    """Bytes of a document that are the names of special tokens, which a chat's template wrote."""
    if document.spans is None:
        return 0
    assert isinstance(tokenizer, HuggingFace)
    return int(tokenizer.special_bytes[ids_of(ids)].sum())


def _tokenized(recipe: Recipe, parts: list[documents.Part]) -> Iterator[_Lot]:
    """The unit's documents, in lots of about HELD tokens: at least one lot, which may hold none."""
    tokenizer, lot = load(recipe.tokenizer), _Lot()
    made = None
    if recipe.template is not None:
        made = partial(chats.load(recipe.tokenizer).of_row, recipe.field or chats.FIELD)
    found = (document for part in parts for document in documents.read(part, recipe.field, made, chats.ALSO))
    for batch in _batches(found):
        lot.add(batch, tokenizer)
        if lot.tokens >= HELD:
            yield lot
            lot = _Lot()
    yield lot


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in found:
        batch.append(document)
        size += len(document.text)
        if len(batch) == BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def _sorted(lot: _Lot, key_D: npt.NDArray[np.uint64], buckets: int) -> tuple[Ints, Ints, Ints]:
    """The first document of each bucket, and the end, [B + 1]; the rows of the index, [D, COLUMNS]; their order, [D].

    Numbers and tokens are counted from the lot's own first.
    """
    bucket_D = (key_D % np.uint64(buckets)).astype(np.int64)
    order_D = np.argsort(bucket_D, kind="stable")
    length_D = np.array([len(each) for each in lot.ids], np.int64)[order_D]
    bytes_D = np.array(lot.bytes, np.int64)[order_D]
    columns = (key_D[order_D].view(np.int64), order_D, np.cumsum(length_D) - length_D, length_D, bytes_D)
    table_B = np.searchsorted(bucket_D[order_D], np.arange(buckets + 1))
    return table_B, np.stack(columns, axis=1), order_D


def keys(seed: int, unit: int, number_D: Ints) -> npt.NDArray[np.uint64]:
    """A hash of seed, unit and number for each document."""
    of_unit = hash_uint64(hash_uint64(np.array([seed], np.uint64), GOLDEN) ^ np.uint64(unit), GOLDEN)
    return hash_uint64(of_unit ^ number_D.astype(np.uint64), GOLDEN)
