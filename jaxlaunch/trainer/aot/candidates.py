"""The candidates of `launcher tune`, and the order in which to compile them.

A candidate is a choice of mesh, rematerialization, micro-batches, attention and precision for one
job. An arithmetic model estimates its step time and memory from shapes that are traced once. The
estimates only determine the order in which candidates are compiled. `Forecast` corrects them by the
results of the candidates that are already compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jaxlaunch.accelerators import ACCELERATORS, MachineSpeed
from jaxlaunch.contract import MESH_AXES
from jaxlaunch.trainer.numerics import memory
from jaxlaunch.trainer.spec import Mesh, Precision, TrainSpec, model_sizes

Choice = Literal["mesh", "remat", "accumulate", "attention", "precision"]
CHOICES: Sequence[Choice] = get_args(Choice)
PRECISIONS: Sequence[str] = get_args(get_args(Precision)[0])
_MICRO_BATCHES = (1, 2, 4, 8, 16)
# Every layer communicates activations over mp, so a larger mp is never faster.
_MAX_MP = 16


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One value for every choice.

    Attributes:
        mesh: Sizes of dp, fsdp, ep and mp.
        remat: Value of `train.remat`.
        accumulate: Number of micro-batches.
        attention: Value of `train.attention`.
        precision: A named precision, or that of the job as JSON.
    """

    mesh: tuple[int, int, int, int]
    remat: str | tuple[str, ...]
    accumulate: int
    attention: str
    precision: str

    @classmethod
    def from_spec(cls, spec: TrainSpec, devices: int) -> Candidate:
        """Return the settings of a job on this number of devices."""
        return cls(
            spec.mesh.resolve(devices),
            tuple(spec.remat) if isinstance(spec.remat, list) else spec.remat,
            spec.accumulate,
            spec.attention,
            spec.precision if isinstance(spec.precision, str) else spec.precision.model_dump_json(),
        )

    def train_keys(self) -> dict[str, Any]:
        """Return the candidate as keys of the train block of job.yaml."""
        sizes = {axis: size for axis, size in zip(MESH_AXES, self.mesh, strict=True) if size > 1}
        return {
            "mesh": sizes or {"dp": 1},
            "remat": list(self.remat) if isinstance(self.remat, tuple) else self.remat,
            "accumulate": self.accumulate,
            "attention": self.attention,
            "precision": self.precision,
        }

    def changed_keys(self, spec: TrainSpec, devices: int) -> dict[str, Any]:
        """Return the keys that differ from those of a job on this number of devices."""
        job_keys, keys = Candidate.from_spec(spec, devices).train_keys(), self.train_keys()
        return {f"train.{key}": value for key, value in keys.items() if job_keys[key] != value}

    def apply_to(self, spec: TrainSpec) -> TrainSpec:
        """Return the spec with these settings. Its mesh has no dcn, which is then automatic."""
        keys = self.train_keys()
        keys["mesh"] = Mesh(**keys["mesh"])
        if keys["precision"] not in PRECISIONS:
            # It is the job's own.
            del keys["precision"]
        return spec.model_copy(update=keys)


def enumerate_candidates(
    spec: TrainSpec, devices: int, choices: Collection[Choice]
) -> Iterator[Candidate]:
    """Yield the candidates that vary these choices, including the job itself.

    Candidates that do not divide the batch are left out. The values of remat are none, full and
    that of the job.
    """
    job = Candidate.from_spec(spec, devices)
    options: dict[Choice, Collection[Any]] = {
        "mesh": dict.fromkeys((job.mesh, *_enumerate_meshes(spec, devices))),
        "remat": dict.fromkeys(("none", "full", job.remat)),
        "accumulate": sorted({*_MICRO_BATCHES, job.accumulate}),
        "attention": dict.fromkeys((job.attention, "xla")),
        "precision": dict.fromkeys((job.precision, "bf16")),
    }
    job_settings = dataclasses.asdict(job)
    values = [options[key] if key in choices else [job_settings[key]] for key in CHOICES]
    for candidate in itertools.starmap(Candidate, itertools.product(*values)):
        if spec.batch % (math.prod(candidate.mesh[:3]) * candidate.accumulate) == 0:
            yield candidate


