"""What `launcher validate` finds in files that a run would refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.trainer import check
from jaxlaunch.trainer.spec import TrainSpec

TABLE = {"source": "table", "path": "a.csv"}
IMAGES = {"source": "images", "path": "list.csv"}
TEXT = {"source": "text", "path": "a.jsonl", "packing": "concat"}
MLP = {"kind": "mlp", "classes": 2}
DECODER = {"kind": "decoder", "length": 8}
VIT = {"kind": "vit", "classes": 2, "image": [8, 8], "patch": 4}
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("age,weight,diagnosis\n1,2,x\n3,4,y\n5,6,x\n")
    (tmp_path / "list.csv").write_text("file,class\na.png,cat\n")
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    return tmp_path


def find_faults(task: str, model: Any, data: Any, *subjects: str) -> list[str]:
    spec = TrainSpec.model_validate({"task": task, "model": model, "data": data})
    return list(check.find_faults(spec, list(subjects or ("data",))))


@pytest.mark.parametrize(
    ("task", "model", "data", "fault"),
    [
        ("classify", MLP, {**TABLE, "label": "diagnosis"}, ""),
        (
            "classify",
            MLP,
            {**TABLE, "label": "diagnosys"},
            "has no column 'diagnosys' (did you mean 'diagnosis'?); it has 'age', 'weight'",
        ),
        (
            "classify",
            MLP,
            {**TABLE, "label": "diagnosis", "columns": ["agee"]},
            "has no column 'agee' (did you mean 'age'?)",
        ),
        ("classify", MLP, TABLE, "has no column with a usual name of a label; set data.label"),
        ("classify", MLP, {**TABLE, "path": "b.csv"}, "data.path 'b.csv' matches no file"),
        (
            "classify",
            VIT,
            {**IMAGES, "image": "fil", "label": "class"},
            "list.csv has no column 'fil' (did you mean 'file'?); it has file, class",
        ),
        ("classify", VIT, {**IMAGES, "image": "file", "label": "class"}, ""),
        ("lm", DECODER, {**TEXT, "field": "body"}, ""),
        (
            "lm",
            DECODER,
            {**TEXT, "field": "bodi"},
            "a.jsonl, row 1: it has no field 'bodi' (did you mean 'body'?); it has body",
        ),
        ("lm", DECODER, TEXT, "a.jsonl, row 1: it has no field 'text'; it has body"),
        (
            "classify",
            MLP,
            {
                "source": "mixture",
                "label": "diagnosis",
                "parts": {"ours": {**TABLE, "weight": 1, "group": "patient", "eval_split": 0.5}},
            },
            "train.data.parts.ours: a.csv has no column 'patient'",
        ),
    ],
)
def test_missing_columns_are_named_with_the_nearest(
    task: str, model: Any, data: Any, fault: str
) -> None:
    faults = find_faults(task, model, data)
    assert len(faults) == bool(fault)
    assert not fault or fault in faults[0]


def test_unsupported_config_is_named(folder: Path) -> None:
    (folder / "hf").mkdir()
    model = {"kind": "gpt2", "init_from": "hf"}
    (folder / "hf" / "config.json").write_text(json.dumps(GPT2))
    assert find_faults("lm", model, TEXT, "model") == []
    (folder / "hf" / "config.json").write_text(json.dumps({**GPT2, "scale_attn": 3}))
    (fault,) = find_faults("lm", model, TEXT, "model")
    assert fault.startswith("hf/config.json: ") and "scale_attn" in fault


def test_large_table_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MAX_TABLE_BYTES", 10)
    assert find_faults("classify", MLP, {**TABLE, "label": "diagnosys"}) == []


def test_program_prints_faults_and_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"task": "classify", "model": MLP, "data": {**TABLE, "label": "y"}}
    monkeypatch.setenv(contract.TRAIN_SPEC, json.dumps(train))
    monkeypatch.setattr("sys.argv", ["check", "data"])
    names = sorted(path.name for path in folder.iterdir())
    assert check.main() == 0
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert "has no column 'y'" in fault
    assert sorted(path.name for path in folder.iterdir()) == names
