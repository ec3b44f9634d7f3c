"""What host 0 reports of a run beside its summary: records of attempts, counters, addresses. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.rendezvous import Hello
from jaxlaunch.records.attempt import Record
from jaxlaunch.records.members import Members
from jaxlaunch.records.verdict import Verdict


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
