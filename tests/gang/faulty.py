"""A user's task that goes wrong on demand: what, where and when come from the environment.

FAULT is JSON: {"kind", "at", "rank", "step", "mark", "seconds"}; `mark` is a folder in which a file
named kind-rank says that it is happening now. The patches stand around the step, the evaluation,
the compile, the save and the data wait.
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

FAULT: dict[str, Any] = json.loads(os.environ.get("FAULT", "{}"))


class Slow:
    """A source whose record number `step` (in order of reading; every one, when none is given) takes its time."""

    def __init__(self, source: Any) -> None:
        self._source, self._reads = source, 0

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        self._reads += 1
        if is_ours() and self._reads == FAULT.get("step", self._reads):
            fail(FAULT["kind"])
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


def is_ours() -> bool:
    return jax.process_index() == FAULT.get("rank", jax.process_index())


def fail(kind: str) -> None:
    """Does what was asked for, after saying that it happens now."""
    (Path(FAULT["mark"]) / f"{kind}-{jax.process_index()}").touch()
    if kind == "raise":
        raise ValueError("a bad batch")
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FAULT.get("seconds", 3600))  # hang, slow


def patch(owner: Any, name: str, place: str) -> None:
    """Makes call number `step` (every call, when none is given) of `owner.name` fail, when the fault is at `place`."""
    original = getattr(owner, name)
    calls = 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if FAULT.get("at") == place and is_ours() and FAULT.get("step", calls) == calls:
            fail(FAULT["kind"])
        return original(*args, **kwargs)

    setattr(owner, name, patched)


patch(jaxlaunch.trainer.step.train_step.Step, "train", "step")
patch(jaxlaunch.trainer.step.train_step.Step, "evaluate", "eval")
patch(jaxlaunch.trainer.step.train_step.Step, "compile_train", "compile")
patch(jaxlaunch.trainer.checkpoint.store.Store, "save", "save")
