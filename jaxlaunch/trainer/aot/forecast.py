"""Which candidates to compile first: seconds and bytes of a step by arithmetic, from shapes that were traced once.

Only the order counts. What a candidate really takes is the compiler's to say; `Forecast.after` brings what it said of
some into the order of the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlaunch.accelerators import KNOWN, Machine
from jaxlaunch.trainer.aot.candidates import Candidate
from jaxlaunch.trainer.numerics import memory

_OF_PEAK = 0.5  # what matrix products reach
_EXPOSED = 0.5  # of what is communicated
_ANY = Machine(None, 5e10, 1e10, 1e10, 5e9)  # a device of which nothing is known, such as a CPU core
_ANY_PEAK = 1e11  # FLOP/s of such a device
_AGAIN = {"none": 1.0, "full": 4 / 3}  # the forward pass is a third of a step; others are in between


@dataclasses.dataclass(frozen=True)
class Traced:
    """Of a training: what does not depend on its mesh. Bytes and FLOPs are of all devices together."""

    type: str  # the accelerator, a name in KNOWN
    slices: int
    parameters: int
    state: int  # bytes of parameters, optimizer and average
    flops: float
    residuals: Mapping[Any, tuple[int, int]]  # by remat: of a batch, and of one of twice the rows
    layers: int
    rows: int  # tokens, or examples, of a batch
    width: int

    def bytes(self, each: Candidate) -> int:
        """Least bytes of a device while a step runs."""
        dp, fsdp, ep, mp = each.mesh
        of_batch, of_twice = (much // each.accumulate for much in self.residuals[each.remat])
        kept = memory.residuals_per_device(of_batch, of_twice, dp * fsdp * ep, fsdp, mp).low
        gradients = self.parameters * (4 if each.accumulate == 1 else 6)
        return (self.state + gradients) // (fsdp * ep * mp) + kept

    def seconds(self, each: Candidate) -> float:
        """Of a step."""
        machine = KNOWN[self.type].machine or _ANY
        dp, fsdp, ep, mp = each.mesh
        peak = KNOWN[self.type].peak or _ANY_PEAK
        computed = self.flops * _AGAIN.get(str(each.remat), 7 / 6) / math.prod(each.mesh) / peak / _OF_PEAK
        weights = 2 * self.parameters / mp * 3 * each.accumulate  # read forward and twice backward, in two bytes each
        kept = 3 * self.residuals[each.remat][0] / math.prod(each.mesh)
        touched = weights + kept + 2 * self.state / (fsdp * ep * mp)
        gathered = (2 + (each.remat != "none")) * each.accumulate * 2 * self.parameters / mp * (1 - 1 / (fsdp * ep))
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

    def after(self, each: Candidate, seconds: float) -> None:
        """Takes in what a candidate takes."""
        features = np.array(_features(each))
        self._precision = self._precision + np.outer(features, features) / _NOISE**2
        self._sums = self._sums + features * math.log(seconds / self._traced.seconds(each)) / _NOISE**2

    def seconds(self, each: Candidate, doubt: float = 0.0) -> float:
        """What a candidate is expected to take; less `doubt` standard deviations."""
        asked = np.array(_features(each))
        weights = np.linalg.solve(self._precision, asked)
        return self._traced.seconds(each) * math.exp(weights @ self._sums - doubt * math.sqrt(weights @ asked))


def _features(each: Candidate) -> list[float]:
    """The settings as numbers; the first is how wrong the arithmetic is of all."""
    axes = [math.log2(size) for size in each.mesh]
    flags = [each.remat == "full", each.remat == "none", each.attention == "xla", each.precision == "bf16"]
    return [1.0, *axes, math.log2(each.accumulate), *map(float, flags)]


# Standard deviations before anything is known: the arithmetic may be wrong by e as a whole, and by a fifth for each
# setting, or each doubling of it; what the settings do not explain.
_PRIOR, _NOISE = np.array([1.0, *[0.2] * 9]), 0.1
