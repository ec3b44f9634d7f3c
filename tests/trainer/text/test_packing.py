from collections import Counter

import numpy as np
import pytest

from jaxlaunch.trainer.text import shards
from jaxlaunch.trainer.text.shards import Row

PACKINGS = ("concat", "first-fit", "none")


def rows(name: str, lengths: list[int], length: int) -> list[Row]:
    return list(shards.pack_rows(name, np.array(lengths, np.int64), length, 0))


@pytest.mark.parametrize("length", [1, 2, 7, 64])
@pytest.mark.parametrize("name", PACKINGS)
def test_every_token_but_the_first_of_a_document_is_a_target_once(name: str, length: int) -> None:
    lengths = [1, 5, 64, 65, 66, 1, 2, 200, 7, 8, 9, 129]
    ends = np.cumsum(lengths)
    targets: Counter[int] = Counter()
    seen: set[int] = set()
    for row in rows(name, lengths, length):
        assert 0 < row.lengths.sum() <= length + 1
        for start, count in zip(row.starts.tolist(), row.lengths.tolist(), strict=True):
            assert np.searchsorted(ends, start, side="right") == np.searchsorted(
                ends, start + count - 1, side="right"
            )
            targets.update(range(start + 1, start + count))
            seen.update(range(start, start + count))
    assert targets == Counter(set(range(sum(lengths))) - set(ends - lengths))
    assert seen == set(range(sum(lengths)))


def test_first_fit_fills_rows_of_lognormal_documents_to_98_percent() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 5000).astype(np.int64) + 1
    for length in (512, 2048):
        found = rows("first-fit", lengths.tolist(), length)
        assert sum(row.lengths.sum() for row in found) / (len(found) * (length + 1)) >= 0.98


def test_first_fit_cuts_no_document_that_fits() -> None:
    lengths = [10, 3, 17, 5, 9]
    found = sorted(
        count for row in rows("first-fit", lengths, 16) for count in row.lengths.tolist()
    )
    assert found == sorted(lengths)
    assert len(rows("none", lengths, 16)) == 5 and len(rows("concat", lengths, 16)) == 3


def test_of_no_document_there_is_no_row() -> None:
    assert [rows(name, [], 8) for name in PACKINGS] == [[], [], []]
