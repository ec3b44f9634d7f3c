"""The pixels of a run are a function of the seed and the position."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxlaunch.trainer.data import workers
from jaxlaunch.trainer.data.pipeline import Evaluation, Pipeline
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.tasks.classify import Classify

BATCH, STEPS = 8, 4  # 12 images: the run is in its third epoch


SETTINGS: dict[str, Any] = {"seed": 3, "shuffle": True, "prefetch": 1, "threads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for at in range(12):
        path = root / ("cat" if at % 2 else "dog") / f"{at}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20 + at, 30, 3), np.uint8)).save(path)
    return root


def make_spec(folder: Path, workers: int = 0, **keys: object) -> TrainSpec:
    data = {"source": "images", "path": str(folder), "size": 16, "augment": "imagenet-vit"}
    data |= {"workers": workers, **keys}
    model = {"kind": "resnet", "stem": "small", "depths": [1], "widths": [8], "classes": 2}
    return TrainSpec.model_validate(
        {"task": "classify", "model": model, "data": data, "batch": BATCH}
    )


def hash_batches(folder: Path, processes: int = 1, start: int = 0, **keys: object) -> list[str]:
    """Of the batch of each step, its parts read by so many processes."""
    train = make_spec(folder, **keys)  # type: ignore[arg-type]
    source = open_source(train, "train")
    assert source is not None
    size, parts = BATCH // processes, []
    for process in range(processes):
        rows = range(process * size, (process + 1) * size)
        pipeline = Pipeline(source, Classify().example, batch=BATCH, rows=rows, **SETTINGS)
        parts.append([pipeline.read_batch(step)["image"] for step in range(start, STEPS)])
    return [
        hashlib.sha256(np.concatenate(rows).tobytes()).hexdigest()
        for rows in zip(*parts, strict=True)
    ]


def test_pixels_are_equal_for_resumes_processes_and_workers(folder: Path) -> None:
    once = hash_batches(folder)
    assert len(set(once)) == STEPS
    assert hash_batches(folder) == once
    assert hash_batches(folder, start=2) == once[2:]  # in the middle of the second epoch
    for processes in (2, 4):
        assert hash_batches(folder, processes) == once
    for count in (2, 4):
        try:
            assert hash_batches(folder, workers=count) == once
        finally:  # else a later module of this process gets them, with the import path of now
            workers.shared_workers(count).close()
            workers.shared_workers.cache_clear()
    assert hash_batches(folder, augment=None) != once


def test_evaluation_reads_the_center_of_each_image(folder: Path) -> None:
    train = make_spec(folder, eval_path=str(folder))
    source = open_source(train, "eval")
    assert source is not None
    built = Evaluation(source, Classify().example, batch=8, rows=range(8), threads=2, seed=3)
    once, repeated = ([batch["image"].copy() for batch in built] for _ in range(2))
    assert sum(float(batch["weight"].sum()) for batch in built) == 12
    assert all(np.array_equal(image, two) for image, two in zip(once, repeated, strict=True))
