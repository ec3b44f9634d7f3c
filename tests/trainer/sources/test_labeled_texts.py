"""Texts with a label: the rows, the classes, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.evaluation import task_model
from jaxlaunch.trainer.huggingface import folder as folders
from jaxlaunch.trainer.sources import labeled_texts
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import Text, TrainSpec
from jaxlaunch.trainer.text.tokenizer import load_tokenizer
from tests.trainer.text.corpora import save_tokenizer

ROWS = [("a", "no"), ("abcdef", "yes"), ("ab", "no"), ("b", "yes"), ("c", "no"), ("d", "yes")]


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "a.jsonl", [{"text": text, "label": label} for text, label in ROWS])


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def read(path, length=4, split="train", classes=None, folder_classes=(), **keys):
    data = Text(source="text", path=path, format="label", **{"eval_split": 0, **keys})
    return labeled_texts.open_source(data, length, split, classes, folder_classes)


def test_texts_are_cut_padded_and_numbered_by_their_labels(path, capsys):
    source = read(path)

    assert source.classes == ("no", "yes")
    assert [int(source[index]["label"]) for index in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [int(source[index]["length"]) for index in range(3)] == [1, 4, 2]
    np.testing.assert_array_equal(source[1]["tokens"], [*b"abcd"])
    np.testing.assert_array_equal(source[2]["tokens"], [*b"ab", 0, 0])
    assert "1 of 6 are cut at train.model.length = 4" in capsys.readouterr().err
    assert read(path, classes=3, length=8).fingerprint() != source.fingerprint()


def test_labels_that_the_folder_names_have_the_numbers_of_its_head(path, tmp_path):
    names = {"1": "no", "0": "yes", "2": "maybe"}
    (tmp_path / "config.json").write_text(json.dumps({"id2label": names}))
    folder_classes = folders.class_names(str(tmp_path))
    source = read(path, classes=3, folder_classes=folder_classes)
    assert source.classes == ("yes", "no", "maybe")
    assert [*source.label_N] == [1, 0, 1, 0, 1, 0]
    # The head is new, or the job names the classes.
    assert read(path, classes=2, folder_classes=folder_classes).classes == ("no", "yes")
    data = Text(source="text", path=path, format="label", eval_split=0, classes=["no", "yes"])
    source = labeled_texts.open_source(data, 4, "train", 3, folder_classes)
    assert source.classes == ("no", "yes")


def test_names_of_the_folder_may_differ_in_case_and_spaces(path, tmp_path):
    folder_classes = ("YES ", "No")
    source = read(path, classes=2, folder_classes=folder_classes)
    assert (source.classes, [*source.label_N]) == (folder_classes, [1, 0, 1, 0, 1, 0])
    assert source.notes == []
    other = write(tmp_path / "b.jsonl", [{"text": "e", "label": "yes"}])
    held_out = read(path, split="eval", eval_path=other, folder_classes=folder_classes)
    assert [*held_out.label_N] == [0]

    source = read(path, folder_classes=("LABEL_0", "LABEL_1"))
    assert source.classes == ("no", "yes")
    assert "list those of the data in data.classes" in source.notes[0]
    assert read(path, folder_classes=("a", "b", "c")).notes == []


def test_folder_that_cannot_be_read_does_not_number_labels(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(OSError):
        folders.class_names(str(tmp_path))
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match="config.json cannot be read"):
        folders.class_names(str(tmp_path))


def test_label_column_is_that_of_the_first_row(tmp_path):
    rows = [{"text": "a", "label": 0, "y": 1}, {"text": "b", "label": None, "y": 1}]
    with pytest.raises(DataError, match="row 2: its 'label' is null"):
        read(write(tmp_path / "a.jsonl", rows))
    rows = [{"text": "a", "label": 0, "by": "x"}, {"text": "b", "label": 1, "by": None}]
    with pytest.raises(DataError, match="row 2: it has no group 'by'"):
        read(write(tmp_path / "a.jsonl", rows), eval_split=0.5, group="by")


@pytest.mark.parametrize(
    "keys",
    [
        {"task": "classify", "data": {"format": "label"}},
        {"task": "reward", "data": {"format": "preference"}},
    ],
)
def test_folder_with_a_tokenizer_does_not_read_bytes(path, tmp_path, keys):
    (tmp_path / "tokenizer.json").write_text("{}")
    model = {"transformers": str(tmp_path), "vocab": 256, "classes": 1}
    data = {"source": "text", "path": path, **keys["data"]}
    spec = TrainSpec(task=keys["task"], model=model, data=data)
    with pytest.raises(SpecError, match=f"set data.tokenizer: {tmp_path}"):
        open_source(spec, "train")


def test_every_class_is_held_out_and_eval_files_keep_the_numbers(path, tmp_path):
    parts = [read(path, split=split, eval_split=0.4) for split in ("train", "eval")]
    assert sum(map(len, parts)) == 6
    assert set(parts[1].label_N) == {0, 1}

    other = write(tmp_path / "b.jsonl", [{"text": "e", "label": "yes"}])
    assert [*read(path, split="eval", eval_path=other).label_N] == [1]


def test_tokenizer_adds_its_special_tokens(tmp_path):
    encoder = load_tokenizer(save_tokenizer(tmp_path))
    (ids,), cut = encoder.encode_whole(["the text"], 3)
    assert (len(ids), cut) == (3, 1)
    (ids,), cut = encoder.encode_whole(["the text"], 100)
    assert ([*ids], cut) == (encoder._tokenizer.encode("the text").ids, 0)
    assert encoder._tokenizer.truncation is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "it has the columns text, and no label"),
        ({"text": " ", "label": 1}, "its 'text' is empty"),
        ({"text": 5, "label": 1}, "its 'text' is .*, not a text"),
        ({"text": "a", "label": [1]}, "its 'label' is .*, neither a name nor a whole number"),
    ],
)
def test_rows_that_are_no_labeled_texts_are_named(tmp_path, row, message):
    with pytest.raises(DataError, match=f"row 1: {message}"):
        read(write(tmp_path / "a.jsonl", [row]))


def test_model_with_fewer_classes_is_refused_with_both_numbers(path):
    with pytest.raises(SpecError, match=r"classes = 1, and the labels of .* are of 2 classes"):
        read(path, classes=1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data": {"format": "text"}}, "has texts without a label; give format: label"),
        ({"data": {"packing": "none"}}, "packing does not apply to format: label"),
        ({"task": "lm"}, "format: label has classes, which classify trains on"),
        ({"loss": {"mixup": 0.2}}, "mixup does not apply to texts"),
        ({"lora": {"rank": 2}}, "the head of train.model is sequence_classification"),
        ({"model": {"transformers": "f", "head": "causal_lm"}}, "and the task needs"),
        ({"data": {"source": "tfds", "name": "digits"}}, "has no labeled texts"),
    ],
)
def test_jobs_that_do_not_classify_texts_are_refused(keys, message):
    data = {"source": "text", "path": "a.jsonl", "format": "label", **keys.get("data", {})}
    if data["source"] != "text":
        data = keys["data"]
    block = {"task": "classify", "model": {"transformers": "f"}, **keys, "data": data}
    with pytest.raises(ValueError, match=message):
        TrainSpec.model_validate(block)


def test_folder_says_how_many_classes_there_are(tmp_path):
    config = {"model_type": "bert", "vocab_size": 300, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    keys = {
        "task": "classify",
        "model": {"transformers": str(tmp_path)},
        "data": {"source": "text", "path": "a.jsonl", "format": "label"},
    }
    with pytest.raises(SpecError, match=r"has no classifier: set train\.model\.classes"):
        folders.resolve_spec(TrainSpec.model_validate(keys))
    assert folders.describe_text_classifier(str(tmp_path)) is None

    config |= {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "no", "1": "yes"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = folders.resolve_spec(TrainSpec.model_validate(keys)).model
    assert (model.head, model.classes) == ("sequence_classification", 2)
    inputs = folders.describe_text_classifier(str(tmp_path))
    assert (inputs["classes"], inputs["shape"]) == (["no", "yes"], [64])


@pytest.mark.parametrize(
    ("keys", "target", "label"),
    [
        ({"problem_type": "single_label_classification"}, "class", None),
        ({"problem_type": "multi_label_classification"}, "multi_label", ["no", "yes"]),
        ({"problem_type": "regression"}, "regression", None),
        ({"id2label": {"0": "LABEL_0"}}, "regression", None),
    ],
)
def test_folder_says_what_its_logits_are(tmp_path, keys, target, label):
    config = {
        "model_type": "bert",
        "vocab_size": 300,
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "no", "1": "yes"},
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    inputs = folders.describe_text_classifier(str(tmp_path))
    assert (inputs["target"], inputs.get("label")) == (target, label)
    model = task_model._read_model(str(tmp_path), inputs)
    assert task_model._built_in_spec(inputs, model, "fp32").model.classes == len(inputs["classes"])
