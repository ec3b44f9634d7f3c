"""`launcher data` and `prepare`: the content of data and the block that reads it, and packing before a run."""

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
from jaxlaunch.launcher.local import trainer_process
from jaxlaunch.launcher.local.paths import map_paths
from jaxlaunch.launcher.local.run_folders import RUNS_FOLDER
from jaxlaunch.launcher.wording import format_count, format_size
from jaxlaunch.trainer.spec import Data, Images, Mixture, Table

# The largest number of classes, or of columns, that are listed.
MAX_ROWS = 20
# Characters of the longest bar.
BAR_CHARS = 30


@click.command("data")
@click.argument("path")
@click.option(
    "--label", metavar="COLUMN", help="The column of the label. [default: found by its name]"
)
@click.option(
    "--pictures",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a PNG: images by class, or histograms of columns.",
)
@options.output_option("text", "json", "yaml")
def data_command(path: str, label: str | None, pictures: Path | None, form: str) -> None:
    """Show what is in PATH, and the data block that reads it.

    PATH is a folder, a file or a pattern of images or of a table, here or in gs:// or s3://. All of
    it is read. The output has the number of examples by class and split, sizes, types, missing
    values, broken files and duplicates.

    PATH may also be the job.yaml of a mixture: the output then has the examples of each part, its
    share of the training, and how often it is seen while the run passes once over all parts.
    """
    trainer_process.require_trainer("launcher data")
    if path.endswith((".yaml", ".yml")) and os.path.isfile(path):
        if label is not None or pictures is not None:
            raise UserError(
                "--label and --pictures apply to images and tables, not to a job; leave them out."
            )
        return _show_mixture(Path(path), form)
    request = {
        "path": path,
        "label": label,
        "pictures": None if pictures is None else str(pictures.absolute()),
    }
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    module = "jaxlaunch.trainer.inspect_data"
    data = trainer_process.run_program(
        module, json.dumps(request), environ=environ, show=output.show_messages
    )
    if form != "text":
        return output.show_data(data, form)
    output.show_lines(*_describe_data(path, data))


def _show_mixture(job_file: Path, form: str) -> None:
    job = jobs.load_job(job_file, ())
    if job.train is None or not isinstance(job.train.data, Mixture):
        contents = (
            "a command" if job.train is None else f"train.data.source = {job.train.data.source}"
        )
        raise UserError(
            f"{job_file} has {contents}, and of a job only a mixture is shown.",
            "give the folder or file of the data.",
        )
    base = job_file.absolute().parent
    train = map_paths(job, base, (RUNS_FOLDER / job.name).absolute(), {}).map_train(job.train)
    environ = trainer_process.cpu_environ(job, train, base)
    data = trainer_process.run_program(
        "jaxlaunch.trainer.inspect_data", "{}", environ=environ, show=output.show_messages
    )
    if form != "text":
        return output.show_data(data, form)
    rows = [("PART", "SOURCE", "TRAIN", "HELD OUT", "SHARE", "EPOCHS")]
    for name, part in data["parts"].items():
        counts = (
            f"{part['train']:,}",
            f"{part['eval']:,}",
            f"{part['share']:.4g}",
            f"{part['epochs']:.4g}",
        )
        rows.append((name, part["source"], *counts))
    total = format_count(data["splits"]["train"], "example")
    output.show_lines(*output.format_columns(rows), f"EPOCHS: in one pass over all {total}")


def _describe_data(path: str, data: Mapping[str, Any]) -> Iterator[str]:
    is_images = data["kind"] == "images"
    unit = "image" if is_images else "row"
    yield f"{path}: {', '.join(f'{split} {format_count(number, unit)}' for split, number in data['splits'].items())}"
    yield from _describe_images(data) if is_images else _describe_table(data)
    for key, problem in (("broken", "cannot be decoded"), ("duplicates", "equal to another")):
        group = data.get(key, {"count": 0})
        if group["count"]:
            yield f"{format_count(group['count'], unit)} {problem}{':' if group['first'] else ''}"
            yield from (f"  {name}" for name in group["first"])
    train = {key: data[key] for key in ("model", "data", "loss") if key in data}
    if train.get("loss") == {"target": "class"}:
        del train["loss"]
    yield from _describe_usage({"train": train}, default_flow_style=None)


def _describe_usage(block: Mapping[str, Any], **style: Any) -> Iterator[str]:
    yield "Use it with:"
    text: str = yaml.safe_dump(block, sort_keys=False, allow_unicode=True, width=110, **style)
    yield from (f"  {line}" for line in text.splitlines())


def _describe_images(data: Mapping[str, Any]) -> Iterator[str]:
    for split, classes in data["classes"].items():
        split_text = f" of {split}" if len(data["classes"]) > 1 else ""
        first = ", ".join(f"{name} {number:,}" for name, number in list(classes.items())[:MAX_ROWS])
        yield (
            f"{format_count(len(classes), 'class')}{split_text}: "
            f"{first}{', …' if len(classes) > MAX_ROWS else ''}"
        )
    if data["sizes"]:
        sizes = ", ".join(
            f"{name} {height} × {width}" for name, (height, width) in data["sizes"].items()
        )
        yield f"height × width: {sizes}"
    yield f"formats: {', '.join(f'{name} {number:,}' for name, number in data['formats'].items())}"
    if data["left_out"]:
        yield f"{format_count(data['left_out'], 'other file')} not read"


