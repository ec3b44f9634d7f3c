"""`launcher data`: what a folder or file of data holds, and the block that reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.local import paths, run_folders, trainer_process
from jaxlaunch.launcher.wording import count
from jaxlaunch.trainer.spec import Mixture

LISTED = 20  # classes, or columns
Found = Mapping[str, Any]


@click.command("data")
@click.argument("path")
@click.option("--label", metavar="COLUMN", help="The column of the label. [default: found by its name]")
@click.option(
    "--pictures",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a PNG: images by class, or histograms of columns.",
)
@options.form("text", "json", "yaml")
def data_command(path: str, label: str | None, pictures: Path | None, form: str) -> None:
    """Show what is in PATH, and the data block that reads it.

    PATH is a folder, a file or a pattern of images or of a table, here or in gs:// or s3://. All of it is read. The
    output has the number of examples by class and split, sizes, types, missing values, broken files and duplicates.

    PATH may also be the job.yaml of a mixture: the output then has the examples of each part, its share of the
    training, and how often it is seen while the run passes once over all parts.
    """
    trainer_process.require("launcher data")
    if path.endswith((".yaml", ".yml")) and os.path.isfile(path):
        if label is not None or pictures is not None:
            raise UserError("--label and --pictures apply to images and tables, not to a job; leave them out.")
        return _show_mixture(Path(path), form)
    asked = {"path": path, "label": label, "pictures": None if pictures is None else str(pictures.absolute())}
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    found = trainer_process.run("jaxlaunch.trainer.inspect_data", json.dumps(asked), environ=environ, show=output.say)
    if form != "text":
        return output.data(found, form)
    output.show(*_lines(path, found))


def _show_mixture(job_file: Path, form: str) -> None:
    """What the parts of a job's mixture have."""
    job = jobs.load(job_file, ())
    if job.train is None or not isinstance(job.train.data, Mixture):
        said = "a command" if job.train is None else f"train.data.source = {job.train.data.source}"
        raise UserError(
            f"{job_file} has {said}, and of a job only a mixture is shown.", "give the folder or file of the data."
        )
    base = job_file.absolute().parent
    train = paths.of(job, base, (run_folders.HOME / job.name).absolute(), {}).train(job.train)
    environ = trainer_process.environ(job, train, base)
    found = trainer_process.run("jaxlaunch.trainer.inspect_data", "{}", environ=environ, show=output.say)
    if form != "text":
        return output.data(found, form)
    rows = [("PART", "SOURCE", "TRAIN", "HELD OUT", "SHARE", "EPOCHS")]
    for name, part in found["parts"].items():
        counts = (f"{part['train']:,}", f"{part['eval']:,}", f"{part['share']:.4g}", f"{part['epochs']:.4g}")
        rows.append((name, part["source"], *counts))
    output.show(*output.columns(rows), f"EPOCHS: in one pass over all {count(found['splits']['train'], 'example')}")


def _lines(path: str, found: Found) -> Iterator[str]:
    """The report."""
    unit = "image" if found["kind"] == "images" else "row"
    yield f"{path}: {', '.join(f'{split} {count(number, unit)}' for split, number in found['splits'].items())}"
    yield from _of_images(found) if found["kind"] == "images" else _of_table(found)
    for key, what in (("broken", "cannot be decoded"), ("duplicates", "equal to another")):
        about = found.get(key, {"count": 0})
        if about["count"]:
            yield f"{count(about['count'], unit)} {what}{':' if about['first'] else ''}"
            yield from (f"  {each}" for each in about["first"])
    yield "Use it with:"
    train = {key: found[key] for key in ("model", "data", "loss") if key in found}
    if train.get("loss") == {"target": "class"}:
        del train["loss"]
    yield from (f"  {line}" for line in _yaml({"train": train}))


def _of_images(found: Found) -> Iterator[str]:
    for split, classes in found["classes"].items():
        of = f" of {split}" if len(found["classes"]) > 1 else ""
        first = ", ".join(f"{name} {number:,}" for name, number in list(classes.items())[:LISTED])
        yield f"{count(len(classes), 'class')}{of}: {first}{', …' if len(classes) > LISTED else ''}"
    if found["sizes"]:
        said = ", ".join(f"{name} {high} × {wide}" for name, (high, wide) in found["sizes"].items())
        yield f"height × width: {said}"
    yield f"formats: {', '.join(f'{name} {number:,}' for name, number in found['formats'].items())}"
    if found["left_out"]:
        yield f"{count(found['left_out'], 'other file')} not read"


def _of_table(found: Found) -> Iterator[str]:
    rows = [("COLUMN", "KIND", "MISSING", "VALUES")]
    for name, about in list(found["columns"].items())[:LISTED]:
        if "refused" in about:
            values = f"left out: {about['refused']}"
        elif "values" in about:
            values = ", ".join(f"{value} {number:,}" for value, number in list(about["values"].items())[:5])
            values += ", …" if about["different"] > 5 else ""
        else:
            values = f"{about['least']:g} to {about['most']:g}, mean {about['mean']:g}"
        kind = about["kind"] + (str(about["shape"]) if "shape" in about else "")
        rows.append((name, kind, str(about["missing"] or ""), values))
    yield from output.columns(rows)
    if len(found["columns"]) > LISTED:
        yield f"and {count(len(found['columns']) - LISTED, 'column')} more"


def _yaml(value: Any) -> list[str]:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    return text.splitlines()
