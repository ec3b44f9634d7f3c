"""Arguments and options that several commands share, how their values are parsed, and what the Tab key offers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxlaunch import programs
from jaxlaunch.launcher.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

# Exit code of a wait that timed out.
EXIT_TIMEOUT = 124

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


# --- completions ----------------------------------------------------------------------------------


def complete_runs(_: click.Context, __: click.Parameter, prefix: str) -> list[str]:
    """Return the names of the runs below runs/."""
    folders = (
        (path.parent for path in Path("runs").glob(f"{prefix}*/job.yaml"))
        if "/" not in prefix
        else ()
    )
    return sorted(folder.name for folder in folders)


def complete_topics(_: click.Context, __: click.Parameter, prefix: str) -> list[str]:
    """Return the pages and the commands that `launcher help` shows."""
    from jaxlaunch.launcher.cli import help
    from jaxlaunch.launcher.cli.main import COMMANDS

    docs = help.docs_folder()
    topics = {*COMMANDS, *([] if docs is None else help.list_pages(docs))}
    return sorted(topic for topic in topics if topic.startswith(prefix))


def complete_keys(_: click.Context, __: click.Parameter, prefix: str) -> list[str]:
    """Return the keys of the block that has been typed so far: `train.m` has `train.mesh.` and `train.model.`."""
    from jaxlaunch.launcher.job import introspection
    from jaxlaunch.launcher.job.schema import JobSpec

    block = prefix.rpartition(".")[0]
    dot = block and "."
    models: list[type[BaseModel]] = [JobSpec]
    for name in block.split(".") if block else ():
        fields = [introspection.block_fields(model).get(name) for model in models]
        types = [introspection.Type.from_field(field) for field in fields if field is not None]
        models = [model for type_ in types for model in introspection.nested_blocks(type_)]
    keys = {
        f"{block}{dot}{name}"
        + ("." if introspection.nested_blocks(introspection.Type.from_field(field)) else "=")
        for model in models
        for name, field in introspection.block_fields(model).items()
    }
    return sorted(key for key in keys if key.startswith(prefix))


# --- arguments and options ------------------------------------------------------------------------


def job_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments JOB_FILE and KEY=VALUE: `job_file` and `overrides`."""
    command = click.argument(
        "overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=complete_keys
    )(command)
    return click.argument("job_file", metavar="JOB_FILE", type=click.Path(path_type=Path))(command)


run_argument = click.argument("run", shell_complete=complete_runs)
name_argument = click.argument("name", metavar="JOB_NAME", shell_complete=complete_runs)


class _Folder(click.Path):
    """A path that is not empty, as that of an unset variable is: it would be the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return (
            self.fail("it is empty.", param, ctx)
            if value == ""
            else super().convert(value, param, ctx)
        )


def folder_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --run-dir and --volume: `run_dir` and `volumes`, which `parse_volumes` reads."""
    text = "A folder here for a volume of the job, by its name or mount path."
    command = click.option("--volume", "volumes", multiple=True, metavar="NAME=DIR", help=text)(
        command
    )
    text = "The run folder. [default: runs/<name>]"
    return click.option("--run-dir", type=_Folder(path_type=Path), help=text)(command)


def parse_volumes(volumes: tuple[str, ...]) -> dict[str, Path]:
    """Return the folder of each volume that --volume names. Raises UserError for what is not NAME=DIR."""
    pairs = [volume.partition("=") for volume in volumes]
    for name, equals, folder in pairs:
        if not (name and equals and folder):
            raise UserError(
                f"--volume {name}{equals}{folder} is not NAME=DIR.", "such as data=./data."
            )
    return {name: Path(folder).absolute() for name, _, folder in pairs}


def defaults_option(default: str) -> Decorator:
    """Add the option --defaults: `defaults_file`; `default` says where the cluster defaults come from without it."""
    text = f"The cluster defaults: a YAML file, plain or as a ConfigMap. [default: {default}]"
    return click.option("--defaults", "defaults_file", type=click.Path(path_type=Path), help=text)


def cluster_options(
    namespace_help: str = "The job's namespace. [default: the context's]",
) -> Decorator:
    """Add the options `namespace` and `context`."""

    def add_options(command: Callable[..., Any]) -> Callable[..., Any]:
        text = "The kubeconfig context to use. [default: the current one]"
        command = click.option("--context", help=text)(command)
        return click.option("-n", "--namespace", help=namespace_help)(command)

    return add_options


def location_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --local and --cluster: `location`, which is None if neither is given."""
    for location, subject in (
        ("cluster", "the cluster's jobs"),
        ("local", "the runs of this machine"),
    ):
        command = click.option(
            f"--{location}", "location", flag_value=location, help=f"Only {subject}."
        )(command)
    return command


def output_option(*forms: str) -> Decorator:
    """Add the option --output: `form`, by default the first."""
    text = f"The form of the output. [default: {forms[0]}]"
    return click.option(
        "-o", "--output", "form", type=click.Choice(forms), default=forms[0], help=text
    )


def screen_output_option(text: str) -> Decorator:
    """Add the option --output of what is printed for a person to read: `form`, None by default."""
    return click.option(
        "-o", "--output", "form", type=click.Choice(["json", "yaml", "wide"]), help=text
    )


def from_volume_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option --from-volume: `is_from_volume`."""
    text = (
        "Read the job's run folder on its volume through a short-lived pod; the job's own pods "
        "may be deleted."
    )
    return click.option("--from-volume", "is_from_volume", is_flag=True, help=text)(command)


class _Step(click.ParamType[programs.Step]):
    """The number of a step, or `best`."""

    name = "step"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> programs.Step:
        try:
            return programs.parse_step(value)
        except ValueError:
            self.fail(f"{value!r} is neither the number of a step nor best.", param, ctx)


def program_options(
    kind: type[programs.Sample | programs.Evaluate | programs.Predict | programs.Export],
) -> Decorator:
    """Add the options of a program of the trainer in their order, each under the name of its field."""

    def add_options(command: Callable[..., Any]) -> Callable[..., Any]:
        for field in reversed(dataclasses.fields(kind)):
            if (option := programs.field_option(field)) is None:
                continue
            settings: dict[str, Any] = (
                {"is_flag": True} if field.default is False else {"type": _click_type(option)}
            )
            if field.default is dataclasses.MISSING or field.default == ():
                settings |= {"multiple": True} if field.default == () else {"required": True}
            if isinstance(field.default, int) and field.default is not False:
                settings |= {"default": field.default}
            names = (*programs.option_flags(field.name, option), field.name)
            command = click.option(*names, metavar=option.metavar, help=option.help, **settings)(
                command
            )
        return command

    return add_options


def _click_type(option: programs.Option) -> click.ParamType[Any] | None:
    if option.choices:
        return click.Choice(option.choices)
    if option.type is programs.parse_step:
        return _Step()
    low = option.least if option.above is None else option.above
    if option.type is int:
        return click.IntRange(low, option.most)
    if option.type is float:
        return click.FloatRange(low, option.most, min_open=option.above is not None)
    return None


def parse_duration(option: str, value: str | None) -> float | None:
    """Return the seconds of a duration option. Raises UserError if it is not a duration."""
    if value is None:
        return None
    # Imported here with pydantic, which other commands do not wait for.
    from jaxlaunch.launcher.job import types

    try:
        return types.parse_duration(value)
    except ValueError:
        raise UserError(
            f"{option} {value} is not a duration.", "write 90s, 10m, 12h or 3d."
        ) from None
