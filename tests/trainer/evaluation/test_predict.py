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
from tests.trainer import references
from tests.trainer.references import tensors
from tests.trainer.sources.images import made_images

MLP_SIZES = {"layers": 1, "width": 8, "classes": 2}
MLP = {"kind": "mlp", "layers": 1, "width": 8}
RESNET = {"kind": "resnet", "depths": [1], "widths": [8], "stem_width": 8, "classes": 2}
PIXELS = {"pixel_mean": [122.4, 117.3, 102.0], "pixel_std": [51.0, 76.5, 25.5]}
TABLE = {"source": "table", "columns": ["size", "code"]}
SIZES = [1.5, 2.0, 8.0, -3.0]
CODES = ["a1", "07", "a1", "b0"]


def train_model(folder: Path, **keys: Any) -> str:
    """The checkpoints of a run of three steps."""
    train = {"task": "classify", "batch": 8, "steps": 3, "optimizer": {"lr": 0.05}, **keys}
    spec, task = read_spec({contract.TRAIN_SPEC: json.dumps(train)})
    build_loop(spec, task, RunContext(run_dir=str(folder)), Stop(), Progress(None)).run()
    return str(folder / "checkpoints")


def read_rows(folder: Path, target: str, label: str, classes: int) -> str:
    """Return the checkpoints of a run on a table of sizes and codes, which is deleted."""
    pairs = zip(SIZES, CODES, strict=True)
    rows = [(size, code, size * 2 + 1, "yes" if size > 1 else "no") for size, code in pairs] * 4
    lines = ["size,code,weight,kind", *(",".join(map(str, row)) for row in rows), "0,x,1,no"]
    (folder / "t.csv").write_text("\n".join(lines))
    data = TABLE | {"path": str(folder / "t.csv"), "label": label}
    model = MLP | {"classes": classes}
    checkpoints = train_model(folder, model=model, data=data, loss={"target": target})
    (folder / "t.csv").unlink()
    return checkpoints


def jaxlaunch_model(checkpoints: str) -> jaxlaunch.TaskModel:
    """The model of checkpoints, as a prediction has it."""
    stored = saved_files.read_inputs(checkpoints)
    assert stored is not None
    return predict.load_model(programs.Predict(folder=checkpoints, files=()), stored, print)


def reference_probabilities(checkpoints: str, sizes: list[float], codes: list[str]) -> np.ndarray:
    """What the network makes of rows, in float64."""
    size_N = np.array([*SIZES * 4, 0.0])
    scaled = [(size - size_N.mean()) / size_N.std() for size in sizes]
    one_hot = [[code == item for item in ("07", "a1", "b0", "x")] for code in codes]
    x_NF = np.column_stack([scaled, np.array(one_hot, float)])
    arrays = jaxlaunch_model(checkpoints).params
    named = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    hidden = np.maximum(x_NF @ named["layers.0.kernel"] + named["layers.0.bias"], 0)
    return np.asarray(hidden @ named["head.kernel"] + named["head.bias"])


