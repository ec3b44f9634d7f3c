"""The numbers of a run that records, commands and pages share. Pure.

A summary, a line of the log, an annotation and a status are RunNumbers with more fields, and are
made from each other as a whole. To add a number, add a field here, with the label and the format
for `launcher status` and the page of the run, and set it in launcher/agent/leader/reporter.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from jaxlaunch.records import codec
from jaxlaunch.records.codec import Bounds, Cause, NonNegativeInt, Seconds, max_length

_MAX_CAUSES = 20
# The limits of metrics in texts and annotations.
_MAX_METRICS, _MAX_METRIC_NAME_CHARS, _MAX_METRIC_VALUE = 8, 40, 1e300
# The metrics that are selected first if a program reports more than _MAX_METRICS.
_FIRST_METRICS = ("loss", "eval_loss", "accuracy", "eval_accuracy", "tokens_per_s", "mfu")


def select_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the most important finite metrics, at most _MAX_METRICS, in order of importance."""
    numbers = {}
    for name, value in (metrics or {}).items():
        is_number = type(value) in (int, float) and abs(value) < _MAX_METRIC_VALUE
        if is_number and name.isprintable() and len(name) <= _MAX_METRIC_NAME_CHARS:
            numbers[name] = value
    names = [name for name in dict.fromkeys((*_FIRST_METRICS, *numbers)) if name in numbers]
    return {name: numbers[name] for name in names[:_MAX_METRICS]}


def format_metrics(metrics: Mapping[str, Any] | None) -> str:
    """Return the most important metrics as text: "loss 0.25, accuracy 0.9"."""
    return ", ".join(f"{name} {value:.6g}" for name, value in select_metrics(metrics).items())


def _display_metadata(label: str, render: Callable[[Any], str]) -> dict[str, Any]:
    return {"label": label, "render": render}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunNumbers(codec.Keyed):
    """The numbers of a run. Each is None while it is unknown."""

    # The newest step that is complete on every rank.
    step: NonNegativeInt | None = None
    # The number of steps of the whole run.
    steps: NonNegativeInt | None = None
    # The newest step whose checkpoint is complete on storage.
    committed: NonNegativeInt | None = None
    # The number of restarts by the cause that ended the attempt before.
    restarts: Annotated[Mapping[Cause, NonNegativeInt], max_length(_MAX_CAUSES)] | None = None
    # The share of all seconds that was spent on steps that were kept.
    goodput: Annotated[float, Bounds(0, 1)] | None = dataclasses.field(
        default=None, metadata=_display_metadata("goodput", "{:.1%}".format)
    )
    # The newest metrics of rank 0.
    metrics: Mapping[str, Any] | None = dataclasses.field(
        default=None, metadata=_display_metadata("metrics", format_metrics)
    )

    def run_numbers(self) -> dict[str, Any]:
        """Return the numbers by name, without the other fields of the record."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(RunNumbers)}

    def describe_numbers(self) -> Iterator[tuple[str, str]]:
        """Yield the label and the text of each known number that is shown on its own line."""
        for field in dataclasses.fields(RunNumbers):
            value = getattr(self, field.name)
            if value is not None and "label" in field.metadata:
                yield field.metadata["label"], field.metadata["render"](value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedNumbers(RunNumbers):
    """The numbers of a run with its seconds, from which the goodput is computed."""

    # The seconds of the whole run by cause (contract.CLOCK_CAUSES).
    seconds: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seconds:
            object.__setattr__(self, "goodput", goodput_ratio(self.seconds))


def goodput_ratio(seconds: Mapping[str, float]) -> float | None:
    """Return the share of all seconds that was spent on steps, or None before the first step."""
    total, steps = sum(seconds.values()), seconds.get("step", 0.0)
    return min(1.0, steps / total) if total > 0 and steps > 0 else None
