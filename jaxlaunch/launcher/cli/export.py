"""`launcher export`: a checkpoint in the format of Hugging Face Transformers."""

from __future__ import annotations

import os
from typing import Any

import click

from jaxlaunch import programs
from jaxlaunch.launcher.cli import completions, options, output
from jaxlaunch.launcher.local import trained, trainer_process
from jaxlaunch.launcher.wording import count


@click.command("export")
@click.argument("run", shell_complete=completions.runs)
@options.of_program(programs.Export)
def export_command(run: str, **given: Any) -> None:
    """Export a checkpoint of RUN as a Hugging Face model.

    RUN is the name of a run on this machine, its folder, or a folder or URL of checkpoints. The command writes
    config.json and safetensors to DIR, all or none; `transformers` and `train.model.init_from` can load them. The
    checkpoint is verified first, then read one array at a time. The best step is that of train.checkpoint.best.
    Adapters (train.lora) are written as a peft folder: adapter_config.json and adapter_model.safetensors. For images,
    preprocessor_config.json is written as well if the model has pixel_mean. The MLP of a table, which Hugging Face
    does not have, is written as safetensors with its sizes and columns, for `launcher predict` and other programs.
    """
    trainer_process.require("launcher export")
    asked = programs.Export(folder=trained.checkpoints(run), **given)
    found = trainer_process.run("jaxlaunch.trainer.export", *programs.arguments(asked), environ=os.environ)
    for note in found["notes"]:
        output.say(note)
    what = f"{found['architecture']} of step {found['step']}, {found['parameters']:,} parameters in {found['dtype']}"
    output.show(f"{asked.to}: {what}, {count(len(found['files']), 'file')}")
