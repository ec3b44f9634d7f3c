"""Trains models of tests/fixtures on meshes, 20 steps each: python family_rank.py ASKED.json FOLDER, on two processes.

ASKED is a list of [place, mesh, case]. In the place `1-process` the devices are one process's own, and the cases are
shared out between the processes; in `2-processes` half of them are the other's. Each process has as many devices as the
largest mesh. FOLDER gets `losses-RANK.json`, {"place mesh case": [loss of each step]}.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.start import distributed
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.tasks.lm import NextToken
from tests.trainer import references

ROWS, STEPS, VOCAB, LENGTH = 16, 20, 97, 32
PATIENCE_S = 1200.0
ADAMW: dict[str, Any] = {"name": "adamw", "lr": 1e-3, "schedule": {"name": "constant"}}


def rows(step: int) -> dict[str, np.ndarray]:
    """The global batch of a step: tokens that count up, in rows of unequal weight."""
    start = np.random.default_rng(step).integers(0, VOCAB, (ROWS, 1))
    mask = np.ones((ROWS, LENGTH), np.float32)
    mask[::3, 9:] = 0
    tokens = ((start + np.arange(LENGTH + 1)[None]) % VOCAB).astype(np.int32)
    return {"tokens": tokens, "mask": mask, "weight": np.ones(ROWS, np.float32)}


def losses(
    case: str, weights: Path, axes: Mapping[str, int], devices: list[jax.Device], ready: Callable[[], None]
) -> list[float]:
    """The losses of the case on a mesh of these axes; `ready` is called once it is compiled."""
    keys: dict[str, Any] = {"batch": ROWS, "mesh": dict(axes), "optimizer": ADAMW}
    train = references.train_spec(case, weights, model={"length": LENGTH}, **keys)
    mesh = meshes.build(spec.Mesh(**axes), devices)
    step, mine = Step(NextToken(), train, mesh, STEPS), meshes.rows(mesh, ROWS)

    def put(number: int) -> dict[str, jax.Array]:
        """This process's rows of a step's batch."""
        return step.put({name: each[mine.start : mine.stop] for name, each in rows(number).items()})

    step.compile_train(put(0))
    state, found = step.init(), []
    ready()
    for number in range(STEPS):
        state, metrics = step.train(state, put(number))
        found.append(float(metrics["loss"]))
    return found


def nothing() -> None:
    """What a process that trains by itself waits for."""


def meet(folder: Path, name: str) -> None:
    """Waits for the other process: a collective gives up on one that still compiles."""
    (folder / f"{name}-{jax.process_index()}").touch()
    end = time.monotonic() + PATIENCE_S
    while not all((folder / f"{name}-{rank}").exists() for rank in range(jax.process_count())):
        assert time.monotonic() < end, f"the other process never came to {name}"
        time.sleep(0.02)


def main(asked: Path, folder: Path) -> None:
    distributed.Stop()
    distributed.initialize()
    mine = jax.process_index()
    found: dict[str, list[float]] = {}
    weights: dict[str, Path] = {}
    for number, (place, axes, case) in enumerate(json.loads(asked.read_text())):
        if place == "1-process" and number % jax.process_count() != mine:
            continue
        if case not in weights:
            weights[case] = references.folder(case, folder / f"rank-{mine}" / case)
        size, ready = math.prod(axes.values()), nothing
        if place == "1-process":
            devices = jax.local_devices()[:size]
        else:
            each = size // jax.process_count()
            devices = [one for one in jax.devices() if one.id in local_ids(one.process_index, each)]
            ready = partial(meet, folder, str(number))
        found[f"{place} {said(axes)} {case}"] = losses(case, weights[case], axes, devices, ready)
        jax.clear_caches()
    (folder / f"losses-{mine}.json").write_text(json.dumps(found))
    distributed.shutdown()


def local_ids(process: int, count: int) -> set[int]:
    """The ids of the first devices of a process."""
    return {one.id for one in [each for each in jax.devices() if each.process_index == process][:count]}


def said(axes: Mapping[str, int]) -> str:
    """A mesh in a word: dp2-mp4."""
    return "-".join(f"{axis}{size}" for axis, size in axes.items())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
