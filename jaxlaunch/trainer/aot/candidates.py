"""What `launcher tune` chooses between: mesh, rematerialization, micro-batches, attention and precision of one job."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, get_args

from jaxlaunch.contract import MESH_AXES
from jaxlaunch.trainer.spec import Mesh, Precision, Remat, TrainSpec, model_sizes

Choice = Literal["mesh", "remat", "accumulate", "attention", "precision"]
CHOICES: Sequence[Choice] = get_args(Choice)
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_WIDEST_MP = 16  # devices: activations cross mp in every layer, so more are never faster


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One setting of every choice."""

    mesh: tuple[int, int, int, int]  # dp, fsdp, ep, mp
    remat: str | tuple[str, ...]
    accumulate: int
    attention: str
    precision: str  # a named policy, or the job's own as JSON

    def keys(self) -> dict[str, Any]:
        """The keys of the train block that it sets, as job.yaml has them."""
        sizes = {axis: size for axis, size in zip(MESH_AXES, self.mesh, strict=True) if size > 1}
        return {
            "mesh": sizes or {"dp": 1},
            "remat": list(self.remat) if isinstance(self.remat, tuple) else self.remat,
            "accumulate": self.accumulate,
            "attention": self.attention,
            "precision": self.precision,
        }

    def changes(self, spec: TrainSpec, devices: int) -> dict[str, Any]:
        """Those of its keys that differ from a job on so many devices, by their full names."""
        own = of(spec, devices)
        return {f"train.{key}": value for key, value in self.keys().items() if own.keys()[key] != value}

    def applied(self, spec: TrainSpec) -> TrainSpec:
        """The training with these settings. The axes of its mesh are divided over slices by themselves."""
        keys = self.keys()
        keys["mesh"] = Mesh(**keys["mesh"])
        if keys["precision"] not in NAMED:
            del keys["precision"]
        return spec.model_copy(update=keys)

    def differences(self, other: Candidate) -> int:
        """How many choices differ."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return sum(one != two for one, two in pairs)


NAMED: Sequence[str] = get_args(get_args(Precision)[0])


def of(spec: TrainSpec, devices: int) -> Candidate:
    """The job as it is."""
    remat: Remat = spec.remat
    return Candidate(
        spec.mesh.resolve(devices),
        tuple(remat) if isinstance(remat, list) else remat,
        spec.accumulate,
        spec.attention,
        spec.precision if isinstance(spec.precision, str) else spec.precision.model_dump_json(),
    )


def every(spec: TrainSpec, devices: int, over: Collection[Choice]) -> Iterator[Candidate]:
    """All that can be chosen for `over`, the job itself included; other choices stay the job's.

    What cannot divide the batch is left out, and of rematerialization all but none, full and the job's own. A fixed
    number of micro-batches is kept where no mesh changes it.
    """
    own = of(spec, devices)
    remats = dict.fromkeys(("none", "full", own.remat)) if "remat" in over else [own.remat]
    counts = sorted({*_MICRO_BATCHES, own.accumulate}) if "accumulate" in over else [own.accumulate]
    attentions = dict.fromkeys((own.attention, "xla")) if "attention" in over else [own.attention]
    precisions = dict.fromkeys((own.precision, "bf16")) if "precision" in over else [own.precision]
    meshes = list(dict.fromkeys((own.mesh, *_meshes(spec, devices)))) if "mesh" in over else [own.mesh]
    for mesh, remat, count, attention, precision in itertools.product(meshes, remats, counts, attentions, precisions):
        if spec.batch % (math.prod(mesh[:3]) * count) == 0:
            yield Candidate(mesh, remat, count, attention, precision)


def _meshes(spec: TrainSpec, devices: int) -> Iterator[tuple[int, int, int, int]]:
    """The ways to divide devices over the axes that the model can be split by."""
    sizes = model_sizes(spec.model)
    experts, heads = sizes.experts or 1, sizes.heads or _WIDEST_MP
    for dp, fsdp, ep in itertools.product(_divisors(devices), repeat=3):
        mp = devices // (dp * fsdp * ep)
        if dp * fsdp * ep * mp == devices and experts % ep == 0 and heads % mp == 0 and mp <= _WIDEST_MP:
            yield dp, fsdp, ep, mp


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
