"""Texts of the first screen of a run's page: its result, speed, memory and restarts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Key
from jaxlaunch.launcher.report.curves import Curve
from jaxlaunch.launcher.report.timeline import DOWN, LOST, Timeline
from jaxlaunch.launcher.wording import escape_controls
from jaxlaunch.records.summary import AttemptRecord

# Metrics of the quality of a model. A page shows the first that the run has.
_RESULTS = ("eval/accuracy", "eval/perplexity", "accuracy", "perplexity", "reward")
_LOSSES = ("eval/loss", "loss")
# Lower values of metrics whose names end so are better.
LOWER_IS_BETTER = ("loss", "perplexity")
# Metrics between 0 and 1 that are shown in percent.
_SHARES = ("accuracy", "top5", "macro_f1")
# Causes of time that an attempt spends before its first step.
_STARTUP = ("rendezvous", "init", "prepare", "compile", "restore")
# Nouns for the causes that end an attempt, singular and plural.
_END_NOUNS: Mapping[str, tuple[str, str]] = {
    "killed": ("kill", "kills"),
    "crash": ("crash", "crashes"),
    "hang": ("hang", "hangs"),
    "lost": ("lost host", "lost hosts"),
    "storage": ("storage failure", "storage failures"),
    "preempted": ("stop", "stops"),
    "interrupted": ("stop", "stops"),
    "requeued": ("requested restart", "requested restarts"),
}
_OTHER_NOUNS = ("restart", "restarts")
# What happened to the rank that ended an attempt.
_END_PARTICIPLES: Mapping[str, str] = {"killed": "killed", "crash": "failed", "hang": "hung"}

# Curves that the page does not draw: parts of an interval, which the timeline shows, and numbers
# that follow from the step.
_HIDDEN = (
    *(Key.PART_S.format(part=part) for part in ("data", "device", "host", "save", "eval")),
    *("wall_s", "step_s", "examples", "eval/examples", Key.EPOCH, Key.TARGETS_PER_S),
    # The limits are drawn with the curves of the memory.
    *(Key.DEVICE_LIMIT_GIB, Key.HOST_LIMIT_GIB),
)


def format_span(seconds: float) -> str:
    """Return a time such as `0.52 s`, `35 s`, `4 min 18 s`, `3 h 20 min` or `2 d 4 h`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole_s = round(seconds)
    if whole_s < 120:
        return f"{whole_s} s"
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60} s"
    if whole_s < 2 * 86400:
        return f"{whole_s // 3600} h {whole_s % 3600 // 60} min"
    return f"{whole_s // 86400} d {whole_s % 86400 // 3600} h"


def format_value(name: str, value: float) -> str:
    """Return the value of a metric: a share as `98.6 %`, other values with four digits."""
    if name.rpartition("/")[2] in _SHARES and 0 <= value <= 1:
        return f"{100 * value:.1f} %"
    return f"{value:.4g}"


def is_higher_better(name: str) -> bool | None:
    """Return whether higher values of a metric are better, or None if its name does not say so."""
    if name.endswith(LOWER_IS_BETTER):
        return False
    return True if name.rpartition("/")[2] in (*_SHARES, "reward") else None


def result_names(curves: Mapping[str, Any], metric: str | None) -> list[str]:
    """Return the metrics of the result: that of the best checkpoint or of quality, and a loss."""
    names = [name for name in (metric, *_RESULTS) if name in curves and name not in _LOSSES][:1]
    names += [name for name in _LOSSES if name in curves][:1]
    return [str(name) for name in names]


def list_results(curves: Mapping[str, Curve], metric: str | None) -> list[tuple[str, str]]:
    """Return the names and the newest values of the metrics of the result."""
    names = result_names(curves, metric)
    return [
        (escape_controls(name), format_value(name, curves[name].points[-1][2])) for name in names
    ]


