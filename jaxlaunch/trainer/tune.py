"""Finds the fastest settings that fit the devices: `python -m jaxlaunch.trainer.tune`.

This is a separate process, like trainer/plan. It reads TRAIN_SPEC and JAX_NUM_CPU_DEVICES, and
prints JSON lines: one for each candidate that was compiled, and a last one with the others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jax.errors import JaxRuntimeError

from jaxlaunch import contract
from jaxlaunch.accelerators import ACCELERATORS
from jaxlaunch.trainer.aot.candidates import (
    CHOICES,
    Candidate,
    Choice,
    Forecast,
    TracedModel,
    enumerate_candidates,
)
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.aot.compile import GIB, ProgramTooLargeError, limit_compilation
from jaxlaunch.trainer.attention import availability
from jaxlaunch.trainer.attention.availability import Accelerator
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.numerics import memory
from jaxlaunch.trainer.plan import Plan, ahead_of_time, count_parameters, read_job
from jaxlaunch.trainer.spec import TrainSpec, model_sizes
from jaxlaunch.trainer.start.process import exit_code, print_error
from jaxlaunch.trainer.task import Task

# The next candidate is chosen by its expected time minus this many standard deviations, which
# prefers candidates whose time is uncertain.
OPTIMISM_DEVIATIONS = 0.5


def main() -> int:
    """Print the candidates of TRAIN_SPEC as JSON and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxlaunch.trainer.tune", description=__doc__)
    parser.add_argument(
        "--chips",
        metavar="JSON",
        type=Chips.from_json,
        required=True,
        help="the chips to compile for",
    )
    parser.add_argument("--over", nargs="+", choices=CHOICES, required=True, help="what may change")
    parser.add_argument("--most", type=int, required=True, help="how many candidates are compiled")
    parser.add_argument(
        "--measure", action="store_true", help="time what was compiled on the devices that are here"
    )
    options = parser.parse_args()
    results = sys.stdout
    # Notes and the output of user imports are not results.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            search = _search_candidates(
                options.chips, options.over, options.most, is_measured=options.measure
            )
            for result in search:
                print(json.dumps(result), file=results, flush=True)
        except (Exception, SystemExit) as error:
            code = exit_code(error, has_stepped=False)
            print_error(error, code)
            return code
    return contract.DONE


def _search_candidates(
    chips: Chips, choices: Sequence[Choice], max_candidates: int, *, is_measured: bool
) -> Iterator[dict[str, Any]]:
    spec, task = read_job()
    search = Search(spec, task, chips, choices, is_measured=is_measured)
    for _ in range(max_candidates):
        if (result := search.compile_next()) is None:
            break
        yield result
    yield {"left": search.describe_remaining()}


