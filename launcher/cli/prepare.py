"""`launcher prepare`: tokenizes and packs the text of a job, once, before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.local import paths, run_folders, trainer_process
from jaxlaunch.launcher.wording import count, size

BAR = 30  # characters of the longest bar


@click.command("prepare")
@options.job
@options.folders
@options.form("text", "json", "yaml")
def prepare_command(
    job_file: Path, overrides: tuple[str, ...], run_dir: Path | None, volumes: tuple[str, ...], form: str
) -> None:
    """Tokenize and pack the text of JOB_FILE, once.

    `run` does the same at its first start; give both the same --run-dir and --volume. What is prepared is found again
    by what it was made of: files, tokenizer, packing. After an interruption it resumes; what is there already is
    verified to the byte. Prints how many documents and tokens there are, how long they are, and how full the rows.
    """
    job = jobs.load(job_file, overrides, output.say)
    if job.train is None:
        raise UserError("prepare reads train.data; this job has a command.")
    trainer_process.require("launcher prepare")
    base, folder = job_file.absolute().parent, (run_dir or run_folders.HOME / job.name).absolute()
    train = paths.of(job, base, folder, options.volumes(volumes)).train(job.train)
    environ = trainer_process.environ(job, train, base)
    try:
        found = trainer_process.run("jaxlaunch.trainer.text.prepare", environ=environ, show=output.say)["prepared"]
    except KeyboardInterrupt:
        output.say("stopped; what is complete is kept, and the same command resumes from there")
        raise
    if form == "text":
        output.show(*(line for each in found for line in _lines(each)))
    else:
        output.data({"prepared": found}, form)


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
