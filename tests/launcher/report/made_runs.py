"""Run folders as a launcher leaves them, of any length and any number of attempts."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.sweep.table import Member, SweepTable
from jaxlaunch.records.rank_history import RankHistory
from jaxlaunch.records.summary import AttemptProgress, AttemptRecord, StartRecord, Summary
from jaxlaunch.records.verdict import (
    Failure,
    FailureKind,
    HangFacts,
    Numbers,
    Verdict,
    verdict_for_code,
)
from jaxlaunch.runs.layout import RANKS
from jaxlaunch.runs.run_folder import RunFolder

BEGAN = 1_795_000_000.0
JOB = """name: made
hosts: 2
accelerator: {type: cpu, per_host: 1}
env: {TOKEN: not-to-be-shown}
train:
  task: classify
  model: {kind: mlp}
  data: {source: tfds, name: digits}
  steps: 1000
  checkpoint: {best: {metric: eval/loss}}
"""
ATTEMPT_S = {
    "rendezvous": 1.0,
    "init": 4.0,
    "restore": 0.5,
    "compile": 6.0,
    "step": 20.0,
    "data": 1.0,
    "eval": 2.0,
}


def attempt(
    number: int, ended: float, code: int, seconds: Mapping[str, float] = ATTEMPT_S
) -> AttemptRecord:
    """Return an attempt that ended at `ended` seconds; it lost 3 s of steps unless it is done."""
    lost = {} if code == contract.DONE else {"lost_work": 3.0}
    spent = {**seconds, "save": 0.5, **lost}
    verdict = verdict_for_code(
        code,
        "every process finished" if not code else f"rank 1 ended with {code}",
        rank=1 if code else None,
    )
    began = BEGAN + ended - sum(spent.values())
    saved = 100 * number
    return AttemptRecord(
        "uid",
        0,
        number,
        verdict.cause,
        verdict.rank,
        saved,
        saved,
        spent,
        verdict,
        began + 0.2,
        BEGAN + ended,
        first_step=saved - 99,
    )


def run(
    folder: Path,
    codes: Sequence[int] = (137, 0),
    gap_s: float = 2.0,
    points: int = 60,
    job: str = JOB,
) -> Mapping[str, float]:
    """Make a run of attempts with these codes, `gap_s` apart; return its seconds by cause."""
    folder.mkdir(parents=True)
    records, at, seconds = list[AttemptRecord](), 0.0, dict.fromkeys(contract.CLOCK_CAUSES, 0.0)
    for number, code in enumerate(codes, 1):
        length = sum(ATTEMPT_S.values()) + 0.5 + (3.0 if code else 0.0)
        at += length + (gap_s if number > 1 else 0.0)
        records.append(attempt(number, at, code))
        for cause, spent in records[-1].seconds.items():
            seconds[cause] += spent
    seconds["down"] += gap_s * (len(codes) - 1)
    progress = AttemptProgress("uid", 0, len(codes), records[-1].started, BEGAN + at, first_step=1)
    start = StartRecord(1, "uid", BEGAN, BEGAN + at, records[-1].verdict.code, 1, 1000)
    summary = Summary(
        records[-1].verdict,
        step=1000,
        seconds=seconds,
        restarts={},
        committed=1000,
        of=progress,
        starts=[start],
    )
    write(folder, summary, records, job)
    rows(folder, points, at)
    return seconds


def write(folder: Path, summary: Summary, records: Sequence[AttemptRecord], job: str = JOB) -> None:
    """The files that the leader writes."""
    (folder / "summary.json").write_text(json.dumps(summary.to_json()))
    (folder / "attempts.jsonl").write_text(
        "".join(json.dumps(row.to_json()) + "\n" for row in records)
    )
    (folder / "job.yaml").write_text(job)
    (folder / ".lock").touch()


def rows(folder: Path, points: int, wall_s: float) -> None:
    """metrics.jsonl and eval.jsonl, with the points spread over the run."""
    with open(folder / "metrics.jsonl", "w") as metrics, open(folder / "eval.jsonl", "w") as evals:
        for at in range(points):
            step = 1000 * (at + 1) // points if points <= 1000 else at + 1
            time = BEGAN + wall_s * (at + 1) / points
            loss = 2.0 * math.exp(-3.0 * at / points) + 0.05 * math.sin(at)
            parts = {
                "data_s": 0.01,
                "save_s": 0.1 if at % 20 == 19 else 0.0,
                "eval_s": 0.0,
                "wall_s": wall_s / points / 2,
            }
            row = {
                "step": step,
                "loss": loss,
                "grad_norm": 1.0 / (at + 1),
                "learning_rate": 1e-3,
                **parts,
                "time": time,
            }
            metrics.write(json.dumps(row) + "\n")
            if at % 20 == 19:
                evals.write(json.dumps({"step": step, "loss": loss + 0.1, "time": time}) + "\n")


def failed(folder: Path, verdict: Verdict) -> None:
    """Makes a run that failed at once, with this verdict."""
    run(folder, codes=(contract.CRASH,))
    summary = json.loads((folder / "summary.json").read_text())
    summary["verdict"] = dataclasses.asdict(verdict)
    (folder / "summary.json").write_text(json.dumps(summary))


# The learning rates and widths of the runs of a sweep, and the losses that they end with.
SWEPT = {("1e-3", "8"): 0.9, ("1e-2", "8"): 0.3, ("1e-3", "16"): 110.0, ("1e-2", "16"): 0.5}


def sweep(folder: Path) -> None:
    """Make a sweep of four runs: three are done, the last failed, and a fifth has not begun."""
    members = dict[str, Member]()
    for number, (lr, width) in enumerate([*SWEPT, ("1e-1", "8")]):
        name = f"{folder.name}-{number:03}"
        changes = [f"train.optimizer.lr={lr}", f"train.model.width={width}"]
        members[name] = Member(name, folder / name, changes, str(number))
        if (lr, width) in SWEPT:
            codes = (contract.CRASH,) if number == 3 else (contract.DONE,)
            run(folder / name, codes, job=JOB + "labels: {team: vision}\n")
            row = {"step": 1000, "loss": SWEPT[lr, width], "time": BEGAN + 30}
            (folder / name / "eval.jsonl").write_text(json.dumps(row) + "\n")
    settings = {"sweep": folder.name, "metric": "eval/loss", "mode": "min", "cluster": None}
    SweepTable(folder).record_sweep(settings, members)


def ranks(folder: Path, count: int, wall_s: float, slow: int) -> None:
    """ranks.json of a run whose rank `slow` falls behind and waits for data in its second half."""
    history = RankHistory()
    for look in range(1, 240):
        is_slow = look > 120
        letters = ["d" if is_slow and rank == slow else "s" for rank in range(count)]
        steps = [10 * look - (look if is_slow and rank == slow else 0) for rank in range(count)]
        history.add_column(BEGAN + look * wall_s / 240, letters, steps)
    (folder / RANKS).write_bytes(history.to_json_bytes())


def hang(folder: Path, rank: int, elapsed_s: float, place: str) -> None:
    """Make `rank` the one for which the others waited in the last attempt, until its end."""
    *earlier, last = RunFolder(folder).read_records("uid")
    facts = HangFacts("step", 5.0, elapsed_s, 0, "1 rank elsewhere", place=place)
    facts = dataclasses.replace(facts, waiting=Numbers((0, 1), 2), late=Numbers((rank,), 1))
    failure = Failure(FailureKind.HANG, rank=rank, hang=facts)
    verdict = dataclasses.replace(last.verdict, failure=failure)
    rows = [*earlier, dataclasses.replace(last, verdict=verdict)]
    text = "".join(json.dumps(row.to_json()) + "\n" for row in rows)
    (folder / "attempts.jsonl").write_text(text)


def classification(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return a classification.json: 8 of each class are right, one is taken for the next class."""
    count = len(names)
    rates = {"examples": 9, "precision": 8 / 9, "recall": 8 / 9, "f1": 8 / 9}
    square = [
        [8 if at == to else int(to == (at + 1) % count) for to in range(count)]
        for at in range(count)
    ]
    pair = {"label": names[0], "predicted": names[1]}
    worst = {"example": 3, "where": None, **pair, "confidence": 0.75, "loss": None}
    summary = {
        "step": 1000,
        "ema": False,
        "examples": 9 * count,
        "top1": 8 / 9,
        "top5": 1.0,
        "classes": count,
        "macro": {"precision": 8 / 9, "recall": 8 / 9, "f1": 8 / 9},
        "per_class": [{"label": name, **rates} for name in names],
        **({"confusion": square} if count <= 50 else {"confused": [{**pair, "examples": 1}]}),
        "calibration": {
            "ece": 0.05,
            "bins": [{"examples": 0}, {"examples": 9, "confidence": 0.9, "accuracy": 8 / 9}],
        },
        "worst": [worst, {**worst, "where": f"images/{names[0]}.png", "loss": 3.5}],
    }
    (folder / "classification.json").write_text(json.dumps(summary))
    return summary
