from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import job as jobs
from launcher import paths
from launcher.errors import UserError
from launcher.job import JobSpec


def spec(folder: Path, **keys: Any) -> JobSpec:
    document: dict[str, Any] = {"name": "t", "accelerator": {"type": "cpu"}, "train": {"task": "a.b:C"}} | keys
    (folder / "job.yaml").write_text(yaml.safe_dump(document))
    return jobs.load(folder / "job.yaml")


VOLUMES = [{"claim": "ckpt", "path": "/ckpt"}, {"bucket": "gs://corpus/a", "path": "/data", "read_only": True}]


def test_a_volume_is_a_folder_of_the_run(tmp_path: Path) -> None:
    job = spec(tmp_path, volumes=VOLUMES)
    here = paths.of(job, tmp_path, tmp_path / "run", {"corpus": Path("/mnt/corpus")})
    assert here.here("/ckpt/lm") == str(tmp_path / "run/volumes/ckpt/lm")
    assert here.here("/data/*.txt") == "/mnt/corpus/*.txt"
    assert here.here("/ckptother") == "/ckptother"


def test_a_relative_path_starts_at_the_job_file_and_a_url_stays(tmp_path: Path) -> None:
    here = paths.of(spec(tmp_path), tmp_path, tmp_path / "run", {})
    assert here.here("data/*.txt") == str(tmp_path / "data/*.txt")
    assert here.here("gs://bucket/x") == "gs://bucket/x"
    assert here.here("stdlib://*.py") == "stdlib://*.py"


def test_only_paths_below_a_volume_are_rewritten_in_a_command(tmp_path: Path) -> None:
    here = paths.of(spec(tmp_path, volumes=VOLUMES), tmp_path, tmp_path / "run", {})
    below = str(tmp_path / "run/volumes/ckpt/x")
    assert [here.argument(part) for part in ("train.py", "/ckpt/x", "--out=/ckpt/x", "--lr=3e-4", "a=/ckpt/x")] == [
        "train.py",
        below,
        f"--out={below}",
        "--lr=3e-4",
        "a=/ckpt/x",
    ]


def test_every_path_of_the_train_block_is_rewritten_and_nothing_else(tmp_path: Path) -> None:
    train = {
        "task": "a.b:C",
        "data": {"source": "text", "path": ["/data/*.txt", "more/*.txt"]},
        "checkpoint": {"path": "/ckpt/lm"},
        "compile_cache": "cache",
        "model": {"kind": "decoder", "init_from": "weights"},
    }
    job = spec(tmp_path, volumes=VOLUMES, train=train)
    here = paths.of(job, tmp_path, tmp_path / "run", {})
    assert job.train is not None
    volumes = tmp_path / "run/volumes"
    assert here.train(job.train).model_dump(exclude_unset=True) == {
        "task": "a.b:C",
        "data": {"source": "text", "path": [f"{volumes}/corpus/*.txt", f"{tmp_path}/more/*.txt"]},
        "checkpoint": {"path": f"{volumes}/ckpt/lm"},
        "compile_cache": f"{tmp_path}/cache",
        "model": {"kind": "decoder", "init_from": f"{tmp_path}/weights"},
    }


def test_what_the_job_leaves_to_the_task_stays_unsaid(tmp_path: Path) -> None:
    job = spec(tmp_path)
    assert job.train is not None
    assert paths.of(job, tmp_path, tmp_path, {}).train(job.train).model_dump(exclude_unset=True) == {"task": "a.b:C"}


def test_a_volume_that_the_job_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no volume of that name") as raised:
        paths.of(spec(tmp_path, volumes=VOLUMES), tmp_path, tmp_path, {"ckpnt": Path("/x")})
    assert "ckpt, corpus" in str(raised.value)
