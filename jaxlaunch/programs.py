"""The command-line options of the trainer's programs that read a trained model.

`launcher sample`, `eval`, `predict` and `export` declare their options from these classes and pass
the values as JSON to `jaxlaunch.trainer.generate`, `evaluation`, `evaluation.predict` and `export`.
In images and scripts these programs can also be called directly, with the same options.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar

BEST = "best"
# The flag before options as JSON.
JSON = "--json"
Step = int | Literal["best"]

# The key of the Option in the metadata of a field.
_OPTION = "option"


def parse_step(text: str) -> Step:
    """Return the step that a command line names. Raises ValueError for other texts."""
    return "best" if text == BEST else int(text)


@dataclasses.dataclass(frozen=True)
class Option:
    """Help and limits of a field on a command line.

    A field whose default is False is a flag, and one whose default is an empty tuple may be
    repeated.
    """

    help: str
    metavar: str | None = None
    type: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    # The value must be larger than this.
    exclusive_minimum: int | None = None
    maximum: int | None = None
    # A second flag with one letter, such as "-o".
    short: str | None = None


def _option(default: Any, help: str, metavar: str | None = None, **limits: Any) -> Any:
    return dataclasses.field(default=default, metadata={_OPTION: Option(help, metavar, **limits)})


def field_option(field: dataclasses.Field[Any]) -> Option | None:
    """Return the option of a field, or None for `folder` and `files`, which are arguments."""
    return field.metadata.get(_OPTION)


def option_flags(name: str, option: Option) -> tuple[str, ...]:
    """Return the flags of a field: those of `n` are "-n", those of `max_tokens` "--max-tokens"."""
    flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
    return (flag,) if option.short is None else (option.short, flag)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """The options of `jaxlaunch.trainer.generate`."""

    folder: str
    prompt: tuple[str, ...] = _option((), "The text to continue; may be repeated.", "TEXT")
    ids: tuple[str, ...] = _option(
        (), "A prompt as token ids, for a model without tokenizer.", "'1 2 3'"
    )
    chat: bool = _option(
        False, "Chat with the model through its chat template; Ctrl-D ends the conversation."
    )
    system: str | None = _option(None, "The system message of --chat.", "TEXT")
    n: int | None = _option(None, "Samples per prompt. [default: 1]", "N", type=int, minimum=1)
    max_tokens: int | None = _option(
        None,
        "Largest number of tokens of a sample. [default: 128, 512 with --chat]",
        "N",
        type=int,
        minimum=1,
    )
    temperature: float | None = _option(
        None, "Temperature; 0: greedy. [default: 0]", "T", type=float, minimum=0
    )
    top_p: float | None = _option(
        None,
        "Sample from the most likely tokens whose probabilities sum to P.",
        "P",
        type=float,
        exclusive_minimum=0,
        maximum=1,
    )
    top_k: int | None = _option(
        None, "Sample only from the K most likely tokens.", "K", type=int, minimum=1
    )
    min_p: float | None = _option(
        None,
        "Sample only from tokens at least P times as likely as the most likely.",
        "P",
        type=float,
        exclusive_minimum=0,
        maximum=1,
    )
    beams: int | None = _option(None, "Beam search with K beams.", "K", type=int, minimum=1)
    seed: int | None = _option(
        None, "Random seed. [default: 0]", "N", type=int, minimum=0, maximum=2**64 - 1
    )
    step: Step | None = _option(
        None, "The step to load. [default: the newest]", "N|best", type=parse_step
    )
    ema: bool = _option(False, "Use the moving average instead of the weights.")
    precision: Literal["fp32", "tf32", "bf16"] | None = _option(
        None,
        "Numeric precision. [default: the training's, or fp32]",
        choices=("fp32", "tf32", "bf16"),
    )

    def sampling_options(self) -> dict[str, Any]:
        """Return the arguments of trainer.generate.decoding.Sampling that the user has set."""
        names = ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "beams", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """The options of `jaxlaunch.trainer.evaluation`."""

    folder: str
    step: Step | None = _option(
        None, "The step to evaluate. [default: the newest]", "N|best", type=parse_step
    )
    ema: bool = _option(False, "Use the moving average instead of the weights.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict:
    """The options of `jaxlaunch.trainer.evaluation.predict`."""

    folder: str
    files: tuple[str, ...]
    output: str | None = _option(
        None,
        "The table to write: .csv, .jsonl or .parquet. [default: the first rows are printed]",
        "FILE",
        short="-o",
    )
    top: int = _option(
        1,
        "Labels per image or row, with their probabilities. [default: 1]",
        "K",
        type=int,
        minimum=1,
    )
    skip_broken: bool = _option(
        False, "Leave out files and rows that cannot be read, and list them."
    )
    step: Step | None = _option(
        None, "The step to load. [default: the newest]", "N|best", type=parse_step
    )
    ema: bool = _option(False, "Use the moving average instead of the weights.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """The options of `jaxlaunch.trainer.export`."""

    folder: str | None = None
    to: str = _option(dataclasses.MISSING, "The folder to write.", "DIR")
    step: Step | None = _option(
        None, "The step to export. [default: the newest]", "N|best", type=parse_step
    )
    ema: bool = _option(False, "Export the moving average instead of the weights.")
    merged: bool = _option(False, "Export the model with the adapters merged into it.")
    base: str | None = _option(
        None,
        "The folder or URL of the base model. [default: the training's model.init_from]",
        "DIR",
    )


ProgramOptions = TypeVar("ProgramOptions", Sample, Evaluate, Predict, Export)


def json_arguments(options: Sample | Evaluate | Predict | Export) -> tuple[str, str]:
    """Return the arguments from which `read_options` restores the same options."""
    return JSON, json.dumps(dataclasses.asdict(options))


def read_options(
    options_class: type[ProgramOptions], program: str, description: str | None
) -> ProgramOptions:
    """Read the options from the arguments of this process, which are flags or JSON."""
    argv, values = sys.argv[1:], dict[str, Any]()
    if argv[:1] == [JSON]:
        values |= json.loads(argv[1])
    else:
        values |= vars(_build_parser(options_class, program, description).parse_args(argv))
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return options_class(**values)


def _build_parser(
    options_class: type[ProgramOptions], program: str, description: str | None
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    for field in dataclasses.fields(options_class):
        option, is_required = field_option(field), field.default is dataclasses.MISSING
        if option is None:
            is_repeated = field.type == "tuple[str, ...]"
            help_text = "what to read" if is_repeated else "the folder to read, or its URL"
            nargs = "+" if is_repeated else None if is_required else "?"
            parser.add_argument(field.name, nargs=nargs, help=help_text)
            continue
        flags = option_flags(field.name, option)
        if field.default is False:
            parser.add_argument(*flags, action="store_true", help=option.help)
            continue
        settings: dict[str, Any] = {"type": option.type, "help": option.help}
        settings |= {"metavar": option.metavar, "choices": option.choices or None}
        if field.default == ():
            settings |= {"action": "append", "default": []}
        else:
            default = None if is_required else field.default
            settings |= {"required": is_required, "default": default}
        parser.add_argument(*flags, dest=field.name, **settings)
    return parser