class Search:
    """A search that always compiles the candidate that is expected to be fastest."""

    def __init__(
        self,
        spec: TrainSpec,
        task: Task,
        chips: Chips,
        choices: Sequence[Choice],
        *,
        is_measured: bool,
    ) -> None:
        self._spec, self._is_measured = spec, is_measured
        self._compiler = ahead_of_time(spec, task, chips)
        sizes = ACCELERATORS[chips.type].memory_gib
        self._devices = len(self._compiler.devices)
        self._memory_bytes = max(sizes) * GIB if sizes else None
        self._remaining = list(enumerate_candidates(spec, self._devices, choices))
        self._job_candidate = Candidate.from_spec(spec, self._devices)
        self.traced = _trace_shapes(spec, task, chips, self._remaining)
        self._forecast = Forecast(self.traced)

    def compile_next(self) -> dict[str, Any] | None:
        """Compile the next candidate and return its report; None if no candidate may fit.

        The first candidate is the job itself, as the reference for the others.
        """
        fitting = filter(self._may_fit, self._remaining)
        candidate = min(fitting, key=self._search_order, default=None)
        if candidate is None:
            return None
        self._remaining.remove(candidate)
        description = self._describe_candidate(candidate)
        spec = candidate.apply_to(self._spec)
        try:
            with limit_compilation():
                compiled = self._compiler.compile_spec(spec, is_measured=self._is_measured)
        except (ProgramTooLargeError, SpecError) as error:
            return {**description, "refused": str(error)}
        except JaxRuntimeError as error:
            # The compiler itself fails, for example libtpu with "INTERNAL: RET_CHECK failure".
            if candidate == self._job_candidate:
                raise
            return {**description, "refused": f"the compiler fails: {str(error).splitlines()[0]}"}
        seconds = _step_seconds(compiled)
        self._forecast.add_observation(candidate, seconds)
        return {
            **description,
            "seconds": seconds,
            "modelled": _modelled_seconds(compiled),
            "peak": compiled["peak"],
            "compiled": compiled,
        }

    def _search_order(self, candidate: Candidate) -> tuple[bool, float]:
        seconds = self._forecast.predict_seconds(candidate, OPTIMISM_DEVIATIONS)
        return candidate != self._job_candidate, seconds

    def describe_remaining(self) -> list[dict[str, Any]]:
        """Return the candidates that were not compiled, the fastest first."""
        descriptions = []
        for candidate in sorted(self._remaining, key=self._forecast.predict_seconds):
            description = self._describe_candidate(candidate)
            if not self._may_fit(candidate) and self._memory_bytes is not None:
                description["refused"] = (
                    "by the shapes of its arrays it needs at least "
                    f"{self.traced.device_bytes(candidate) / GIB:.2f} of "
                    f"{self._memory_bytes / GIB:g} GiB"
                )
            descriptions.append(description)
        return sorted(descriptions, key=lambda description: "refused" in description)

    def _describe_candidate(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "candidate": dataclasses.asdict(candidate),
            "keys": candidate.train_keys(),
            "changes": candidate.changed_keys(self._spec, self._devices),
            "expected": self._forecast.predict_seconds(candidate),
        }

    def _may_fit(self, candidate: Candidate) -> bool:
        """Return whether a candidate may fit into memory. The job itself is always compiled."""
        if candidate == self._job_candidate or self._memory_bytes is None:
            return True
        return self.traced.device_bytes(candidate) <= self._memory_bytes


def _step_seconds(compiled: dict[str, Any]) -> float:
    if "measured" in compiled:
        return float(compiled["measured"])
    if (seconds := _modelled_seconds(compiled)) is None:
        raise SpecError("the compiler cannot print its program, so the time of a step is unknown")
    return seconds


def _modelled_seconds(compiled: dict[str, Any]) -> float | None:
    """Return the middle of the modelled range of a step's seconds, None if there is no model."""
    if compiled.get("modelled") is None:
        return None
    low, high = compiled["modelled"]["seconds"]
    return float(low + high) / 2


def _trace_shapes(
    spec: TrainSpec, task: Task, chips: Chips, candidates: Sequence[Candidate]
) -> TracedModel:
    """Trace the training without micro-batches; the sizes of every candidate follow from it."""
    accelerator = ACCELERATORS[chips.type]
    capability = availability.parse_capability(accelerator.capability)
    target = Accelerator(accelerator.platform, capability)
    plan = Plan(spec.model_copy(update={"accumulate": 1}), task, target)
    state = plan.step.abstract
    remats = {candidate.remat: candidate.train_keys()["remat"] for candidate in candidates}
    sizes = model_sizes(spec.model)
    return TracedModel(
        type=chips.type,
        slices=chips.slices,
        parameters=count_parameters(state.params),
        state=memory.total_bytes((state.params, state.opt, state.ema, state.buffers)),
        flops=plan.step_flops() or 0.0,
        residuals={key: plan.residual_bytes(remat) for key, remat in remats.items()},
        layers=sizes.layers,
        rows=spec.batch * (sizes.length or 1),
        width=sizes.width,
    )


if __name__ == "__main__":
    sys.exit(main())
