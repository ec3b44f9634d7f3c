"""The loop with a training that counts: its calls, their order, and where a run stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxlaunch.trainer.errors import NotFiniteError, Stopped
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.training import RunContext, Settings, Training
from jaxlaunch.trainer.metrics.counters import Workload
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import Metrics

pytestmark = pytest.mark.usefixtures("standard")


class Written(Metrics):
    """Writes down when a step is read."""

    calls: list[str]

    def record_interval(self, step: int, values: Mapping[str, float], share: float = 1.0) -> None:
        self.calls.append(f"read {step}")


class Counting(Training[jax.Array]):
    """A state that counts its steps, with two batches of each evaluation; records its calls."""

    has_evaluation = True

    def __init__(self, folder: Path, calls: list[str], bad: int | None = None) -> None:
        super().__init__(Progress(None))
        self.folder, self.calls, self.bad = str(folder / "checkpoints"), calls, bad
        self.settings = Settings(steps=4, log_every=1, eval_every=2, save_every=4, keep=1)
        self.metrics = Written(
            Workload(4, 1), rank=0, run_dir=None, socket=None, progress=self.progress
        )
        self.metrics.calls = calls

    @property
    def abstract_state(self) -> jax.Array:
        zero = _zero()
        return jax.ShapeDtypeStruct(zero.shape, zero.dtype, sharding=zero.sharding)  # type: ignore[return-value]

    def init_state(self) -> jax.Array:
        return _zero()

    def to_tree(self, state: jax.Array) -> dict[str, Any]:
        return {"state": {"n": state}}

    def from_tree(self, tree: Mapping[str, Any], meta: Mapping[str, Any], step: int) -> jax.Array:
        state: jax.Array = tree["state"]["n"]
        return state

    def checkpoint_meta(self) -> dict[str, Any]:
        self.calls.append("save")
        return {}

    def describe_difference(self, meta: Mapping[str, Any]) -> str:
        return ""

    def check_resumed(self, meta: Mapping[str, Any], step: int, is_finished: bool) -> str | None:
        self.calls.append(f"finished {step}" if is_finished else f"resume {step}")
        return None

    def compile(self, start: int) -> float | None:
        return None

    def iterate_batches(self, spans: Sequence[range]) -> None:
        return None

    def train_steps(
        self, state: jax.Array, batch: Any, span: range
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        self.calls.append(f"step {span.stop}")
        return state + 1, {"finite": jnp.asarray(span.stop != self.bad), "loss": state}

    def not_finite_error(
        self, step: int, metrics: Mapping[str, float], saved: int
    ) -> NotFiniteError:
        return NotFiniteError(f"step {step}, saved {saved}")

    def hlo_texts(self) -> list[str]:
        return []

    def evaluate(self, state: jax.Array, between: Callable[[], None]) -> dict[str, float]:
        for batch in (1, 2):
            between()
            self.calls.append(f"evaluate {int(state)}, batch {batch}")
        return {"loss": float(state)}


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.float32)


class StopAt:
    """Stops from its n-th poll on."""

    def __init__(self, poll: int | None = None) -> None:
        self._poll, self.polls = poll, 0

    def poll(self) -> bool:
        self.polls += 1
        return self._poll is not None and self.polls >= self._poll


def loop_of(
    folder: Path, calls: list[str], stop: StopAt, bad: int | None = None
) -> Loop[jax.Array]:
    place = RunContext(str(folder), uid="a run")
    return Loop(Counting(folder, calls, bad), place, stop, Progress(None))  # type: ignore[arg-type]


def test_metrics_are_read_one_step_late_and_before_saves(
    tmp_path: Path,
) -> None:
    calls: list[str] = []
    assert float(loop_of(tmp_path, calls, StopAt()).run()) == 4
    two, four = ([f"evaluate {step}, batch {batch}" for batch in (1, 2)] for step in (2, 4))
    assert calls[:6] == ["step 1", "step 2", "read 1", "read 2", *two]
    assert calls[6:] == ["step 3", "step 4", "read 3", "read 4", *four, "save"]
    calls.clear()
    assert float(loop_of(tmp_path, calls, StopAt()).run()) == 4
    assert calls == ["finished 4"]  # all is done: nothing is trained, evaluated or saved again


def test_stop_during_evaluation_is_resumed_with_evaluation(
    tmp_path: Path,
) -> None:
    calls: list[str] = []
    # The polls: after restoring, after compiling, after no and one step, and before each batch of
    # the evaluation.
    with pytest.raises(Stopped, match="saved step 2"):
        loop_of(tmp_path, calls, StopAt(6)).run()
    assert calls == ["step 1", "step 2", "read 1", "read 2", "evaluate 2, batch 1", "save"]
    calls.clear()
    unbroken = StopAt()
    assert float(loop_of(tmp_path, calls, unbroken).run()) == 4
    assert calls[:4] == ["resume 2", "evaluate 2, batch 1", "evaluate 2, batch 2", "step 3"]
    assert unbroken.polls == 8


def test_step_that_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    calls: list[str] = []
    loop = loop_of(tmp_path, calls, StopAt(), bad=4)
    with pytest.raises(NotFiniteError, match="step 4, saved -1"):
        loop.run()
    loop.end_saves(process_continues=True)
    assert calls[-3:] == ["step 3", "step 4", "read 3"]
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))