def load_classifier(folder: Path) -> jaxlaunch.TaskModel:
    """Return what `jaxlaunch.load` makes of a folder."""
    loaded = jaxlaunch.load(str(folder))
    assert isinstance(loaded, jaxlaunch.TaskModel)
    return loaded


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def test_rows_are_predicted_without_the_training_table(tmp_path: Path) -> None:
    folder = read_rows(tmp_path, "class", "kind", 2)
    (tmp_path / "new.csv").write_text("code,other,size\n07,1,3\n07,1,\n10,1,much\n07,1,-1e3\n")
    files, output = (str(tmp_path / "new.csv"),), str(tmp_path / "o.csv")
    ask = programs.Predict(folder=folder, files=files, top=2, output=output)
    with pytest.raises(
        DataError, match="new.csv, row 2: its 'size' has no value; fix or remove it, or leave such"
    ):
        predict.predict_files(ask)
    assert not list(tmp_path.glob("o.csv*"))
    actual = predict.predict_files(programs.Predict(**{**vars(ask), "skip_broken": True}))
    assert (actual["examples"], actual["skipped"], actual["step"]) == (2, 2, 3)
    assert "row 3: its 'size' is 'much', and training has numbers there" in actual["notes"][-1]
    with (tmp_path / "o.csv").open() as file:
        rows = list(csv.DictReader(file))
    logits = reference_probabilities(folder, [3, -1e3], ["07", "07"])
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert [row["row"] for row in rows] == ["1", "4"]
    for row, chance in zip(rows, chances, strict=True):
        first, second = np.argsort(-chance)
        assert (row["label"], row["label_2"]) == (("no", "yes")[first], ("no", "yes")[second])
        assert float(row["probability"]) == pytest.approx(chance[first], rel=1e-4)
        assert float(row["probability_2"]) == pytest.approx(chance[second], rel=1e-4, abs=1e-7)

    outputs = export.export(folder, str(tmp_path / "model"))
    assert outputs["architecture"] == "MLP" and outputs["parameters"] == 5 * 8 + 8 + 8 * 2 + 2
    requests = {**vars(ask), "folder": str(tmp_path / "model"), "skip_broken": True, "output": None}
    repeated = predict.predict_files(programs.Predict(**requests))
    assert repeated["step"] is None
    assert column(repeated["rows"], "label_2") == column(rows, "label_2")
    assert column(repeated["rows"], "probability") == pytest.approx(chances.max(-1), rel=1e-4)
    arrays = load_file(tmp_path / "model" / "model.safetensors")
    x_NF = np.ones((1, 5), np.float32)
    hidden = np.maximum(x_NF @ arrays["layers.0.kernel"] + arrays["layers.0.bias"], 0)
    logits = hidden @ arrays["head.kernel"] + arrays["head.bias"]
    expected = jaxlaunch_model(folder).predict({"features": x_NF})
    np.testing.assert_allclose(logits, expected, rtol=1e-5)
    loaded = load_classifier(tmp_path / "model")
    np.testing.assert_allclose(loaded.predict({"features": x_NF}), logits, rtol=1e-5)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "jaxlaunch_mlp", "layers": 2}')
    with pytest.raises(SpecError, match=r"model: config.json: width "):
        predict.predict_files(programs.Predict(**requests))


def test_regression_predicts_in_the_unit_of_the_label(tmp_path: Path) -> None:
    folder = read_rows(tmp_path, "regression", "weight", 1)
    (tmp_path / "new").mkdir()
    lines = '{"size": 3, "code": "07"}\n{"size": 4.5, "code": "unknown"}\n'
    (tmp_path / "new" / "a.jsonl").write_text(lines)
    files, out = (str(tmp_path / "new"),), tmp_path / "o.parquet"
    predict.predict_files(programs.Predict(folder=folder, files=files, output=str(out)))
    weights = np.array([*(size * 2 + 1 for size in SIZES * 4), 1.0])
    outputs = reference_probabilities(folder, [3, 4.5], ["07", "unknown"])[:, 0]
    expected = outputs * weights.std() + weights.mean()
    rows = parquet.read_table(out).to_pylist()
    assert column(rows, "weight") == pytest.approx(expected, rel=1e-4)


def test_published_classifier_without_a_tokenizer_does_not_read_bytes(tmp_path: Path) -> None:
    names = ["BertForSequenceClassification"]
    config = {"model_type": "bert", "vocab_size": 300, "architectures": names}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    options = programs.Predict(folder=str(tmp_path), files=(str(tmp_path / "a.jsonl"),))
    with pytest.raises(SpecError, match=r"has no tokenizer\.json, by which its texts"):
        predict.predict_files(options)


