"""`launcher data` and `prepare`: show what is in data, and pack it before a run."""

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
from jaxlaunch.trainer.spec import Mixture, Source

# The largest number of classes, or of columns, that are listed.
MAX_ROWS = 20
# With fewer images of a class on average, a model that is trained from scratch learns little.
FEW_IMAGES = 200
# The length of the longest bar of a histogram, in characters.
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
def data_command(path: str, label: str | None, pictures: Path | None, output_format: str) -> None:
    """Show the contents of PATH, and the data block that reads it.

    PATH is a folder, a file or a pattern of images, of a table or of rows of text, here or in gs://
    or s3://. All of it is read. The output has the number of examples by class and split, sizes,
    types, missing values, broken files and duplicates, and for text the layouts of the rows.

    PATH may also be the job.yaml of a mixture: the output then has the examples of each part, its
    share of the training, and how often it is seen while the run passes once over all parts.
    """
    trainer_process.require_trainer("launcher data")
    if path.endswith((".yaml", ".yml")) and os.path.isfile(path):
        if label is not None or pictures is not None:
            raise UserError(
                "--label and --pictures apply to images and tables, not to a job; leave them out."
            )
        data = _inspect_data({}, _mixture_environ(Path(path)))
        output.show_result(data, output_format, _describe_mixture(data))
        return
    picture_file = None if pictures is None else str(pictures.absolute())
    request = {"path": path, "label": label, "pictures": picture_file}
    data = _inspect_data(request, {**os.environ, "JAX_PLATFORMS": "cpu"})
    output.show_result(data, output_format, _describe_data(path, data))


