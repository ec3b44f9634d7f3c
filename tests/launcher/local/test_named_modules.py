"""What `validate` says of modules that a job names, which it does not import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxlaunch.launcher import entry
from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.local import job_notes

JOB = """\
name: own
accelerator: {type: cpu}
train:
  task: TASK:Task
  model: {kind: "mine.models:Net"}
  data: {source: torch, dataset: "json:tool"}
  batch: 8
  steps: 1
"""


def list_missing_keys(folder: Path, task: str) -> list[str]:
    return [
        note.partition(":")[0]
        for note in job_notes.list_missing_modules(
            load.parse_job(JOB.replace("TASK", task)), folder
        )
    ]


def test_missing_module_is_named_by_its_key_without_imports(tmp_path: Path) -> None:
    assert list_missing_keys(tmp_path, "nowhere") == ["train.task", "train.model.kind"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "models.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "nowhere.py").write_text("raise SystemExit('imported')\n")
    assert list_missing_keys(tmp_path, "nowhere") == []
    assert list_missing_keys(tmp_path, "mine.tasks") == ["train.task"]
    assert list_missing_keys(tmp_path, "mine") == []


def test_validate_names_options_that_cannot_be_exported() -> None:
    text = JOB.replace("TASK", "nowhere")
    assert list(job_notes.find_unexportable_options(load.parse_job(text))) == []
    start = text.index("  model:")
    line = text[start : text.index("\n", start)]
    job = load.parse_job(text.replace(line, "  model: {kind: resnet, stem: small}"))
    (note,) = job_notes.find_unexportable_options(job)
    assert note == (
        "train.model.stem = small: Hugging Face's ResNet knows only imagenet, so launcher export "
        "will refuse this model."
    )


def test_ctrl_c_during_imports_exits_with_130(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pressed:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "jaxlaunch.launcher.cli.main":
                raise KeyboardInterrupt

    monkeypatch.setattr("sys.meta_path", [Pressed()])
    monkeypatch.delitem(sys.modules, "jaxlaunch.launcher.cli.main", raising=False)
    with pytest.raises(SystemExit) as process:
        entry.main()
    assert process.value.code == 130
