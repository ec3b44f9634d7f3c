"""What `launcher tune` chooses between, and which candidates to compile first.

A candidate is a mesh, rematerialization, micro-batches, attention and precision of one job. Its seconds and bytes are
computed by arithmetic, from shapes that were traced once. Only the order counts: what a candidate really takes is the
compiler's to say, and `Forecast.learn` brings what it said of some into the order of the others.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jaxlaunch.accelerators import KNOWN, Machine
from jaxlaunch.contract import MESH_AXES
from jaxlaunch.trainer.numerics import memory
from jaxlaunch.trainer.spec import Mesh, Precision, TrainSpec, model_sizes

Choice = Literal["mesh", "remat", "accumulate", "attention", "precision"]
CHOICES: Sequence[Choice] = get_args(Choice)
PRECISIONS: Sequence[str] = get_args(get_args(Precision)[0])
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

    @classmethod
    def of_job(cls, spec: TrainSpec, devices: int) -> Candidate:
        """Return the settings of a job on so many devices."""
        return cls(
            spec.mesh.resolve(devices),
            tuple(spec.remat) if isinstance(spec.remat, list) else spec.remat,
            spec.accumulate,
            spec.attention,
            spec.precision if isinstance(spec.precision, str) else spec.precision.model_dump_json(),
        )

    def keys(self) -> dict[str, Any]:
        """Return the keys of the train block that it sets, as job.yaml has them."""
        sizes = {axis: size for axis, size in zip(MESH_AXES, self.mesh, strict=True) if size > 1}
        return {
            "mesh": sizes or {"dp": 1},
            "remat": list(self.remat) if isinstance(self.remat, tuple) else self.remat,
            "accumulate": self.accumulate,
            "attention": self.attention,
            "precision": self.precision,
        }

    def changes(self, spec: TrainSpec, devices: int) -> dict[str, Any]:
        """Return those of its keys that differ from a job on so many devices, by their full names."""
        job_keys = Candidate.of_job(spec, devices).keys()
        return {f"train.{key}": value for key, value in self.keys().items() if job_keys[key] != value}

    def apply_to(self, spec: TrainSpec) -> TrainSpec:
        """Return the training with these settings. The axes of its mesh are divided over slices by themselves."""
        keys = self.keys()
        keys["mesh"] = Mesh(**keys["mesh"])
        if keys["precision"] not in PRECISIONS:
            del keys["precision"]
        return spec.model_copy(update=keys)


def enumerate_candidates(spec: TrainSpec, devices: int, over: Collection[Choice]) -> Iterator[Candidate]:
    """Yield all that can be chosen for `over`, the job itself included; other choices stay the job's.

    What cannot divide the batch is left out, and of rematerialization all but none, full and the job's own. A fixed
    number of micro-batches is kept where no mesh changes it.
    """
    job = Candidate.of_job(spec, devices)
    options: dict[Choice, Collection[Any]] = {
        "mesh": dict.fromkeys((job.mesh, *_enumerate_meshes(spec, devices))),
        "remat": dict.fromkeys(("none", "full", job.remat)),
        "accumulate": sorted({*_MICRO_BATCHES, job.accumulate}),
        "attention": dict.fromkeys((job.attention, "xla")),
        "precision": dict.fromkeys((job.precision, "bf16")),
    }
    job_settings = dataclasses.asdict(job)
    for settings in itertools.product(*(options[key] if key in over else [job_settings[key]] for key in CHOICES)):
        candidate = Candidate(*settings)
        if spec.batch % (math.prod(candidate.mesh[:3]) * candidate.accumulate) == 0:
            yield candidate


def _enumerate_meshes(spec: TrainSpec, devices: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the ways to divide devices over the axes that the model can be split by."""
    sizes = model_sizes(spec.model)
    experts, heads = sizes.experts or 1, sizes.heads or _WIDEST_MP
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for dp, fsdp, ep in itertools.product(divisors, repeat=3):
        mp = devices // (dp * fsdp * ep)
        if dp * fsdp * ep * mp == devices and experts % ep == 0 and heads % mp == 0 and mp <= _WIDEST_MP:
            yield dp, fsdp, ep, mp


# --- the order --------------------------------------------------------------------------------------------------------