def describe_speed(curves: Mapping[str, Curve]) -> str:
    """Return the newest speed, such as `12.3k tokens/s`, or "" if it is unknown."""
    for key, unit in ((Key.TOKENS_PER_S, "tokens"), (Key.EXAMPLES_PER_S, "examples")):
        if (curve := curves.get(key)) is not None and curve.points:
            value, prefix = curve.points[-1][2], ""
            for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
                if value >= size:
                    value, prefix = value / size, letter
                    break
            return f"{value:.3g}{prefix} {unit}/s"
    return ""


def describe_memory(curves: Mapping[str, Curve]) -> str:
    """Return the peak memory of the host and the devices of rank 0, and the limits.

    For example "host 1.93 of 2 GiB (97 %), device 61.2 of 79.6 GiB (77 %)", or "" if unknown.
    """
    texts = []
    for name, key, limit_key in (
        ("host", Key.HOST_GIB, Key.HOST_LIMIT_GIB),
        ("device", Key.DEVICE_GIB, Key.DEVICE_LIMIT_GIB),
    ):
        used, limits = curves.get(key), curves.get(limit_key)
        if used is None or limits is None or not used.points or not limits.points:
            continue
        peak, limit = max(point[2] for point in used.points), limits.points[-1][2]
        if limit > 0:
            texts.append(f"{name} {peak:.3g} of {limit:.3g} GiB ({100 * peak / limit:.0f} %)")
    return ", ".join(texts)


def describe_restarts(timeline: Timeline) -> str:
    """Return `2 kills cost 35 s`: the time of lost steps, and the time until new ones.

    Returns "" for a run with one attempt.
    """
    costs_s = _list_costs_s(timeline)
    causes = [
        attempt.record.cause
        for attempt in timeline.attempts[: len(costs_s)]
        if attempt.record is not None
    ]
    if not causes:
        return ""
    counts = Counter(_END_NOUNS.get(cause, _OTHER_NOUNS) for cause in causes)
    texts = [f"{count} {nouns[count > 1]}" for nouns, count in counts.items()]
    verb = "cost" if len(causes) > 1 else "costs"
    return f"{' and '.join(texts)} {verb} {format_span(sum(costs_s))}"


def describe_ends(timeline: Timeline) -> Iterator[list[str]]:
    """Yield `rank 2 killed`, `12 s lost` and `resumed at step 100` for the end of each attempt.

    The texts of an attempt that runs or is done are empty.
    """
    costs_s = _list_costs_s(timeline)
    for attempt, following, cost_s in itertools.zip_longest(
        timeline.attempts, timeline.attempts[1:], costs_s
    ):
        if attempt.record is None or attempt.record.verdict.code == contract.DONE:
            yield []
            continue
        texts = [_describe_end(attempt.record)]
        if following is not None:
            texts.append(f"{format_span(cost_s)} lost")
            if following.first_step is not None:
                texts.append(f"resumed at step {max(0, following.first_step - 1)}")
        yield texts


def _describe_end(record: AttemptRecord) -> str:
    host = record.verdict.host
    if record.cause == "lost" and host is not None:
        return f"host {host} lost"
    if record.rank is not None and (participle := _END_PARTICIPLES.get(record.cause)):
        return f"rank {record.rank} {participle}"
    return _END_NOUNS.get(record.cause, (record.cause,))[0]


def _list_costs_s(timeline: Timeline) -> list[float]:
    """Return for each end but the last the seconds of lost steps, and until new ones."""
    startup = (DOWN, *_STARTUP)
    return [
        timeline.seconds_between(attempt.begin, attempt.end, (LOST,))
        + timeline.seconds_between(attempt.end, following.end, startup)
        for attempt, following in itertools.pairwise(timeline.attempts)
    ]


def is_shown_curve(name: str) -> bool:
    """Return whether the page draws a curve, because it is of interest to a person."""
    # A mixture has an epoch of each part.
    return name not in _HIDDEN and not name.startswith(f"{Key.EPOCH}/")
