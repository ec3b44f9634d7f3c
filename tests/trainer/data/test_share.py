import pytest

from jaxlaunch.trainer.data.order import HeldOutShare


@pytest.mark.parametrize(
    "share", [0.0, 1e-9, 0.0004, 0.05, 0.1, 0.3, 1 / 3, 0.5, 0.6, 0.95, 0.9996]
)
@pytest.mark.parametrize("n", [0, 1, 2, 7, 20, 101])
def test_parts_partition_the_items_in_order(share: float, n: int) -> None:
    parts = HeldOutShare(share, n)
    held_out = [parts.held_out_index(k) for k in range(parts.held_out_count)]
    stored = [parts.kept_index(j) for j in range(parts.kept_count)]
    assert sorted(held_out + stored) == list(range(n))
    assert held_out == sorted(held_out) and stored == sorted(stored)
    assert abs(len(held_out) - share * n) < 1
    assert bool(held_out) is (share > 0 and n > 0)


def test_held_out_items_are_spread_evenly() -> None:
    assert [HeldOutShare(0.2, 20).held_out_index(k) for k in range(4)] == [0, 5, 10, 15]