def _enumerate_meshes(spec: TrainSpec, devices: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the ways to divide devices over the axes by which the model can be split."""
    sizes = model_sizes(spec.model)
    experts, heads = sizes.experts or 1, sizes.heads or _MAX_MP
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for dp, fsdp, ep in itertools.product(divisors, repeat=3):
        mp = devices // (dp * fsdp * ep)
        divides = dp * fsdp * ep * mp == devices and experts % ep == 0 and heads % mp == 0
        if divides and mp <= _MAX_MP:
            yield dp, fsdp, ep, mp


# --- the order ------------------------------------------------------------------------------------

# Share of the peak FLOP/s that matrix products reach.
_PEAK_SHARE = 0.5
# Share of the communication that is not hidden behind compute.
_EXPOSED_SHARE = 0.5
# Rates of a device that is in no table, such as a CPU core.
_UNKNOWN_MACHINE = MachineSpeed(None, 5e10, 1e10, 1e10, 5e9)
_UNKNOWN_PEAK_FLOPS = 1e11
# Full rematerialization repeats the forward pass, a third of a step. Other settings repeat less.
_RECOMPUTATION_FACTORS = {"none": 1.0, "full": 4 / 3}
# Prior standard deviations of the logarithms of errors: a factor of e for all candidates, and a
# fifth for each setting or each doubling of it. The noise is the part of an error that no setting
# explains.
_PRIOR_STD, _NOISE_STD = np.array([1.0, *[0.2] * 9]), 0.1


@dataclasses.dataclass(frozen=True)
class TracedModel:
    """Sizes of a training for all devices together, which do not depend on the mesh.

    Attributes:
        type: Type of the accelerator, a name in ACCELERATORS.
        slices: Number of slices.
        parameters: Number of parameters.
        state: Bytes of the parameters, the optimizer and the moving average.
        flops: FLOPs of a step.
        residuals: Bytes of residuals by value of remat, for a batch and for twice the rows.
        layers: Number of layers.
        rows: Tokens of a batch, or examples.
        width: Width of the residual stream.
    """

    type: str
    slices: int
    parameters: int
    state: int
    flops: float
    residuals: Mapping[Any, tuple[int, int]]
    layers: int
    rows: int
    width: int

    def device_bytes(self, candidate: Candidate) -> int:
        """Return a lower bound for the bytes on a device during a step."""
        dp, fsdp, ep, mp = candidate.mesh
        batch, double = (size // candidate.accumulate for size in self.residuals[candidate.remat])
        residuals = memory.residuals_per_device(batch, double, dp * fsdp * ep, fsdp, mp).low
        gradients = self.parameters * (4 if candidate.accumulate == 1 else 6)
        return (self.state + gradients) // (fsdp * ep * mp) + residuals

    def step_seconds(self, candidate: Candidate) -> float:
        """Return an estimate of the seconds of a step."""
        accelerator = ACCELERATORS[self.type]
        machine = accelerator.machine or _UNKNOWN_MACHINE
        peak = accelerator.peak_flops or _UNKNOWN_PEAK_FLOPS
        dp, fsdp, ep, mp = candidate.mesh
        devices, count = math.prod(candidate.mesh), candidate.accumulate
        sharded = fsdp * ep
        recomputed_flops = self.flops * _RECOMPUTATION_FACTORS.get(str(candidate.remat), 7 / 6)
        compute_s = recomputed_flops / devices / peak / _PEAK_SHARE
        # Weights are read once forward and twice backward, in two bytes each.
        weights = 2 * self.parameters / mp * 3 * count
        residuals = 3 * self.residuals[candidate.remat][0] / devices
        touched_bytes = weights + residuals + 2 * self.state / (sharded * mp)
        gathers = (2 + (candidate.remat != "none")) * count
        gathered_bytes = gathers * 2 * self.parameters / mp * (1 - 1 / sharded)
        gradient_bytes = 2 * 4 * self.parameters / (sharded * mp) * (1 - 1 / dp)
        rows = 2 * self.rows * self.width / (dp * sharded)
        activation_bytes = 8 * self.layers * rows * (1 - 1 / mp)
        inner_bytes, outer_bytes = gathered_bytes + activation_bytes, 0.0
        if self.slices == 1:
            inner_bytes += gradient_bytes
        else:
            outer_bytes = gradient_bytes if dp % self.slices == 0 else gathered_bytes
        send_s = inner_bytes / machine.ring_bytes_per_s + outer_bytes / machine.network_bytes_per_s
        return max(compute_s, touched_bytes / machine.hbm_bytes_per_s) + _EXPOSED_SHARE * send_s


class Forecast:
    """Predicts step times from the estimates and the results of other candidates.

    The error of an estimate, log(real time / estimated time), is modelled as a linear function of
    the settings, whose weights are learned by Bayesian linear regression. To rank candidates, a
    prediction is lowered by its standard deviation. Otherwise a setting whose estimate is too high
    would never be tried.
    """

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        # The normal distribution of the weights, as its precision matrix and this matrix times the
        # mean.
        self._precision, self._sums = np.diag(1 / _PRIOR_STD**2), np.zeros(len(_PRIOR_STD))

    def add_observation(self, candidate: Candidate, seconds: float) -> None:
        """Update the weights with the time of a candidate."""
        features = _candidate_features(candidate)
        error = math.log(seconds / self._traced.step_seconds(candidate))
        self._precision = self._precision + np.outer(features, features) / _NOISE_STD**2
        self._sums = self._sums + features * error / _NOISE_STD**2

    def predict_seconds(self, candidate: Candidate, doubt: float = 0.0) -> float:
        """Return the expected seconds of a candidate, less `doubt` standard deviations."""
        features = _candidate_features(candidate)
        weights = np.linalg.solve(self._precision, features)
        error = weights @ self._sums - doubt * math.sqrt(weights @ features)
        return self._traced.step_seconds(candidate) * math.exp(error)


def _candidate_features(candidate: Candidate) -> np.ndarray[Any, Any]:
    """Return the settings as numbers. The first is constant, for the error of all candidates."""
    counts = [math.log2(size) for size in (*candidate.mesh, candidate.accumulate)]
    remats = candidate.remat == "full", candidate.remat == "none"
    flags = candidate.attention == "xla", candidate.precision == "bf16"
    return np.array([1.0, *counts, *remats, *flags], float)
