"""How steps are cut into dispatches, and that many steps in one are the same steps."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxlaunch.trainer.loop.training import cut_spans
from tests.trainer.tiny import Counting, Digits, compiled_step


@pytest.mark.parametrize(
    ("start", "total", "size", "every", "lengths"),
    [
        (0, 3, 1, [2], [1, 1, 1]),
        (0, 8, 4, [None], [4, 4]),
        (0, 10, 4, [], [4, 4, 1, 1]),
        (0, 10, 4, [6, None], [4, 1, 1, 4]),
        (3, 12, 4, [5, 4], [1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (3, 20, 4, [10], [4, 1, 1, 1, 4, 4, 1, 1]),
        (5, 5, 4, [5], []),
        (5, 5, 1, [], []),
    ],
)
def test_spans_end_at_pauses(
    start: int, total: int, size: int, every: list[int | None], lengths: list[int]
) -> None:
    result = cut_spans(start, total, size, every)
    assert [len(span) for span in result] == lengths and len(result) == len(lengths)
    assert [step for span in result for step in span] == list(range(start, total))


def test_spans_of_endless_run_are_lazy() -> None:
    assert cut_spans(0, 10**12)[10**11] == range(10**11, 10**11 + 1)


def test_spans_accept_negative_indexes() -> None:
    assert cut_spans(0, 10, 4)[-1] == range(9, 10)
    with pytest.raises(IndexError):
        cut_spans(0, 10, 4)[4]


@pytest.mark.parametrize("task", [Digits(), Counting()], ids=["mlp", "decoder"])
def test_steps_of_one_dispatch_equal_single_steps(task: Any, to_the_bit: None) -> None:
    batches = [task.batch(number) for number in range(4)]
    single = compiled_step(task)
    state, reports = single.init_state(), []
    for batch in batches:
        state, metrics = single.train(state, single.put_batch(batch))
        reports.append(jax.device_get(metrics))
    together = {key: np.stack([batch[key] for batch in batches], axis=1) for key in batches[0]}
    single.compile_train(single.put_batch(together), 4)
    repeated, metrics = single.train(single.init_state(), single.put_batch(together), 4)
    for key, value_K in jax.device_get(metrics).items():
        assert np.array_equal(value_K, [report[key] for report in reports]), key
    assert jax.tree.all(
        jax.tree.map(np.array_equal, jax.device_get(state), jax.device_get(repeated))
    )
