"""Folders whose files have names that something else has too. One by one: python -m tests.collisions."""

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
    job,
    launcher,
    make_all,
    own,
    run,
    seen,
    without_us,
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
        return {"image": __import__("numpy").ones((8, 8, 1), "float32") * index, "label": index % 10}
"""
ENDS = """
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
    """A folder with every one of the names."""
    made = make_all(tmp_path_factory.mktemp("collisions") / "proj")
    (made / "data_of_mine.py").write_text(DATA)
    return made


def summary(way: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (folder.parent / f"{way.replace(' ', '-')}.yaml.run/summary.json").read_text()
    )
    return found


def test_a_program_gets_the_modules_that_it_gets_without_us(folder: Path) -> None:
    ended = run("command", folder)
    assert (ended.returncode == 0, seen(ended.stdout)) == without_us(folder), ended.stderr
    assert "sitecustomize" not in ended.stderr


def test_a_built_in_task_trains_in_such_a_folder(folder: Path) -> None:
    """A `trainer.py` there must not run in place of the trainer."""
    way = "train with workdir"
    ended = run(way, folder)
    assert (ended.returncode, summary(way, folder)["step"]) == (0, STEPS), (
        ended.stdout + ended.stderr
    )


def test_a_task_imports_the_modules_beside_it_and_the_libraries_import_theirs(folder: Path) -> None:
    data = {"source": "torch", "dataset": "data_of_mine:Digits", "workers": 1}
    way = "train with code"
    document = job(way, folder)
    document["train"] = document["train"] | {"data": data, "eval": {"every": None}}
    ended = run(way, folder, document=document)
    assert (ended.returncode, summary(way, folder)["step"]) == (0, STEPS), (
        ended.stdout + ended.stderr
    )
    assert seen(ended.stdout) == [f"{name} mine" for name in own({*MODULES, *PACKAGES})]


def test_the_launcher_itself_runs_in_such_a_folder(folder: Path) -> None:
    """Its own imports, and those of the trainer's programs that it starts."""
    file = folder / "job.yaml"
    document = job("train", folder) | {"image": "registry.example/train:1"}
    document["train"] = document["train"] | {"checkpoint": {"path": "gs://bucket/run"}}
    file.write_text(yaml.safe_dump(document))
    assert run("train", folder).returncode == 0
    for command in (
        ("validate", file.name),
        ("render", file.name),
        ("eval", f"{folder.parent}/train.yaml.run"),
    ):
        ended = launcher(folder, *command)
        assert ended.returncode == 0, ended.stderr


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
def test_a_trainer_that_ends_with_exit_code_0_before_its_last_step_has_failed(
    tmp_path: Path, task: str | None, fields: dict[str, Any], code: int, words: str
) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
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
    ended = launcher(tmp_path, "run", "job.yaml")
    verdict = json.loads((tmp_path / "runs/ends/summary.json").read_text())["verdict"]
    assert (ended.returncode, verdict["code"]) == (code, code), ended.stdout + ended.stderr
    assert verdict["message"].startswith(words)


def test_a_job_in_an_image_of_another_python_is_told_what_it_lacks(tmp_path: Path) -> None:
    """An interpreter without our package: an isolated one that sees no site-packages."""
    script = Path(__file__).parents[2] / "jaxlaunch" / "isolated.py"
    copy = tmp_path / "isolated.py"
    copy.write_text(script.read_text())
    command = ["python3", "-I", "-S", copy, "jaxlaunch.trainer"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    assert (
        "has no jaxlaunch with its trainer" in ended.stderr
        and "install it there with its extra train" in ended.stderr
    )
