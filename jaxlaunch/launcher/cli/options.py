"""Arguments and options that several commands share, and how their values are parsed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jaxlaunch import programs
from jaxlaunch.launcher.cli import completions
from jaxlaunch.launcher.errors import UserError

WAITED_TOO_LONG = 124  # exit code

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def job(command: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments JOB_FILE and KEY=VALUE: `job_file` and `overrides`."""
    command = click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=completions.keys)(command)
    return click.argument("job_file", metavar="JOB_FILE", type=click.Path(path_type=Path))(command)


def folders(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options --run-dir and --volume: `run_dir` and `volumes`, which `volumes` reads."""
    text = "A folder here for a volume of the job, by its name or mount path."
    command = click.option("--volume", "volumes", multiple=True, metavar="NAME=DIR", help=text)(command)
    text = "The run folder. [default: runs/<name>]"
    return click.option("--run-dir", type=_Folder(path_type=Path), help=text)(command)


class _Folder(click.Path):
    """A path that is not empty, as that of an unset variable is: it would be the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        return self.fail("it is empty.", param, ctx) if value == "" else super().convert(value, param, ctx)


def volumes(given: tuple[str, ...]) -> dict[str, Path]:
    """The folder of each volume that --volume names. Raises UserError for what is not NAME=DIR."""
    pairs = [volume.partition("=") for volume in given]
    for name, equals, folder in pairs:
        if not (name and equals and folder):
            raise UserError(f"--volume {name}{equals}{folder} is not NAME=DIR.", "such as data=./data.")
    return {name: Path(folder).absolute() for name, _, folder in pairs}


def defaults(default: str) -> Decorator:
    """The option --defaults: `defaults_file`; `default` says where the cluster defaults come from without it."""
    text = f"The cluster defaults: a YAML file, plain or as a ConfigMap. [default: {default}]"
    return click.option("--defaults", "defaults_file", type=click.Path(path_type=Path), help=text)


def place(what: str = "The job's namespace. [default: the context's]") -> Decorator:
    """The options `namespace` and `context`; `what` is the help of the first."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        text = "The kubeconfig context to use. [default: the current one]"
        command = click.option("--context", help=text)(command)
        return click.option("-n", "--namespace", help=what)(command)

    return add


def whose(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options --local and --cluster: `where`, which is None where neither is given."""
    text = "Only {}."
    for where, what in (("cluster", "the cluster's jobs"), ("local", "the runs of this machine")):
        command = click.option(f"--{where}", "where", flag_value=where, help=text.format(what))(command)
    return command


def form(*forms: str) -> Decorator:
    """The option --output: `form`, by default the first."""
    text = f"The form of the output. [default: {forms[0]}]"
    return click.option("-o", "--output", "form", type=click.Choice(forms), default=forms[0], help=text)


def screen_form(text: str) -> Decorator:
    """The option --output of what is printed for a person to read: `form`, None by default."""
    return click.option("-o", "--output", "form", type=click.Choice(["json", "yaml", "wide"]), help=text)


def from_volume(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option --from-volume: `is_from_volume`."""
    text = "Read the job's run folder on its volume through a short-lived pod; the job's own pods may be deleted."
    return click.option("--from-volume", "is_from_volume", is_flag=True, help=text)(command)


class _Step(click.ParamType[programs.Step]):
    """The number of a step, or `best`."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> programs.Step:
        """The step. Fails for anything else."""
        try:
            return programs.step(value)
        except ValueError:
            self.fail(f"{value!r} is neither the number of a step nor best.", param, ctx)


def of_program(kind: type[programs.Sample | programs.Evaluate | programs.Predict | programs.Export]) -> Decorator:
    """Adds the options of a program of the trainer, each under the name of its field."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        """Adds them in their order."""
        for field in reversed(dataclasses.fields(kind)):
            if (option := programs.option_of(field)) is None:
                continue
            how: dict[str, Any] = {"is_flag": True} if field.default is False else {"type": _type(option)}
            if field.default is dataclasses.MISSING or field.default == ():
                how |= {"multiple": True} if field.default == () else {"required": True}
            if isinstance(field.default, int) and field.default is not False:
                how |= {"default": field.default}
            names = (*programs.flags(field.name, option), field.name)
            command = click.option(*names, metavar=option.metavar, help=option.help, **how)(command)
        return command

    return add


def _type(option: programs.Option) -> click.ParamType[Any] | None:
    """How click reads and checks a value; None for text."""
    if option.choices:
        return click.Choice(option.choices)
    if option.type is programs.step:
        return _Step()
    low = option.least if option.above is None else option.above
    if option.type is int:
        return click.IntRange(low, option.most)
    if option.type is float:
        return click.FloatRange(low, option.most, min_open=option.above is not None)
    return None


def seconds(option: str, given: str | None) -> float | None:
    """The value of a duration option. Raises UserError when it is not a duration."""
    if given is None:
        return None
    from jaxlaunch.launcher.job import types  # with pydantic, for which other commands do not wait

    try:
        return types.parse_duration(given)
    except ValueError:
        raise UserError(f"{option} {given} is not a duration.", "write 90s, 10m, 12h or 3d.") from None
