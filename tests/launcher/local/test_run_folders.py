from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from launcher import runs
from launcher.errors import UserError
from tests.launcher.cli import launcher

JOB = {"name": "one", "accelerator": {"type": "cpu"}, "volumes": [{"claim": "ckpt", "path": "/ckpt"}]}
DIGITS = "trainer.tasks.classify:Classify"


def run(folder: Path, **keys: object) -> Path:
    """A run's folder, as `launcher run` leaves it."""
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB | keys))
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_named_or_its_folder_is(here: Path) -> None:
    folder = run(here / "runs" / "one", train={"task": DIGITS})
    assert runs.folder("one") == runs.folder("runs/one") == runs.folder(str(folder)) == folder
    with pytest.raises(UserError, match="There is no run two: neither two nor runs/two is a folder"):
        runs.folder("two")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (None, "runs/one/checkpoints"),
        ("/ckpt/deep", "runs/one/volumes/ckpt/deep"),
        ("/elsewhere", "/elsewhere"),
        ("gs://bucket/one", "gs://bucket/one"),
    ],
)
def test_a_run_s_checkpoints_are_where_its_job_says(path: str | None, found: str, here: Path) -> None:
    run(here / "runs" / "one", train={"task": DIGITS, "checkpoint": {"path": path}})
    assert runs.checkpoints("one") == (found if "://" in found else os.path.join(here, found))


def test_checkpoints_are_found_by_their_own_folder_too(here: Path) -> None:
    (here / "kept").mkdir()
    assert runs.checkpoints("kept") == str(here / "kept")
    assert runs.checkpoints("s3://bucket/kept") == "s3://bucket/kept"


def test_a_folder_that_only_the_job_s_file_places_is_asked_for(here: Path) -> None:
    run(here / "runs" / "one", train={"task": DIGITS, "checkpoint": {"path": "kept"}})
    with pytest.raises(UserError, match="keeps its checkpoints in kept, relative to the file of its job"):
        runs.checkpoints("one")
    run(here / "runs" / "mine", command=["python", "train.py"])
    with pytest.raises(UserError, match="Run mine is of a command"):
        runs.checkpoints("mine")


def test_what_cannot_be_exported_is_the_user_s_to_mend(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(here / "runs" / "one", train={"task": DIGITS})
    left = launcher(capsys, monkeypatch, "export", "one", "--to", "out")
    assert (left.code, left.out) == (2, "")
    assert "runs/one/checkpoints holds no checkpoint" in left.err and "Traceback" not in left.err
