"""Faulty data is reported before compilation and ends the job with 64 or 65."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.trainer.data.pipeline import Pipeline
from jaxlaunch.trainer.sources import text
from jaxlaunch.trainer.start import process
from jaxlaunch.trainer.text import build
from tests.trainer.text import corpora, wrong_data
from tests.trainer.text.wrong_data import CASES, Case, rows


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return corpora.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


MODEL = {"kind": "gpt2", "layers": 1, "width": 32, "heads": 4, "vocab": 512, "length": 8}
SETTINGS: dict[str, Any] = {"batch": 2, "rows": range(2), "seed": 0, "shuffle": False}
SETTINGS |= {"prefetch": 0, "threads": 1}


def make_block(case: Case, folder: Path, shared_folder: str) -> dict[str, Any]:
    """The train block of a case, whose files are there."""
    files: wrong_data.Files = {"a.jsonl": rows(*[wrong_data.GOOD] * 9), **case.files}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            content(folder / name)
    own_items = f"{folder}/tokenizer" if (folder / "tokenizer").exists() else shared_folder
    data = {"source": "text", "path": f"{folder}/a.jsonl", "tokenizer": own_items, **case.data}
    if data["source"] != "array_record":
        data = {"data_dir": f"{folder}/out", **data}
    model = MODEL | case.model
    options = {key: value for key, value in data.items() if value is not None}
    text = json.dumps({"task": case.task, "model": model, "data": options, "batch": 2})
    result: dict[str, Any] = json.loads(text.replace("PATH", str(folder)))
    return result


def open_block(block: dict[str, Any]) -> dict[str, Any]:
    """As a run opens its data, before it compiles: both splits, and the first example."""
    spec, task = process.read_spec({contract.TRAIN_SPEC: json.dumps(block)})
    for split in ("train", "eval"):
        source = task.source(spec, split)
        if source is not None:
            check = partial(task.check_batch, spec)
            Pipeline(source, task.example, check=check, **SETTINGS).read_batch(0)
    return {"opened": True}


def test_at_least_sixty_cases_exist() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])
def test_invalid_data_is_reported_with_its_exit_code(
    case: Case,
    tmp_path: Path,
    shared_folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(text, "_run_build", lambda made, folder, *_: build.build_rows(made, folder))
    code = process.print_result(lambda: open_block(make_block(case, tmp_path, shared_folder)))
    message = capfd.readouterr().err
    words = case.words.replace("PATH", str(tmp_path))
    assert words in message and code == case.code, message
    assert "Traceback" not in message and len(message.strip().splitlines()) <= 2


def test_valid_job_opens(
    tmp_path: Path,
    shared_folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(text, "_run_build", lambda made, folder, *_: build.build_rows(made, folder))
    assert (
        process.print_result(
            lambda: open_block(make_block(Case("none", 0, ""), tmp_path, shared_folder))
        )
        == 0
    )
    assert json.loads(capfd.readouterr().out) == {"opened": True}
