from collections import Counter

import numpy as np
import pytest

from jaxlaunch.trainer.text import shards
from jaxlaunch.trainer.text.shards import Row

PACKINGS = ("concat", "first-fit", "none")


def pack(name: str, lengths: list[int], length: int) -> list[Row]:
    return list(shards.pack_rows(name, np.array(lengths, np.int64), length, 0))


@pytest.mark.parametrize("length", [1, 2, 7, 64])
@pytest.mark.parametrize("name", PACKINGS)
def test_each_token_is_a_target_once(name: str, length: int) -> None:
    lengths = [1, 5, 64, 65, 66, 1, 2, 200, 7, 8, 9, 129]
    ends = np.cumsum(lengths)
    targets: Counter[int] = Counter()
    observed: set[int] = set()
    for row in pack(name, lengths, length):
        assert 0 < row.lengths.sum() <= length + 1
        for start, count in zip(row.starts.tolist(), row.lengths.tolist(), strict=True):
            actual = np.searchsorted(ends, start, side="right")
            assert actual == np.searchsorted(ends, start + count - 1, side="right")
            targets.update(range(start + 1, start + count))
            observed.update(range(start, start + count))
    assert targets == Counter(set(range(sum(lengths))) - set(ends - lengths))
    assert observed == set(range(sum(lengths)))


def test_first_fit_fills_rows_to_98_percent() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 5000).astype(np.int64) + 1
    for length in (512, 2048):
        result = pack("first-fit", lengths.tolist(), length)
        assert sum(row.lengths.sum() for row in result) / (len(result) * (length + 1)) >= 0.98


def test_first_fit_keeps_documents_whole() -> None:
    lengths = [10, 3, 17, 5, 9]
    result = sorted(
        count for row in pack("first-fit", lengths, 16) for count in row.lengths.tolist()
    )
    assert result == sorted(lengths)
    assert len(pack("none", lengths, 16)) == 5 and len(pack("concat", lengths, 16)) == 3


def test_no_documents_give_no_rows() -> None:
    assert [pack(name, [], 8) for name in PACKINGS] == [[], [], []]
