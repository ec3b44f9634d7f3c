"""Text files as one stream of bytes, cut into windows; and the bigram model that a language model should beat.

L length of a window. Window k is bytes k L … k L + L of the stream: each but the first byte is a target exactly once.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.data.order import Share
from jaxlaunch.trainer.data.source import DataSource
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.spec import Text
from jaxlaunch.trainer.text import documents

VOCAB = 256
CHUNK = 16 * 2**20  # bytes counted at once
Bytes = npt.NDArray[np.uint8]
Piece = tuple[str, int, int]  # path, first byte, behind the last


def source(data: Text, length: int, split: Literal["train", "eval"]) -> Stream | None:
    """The files of `split`; None when none are held out. A single file is split by bytes, its end held out."""
    pieces = [(path, 0, files.file_size(path)) for path in files.match_files(data.path)]
    for path, _, _ in pieces:
        documents.check_packing(path)
    if table := next((path for path, _, _ in pieces if documents.is_table(path)), None):
        raise DataError(
            f"{table} is not plain text; data.packing: concat reads its documents, data.field names their text"
        )
    pieces = [piece for piece in pieces if piece[2]]
    if not pieces:
        raise DataError(f"data.path {data.path!r}: every file that matches is empty")
    if not data.eval_split:
        return Stream(pieces, length, "all", data.apart) if split == "train" else None
    if len(pieces) == 1:
        path, _, size = pieces[0]
        middle = size - int(size * data.eval_split)
        train, held_out = [(path, 0, middle)], [(path, middle, size)]
    else:
        share = Share(data.eval_split, len(pieces))
        train = [pieces[share.kept_index(j)] for j in range(share.kept)]
        held_out = [pieces[share.held_out_index(k)] for k in range(share.held_out)]
    if not train:
        raise DataError(f"data.eval_split = {data.eval_split} of {len(pieces)} files leaves none to train on")
    pieces, label = (train, "train") if split == "train" else (held_out, "eval")
    try:
        return Stream(pieces, length, label, data.apart)
    except DataError as error:
        raise DataError(f"{error}; data.eval_split = {data.eval_split} says how much either split has") from None


class Stream(DataSource):
    """Windows of a stream: `tokens` int32 [L + 1]; `mask` float32 [L], 1 where tokens[1:] is a target.

    Only the last window may be short: it is filled up with zeros, which the mask leaves out. Where files are kept
    `apart`, `segments` [L + 1] numbers the file of every token, from 1; 0 is of those zeros.
    """

    def __init__(self, pieces: list[Piece], length: int, label: str, apart: bool = False) -> None:
        self.name = f"text {pieces[0][0]}" + (f" and {len(pieces) - 1} more files" if len(pieces) > 1 else "")
        self._pieces, self._window, self._label, self._apart = pieces, length, label, apart
        self._ends = list(itertools.accumulate(stop - start for _, start, stop in pieces))
        if self.bytes < 2:
            raise DataError(f"{self.name}: the {label} split has {self.bytes} bytes, which leaves nothing to predict")

    @property
    def bytes(self) -> int:
        """Length of the stream."""
        return self._ends[-1]

    def __len__(self) -> int:
        return -(-(self.bytes - 1) // self._window)

    def __getitem__(self, index: int) -> dict[str, Any]:
        first = index * self._window
        found = self.read(first, min(first + self._window + 1, self.bytes))
        tokens_T, mask_L = np.zeros(self._window + 1, np.int32), np.zeros(self._window, np.float32)
        tokens_T[: len(found)] = found
        mask_L[: len(found) - 1] = 1.0
        return {"tokens": tokens_T, "mask": mask_L} | ({"segments": self._segments(first)} if self._apart else {})

    def _segments(self, first: int) -> npt.NDArray[np.int32]:
        """Which file each token of the window that begins at `first` is of; the window's own first is 1."""
        places = np.arange(first, first + self._window + 1)
        low, high = (bisect.bisect_right(self._ends, int(place)) for place in (places[0], places[-1]))
        number_T = 1 + np.searchsorted(self._ends[low:high], places, side="right")
        return np.where(places < self.bytes, number_T, 0).astype(np.int32)

    def read(self, start: int, stop: int) -> Bytes:
        """Bytes start … stop − 1 of the stream. Raises DataError when a file is shorter than it was at the start."""
        parts = []
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            path, first, last = self._pieces[number]
            begin = self._ends[number] - (last - first)
            until = min(stop, self._ends[number])
            parts.append(_read(path, first + start - begin, until - start))
            start, number = until, number + 1
        return np.frombuffer(b"".join(parts), np.uint8)

    def fingerprint(self) -> str:
        """Bytes, files, window length and a digest of the files of this split."""
        digest = files.sample_digest([path for path, _, _ in self._pieces])
        return (
            f"text {self._label}, {self.bytes} bytes of {len(self._pieces)} files in windows of {self._window}, "
            f"{'apart, ' if self._apart else ''}sha256 {digest}"
        )


def _read(path: str, offset: int, count: int) -> bytes:
    found = files.read_bytes(path, offset, count)
    if len(found) < count:
        raise DataError(f"{path} ends at byte {files.file_size(path)}; at the start of the run it had {offset + count}")
    return found


def bigram_bits_per_byte(train: Stream, held_out: Stream) -> float:
    """Bits a byte of `held_out` costs a bigram model counted on `train`; each byte but the first is predicted.

    Smoothing is interpolated Witten-Bell: p(b|a) = (c(ab) + t(a) p(b)) / (c(a) + t(a)), where t(a) is how many
    different bytes follow a, over an add-one unigram p(b). Witten and Bell 1991; Chen and Goodman 1998, section 2.5.
    """
    count_VV = _pairs(train)
    unigram_V = (count_VV.sum(0) + 1.0) / (count_VV.sum() + VOCAB)
    follow_V1 = np.maximum((count_VV > 0).sum(1, keepdims=True), 1)  # never seen: the unigram alone
    bigram_VV = (count_VV + follow_V1 * unigram_V) / (count_VV.sum(1, keepdims=True) + follow_V1)
    seen_VV = _pairs(held_out)
    return float(-(seen_VV * np.log2(bigram_VV)).sum() / seen_VV.sum())


def _pairs(stream: Stream) -> npt.NDArray[np.int64]:
    """How often each byte (column) follows each (row) in the stream."""
    count = np.zeros(VOCAB * VOCAB, np.int64)
    for found in _chunks(stream):
        count += np.bincount(found[:-1].astype(np.int64) * VOCAB + found[1:], minlength=VOCAB * VOCAB)
    return count.reshape(VOCAB, VOCAB)


def _chunks(stream: Stream) -> Iterator[Bytes]:
    for start in range(0, stream.bytes - 1, CHUNK):
        yield stream.read(start, min(start + CHUNK + 1, stream.bytes))
