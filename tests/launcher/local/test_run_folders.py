from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.local import paths, run_folders, trainer_process
from jaxlaunch.runs.layout import SWEEP
from tests.launcher.invoke import launcher
from tests.launcher.report import made_runs

JOB = {
    "name": "one",
    "accelerator": {"type": "cpu"},
    "volumes": [{"claim": "ckpt", "path": "/ckpt"}],
}
ROOT = Path(__file__).parents[3]
DIGITS = "classify"


def make_run(folder: Path, **keys: object) -> Path:
    """A run's folder, as `launcher run` leaves it."""
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB | keys))
    return folder


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_is_found_by_name_or_folder(workspace: Path) -> None:
    folder = make_run(workspace / "runs" / "one", train={"task": DIGITS})
    assert (
        run_folders.resolve_folder("one")
        == run_folders.resolve_folder("runs/one")
        == run_folders.resolve_folder(str(folder))
        == folder
    )
    with pytest.raises(
        UserError, match="There is no run two: neither two nor runs/two is a folder"
    ):
        run_folders.resolve_folder("two")


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        (None, "runs/one/checkpoints"),
        ("/ckpt/deep", "runs/one/volumes/ckpt/deep"),
        ("/elsewhere", "/elsewhere"),
        ("gs://bucket/one", "gs://bucket/one"),
    ],
)
def test_checkpoints_are_where_the_job_says(path: str | None, folder: str, workspace: Path) -> None:
    make_run(workspace / "runs" / "one", train={"task": DIGITS, "checkpoint": {"path": path}})
    assert trainer_process.find_checkpoints("one") == (
        folder if "://" in folder else os.path.join(workspace, folder)
    )


def test_checkpoints_are_found_by_their_own_folder(workspace: Path) -> None:
    (workspace / "kept").mkdir()
    assert trainer_process.find_checkpoints("kept") == str(workspace / "kept")
    assert trainer_process.find_checkpoints("s3://bucket/kept") == "s3://bucket/kept"


def test_relative_checkpoint_folder_is_requested(workspace: Path) -> None:
    make_run(workspace / "runs" / "one", train={"task": DIGITS, "checkpoint": {"path": "kept"}})
    with pytest.raises(
        UserError, match="keeps its checkpoints in kept, relative to a folder that is unknown"
    ):
        trainer_process.find_checkpoints("one")
    make_run(workspace / "runs" / "mine", command=["python", "train.py"])
    with pytest.raises(UserError, match="Run mine runs its own command"):
        trainer_process.find_checkpoints("mine")


def test_checkpoints_are_found_for_options_of_run(workspace: Path) -> None:
    (workspace / "jobs").mkdir()
    job = JOB | {
        "train": {"task": "nowhere:Task", "steps": 1, "checkpoint": {"path": "/ckpt/deep"}}
    }  # ends at once
    (workspace / "jobs" / "one.yaml").write_text(yaml.safe_dump(job))
    argv = [
        sys.executable,
        "-m",
        "jaxlaunch.launcher.cli.main",
        "run",
        "jobs/one.yaml",
        "--volume",
        "ckpt=kept",
    ]
    process = subprocess.run(
        argv, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert process.returncode == 64, process.stderr
    assert trainer_process.find_checkpoints("one") == str(workspace / "kept" / "deep")


def test_job_of_run_resolves_relative_checkpoints(workspace: Path) -> None:
    job = JobSpec.model_validate(JOB | {"train": {"task": DIGITS, "checkpoint": {"path": "kept"}}})
    folder = workspace / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(
        jobs.dump_job(paths.map_paths(job, workspace / "jobs", folder, {}).map_job(job))
    )
    assert trainer_process.find_checkpoints("one") == str(workspace / "jobs" / "kept")


def test_export_errors_are_user_errors(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(workspace / "runs" / "one", train={"task": DIGITS})
    process = launcher(capsys, monkeypatch, "export", "one", "--to", "out")
    assert (process.code, process.out) == (2, "")
    assert (
        "runs/one/checkpoints holds no checkpoint" in process.err and "Traceback" not in process.err
    )


def test_circular_links_between_sweeps_are_ignored(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        made_runs.run(tmp_path / name / f"{name}-0", points=1)
        (tmp_path / name / SWEEP).touch()
        for link in ("link-1", "link-2", "link-3"):
            (tmp_path / name / link).symlink_to(tmp_path / other)

    assert [run.name for run in run_folders.list_runs(tmp_path)] == ["a-0", "b-0"]


def test_unreadable_start_folder_does_not_end_the_list(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 300)  # for which stat fails, as it does for a stale handle of NFS
    assert run_folders.Run("mine", folder, None, None).start_folder == folder