def _inspect_data(request: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    module, show = "jaxlaunch.trainer.inspect_data", output.show_messages
    return trainer_process.run_program(module, json.dumps(request), environ=environ, show=show)


def _mixture_environ(job_file: Path) -> dict[str, str]:
    job = jobs.load_job(job_file, ())
    if job.train is None or not isinstance(job.train.data, Mixture):
        contents = "a command"
        if job.train is not None:
            contents = f"train.data.source = {job.train.data.source}"
        message = f"{job_file} has {contents}, and the only jobs that can be shown are mixtures."
        raise UserError(message, "give the folder or file of the data.")
    base = job_file.absolute().parent
    train = map_paths(job, base, (RUNS_FOLDER / job.name).absolute(), {}).map_train(job.train)
    return trainer_process.cpu_environ(job, train, base)


def _describe_mixture(data: Mapping[str, Any]) -> Iterator[str]:
    rows = [("PART", "SOURCE", "TRAIN", "HELD OUT", "SHARE", "EPOCHS")]
    for name, part in data["parts"].items():
        examples = (f"{part['train']:,}", f"{part['eval']:,}")
        rates = (f"{part['share']:.4g}", f"{part['epochs']:.4g}")
        rows.append((name, part["source"], *examples, *rates))
    yield from output.format_columns(rows)
    yield f"EPOCHS: in one pass over all {format_count(data['splits']['train'], 'example')}"


def _describe_data(path: str, data: Mapping[str, Any]) -> Iterator[str]:
    is_images = data["kind"] == "images"
    unit = "image" if is_images else "row"
    counts = [f"{split} {format_count(count, unit)}" for split, count in data["splits"].items()]
    yield f"{path}: {', '.join(counts)}"
    describe = {"images": _describe_images, "text": _describe_text, "table": _describe_table}
    yield from describe[data["kind"]](data)
    broken = "in no layout of this format" if data["kind"] == "text" else "cannot be decoded"
    for key, problem in (("broken", broken), ("duplicates", "equal to another")):
        group = data.get(key, {"count": 0})
        if group["count"]:
            yield f"{format_count(group['count'], unit)} {problem}{':' if group['first'] else ''}"
            yield from (f"  {name}" for name in group["first"])
    train = {key: data[key] for key in ("task", "model", "data", "loss", "batch") if key in data}
    if train.get("loss") == {"target": "class"}:
        del train["loss"]
    yield from _describe_usage({"train": train}, default_flow_style=None)
    if is_images:
        counts_by_class = data["classes"]["train"]
        mean = sum(counts_by_class.values()) / max(1, len(counts_by_class))
        if mean < FEW_IMAGES:
            start = f"{{init_from: FOLDER, new_head: true, classes: {len(counts_by_class)}}}"
            yield f"With {mean:.0f} images of a class, fine-tuning a published model is better:"
            yield f"  model: {start}  # docs/images.md"


def _describe_usage(block: Mapping[str, Any], **style: Any) -> Iterator[str]:
    yield "Use it with:"
    text: str = yaml.safe_dump(block, sort_keys=False, allow_unicode=True, width=110, **style)
    yield from (f"  {line}" for line in text.splitlines())


def _describe_images(data: Mapping[str, Any]) -> Iterator[str]:
    for split, classes in data["classes"].items():
        count = format_count(len(classes), "class")
        if len(data["classes"]) > 1:
            count += f" of {split}"
        texts = [f"{name} {number:,}" for name, number in list(classes.items())[:MAX_ROWS]]
        yield f"{count}: {', '.join(texts)}{', …' if len(classes) > MAX_ROWS else ''}"
    if data["sizes"]:
        sizes = (f"{name} {height} × {width}" for name, (height, width) in data["sizes"].items())
        yield f"height × width: {', '.join(sizes)}"
    yield f"formats: {', '.join(f'{name} {number:,}' for name, number in data['formats'].items())}"
    if data["left_out"]:
        yield f"{format_count(data['left_out'], 'other file')} not read"


def _describe_text(data: Mapping[str, Any]) -> Iterator[str]:
    for layout, count in data["layouts"].items():
        yield f"{format_count(count, 'row')} read as {layout}"
    for name, count in data["unread"].items():
        yield f"the column {name!r} is not read, in {format_count(count, 'row')}"


def _describe_table(data: Mapping[str, Any]) -> Iterator[str]:
    rows = [("COLUMN", "KIND", "MISSING", "VALUES")]
    for name, column in list(data["columns"].items())[:MAX_ROWS]:
        if "refused" in column:
            values = f"left out: {column['refused']}"
        elif "values" in column:
            counts = list(column["values"].items())[:5]
            values = ", ".join(f"{value} {number:,}" for value, number in counts)
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
    output_format: str,
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
        advice = "what is complete is kept, and the same command resumes from there"
        output.show_messages(f"stopped; {advice}")
        raise
    if to is None:
        corpora = result.get("prepared", ())
        lines = [line for corpus in corpora for line in _describe_corpus(corpus)]
    else:
        lines = list(_describe_records(to, result))
    output.show_result(result, output_format, lines)


def _prepare_program(data: Source, to: Path | None, resize: int | None) -> tuple[str, ...]:
    source = f"train.data.source = {data.source}"
    if data.is_packable:
        if to is None:
            message = f"{source} is packed into a folder of records: give one, as --to packed."
            raise UserError(message)
        request = {"to": str(to.absolute()), "resize": resize}
        return "jaxlaunch.trainer.prepare.pack", json.dumps(request)
    if isinstance(data, Mixture) and data.part_kind != "text":
        hint = "pack each part as a job with that source, and name its records as a part with "
        message = f"{source} is not packed as a whole, because its parts keep their own weights."
        raise UserError(message, f"{hint}source: array_record.")
    for option, value in (("--to", to), ("--resize", resize)):
        if value is not None:
            message = f"{option} applies to images and tables, not to {source}; leave it out."
            raise UserError(message)
    return ("jaxlaunch.trainer.prepare.text",)


def _describe_records(to: Path, result: Mapping[str, Any]) -> Iterator[str]:
    for split in ("train", "eval"):
        files = [file for file in result["files"].values() if file["split"] == split]
        if files:
            rows = format_count(sum(file["rows"] for file in files), "example")
            size = format_size(sum(file["size"] for file in files))
            yield f"{split}: {rows} in {format_count(len(files), 'file')} of {to}, {size}"
    yield from _describe_usage({"data": result["data"]})


def _describe_corpus(corpus: Mapping[str, Any]) -> Iterator[str]:
    rows, tokens = corpus["rows"], corpus["tokens"]
    more = f" and {format_count(corpus['paths'] - 1, 'more file')}" if corpus["paths"] > 1 else ""
    documents = format_count(corpus["documents"], "document")
    yield f"{corpus['first']}{more}: {documents}, {tokens:,} tokens"
    ratio = corpus["bytes"] / max(tokens, 1)
    yield f"  {format_size(corpus['bytes'])} of text, {ratio:.2f} bytes a token"
    if corpus["replaced"]:
        yield f"  {corpus['replaced']:,} characters were not valid UTF-8 and were replaced"
    if corpus["empty"]:
        yield f"  {corpus['empty']:,} documents are empty"
    if "targets" in corpus:
        yield f"  {corpus['targets']:,} tokens are the assistant's, the targets"
    for note in corpus.get("notes", ()):
        yield f"  {note}"
    train, held_out = f"{rows['train']:,} rows to train on", f"{rows['eval']:,} held out"
    yield f"  {train}, {held_out}, {corpus['fill']:.1%} full"
    yield f"  packed by {corpus['packing']} into rows of {corpus['length']}, in {corpus['folder']}"
    yield "  tokens of a document:"
    longest = max(corpus["lengths"], default=0)
    for power, number in enumerate(corpus["lengths"]):
        if any(corpus["lengths"][: power + 1]):
            yield f"  {2**power:>9,}  {'█' * -(-BAR_CHARS * number // longest)} {number:,}"
