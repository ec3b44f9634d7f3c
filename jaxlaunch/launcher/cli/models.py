"""`launcher eval`, `predict`, `sample` and `export`: use the model that a run has trained."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NotRequired

import click
from typing_extensions import TypedDict

from jaxlaunch import atomic_file, contract, programs
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import trainer_process
from jaxlaunch.launcher.wording import format_count

# The largest number of classes that are shown.
MAX_CLASSES = 20
# The largest number of confused pairs, and of worst examples, that are shown.
MAX_EXAMPLES = 5


class EvaluationOutput(TypedDict):
    """The metrics of a checkpoint on held-out data."""

    step: int
    metrics: Mapping[str, float]
    # The number of held-out examples.
    examples: int
    # The report of a classification: confusions, and metrics of each class.
    classification: NotRequired[Mapping[str, Any]]


@click.command("eval")
@options.run_argument
@click.option(
    "--data",
    "keys",
    multiple=True,
    metavar="KEY=VALUE",
    help="A key of train.data to replace; may repeat.",
)
@options.program_options(programs.Evaluate)
@click.option("--best", is_flag=True, help="The step that evaluated best: --step best.")
@options.output_option("text", "json", "yaml")
def eval_command(
    run: str,
    keys: tuple[str, ...],
    step: programs.Step | None,
    best: bool,
    ema: bool,
    output_format: str,
) -> None:
    """Evaluate a checkpoint of RUN on its held-out data.

    RUN is the name of a run on this machine, or its folder. The metrics are those that its training
    logs: task, model, precision and held-out examples are those of the job, and each example counts
    once. --data eval_split='test[:50%]', or --data eval_path=/other/*.array_record, evaluates on
    other examples. The command uses the devices that JAX finds, and for a CPU job only the CPU; if
    their number differs from the training's, they split the batch.

    For a classification it also shows precision, recall and F1 of each class, how often classes are
    confused, the expected calibration error (15 bins), and the files of the examples with the
    largest loss. -o json has all of this, and so has classification.json in the run folder.
    """
    trainer_process.require_trainer("launcher eval")
    if best and step not in (None, programs.BEST):
        raise UserError(f"--best and --step {step} name two steps.", "give one of them.")
    step = "best" if best else step
    if step == programs.BEST:
        trainer_process.require_best_step(run)
    training = trainer_process.open_training(run, [f"train.data.{key}" for key in keys])
    folder = trainer_process.find_checkpoints(run)
    program = programs.Evaluate(folder=folder, step=step, ema=ema)
    result = _run_program("evaluation", program, training.device_environ())
    classes = result.get("classification")
    # The page of the run reads this file.
    if classes is not None and not keys:
        path = training.folder / contract.CLASSIFICATION
        text = json.dumps({"step": result["step"], "ema": ema, **classes})
        try:
            atomic_file.write_file(path, text.encode())
        except OSError as error:
            output.show_messages(f"{path} cannot be written: {error.strerror}")
    data: EvaluationOutput = {
        "step": result["step"],
        "metrics": result["metrics"],
        "examples": result["examples"],
    }
    if classes is not None:
        data["classification"] = classes
    output.show_result(data, output_format, _describe_evaluation(result))


def _find_step(
    run: str,
    step: programs.Step | None,
    find_folder: Callable[[str], tuple[str, int | None]],
) -> tuple[str, programs.Step | None]:
    """Return the folder that `find_folder` finds, and the step of the option or of the folder."""
    if step == programs.BEST:
        trainer_process.require_best_step(run)
    folder, folder_step = find_folder(run)
    return folder, folder_step if step is None else step


def _describe_evaluation(result: Mapping[str, Any]) -> Iterator[str]:
    metrics = sorted(result["metrics"].items(), key=lambda item: (item[0] != "loss", item[0]))
    texts = [f"{name} nan" if value is None else f"{name} {value:.6g}" for name, value in metrics]
    yield f"step {result['step']}  {'  '.join(texts)}  examples {result['examples']}"
    if "classification" in result:
        yield from _describe_classes(result["classification"])


def _run_program(
    module: str,
    program: programs.Evaluate | programs.Predict | programs.Export,
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """Run a program of the trainer, and show its notes."""
    arguments = programs.json_arguments(program)
    result = trainer_process.run_program(f"jaxlaunch.trainer.{module}", *arguments, environ=environ)
    output.show_messages(*result["notes"])
    return result


def _describe_classes(classes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rates of the classes, the confused pairs and the worst examples."""
    rates = [("top-1", classes.get("top1")), ("top-5", classes.get("top5"))]
    rates.append(("macro F1", classes["macro"]["f1"]))
    texts = [f"{name} {rate:.4g}" for name, rate in rates if rate is not None]
    calibration = classes["calibration"]
    error = f"expected calibration error {calibration['ece']:.4g} ({len(calibration['bins'])} bins)"
    yield "  ".join([*texts, error])
    rows = [("CLASS", "EXAMPLES", "PRECISION", "RECALL", "F1")]
    for row in classes["per_class"][:MAX_CLASSES]:
        values = [row[key] for key in ("precision", "recall", "f1")]
        cells = ("-" if value is None else f"{value:.4f}" for value in values)
        rows.append((row["label"], str(row["examples"]), *cells))
    yield from output.format_columns(rows)
    if classes["classes"] > MAX_CLASSES:
        yield f"and {classes['classes'] - MAX_CLASSES:,} more classes"
    if pairs := _confused_pairs(classes)[:MAX_EXAMPLES]:
        texts = [f"{label} taken for {other} {number:,}" for number, label, other in pairs]
        yield f"most confused: {', '.join(texts)}"
    worst = [("WORST", "LABEL", "PREDICTED", "PROBABILITY", "LOSS")]
    for row in classes["worst"][:MAX_EXAMPLES]:
        place, loss = row["where"] or f"example {row['example']}", row["loss"]
        loss_text = "nan" if loss is None else f"{loss:.4g}"
        worst.append((place, row["label"], row["predicted"], f"{row['confidence']:.4f}", loss_text))
    yield from output.format_columns(worst)


def _confused_pairs(classes: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    """Return the number, label and predicted class of confused examples, the most first."""
    if "confused" in classes:
        return [(row["examples"], row["label"], row["predicted"]) for row in classes["confused"]]
    labels = [row["label"] for row in classes["per_class"]]
    pairs = [
        (number, labels[row], labels[column])
        for row, numbers in enumerate(classes["confusion"])
        for column, number in enumerate(numbers)
        if number and row != column
    ]
    return sorted(pairs, key=lambda pair: -pair[0])


@click.command("predict")
@options.run_argument
@click.argument("files", nargs=-1, required=True, type=click.Path())
@options.program_options(programs.Predict)
def predict_command(run: str, files: tuple[str, ...], **settings: Any) -> None:
    """Predict the labels of FILES with the model of RUN.

    RUN is the name of a run on this machine, its folder, a step in its folder of checkpoints, a
    folder or URL of checkpoints, or an export. FILES are images or tables that the model can read,
    or folders of them; the images may be in .tar, .parquet and .arrow files. The output has a line
    for each image (file) or row (file, row): label and probability, or numbers in the label's unit.
    A file or row that cannot be read ends the command with an error that names it; --skip-broken
    leaves it out. The data of the training is not needed. The command uses the devices that JAX
    finds, and for a CPU job only the CPU.
    """
    trainer_process.require_trainer("launcher predict")
    folder, settings["step"] = _find_step(run, settings["step"], trainer_process.find_weights)
    program = programs.Predict(folder=folder, files=files, **settings)
    environ: Mapping[str, str] = os.environ
    if trainer_process.has_job(run):
        environ = trainer_process.open_training(run).device_environ()
    result = _run_program("evaluation.predict", program, environ)
    rows, examples = result["rows"], result["examples"]
    if rows:
        table = [list(rows[0])]
        for row in rows:
            values = row.values()
            table.append(
                [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values]
            )
        output.show_lines(*output.format_columns(table))
    if examples <= len(rows):
        return
    left_out = f", {result['skipped']:,} left out" if result["skipped"] else ""
    if program.output is None:
        more = f"and {examples - len(rows):,} more{left_out}"
        output.show_messages(f"{more}; -o FILE writes all of them")
    else:
        step_text = "" if result["step"] is None else f" by step {result['step']}"
        predictions = f"{format_count(examples, 'prediction')}{step_text}{left_out}"
        output.show_messages(f"{program.output}: {predictions}")


@click.command("sample")
@options.run_argument
@options.program_options(programs.Sample)
@options.output_option("text", "json", "yaml")
def sample_command(run: str, output_format: str, **settings: Any) -> None:
    """Generate text with the model of RUN.

    RUN is the name of a run on this machine, its folder, a step in its folder of checkpoints, a
    folder or URL of checkpoints, or a Hugging Face folder (config.json and safetensors). A single
    sample is printed while it is generated. Several samples are generated together, for all
    prompts, and printed at the end. With --chat, each line that you type is answered, and the model
    sees all earlier turns. The command uses the devices that JAX finds; with JAX_PLATFORMS=cpu it
    uses no accelerator.
    """
    trainer_process.require_trainer("launcher sample")
    _check_prompt(settings)
    folder, settings["step"] = _find_step(run, settings["step"], trainer_process.find_weights)
    arguments = programs.json_arguments(programs.Sample(folder=folder, **settings))
    if settings["chat"]:
        _show_conversation(arguments, output_format)
        return
    result: Mapping[str, Any] = {}
    module = "jaxlaunch.trainer.generate"
    for event in trainer_process.stream_program(module, *arguments, environ=os.environ):
        if "piece" not in event:
            result = event
        elif output_format == "text":
            output.show_piece(event["piece"])
    output.show_messages(*result["notes"])
    if output_format == "text":
        _show_samples(result)
    else:
        output.show_data({"step": result["step"], "samples": result["samples"]}, output_format)


def _check_prompt(settings: Mapping[str, Any]) -> None:
    """Raise UserError if the options for prompts and conversations do not fit together."""
    if settings["chat"]:
        options_of_key = {"prompt": "--prompt", "ids": "--ids", "n": "-n", "beams": "--beams"}
        for key, option in options_of_key.items():
            if settings[key]:
                raise UserError(
                    f"--chat and {option} cannot be combined.",
                    "leave one of them out: --chat asks for each message, and prints one answer.",
                )
    elif settings["system"] is not None:
        raise UserError("--system is the system message of a conversation.", "give --chat as well.")
    elif not settings["prompt"] and not settings["ids"]:
        message = "There is no prompt."
        raise UserError(message, "give --prompt TEXT, or --ids for a model without tokenizer.")


def _show_samples(result: Mapping[str, Any]) -> None:
    """Print the samples. A single one was already printed while it was generated."""
    if sum(map(len, result["samples"])) == 1:
        output.show_piece("\n")
    else:
        for prompt, samples in enumerate(result["samples"], 1):
            for number, sample in enumerate(samples, 1):
                name = f"prompt {prompt}, sample {number}"
                output.show_messages(f"{name}, log-probability {sample['score']:.4g}")
                text = sample["text"] if "text" in sample else " ".join(map(str, sample["ids"]))
                output.show_lines(text)
    _show_speed(result)


def _show_conversation(arguments: tuple[str, ...], output_format: str) -> None:
    """Print the model's answers as they are generated, or the conversation as data at its end."""
    is_text, result = output_format == "text", dict[str, Any]()
    for event in trainer_process.stream_program(
        "jaxlaunch.trainer.generate", *arguments, environ=os.environ, answer=_read_message
    ):
        if "piece" in event and is_text:
            output.show_piece(event["piece"])
        elif "ended" in event and is_text:
            output.show_piece("\n")
            if not event["ended"]:
                output.show_messages("the answer is cut here; --max-tokens gives it more tokens.")
        elif "refused" in event:
            consequence = "this message is not part of the conversation."
            output.show_messages(f"{event['refused']}; {consequence}")
        elif "notes" in event:
            output.show_messages(*event["notes"])
        elif "messages" in event:
            result = event
    if not is_text:
        output.show_data({"step": result["step"], "messages": result["messages"]}, output_format)
    elif result["tokens"]:
        _show_speed(result)


def _read_message() -> str | None:
    """Return the next line of stdin that is not blank, or None at its end."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            # This module adds line editing and a history to input().
            importlib.import_module("readline")
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                output.show_piece("\n")
            return None
        if line.strip():
            return line


def _show_speed(result: Mapping[str, Any]) -> None:
    step_text = "" if result["step"] is None else f" of step {result['step']}"
    tokens, seconds = result["tokens"], result["seconds"]
    speed = f"in {seconds:.1f} s, compiling included: {tokens / seconds:.3g}/s"
    output.show_messages(f"{format_count(tokens, 'token')}{step_text} {speed}")


@click.command("export")
@options.run_argument
@options.program_options(programs.Export)
def export_command(run: str, **settings: Any) -> None:
    """Export a checkpoint of RUN as a Hugging Face model.

    RUN is the name of a run on this machine, its folder, a step in its folder of checkpoints, or a
    folder or URL of checkpoints. The command writes config.json and safetensors to DIR, all or
    none; `transformers` and `train.model.init_from` can load them. The checkpoint is verified
    first, then read one array at a time. The best step is that of train.checkpoint.best. Adapters
    (train.lora) are written as a peft folder: adapter_config.json and adapter_model.safetensors.
    For images, preprocessor_config.json is written as well if the model has pixel_mean. The MLP of
    a table, which Hugging Face does not have, is written as safetensors with its sizes and columns,
    for `launcher predict` and other programs.
    """
    trainer_process.require_trainer("launcher export")
    find_folder = trainer_process.find_checkpoint_step
    folder, settings["step"] = _find_step(run, settings["step"], find_folder)
    program = programs.Export(folder=folder, **settings)
    result = _run_program("export", program, os.environ)
    model = f"{result['architecture']} of step {result['step']}"
    size = f"{result['parameters']:,} parameters in {result['dtype']}"
    files = format_count(len(result["files"]), "file")
    output.show_lines(f"{program.to}: {model}, {size}, {files}")
