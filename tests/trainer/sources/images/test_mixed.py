"""Images of several sets in fixed proportions: which example comes at which position, whoever reads it."""

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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder by class; the Parquet files of a hub, which number the classes in another order; packed records."""
    root = tmp_path_factory.mktemp("mixed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        made_images.folders(root / "folder", each=6)
        names = ["dog", "cat"]
        rows = [
            {"bytes": made_images.encoded(name, 20 + at), "path": None}
            for name, at in made_images.pairs()
        ]
        kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        label = pyarrow.array(
            [names.index(name) for name, _ in made_images.pairs()], pyarrow.int64()
        )
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = pyarrow.table({"image": pyarrow.array(rows, kind), "label": label})
        (root / "hub").mkdir()
        about = {"huggingface": json.dumps({"info": {"features": features}})}
        parquet.write_table(
            table.replace_schema_metadata(about), root / "hub" / "train-00000-of-00001.parquet"
        )
        block = {"source": "images", "path": str(made_images.folders(root / "raw"))}
        pack.pack_data(
            TrainSpec.model_validate({"task": "classify", "data": block}), root / "packed"
        )
        yield root


def spec(root: Path, parts: Any = None, **keys: Any) -> TrainSpec:
    placed = {
        name: {
            key: f"{root}/{value}" if key in ("path", "eval_path") else value
            for key, value in part.items()
        }
        for name, part in (PARTS if parts is None else parts).items()
    }
    data = {"source": "mixture", "size": 16, "parts": placed, **keys}
    return TrainSpec.model_validate({"task": "classify", "data": data})


def opened(root: Path, split: str = "train", **keys: Any) -> Mixture:
    found = open_source(spec(root, **keys), split)  # type: ignore[arg-type]
    assert isinstance(found, Mixture)
    return found


def test_the_examples_of_a_part_come_in_its_own_order_by_its_weight_with_one_numbering_of_the_classes(
    root: Path,
) -> None:
    mixture = opened(root, size=[12, 16])
    singles = {
        "folder": [made_images.encoded(name, at) for name, at in made_images.pairs(6)],
        "hub": [made_images.encoded(name, 20 + at) for name, at in made_images.pairs()],
        "packed": [made_images.encoded(name, at) for name, at in made_images.pairs()],
    }
    index_P = mixture.example_indexes(0, 1000, seed=SEED, shuffle=True)
    seen = dict.fromkeys(SHARES, 0)
    for position, index in enumerate(index_P.tolist()):
        name = next(name for name, numbers in mixture.evaluated_parts.items() if index in numbers)
        number, own = list(SHARES).index(name), singles[name]
        shuffle_seed = SEED * 2**16 + number
        at = order.example_indices(
            seen[name], seen[name] + 1, length=len(own), seed=shuffle_seed, shuffle=True
        )[0]
        assert index == mixture.evaluated_parts[name].start + at
        seen[name] += 1
        assert all(abs(seen[each] - share * (position + 1)) <= 1 for each, share in SHARES.items())
        if position < 60:
            example, pixels = mixture[index], np.asarray(Image.open(io.BytesIO(own[at])))
            assert np.array_equal(example["image"], pixels)
            assert int(example["label"]) == (
                0 if at < len(own) // 2 else 1
            )  # cats come first in each
    assert seen == {"folder": 500, "hub": 375, "packed": 125}
    assert mixture.epochs_by_part(1000) == {"folder": 500 / 12, "hub": 375 / 8, "packed": 125 / 8}
    assert str(mixture.locate_example(3)).endswith("folder/cat/3.png") and "image 2" in str(
        mixture.locate_example(13)
    )
    described = Classify().describe_inputs(spec(root))
    assert (
        described is not None
        and described["classes"] == ["cat", "dog"]
        and described["shape"] == [16, 16, 3]
    )


def hashes(root: Path, processes: int = 1, start: int = 0, **keys: Any) -> list[str]:
    """Of images and labels of the batch of each step, its parts read by so many processes."""
    source, size = opened(root, **keys), BATCH // processes
    read = []
    for process in range(processes):
        rows = range(process * size, (process + 1) * size)
        pipeline = Pipeline(
            source,
            Classify().example,
            batch=BATCH,
            rows=rows,
            seed=SEED,
            shuffle=True,
            prefetch=1,
            threads=2,
        )
        read.append([pipeline.read_batch(step) for step in range(start, STEPS)])
    whole = [
        [np.concatenate([part[key] for part in step]) for key in ("image", "label")]
        for step in zip(*read, strict=True)
    ]
    return [
        hashlib.sha256(b"".join(each.tobytes() for each in arrays)).hexdigest() for arrays in whole
    ]


def test_two_runs_a_resume_processes_and_workers_see_identical_batches(root: Path) -> None:
    keys = {"augment": "imagenet-vit"}
    once = hashes(root, **keys)
    assert len(set(once)) == STEPS and hashes(root, **keys) == once
    assert hashes(root, start=2, **keys) == once[2:]
    for processes in (2, 4):
        assert hashes(root, processes, **keys) == once
    try:
        assert hashes(root, workers=2, **keys) == once
    finally:  # else a later module of this process gets them, with the import path of now
        workers.shared_workers(2).close()
        workers.shared_workers.cache_clear()
    assert hashes(root) != once


def test_each_part_is_evaluated_by_itself_and_one_of_weight_0_as_a_whole(root: Path) -> None:
    parts = {
        "folder": {**PARTS["folder"], "eval_split": 0.25},
        "held": {"source": "images", "weight": 0, "path": "raw/dog/*.png"},  # a class fewer
        "hub": PARTS["hub"],
    }
    held_out = opened(root, "eval", parts=parts, augment="imagenet-resnet")
    assert {name: len(numbers) for name, numbers in held_out.evaluated_parts.items()} == {
        "folder": 3,
        "held": 4,
    }
    made = Evaluation(held_out, Classify().example, batch=2, rows=range(2), threads=1)
    seen = [
        (part, batch["label"][batch["weight"] > 0].tolist())
        for part, batch in zip(made.batch_parts, made, strict=True)
    ]
    assert seen == [("folder", [0, 0]), ("folder", [1]), ("held", [1, 1]), ("held", [1, 1])]
    train = opened(root, parts=parts)
    assert set(train.evaluated_parts) == {"folder", "hub"}
    found = looked(spec(root, parts))
    assert found["splits"] == {"train": 17, "eval": 7}
    assert found["parts"]["held"] == {
        "source": "images",
        "train": 0,
        "eval": 4,
        "share": 0.0,
        "epochs": 0.0,
    }
    assert (
        found["parts"]["folder"]["share"] == 4 / 7 and found["parts"]["folder"]["epochs"] == 10 / 9
    )


def other_classes(root: Path) -> dict[str, Any]:
    for name in ("cat", "cow"):
        (root / "other" / name).mkdir(parents=True, exist_ok=True)
        (root / "other" / name / "1.png").write_bytes(made_images.encoded("cat", 1))
    return {"folder": PARTS["folder"], "other": {"source": "images", "weight": 1, "path": "other"}}


@pytest.mark.parametrize(
    ("parts", "keys", "said"),
    [
        (
            other_classes,
            {},
            r"parts\.other has the 2 classes 'cat', 'cow', and train\.data\.parts\.folder the 2 "
            r"classes 'cat', 'dog', "
            r"of which only one has 'cow', 'dog'; list the classes of both in data\.classes",
        ),
        (
            other_classes,
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
def test_parts_that_do_not_go_together_are_one_sentence(
    root: Path, parts: Any, keys: Any, said: str
) -> None:
    (root / "cache" / "empty").mkdir(exist_ok=True)
    with pytest.raises(Exception, match=said) as refused:
        opened(root, parts=parts(root), **keys)
    assert "\n" not in str(refused.value)
    if parts is other_classes and not keys:
        both = opened(root, parts=other_classes(root), classes=["cow", "cat", "dog"])
        assert {int(both[index]["label"]) for index in range(len(both))} == {0, 1, 2}


def test_a_broken_image_of_a_part_is_named_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made_images.folders(tmp_path / "folder")
    made_images.folders(tmp_path / "raw")
    (tmp_path / "raw" / "dog" / "3.png").write_bytes(made_images.encoded("dog", 3)[:200])
    parts = {"folder": PARTS["folder"], "raw": {"source": "images", "weight": 1, "path": "raw"}}
    with pytest.raises(DataError, match=r"raw/dog/3\.png, is truncated"):
        opened(tmp_path, parts=parts)[15]
    skipping = {**parts, "raw": {**parts["raw"], "on_broken": "skip"}}
    assert len(opened(tmp_path, parts=skipping)) == 15


def test_the_job_of_the_documentation_reads_what_it_names(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[4] / "docs" / "images.md").read_text()
    block = page.partition("# mixed.yaml\n")[2].partition("```")[0]
    for name in ("photos", "drawings", "sketches"):
        made_images.folders(tmp_path / name)
    (tmp_path / "packed").symlink_to(root / "packed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = looked(TrainSpec.model_validate(yaml.safe_load(block)["train"]))
    assert {name: part["share"] for name, part in found["parts"].items()} == {
        "photos": 0.6,
        "drawings": 0.2,
        "records": 0.2,
        "sketches": 0.0,
    }
    assert found["splits"] == {"train": 7 + 8 + 8, "eval": 1 + 8}
