"""The text of /metrics: the agent's rows of contract.PROMETHEUS, merged with those of its processes. Pure."""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.config import PROTOCOL
from jaxlaunch.launcher.agent.gang.progress import Progress
from jaxlaunch.records.summary import ratio

NAN = float("nan")
_SAMPLE = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")  # how one begins
Labels = tuple[str, ...]
Values = Mapping[Labels, float]  # by the row's labels, in its order


@dataclasses.dataclass
class Family:
    """One metric of an exposition: its comment lines, then its samples."""

    header: list[str]
    samples: list[str]


def own(
    generation: int,
    gang: Mapping[str, Any],
    ranks: Mapping[int, Progress],
    timeouts_s: Mapping[str, float | None],
    silence_s: float,
    memory: Mapping[str, float | None],
    now: float,
) -> str:
    """The agent's rows. `gang` is the leader's last report of all hosts; an unknown value is NaN, never missing."""
    values = _of_gang(generation, gang, silence_s) | _of_ranks(ranks, gang.get("foremost"), timeouts_s, now)
    values["jaxlaunch_host_memory_bytes"] = {(kind,): _number(size) for kind, size in memory.items()}
    lines: list[str] = []
    for row in contract.PROMETHEUS:
        if row.by == "agent":
            lines += [f"# HELP {row.name} {row.help}", f"# TYPE {row.name} {row.type}"]
            lines += [_sample(row.name, row.labels, labels, value) for labels, value in values[row.name].items()]
    return "\n".join(lines) + "\n"


def merge(texts: Iterable[str]) -> str:
    """Several expositions as one: each metric appears once, with the samples of all. Lines of no form are left out."""
    families: dict[str, Family] = {}
    for text in texts:
        name = ""
        for line in text.split("\n"):
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                header = families.setdefault(name, Family([], [])).header
                if not any(known.startswith(line[: len("# HELP ") + len(name) + 1]) for known in header):
                    header.append(line)
            elif (sample := _SAMPLE.match(line)) is not None:
                families.setdefault(name or sample[0], Family([], [])).samples.append(line)
    return "".join("\n".join([*family.header, *family.samples]) + "\n" for family in families.values())


def _of_gang(generation: int, gang: Mapping[str, Any], silence_s: float) -> dict[str, Values]:
    seconds = {cause: float(gang.get("seconds", {}).get(cause, 0.0)) for cause in contract.CLOCK}
    causes = [outcome.cause for outcome in contract.OUTCOMES.values()]
    share = ratio(seconds)
    return {
        "jaxlaunch_build_info": {(PROTOCOL, platform.python_version()): 1.0},
        "jaxlaunch_goodput_ratio": _one(share),
        "jaxlaunch_clock_seconds": {(cause,): spent for cause, spent in seconds.items()},
        "jaxlaunch_restarts_total": {(cause,): float(gang.get("ended", {}).get(cause, 0)) for cause in causes},
        "jaxlaunch_restarts_left": {
            (limit,): float(gang.get("left", {}).get(limit, NAN)) for limit in ("crash", "in_place", "preempted")
        },
        "jaxlaunch_last_verdict_code": _one(gang.get("code")),
        "jaxlaunch_generation": _one(generation),
        "jaxlaunch_attempt": _one(gang.get("attempt")),
        "jaxlaunch_heartbeat_age_seconds": _one(max(silence_s, float(gang.get("silence_s", 0.0)))),
    }


def _of_ranks(
    ranks: Mapping[int, Progress], foremost: int | None, timeouts_s: Mapping[str, float | None], now: float
) -> dict[str, Values]:
    steps: dict[Labels, float] = {}
    lags: dict[Labels, float] = {}
    left: dict[Labels, float] = {}
    phases: dict[Labels, float] = {}
    for rank, progress in ranks.items():
        label, status, limit = str(rank), progress.status, progress.timeout_s(timeouts_s)
        steps[(label,)] = NAN if status.step is None else float(status.step)
        lags[(label,)] = NAN if status.step is None or foremost is None else float(max(0, foremost - status.step))
        left[(label,)] = NAN if limit is None else limit - progress.in_phase_s(now)
        phases |= {(label, phase): float(phase == status.phase) for phase in contract.PHASES}
    return {
        "jaxlaunch_children_up": _one(sum(progress.status.exit is None for progress in ranks.values())),
        "jaxlaunch_phase": phases,
        "jaxlaunch_phase_timeout_left_seconds": left,
        "jaxlaunch_rank_step": steps,
        "jaxlaunch_rank_lag_steps": lags,
    }


def _one(value: float | None) -> Values:
    return {(): _number(value)}


def _number(value: float | None) -> float:
    return NAN if value is None else float(value)


def _sample(name: str, labels: Sequence[str], values: Labels, value: float) -> str:
    pairs = ",".join(f'{label}="{text}"' for label, text in zip(labels, values, strict=True))
    number = "NaN" if value != value else repr(value)
    return f"{name}{{{pairs}}} {number}" if pairs else f"{name} {number}"
