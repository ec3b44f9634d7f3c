"""`launcher prepare`: its request to the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.local import trainer_process
from tests.launcher.invoke import Launcher, launcher

JOB = """name: mine
accelerator: {type: cpu}
volumes: [{claim: corpus, path: /data}, {claim: out, path: /out}]
train:
  task: lm
  data: {source: text, path: "/data/*.jsonl", packing: concat, data_dir: /out/prepared}
"""


def run_prepare(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str
) -> dict[str, Any]:
    """The data block that the trainer gets."""
    (folder / "job.yaml").write_text(JOB)
    data_blocks: list[dict[str, Any]] = []

    def run(module: str, *, environ: dict[str, str], show: Any) -> dict[str, Any]:
        data_blocks.append(json.loads(environ[contract.TRAIN_SPEC])["data"])
        return {"prepared": []}

    monkeypatch.setattr(trainer_process, "run_program", run)
    monkeypatch.chdir(folder)
    result = launcher(capsys, monkeypatch, "prepare", str(folder / "job.yaml"), *options)
    assert result.code == 0, result.err
    return data_blocks[0]


def test_prepare_maps_volumes_and_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = run_prepare(tmp_path, capsys, monkeypatch)
    assert data["path"] == f"{tmp_path}/runs/mine/volumes/corpus/*.jsonl"
    data = run_prepare(
        tmp_path, capsys, monkeypatch, "--volume", "corpus=texts", "--run-dir", "elsewhere"
    )
    assert data["path"] == f"{tmp_path}/texts/*.jsonl"
    assert data["data_dir"] == f"{tmp_path}/elsewhere/volumes/out/prepared"


def test_interrupted_prepare_can_resume(
    run_launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.setattr(trainer_process, "run_program", interrupted)
    result = run_launcher("prepare", str(tmp_path / "job.yaml"))
    assert result.code == 130
    assert (
        result.err.strip()
        == "launcher: stopped; what is complete is kept, and the same command resumes from there"
    )


def test_prepare_refuses_mixture_of_images(run_launcher: Launcher, tmp_path: Path) -> None:
    data = "{source: mixture, parts: {a: {source: images, weight: 1, path: a}}}"
    (tmp_path / "job.yaml").write_text(
        f"name: m\naccelerator: {{type: cpu}}\ntrain: {{task: classify, data: {data}}}\n"
    )
    result = run_launcher("prepare", str(tmp_path / "job.yaml"), "--to", str(tmp_path / "out"))
    assert result.code == 2 and "train.data.source = mixture is not packed as a whole" in result.err
    assert "pack each part as a job with that source" in result.err
