"""Folders with files whose names collide with others. One by one: python -m tests.collisions."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.collisions import (
    BUILT_IN,
    MODULES,
    PACKAGES,
    STEPS,
    make_all,
    make_job,
    parse_origins,
    run_job,
    run_launcher,
    run_without_launcher,
    users_names,
)

pytestmark = pytest.mark.extended

# Read in processes of their own, which import the user's `utils` too.
DATA = """
import utils

class Digits:
    takes_rng = False

    def __len__(self):
        return 64

    def __getitem__(self, index):
        assert utils.WHOSE == "mine"
        image = __import__("numpy").ones((8, 8, 1), "float32") * index
        return {"image": image, "label": index % 10}
"""
EXITING_TASKS = """
import os, sys
from jaxlaunch.trainer.tasks.classify import Classify

class AtOnce(Classify):
    def example(self, item):
        os._exit(0)

class AsAScript(Classify):
    def example(self, item):
        sys.exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with every one of the names."""
    folder = make_all(tmp_path_factory.mktemp("collisions") / "proj")
    (folder / "data_of_mine.py").write_text(DATA)
    return folder


def read_summary(mode: str, folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(
        (folder.parent / f"{mode.replace(' ', '-')}.yaml.run/summary.json").read_text()
    )
    return summary


def test_command_imports_the_same_modules_as_without_the_launcher(folder: Path) -> None:
    result = run_job("command", folder)
    assert (result.returncode == 0, parse_origins(result.stdout)) == run_without_launcher(folder), (
        result.stderr
    )
    assert "sitecustomize" not in result.stderr


def test_task_imports_the_modules_of_its_folder(folder: Path) -> None:
    data = {"source": "torch", "dataset": "data_of_mine:Digits", "workers": 1}
    mode = "train with code"
    document = make_job(mode, folder)
    document["train"] = document["train"] | {"data": data, "eval": {"every": None}}
    result = run_job(mode, folder, document=document)
    assert result.returncode == 0, result.stdout + result.stderr
    assert read_summary(mode, folder)["step"] == STEPS, result.stdout + result.stderr
    assert parse_origins(result.stdout) == [
        f"{name} mine" for name in users_names({*MODULES, *PACKAGES})
    ]


def test_launcher_runs_in_a_folder_with_collisions(folder: Path) -> None:
    """Check its own imports, and that a `trainer.py` does not run in place of the trainer."""
    file = folder / "job.yaml"
    document = make_job("train", folder) | {"image": "registry.example/train:1"}
    document["train"] = document["train"] | {"checkpoint": {"path": "gs://bucket/run"}}
    file.write_text(yaml.safe_dump(document))
    trained = run_job("train", folder)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert read_summary("train", folder)["step"] == STEPS, trained.stdout + trained.stderr
    for command in (
        ("validate", file.name),
        ("render", file.name),
        ("eval", f"{folder.parent}/train.yaml.run"),
    ):
        result = run_launcher(folder, *command)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("task", "fields", "code", "words"),
    [
        ("AtOnce", {}, 70, "rank 0's program ended in init, before its last step"),
        (
            "AsAScript",
            {},
            65,
            "rank 0 ended in init: tfds digits train: example 0 cannot be read: SystemExit: 0",
        ),
        (
            None,
            {"code": "."},
            70,
            "rank 0's program ended with exit code 0 before the trainer began",
        ),
    ],
)
def test_exit_code_0_before_the_last_step_is_a_failure(
    tmp_path: Path, task: str | None, fields: dict[str, Any], code: int, words: str
) -> None:
    (tmp_path / "ends.py").write_text(EXITING_TASKS)
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(0)" if task is None else "")
    train = BUILT_IN | ({} if task is None else {"task": f"ends:{task}"})
    document = {
        "name": "ends",
        "accelerator": {"type": "cpu"},
        "train": train,
        "restarts": {"crash": 0},
        **fields,
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    result = run_launcher(tmp_path, "run", "job.yaml")
    verdict = json.loads((tmp_path / "runs/ends/summary.json").read_text())["verdict"]
    assert (result.returncode, verdict["code"]) == (code, code), result.stdout + result.stderr
    assert verdict["message"].startswith(words)


def test_image_without_jaxlaunch_is_reported(tmp_path: Path) -> None:
    """Check with an isolated interpreter that sees no site-packages."""
    script = Path(__file__).parents[2] / "jaxlaunch" / "isolated.py"
    copy = tmp_path / "isolated.py"
    copy.write_text(script.read_text())
    command = ["python3", "-I", "-S", copy, "jaxlaunch.trainer"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert "has no jaxlaunch with its trainer" in result.stderr
    assert "install it there with its extra train" in result.stderr
