"""Puts documents into rows of a fixed length, each document a segment of its own. Pure.

L length: a row has up to L + 1 tokens, of which all but the first of each segment are targets. Every token of a
document but its first is a target exactly once, whatever the packing: where a document is cut, the next row begins with
the last token of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Row(NamedTuple):
    """The tokens `starts[i]` … `starts[i]` + `lengths[i]` − 1 of the stream, one segment after the other."""

    starts: Ints
    lengths: Ints


def rows(packing: str, lengths_D: Ints, length: int, seed: int) -> Iterator[Row]:
    """The rows that documents of these lengths, one after the other in a stream, are put into.

    `concat` cuts the stream every `length` tokens; `first-fit` keeps documents whole where they fit into a row, longest
    first, each in the fullest row that has room; `none` gives each a row. `seed` is of the order of first-fit's rows.
    """
    if packing == "concat":
        return _concatenated(lengths_D, length)
    chunks = _chunks(lengths_D, length)
    if packing == "none":
        return (Row(chunks.starts[at : at + 1], chunks.lengths[at : at + 1]) for at in range(len(chunks.starts)))
    return _fitted(chunks, length + 1, seed)


def _concatenated(lengths_D: Ints, length: int) -> Iterator[Row]:
    ends_D = np.cumsum(lengths_D)
    total = int(ends_D[-1]) if len(ends_D) else 0
    for first in range(0, max(total - 1, min(total, 1)), length):
        last = min(first + length + 1, total)
        low, high = np.searchsorted(ends_D, (first, last - 1), side="right")
        edges = np.concatenate([[first], ends_D[low:high], [last]])
        yield Row(edges[:-1], np.diff(edges))


def _chunks(lengths_D: Ints, length: int) -> Row:
    """Documents as parts of at most `length` + 1 tokens, each beginning with the last token of the one before."""
    parts_D = np.maximum(1, -(-(lengths_D - 1) // length))
    document_C = np.repeat(np.arange(len(lengths_D)), parts_D)
    number_C = np.arange(len(document_C)) - np.repeat(np.cumsum(parts_D) - parts_D, parts_D)
    begin_D = np.cumsum(lengths_D) - lengths_D
    lengths_C = np.minimum(lengths_D[document_C] - number_C * length, length + 1)
    return Row(begin_D[document_C] + number_C * length, lengths_C)


def _fitted(chunks: Row, capacity: int, seed: int) -> Iterator[Row]:
    """Best fit decreasing: rows by the room they have left, the smallest that suffices found in a set of bits."""
    held: list[list[int]] = []
    room: dict[int, list[int]] = {}  # room left -> rows
    open_bits = 0  # bit r is set where a row has room r
    for chunk in np.argsort(-chunks.lengths, kind="stable").tolist():
        needed = int(chunks.lengths[chunk])
        fitting = open_bits >> needed
        if fitting:
            left = needed + (fitting & -fitting).bit_length() - 1
            row = room[left].pop()
            if not room[left]:
                open_bits &= ~(1 << left)
        else:
            left, row = capacity, len(held)
            held.append([])
        held[row].append(chunk)
        left -= needed
        if left:
            room.setdefault(left, []).append(row)
            open_bits |= 1 << left
    for number in np.random.default_rng(seed).permutation(len(held)).tolist():
        inside = np.array(held[number])
        yield Row(chunks.starts[inside], chunks.lengths[inside])
