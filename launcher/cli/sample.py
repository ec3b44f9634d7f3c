"""`launcher sample`: what a trained model says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from jaxlaunch import programs
from jaxlaunch.launcher.cli import completions, options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import trained, trainer_process
from jaxlaunch.launcher.wording import count


@click.command("sample")
@click.argument("run", shell_complete=completions.runs)
@options.of_program(programs.Sample)
@options.form("text", "json", "yaml")
def sample_command(run: str, form: str, **given: Any) -> None:
    """Generate text with the model of RUN.

    RUN is the name of a run on this machine, its folder, a step in its folder of checkpoints, a folder or URL of
    checkpoints, or a Hugging Face folder (config.json and safetensors). One sample is printed as it is made. Several
    are made side by side, of all prompts, and printed at the end. Uses the devices that JAX finds; JAX_PLATFORMS=cpu
    leaves accelerators alone.
    """
    trainer_process.require("launcher sample")
    if not given["prompt"] and not given["ids"]:
        raise UserError("There is no prompt.", "give --prompt TEXT, or --ids for a model without tokenizer.")
    folder, step = trained.weights(run)
    if given["step"] is None:
        given["step"] = step
    asked = programs.arguments(programs.Sample(folder=folder, **given))
    found: Mapping[str, Any] = {}
    for event in trainer_process.events("jaxlaunch.trainer.generate", *asked, environ=os.environ):
        if "piece" in event and form == "text":
            output.piece(event["piece"])
        elif "piece" not in event:
            found = event
    for note in found["notes"]:
        output.say(note)
    if form == "text":
        _show(found)
    else:
        output.data({"step": found["step"], "samples": found["samples"]}, form)


def _show(found: Mapping[str, Any]) -> None:
    """Several samples under headings, and how fast they were; a single one was printed on the way."""
    each = [(at, number, one) for at, of_one in enumerate(found["samples"], 1) for number, one in enumerate(of_one, 1)]
    if len(each) == 1:
        output.piece("\n")
    for at, number, one in each if len(each) > 1 else ():
        output.say(f"prompt {at}, sample {number}, log-probability {one['score']:.4g}")
        output.show(one["text"] if "text" in one else " ".join(map(str, one["ids"])))
    of = "" if found["step"] is None else f" of step {found['step']}"
    speed = found["tokens"] / found["seconds"]
    output.say(f"{count(found['tokens'], 'token')}{of} in {found['seconds']:.1f} s, compiling included: {speed:.3g}/s")
