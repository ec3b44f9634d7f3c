"""What a training would hold and where, on virtual devices, before anything is: `python -m trainer.plan`.

A process of its own, because the launcher never imports jax: TRAIN_SPEC and JAX_NUM_CPU_DEVICES in, one JSON object on
stdout. Leaves with 64 or 65 where the spec or the data is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from trainer import flops, kernels, memory, mesh
from trainer.__main__ import read
from trainer.answer import answer
from trainer.data.examples import NARROW
from trainer.data.source import Source
from trainer.errors import SpecError
from trainer.memory import Range
from trainer.spec import GPT2, Decoder, Remat, Synthetic, TrainSpec, ViT
from trainer.step import Batch, Step
from trainer.task import Task
from trainer.tasks.classify import Classify
from trainer.tasks.lm import NextToken

ENDLESS = 10**9  # steps


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.plan", description=__doc__)
    parser.add_argument("--sharding", action="store_true", help="list every parameter and where its parts live")
    parser.add_argument("--compile", action="store_true", help="compile the step, and ask XLA")
    asked = parser.parse_args()

    def find() -> dict[str, Any]:
        spec, task = read(os.environ)
        jax.config.update("jax_compilation_cache_dir", None)  # the job's own lies on the cluster
        return Plan(stand_in(spec, task), task).to_dict(sharding=asked.sharding, compiled=asked.compile)

    return answer(find)


def stand_in(spec: TrainSpec, task: Task) -> TrainSpec:
    """The same training on made-up examples, where the model alone says what they look like: the data is not here."""
    match spec.model:
        case Decoder() | GPT2() if isinstance(task, NextToken):
            made_up = Synthetic(source="synthetic")
        case ViT() as model if isinstance(task, Classify):
            made_up = Synthetic(source="synthetic", shape=[*model.image, model.channels])
        case _:
            return spec
    steps = ENDLESS if spec.epochs else spec.steps  # how many an epoch has only the data knows
    return spec.model_copy(update={"data": made_up, "epochs": None, "steps": steps})


class Plan:
    """A task's step on the mesh of its spec, described. Raises what the trainer would raise before its first step."""

    def __init__(self, spec: TrainSpec, task: Task) -> None:
        self.spec, self.task = kernels.planned(spec), task
        self.mesh = mesh.build(spec.mesh)
        source = task.source(spec, "train")
        if source is None:
            raise SpecError(f"{spec.task} has no training data")
        self.total = spec.total_steps(len(source))
        self.example = _example(task, source)
        self.step = self._step(spec.remat)

    def to_dict(self, *, sharding: bool, compiled: bool) -> dict[str, Any]:
        """Bytes on one device by what they are for; on request each parameter, and what XLA says."""
        batch, state = self._batch(self.spec.batch), self.step.abstract
        forward = self.step.forward(batch)
        found: dict[str, Any] = {
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            "arrays": len(state.params),
            "checkpoint": memory.in_all(self.step.named(state)),
            "flops_per_step": flops.train_step(forward),
            "causal_flops_per_step": flops.train_step(forward, causal=0.5),
            "device": self._state() | {"batch": memory.in_all(batch) // self._shards()},
            "activations": self._activations(),
        }
        if sharding:
            found["sharding"] = [_placed(name, self.step) for name in state.params]
        if compiled:
            self.step.compile_train(batch)
            found["compiled"] = self.step.analysis()
        return found

    def _state(self) -> dict[str, int]:
        """Gradients count twice when they are summed over micro-batches: the sum, and what is added to it."""
        state = self.step.abstract
        summed = sum(memory.per_device(leaf) // leaf.dtype.itemsize * 4 for leaf in jax.tree.leaves(state.params))
        fresh = memory.per_device(state.params) if self.spec.accumulate > 1 else 0
        return {
            "parameters": memory.per_device(state.params),
            "gradients": summed + fresh,
            "optimizer": memory.per_device(state.opt),
            "average": memory.per_device(state.ema),
            "other": memory.per_device((state.rest, state.scale, state.step)),
        }

    def _activations(self) -> dict[str, Range]:
        """What the backward pass finds of the forward pass: as the spec rematerializes, with nothing and with all.

        A layer that was not kept is computed again, so one of them is held whole.
        """
        whole, least, remat = self._kept("none"), self._kept("full"), self.spec.remat
        asked = whole if remat == "none" else least if remat == "full" else self._kept(remat)
        layers = getattr(self.spec.model, "layers", 1)

        def peak(kept: Range) -> Range:
            again = (max(0, most - part) // layers for most, part in zip(whole, kept, strict=True))
            return Range(*(part + more for part, more in zip(kept, again, strict=True)))

        return {"asked": peak(asked), "none": whole, "full": peak(least)}

    def _kept(self, remat: Remat) -> Range:
        step, rows = self._step(remat), self.spec.batch // self.spec.accumulate
        of_batch, of_twice = step.kept(self._batch(rows)), step.kept(self._batch(2 * rows))
        return memory.on_a_device(of_batch, of_twice, self._shards(), self.mesh.shape["fsdp"], self.mesh.shape["mp"])

    def _step(self, remat: Remat) -> Step:
        return Step(self.task, self.spec.model_copy(update={"remat": remat}), self.mesh, self.total)

    def _shards(self) -> int:
        dp, fsdp, _ = self.mesh.devices.shape
        return int(dp * fsdp)

    def _batch(self, rows: int) -> Batch:
        """A global batch of this many rows, described."""
        weight = {"weight": jax.ShapeDtypeStruct((rows,), np.float32)}
        return {
            key: jax.ShapeDtypeStruct((rows, *each.shape), each.dtype) for key, each in self.example.items()
        } | weight


def _example(task: Task, source: Source) -> Mapping[str, jax.ShapeDtypeStruct]:
    """One example as the pipeline makes it, described."""
    made = {key: np.asarray(value) for key, value in task.example(source[0]).items()}
    return {key: jax.ShapeDtypeStruct(each.shape, NARROW.get(each.dtype, each.dtype)) for key, each in made.items()}


def _placed(name: str, step: Step) -> dict[str, Any]:
    """One parameter: what its dimensions are called, and which axes of the mesh split each."""
    leaf, axes = step.abstract.params[name], step.axes[name]
    spec: PartitionSpec = leaf.sharding.spec
    split = [*spec, *[None] * (leaf.ndim - len(spec))]
    front = ["layers"] * (leaf.ndim - len(axes)) if axes else [None] * leaf.ndim
    return {
        "name": name,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype.name,
        "axes": [*front, *(axes or ())],
        "split": [[] if entry is None else [entry] if isinstance(entry, str) else list(entry) for entry in split],
        "bytes": memory.per_device(leaf),
    }


if __name__ == "__main__":
    sys.exit(main())
