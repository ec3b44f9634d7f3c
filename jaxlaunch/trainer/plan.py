"""Plans the memory and sharding of a training: `python -m jaxlaunch.trainer.plan`.

This is a separate process, because the launcher never imports jax. It reads TRAIN_SPEC and
JAX_NUM_CPU_DEVICES, and prints one JSON object. It exits with 64 or 65 if the spec or the data is
wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.aot.compile import AheadOfTimeCompiler, limit_compilation
from jaxlaunch.trainer.attention import availability
from jaxlaunch.trainer.attention.availability import Accelerator
from jaxlaunch.trainer.data.examples import NARROWED_DTYPES, Examples
from jaxlaunch.trainer.data.source import Source
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.text_model import sampling_bytes_per_device
from jaxlaunch.trainer.huggingface import folder
from jaxlaunch.trainer.numerics import flops, memory
from jaxlaunch.trainer.numerics.memory import Range
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.spec import (
    GPT2,
    ConvNeXt,
    Decoder,
    ImageData,
    Remat,
    ResNet,
    Synthetic,
    TrainSpec,
    TransformersModel,
    ViT,
    model_sizes,
)
from jaxlaunch.trainer.start.process import print_result, read_spec
from jaxlaunch.trainer.step.executable import check_jit
from jaxlaunch.trainer.step.state import Batch
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.task import Task, checked_source
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.tasks.lm import NextToken

# Number of steps of a plan if the length of the epochs is unknown.
UNKNOWN_STEPS = 10**9
# Side of an image in pixels, if the model accepts any size and the data is not available.
DEFAULT_IMAGE_SIDE = 224


def main() -> int:
    """Print the plan of TRAIN_SPEC as JSON and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxlaunch.trainer.plan", description=__doc__)
    parser.add_argument("--sharding", action="store_true", help="list the mesh axes of parameters")
    parser.add_argument(
        "--compile", metavar="JSON", type=Chips.from_json, help="the chips to compile the steps for"
    )
    parser.add_argument(
        "--platform",
        choices=("cpu", "cuda", "tpu"),
        help="of the job's devices; default: not known",
    )
    parser.add_argument("--capability", metavar="8.0", help="compute capability of CUDA devices")
    options = parser.parse_args()
    accelerator = None
    if options.platform is not None:
        capability = availability.parse_capability(options.capability)
        accelerator = Accelerator(options.platform, capability)

    def make_plan() -> dict[str, Any]:
        # A run would end with this error, so a plan of it would mislead.
        check_jit()
        spec, task = read_job()
        plan = Plan(spec, task, accelerator).to_dict(sharding=options.sharding)
        if options.compile is not None:
            with limit_compilation():
                plan["compiled"] = ahead_of_time(spec, task, options.compile).compile_or_shrink()
        return plan

    return print_result(make_plan)


def read_job() -> tuple[TrainSpec, Task]:
    """Read the training of TRAIN_SPEC for a plan, with synthetic data and no compilation cache."""
    spec, task = read_spec(os.environ)
    spec = peft.resolve_lora(folder.resolve_spec(spec, must_exist=False), is_here=False)
    # The cache of the job is on the cluster.
    jax.config.update("jax_compilation_cache_dir", None)
    return with_synthetic_data(spec, task), task


def with_synthetic_data(spec: TrainSpec, task: Task) -> TrainSpec:
    """Replace the data by synthetic examples if the model determines their shapes."""
    match spec.model:
        case Decoder() | GPT2() | TransformersModel() if isinstance(task, NextToken):
            synthetic = Synthetic(source="synthetic")
        case ViT() as model if isinstance(task, Classify):
            synthetic = Synthetic(source="synthetic", shape=[*model.image, model.channels])
        case ResNet() | ConvNeXt() as model if isinstance(task, Classify):
            size = spec.data.shape if isinstance(spec.data, ImageData) else None
            size = size or (DEFAULT_IMAGE_SIDE, DEFAULT_IMAGE_SIDE)
            synthetic = Synthetic(source="synthetic", shape=[*size, model.channels])
        case _:
            return spec
    # Without the data, the steps of an epoch are unknown.
    steps = UNKNOWN_STEPS if spec.epochs else spec.steps
    return spec.model_copy(update={"data": synthetic, "epochs": None, "steps": steps})


