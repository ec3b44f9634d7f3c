"""What `launcher data` says of images and tables, and that the block it proposes reads them."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.inspect_data import inspect_path
from jaxlaunch.trainer.models import classifiers
from jaxlaunch.trainer.sources.images import proposal
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import Images, ResNet, TrainSpec


@pytest.fixture
def photo_folder(tmp_path: Path) -> Path:
    root, rng = tmp_path / "photos", np.random.default_rng(0)
    for split, numbers in (("train", range(8)), ("val", range(8, 11))):
        for at in numbers:
            path = root / split / ("cat", "dog")[at % 2] / f"{at}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (20 + at, 30, 3), np.uint8)).save(path)
    (root / "train/cat/0.png").write_bytes((root / "train/cat/2.png").read_bytes())
    (root / "val/dog/9.png").write_bytes((root / "train/dog/1.png").read_bytes())
    (root / "train/dog/x.png").write_bytes(b"no image")
    (root / "notes.txt").write_text("")
    return root


def can_open(report: dict[str, Any]) -> int:
    """Opens the proposed block."""
    block = {key: report[key] for key in ("data", "loss") if key in report}
    train = TrainSpec.model_validate({"task": "classify", **block})
    source, held_out = open_source(train, "train"), open_source(train, "eval")
    assert source is not None and held_out is not None and source[0] and held_out[0]
    return len(source)


def test_images_are_counted_and_faults_reported(photo_folder: Path) -> None:
    sheet = photo_folder.parent / "sheet.png"
    result = inspect_path(str(photo_folder), None, str(sheet))
    assert result["kind"] == "images" and result["splits"] == {"train": 9, "eval": 3}
    assert result["classes"] == {"train": {"cat": 4, "dog": 5}, "eval": {"cat": 2, "dog": 1}}
    assert result["sizes"] == {"least": [21, 30], "median": [24, 30], "most": [30, 30]}
    assert result["formats"] == {"PNG RGB": 11}
    assert result["broken"]["count"] == 1
    assert "train/dog/x.png is not an image" in result["broken"]["first"][0]
    twice = result["duplicates"]
    assert twice["count"] == 2 and twice["first"][1].endswith("train/dog/1.png")  # of another split
    expected = {"source": "images", "path": str(photo_folder), "size": 24, "on_broken": "skip"}
    assert result["data"] == expected and result["batch"] == 8
    assert can_open(result) == 8
    with Image.open(sheet) as picture:
        pixels = np.asarray(picture)
        assert pixels.shape == (2 * 114 + 4, 10 * 100 + 4, 3) and (pixels[60, 10:90] != 255).any()


def propose(sizes: Any, images: int, classes: int, mode: str = "RGB") -> TrainSpec:
    """Return the train block that is proposed, after it has been checked."""
    proposed = proposal.propose_training(np.array(sizes), {mode}, images, classes)
    data = {"source": "images", "path": "photos", **proposed["data"]}
    return TrainSpec.model_validate({"task": "classify", **proposed, "data": data})


def count_parameters(train: TrainSpec) -> int:
    """Return the number of parameters of a ResNet, whose logits of one image are computed."""
    assert isinstance(train.model, ResNet) and isinstance(train.data, Images)
    config, shape = train.model, train.data.shape
    assert shape is not None and config.channels == train.data.channels

    def run(key: jax.Array) -> Any:
        model = classifiers.ResNet(config, nnx.Rngs(key))
        return nnx.state(model, nnx.Param), model(jnp.zeros((1, *shape, config.channels)))

    params, logits = jax.eval_shape(run, jax.random.key(0))
    assert logits.shape == (1, config.classes)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("sizes", "images", "classes", "mode", "shape", "millions"),
    [
        # 72 × 72 pixels, and one other image: an MLP of 224 × 224 had 77 million parameters.
        ([[72, 72]] * 9 + [[80, 72]], 200, 2, "RGB", (64, 64), (0.5, 2)),
        ([[72, 72]] * 9, 200, 2, "RGB", (72, 72), (0.5, 2)),
        ([[28, 28]], 60_000, 10, "L", (28, 28), (1, 8)),
        ([[32, 32]], 50_000, 100, "RGB", (32, 32), (1, 8)),
        ([[8, 8]], 1_800, 10, "L", (8, 8), (0.01, 0.3)),
        ([[1, 1]], 12, 2, "1", (1, 1), (0.001, 0.1)),
        ([[5, 40], [6, 30]], 12, 12, "RGB", (5, 5), (0.001, 0.1)),
        ([[48, 96]], 5_000, 4, "RGB", (48, 96), (0.1, 1)),
        ([[3000, 4000], [4000, 3000]], 300, 3, "RGB", (224, 224), (0.5, 2)),
        ([[3000, 4000]], 30_000, 3, "RGB", (224, 224), (10, 13)),
        ([[375, 500], [400, 300]], 1_280_000, 1000, "RGB", (224, 224), (20, 30)),
        ([[150, 150], [160, 170]], 4_000, 6_000, "LA", (128, 128), (10, 20)),
    ],
)
def test_proposed_model_fits_the_images(
    sizes: list[list[int]],
    images: int,
    classes: int,
    mode: str,
    shape: tuple[int, int],
    millions: tuple[float, float],
) -> None:
    train = propose(sizes, images, classes, mode)
    assert isinstance(train.data, Images) and train.data.shape == shape
    assert train.data.channels == (3 if mode == "RGB" else 1)
    assert millions[0] < count_parameters(train) / 1e6 < millions[1]
    assert 8 <= train.batch <= 128 and train.batch <= max(8, images // 8)


def test_arrays_of_many_numbers_get_a_narrow_model(tmp_path: Path) -> None:
    pixels, labels = np.zeros((12, 64, 64, 3), np.float32), np.arange(12) % 2
    np.savez(tmp_path / "images.npz", pixels=pixels, label=labels)
    assert inspect_path(str(tmp_path / "images.npz"), None, None)["model"] == {
        "classes": 2,
        "width": 256,
    }


def test_table_is_described_without_unreadable_columns(tmp_path: Path) -> None:
    rows = [f"{n},{'ab'[n % 2]},name{n},{n % 2 + 1},{n / 3:.3f}" for n in range(150)]
    rows[3] = "NA,a,name3,2,1"
    (tmp_path / "t.csv").write_text("\n".join(["size,kind,name,class,price", *rows, rows[-1]]))
    result = inspect_path(str(tmp_path / "t.csv"), None, str(tmp_path / "histogram.png"))
    assert result["splits"] == {"train": 151} and result["duplicates"]["count"] == 1
    columns = result["columns"]
    assert columns["size"]["missing"] == 1 and columns["size"]["most"] == 149.0
    assert columns["kind"]["values"] == {"a": 76, "b": 75}
    assert columns["name"]["refused"] == "has 150 different texts"
    assert result["data"] == {
        "source": "table",
        "path": str(tmp_path / "t.csv"),
        "label": "class",
        "columns": ["size", "kind", "price"],
        "missing": "mean",
        "eval_split": 0.2,
        "classes": [1, 2],
    }
    assert (result["model"], result["loss"]) == ({"classes": 2}, {"target": "class"})
    # The copy of a row is on the side of the row.
    assert 105 < can_open(result) < 137
    second = inspect_path(str(tmp_path / "t.csv"), "price", None)
    assert (second["model"], second["loss"]) == ({"classes": 1}, {"target": "regression"})
    assert 105 < can_open(second) < 137
    with Image.open(tmp_path / "histogram.png") as picture:
        assert (np.asarray(picture)[..., 2] == 181).any()


def test_percentages_are_proposed_as_classes(tmp_path: Path) -> None:
    lines = [f"{number},{10 * (number % 2 + 1)}%" for number in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["size,class", *lines]))
    report = inspect_path(str(tmp_path / "t.csv"), None, None)
    assert report["model"] == {"classes": 2} and "classes" not in report["data"]
    assert can_open(report) == 16


def test_other_files_get_a_hint(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"neither images .* nor a table .*; text is source: text"):
        inspect_path(str(tmp_path), None, None)


def test_command_prints_the_data_block(photo_folder: Path) -> None:
    command = [sys.executable, "-m", "jaxlaunch.launcher.cli.main", "data", str(photo_folder)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "train 9 images, eval 3 images" in ended.stdout
    assert "2 classes of train: cat 4, dog 5" in ended.stdout
    assert "1 image cannot be decoded:" in ended.stdout and "source: images" in ended.stdout
    assert "kind: resnet" in ended.stdout and "batch: 8" in ended.stdout
    assert "With 4 images of a class, fine-tuning a published model is better" in ended.stdout
    refused = subprocess.run(
        [*command[:-1], str(photo_folder / "notes.txt"), "-o", "json"],
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2 and "neither images" in refused.stderr
    assert json.dumps({}) not in refused.stdout


def test_command_prints_the_parts_of_a_mixture(photo_folder: Path) -> None:
    (photo_folder.parent / "t.csv").write_text("a,label\n" + "1,0\n2,1\n" * 4)
    parts = (
        "a: {source: table, weight: 3, path: t.csv, eval_split: 0.25}, b: {source: table, "
        "weight: 1, path: t.csv}"
    )
    job = photo_folder.parent / "mix.yaml"
    job.write_text(
        f"name: m\naccelerator: {{type: cpu}}\n"
        f"train: {{task: classify, data: {{source: mixture, parts: {{{parts}}}}}}}\n"
    )
    command = [sys.executable, "-m", "jaxlaunch.launcher.cli.main", "data", str(job)]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split() for line in completed.stdout.splitlines()]
    assert rows[1] == ["a", "table", "6", "2", "0.75", "1.833"]
    assert rows[2] == ["b", "table", "8", "0", "0.25", "0.375"]
    assert "in one pass over all 14 examples" in completed.stdout
    completed = subprocess.run([*command, "--label", "x"], capture_output=True, text=True)
    assert completed.returncode == 2
    assert "--label and --pictures apply to images and tables" in completed.stderr


@pytest.mark.parametrize(
    ("row", "layout", "keys"),
    [
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "sharegpt (conversations)",
            {"task": "lm", "format": "chat"},
        ),
        (
            {"prompt": "a", "completion": "b", "id": 1},
            "completion (prompt, completion)",
            {"task": "lm", "format": "completion"},
        ),
        (
            {"prompt": "a", "completion": "b", "label": True},
            "kto (prompt, completion, label)",
            {"task": "dpo", "format": "kto"},
        ),
        ({"text": "a"}, "text", {"task": "lm", "format": "text"}),
    ],
)
def test_rows_of_text_are_recognized(
    tmp_path: Path, row: dict[str, Any], layout: str, keys: dict[str, str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([row, row, {"other": 1}]))
    result = inspect_path(str(path), None, None)
    assert result["layouts"] == {layout: 2} and result["splits"] == {"train": 3}
    assert result["broken"]["count"] == 1
    assert "a.json, row 3: it has the columns other" in result["broken"]["first"][0]
    assert result["unread"] == ({"id": 2} if "id" in row else {})
    block = {"task": result["task"], "data": result["data"], "loss": result.get("loss", {})}
    train = TrainSpec.model_validate(block)
    assert {"task": train.task, "format": result["data"]["format"]} == keys


def test_unread_and_null_columns_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"question": "a", "answer": "b", "context": "c", "history": None}]))
    assert inspect_path(str(path), None, None)["unread"] == {"context": 1}
    path.write_text(json.dumps([{"text": "a"}, {"text": None}, {"text": "b", "label": 1}]))
    result = inspect_path(str(path), None, None)
    assert result["layouts"] == {"text": 2}
    assert result["broken"]["first"] == [f"{path}, row 2: its 'text' is null, not a text"]


def test_unknown_rows_of_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"q": "a", "a": "b"}]')
    with pytest.raises(DataError, match="has the columns q, a, and the known layouts are prefer"):
        inspect_path(str(tmp_path / "a.json"), None, None)
    (tmp_path / "a.json").write_text('[{"question": "a", "answer": 4}]')
    with pytest.raises(DataError, match="row 1: its 'answer' is the number 4, and the layout que"):
        inspect_path(str(tmp_path / "a.json"), None, None)
