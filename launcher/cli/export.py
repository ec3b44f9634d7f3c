"""`launcher export`: a checkpoint for other people's programs."""

from __future__ import annotations

import os
from pathlib import Path

import click

from launcher import ask, runs
from launcher.cli import options
from launcher.errors import UserError
from launcher.wording import count


@click.command("export")
@click.argument("run")
@click.option("--to", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The folder to write.")
@click.option("--step", type=click.IntRange(0), metavar="N", help="Of which step. [default: the newest]")
@click.option("--ema", is_flag=True, help="The moving average in place of the weights.")
def export_command(run: str, to: Path, step: int | None, ema: bool) -> None:
    """Write a checkpoint of RUN as a Hugging Face folder.

    RUN is the name of a run of this machine, its folder, or a folder or URL of checkpoints. DIR gets config.json and
    safetensors, whole or not at all, from which `transformers` and `train.model.init_from` load the model. The
    checkpoint is verified first, then read one array at a time.
    """
    if not ask.is_here():
        raise UserError("The trainer is not installed here, and only it reads checkpoints.", ask.INSTALL)
    arguments = [runs.checkpoints(run), "--to", str(to)]
    arguments += [] if step is None else ["--step", str(step)]
    arguments += ["--ema"] if ema else []
    found = ask.the_trainer("trainer.export", *arguments, environ=os.environ)
    for note in found["notes"]:
        options.say(note)
    what = f"{found['architecture']} of step {found['step']}, {found['parameters']:,} parameters in {found['dtype']}"
    click.echo(f"{to}: {what}, {count(len(found['files']), 'file')}")
