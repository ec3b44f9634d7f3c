"""Wrong calls of `jaxlaunch.run`: one sentence for each, before any compilation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxlaunch
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.loop import user_program as steps
from jaxlaunch.trainer.user_code import describe_function, is_library

pytestmark = pytest.mark.usefixtures("standard")

HERE = "test_wrong_calls.py"


def make() -> dict[str, Any]:
    return {"w": jnp.zeros(4), "n": 0}


def step(state: Any, batch: Any) -> Any:
    return {"w": state["w"], "n": state["n"] + 1}, {"loss": batch["x"].mean()}


def data(number: int) -> dict[str, np.ndarray]:
    return {"x": np.full((8, 2), number, np.float32)}


def one_value(state: Any, batch: Any) -> Any:
    return state


def a_name_less(state: Any, batch: Any) -> Any:
    return {"w": state["w"]}, {}


def another_shape(state: Any, batch: Any) -> Any:
    return {**state, "w": state["w"][:2]}, {}


def a_bare_loss(state: Any, batch: Any) -> Any:
    return state, batch["x"].mean()


def a_row_of_losses(state: Any, batch: Any) -> Any:
    return state, {"loss": batch["x"].mean(1)}


def a_taken_name(state: Any, batch: Any) -> Any:
    return state, {"step_s": 1.0}


def without_batch(state: Any) -> Any:
    return state, {}


def examples() -> Iterator[dict[str, np.ndarray]]:
    yield data(0)


def nothing() -> dict[str, np.ndarray]:
    return data(0)


def seven(number: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros((7, 2), np.float32)}


def unequal(number: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros((8, 2)), "y": np.zeros(4)}


def words_of(number: int) -> dict[str, Any]:
    return {"x": np.array(["a"] * 8)}


COUNTER = itertools.count()


def drawn(number: int) -> dict[str, np.ndarray]:
    return data(next(COUNTER))


RUN: dict[str, Any] = {"step": step, "state": make, "data": data, "steps": 3}
STATE = {"w": np.zeros(4), "name": "net"}
CALLS: list[tuple[str, Any, str]] = [
    ("step", 3, "jaxlaunch.run(step=…) is an int, not a function"),
    ("steps", 0, "jaxlaunch.run(steps=0): must be a whole number, at least 1"),
    ("steps", "many", "jaxlaunch.run(steps='many'): must be a whole number, at least 1"),
    ("mesh", {"tp": 2}, "give devices per axis, such as {'dp': 4, 'mp': 2}"),
    ("mesh", {"dp": 3}, "asks for 3 devices, there are 8"),
    ("evaluate", 3, "not a function of the state that returns a dict of numbers"),
    ("state", STATE, "name is a str, not an array; a state is a"),
    ("state", {}, "returns a dict without an array; a state is a pytree of arrays"),
    ("state", lambda: {"n": "x"}, " <lambda>: n is a str, not an array"),
    ("sharding", {r"v\..*": ("mp",)}, "matches no parameter. There are: n, w"),
    ("step", one_value, "one_value: it returned a dict; return (state, metrics)"),
    ("step", a_name_less, "has no n (int32[]); return the arrays that it was given"),
    ("step", another_shape, "has w as float32[2], not float32[4]"),
    ("step", a_bare_loss, "its metrics are"),
    ("step", a_row_of_losses, "metric 'loss' is float32[8], not a real scalar; return its mean"),
    ("step", a_taken_name, "a metric cannot be named 'step_s'; the records of a run use"),
    ("step", without_batch, "cannot be called as step(state, batch): too many"),
    ("data", None, "cannot be called as step(state): missing a required argument"),
    (
        "data",
        examples(),
        "is a generator, which cannot go back to the batch of a step when the run",
    ),
    ("data", object(), "jaxlaunch.run(data=…) is an object; give a function of the step"),
    ("data", nothing, "nothing cannot be called with the step, as data(step)"),
    ("batch", 8, "needs a dataset of examples, and data is a function without __len__"),
    ("data", seven, "seven: a batch of 7 rows cannot be split evenly over dp × fsdp = 8 devices"),
    (
        "data",
        unequal,
        "have one number of rows, their first dimension, and here they have: x 8, y 4",
    ),
    ("data", words_of, "in the batch of step 0 x is <U1[8]; a batch is a pytree of arrays"),
    ("data", drawn, "asked twice for step 0 it gave two batches that differ in x"),
]


@pytest.mark.parametrize(("option", "value", "message"), CALLS, ids=[row[2] for row in CALLS])
def test_wrong_call_is_one_sentence_before_compilation(
    option: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compiles(*_: object, **__: object) -> None:
        raise AssertionError("it was not refused")

    monkeypatch.setattr(steps, "Executable", compiles)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SpecError, DataError)) as raised:
        jaxlaunch.run(**RUN | {option: value})
    text = str(raised.value)
    assert message in text and len(text.splitlines()) == 1
    if option == "step" and callable(value):
        assert text.startswith(f"{HERE}:")
    assert list(tmp_path.iterdir()) == []


def test_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'epochs'"):
        jaxlaunch.run(**RUN, epochs=3)  # type: ignore[call-arg]


def test_functions_are_described_by_user_line() -> None:
    place = f"{HERE}:{step.__code__.co_firstlineno}"
    assert describe_function(step) == f"{place} step" and not is_library(__file__)
    assert all(map(is_library, (np.__file__, steps.__file__, json.__file__)))
