"""What is wrong with a job's data is a sentence before anything is compiled, and ends it with 64 or 65."""

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
def usual(tmp_path_factory: pytest.TempPathFactory) -> str:
    return corpora.saved(tmp_path_factory.mktemp("tokenizer"))


def block(case: Case, folder: Path, usual: str) -> dict[str, Any]:
    """The train block of a case, whose files are there."""
    files: wrong_data.Files = {"a.jsonl": rows(*[wrong_data.GOOD] * 9), **case.files}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            content(folder / name)
    own = f"{folder}/tokenizer" if (folder / "tokenizer").exists() else usual
    data = {"source": "text", "path": f"{folder}/a.jsonl", "tokenizer": own, **case.data}
    if data["source"] != "array_record":
        data = {"data_dir": f"{folder}/out", **data}
    model = {
        "kind": "gpt2",
        "layers": 1,
        "width": 32,
        "heads": 4,
        "vocab": 512,
        "length": 8,
        **case.model,
    }
    given = {key: value for key, value in data.items() if value is not None}
    text = json.dumps({"task": case.task, "model": model, "data": given, "batch": 2})
    found: dict[str, Any] = json.loads(text.replace("PATH", str(folder)))
    return found


def opened(block: dict[str, Any]) -> dict[str, Any]:
    """As a run opens its data, before it compiles: both splits, and the first example."""
    spec, task = process.read_spec({contract.TRAIN_SPEC: json.dumps(block)})
    for split in ("train", "eval"):
        source = task.source(spec, split)
        if source is not None:
            how = {
                "batch": 2,
                "rows": range(2),
                "seed": 0,
                "shuffle": False,
                "prefetch": 0,
                "threads": 1,
            }
            Pipeline(source, task.example, check=partial(task.check_batch, spec), **how).read_batch(
                0
            )
    return {"opened": True}


def test_there_are_sixty_cases_and_more() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])
def test_wrong_data_is_a_sentence_with_a_code(
    case: Case,
    tmp_path: Path,
    usual: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(text, "_run_build", lambda made, folder, *_: build.build_rows(made, folder))
    code = process.print_result(lambda: opened(block(case, tmp_path, usual)))
    said = capfd.readouterr().err
    words = case.words.replace("PATH", str(tmp_path))
    assert words in said and code == case.code, said
    assert "Traceback" not in said and len(said.strip().splitlines()) <= 2


def test_a_job_without_a_fault_is_opened(
    tmp_path: Path, usual: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "_run_build", lambda made, folder, *_: build.build_rows(made, folder))
    assert process.print_result(lambda: opened(block(Case("none", 0, ""), tmp_path, usual))) == 0
    assert json.loads(capfd.readouterr().out) == {"opened": True}
