"""`launcher predict`: what a trained model says of files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from jaxlaunch import programs
from jaxlaunch.launcher.cli import completions, options, output
from jaxlaunch.launcher.local import trained, trainer_process
from jaxlaunch.launcher.wording import count


@click.command("predict")
@click.argument("run", shell_complete=completions.runs)
@click.argument("files", nargs=-1, required=True, type=click.Path())
@options.of_program(programs.Predict)
def predict_command(run: str, files: tuple[str, ...], **given: Any) -> None:
    """Predict the labels of FILES with the model of RUN.

    RUN is the name of a run on this machine, its folder, a step in its folder of checkpoints, a folder or URL of
    checkpoints, or an export. FILES are images or tables that the model can read, or folders of them; the images may be
    in .tar, .parquet and .arrow files. The output has a line for each image (file) or row (file, row): label and
    probability, or numbers in the label's unit. A file or row that cannot be read ends the command with an error that
    names it; --skip-broken leaves it out. The data of the training is not needed. The command uses the devices that JAX
    finds, and for a CPU job only the CPU.
    """
    trainer_process.require("launcher predict")
    folder, step = trained.weights(run)
    if given["step"] is None:
        given["step"] = step
    asked = programs.Predict(folder=folder, files=files, **given)
    environ: Mapping[str, str] = os.environ
    if trained.has_job(run):
        job, train, home = trained.training(run)
        environ = trainer_process.environ(job, train, home)
        if job.accelerator.platform != "cpu":
            environ |= {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "")}
    module = "jaxlaunch.trainer.evaluation.predict"
    found = trainer_process.run(module, *programs.arguments(asked), environ=environ)
    for note in found["notes"]:
        output.say(note)
    if found["rows"]:
        head = list(found["rows"][0])
        output.show(*output.columns([head, *(list(map(_said, row.values())) for row in found["rows"])]))
    if found["examples"] > len(found["rows"]):
        output.say(_sum(found, asked.output))


def _said(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _sum(found: Mapping[str, Any], path: str | None) -> str:
    left_out = f", {found['skipped']:,} left out" if found["skipped"] else ""
    if path is None:
        return f"and {found['examples'] - len(found['rows']):,} more{left_out}; -o FILE writes all of them"
    of = "" if found["step"] is None else f" by step {found['step']}"
    return f"{path}: {count(found['examples'], 'prediction')}{of}{left_out}"
