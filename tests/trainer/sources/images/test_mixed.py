"""Mixtures of images: the example at each position, for any reader."""

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import yaml
from PIL import Image
from pyarrow import parquet

from jaxlaunch.trainer.data import order, workers
from jaxlaunch.trainer.data.pipeline import Evaluation, Pipeline
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.inspect_data import inspect_mixture as looked
from jaxlaunch.trainer.prepare import pack
from jaxlaunch.trainer.sources.mixture import Mixture
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.tasks.classify import Classify
from tests.trainer.sources.images import made_images

BATCH, STEPS, SEED = 8, 5, 3  # of 12 + 8 + 8 images: the smallest part is in its second epoch
SHARES = {"folder": 0.5, "hub": 0.375, "packed": 0.125}
PARTS = {
    "folder": {"source": "images", "weight": 4, "path": "folder"},
    "hub": {"source": "images", "weight": 3, "path": "hub"},
    "packed": {"source": "array_record", "weight": 1, "path": "packed/train-*.array_record"},
}


SETTINGS: dict[str, Any] = {"seed": SEED, "shuffle": True, "prefetch": 1, "threads": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write a class folder, Parquet files with another class order, and packed records."""
    root = tmp_path_factory.mktemp("mixed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        made_images.write_folders(root / "folder", count=6)
        names = ["dog", "cat"]
        rows = [
            {"bytes": made_images.encode_image(name, 20 + at), "path": None}
            for name, at in made_images.make_pairs()
        ]
        kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        label = pyarrow.array(
            [names.index(name) for name, _ in made_images.make_pairs()], pyarrow.int64()
        )
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = pyarrow.table({"image": pyarrow.array(rows, kind), "label": label})
        (root / "hub").mkdir()
        about = {"huggingface": json.dumps({"info": {"features": features}})}
        parquet.write_table(
            table.replace_schema_metadata(about), root / "hub" / "train-00000-of-00001.parquet"
        )
        block = {"source": "images", "path": str(made_images.write_folders(root / "raw"))}
        pack.pack_data(
            TrainSpec.model_validate({"task": "classify", "data": block}), root / "packed"
        )
        yield root


def make_spec(root: Path, parts: Any = None, **keys: Any) -> TrainSpec:
    placed = {
        name: {
            key: f"{root}/{value}" if key in ("path", "eval_path") else value
            for key, value in part.items()
        }
        for name, part in (PARTS if parts is None else parts).items()
    }
    data = {"source": "mixture", "size": 16, "parts": placed, **keys}
    return TrainSpec.model_validate({"task": "classify", "data": data})


def open_mixture(root: Path, split: str = "train", **keys: Any) -> Mixture:
    result = open_source(make_spec(root, **keys), split)  # type: ignore[arg-type]
    assert isinstance(result, Mixture)
    return result


def test_parts_keep_their_order_weight_and_common_class_numbers(root: Path) -> None:
    mixture = open_mixture(root, size=[12, 16])
    singles = {
        "folder": [made_images.encode_image(name, at) for name, at in made_images.make_pairs(6)],
        "hub": [made_images.encode_image(name, 20 + at) for name, at in made_images.make_pairs()],
        "packed": [made_images.encode_image(name, at) for name, at in made_images.make_pairs()],
    }
    index_P = mixture.example_indices(0, 1000, seed=SEED, shuffle=True)
    observed = dict.fromkeys(SHARES, 0)
    for position, index in enumerate(index_P.tolist()):
        name = next(name for name, numbers in mixture.evaluated_parts.items() if index in numbers)
        number, own_items = list(SHARES).index(name), singles[name]
        shuffle_seed = SEED * 2**16 + number
        at = order.example_indices(
            observed[name],
            observed[name] + 1,
            length=len(own_items),
            seed=shuffle_seed,
            shuffle=True,
        )[0]
        assert index == mixture.evaluated_parts[name].start + at
        observed[name] += 1
        assert all(
            abs(observed[item] - share * (position + 1)) <= 1 for item, share in SHARES.items()
        )
        if position < 60:
            example, pixels = mixture[index], np.asarray(Image.open(io.BytesIO(own_items[at])))
            assert np.array_equal(example["image"], pixels)
            assert int(example["label"]) == (
                0 if at < len(own_items) // 2 else 1
            )  # cats come first in each
    assert observed == {"folder": 500, "hub": 375, "packed": 125}
    assert mixture.epochs_by_part(1000) == {"folder": 500 / 12, "hub": 375 / 8, "packed": 125 / 8}
    assert str(mixture.locate_example(3)).endswith("folder/cat/3.png")
    assert "image 2" in str(mixture.locate_example(13))
    described = Classify().describe_inputs(make_spec(root))
    assert described is not None
    assert described["classes"] == ["cat", "dog"]
    assert described["shape"] == [16, 16, 3]


def hash_batches(root: Path, processes: int = 1, start: int = 0, **keys: Any) -> list[str]:
    """Of images and labels of the batch of each step, its parts read by so many processes."""
    source, size = open_mixture(root, **keys), BATCH // processes
    read = []
    for process in range(processes):
        rows = range(process * size, (process + 1) * size)
        pipeline = Pipeline(source, Classify().example, batch=BATCH, rows=rows, **SETTINGS)
        read.append([pipeline.read_batch(step) for step in range(start, STEPS)])
    whole = [
        [np.concatenate([part[key] for part in step]) for key in ("image", "label")]
        for step in zip(*read, strict=True)
    ]
    return [
        hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
        for arrays in whole
    ]


def test_batches_are_equal_for_resumes_processes_and_workers(root: Path) -> None:
    keys = {"augment": "imagenet-vit"}
    once = hash_batches(root, **keys)
    assert len(set(once)) == STEPS and hash_batches(root, **keys) == once
    assert hash_batches(root, start=2, **keys) == once[2:]
    for processes in (2, 4):
        assert hash_batches(root, processes, **keys) == once
    try:
        assert hash_batches(root, workers=2, **keys) == once
    finally:  # else a later module of this process gets them, with the import path of now
        workers.shared_workers(2).close()
        workers.shared_workers.cache_clear()
    assert hash_batches(root) != once


def test_parts_are_evaluated_separately_and_weight_zero_as_a_whole(root: Path) -> None:
    parts = {
        "folder": {**PARTS["folder"], "eval_split": 0.25},
        "held": {"source": "images", "weight": 0, "path": "raw/dog/*.png"},  # a class fewer
        "hub": PARTS["hub"],
    }
    held_out = open_mixture(root, "eval", parts=parts, augment="imagenet-resnet")
    actual = {name: len(numbers) for name, numbers in held_out.evaluated_parts.items()}
    held = actual["folder"]
    assert held in (2, 3, 4) and actual == {"folder": held, "held": 4}
    built = Evaluation(held_out, Classify().example, batch=2, rows=range(2), threads=1)
    observed = [
        (part, batch["label"][batch["weight"] > 0].tolist())
        for part, batch in zip(built.batch_parts, built, strict=True)
    ]
    assert [labels for part, labels in observed if part == "held"] == [[1, 1], [1, 1]]
    folder = [label for part, labels in observed if part == "folder" for label in labels]
    # Both classes have an image that is held out.
    assert len(folder) == held and {*folder} == {0, 1}
    train = open_mixture(root, parts=parts)
    assert set(train.evaluated_parts) == {"folder", "hub"}
    result = looked(make_spec(root, parts))
    assert result["splits"] == {"train": 20 - held, "eval": held + 4}
    actual = result["parts"]["held"]
    assert actual == {"source": "images", "train": 0, "eval": 4, "share": 0.0, "epochs": 0.0}
    assert result["parts"]["folder"]["share"] == 4 / 7
    assert result["parts"]["folder"]["epochs"] == 10 / (12 - held)


def write_other_classes(root: Path) -> dict[str, Any]:
    for name in ("cat", "cow"):
        (root / "other" / name).mkdir(parents=True, exist_ok=True)
        (root / "other" / name / "1.png").write_bytes(made_images.encode_image("cat", 1))
    return {"folder": PARTS["folder"], "other": {"source": "images", "weight": 1, "path": "other"}}


@pytest.mark.parametrize(
    ("parts", "keys", "message"),
    [
        (
            write_other_classes,
            {},
            r"parts\.other has the 2 classes 'cat', 'cow', and train\.data\.parts\.folder the 2 "
            r"classes 'cat', 'dog', "
            r"of which only one has 'cow', 'dog'; list the classes of both in data\.classes",
        ),
        (
            write_other_classes,
            {"classes": ["cat", "dog"]},
            "parts.other: .*'cow' is not among the 2 classes",
        ),
        (
            lambda root: PARTS,
            {"classes": ["dog", "cat"]},
            r"parts\.packed has .* train\.data\.classes .* in another order; pack it again with "
            r"data\.classes",
        ),
        (
            lambda root: {"a": {**PARTS["hub"], "path": "gone"}},
            {},
            r"parts\.a: data\.path .*gone' matches no file",
        ),
        (
            lambda root: {"a": {**PARTS["hub"], "path": "cache/empty"}},
            {},
            r"parts\.a: .*empty holds no images",
        ),
        (
            lambda root: {"packed": PARTS["packed"], "a": {**PARTS["folder"], "path": "raw"}},
            {"size": None, "channels": 1},
            r"parts\.packed has images of uint8\[12, 16, 3\], and .*parts\.a of uint8\[12, "
            r"16, 1\]; set",
        ),
        (
            lambda root: {"hub": PARTS["hub"], "a": {**PARTS["folder"], "weight": 1e-9}},
            {},
            r"parts\.a\.weight = 1e-09 is less than one example in 100000",
        ),
    ],
)
def test_incompatible_parts_are_reported(root: Path, parts: Any, keys: Any, message: str) -> None:
    (root / "cache" / "empty").mkdir(exist_ok=True)
    with pytest.raises(Exception, match=message) as refused:
        open_mixture(root, parts=parts(root), **keys)
    assert "\n" not in str(refused.value)
    if parts is write_other_classes and not keys:
        pair = open_mixture(root, parts=write_other_classes(root), classes=["cow", "cat", "dog"])
        assert {int(pair[index]["label"]) for index in range(len(pair))} == {0, 1, 2}


def test_broken_image_of_a_part_is_reported_or_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made_images.write_folders(tmp_path / "folder")
    made_images.write_folders(tmp_path / "raw")
    (tmp_path / "raw" / "dog" / "3.png").write_bytes(made_images.encode_image("dog", 3)[:200])
    parts = {"folder": PARTS["folder"], "raw": {"source": "images", "weight": 1, "path": "raw"}}
    with pytest.raises(DataError, match=r"raw/dog/3\.png, is truncated"):
        open_mixture(tmp_path, parts=parts)[15]
    skipping = {**parts, "raw": {**parts["raw"], "on_broken": "skip"}}
    assert len(open_mixture(tmp_path, parts=skipping)) == 15


def test_documented_job_opens(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[4] / "docs" / "images.md").read_text()
    block = page.partition("# mixed.yaml\n")[2].partition("```")[0]
    for name in ("photos", "drawings", "sketches"):
        made_images.write_folders(tmp_path / name)
    (tmp_path / "packed").symlink_to(root / "packed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = looked(TrainSpec.model_validate(yaml.safe_load(block)["train"]))
    actual = {name: part["share"] for name, part in result["parts"].items()}
    assert actual == {"photos": 0.6, "drawings": 0.2, "records": 0.2, "sketches": 0.0}
    assert result["splits"] == {"train": 7 + 8 + 8, "eval": 1 + 8}
