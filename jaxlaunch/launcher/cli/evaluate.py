"""`launcher eval`: the held-out metrics of a checkpoint, computed again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from jaxlaunch import programs
from jaxlaunch.launcher.cli import completions, options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import trained, trainer_process
from jaxlaunch.launcher.report import classes

LISTED = 20  # classes
MOST = 5  # confused pairs, and worst examples


@click.command("eval")
@click.argument("run", shell_complete=completions.runs)
@click.option("--data", "keys", multiple=True, metavar="KEY=VALUE", help="A key of train.data to replace; may repeat.")
@options.of_program(programs.Evaluate)
@click.option("--best", is_flag=True, help="The step that evaluated best: --step best.")
@options.form("text", "json", "yaml")
def eval_command(run: str, keys: tuple[str, ...], step: programs.Step | None, best: bool, ema: bool, form: str) -> None:
    """Evaluate a checkpoint of RUN on its held-out data.

    RUN is the name of a run on this machine, or its folder. The metrics are those that its training logs: task,
    model, precision and held-out examples are those of the job, and each example counts once. --data
    eval_split='test[:50%]', or --data eval_path=/other/*.array_record, evaluates on other examples. The command uses
    the devices that JAX finds, and for a CPU job only the CPU; if their number differs from the training's, they
    split the batch.

    For a classification it also shows precision, recall and F1 of each class, how often classes are confused, the
    expected calibration error (15 bins), and the files of the examples with the largest loss. -o json has all of
    this, and so has classification.json in the run folder.
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
    told = found.get("classification")
    if told is not None and not keys:
        _record(home, {"step": found["step"], "ema": ema, **told})
    if form != "text":
        shown = ("step", "metrics", "examples", *(["classification"] if told is not None else []))
        return output.data({key: found[key] for key in shown}, form)
    numbers = "  ".join(f"{name} {value:.6g}" if value is not None else f"{name} nan" for name, value in _sorted(found))
    output.show(f"step {found['step']}  {numbers}  examples {found['examples']}")
    if told is not None:
        output.show(*_lines(told))


def _sorted(found: dict[str, dict[str, float | None]]) -> list[tuple[str, float | None]]:
    """The metrics, the loss first."""
    return sorted(found["metrics"].items(), key=lambda item: (item[0] != "loss", item[0]))


def _record(home: Path, told: Mapping[str, Any]) -> None:
    """Keeps what is known of the classes in the run folder, where the page of the run finds it."""
    draft = home / f".{classes.FILE}"
    try:
        draft.write_text(json.dumps(told))
        draft.replace(home / classes.FILE)
    except OSError as error:
        output.say(f"{home / classes.FILE} cannot be written: {error.strerror}")


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    """The classes, what is confused and the worst examples."""
    firsts = [f"{name} {told[key]:.4g}" for name, key in (("top-1", "top1"), ("top-5", "top5")) if key in told]
    error = f"expected calibration error {told['calibration']['ece']:.4g} ({len(told['calibration']['bins'])} bins)"
    yield "  ".join([*firsts, f"macro F1 {told['macro']['f1']:.4g}", error])
    rates = [
        (each["label"], str(each["examples"]), *(_rate(each[key]) for key in ("precision", "recall", "f1")))
        for each in told["per_class"][:LISTED]
    ]
    yield from output.columns([("CLASS", "EXAMPLES", "PRECISION", "RECALL", "F1"), *rates])
    if told["classes"] > LISTED:
        yield f"and {told['classes'] - LISTED:,} more classes"
    if pairs := _pairs(told)[:MOST]:
        yield f"most confused: {', '.join(f'{label} taken for {other} {number:,}' for number, label, other in pairs)}"
    worst = [
        (
            each["where"] or f"example {each['example']}",
            each["label"],
            each["predicted"],
            f"{each['confidence']:.4f}",
            "nan" if each["loss"] is None else f"{each['loss']:.4g}",
        )
        for each in told["worst"][:MOST]
    ]
    yield from output.columns([("WORST", "LABEL", "PREDICTED", "PROBABILITY", "LOSS"), *worst])


def _pairs(told: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    """Examples, their label and the other class that they are taken for, the most first."""
    if "confused" in told:
        return [(each["examples"], each["label"], each["predicted"]) for each in told["confused"]]
    names = [each["label"] for each in told["per_class"]]
    found = [
        (number, names[row], names[column])
        for row, numbers in enumerate(told["confusion"])
        for column, number in enumerate(numbers)
        if number and row != column
    ]
    return sorted(found, key=lambda pair: -pair[0])


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
