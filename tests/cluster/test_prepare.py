"""A job whose text lies on a claim: prepared once, trained on two pods, preempted, resumed exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.job.defaults import Defaults
from tests.cluster import nodes, preparations
from tests.cluster.access import Access
from tests.cluster.gangs import Gang, Place, place, until
from tests.compiled import QUICK_COMPILES
from tests.trainer.text import corpora

pytestmark = pytest.mark.extended

SAVED = Defaults.model_validate({"checkpoint": {"claim": "checkpoints", "path": "/checkpoints"}})
STEPS = 60
# The image has no tokenizers: a byte is a token.
TRAIN: dict[str, Any] = {
    "task": "lm",
    "model": {"kind": "gpt2", "layers": 1, "width": 16, "heads": 2, "vocab": 256, "length": 32},
    "data": {
        "source": "text",
        "path": "/checkpoints/corpus/*.jsonl",
        "packing": "first-fit",
        "data_dir": "/checkpoints/prepared",
        "trace": True,
    },
    "batch": 8,
    "steps": STEPS,
    "log_every": 1,
    "eval": {"every": None},
    "checkpoint": {"every": 20},
}
JOB: dict[str, Any] = {
    "hosts": 2,
    "resources": {"cpu": "50m", "memory": "1Gi"},
    "grace": "60s",
    "env": QUICK_COMPILES,
    "train": TRAIN,
}


@pytest.fixture(scope="module")
def here(cluster: Access, image: str) -> Iterator[Place]:
    if not cluster.is_ours:
        pytest.skip("the volume is a folder of this machine, which is not a node of the cluster that was given")
    with place(cluster, image) as found:
        yield found


@pytest.fixture(scope="module")
def folder(here: Place) -> Path:
    found = preparations.make_claim(here.access, here.namespace)
    (found / "corpus").mkdir()
    for name in ("a", "b"):
        corpora.lines(found / "corpus" / f"{name}.jsonl", list(filter(None, corpora.texts(150, seed=ord(name)))))
    return found


@pytest.fixture(scope="module")
def gangs(here: Place, folder: Path) -> Mapping[str, Gang]:
    """One is left alone; the other, which begins when the text is there, is evicted once it steps."""
    found = {"whole": here.start("whole", SAVED, **JOB)}
    until("the text is prepared", lambda: index(folder))
    written = index(folder)[0].stat().st_mtime_ns
    found["evicted"] = here.start("evicted", SAVED, **JOB)
    found["evicted"].runs()
    until("it steps", lambda: (folder / "evicted" / ".jaxlaunch" / "metrics.jsonl").exists())
    nodes.evict(here.access, here.namespace, found["evicted"].hosts[1].pod)
    for gang in found.values():
        assert gang.ended() == "Completed", [line.text for line in gang.lines()]
    assert [path.stat().st_mtime_ns for path in index(folder)] == [written]  # once, for all hosts and both jobs
    return found


def index(folder: Path) -> list[Path]:
    return list((folder / "prepared").glob("*/index.json"))


def seen(folder: Path, name: str) -> dict[int, list[int]]:
    """The ids of the examples of each step, of both ranks."""
    found: dict[int, list[int]] = {}
    for rank in range(2):
        lines = (folder / name / ".jaxlaunch" / "examples" / f"process-{rank}.jsonl").read_text().splitlines()
        for line in map(json.loads, lines):
            found.setdefault(line["step"], []).extend(line["ids"])
    return found


def losses(folder: Path, name: str) -> dict[int, float]:
    lines = (folder / name / ".jaxlaunch" / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}


def test_text_on_a_claim_is_prepared_once_and_a_preempted_job_goes_on_exactly(
    gangs: Mapping[str, Gang], folder: Path
) -> None:
    assert gangs["whole"].counters == gangs["evicted"].counters == (0, 0)  # the Job made the one pod again
    (path,) = index(folder)
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "eval-00000-of-00001.array_record",
        "index.json",
        "train-00000-of-00001.array_record",
    ]
    assert json.loads(path.read_text())["documents"] == 300
    assert losses(folder, "evicted") == losses(folder, "whole") and len(losses(folder, "whole")) == STEPS
    assert seen(folder, "evicted") == seen(folder, "whole")
    whole, evicted = (
        json.loads((folder / name / ".jaxlaunch" / "summary.json").read_text()) for name in ("whole", "evicted")
    )
    assert whole["goodput"]["seconds"]["prepare"] > 0 and evicted["restarts"] == {"preempted": 1}
    assert any(note.startswith("resumed at step") for note in evicted["notes"])
