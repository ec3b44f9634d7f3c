"""What `launcher plan --compile` prints of the compiler's answer."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlaunch.accelerators import KNOWN
from jaxlaunch.launcher.cli import output
from jaxlaunch.launcher.job import overrides
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.wording import size
from jaxlaunch.trainer.spec import TrainSpec

HOUR = 3600.0
DAY = 24 * HOUR
Range = Sequence[float]  # the least and the most


def complete(job: JobSpec, train: TrainSpec, found: dict[str, Any], price: float | None) -> None:
    """Adds to the compiler's answer what follows from its step time: throughput, MFU, the time to the end, its cost.

    `price` is that of one chip or GPU an hour.
    """
    modelled = found.get("modelled")
    if modelled is None:
        return
    low, high = modelled["seconds"]
    modelled["examples_per_second"] = [train.batch / high, train.batch / low]
    if (length := getattr(train.model, "length", None)) is not None:
        modelled["tokens_per_second"] = [train.batch * length / high, train.batch * length / low]
    peak = KNOWN[job.accelerator.type].peak
    if peak is not None and found["model_flops"]:
        rate = found["model_flops"] / job.devices / peak
        modelled["mfu"] = [rate / high, rate / low]
    if train.epochs is None:
        modelled["seconds_to_end"] = [low * train.steps, high * train.steps]
        if price is not None:
            hourly = price * job.host_count * job.accelerator.per_host
            modelled["price"] = [seconds / HOUR * hourly for seconds in modelled["seconds_to_end"]]


def lines(job: JobSpec, train: TrainSpec, found: Mapping[str, Any]) -> Iterator[str]:
    """The answer for a reader."""
    if not found["fits"]:
        yield f"compiled for {found['chips']} by {found['compiler']}: does not fit"
        yield f"  {found['says']}"
        yield from _change(found["change"])
        return
    yield f"compiled for {found['chips']} by {found['compiler']} in {found['seconds']:.0f} s; each device:"
    memory = found["memory"]
    rows = [("", *memory)]
    rows += [(name, *(size(each[key]) for each in memory.values())) for key, name in _PARTS.items()]
    rows += [("attention", found["attention"], "")]
    yield from output.columns([row[:3] for row in rows], gap=2, indent="  ")
    yield from (f"  {note}" for note in found["notes"])
    if "program" in found:
        yield f"  {found['program']}"
        return
    yield from _collectives(found["collectives"])
    if found["recomputed"]:
        yield f"  recomputation: {found['recomputed']:.0%} of the step's computation"
    if found["modelled"] is not None:
        yield from _modelled(found["modelled"])


_PARTS = {"peak": "peak", "argument": "arguments", "temp": "temporaries"}


def _change(change: Mapping[str, Any] | None) -> Iterator[str]:
    if change is None:
        yield "  hint: neither rematerialization, accumulation nor fsdp makes it fit: use more or larger devices."
        return
    changes = shlex.join(overrides.written(key, value) for key, value in change["set"].items())
    yield f"  hint: {changes} fits: compiled, its peak is {size(change['peak'])}."


def _collectives(listed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not listed:
        yield "  collectives: none"
        return
    rows = [("collective", "axes", "times", "sent", "not hidden")]
    for each in listed:
        times = f"{each['times']:.0f}"
        rows.append((each["kind"], "+".join(each["axes"]), times, size(each["wire"]), size(each["exposed"])))
    yield "  collectives of a step, on each device:"
    yield from output.columns(rows, gap=2, indent="    ")


def _modelled(found: Mapping[str, Any]) -> Iterator[str]:
    """By the model in docs/plan.md: nothing of it was measured."""
    low, high = found["seconds"]
    yield f"  step time, modelled: {low * 1000:.3g} to {high * 1000:.3g} ms"
    rates = [f"{_span(found[key])} {unit}" for key, unit in _RATES.items() if key in found]
    if "mfu" in found:
        least, most = found["mfu"]
        rates.append(f"MFU {least:.0%} to {most:.0%}")
    yield f"    {', '.join(rates)}"
    if "seconds_to_end" in found:
        least, most = found["seconds_to_end"]
        unit, name = (DAY, "days") if most >= DAY else (HOUR, "hours")
        price = f", {_span(found['price'])} in the unit of --price" if "price" in found else ""
        yield f"    to the last step: {least / unit:.3g} to {most / unit:.3g} {name}{price}"


_RATES = {"tokens_per_second": "tokens/s", "examples_per_second": "examples/s"}


def _span(both: Range) -> str:
    low, high = both
    return f"{low:,.0f} to {high:,.0f}" if low >= 10 else f"{low:.3g} to {high:.3g}"
