"""`launcher prepare`: packs the text, the images or the table of a job, once, before it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.local import paths, run_folders, trainer_process
from jaxlaunch.launcher.wording import count, size
from jaxlaunch.trainer.spec import Data, Images, Mixture, Table

BAR = 30  # characters of the longest bar


@click.command("prepare")
@options.job
@options.folders
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
@options.form("text", "json", "yaml")
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

    Text is tokenized and packed, as `run` does at its first start; give both the same --run-dir and --volume. Prepared
    data is found again by its inputs: files, tokenizer, packing. The command prints the number of documents and tokens,
    their lengths, and how full the rows are.

    Images are decoded, and tables are read, into array_record files in --to; the command prints the data block that
    reads them.

    After an interruption the command resumes; existing files are verified byte by byte.
    """
    job = jobs.load(job_file, overrides)
    if job.train is None:
        raise UserError("prepare reads train.data; this job has a command.")
    trainer_process.require("launcher prepare")
    base, folder = job_file.absolute().parent, (run_dir or run_folders.HOME / job.name).absolute()
    train = paths.of(job, base, folder, options.volumes(volumes)).train(job.train)
    environ = trainer_process.environ(job, train, base)
    arguments = _arguments(train.data, to, resize)
    try:
        found = trainer_process.run(*arguments, environ=environ, show=output.say)
    except KeyboardInterrupt:
        output.say("stopped; what is complete is kept, and the same command resumes from there")
        raise
    if form != "text":
        output.data(found, form)
    elif to is None:
        output.show(*(line for each in found["prepared"] for line in _lines(each)))
    else:
        output.show(*_of_records(to, found))


def _arguments(data: Data, to: Path | None, resize: int | None) -> tuple[str, ...]:
    """The program that prepares the data, and what it is told. Raises UserError for what it has no use of."""
    source = f"train.data.source = {data.source}"
    if isinstance(data, Images | Table):
        if to is None:
            raise UserError(f"{source} is packed into a folder of records: give one, as --to packed.")
        return "jaxlaunch.trainer.prepare.pack", json.dumps({"to": str(to.absolute()), "resize": resize})
    if isinstance(data, Mixture) and data.of != "text":
        raise UserError(
            f"{source} is not packed as a whole, for its parts keep their own weights.",
            "pack each part as a job with that source, and name its records as a part with source: array_record.",
        )
    for option, value in (("--to", to), ("--resize", resize)):
        if value is not None:
            raise UserError(f"{option} applies to images and tables, not to {source}; leave it out.")
    return ("jaxlaunch.trainer.prepare.text",)


def _of_records(to: Path, found: Mapping[str, Any]) -> Iterator[str]:
    """The report on a folder of records."""
    for split in ("train", "eval"):
        files = [about for about in found["files"].values() if about["split"] == split]
        if files:
            rows, held = sum(about["rows"] for about in files), sum(about["size"] for about in files)
            yield f"{split}: {count(rows, 'example')} in {count(len(files), 'file')} of {to}, {size(held)}"
    yield "Use it with:"
    text: str = yaml.safe_dump({"data": found["data"]}, sort_keys=False, allow_unicode=True, width=110)
    yield from (f"  {line}" for line in text.splitlines())


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The report on one corpus."""
    more = f" and {count(found['paths'] - 1, 'more file')}" if found["paths"] > 1 else ""
    yield f"{found['first']}{more}: {count(found['documents'], 'document')}, {found['tokens']:,} tokens"
    each = found["bytes"] / max(found["tokens"], 1)
    yield f"  {size(found['bytes'])} of text, {each:.2f} bytes a token"
    for key, what in (
        ("replaced", "characters were not valid UTF-8 and were replaced"),
        ("empty", "documents are empty"),
    ):
        if found[key]:
            yield f"  {found[key]:,} {what}"
    if "targets" in found:
        yield f"  {found['targets']:,} tokens are the assistant's, the targets"
    rows = found["rows"]
    yield f"  {rows['train']:,} rows to train on, {rows['eval']:,} held out, {found['fill']:.1%} full"
    yield f"  packed by {found['packing']} into rows of {found['length']}, in {found['folder']}"
    yield "  tokens of a document:"
    most = max(found["lengths"], default=0)
    for power, documents in enumerate(found["lengths"]):
        if any(found["lengths"][: power + 1]):
            yield f"  {2**power:>9,}  {'█' * -(-BAR * documents // most)} {documents:,}"