class Plan:
    """The train step on the mesh of its spec, traced for the job's devices but not compiled.

    Raises the errors of the trainer before its first step.
    """

    def __init__(self, spec: TrainSpec, task: Task, accelerator: Accelerator | None = None) -> None:
        self.spec, self.task = availability.resolve_for_plan(spec, accelerator), task
        self.mesh = mesh.build_mesh(spec.mesh)
        source = _open_source(spec, task)
        self.total_steps = spec.total_steps(len(source))
        self.example = _abstract_example(task, source)
        self.step = self._build_step(spec.remat)

    def to_dict(self, *, sharding: bool) -> dict[str, Any]:
        """Return the plan as JSON: bytes on a device by purpose, and on request the sharding."""
        batch = _abstract_batch(self.example, self.spec.batch)
        builder, state, prompts = self.step.builder, self.step.abstract, self.spec.eval.samples
        forward, trained = self.step.forward_jaxpr(batch), self.step.trained_count
        batch_bytes = memory.total_bytes(batch) // mesh.count_shards(self.mesh)
        plan: dict[str, Any] = {
            "parameters": count_parameters(state.params),
            "trained": count_parameters(builder.trained_params(state.params)),
            "arrays": len(state.params),
            "checkpoint": memory.total_bytes(builder.to_tree(state)),
            "flops_per_step": flops.train_step_flops(forward, trained=trained),
            "causal_flops_per_step": flops.train_step_flops(forward, 0.5, trained),
            "device": self.state_bytes() | {"batch": batch_bytes},
            "activations": self._activation_bytes(),
            "samples": 0,
        }
        if prompts is not None:
            # There are no activations of the train step while samples are generated.
            plan["samples"] = sampling_bytes_per_device(self.spec, prompts, self.mesh)
        if sharding:
            plan["sharding"] = [_describe_sharding(name, self.step) for name in state.params]
        return plan

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of state and gradients per device.

        With micro-batches there are two gradients: of one micro-batch, and their sum.
        """
        state = self.step.abstract
        trained = self.step.builder.trained_params(state.params)
        sizes = [memory.bytes_per_device(leaf) // leaf.dtype.itemsize for leaf in trained.values()]
        # Gradients are summed in float32. Those of a micro-batch have the dtype of the parameters.
        sum_bytes = 4 * sum(sizes)
        micro_batch_bytes = memory.bytes_per_device(trained) if self.spec.accumulate > 1 else 0
        return {
            "parameters": memory.bytes_per_device(state.params),
            "gradients": sum_bytes + micro_batch_bytes,
            "optimizer": memory.bytes_per_device(state.opt),
            "average": memory.bytes_per_device(state.ema),
            "other": memory.bytes_per_device((state.buffers, state.scale, state.step)),
        }

    def _activation_bytes(self) -> dict[str, Range]:
        """Return bytes of residuals per device: for the job's `remat`, and for `none` and `full`.

        While a layer is recomputed, all of its residuals are in memory.
        """
        none, full = self._residuals_per_device("none"), self._residuals_per_device("full")
        remat, layers = self.spec.remat, model_sizes(self.spec.model).layers
        range_by_remat = {"none": none, "full": full}
        requested = range_by_remat.get(str(remat)) or self._residuals_per_device(remat)

        def add_recomputed_layer(residuals: Range) -> Range:
            pairs = zip(none, residuals, strict=True)
            return Range(*(part + max(0, most - part) // layers for most, part in pairs))

        return {
            "asked": add_recomputed_layer(requested),
            "none": none,
            "full": add_recomputed_layer(full),
        }

    def step_flops(self) -> float | None:
        """Return the FLOPs of a train step on all devices, or None if they depend on the data."""
        return self.step.count_flops(_abstract_batch(self.example, self.spec.batch))

    def residual_bytes(self, remat: Remat) -> tuple[int, int]:
        """Return the bytes that a backward pass reads, for a micro-batch and for twice its rows."""
        step, rows = self._build_step(remat), self.spec.batch // self.spec.accumulate
        batch, double_batch = (_abstract_batch(self.example, count) for count in (rows, 2 * rows))
        return step.residual_bytes(batch), step.residual_bytes(double_batch)

    def _residuals_per_device(self, remat: Remat) -> Range:
        shape, shards = self.mesh.shape, mesh.count_shards(self.mesh)
        sizes = self.residual_bytes(remat)
        return memory.residuals_per_device(*sizes, shards, shape["fsdp"], shape["mp"])

    def _build_step(self, remat: Remat) -> Step:
        spec = self.spec.model_copy(update={"remat": remat})
        return Step(self.task, spec, self.mesh, self.total_steps)


def ahead_of_time(spec: TrainSpec, task: Task, chips: Chips) -> AheadOfTimeCompiler:
    """Return the training for compilation ahead of time for these chips. Raises SpecError."""
    source = _open_source(spec, task)
    batch = _abstract_batch(_abstract_example(task, source), spec.batch)
    return AheadOfTimeCompiler(task, spec, chips, batch, spec.total_steps(len(source)))


def _open_source(spec: TrainSpec, task: Task) -> Source:
    source = checked_source(spec, task.source(spec, "train"))
    if source is None:
        raise SpecError(f"{spec.task}: source returned None for the split train; return its data")
    return source


def count_parameters(params: Any) -> int:
    """Return the total size of the arrays of a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _abstract_batch(example: Mapping[str, jax.ShapeDtypeStruct], rows: int) -> Batch:
    arrays = {"weight": jax.ShapeDtypeStruct((rows,), np.float32)}
    for key, array in example.items():
        arrays[key] = jax.ShapeDtypeStruct((rows, *array.shape), array.dtype)
    return arrays


def _abstract_example(task: Task, source: Source) -> Mapping[str, jax.ShapeDtypeStruct]:
    specs = Examples(source, task.example).array_specs
    return {
        key: jax.ShapeDtypeStruct(spec.shape, NARROWED_DTYPES.get(spec.dtype, spec.dtype))
        for key, spec in specs.items()
    }


def _describe_sharding(name: str, step: Step) -> dict[str, Any]:
    leaf, axes = step.abstract.params[name], step.builder.axes[name]
    mesh_axes: list[Any] = [*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec))]
    stacked_axes = ["layers"] * (leaf.ndim - len(axes)) if axes else [None] * leaf.ndim
    return {
        "name": name,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype.name,
        "axes": [*stacked_axes, *(axes or ())],
        "split": [[entry] if isinstance(entry, str) else list(entry or ()) for entry in mesh_axes],
        "bytes": memory.bytes_per_device(leaf),
    }


if __name__ == "__main__":
    sys.exit(main())
