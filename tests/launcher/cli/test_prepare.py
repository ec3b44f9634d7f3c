"""`launcher prepare`: what it asks the trainer for. What is prepared has tests of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.local import trainer_process
from tests.launcher.invoke import launcher

JOB = """name: mine
accelerator: {type: cpu}
volumes: [{claim: corpus, path: /data}, {claim: out, path: /out}]
train:
  task: lm
  data: {source: text, path: "/data/*.jsonl", packing: concat, data_dir: /out/prepared}
"""


def prepared(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str
) -> dict[str, Any]:
    """The data block that the trainer gets."""
    (folder / "job.yaml").write_text(JOB)
    seen: list[dict[str, Any]] = []

    def run(module: str, *, environ: dict[str, str], show: Any) -> dict[str, Any]:
        seen.append(json.loads(environ[contract.TRAIN_SPEC])["data"])
        return {"prepared": []}

    monkeypatch.setattr(trainer_process, "run_program", run)
    monkeypatch.chdir(folder)
    left = launcher(capsys, monkeypatch, "prepare", str(folder / "job.yaml"), *options)
    assert left.code == 0, left.err
    return seen[0]


def test_volumes_and_run_folder_are_those_that_run_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prepared(tmp_path, capsys, monkeypatch)
    assert found["path"] == f"{tmp_path}/runs/mine/volumes/corpus/*.jsonl"
    found = prepared(
        tmp_path, capsys, monkeypatch, "--volume", "corpus=texts", "--run-dir", "elsewhere"
    )
    assert found["path"] == f"{tmp_path}/texts/*.jsonl"
    assert found["data_dir"] == f"{tmp_path}/elsewhere/volumes/out/prepared"


def test_one_that_is_interrupted_says_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.setattr(trainer_process, "run_program", interrupted)
    left = launcher(capsys, monkeypatch, "prepare", str(tmp_path / "job.yaml"))
    assert left.code == 130
    assert (
        left.err.strip()
        == "launcher: stopped; what is complete is kept, and the same command resumes from there"
    )


def test_a_mixture_of_images_is_packed_part_by_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = "{source: mixture, parts: {a: {source: images, weight: 1, path: a}}}"
    (tmp_path / "job.yaml").write_text(
        f"name: m\naccelerator: {{type: cpu}}\ntrain: {{task: classify, data: {data}}}\n"
    )
    left = launcher(
        capsys, monkeypatch, "prepare", str(tmp_path / "job.yaml"), "--to", str(tmp_path / "out")
    )
    assert left.code == 2 and "train.data.source = mixture is not packed as a whole" in left.err
    assert "pack each part as a job with that source" in left.err
