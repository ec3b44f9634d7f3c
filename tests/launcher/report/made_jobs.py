"""Jobs of a cluster in the fake API server, with the logs that their leaders write."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from jaxlaunch.launcher.kubernetes.kinds import EVENTS, JOBSETS, PODS
from jaxlaunch.launcher.kubernetes.labels import SUBMITTED_WORDS
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import BeatLine, Line, VerdictLine
from tests.launcher import objects
from tests.launcher.apiserver import Server

TRAIN = {
    "task": "classify",
    "model": {"kind": "mlp"},
    "data": {"source": "tfds", "name": "digits"},
    "steps": 1000,
    "checkpoint": {"best": {"metric": "eval/loss"}},
}
BEGAN = objects.NOW.timestamp() - 600


def beats(
    count: int = 20,
    *,
    attempt: int = 1,
    began: float = BEGAN,
    first_step: int = 10,
    seconds: dict[str, float] | None = None,
    **fields: Any,
) -> list[BeatLine]:
    """Heartbeats of an attempt, 15 s and 10 steps apart, with a falling loss."""
    base, lines = {"init": 5.0, "step": 0.0, "data": 0.0, **(seconds or {})}, []
    for number in range(count):
        step = first_step + 10 * number
        loss = 2.0 * math.exp(-step / 200)
        metrics = {"step": step, "loss": loss, "eval_loss": round(loss + 0.1, 1), "step_s": 1.4}
        spent = {**base, "step": base["step"] + 14.0 * number, "data": base["data"] + number}
        at = began + 15.0 * number
        values: dict[str, Any] = {"metrics": metrics, "step": step, "seconds": spent, **fields}
        lines.append(objects.beat(at - objects.NOW.timestamp(), attempt=attempt, **values))
    return lines


def log_text(*records: Line, extra: Sequence[str] = ()) -> str:
    """The log of a pod: lines of ranks, and records."""
    lines = [f"[{number % 2}] line {number}" for number in range(5)]
    return "\n".join([*lines, *map(log_lines.format_line, records), *extra, ""])


def put_job(
    server: Server,
    name: str = "lm",
    records: Sequence[Line] | None = None,
    *,
    hosts: int = 2,
    labels: dict[str, str] | None = None,
    words: Sequence[str] = (),
    status: objects.Object | None = None,
    train: dict[str, Any] | None = None,
    is_over: bool = False,
) -> None:
    """Put a job with its running or ended pods and their logs."""
    keys: dict[str, Any] = {"train": train or TRAIN, "command": None}
    manifest = objects.jobset(hosts, name=name, labels=labels or {}, status=status, **keys)
    manifest["metadata"]["annotations"][SUBMITTED_WORDS] = json.dumps(["job.yaml", *words])
    server.put(JOBSETS.path("team", name), manifest)
    for host in range(hosts):
        pod = objects.over(host, 0) if is_over else objects.pod(host)
        pod["metadata"]["name"] = f"{name}-w-0-{host}-abcde"
        pod["metadata"]["labels"] |= {
            "jobset.sigs.k8s.io/jobset-name": name,
            "jaxlaunch.io/job": name,
        }
        path = PODS.path("team", pod["metadata"]["name"])
        server.put(path, pod)
        text = log_text(*(beats() if records is None else records) if host == 0 else ())
        server.put(f"{path}/log", {"text": text})


def put_warning(server: Server, name: str, reason: str, message: str) -> None:
    """Put a Warning event about a job's first pod."""
    event = objects.event("Pod", f"{name}-w-0-0-abcde", reason, message)
    server.put(EVENTS.path("team", f"{name}.1"), event)


def ended(code: int, message: str, *, attempt: int, at: float, **fields: Any) -> VerdictLine:
    """The verdict on an attempt at a Unix time."""
    return objects.judged(code, message, attempt=attempt, at=at - objects.NOW.timestamp(), **fields)
