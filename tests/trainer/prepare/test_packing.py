"""Packed images and tables are read unchanged, also after packing was killed."""

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.prepare import pack
from jaxlaunch.trainer.sources.array_record import NOTES_FILE
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.tasks.classify import Classify
from tests.trainer.sources.images import made_images

KILLED = """
import os, signal, sys
from pathlib import Path
from jaxlaunch.trainer.prepare import pack
from jaxlaunch.trainer.spec import TrainSpec
pack.MIN_SHARD_BYTES = 4096
left = iter(range(int(sys.argv[3])))
def asked():
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return False
pack.pack_data(TrainSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2]), None, asked)
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pack, "MIN_SHARD_BYTES", 4096)


def make_job(target: str = "class", **data: Any) -> TrainSpec:
    classes = {"class": 2, "regression": 1}[target]
    model = {"kind": "mlp", "layers": 1, "width": 8, "classes": classes}
    return TrainSpec.model_validate(
        {"task": "classify", "model": model, "loss": {"target": target}, "data": data}
    )


def make_records_job(folder: Path, target: str = "class", **keys: Any) -> TrainSpec:
    """The job that reads a folder of records."""
    paths = {"path": f"{folder}/train-*.array_record", "eval_path": f"{folder}/eval-*.array_record"}
    return make_job(target, source="array_record", **paths, **keys)


def read_examples(spec: TrainSpec) -> list[dict[str, Any]]:
    """Every example of both splits as the task has it."""
    task, result = Classify(), []
    for split in ("train", "eval"):
        source = task.source(spec, split)  # type: ignore[arg-type]
        assert source is not None
        result += [task.example(source[index]) for index in range(len(source))]
    return result


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def are_equal(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    np.testing.assert_equal(actual, expected)
    return len(actual) == len(expected) > 0


def test_killed_packing_resumes_with_the_same_bytes(tmp_path: Path) -> None:
    spec = make_job(
        source="images",
        path=str(made_images.write_folders(tmp_path / "set", count=40)),
        eval_split=0.1,
    )
    result = pack.pack_data(spec, tmp_path / "whole")
    assert len(result["files"]) > 10
    for _ in range(3):
        most = random.Random(tmp_path.name).randint(
            1, 40
        )  # examples until it is killed; what is complete is kept
        arguments = [spec.model_dump_json(), str(tmp_path / "killed"), str(most)]
        command = [sys.executable, "-c", KILLED, *arguments]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    began = read_folder(tmp_path / "killed")
    assert pack.IN_PROGRESS_FILE in began and NOTES_FILE not in began
    pack.pack_data(spec, tmp_path / "killed")
    assert read_folder(tmp_path / "killed") == read_folder(tmp_path / "whole")
    assert are_equal(read_examples(make_records_job(tmp_path / "whole")), read_examples(spec))
    inputs = Classify().describe_inputs(make_records_job(tmp_path / "whole"))
    assert inputs == Classify().describe_inputs(spec)
    assert inputs is not None
    assert inputs["classes"] == ["cat", "dog"]
    name = next(iter(result["files"]))
    (tmp_path / "whole" / name).write_bytes(b"x")
    with pytest.raises(DataError, match=f"{name} is missing or damaged; remove"):
        pack.pack_data(spec, tmp_path / "whole")


def test_packed_table_keeps_features_labels_and_scale(tmp_path: Path) -> None:
    rows = "".join(f"{n * 7 % 10},{'ab'[n % 2]},{n / 2}\n" for n in range(30))
    (tmp_path / "t.csv").write_text(f"size,kind,y\n{rows}")
    spec = make_job(
        "regression", source="table", path=str(tmp_path / "t.csv"), label="y", eval_split=0.2
    )
    pack.pack_data(spec, tmp_path / "packed")
    repeated = make_records_job(tmp_path / "packed", "regression")
    assert are_equal(read_examples(repeated), read_examples(spec))
    assert Classify().describe_inputs(repeated) == Classify().describe_inputs(spec)
    words = r"loss\.target = class, and the records .* were packed with regression"
    with pytest.raises(SpecError, match=words):
        read_examples(make_records_job(tmp_path / "packed"))
    with pytest.raises(SpecError, match="--resize applies to images"):
        pack.pack_data(spec, tmp_path / "other", 64)


def test_resize_reduces_images_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    set_ = made_images.write_folders(tmp_path / "set", count=2)
    Image.new("RGB", (200, 80), (9, 8, 7)).save(set_ / "cat" / "wide.png")
    spec = make_job(source="images", path=str(set_), eval_split=0.2, size=8)
    pack.pack_data(spec, tmp_path / "packed", 10)
    shapes = {
        example["image"].shape for example in read_examples(make_records_job(tmp_path / "packed"))
    }
    assert shapes == {(10, 13, 3), (10, 25, 3)}  # of 12 × 16, and of 80 × 200
    assert {
        example["image"].shape
        for example in read_examples(make_records_job(tmp_path / "packed", size=8))
    } == {(8, 8, 3)}
    with pytest.raises(DataError, match="holds records with resize = 10, and now it is 12"):
        pack.pack_data(spec, tmp_path / "packed", 12)
    with pytest.raises(DataError, match="holds cat, which `launcher prepare` did not write"):
        pack.pack_data(spec, set_)
