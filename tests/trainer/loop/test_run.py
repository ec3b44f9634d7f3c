"""`jaxlaunch.run` in one process of eight devices: results, resuming and errors."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlaunch
from jaxlaunch.trainer.errors import CheckpointError, DataError, NotFiniteError, SpecError

pytestmark = pytest.mark.usefixtures("standard")

OPTIMIZER = optax.adam(0.1)


class Line(NamedTuple):
    """A state of every kind of leaf."""

    w: Any
    optimizer: Any
    key: Any
    count: Any


class Numbers:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.float32(index), "y": np.float32(2 * index)}


def first_line() -> Line:
    w = np.zeros((), np.float32)
    return Line(w, OPTIMIZER.init(jnp.asarray(w)), jax.random.key(5), 0)


def step(state: Line, batch: Any) -> Any:
    key, drawn = jax.random.split(state.key)

    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean((w * batch["x"] - batch["y"]) ** 2) / 100 + 0.0 * jax.random.normal(drawn)

    value, gradient = jax.value_and_grad(loss)(state.w)
    updates, optimizer = OPTIMIZER.update(gradient, state.optimizer)
    w = optax.apply_updates(state.w, updates)
    return Line(w, optimizer, key, state.count + 1), {"loss": value, "seen": batch["x"].sum()}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(home: Path, name: str) -> list[dict[str, Any]]:
    (result,) = home.glob(f"runs/*/{name}.jsonl")
    return [json.loads(line) for line in result.read_text().splitlines()]


def test_resumed_run_equals_uninterrupted_run(home: Path) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    how: dict[str, Any] = {"batch": 8, "every": 2, "log_every": 1}
    how["evaluate"] = lambda state: {"w": state.w}
    mine = first_line()
    whole = jaxlaunch.run(step, mine, Numbers(), steps=6, folder=str(home / "whole"), **how)
    # Each example is seen once in an epoch.
    assert sum(line["seen"] for line in lines(home, "metrics")[:3]) == sum(range(24))
    jaxlaunch.run(step, mine, Numbers(), steps=3, **how)  # the program's own arrays are still there
    parts = jaxlaunch.run(step, first_line, Numbers(), steps=6, **how)
    assert isinstance(parts, Line) and int(parts.count) == 6 and float(parts.w) > 0
    for first, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert jnp.array_equal(first, other)
    assert [line["step"] for line in lines(home, "metrics")] == [1, 2, 3, 4, 5, 6]
    assert lines(home, "eval")[-1]["w"] == pytest.approx(float(whole.w))
    repeated = jaxlaunch.run(step, first_line, Numbers(), steps=6, **how)
    assert jnp.array_equal(repeated.w, parts.w)
    assert signal.getsignal(signal.SIGTERM) == previous
    words = r"run\(steps=5\): step 6 is already saved in .* raise steps, or give folder="
    with pytest.raises(SpecError, match=words):
        jaxlaunch.run(step, first_line, Numbers(), steps=5, **how)
    words = "seed is 1, and the checkpoints in .* were made with 0"
    with pytest.raises(CheckpointError, match=words):
        jaxlaunch.run(step, first_line, Numbers(), steps=8, seed=1, **how)
    words = "state/w is float32.. in the checkpoint and float32.3. in this model"
    with pytest.raises(CheckpointError, match=words):
        jaxlaunch.run(lambda s: (s, {}), {"w": np.zeros(3, np.float32)}, steps=8)


def test_errors_during_run_are_named_and_saves_stay(home: Path) -> None:
    def data(number: int) -> dict[str, np.ndarray]:
        x = np.ones(8 if number < 5 else 16, np.float32)
        return {"x": x, "y": np.full_like(x, np.nan if number == 3 else 1.0)}

    place = r"test_run.py:\d+"
    words = (
        rf"loss nan of {place} step in step 4; step 2 is the newest saved one. Its batch is not: "
        rf"{place} data: the batch of step 3 has y nan in row 0"
    )
    with pytest.raises(NotFiniteError, match=words):
        jaxlaunch.run(step, first_line, data, steps=6, every=2)
    words = r"<lambda>: the batch of step 5 has x as float32\[16\], not float32\[8\], as that"
    other = str(home / "other")
    with pytest.raises(DataError, match=words):
        jaxlaunch.run(step, first_line, lambda number: data(max(number, 4)), steps=7, folder=other)
    assert sorted(path.name for path in home.glob("runs/*/checkpoints/[0-9]*")) == ["2"]
    # This process lives on, and another run may use the folders.
    assert not list(home.rglob("jaxlaunch.owner.json"))
    assert not list_open_files(home)


def list_open_files(folder: Path) -> list[Path]:
    """Return the files of a folder that this process has open."""
    targets = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [target for target in targets if target.is_relative_to(folder)]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one, self.drop = nnx.Linear(4, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.one(x))


def test_module_with_random_streams_is_sharded_by_rules(home: Path) -> None:
    def learn(net: Net) -> Any:
        return net, {"drawn": net(jnp.ones((8, 4))).sum()}

    how: dict[str, Any] = {"mesh": {"dp": 4, "mp": 2}, "log_every": 1}
    how["sharding"] = {r"one\.kernel": (None, "mp")}
    net = jaxlaunch.run(learn, lambda: Net(nnx.Rngs(0)), steps=2, **how)
    assert net.one.kernel[...].sharding.shard_shape((4, 8)) == (4, 4)
    first, second = (line["drawn"] for line in lines(home, "metrics"))
    assert first != second  # the streams advanced