def check_image_export(model: Path) -> None:
    """Check the labels and the preprocessing in the files of an exported model of images."""
    config = json.loads((model / "config.json").read_text())
    assert config["id2label"] == {"0": "cat", "1": "dog"}
    keys = json.loads((model / "preprocessor_config.json").read_text())
    assert keys["image_mean"] == pytest.approx([0.48, 0.46, 0.4])
    assert keys["image_std"] == pytest.approx([0.2, 0.3, 0.1])
    assert keys["size"] == {"shortest_edge": 10}
    assert keys["crop_size"] == {"height": 8, "width": 8}
    assert (keys["resample"], keys["rescale_factor"] * 255) == (2, pytest.approx(1.0))


def check_loaded(model: Path, checkpoints: Path, pixels: Any, logits: np.ndarray) -> None:
    """Check what `jaxlaunch.load` makes of an export, and of checkpoints without their job."""
    for place in (model, checkpoints, checkpoints / "3"):
        loaded = load_classifier(place)
        np.testing.assert_allclose(loaded.predict(pixels), logits, rtol=1e-5, atol=1e-6)
        assert loaded.step == (None if place == model else 3)
    with pytest.raises(SpecError, match="evaluate the run that it was exported from"):
        load_classifier(model).evaluate()
    with pytest.raises(SpecError, match="holds neither steps nor a moving average"):
        jaxlaunch.load(str(model), step=3)


def check_damaged_archives(
    folder: str, held: Path, images: list[bytes], expected: list[float]
) -> None:
    """Check that a file that ends early is refused or left out, and that others are read."""
    table = pyarrow.table({"image": images})
    with pyarrow.ipc.new_stream(str(held / "c.arrow"), table.schema) as stream:
        stream.write_table(table)
    cut = held.parent / "cut"
    cut.mkdir()
    for path in held.iterdir():
        content = path.read_bytes()
        (cut / path.name).write_bytes(content[: len(content) // 2])
        request = programs.Predict(folder=folder, files=(f"{cut}/{path.name}",))
        with pytest.raises(DataError, match=rf"{path.name} is truncated"):
            predict.predict_files(request)
    files = (f"{held}/c.arrow", str(cut))
    rest = predict.predict_files(programs.Predict(folder=folder, files=files, skip_broken=True))
    assert rest["skipped"] == 3
    rows = rest["rows"][: len(images)]
    names = [f"{held}/c.arrow, row {index + 1}" for index in range(len(images))]
    assert column(rows, "file") == names
    assert column(rows, "probability") == pytest.approx(expected, rel=1e-5)


def test_images_are_transformed_as_in_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = made_images.write_folders(tmp_path / "photos", 8)
    augment = {"flip": 0.5, "eval_crop": 0.75}
    data = {"source": "images", "path": str(photos), "size": 8, "augment": augment}
    folder = train_model(tmp_path / "run", model=RESNET | PIXELS, data=data)
    shutil.rmtree(photos)
    new = made_images.write_folders(tmp_path / "new", 2)
    (new / "dog" / "2.jpg").write_text("no image")
    with pytest.raises(DataError, match=r"dog/2.jpg is not an image of JPEG"):
        predict.predict_files(programs.Predict(folder=folder, files=(str(new),)))
    files = (str(new), "nowhere.png")
    actual = predict.predict_files(programs.Predict(folder=folder, files=files, skip_broken=True))
    assert actual["skipped"] == 2 and "nowhere.png does not exist" in " ".join(actual["notes"])
    names = [f"{new}/{name}/{number}.png" for name, number in made_images.make_pairs(2)]
    assert [row["file"] for row in actual["rows"]] == names
    # As torchvision does: 12 × 16 becomes 10 × 13, of which 8 × 8 are taken from row 1, column 2.
    box = (2 * 16 / 13, 1 * 12 / 10, 10 * 16 / 13, 9 * 12 / 10)
    images = [Image.open(name).resize((8, 8), Image.Resampling.BILINEAR, box=box) for name in names]
    pixels = np.stack([np.asarray(image) for image in images])
    logits = np.asarray(jaxlaunch_model(folder).predict(pixels), np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert column(actual["rows"], "probability") == pytest.approx(chances.max(-1), rel=1e-5)
    labels = [("cat", "dog")[index] for index in chances.argmax(-1)]
    assert column(actual["rows"], "label") == labels

    held = tmp_path / "held"
    held.mkdir()
    data = [Path(name).read_bytes() for name in names]
    members = {f"d/{index}.png": item for index, item in enumerate(data)}
    made_images.write_tar(held / "a.tar", members | {"d/0.cls": b"cat"})
    rows = [{"bytes": item, "path": None} for item in [*data, b"no image"]]
    parquet.write_table(pyarrow.table({"id": range(len(rows)), "image": rows}), held / "b.parquet")
    with pytest.raises(DataError, match=rf"b.parquet, row {len(rows)} is not an image of JPEG"):
        predict.predict_files(programs.Predict(folder=folder, files=(str(held),)))
    request = programs.Predict(folder=folder, files=(str(held),), skip_broken=True)
    repeated = predict.predict_files(request)
    members = [f"{held}/a.tar, d/{index}.png" for index in range(len(data))]
    rows = [f"{held}/b.parquet, row {index + 1}" for index in range(len(data))]
    assert column(repeated["rows"], "file") == members + rows
    expected = column(actual["rows"], "probability") * 2
    assert column(repeated["rows"], "probability") == pytest.approx(expected, rel=1e-5)

    check_damaged_archives(folder, held, data, column(actual["rows"], "probability"))

    model, out = tmp_path / "model", tmp_path / "labels.jsonl"
    export.export(folder, str(model))
    check_image_export(model)
    check_loaded(model, Path(folder), pixels, logits)
    arguments = ["predict", str(model), str(new), "-o", str(out), "--skip-broken"]
    result = launcher(capsys, monkeypatch, *arguments)
    assert result.code == 0 and "labels.jsonl: 4 predictions, 1 left out" in result.err, result.err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert column(rows, "file") == names
    assert column(rows, "probability") == pytest.approx(chances.max(-1), rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"output": "o.txt"}, "o.txt has an unknown ending; .csv, .jsonl, .parquet can be written"),
        ({"output": "no/o.csv"}, r"no/o.csv cannot be written: .* is not a folder"),
        ({"output": "gs://b/o.csv"}, "is not a local file"),
        ({}, "which describes the files"),
    ],
)
def test_invalid_predictions_are_rejected_before_loading(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=message):
        predict.predict_files(programs.Predict(folder=str(tmp_path), files=("a.png",), **keys))


