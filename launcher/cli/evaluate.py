"""`launcher eval`: the held-out metrics of a checkpoint, computed again."""

from __future__ import annotations

import os

import click

from jaxlaunch import programs
from jaxlaunch.launcher.cli import completions, options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import trained, trainer_process


@click.command("eval")
@click.argument("run", shell_complete=completions.runs)
@click.option("--data", "keys", multiple=True, metavar="KEY=VALUE", help="A key of train.data to replace; may repeat.")
@options.of_program(programs.Evaluate)
@click.option("--best", is_flag=True, help="The step that evaluated best: --step best.")
@options.form("text", "json", "yaml")
def eval_command(run: str, keys: tuple[str, ...], step: programs.Step | None, best: bool, ema: bool, form: str) -> None:
    """Evaluate a checkpoint of RUN on its held-out data.

    RUN is the name of a run on this machine, or its folder. The metrics are those that its training logs: task, model,
    precision and held-out examples are the job's, each example counts once. --data eval_split='test[:50%]', or
    --data eval_path=/other/*.array_record, evaluates on other examples. Uses the devices that JAX finds, those of a CPU
    job on the CPU alone; of another number than the training's, they split the batch.
    """
    trainer_process.require("launcher eval")
    if best and step not in (None, programs.BEST):
        raise UserError(f"--best and --step {step} name two steps.", "give one of them.")
    job, train, home = trained.training(run, [f"train.data.{key}" for key in keys])
    asked = programs.Evaluate(folder=trained.checkpoints(run), step="best" if best else step, ema=ema)
    environ = trainer_process.environ(job, train, home)
    if job.accelerator.platform != "cpu":  # where the weights may need accelerators
        environ |= {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "")}
    found = trainer_process.run("jaxlaunch.trainer.evaluation", *programs.arguments(asked), environ=environ)
    for note in found["notes"]:
        output.say(note)
    if form != "text":
        return output.data({key: found[key] for key in ("step", "metrics", "examples")}, form)
    numbers = "  ".join(f"{name} {value:.6g}" if value is not None else f"{name} nan" for name, value in _sorted(found))
    output.show(f"step {found['step']}  {numbers}  examples {found['examples']}")


def _sorted(found: dict[str, dict[str, float | None]]) -> list[tuple[str, float | None]]:
    """The metrics, the loss first."""
    return sorted(found["metrics"].items(), key=lambda item: (item[0] != "loss", item[0]))
