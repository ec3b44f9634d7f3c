"""Tokens of one unit of the files, on the disk until the shards are made of them: the first of two passes.

Which shard a document goes to, and where in it, is a hash of the seed and of its number: the order of a shuffle that no
memory ever holds. A part appears by a rename of its second file, so a part that is there is whole.

D documents of a part, in the order of its file of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data import drafts
from trainer.text import chats, documents
from trainer.text.documents import Document
from trainer.text.recipe import Recipe
from trainer.text.tokenizer import HuggingFace, Tokenizer, load

Ints = npt.NDArray[np.int64]

BATCH = 256  # texts that are encoded at once,
BATCH_BYTES = 1 << 20  # or characters
HELD = 4 << 20  # tokens held before they are written


class Index(NamedTuple):
    """What a part's file of tokens holds."""

    shard_D: Ints
    key_D: npt.NDArray[np.uint64]  # sorts the documents of a shard
    number_D: Ints  # of the document in its unit
    length_D: Ints  # tokens, those put around included
    bytes_D: Ints  # of text
    replaced: int  # characters that stand for bytes that are no UTF-8
    empty: int  # documents without a token, which are left out


def place(folder: Path, unit: int) -> Path:
    """The index of a part; its tokens are beside it."""
    return folder / f"part-{unit:06}.index"


def write(recipe: Recipe, folder: Path, unit: int, parts: list[documents.Part], shards: int) -> None:
    """Tokenizes one unit. Raises DataError naming file and row."""
    place_of_tokens = place(folder, unit).with_suffix(".tokens")
    pieces: list[Index] = []
    with drafts.whole(place_of_tokens) as draft, draft.open("wb") as file:
        first = 0
        for lot in _tokenized(recipe, parts):
            pieces.append(_sorted(lot, unit, shards, recipe.seed, first))
            file.write(_joined(lot, pieces[-1], first).tobytes())
            first += len(lot.ids)
    replaced, empty = (sum(piece[at] for piece in pieces) for at in (5, 6))
    columns = [np.concatenate([piece[at] for piece in pieces]).view(np.int64) for at in range(5)]
    with drafts.whole(place(folder, unit)) as draft:
        np.concatenate([[replaced, empty], *columns]).astype(np.int64).tofile(draft)


def is_there(folder: Path, unit: int) -> bool:
    """Whether a part is there with all its tokens; one cut short, as by a disk that lost power, is removed."""
    own = place(folder, unit), place(folder, unit).with_suffix(".tokens")
    if not own[0].exists():
        return False
    numbers, rest = divmod(own[0].stat().st_size, 8)
    if not rest and numbers >= 2 and (numbers - 2) % 5 == 0 and own[1].exists():
        if own[1].stat().st_size == 4 * int(index(folder, unit).length_D.sum()):
            return True
    for path in own:
        path.unlink(missing_ok=True)
    return False


def index(folder: Path, unit: int) -> Index:
    """The index of a part that is there."""
    found = np.fromfile(place(folder, unit), np.int64)
    shard_D, key_D, number_D, length_D, bytes_D = found[2:].reshape(5, -1)
    return Index(shard_D, key_D.view(np.uint64), number_D, length_D, bytes_D, int(found[0]), int(found[1]))


def tokens(folder: Path, unit: int, about: Index, chosen: npt.NDArray[np.bool_]) -> Iterator[npt.NDArray[np.int32]]:
    """The tokens of the chosen documents, in the order of the file; what lies side by side is read at once."""
    ends_D = np.cumsum(about.length_D)
    places = np.flatnonzero(chosen)
    with place(folder, unit).with_suffix(".tokens").open("rb") as file:
        for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if len(places) else []:
            first, last = int(ends_D[run[0]] - about.length_D[run[0]]), int(ends_D[run[-1]])
            file.seek(4 * first)
            found = np.frombuffer(file.read(4 * (last - first)), np.int32)
            yield from np.split(found, (ends_D[run[:-1]] - first))


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
        assert isinstance(tokenizer, HuggingFace)
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


def _sorted(lot: _Lot, unit: int, shards: int, seed: int, first: int) -> Index:
    """The index of a lot whose first document has number `first`, its documents sorted by their shard."""
    number_D = np.arange(first, first + len(lot.ids))
    key_D = keys(seed, unit, number_D)
    shard_D = (key_D % np.uint64(shards)).astype(np.int64)
    order = np.argsort(shard_D, kind="stable")
    length_D, bytes_D = np.array([len(each) for each in lot.ids], int), np.array(lot.bytes, int)
    shard_D, number_D, length_D, bytes_D = (each[order] for each in (shard_D, number_D, length_D, bytes_D))
    return Index(shard_D, key_D[order], number_D, length_D, bytes_D, lot.replaced, lot.empty)


def _joined(lot: _Lot, about: Index, first: int) -> npt.NDArray[np.int32]:
    """The tokens of a lot in the order of its index."""
    return np.concatenate([np.zeros(0, np.int32), *(lot.ids[number - first] for number in about.number_D.tolist())])


def keys(seed: int, unit: int, number_D: Ints) -> npt.NDArray[np.uint64]:
    """A hash of seed, unit and number for each document."""
    return _mixed(_mixed(_mixed(np.array([seed], np.uint64)) ^ np.uint64(unit)) ^ number_D.astype(np.uint64))


def _mixed(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # splitmix64 (Steele, Lea and Flood 2014); array arithmetic wraps around without a warning.
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
