"""`launcher sample`: its request to the trainer, and its output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import programs
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import trainer_process
from tests.launcher.invoke import Launcher

ONE = {"text": "x\x1b", "ids": [120, 27], "score": -1.5, "ended": False}
LAST = {
    "step": 5,
    "samples": [[ONE]],
    "tokens": 2,
    "seconds": 0.5,
    "notes": ["step 7: damaged; using step 5"],
}


class Trainer:
    """What was asked for, and the answer."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.asked: tuple[str, ...] = ()
        self._events = events

    def __call__(self, *asked: str, environ: Any) -> Iterator[dict[str, Any]]:
        self.asked = asked
        yield from self._events


def test_single_sample_is_streamed(
    run_launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer({"piece": "x"}, {"piece": "\x1b"}, LAST)
    monkeypatch.setattr(trainer_process, "stream_program", trainer)
    result = run_launcher("sample", str(tmp_path), "--prompt", "a b", "--top-p", "0.5", "--ema")
    program = programs.Sample(folder=str(tmp_path), prompt=("a b",), top_p=0.5, ema=True)
    assert trainer.asked == ("jaxlaunch.trainer.generate", *programs.json_arguments(program))
    assert (result.code, result.out) == (0, "x\\x1b\n")
    assert result.err == (
        "launcher: step 7: damaged; using step 5\n"
        "launcher: 2 tokens of step 5 in 0.5 s, compiling included: 4/s\n"
    )  # fmt: skip


def test_several_samples_are_numbered_or_json(
    run_launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [[ONE, {"ids": [1, 2], "score": -2.0, "ended": True}]]
    monkeypatch.setattr(
        trainer_process,
        "stream_program",
        Trainer({**LAST, "samples": samples, "notes": [], "step": None}),
    )
    result = run_launcher(
        "sample",
        str(tmp_path),
        "--ids",
        "1 2",
        "-n",
        "2",
        "--temperature",
        "1",
    )
    assert result.out == "x\\x1b\n1 2\n"
    assert result.err.splitlines()[:2] == [
        "launcher: prompt 1, sample 1, log-probability -1.5",
        "launcher: prompt 1, sample 2, log-probability -2",
    ]
    result = run_launcher("sample", str(tmp_path), "--ids", "1 2", "-o", "json")
    assert json.loads(result.out) == {"step": None, "samples": samples}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("nowhere", "--prompt", "a"),
            "There is no run nowhere: neither nowhere nor runs/nowhere is a folder.",
        ),
        (
            (".",),
            "There is no prompt.\n  hint: give --prompt TEXT, or --ids for a model "
            "without tokenizer.",
        ),
        (
            (".", "--chat", "--prompt", "a"),
            "--chat and --prompt cannot be combined.\n  hint: leave one of them out",
        ),
        ((".", "--chat", "-n", "2"), "--chat and -n cannot be combined."),
        (
            (".", "--prompt", "a", "--system", "b"),
            "--system is the system message of a conversation.",
        ),
        ((".", "--prompt", "a", "-n", "0"), "0 is not in the range x>=1"),
        (
            (".", "--prompt", "a", "--step", "last"),
            "'last' is neither the number of a step nor best",
        ),
    ],
)
def test_wrong_options_are_refused(
    run_launcher: Launcher,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_launcher("sample", *arguments)
    assert result.code == 2 and message in result.err


def test_weights_are_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "runs" / "lm"
    (home / "checkpoints" / "35").mkdir(parents=True)
    train = {"task": "lm"}
    job = {"name": "lm", "accelerator": {"type": "cpu", "per_host": 1}, "train": train}
    (home / "job.yaml").write_text(json.dumps(job))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert trainer_process.find_weights("lm") == (str(home / "checkpoints"), None)
    assert trainer_process.find_weights("runs/lm/checkpoints/35") == (str(home / "checkpoints"), 35)
    assert trainer_process.find_weights("hf") == ("hf", None)
    assert trainer_process.find_weights("gs://bucket/lm") == ("gs://bucket/lm", None)


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "lm", "--best"),
        ("predict", "lm", "a.png", "--step", "best"),
        ("sample", "runs/lm", "--prompt", "a", "--step", "best"),
        ("export", "lm", "--to", "hf", "--step", "best"),
    ],
)
def test_missing_best_step_is_reported_before_the_trainer_is_loaded(
    run_launcher: Launcher,
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "lm" / "checkpoints" / "35").mkdir(parents=True)
    (tmp_path / "runs" / "lm" / ".lock").touch()
    job = {"name": "lm", "accelerator": {"type": "cpu", "per_host": 1}, "train": {"task": "lm"}}
    (tmp_path / "runs" / "lm" / "job.yaml").write_text(json.dumps(job))
    monkeypatch.setattr(trainer_process, "_start_program", None)
    result = run_launcher(*arguments)
    assert result.code == 2 and "its job has no train.checkpoint.best." in result.err


def test_export_accepts_the_folder_of_a_step(
    run_launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def run_program(*call: str, **_: Any) -> dict[str, Any]:
        calls.append(call)
        return {"notes": [], "architecture": "X", "step": 35, "parameters": 1} | {
            "dtype": "float32",
            "files": [],
        }

    monkeypatch.setattr(trainer_process, "run_program", run_program)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "35").mkdir()
    assert run_launcher("export", "35", "--to", "hf").code == 0
    program = programs.Export(folder=str(tmp_path), to="hf", step=35)
    assert calls == [("jaxlaunch.trainer.export", *programs.json_arguments(program))]


def test_trainer_output_is_streamed_and_failure_raised(tmp_path: Path) -> None:
    lines = [{"piece": "a"}, {"samples": []}]
    (tmp_path / "said").write_text("\n".join(map(json.dumps, lines)))
    as_lines = ("json.tool", "--json-lines", "--compact")
    assert (
        list(trainer_process.stream_program(*as_lines, str(tmp_path / "said"), environ={})) == lines
    )
    with pytest.raises(UserError, match=r"`python -m json.tool` failed \(exit"):
        list(trainer_process.stream_program(*as_lines, str(tmp_path / "absent"), environ={}))
