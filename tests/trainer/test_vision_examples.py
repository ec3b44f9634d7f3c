"""The examples of images and tables train at a small size and predict."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract, programs
from jaxlaunch.launcher.job import load
from jaxlaunch.trainer.evaluation import predict
from jaxlaunch.trainer.huggingface import folder as folders
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import read_spec
from jaxlaunch.trainer.train import build_loop
from tests.trainer import references
from tests.trainer.sources.images import made_images

pytestmark = pytest.mark.extended

EXAMPLES = Path(__file__).parents[2] / "examples"


def train_example(name: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The evaluations of an example's job, on eight devices."""
    job = load.load_job(EXAMPLES / f"{name}.yaml", [*overrides, "train.mesh={dp: -1}"])
    assert job.train is not None
    spec, task = read_spec({contract.TRAIN_SPEC: job.train.model_dump_json(exclude_unset=True)})
    build_loop(
        folders.resolve_spec(spec), task, RunContext(run_dir=str(folder)), Stop(), Progress(None)
    ).run()
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


def printed_text(folder: Path, *files: Path) -> list[dict[str, Any]]:
    """What the trained model predicts."""
    options = programs.Predict(folder=str(folder / "checkpoints"), files=tuple(map(str, files)))
    return list(predict.predict_files(options)["rows"])


def test_tumour_table_is_made_learned_and_predicted(tmp_path: Path) -> None:
    command = next(
        line for line in (EXAMPLES / "table.yaml").read_text().splitlines() if "python -c" in line
    )
    subprocess.run(
        [sys.executable, *shlex.split(command.lstrip("# "))[1:]], cwd=tmp_path, check=True
    )
    evaluated = train_example(
        "table", tmp_path, f"train.data.path={tmp_path}/cancer.npz", "train.batch=32"
    )
    # A hash holds out a fifth of the 569 rows, within three deviations.
    assert 85 <= evaluated[-1]["examples"] <= 143 and evaluated[-1]["accuracy"] >= 0.94
    (tmp_path / "new").mkdir()
    (tmp_path / "cancer.npz").rename(tmp_path / "new" / "cancer.npz")
    rows = printed_text(tmp_path, tmp_path / "new")
    assert [row["row"] for row in rows] == list(range(1, 21)) and {
        row["label"] for row in rows
    } == {"0", "1"}


def test_cifar_resnet_learns_digits(tmp_path: Path) -> None:
    smaller = (
        "train.model={kind: resnet, stem: small, stem_width: 8, depths: [1, 1], widths: [8, "
        "16], channels: 1}"
    )
    overrides = [
        "train.data.name=digits",
        "train.data.size=12",
        "train.batch=32",
        "train.steps=40",
        smaller,
    ]
    evaluated = train_example(
        "cifar_resnet",
        tmp_path,
        *overrides,
        "train.optimizer.schedule.warmup=5",
        "train.eval.every=20",
    )
    assert (
        evaluated[-1]["loss"] < evaluated[0]["loss"] - 0.1
        and evaluated[-1]["accuracy"] > evaluated[0]["accuracy"]
    )


def test_vit_is_fine_tuned_and_predicts(tmp_path: Path) -> None:
    weights = references.folder("vit_tiny", tmp_path / "weights")
    side = json.loads((weights / "config.json").read_text())["image_size"]
    photos = made_images.write_folders(tmp_path / "photos", 24)
    evaluated = train_example(
        "finetune_vit",
        tmp_path,
        f"train.model.init_from={weights}",
        f"train.data.path={photos}",
        f"train.data.size={side}",
        "train.batch=8",
        "train.optimizer.lr=0.003",
        "train.optimizer.schedule.warmup=0",
        "train.eval.every=10",
    )
    assert evaluated[-1]["accuracy"] == 1.0, evaluated
    rows = printed_text(tmp_path, made_images.write_folders(tmp_path / "new", 2))
    assert [row["label"] for row in rows] == ["cat", "cat", "dog", "dog"]
