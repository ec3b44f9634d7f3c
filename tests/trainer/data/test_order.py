import numpy as np
import pytest

from jaxlaunch.trainer.data import order


def all_indexes(length: int, *, epochs: int = 1, seed: int = 0, shuffle: bool = True) -> list[int]:
    return order.example_indices(
        0, epochs * length, length=length, seed=seed, shuffle=shuffle
    ).tolist()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 100, 1437, order.CHUNK_SIZE + 1])
def test_epoch_has_each_index_once(length: int) -> None:
    for epoch in range(2):
        result = order.permute(np.arange(length), length=length, seed=7, epoch=epoch)
        assert np.array_equal(np.sort(result), np.arange(length))


def test_order_depends_on_epoch_and_seed() -> None:
    twice = all_indexes(50, epochs=2, seed=1)
    assert twice[:50] != twice[50:]
    assert twice[:50] != all_indexes(50, seed=2)
    assert twice == all_indexes(50, epochs=2, seed=1)


def test_chunked_order_equals_the_whole_order(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = all_indexes(30, epochs=3)
    monkeypatch.setattr(order, "CHUNK_SIZE", 7)
    order._epoch_chunk.cache_clear()
    assert all_indexes(30, epochs=3) == whole
    assert order.example_indices(5, 64, length=30, seed=0, shuffle=True).tolist() == whole[5:64]
    order._epoch_chunk.cache_clear()


def test_order_never_changes_between_releases() -> None:
    # A run that resumes under a newer release must see the examples it would have seen.
    assert all_indexes(10) == [4, 3, 7, 1, 2, 5, 0, 8, 9, 6]
    far = order.example_indices(3 * 10**9, 3 * 10**9 + 4, length=10**9, seed=11, shuffle=True)
    assert far.tolist() == [445122154, 214841620, 113449915, 322186529]


def test_first_positions_are_spread_over_the_dataset() -> None:
    first = [
        int(order.example_indices(0, 1, length=10, seed=seed, shuffle=True)[0])
        for seed in range(1000)
    ]
    # 100 expected; 60 is four standard deviations away.
    assert np.bincount(first, minlength=10).min() > 60
