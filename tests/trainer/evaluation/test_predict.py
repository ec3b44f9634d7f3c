"""`launcher predict`: what a model says of files, without the data that it was trained on."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from safetensors.numpy import load_file

import jaxlaunch
from jaxlaunch import contract, programs
from jaxlaunch.trainer import export
from jaxlaunch.trainer.checkpoint import saved_files
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.evaluation import predict
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import read_spec
from jaxlaunch.trainer.train import build_loop
from tests.launcher.invoke import launcher
from tests.trainer.sources.images import made_images

MLP = {"kind": "mlp", "layers": 1, "width": 8}
RESNET = {
    "kind": "resnet",
    "depths": [1],
    "widths": [8],
    "stem_width": 8,
    "block": "basic",
    "classes": 2,
}
PIXELS = {"pixel_mean": [122.4, 117.3, 102.0], "pixel_std": [51.0, 76.5, 25.5]}
SIZES = [1.5, 2.0, 8.0, -3.0]
CODES = ["a1", "07", "a1", "b0"]


def trained(folder: Path, **keys: Any) -> str:
    """The checkpoints of a run of three steps."""
    train = {"task": "classify", "batch": 8, "steps": 3, "optimizer": {"lr": 0.05}, **keys}
    spec, task = read_spec({contract.TRAIN_SPEC: json.dumps(train)})
    build_loop(spec, task, RunContext(run_dir=str(folder)), Stop(), Progress(None)).run()
    return str(folder / "checkpoints")


def of_rows(folder: Path, target: str, label: str, classes: int) -> str:
    """Checkpoints of a table that is gone: `size`, `code`, whose texts are digits, `weight` and `kind`."""
    pairs = zip(SIZES, CODES, strict=True)
    lines = [
        f"{size},{code},{size * 2 + 1},{'yes' if size > 1 else 'no'}" for size, code in pairs
    ] * 4
    (folder / "t.csv").write_text("\n".join(["size,code,weight,kind", *lines, "0,x,1,no"]))
    data = {
        "source": "table",
        "path": str(folder / "t.csv"),
        "label": label,
        "columns": ["size", "code"],
    }
    found = trained(folder, model=MLP | {"classes": classes}, data=data, loss={"target": target})
    (folder / "t.csv").unlink()
    return found


def jaxlaunch_model(checkpoints: str) -> jaxlaunch.TaskModel:
    """The model of checkpoints, as a prediction has it."""
    stored = saved_files.read_inputs(checkpoints)
    assert stored is not None
    return predict.load_model(programs.Predict(folder=checkpoints, files=()), stored, print)


def by_hand(checkpoints: str, sizes: list[float], codes: list[str]) -> np.ndarray:
    """What the network makes of rows, in float64."""
    size_N = np.array([*SIZES * 4, 0.0])
    x_NF = np.array(
        [
            [
                (size - size_N.mean()) / size_N.std(),
                *(code == each for each in ("07", "a1", "b0", "x")),
            ]
            for size, code in zip(sizes, codes, strict=True)
        ]
    )
    arrays = jaxlaunch_model(checkpoints).params
    named = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    hidden = np.maximum(x_NF @ named["layers.0.kernel"] + named["layers.0.bias"], 0)
    return np.asarray(hidden @ named["head.kernel"] + named["head.bias"])


def test_rows_get_the_labels_of_a_network_whose_table_is_gone(tmp_path: Path) -> None:
    folder = of_rows(tmp_path, "class", "kind", 2)
    (tmp_path / "new.csv").write_text("code,other,size\n07,1,3\n07,1,\n10,1,much\n07,1,-1e3\n")
    ask = programs.Predict(
        folder=folder, files=(str(tmp_path / "new.csv"),), top=2, output=str(tmp_path / "o.csv")
    )
    with pytest.raises(
        DataError, match=r"new.csv, row 2: its 'size' has no value; fix or remove it, or leave such"
    ):
        predict.predict_files(ask)
    assert not list(tmp_path.glob("o.csv*"))
    found = predict.predict_files(programs.Predict(**{**vars(ask), "skip_broken": True}))
    assert (found["examples"], found["skipped"], found["step"]) == (2, 2, 3)
    assert "row 3: its 'size' is 'much', and training has numbers there" in found["notes"][-1]
    with (tmp_path / "o.csv").open() as file:
        rows = list(csv.DictReader(file))
    logits = by_hand(folder, [3, -1e3], ["07", "07"])
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert [row["row"] for row in rows] == ["1", "4"]
    for row, chance in zip(rows, chances, strict=True):
        first, second = np.argsort(-chance)
        assert (row["label"], row["label_2"]) == (("no", "yes")[first], ("no", "yes")[second])
        assert float(row["probability"]) == pytest.approx(chance[first], rel=1e-4)
        assert float(row["probability_2"]) == pytest.approx(chance[second], rel=1e-4, abs=1e-7)

    made = export.export(folder, str(tmp_path / "model"))
    assert made["architecture"] == "MLP" and made["parameters"] == 5 * 8 + 8 + 8 * 2 + 2
    asked = {**vars(ask), "folder": str(tmp_path / "model"), "skip_broken": True, "output": None}
    again = predict.predict_files(programs.Predict(**asked))
    assert [row["label_2"] for row in again["rows"]] == [row["label_2"] for row in rows] and again[
        "step"
    ] is None
    assert [row["probability"] for row in again["rows"]] == pytest.approx(
        chances.max(-1).tolist(), rel=1e-4
    )
    arrays = load_file(tmp_path / "model" / "model.safetensors")
    hidden = np.maximum(
        np.ones((1, 5), np.float32) @ arrays["layers.0.kernel"] + arrays["layers.0.bias"], 0
    )
    wanted = jaxlaunch_model(folder).predict({"features": np.ones((1, 5), np.float32)})
    np.testing.assert_allclose(
        hidden @ arrays["head.kernel"] + arrays["head.bias"], wanted, rtol=1e-5
    )
    (tmp_path / "model" / "config.json").write_text('{"model_type": "jaxlaunch_mlp", "layers": 2}')
    with pytest.raises(SpecError, match=r"model: config.json: width "):
        predict.predict_files(programs.Predict(**asked))


def test_a_number_is_predicted_in_the_unit_of_its_label(tmp_path: Path) -> None:
    folder = of_rows(tmp_path, "regression", "weight", 1)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a.jsonl").write_text(
        '{"size": 3, "code": "07"}\n{"size": 4.5, "code": "unknown"}\n'
    )
    out = tmp_path / "o.parquet"
    predict.predict_files(
        programs.Predict(folder=folder, files=(str(tmp_path / "new"),), output=str(out))
    )
    weights = np.array([*(size * 2 + 1 for size in SIZES * 4), 1.0])
    wanted = by_hand(folder, [3, 4.5], ["07", "unknown"])[:, 0] * weights.std() + weights.mean()
    assert [row["weight"] for row in parquet.read_table(out).to_pylist()] == pytest.approx(
        wanted.tolist(), rel=1e-4
    )


def test_images_are_seen_as_an_evaluation_sees_them_by_a_checkpoint_and_by_its_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = made_images.write_folders(tmp_path / "photos", 8)
    data = {
        "source": "images",
        "path": str(photos),
        "size": 8,
        "augment": {"flip": 0.5, "eval_crop": 0.75},
    }
    folder = trained(tmp_path / "run", model=RESNET | PIXELS, data=data)
    shutil.rmtree(photos)
    new = made_images.write_folders(tmp_path / "new", 2)
    (new / "dog" / "2.jpg").write_text("no image")
    with pytest.raises(DataError, match=r"dog/2.jpg is not an image of JPEG"):
        predict.predict_files(programs.Predict(folder=folder, files=(str(new),)))
    found = predict.predict_files(
        programs.Predict(folder=folder, files=(str(new), "nowhere.png"), skip_broken=True)
    )
    assert found["skipped"] == 2 and "nowhere.png does not exist" in " ".join(found["notes"])
    names = [f"{new}/{name}/{number}.png" for name, number in made_images.make_pairs(2)]
    assert [row["file"] for row in found["rows"]] == names
    high, wide = 12 * 0.75, 12 * 0.75  # of 12 × 16: a square in the middle
    box = ((16 - wide) / 2, (12 - high) / 2, (16 + wide) / 2, (12 + high) / 2)
    images = [Image.open(name).resize((8, 8), Image.Resampling.BILINEAR, box=box) for name in names]
    logits = np.asarray(
        jaxlaunch_model(folder).predict(np.stack([np.asarray(image) for image in images])),
        np.float64,
    )
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert [row["probability"] for row in found["rows"]] == pytest.approx(
        chances.max(-1).tolist(), rel=1e-5
    )
    assert [row["label"] for row in found["rows"]] == [
        ("cat", "dog")[at] for at in chances.argmax(-1)
    ]

    held = tmp_path / "held"
    held.mkdir()
    data = [Path(name).read_bytes() for name in names]
    made_images.write_tar(
        held / "a.tar", {f"d/{at}.png": each for at, each in enumerate(data)} | {"d/0.cls": b"cat"}
    )
    rows = [{"bytes": each, "path": None} for each in [*data, b"no image"]]
    parquet.write_table(pyarrow.table({"id": range(len(rows)), "image": rows}), held / "b.parquet")
    with pytest.raises(DataError, match=rf"b.parquet, row {len(rows)} is not an image of JPEG"):
        predict.predict_files(programs.Predict(folder=folder, files=(str(held),)))
    again = predict.predict_files(
        programs.Predict(folder=folder, files=(str(held),), skip_broken=True)
    )
    assert [row["file"] for row in again["rows"]] == [
        *(f"{held}/a.tar, d/{at}.png" for at in range(len(data))),
        *(f"{held}/b.parquet, row {at + 1}" for at in range(len(data))),
    ]
    wanted = [row["probability"] for row in found["rows"]]
    assert [row["probability"] for row in again["rows"]] == pytest.approx(wanted * 2, rel=1e-5)

    export.export(folder, str(tmp_path / "model"))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["id2label"] == {
        "0": "cat",
        "1": "dog",
    }
    said = json.loads((tmp_path / "model" / "preprocessor_config.json").read_text())
    assert said["image_mean"] == pytest.approx([0.48, 0.46, 0.4]) and said[
        "image_std"
    ] == pytest.approx([0.2, 0.3, 0.1])
    assert (said["size"], said["crop_size"]) == ({"shortest_edge": 11}, {"height": 8, "width": 8})
    assert (said["resample"], said["rescale_factor"] * 255) == (2, pytest.approx(1.0))
    out = tmp_path / "labels.jsonl"
    left = launcher(
        capsys,
        monkeypatch,
        "predict",
        str(tmp_path / "model"),
        str(new),
        "-o",
        str(out),
        "--skip-broken",
    )
    assert left.code == 0 and "labels.jsonl: 4 predictions, 1 left out" in left.err, left.err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["file"] for row in rows] == names
    assert [row["probability"] for row in rows] == pytest.approx(chances.max(-1).tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"output": "o.txt"}, "o.txt has an unknown ending; .csv, .jsonl, .parquet can be written"),
        ({"output": "no/o.csv"}, r"no/o.csv cannot be written: .* is not a folder"),
        ({"output": "gs://b/o.csv"}, "is not a local file"),
        ({}, "does not say how files become what its model reads"),
    ],
)
def test_what_cannot_be_predicted_is_said_before_anything_is_loaded(
    keys: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=says):
        predict.predict_files(programs.Predict(folder=str(tmp_path), files=("a.png",), **keys))


def test_a_program_gets_the_model_of_a_run_whose_data_is_gone(tmp_path: Path) -> None:
    folder = of_rows(tmp_path, "regression", "weight", 1)
    data = {"source": "table", "path": "t.csv", "label": "weight", "columns": ["size", "code"]}
    train = {
        "task": "classify",
        "batch": 8,
        "model": MLP | {"classes": 1},
        "loss": {"target": "regression"},
    }
    job = {
        "name": "run",
        "accelerator": {"type": "cpu", "per_host": 8},
        "train": train | {"data": data},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    (tmp_path / ".lock").touch()
    loaded = jaxlaunch.load(str(tmp_path))
    assert isinstance(loaded, jaxlaunch.TaskModel) and folder.endswith("checkpoints")
    assert loaded.predict({"features": np.zeros((3, 5), np.float32)}).shape == (3, 1)
