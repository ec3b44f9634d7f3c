"""The runs that the arguments of a sweep stand for."""

from __future__ import annotations

import math

import pytest

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.sweep import grid

VALUES = {
    "a=1,2": ["1", "2"],
    "a=0..2": ["0", "1", "2"],
    "a=-1..1,7": ["-1", "0", "1", "7"],
    "a=1,1,2": ["1", "2"],
    "a=5": ["5"],
    "a=": [""],
    "a=x..y": ["x..y"],
    "a=../data,./data": ["../data", "./data"],
    "mesh={dp: 4, mp: 2},{dp: 8}": ["{dp: 4, mp: 2}", "{dp: 8}"],
    "betas=[0.9, 0.99],[0.9, 0.95]": ["[0.9, 0.99]", "[0.9, 0.95]"],
    "a='x, y',z": ["'x, y'", "z"],
    'a="it\'s, so",z': ['"it\'s, so"', "z"],
}


@pytest.mark.parametrize("argument", VALUES)
def test_commas_separate_values_outside_of_brackets_and_quotes(argument: str) -> None:
    (axis,) = grid.parse_axes([argument])
    assert list(axis.values) == VALUES[argument]


@pytest.mark.parametrize(
    "argument", ["a", "=1", "--a=1,2", "a=1,,2", "a=1,", "a=2..0", "a=0..5000", "a=1e-1..1e-4"]
)
def test_invalid_argument_is_refused(argument: str) -> None:
    with pytest.raises(UserError):
        grid.parse_axes([argument])


def test_grid_order_and_limit() -> None:
    axes = grid.parse_axes(["lr=1e-3,3e-3", "seed=0..2", "steps=100"])
    points = grid.make_grid(axes, None)
    assert points[:2] == [("lr=1e-3", "seed=0", "steps=100"), ("lr=1e-3", "seed=1", "steps=100")]
    assert len(points) == 6 and grid.make_grid(axes, 4) == points[:4]
    for wrong in (["lr=1e-4..1e-1"], ["seed=0..40", "k=0..40"], ["a=1", "a=2"]):
        with pytest.raises(UserError):
            grid.make_grid(grid.parse_axes(wrong), None)
    assert len(grid.make_grid(grid.parse_axes(["seed=0..999"]), None)) == grid.MAX_RUNS


def test_random_points_are_reproducible_and_distributed() -> None:
    axes = grid.parse_axes(["lr=1e-4..1e-1", "drop=0.0..0.5", "seed=0..9"])
    points = grid.draw_points(axes, 200, seed=3)
    assert len(set(points)) == 200
    assert points == grid.draw_points(axes, 200, seed=3) != grid.draw_points(axes, 200, seed=4)
    assert grid.draw_points(axes, 50, seed=3) == points[:50]
    rates, drops = ([float(point[at].partition("=")[2]) for point in points] for at in (0, 1))
    assert all(1e-4 <= rate <= 1e-1 for rate in rates) and all(0 <= drop <= 0.5 for drop in drops)
    below = sum(
        rate < math.sqrt(1e-4 * 1e-1) for rate in rates
    )  # half of them, where the logarithm is uniform
    assert 70 < below < 130 and 70 < sum(drop < 0.25 for drop in drops) < 130
    tenfold = [
        float(point[0].partition("=")[2])
        for point in grid.draw_points(grid.parse_axes(["lr=1.0..10.0"]), 200, seed=3)
    ]
    assert (
        70 < sum(rate < math.sqrt(10) for rate in tenfold) < 130
    )  # the least factor that the logarithm is for
    expected = sorted((f"a={a}", f"b={b}") for a in range(3) for b in "xy")
    assert sorted(grid.draw_points(grid.parse_axes(["a=0..2", "b=x,y"]), 100, seed=0)) == expected
