"""Options that are declared once are the command's and the program's."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import click
import pytest

from jaxlaunch import programs
from jaxlaunch.launcher.cli.models import (
    eval_command,
    export_command,
    predict_command,
    sample_command,
)

# What each program is asked for, and the same written out.
ASKED: list[tuple[Any, list[str]]] = [
    (
        programs.Sample(
            folder="f",
            prompt=("-a", "b"),
            n=2,
            top_p=0.5,
            min_p=0.1,
            step="best",
            ema=True,
            precision="bf16",
        ),
        [
            "f",
            "--prompt=-a",
            "--prompt=b",
            "-n",
            "2",
            "--top-p",
            "0.5",
            "--min-p",
            "0.1",
            "--step",
            "best",
            "--ema",
            "--precision",
            "bf16",
        ],
    ),
    (programs.Evaluate(folder="f", step=7), ["f", "--step=7"]),
    (
        programs.Predict(folder="f", files=("a", "b"), output="t.csv", top=3, skip_broken=True),
        ["f", "a", "b", "-o", "t.csv", "--top", "3", "--skip-broken"],
    ),
    (programs.Export(to="t", base="b", merged=True), ["--to", "t", "--merged", "--base", "b"]),
]


@pytest.mark.parametrize(("requests", "written"), ASKED, ids=lambda value: type(value).__name__)
def test_program_reads_json_and_flags(
    requests: Any, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (list(programs.json_arguments(requests)), written):
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        assert programs.read_options(type(requests), "program", None) == requests


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        (programs.Sample, sample_command),
        (programs.Evaluate, eval_command),
        (programs.Predict, predict_command),
        (programs.Export, export_command),
    ],
)
def test_command_has_every_option_of_its_program(kind: Any, command: click.Command) -> None:
    options = {field.name for field in dataclasses.fields(kind)} - {"folder"}
    assert options <= {parameter.name for parameter in command.params}