_OF_PEAK = 0.5  # what matrix products reach
_EXPOSED = 0.5  # of what is communicated
_UNKNOWN = Machine(None, 5e10, 1e10, 1e10, 5e9)  # a device of which nothing is known, such as a CPU core
_UNKNOWN_PEAK = 1e11  # FLOP/s of such a device
_RECOMPUTATION = {"none": 1.0, "full": 4 / 3}  # the forward pass is a third of a step; others are in between
# Standard deviations before anything is known: the arithmetic may be wrong by e as a whole, and by a fifth for each
# setting, or each doubling of it; what the settings do not explain.
_PRIOR, _NOISE = np.array([1.0, *[0.2] * 9]), 0.1


@dataclasses.dataclass(frozen=True)
class Traced:
    """What of a training does not depend on its mesh. Bytes and FLOPs are of all devices together."""

    type: str  # the accelerator, a name in KNOWN
    slices: int
    parameters: int
    state: int  # bytes of parameters, optimizer and average
    flops: float
    residuals: Mapping[Any, tuple[int, int]]  # by remat: of a batch, and of one of twice the rows
    layers: int
    rows: int  # tokens, or examples, of a batch
    width: int

    def bytes(self, candidate: Candidate) -> int:
        """Return the least bytes of a device while a step runs."""
        dp, fsdp, ep, mp = candidate.mesh
        of_batch, of_twice = (size // candidate.accumulate for size in self.residuals[candidate.remat])
        residuals = memory.residuals_per_device(of_batch, of_twice, dp * fsdp * ep, fsdp, mp).low
        gradients = self.parameters * (4 if candidate.accumulate == 1 else 6)
        return (self.state + gradients) // (fsdp * ep * mp) + residuals

    def seconds(self, candidate: Candidate) -> float:
        """Return the seconds of a step."""
        machine = KNOWN[self.type].machine or _UNKNOWN
        peak = KNOWN[self.type].peak or _UNKNOWN_PEAK
        dp, fsdp, ep, mp = candidate.mesh
        devices, count = math.prod(candidate.mesh), candidate.accumulate
        computed = self.flops * _RECOMPUTATION.get(str(candidate.remat), 7 / 6) / devices / peak / _OF_PEAK
        weights = 2 * self.parameters / mp * 3 * count  # read forward and twice backward, in two bytes each
        residuals = 3 * self.residuals[candidate.remat][0] / devices
        touched = weights + residuals + 2 * self.state / (fsdp * ep * mp)
        gathered = (2 + (candidate.remat != "none")) * count * 2 * self.parameters / mp * (1 - 1 / (fsdp * ep))
        copied = 2 * 4 * self.parameters / (fsdp * ep * mp) * (1 - 1 / dp)
        shared = 8 * self.layers * 2 * self.rows * self.width / (dp * fsdp * ep) * (1 - 1 / mp)
        inside = gathered + shared + (0 if self.slices > 1 else copied)
        between = copied if self.slices > 1 and dp % self.slices == 0 else gathered if self.slices > 1 else 0.0
        sent = inside / machine.one_ring + between / machine.between
        return max(computed, touched / machine.hbm) + _EXPOSED * sent


class Forecast:
    """The seconds of candidates, corrected by what the compiler or a measurement said of others.

    How much longer a candidate takes than by arithmetic is a linear function of its settings, as a logarithm, whose
    weights are learned (Bayesian linear regression). What is known little of gets the benefit of the doubt, or a
    setting that the arithmetic thinks little of would never be tried.
    """

    def __init__(self, traced: Traced) -> None:
        self._traced = traced
        # Of the weights, a normal distribution: its precision, and that times its mean.
        self._precision, self._sums = np.diag(1 / _PRIOR**2), np.zeros(len(_PRIOR))

    def learn(self, candidate: Candidate, seconds: float) -> None:
        """Take in what a candidate takes."""
        features = _features(candidate)
        self._precision = self._precision + np.outer(features, features) / _NOISE**2
        self._sums = self._sums + features * math.log(seconds / self._traced.seconds(candidate)) / _NOISE**2

    def seconds(self, candidate: Candidate, doubt: float = 0.0) -> float:
        """Return what a candidate is expected to take, less `doubt` standard deviations."""
        features = _features(candidate)
        weights = np.linalg.solve(self._precision, features)
        return self._traced.seconds(candidate) * math.exp(weights @ self._sums - doubt * math.sqrt(weights @ features))


def _features(candidate: Candidate) -> np.ndarray[Any, Any]:
    """Return the settings as numbers; the first is how wrong the arithmetic is of all."""
    counts = [math.log2(size) for size in (*candidate.mesh, candidate.accumulate)]
    remat, is_xla, is_bf16 = candidate.remat, candidate.attention == "xla", candidate.precision == "bf16"
    return np.array([1.0, *counts, remat == "full", remat == "none", is_xla, is_bf16], float)
