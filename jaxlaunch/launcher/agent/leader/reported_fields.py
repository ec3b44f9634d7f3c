"""What host 0 reports of a run beside its summary: records of attempts, counters, addresses. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Action, AgentJob
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.rendezvous import Hello
from jaxlaunch.launcher.agent.leader import history
from jaxlaunch.records.attempt import Record
from jaxlaunch.records.members import Members
from jaxlaunch.records.summary import Restarted
from jaxlaunch.records.verdict import Verdict

MAX_ROWS = 50  # restarts in a summary, the newest: attempts.jsonl has all


def record(
    config: Config,
    number: int,
    verdict: Verdict,
    *,
    first_committed: int | None,
    last_committed: int | None,
    seconds: Mapping[str, float],
    restart: Mapping[str, float],
    started: float,
    members: Members,
) -> Record:
    """The record of attempt `number` of these members, which ended now; `seconds` by cause, `started` in Unix time."""
    return Record(
        uid=config.uid,
        generation=config.generation,
        attempt=number,
        cause=verdict.cause,
        rank=verdict.rank,
        first_committed=first_committed,
        last_committed=last_committed,
        seconds={cause: round(spent, 3) for cause, spent in seconds.items()},
        verdict=verdict,
        started=started,
        ended=time.time(),
        restart=restart,
        members=members.to_wire() if members.have_moved else None,
    )


def carried(records: Sequence[Record], now: float, started: float | None = None) -> dict[str, float]:
    """Seconds by cause that were spent until `now`, on attempts with a record and around them; in Unix time.

    What lies between attempts is down. Without `started`, when the run did, it started with the first of these
    attempts, whose own seconds may not be known.
    """
    total = dict.fromkeys(contract.CLOCK, 0.0)
    for each in records:
        for cause, spent in each.seconds.items():
            total[cause] = total.get(cause, 0.0) + spent
    if started is None and records:
        started = min(records[0].started, records[0].ended - sum(records[0].seconds.values()))
    if started is not None:
        total["down" if records else "rendezvous"] += max(0.0, now - started - sum(total.values()))
    return total


def restarts(records: Sequence[Record], number: int, present: Mapping[str, float]) -> list[Restarted]:
    """A row for each of the last attempts that is on record, and for the `present` one, where it is not."""
    after: dict[int, str | None] = {each.attempt + 1: each.cause for each in records}
    rows = [Restarted(each.attempt, after.get(each.attempt), each.restart) for each in records[-MAX_ROWS:]]
    has_ended = bool(records) and records[-1].attempt == number
    rows += [] if has_ended else [Restarted(number, after.get(number), present)]
    return [row for row in rows if row.seconds]


def counters(records: Sequence[Record], generation: int, job: AgentJob) -> dict[str, Any]:
    """For the metrics of every agent: ends by cause, restarts left by limit, and the newest verdict's code."""
    last_codes = {each.generation: each.verdict.code for each in records if each.generation != generation}
    charged = sum(contract.outcome(code).action is Action.RESTART for code in last_codes.values())
    used = history.restarts_used(records, generation)
    left = {"crash": max(0, job.crash_limit - charged), "in_place": max(0, job.in_place_limit - used)}
    if job.preempted_limit is not None:
        left["preempted"] = max(0, job.preempted_limit - history.preemptions_without_progress(records))
    return {
        "ended": history.ends_by_cause(records),
        "left": left,
        "code": records[-1].verdict.code if records else None,
    }


def job(config: Config, environ: Mapping[str, str]) -> dict[str, Any]:
    """The job as its pods got it, under the keys of job.yaml: what the launcher alone reads of it is not there."""
    given, slices = config.job, int(environ.get(contract.SLICES, "1"))
    devices = {} if given.platform == "tpu" else {"per_host": given.devices_per_process * given.processes_per_host}
    hosts = given.sizes[-1] if given.sizes else config.hosts // slices
    found: dict[str, Any] = {
        "name": given.name,
        "hosts": {"min": given.sizes[0], "max": hosts} if len(given.sizes) > 1 else hosts,
        "slices": slices,
        "processes_per_host": given.processes_per_host,
        "accelerator": {"type": given.accelerator, **devices},
        "restarts": {"crash": given.crash_limit, "in_place": given.in_place_limit},
        "timeouts": {phase: round(limit_s) for phase, limit_s in given.timeouts_s.items() if limit_s is not None},
        "grace": round(given.grace_s),
        "deadline": None if given.deadline_s is None else round(given.deadline_s),
        "workdir": given.workdir,
    }
    if given.command is not None:
        return found | {"command": list(given.command)}
    try:
        return found | {"train": json.loads(environ.get(contract.TRAIN_SPEC, "{}"))}
    except ValueError:  # the trainer says what is wrong with it
        return found


def address(hello: Hello, ip: str, ranks: range) -> dict[str, Any]:
    """One entry of agents.json: where a host's metrics are scraped."""
    plain = ip.removeprefix("::ffff:")  # an IPv4 peer on a dual-stack socket
    where = f"[{plain}]:{hello.metrics_port}" if ":" in plain else f"{plain}:{hello.metrics_port}"
    return {"host": hello.host, "address": where, "pid": hello.pid, "ranks": list(ranks)}
