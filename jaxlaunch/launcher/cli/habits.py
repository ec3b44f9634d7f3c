"""Answer what users of other tools type, by the tables of foreign_words.py.

The module is imported only for a word or an option that launcher does not have.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath

import click

from jaxlaunch.launcher.cli.foreign_words import (
    CHOICES,
    OPTIONS,
    PROGRAM,
    RUN,
    TOOLS,
    WORDS,
    Advice,
    Alias,
)
from jaxlaunch.launcher.cli.options import PROGRAM_SUFFIXES, RESOURCES
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.runs import layout

JOB_SUFFIXES = (".yaml", ".yml")
# The words after these options are values.
_OPTIONS_WITH_VALUES = ("-n", "--namespace", "--context", "-o", "--output", "-u", "--user")


def translate_words(arguments: Sequence[str], commands: Mapping[str, str]) -> list[str]:
    """Return the arguments with an alias replaced. Raises UserError with the advice for a word.

    Arguments that begin with no word of another tool are returned as they are.
    """
    first = arguments[0]
    suffix = PurePath(first).suffix
    if suffix in JOB_SUFFIXES:
        raise UserError(f"{first} is a file, not a command.", _fill_in(RUN, arguments))
    if suffix in PROGRAM_SUFFIXES:
        raise UserError(f"{first} is a program, not a command.", _fill_in(PROGRAM, arguments))
    length, answer = _find_answer(arguments)
    rest = arguments[length:]
    if length == 1 and first.lower() in TOOLS and rest:
        if rest[0] in commands:
            # A command may change something, so it must be typed as it is.
            hint = f"leave the word out: `{shlex.join(['launcher', *rest])}`."
            raise UserError(f"launcher has no command {first}.", hint)
        if _find_answer(rest)[1] is not None:
            return translate_words(rest, commands)
    if answer is None:
        return list(arguments)
    if isinstance(answer, Advice):
        words = " ".join(arguments[:length]).lower()
        raise UserError(f"launcher has no command {words}.", _fill_in(answer, rest))
    return _expand_alias(answer, rest)


def _expand_alias(alias: Alias, rest: Sequence[str]) -> list[str]:
    """Return the command that an alias means, with the arguments that follow the alias."""
    if rest[:1] and rest[0].lower() in RESOURCES:
        rest = rest[1:]
    operands = _list_operands(rest)
    replacement = alias.words
    if operands and operands[0].endswith(JOB_SUFFIXES):
        replacement = alias.with_file or alias.words
    elif operands and not _is_folder_of_runs(operands[0]):
        replacement = alias.with_name or alias.words
    return [*replacement.split(), *rest]


def _find_answer(arguments: Sequence[str]) -> tuple[int, Alias | Advice | None]:
    """Return how many first words have an answer together, and the answer."""
    pair = " ".join(arguments[:2]).lower()
    if len(arguments) > 1 and (answer := WORDS.get(pair)) is not None:
        return 2, answer
    return 1, WORDS.get(arguments[0].lower())


def _is_folder_of_runs(operand: str) -> bool:
    return os.path.isdir(operand) and not os.path.exists(os.path.join(operand, layout.LOCK))


def explain_program(program: str) -> UserError:
    """Return the error about a program in the place of a job file."""
    arguments = sys.argv[2:]
    return UserError(f"{program} is a program, not a job.", _fill_in(PROGRAM, arguments))


def explain_error(error: click.UsageError, commands: Mapping[str, str]) -> click.ClickException:
    """Return an error of the command line with the command, option or value that is meant."""
    context = error.ctx
    if context is None:
        return error
    if isinstance(error, click.NoSuchOption):
        return _explain_option(error, context, commands)
    if isinstance(error, click.MissingParameter):
        hint = _MISSING_HINTS.get(getattr(error.param, "name", None) or "")
        if hint is not None:
            message = f"Missing argument '{_metavar(error.param, context)}'. {hint}"
            return click.UsageError(message, context)
    if isinstance(error, click.BadParameter) and isinstance(error.param, click.Option):
        for option in error.param.opts:
            words = CHOICES.get((context.info_name or "", option), {})
            if match := next((word for word in _typed_values(option) if word in words), None):
                message = f"'{match}' is '{words[match]}' here: {option} {words[match]}."
                return click.BadParameter(message, context, error.param)
    return error


_MISSING_HINTS = {
    "name": "`launcher list` shows the names.",
    "names": "`launcher list` shows the names.",
    "run": "`launcher list --local` shows the runs.",
    "runs": "`launcher list --local` shows the runs.",
    "job_file": "`launcher init` writes a first one.",
}


def _metavar(parameter: click.Parameter | None, context: click.Context) -> str:
    assert parameter is not None
    return parameter.make_metavar(context).removesuffix("...")


def _typed_values(option: str) -> list[str]:
    """Return the values that the user typed after an option."""
    words = sys.argv[1:]
    values = [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return values + [words[index + 1] for index, word in enumerate(words[:-1]) if word == option]


def _explain_option(
    error: click.NoSuchOption, context: click.Context, commands: Mapping[str, str]
) -> click.ClickException:
    from jaxlaunch.spelling import find_nearest

    option, words = error.option_name, sys.argv[1:]
    no_option = f"No such option '{option}'."
    if context.parent is None:
        # An option of a command before the command, as kubectl allows it.
        index = next((index for index, word in enumerate(words) if word in commands), None)
        if index is None:
            return click.NoSuchOption(
                option, no_option, find_nearest(option, ["--version", "--help"]), context
            )
        moved = shlex.join(["launcher", *words[index:], *words[:index]])
        return click.NoSuchOption(
            option, f"{no_option} It follows the command: `{moved}`.", ctx=context
        )
    command, parameters = context.info_name or "", context.command.params
    has_overrides = any(parameter.name == "overrides" for parameter in parameters)
    has_job = any(parameter.name == "job_file" for parameter in parameters)
    if has_job and any(word.endswith(PROGRAM_SUFFIXES) for word in words[1:]):
        return click.NoSuchOption(
            option, f"{no_option} {_capitalize(_fill_in(PROGRAM, words[1:]))}", ctx=context
        )
    advice = OPTIONS.get((command, option)) or OPTIONS.get(("", option))
    if advice is not None:
        text = _fill_in(advice, words[1:], command)
        return click.NoSuchOption(option, f"{no_option} {_capitalize(text)}", ctx=context)
    if has_overrides and (example := _find_key(option.lstrip("-"))) is not None:
        message = f"{no_option} {example} Arguments of your program belong in its command:."
        return click.NoSuchOption(option, message, ctx=context)
    names = [
        name
        for parameter in parameters
        if isinstance(parameter, click.Option)
        for name in parameter.opts
    ]
    suggestions = find_nearest(option, names)
    if not suggestions and has_overrides:
        no_option += " A key of the job has no dashes, as in hosts=2; arguments of your program "
        no_option += "belong in its command:."
    return click.NoSuchOption(option, no_option, suggestions, context)


def _find_key(word: str) -> str | None:
    """Return a sentence with the key of the job that an option names, or None."""
    # Imported here, because most errors need no schema.
    from jaxlaunch.launcher.job import foreign_keys, introspection
    from jaxlaunch.launcher.job.schema import JobSpec
    from jaxlaunch.launcher.wording import format_key_path

    name = word.replace("-", "_")
    if (counterpart := foreign_keys.find_counterpart(word)) is not None:
        if counterpart.key is None:
            return _capitalize(counterpart.note)
        key = counterpart.key
    else:
        paths = [path for path, _ in introspection.walk_fields(JobSpec)]
        matches = [path for path in paths if name in (path[-1], format_key_path(path))]
        depth = min(map(len, matches), default=0)
        keys = {format_key_path(path) for path in matches if len(path) == depth}
        if len(keys) != 1:
            return None
        key = keys.pop()
    return f"A key of the job has no dashes: {key}=VALUE."


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list_operands(arguments: Sequence[str]) -> list[str]:
    """Return the words that are neither options, nor their values, nor KEY=VALUE."""
    words = zip(["", *arguments], arguments, strict=False)
    return [
        word
        for previous, word in words
        if not word.startswith("-") and "=" not in word and previous not in _OPTIONS_WITH_VALUES
    ]


def _fill_in(advice: Advice, arguments: Sequence[str], command: str = "") -> str:
    """Return the line of an answer with the name and the file that the user typed."""
    operands = [word for word in _list_operands(arguments) if word.lower() not in RESOURCES]
    files = [word for word in operands if word.endswith(JOB_SUFFIXES)]
    programs = [word for word in operands if word.endswith(PROGRAM_SUFFIXES)]
    names = [word for word in operands if word not in files and word not in programs]
    if programs and advice.with_program is not None:
        advice = advice.with_program
    elif files and advice.with_file is not None:
        advice = advice.with_file
    # `kubectl cp NAME:PATH` names a path in a pod, `runs/NAME` the folder of a run.
    name = names[0].partition(":")[0] if names else "NAME"
    program = programs[0] if programs else "train.py"
    interpreter = "bash" if program.endswith(".sh") else "python"
    values = {
        "command": command,
        "file": shlex.quote(files[0]) if files else "JOB_FILE",
        "name": shlex.quote(name.rpartition("/")[2] or name),
        "program": f"{interpreter}, {shlex.quote(program)}",
    }
    return advice.text.format_map(values)
