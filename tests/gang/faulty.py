"""A task that fails on demand, as the environment variable FAULT describes.

FAULT is JSON: {"kind", "at", "rank", "step", "mark", "seconds"}. `mark` is a folder that gets a
file kind-rank when the fault happens. The patches wrap the step, the evaluation, the compilation,
the save and the data wait.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax

import jaxlaunch.trainer.checkpoint.store
import jaxlaunch.trainer.step.train_step
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.tasks.lm import NextToken

FAULT: dict[str, Any] = json.loads(os.environ.get("FAULT", "{}"))


class Slow:
    """A source whose read number `step` (default: every read) is slow."""

    def __init__(self, source: Any) -> None:
        self._source, self._reads = source, 0

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        self._reads += 1
        if affects_this_rank() and self._reads == FAULT.get("step", self._reads):
            cause_fault(FAULT["kind"])
        return self._source[index]

    def fingerprint(self) -> str:
        return str(self._source.fingerprint())


class Faulty(Classify):
    """Classify, until the fault."""

    def source(self, spec: Any, split: Any) -> Any:
        source = super().source(spec, split)
        return Slow(source) if FAULT.get("at") == "data" and split == "train" else source

    def model(self, spec: Any, rngs: Any) -> Any:
        if FAULT.get("at") == "model":
            raise ValueError("no such layer")
        return super().model(spec, rngs)


class FaultyText(NextToken):
    """Predict the next token, until the fault."""


def affects_this_rank() -> bool:
    return jax.process_index() == FAULT.get("rank", jax.process_index())


def cause_fault(kind: str) -> None:
    """Mark that the fault happens now, then cause it."""
    (Path(FAULT["mark"]) / f"{kind}-{jax.process_index()}").touch()
    if kind == "raise":
        raise ValueError("a bad batch")
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FAULT.get("seconds", 3600))  # hang, slow


def inject_fault(owner: Any, name: str, place: str) -> None:
    """Make call number `step` (default: all) of `owner.name` fail if the fault is at `place`."""
    original = getattr(owner, name)
    calls = 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if FAULT.get("at") == place and affects_this_rank() and FAULT.get("step", calls) == calls:
            cause_fault(FAULT["kind"])
        return original(*args, **kwargs)

    setattr(owner, name, patched)


inject_fault(jaxlaunch.trainer.step.train_step.Step, "train", "step")
inject_fault(jaxlaunch.trainer.step.train_step.Step, "evaluate", "eval")
inject_fault(jaxlaunch.trainer.step.train_step.Step, "compile_train", "compile")
inject_fault(jaxlaunch.trainer.checkpoint.store.Store, "save", "save")
