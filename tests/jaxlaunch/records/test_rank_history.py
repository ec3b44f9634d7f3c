from __future__ import annotations

import json
import random

import pytest

from jaxlaunch import contract
from jaxlaunch.records import rank_history
from jaxlaunch.records.rank_history import LETTERS, MAX_COLUMNS, RankHistory


def test_phases_have_distinct_letters() -> None:
    assert set(LETTERS) == {None, *contract.PHASES}
    assert len({*LETTERS.values(), rank_history.ENDED}) == len(LETTERS) + 1


def test_history_round_trip() -> None:
    history = RankHistory()
    history.add_column(1000.04, "sssdx-", [20, 20, 19, 12, 20, None])
    assert not history.is_due(1001.9) and history.is_due(1002.1) and history.is_due(900.0)
    history_value = RankHistory.from_json(json.loads(history.to_json_bytes()))
    assert history_value.columns == [(1000.0, "s3dx-", "0x2,1,8,0x2,")]
    assert rank_history.decode_letters(history_value.columns[0]) == list("sssdx-")
    assert rank_history.decode_lags(history_value.columns[0]) == [0, 0, 1, 8, 0, 0]


@pytest.mark.extended
def test_month_of_distinct_ranks_has_bounded_size() -> None:
    drawn, history, time_s = random.Random(0), RankHistory(), 0.0
    worst = 123_456
    for look in range(3000):
        time_s += history.period_s
        steps = [500_000 - drawn.randrange(1000) for _ in range(250)]
        steps[7] -= worst if look == 1500 else 0
        history.add_column(time_s, drawn.choices("sdev", k=250), steps)
    assert MAX_COLUMNS / 2 <= len(history.columns) <= MAX_COLUMNS
    assert time_s > 30 * 86400 and len(history.to_json_bytes()) < 500_000
    assert (
        max(rank_history.decode_lags(column)[7] for column in history.columns) > worst
    )  # a spike is never thinned out
    assert [at for at, _, _ in history.columns] == sorted(at for at, _, _ in history.columns)


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {"columns": 7},
        {
            "columns": [
                [1.0, "s9999", "0x9999,"],
                [1.0, "s", "0,"],
                [0.5, "s", "0,"],
                ["2", "s", "0,"],
                [3, 4, 5],
                6,
            ]
        },
        {"columns": [[float("nan"), "s", "0,"], [2.0, "s" * 100_000, "0,"]], "period_s": -1},
    ],
)
def test_invalid_columns_are_left_out(content: object) -> None:
    history = RankHistory.from_json(content)
    assert history.period_s == rank_history.PERIOD_S and len(history.columns) <= 1
    assert all(
        len(rank_history.decode_letters(column)) <= rank_history.MAX_RANKS
        for column in history.columns
    )
