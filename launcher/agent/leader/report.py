"""What is written of a run: the records, the summary, the addresses. Pure."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.agent import history
from launcher.agent.attempt import Attempt
from launcher.agent.clock import ratio
from launcher.agent.config import Config
from launcher.agent.history import Record
from launcher.agent.rendezvous import Hello
from launcher.agent.verdict import Verdict
from trainer import contract
from trainer.contract import Action, AgentJob


def record(
    config: Config, number: int, verdict: Verdict, attempt: Attempt, seconds: Mapping[str, float], started: float
) -> Record:
    """An attempt that ended now."""
    return Record(
        uid=config.uid,
        generation=config.generation,
        attempt=number,
        cause=verdict.cause,
        rank=verdict.rank,
        first_committed=attempt.first_committed,
        last_committed=attempt.committed,
        seconds={cause: round(spent, 3) for cause, spent in seconds.items()},
        verdict=verdict.to_json(),
        started=started,
        ended=time.time(),
    )


def line(of: Record) -> dict[str, Any]:
    return dataclasses.asdict(of)


def carried(records: Sequence[Record], now: float) -> dict[str, float]:
    """Seconds by cause that were spent before this generation; `now` in Unix time."""
    total = dict.fromkeys(contract.CLOCK, 0.0)
    for each in records:
        for cause, spent in each.seconds.items():
            total[cause] = total.get(cause, 0.0) + spent
    if records:
        total["down"] += max(0.0, now - records[-1].ended)
    return total


def counters(records: Sequence[Record], generation: int, job: AgentJob) -> dict[str, Any]:
    """Ends by cause, restarts left by budget, and the newest verdict's code."""
    last_codes = {each.generation: each.verdict["code"] for each in records if each.generation != generation}
    charged = sum(contract.outcome(code).action is Action.RESTART for code in last_codes.values())
    used = history.restarts_used(records, generation)
    return {
        "ended": history.ends_by_cause(records),
        "left": {"crash": max(0, job.crash_budget - charged), "in_place": max(0, job.in_place_budget - used)},
        "code": records[-1].verdict["code"] if records else None,
    }


def status_of(verdict: Verdict) -> str:
    """The one word of a run that ended: done, stopped or failed."""
    return {contract.DONE: "done", contract.PREEMPTED: "stopped"}.get(verdict.code, "failed")


def summary(
    status: str,
    verdict: Verdict | None,
    *,
    step: int | None,
    metrics: Mapping[str, Any] | None,
    seconds: Mapping[str, float],
    records: Sequence[Record],
    notes: Sequence[str],
    stacks: Mapping[int, str],
) -> dict[str, Any]:
    """summary.json: how the run stands, or how it ended. `status` is running, done, stopped or failed."""
    rounded = {cause: round(spent, 3) for cause, spent in seconds.items()}
    return {
        "status": status,
        "step": step,
        "verdict": verdict.to_json() if verdict else None,
        "metrics": metrics,
        "goodput": {"ratio": ratio(seconds), "seconds": rounded},
        "restarts": history.restarts_by_cause(records),
        "notes": list(notes),
        **({"stacks": {str(rank): stacks[rank] for rank in sorted(stacks)}} if stacks else {}),
    }


def address(hello: Hello, ip: str, ranks: range) -> dict[str, Any]:
    """One line of agents.json: where a host's metrics are scraped."""
    plain = ip.removeprefix("::ffff:")  # an IPv4 peer on a dual-stack socket
    where = f"[{plain}]:{hello.metrics_port}" if ":" in plain else f"{plain}:{hello.metrics_port}"
    return {"host": hello.host, "address": where, "pid": hello.pid, "ranks": list(ranks)}