def _describe_table(data: Mapping[str, Any]) -> Iterator[str]:
    rows = [("COLUMN", "KIND", "MISSING", "VALUES")]
    for name, column in list(data["columns"].items())[:MAX_ROWS]:
        if "refused" in column:
            values = f"left out: {column['refused']}"
        elif "values" in column:
            values = ", ".join(
                f"{value} {number:,}" for value, number in list(column["values"].items())[:5]
            )
            values += ", …" if column["different"] > 5 else ""
        else:
            values = f"{column['least']:g} to {column['most']:g}, mean {column['mean']:g}"
        kind = column["kind"] + (str(column["shape"]) if "shape" in column else "")
        rows.append((name, kind, str(column["missing"] or ""), values))
    yield from output.format_columns(rows)
    if len(data["columns"]) > MAX_ROWS:
        yield f"and {format_count(len(data['columns']) - MAX_ROWS, 'column')} more"


@click.command("prepare")
@options.job_arguments
@options.folder_options
@click.option(
    "--to",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Where the records of images or of a table are written.",
)
@click.option(
    "--resize",
    type=click.IntRange(1, 2**15),
    metavar="PIXELS",
    help="Reduce images whose shorter side is longer. [default: no]",
)
@options.output_option("text", "json", "yaml")
def prepare_command(
    job_file: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    volumes: tuple[str, ...],
    to: Path | None,
    resize: int | None,
    form: str,
) -> None:
    """Pack the data of JOB_FILE, once: text, images or a table.

    Text is tokenized and packed, as `run` does at its first start; give both the same --run-dir and
    --volume. Prepared data is found again by its inputs: files, tokenizer, packing. The command
    prints the number of documents and tokens, their lengths, and how full the rows are.

    Images are decoded, and tables are read, into array_record files in --to; the command prints the
    data block that reads them.

    After an interruption the command resumes; existing files are verified byte by byte.
    """
    job = jobs.load_job(job_file, overrides)
    if job.train is None:
        raise UserError("prepare reads train.data; this job has a command.")
    trainer_process.require_trainer("launcher prepare")
    base, folder = job_file.absolute().parent, (run_dir or RUNS_FOLDER / job.name).absolute()
    train = map_paths(job, base, folder, options.parse_volumes(volumes)).map_train(job.train)
    environ = trainer_process.cpu_environ(job, train, base)
    program = _prepare_program(train.data, to, resize)
    try:
        result = trainer_process.run_program(*program, environ=environ, show=output.show_messages)
    except KeyboardInterrupt:
        output.show_messages(
            "stopped; what is complete is kept, and the same command resumes from there"
        )
        raise
    if form != "text":
        output.show_data(result, form)
    elif to is None:
        output.show_lines(
            *(line for corpus in result["prepared"] for line in _describe_corpus(corpus))
        )
    else:
        output.show_lines(*_describe_records(to, result))


def _prepare_program(data: Data, to: Path | None, resize: int | None) -> tuple[str, ...]:
    """Return the program that prepares the data, and its arguments. Raises UserError for options that do not apply."""
    source = f"train.data.source = {data.source}"
    if isinstance(data, Images | Table):
        if to is None:
            raise UserError(
                f"{source} is packed into a folder of records: give one, as --to packed."
            )
        return "jaxlaunch.trainer.prepare.pack", json.dumps(
            {"to": str(to.absolute()), "resize": resize}
        )
    if isinstance(data, Mixture) and data.part_kind != "text":
        raise UserError(
            f"{source} is not packed as a whole, for its parts keep their own weights.",
            "pack each part as a job with that source, and name its records as a part with source: "
            "array_record.",
        )
    for option, value in (("--to", to), ("--resize", resize)):
        if value is not None:
            raise UserError(
                f"{option} applies to images and tables, not to {source}; leave it out."
            )
    return ("jaxlaunch.trainer.prepare.text",)


def _describe_records(to: Path, result: Mapping[str, Any]) -> Iterator[str]:
    for split in ("train", "eval"):
        files = [file for file in result["files"].values() if file["split"] == split]
        if files:
            rows = sum(file["rows"] for file in files)
            size_bytes = sum(file["size"] for file in files)
            yield (
                f"{split}: {format_count(rows, 'example')} in "
                f"{format_count(len(files), 'file')} of {to}, "
                f"{format_size(size_bytes)}"
            )
    yield from _describe_usage({"data": result["data"]})


def _describe_corpus(corpus: Mapping[str, Any]) -> Iterator[str]:
    more = f" and {format_count(corpus['paths'] - 1, 'more file')}" if corpus["paths"] > 1 else ""
    yield (
        f"{corpus['first']}{more}: {format_count(corpus['documents'], 'document')}, "
        f"{corpus['tokens']:,} tokens"
    )
    yield (
        f"  {format_size(corpus['bytes'])} of text, "
        f"{corpus['bytes'] / max(corpus['tokens'], 1):.2f} bytes a token"
    )
    if corpus["replaced"]:
        yield f"  {corpus['replaced']:,} characters were not valid UTF-8 and were replaced"
    if corpus["empty"]:
        yield f"  {corpus['empty']:,} documents are empty"
    if "targets" in corpus:
        yield f"  {corpus['targets']:,} tokens are the assistant's, the targets"
    rows = corpus["rows"]
    yield (
        f"  {rows['train']:,} rows to train on, {rows['eval']:,} held out, "
        f"{corpus['fill']:.1%} full"
    )
    yield f"  packed by {corpus['packing']} into rows of {corpus['length']}, in {corpus['folder']}"
    yield "  tokens of a document:"
    longest = max(corpus["lengths"], default=0)
    for power, documents in enumerate(corpus["lengths"]):
        if any(corpus["lengths"][: power + 1]):
            yield f"  {2**power:>9,}  {'█' * -(-BAR_CHARS * documents // longest)} {documents:,}"
