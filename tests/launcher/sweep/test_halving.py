"""The runs of a sweep that are stopped early."""

from __future__ import annotations

from jaxlaunch.launcher.sweep.table import Standing, count_decided, find_worse_half


def test_rung_is_decided_when_all_runs_have_values_or_ended() -> None:
    runs = {"a": Standing(values={0: 1.0}), "b": Standing(), "c": Standing(is_over=True)}
    assert count_decided(runs, 2) == 0
    runs["b"].values[0] = 2.0
    assert count_decided(runs, 2) == 1
    runs["b"].cut_rung, runs["b"].is_over = 0, True
    runs["a"].values[1] = 0.5
    assert count_decided(runs, 2) == 2


def test_worse_half_is_rounded_down() -> None:
    values = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 5.0, "e": 4.0}
    runs = {name: Standing(values={0: value}) for name, value in values.items()} | {
        "f": Standing(is_over=True)
    }
    assert find_worse_half(runs, 0, is_higher_better=False) == ["e", "d"]
    assert find_worse_half(runs, 0, is_higher_better=True) == ["c", "b"]
    assert find_worse_half({"a": Standing(values={0: 1.0})}, 0, is_higher_better=False) == []


def test_later_rung_compares_remaining_runs() -> None:
    runs = {name: Standing(values={0: at, 1: at}) for at, name in enumerate("abcd")}
    for name in find_worse_half(runs, 0, is_higher_better=False):
        runs[name] = Standing(is_over=True, values={0: runs[name].values[0]}, cut_rung=0)
    assert find_worse_half(runs, 1, is_higher_better=False) == ["b"]
    assert find_worse_half(runs, 0, is_higher_better=False) == ["c", "d"]


def test_later_of_equal_runs_is_stopped() -> None:
    runs = {name: Standing(values={0: 1.0}) for name in "abc"}
    assert (
        find_worse_half(runs, 0, is_higher_better=False)
        == find_worse_half(runs, 0, is_higher_better=True)
        == ["c"]
    )