def test_published_classifier_loads_and_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    folder, inputs = references.folder("vit_tiny", tmp_path / "hf"), tensors("vit_tiny", "io")
    keys = {"do_rescale": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(keys))
    labels = {"id2label": {str(label): f"label {label}" for label in range(10)}}
    (folder / "config.json").write_text(json.dumps(references.config("vit_tiny") | labels))
    logits = load_classifier(folder).predict(inputs["pixel_values"].transpose(0, 2, 3, 1))
    np.testing.assert_allclose(logits, inputs["logits"], rtol=0, atol=references.limit("vit_tiny"))
    (folder / "config.json").write_text(json.dumps({"model_type": "jaxlaunch_mlp", **MLP_SIZES}))
    with pytest.raises(SpecError, match=r"has no inputs.json, which says what its model reads"):
        jaxlaunch.load(str(folder))


def test_model_loads_without_its_training_data(tmp_path: Path) -> None:
    folder = read_rows(tmp_path, "regression", "weight", 1)
    data = TABLE | {"path": "t.csv", "label": "weight"}
    train = {"task": "classify", "batch": 8, "data": data, "loss": {"target": "regression"}}
    train["model"] = MLP | {"classes": 1}
    job = {"name": "run", "accelerator": {"type": "cpu", "per_host": 8}, "train": train}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    (tmp_path / ".lock").touch()
    loaded = jaxlaunch.load(str(tmp_path))
    assert isinstance(loaded, jaxlaunch.TaskModel) and folder.endswith("checkpoints")
    assert loaded.predict({"features": np.zeros((3, 5), np.float32)}).shape == (3, 1)
