"""`launcher sample`: what a trained model says."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from jaxlaunch import programs
from jaxlaunch.launcher.cli import completions, options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import trained, trainer_process
from jaxlaunch.launcher.wording import count


@click.command("sample")
@click.argument("run", shell_complete=completions.runs)
@options.of_program(programs.Sample)
@options.form("text", "json", "yaml")
def sample_command(run: str, form: str, **given: Any) -> None:
    """Generate text with the model of RUN.

    RUN is the name of a run on this machine, its folder, a step in its folder of checkpoints, a folder or URL of
    checkpoints, or a Hugging Face folder (config.json and safetensors). A single sample is printed while it is
    generated. Several samples are generated together, for all prompts, and printed at the end. With --chat, each line
    that you type is answered, and the model sees all earlier turns. The command uses the devices that JAX finds; with
    JAX_PLATFORMS=cpu it uses no accelerator.
    """
    trainer_process.require("launcher sample")
    if given["chat"]:
        _refuse_beside_chat(given)
    elif given["system"] is not None:
        raise UserError("--system is the system message of a conversation.", "give --chat as well.")
    elif not given["prompt"] and not given["ids"]:
        raise UserError("There is no prompt.", "give --prompt TEXT, or --ids for a model without tokenizer.")
    folder, step = trained.weights(run)
    if given["step"] is None:
        given["step"] = step
    asked = programs.arguments(programs.Sample(folder=folder, **given))
    if given["chat"]:
        return _converse(asked, form)
    found: Mapping[str, Any] = {}
    for event in trainer_process.events("jaxlaunch.trainer.generate", *asked, environ=os.environ):
        if "piece" in event and form == "text":
            output.piece(event["piece"])
        elif "piece" not in event:
            found = event
    for note in found["notes"]:
        output.say(note)
    if form == "text":
        _show(found)
    else:
        output.data({"step": found["step"], "samples": found["samples"]}, form)


def _refuse_beside_chat(given: Mapping[str, Any]) -> None:
    """Raises UserError for options of samples that a conversation does not have."""
    for name, word in (("prompt", "--prompt"), ("ids", "--ids"), ("n", "-n"), ("beams", "--beams")):
        if given[name]:
            raise UserError(
                f"--chat and {word} are both given.",
                "leave one of them out: a conversation asks for each message, and has one answer to it.",
            )


def _converse(asked: tuple[str, ...], form: str) -> None:
    """Prints the model's answers as they are made, or at the end the whole conversation as data."""
    is_shown, found = form == "text", dict[str, Any]()
    for event in trainer_process.events("jaxlaunch.trainer.generate", *asked, environ=os.environ, hear=_typed):
        if "piece" in event and is_shown:
            output.piece(event["piece"])
        elif "ended" in event and is_shown:
            output.piece("\n")
            if not event["ended"]:
                output.say("the answer is cut here; --max-tokens gives it more tokens.")
        elif "refused" in event:
            output.say(f"{event['refused']}; this message is not part of the conversation.")
        elif "notes" in event:
            for note in event["notes"]:
                output.say(note)
        elif "messages" in event:
            found = event
    if not is_shown:
        output.data({"step": found["step"], "messages": found["messages"]}, form)
    elif found["tokens"]:
        _tell_speed(found)


def _typed() -> str | None:
    """The next line of stdin that says something; None at its end. On a terminal it is asked for, and can be edited."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # what input() edits lines with, and keeps them for the arrow keys
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                output.piece("\n")
            return None
        if line.strip():
            return line


def _show(found: Mapping[str, Any]) -> None:
    """Several samples under headings, and how fast they were; a single one was printed on the way."""
    each = [(at, number, one) for at, of_one in enumerate(found["samples"], 1) for number, one in enumerate(of_one, 1)]
    if len(each) == 1:
        output.piece("\n")
    for at, number, one in each if len(each) > 1 else ():
        output.say(f"prompt {at}, sample {number}, log-probability {one['score']:.4g}")
        output.show(one["text"] if "text" in one else " ".join(map(str, one["ids"])))
    _tell_speed(found)


def _tell_speed(found: Mapping[str, Any]) -> None:
    of = "" if found["step"] is None else f" of step {found['step']}"
    speed = found["tokens"] / found["seconds"]
    output.say(f"{count(found['tokens'], 'token')}{of} in {found['seconds']:.1f} s, compiling included: {speed:.3g}/s")
