"""`launcher export`: a checkpoint in the format of Hugging Face Transformers."""

from __future__ import annotations

import os
from pathlib import Path

import click

from jaxlaunch.launcher.cli import output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import run_folders, trainer_process
from jaxlaunch.launcher.wording import count


class Step(click.ParamType[str]):
    """The number of a step, or `best`."""

    name = "step"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as it is. Fails for anything else."""
        if value != "best" and not value.isdecimal():
            self.fail(f"{value!r} is neither the number of a step nor best.", param, ctx)
        return value


@click.command("export")
@click.argument("run")
@click.option("--to", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The folder to write.")
@click.option("--step", type=Step(), metavar="N|best", help="The step to export. [default: the newest]")
@click.option("--ema", is_flag=True, help="Export the moving average instead of the weights.")
@click.option("--merged", is_flag=True, help="Export the model with the adapters merged into it.")
@click.option("--base", metavar="DIR", help="That model's folder or URL. [default: the training's model.init_from]")
def export_command(run: str, to: Path, step: str | None, ema: bool, merged: bool, base: str | None) -> None:
    """Export a checkpoint of RUN as a Hugging Face model.

    RUN is the name of a run on this machine, its folder, or a folder or URL of checkpoints. DIR gets config.json and
    safetensors, all or none, from which `transformers` and `train.model.init_from` load the model. The
    checkpoint is verified first, then read one array at a time. The best step is that of train.checkpoint.best.
    Adapters (train.lora) are written as peft's folder: adapter_config.json and adapter_model.safetensors.
    """
    if not trainer_process.is_installed():
        raise UserError("export reads checkpoints with the trainer, which is not installed.", trainer_process.INSTALL)
    arguments = [run_folders.checkpoints(run), "--to", str(to)]
    arguments += [] if step is None else ["--step", step]
    arguments += ["--ema"] if ema else []
    arguments += ["--merged"] if merged else []
    arguments += [] if base is None else ["--base", base]
    found = trainer_process.run("jaxlaunch.trainer.export", *arguments, environ=os.environ)
    for note in found["notes"]:
        output.say(note)
    what = f"{found['architecture']} of step {found['step']}, {found['parameters']:,} parameters in {found['dtype']}"
    output.show(f"{to}: {what}, {count(len(found['files']), 'file')}")
