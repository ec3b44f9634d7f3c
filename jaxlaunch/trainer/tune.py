"""Finds the fastest settings of a training that fit its devices: `python -m jaxlaunch.trainer.tune`.

A process of its own like trainer/plan: TRAIN_SPEC and JAX_NUM_CPU_DEVICES in, a JSON object a line on stdout: one for
each candidate that was tried, then one with all that were not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from jaxlaunch import contract
from jaxlaunch.accelerators import KNOWN
from jaxlaunch.trainer.aot.candidates import CHOICES, Candidate, Choice, Forecast, Traced, enumerate_candidates
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.aot.compile import GIB, TooLarge, limit_compilation
from jaxlaunch.trainer.attention import availability
from jaxlaunch.trainer.attention.availability import Accelerator
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.numerics import memory
from jaxlaunch.trainer.plan import Plan, ahead_of_time, read_job
from jaxlaunch.trainer.spec import TrainSpec, model_sizes
from jaxlaunch.trainer.start.process import exit_code, print_error
from jaxlaunch.trainer.task import Task

# The next candidate is chosen as if each were faster than expected by this many standard deviations.
DOUBT = 0.5


def main() -> int:
    """Print the candidates of TRAIN_SPEC as JSON and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxlaunch.trainer.tune", description=__doc__)
    parser.add_argument("--chips", metavar="JSON", type=Chips.parse, required=True, help="the chips to compile for")
    parser.add_argument("--over", nargs="+", choices=CHOICES, required=True, help="what may change")
    parser.add_argument("--most", type=int, required=True, help="how many candidates are compiled")
    parser.add_argument("--measure", action="store_true", help="time what was compiled on the devices that are here")
    options = parser.parse_args()
    results = sys.stdout
    # Notes and the output of user imports are not results.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            for found in _found(options.chips, options.over, options.most, is_measured=options.measure):
                print(json.dumps(found), file=results, flush=True)
        except (Exception, SystemExit) as error:
            code = exit_code(error, has_stepped=False)
            print_error(error, code)
            return code
    return contract.DONE


def _found(chips: Chips, over: Sequence[Choice], most: int, *, is_measured: bool) -> Iterator[dict[str, Any]]:
    spec, task = read_job()
    search = Search(spec, task, chips, over, is_measured=is_measured)
    for _ in range(most):
        if (tried := search.next()) is None:
            break
        yield tried
    yield {"left": search.left()}


class Search:
    """A search that compiles one candidate after the other, always the one that is expected to be fastest."""

    def __init__(self, spec: TrainSpec, task: Task, chips: Chips, over: Sequence[Choice], *, is_measured: bool) -> None:
        self._spec, self._ahead, self._measured = spec, ahead_of_time(spec, task, chips), is_measured
        sizes = KNOWN[chips.type].memory_gib
        self._devices, self._room = len(self._ahead.devices), max(sizes) * GIB if sizes else None
        self._open = list(enumerate_candidates(spec, self._devices, over))
        self._own = Candidate.of_job(spec, self._devices)
        self.traced = _traced(spec, task, chips, self._open)
        self._forecast = Forecast(self.traced)

    def next(self) -> dict[str, Any] | None:
        """Compile the next candidate and return its report, or None if no candidate is left that may fit.

        The first candidate is the job itself, as the reference for the others.
        """
        fit = [option for option in self._open if self._fits(option)]
        if not fit:
            return None
        each = min(fit, key=lambda choice: (choice != self._own, self._forecast.seconds(choice, DOUBT)))
        self._open.remove(each)
        said: dict[str, Any] = self._described(each)
        try:
            with limit_compilation():
                of = self._ahead.compile(each.apply_to(self._spec), is_measured=self._measured)
        except (TooLarge, SpecError) as error:
            return {**said, "refused": str(error)}
        except JaxRuntimeError as error:
            # The compiler itself fails, for example libtpu with "INTERNAL: RET_CHECK failure".
            if each == self._own:
                raise
            return {**said, "refused": f"the compiler fails: {str(error).splitlines()[0]}"}
        seconds = _seconds(of)
        self._forecast.learn(each, seconds)
        return {**said, "seconds": seconds, "modelled": _modelled(of), "peak": of["peak"], "compiled": of}

    def left(self) -> list[dict[str, Any]]:
        """Return the candidates that were not compiled, the fastest first, and why they do not fit."""
        room = 0.0 if self._room is None else self._room / GIB

        def describe(each: Candidate) -> dict[str, Any]:
            if self._fits(each):
                return self._described(each)
            needed = f"it needs at least {self.traced.bytes(each) / GIB:.2f} of {room:g} GiB"
            return self._described(each) | {"refused": f"by the shapes of its arrays {needed}"}

        order = sorted(self._open, key=lambda choice: (not self._fits(choice), self._forecast.seconds(choice)))
        return list(map(describe, order))

    def _described(self, each: Candidate) -> dict[str, Any]:
        return {
            "candidate": dataclasses.asdict(each),
            "keys": each.keys(),
            "changes": each.changes(self._spec, self._devices),
            "expected": self._forecast.seconds(each),
        }

    def _fits(self, each: Candidate) -> bool:
        """Return whether a candidate may fit. The job itself is always compiled."""
        return each == self._own or self._room is None or self.traced.bytes(each) <= self._room


def _seconds(found: dict[str, Any]) -> float:
    if "measured" in found:
        return float(found["measured"])
    if (seconds := _modelled(found)) is None:
        raise SpecError("the compiler cannot print its program, so nothing tells how long a step takes")
    return seconds


def _modelled(found: dict[str, Any]) -> float | None:
    """Return the modelled seconds of a compiled step, the middle of their range, or None without a model."""
    if found.get("modelled") is None:
        return None
    low, high = found["modelled"]["seconds"]
    return float(low + high) / 2


def _traced(spec: TrainSpec, task: Task, chips: Chips, every: Sequence[Candidate]) -> Traced:
    """Return the sizes of the training without micro-batches, from which those of each candidate follow."""
    known = KNOWN[chips.type]
    on = Accelerator(known.platform, availability.capability(known.capability))
    plan = Plan(spec.model_copy(update={"accumulate": 1}), task, on)
    state = plan.step.abstract
    remats = {candidate.remat: candidate.keys()["remat"] for candidate in every}
    sizes = model_sizes(spec.model)
    return Traced(
        type=chips.type,
        slices=chips.slices,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        state=memory.total_bytes((state.params, state.opt, state.ema, state.rest)),
        flops=plan.flops() or 0.0,
        residuals={key: plan.residuals(remat) for key, remat in remats.items()},
        layers=sizes.layers,
        rows=spec.batch * (sizes.length or 1),
        width=sizes.width,
    )


if __name__ == "__main__":
    sys.exit(main())
