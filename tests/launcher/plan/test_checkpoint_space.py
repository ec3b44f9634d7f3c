"""The room for checkpoints: of a folder here, of scratch space, and what only a cluster knows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.manifests.jobset import ResolvedJob, resolve
from jaxlaunch.launcher.plan import estimate

JOB = """
name: lm
image: registry.example/train:1.4
accelerator: {type: cpu}
volumes: [%s]
train: {task: "lm", checkpoint: {%s}}
"""


def job(path: str | None, *volumes: str) -> ResolvedJob:
    checkpoint = "" if path is None else f"path: {path}"
    return resolve(jobs.parse_job(JOB % (", ".join(volumes), checkpoint)), ClusterDefaults())


@pytest.mark.parametrize("path", ["ckpt/a", "{}/ckpt/a"])
def test_a_folder_here_has_what_is_free_and_what_its_own_steps_hold(
    tmp_path: Path, path: str
) -> None:
    asked = job(path.format(tmp_path))
    free = shutil.disk_usage(tmp_path).free
    empty = estimate.checkpoint_room(asked, tmp_path)
    assert empty.text == "free here" and empty.bytes is not None and abs(empty.bytes - free) < 2**30
    (tmp_path / "ckpt" / "a" / "40" / "state").mkdir(parents=True)
    (tmp_path / "ckpt" / "a" / "note").write_text("x" * 1000)
    with (tmp_path / "ckpt" / "a" / "40" / "state" / "w").open("wb") as file:
        file.truncate(2**40)  # sparse: it takes no space
    held = estimate.checkpoint_room(asked, tmp_path)
    assert held.bytes is not None and abs(held.bytes - 2**40 - free) < 2**30


def test_a_job_without_a_folder_saves_in_its_run_folder(tmp_path: Path) -> None:
    found = estimate.checkpoint_room(job(None), tmp_path)
    assert found.folder == "runs/lm/checkpoints" and found.bytes is not None


@pytest.mark.parametrize(
    ("path", "volumes", "size", "says"),
    [
        (
            "/ckpt/lm",
            ["{claim: ckpt, path: /ckpt}"],
            None,
            "on claim ckpt, whose size `launcher doctor` compares",
        ),
        ("/s/lm", ["{ephemeral: 100Gi, path: /s}"], 100 * 2**30, "of the volume's 100Gi"),
        (
            "/d/s/lm",
            ["{claim: d, path: /d}", "{ephemeral: 1Gi, path: /d/s}"],
            2**30,
            "of the volume's 1Gi",
        ),
        ("/b/lm", ["{bucket: gs://team-b, path: /b}"], None, "a bucket"),
        ("gs://team-b/lm", [], None, "a bucket"),
    ],
)
def test_a_volume_has_what_the_job_says_of_it(
    tmp_path: Path, path: str, volumes: list[str], size: int | None, says: str
) -> None:
    assert estimate.checkpoint_room(job(path, *volumes), tmp_path) == estimate.Room(
        path, size, says
    )
