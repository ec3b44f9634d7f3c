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
    assert history_value.columns == [(1000.0, "s3dx-", "0x2,1,8,0x2,", "")]
    assert rank_history.decode_letters(history_value.columns[0]) == list("sssdx-")
    assert rank_history.decode_numbers(history_value.columns[0].lags) == [0, 0, 1, 8, 0, 0]


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
        max(rank_history.decode_numbers(column.lags)[7] for column in history.columns) > worst
    )  # a spike is never thinned out
    times = [column.time for column in history.columns]
    assert times == sorted(times)


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


def make_history(own_times: list[list[int | None]]) -> RankHistory:
    history = RankHistory()
    for look, own in enumerate(own_times):
        history.add_column(2.0 * look, "s" * len(own), [look] * len(own), None, own)
    return RankHistory.from_json(json.loads(history.to_json_bytes()))


def test_rank_that_is_two_percent_slower_is_named() -> None:
    """Rank 2 spends 23 of 1,000 on its own, and the others 3 with some noise."""
    chance = random.Random(1)
    own_times: list[list[int | None]]
    own_times = [[3, chance.randint(1, 5), 23, chance.randint(1, 5)] for _ in range(900)]
    history = make_history(own_times)

    assert len(history.columns) <= MAX_COLUMNS
    assert all(column.own for column in history.columns)
    assert history.list_slow_ranks() == [(2, 23, 3)]


@pytest.mark.parametrize(
    "own_times",
    [
        # Half a percent, a single look, no look, and ranks that are all alike busy.
        [[3, 8, 3]] * 50,
        [[3, 500, 3]] + [[3, 3, 3]] * 200,
        [[3, 500, 3]] * 2,
        [[None, None]] * 9,
        [[400, 402, 399]] * 9,
    ],
)
def test_rank_that_only_looks_slow_is_not_named(own_times: list[list[int | None]]) -> None:
    assert make_history(own_times).list_slow_ranks() == []


def test_of_two_ranks_the_slower_is_named() -> None:
    assert make_history([[30, 5]] * 9).list_slow_ranks() == [(0, 30, 5)]


@pytest.mark.parametrize("columns", [8, 2 * MAX_COLUMNS])
def test_unknown_own_time_does_not_count(columns: int) -> None:
    """Rank 0 reports in every other column. Merged columns have the mean of what is known."""
    own_times: list[list[int | None]] = [
        [40 if look % 2 else None, 20, 20] for look in range(columns)
    ]
    history = make_history(own_times)
    assert history.list_slow_ranks() == [(0, 40, 20)]


def test_rank_that_never_reports_its_own_time_is_not_compared() -> None:
    history = make_history([[None, 40, 20, 20]] * 8)
    assert history.columns[0].own == "-,40,20x2,"
    assert rank_history.decode_own_times(history.columns[0].own) == [None, 40, 20, 20]
    assert history.list_slow_ranks() == [(1, 40, 20)]


def test_columns_of_agents_without_own_times_are_read() -> None:
    history = RankHistory.from_json({"columns": [[1.0, "s2", "0,1,"], [3.0, "s2", "0x2,"]]})
    assert [column.lags for column in history.columns] == ["0,1,", "0x2,"]
    assert history.hang is None and history.list_slow_ranks() == []


@pytest.mark.parametrize("hang", [7, {"rank": "2"}, {"rank": 2, "place": "a", "since": None}])
def test_invalid_hang_is_left_out(hang: object) -> None:
    assert RankHistory.from_json({"columns": [], "hang": hang}).hang is None


def test_age_of_reports_is_no_lag() -> None:
    history = RankHistory()
    history.add_column(1.0, "sss", [120, 100, 10], foremost=100)
    assert rank_history.decode_numbers(history.columns[0].lags) == [0, 0, 90]
