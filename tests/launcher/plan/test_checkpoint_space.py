"""The room for checkpoints: in a folder here, in scratch space, and on a cluster."""

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


def resolve_job(path: str | None, *volumes: str) -> ResolvedJob:
    checkpoint = "" if path is None else f"path: {path}"
    return resolve(jobs.parse_job(JOB % (", ".join(volumes), checkpoint)), ClusterDefaults())


@pytest.mark.parametrize("path", ["ckpt/a", "{}/ckpt/a"])
def test_local_room_includes_existing_steps(tmp_path: Path, path: str) -> None:
    job = resolve_job(path.format(tmp_path))
    free = shutil.disk_usage(tmp_path).free
    empty = estimate.checkpoint_room(job, tmp_path)
    assert empty.text == "free here" and empty.bytes is not None and abs(empty.bytes - free) < 2**30
    (tmp_path / "ckpt" / "a" / "40" / "state").mkdir(parents=True)
    (tmp_path / "ckpt" / "a" / "note").write_text("x" * 1000)
    with (tmp_path / "ckpt" / "a" / "40" / "state" / "w").open("wb") as file:
        file.truncate(2**40)  # sparse: it takes no space
    room = estimate.checkpoint_room(job, tmp_path)
    assert room.bytes is not None and abs(room.bytes - 2**40 - free) < 2**30


def test_default_folder_is_in_the_run_folder(tmp_path: Path) -> None:
    room = estimate.checkpoint_room(resolve_job(None), tmp_path)
    assert room.folder == "runs/lm/checkpoints" and room.bytes is not None


@pytest.mark.parametrize(
    ("path", "volumes", "size", "text"),
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
def test_room_on_volumes(
    tmp_path: Path, path: str, volumes: list[str], size: int | None, text: str
) -> None:
    expected = estimate.Room(path, size, text)
    assert estimate.checkpoint_room(resolve_job(path, *volumes), tmp_path) == expected
