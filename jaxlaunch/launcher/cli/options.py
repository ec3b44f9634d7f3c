"""Arguments and options that several commands share, and shell completions."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxlaunch import programs
from jaxlaunch.launcher.cli import output
from jaxlaunch.launcher.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

# Exit code of a wait that timed out.
EXIT_TIMEOUT = 124

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


# --- completions ----------------------------------------------------------------------------------


def complete_runs(_: click.Context, __: click.Parameter, prefix: str) -> list[str]:
    """Return the names of the runs below runs/."""
    files = Path("runs").glob(f"{prefix}*/job.yaml") if "/" not in prefix else ()
    return sorted(file.parent.name for file in files)


def complete_topics(_: click.Context, __: click.Parameter, prefix: str) -> list[str]:
    """Return the pages and the commands that `launcher help` shows."""
    from jaxlaunch.launcher.cli import help
    from jaxlaunch.launcher.cli.main import COMMANDS

    docs = help.docs_folder()
    topics = {*COMMANDS, *([] if docs is None else help.list_pages(docs))}
    return sorted(topic for topic in topics if topic.startswith(prefix))


def complete_keys(_: click.Context, __: click.Parameter, prefix: str) -> list[str]:
    """Return the keys of a job that begin with a prefix, such as `train.mesh.` for `train.me`."""
    from jaxlaunch.launcher.job.introspection import Type, block_fields, nested_blocks
    from jaxlaunch.launcher.job.schema import JobSpec

    block, dot, _start = prefix.rpartition(".")
    models: list[type[BaseModel]] = [JobSpec]
    for name in block.split(".") if block else ():
        fields = [block_fields(model).get(name) for model in models]
        types = [Type.from_field(field) for field in fields if field is not None]
        models = [model for type_ in types for model in nested_blocks(type_)]
    keys = set()
    for model in models:
        for name, field in block_fields(model).items():
            suffix = "." if nested_blocks(Type.from_field(field)) else "="
            keys.add(f"{block}{dot}{name}{suffix}")
    return sorted(key for key in keys if key.startswith(prefix))


# --- arguments and options ------------------------------------------------------------------------


def _combine(*decorators: Decorator) -> Decorator:
    """Combine decorators into one. The first is the outermost."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


# Interpreters and launchers of programs, which users type where a job file belongs.
PROGRAM_SUFFIXES = (".py", ".sh")
PROGRAMS = ("python", "python3", "torchrun", "accelerate", "deepspeed", "mpirun", "bash", "sh")


def check_job_file(_: click.Context, __: click.Parameter, file: Path | None) -> Path | None:
    """Return the path. Raises UserError for a program in the place of a job file."""
    if file is not None and (file.suffix in PROGRAM_SUFFIXES or str(file) in PROGRAMS):
        # Imported here, because it is needed only for the error.
        from jaxlaunch.launcher.cli import habits

        raise habits.explain_program(str(file))
    return file


# The arguments JOB_FILE and KEY=VALUE, as `job_file` and `overrides`.
job_arguments = _combine(
    click.argument(
        "job_file",
        metavar="JOB_FILE",
        type=click.Path(path_type=Path),
        callback=check_job_file,
    ),
    click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=complete_keys),
)


# What kubectl and others write between a verb and a name.
RESOURCES = ("job", "jobs", "jobset", "jobsets", "run", "runs", "workload", "workloads")
# Prefixes of names in the output of kubectl and of this command.
_KIND_PREFIXES = ("job/", "jobset/", "jobset.jobset.x-k8s.io/")


def _resolve_name(context: click.Context, name: str) -> str:
    """Return a name without its kind. Raises UserError for a job file."""
    for prefix in _KIND_PREFIXES:
        name = name.removeprefix(prefix)
    path = Path(name)
    if name.startswith("run/") and not path.exists():
        return f"runs/{path.name}"
    if path.suffix in (".yaml", ".yml") and path.is_file():
        from jaxlaunch.launcher.yaml import reader

        job = reader.read_document(path).data
        job_name = job.get("name") if isinstance(job, dict) else None
        command = shlex.join(["launcher", context.info_name or "", str(job_name or "JOB_NAME")])
        raise UserError(f"{name} is a job file, not the name of a job.", f"`{command}`.")
    return name


def _resolve_names(
    context: click.Context, _: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    return tuple(_resolve_name(context, name) for name in _drop_resource(names))


def _drop_resource(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names without a first word such as `job`, as in `delete job digits`."""
    return names[1:] if len(names) > 1 and names[0] in RESOURCES else names


def _resolve_single_name(
    context: click.Context, _: click.Parameter, names: tuple[str, ...]
) -> str | None:
    """Return the only name. Raises UsageError, with a command for each, if there are several."""
    names = _drop_resource(names)
    if len(names) > 1:
        commands = (shlex.join(["launcher", context.info_name or "", name]) for name in names)
        listed = ", ".join(f"`{command}`" for command in commands)
        raise click.UsageError(f"{context.info_name} takes one name: {listed}.", context)
    return _resolve_name(context, names[0]) if names else None


def _resolve_run(context: click.Context, _: click.Parameter, run: str) -> str:
    return _resolve_name(context, run)


run_argument = click.argument("run", callback=_resolve_run, shell_complete=complete_runs)
# The argument JOB_NAME, as `name`, of a command that takes further arguments.
first_name_argument = click.argument(
    "name", metavar="JOB_NAME", callback=_resolve_run, shell_complete=complete_runs
)
name_argument = click.argument(
    "name",
    metavar="JOB_NAME",
    nargs=-1,
    required=True,
    callback=_resolve_single_name,
    shell_complete=complete_runs,
)
# The argument of commands that take several names, as `names`.
names_argument = click.argument(
    "names",
    metavar="JOB_NAME...",
    nargs=-1,
    required=True,
    callback=_resolve_names,
    shell_complete=complete_runs,
)


class _Folder(click.Path):
    """A path that must not be empty. That of an unset variable would mean the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            return self.fail("it is empty.", param, ctx)
        return super().convert(value, param, ctx)


# The options --run-dir and --volume, as `run_dir` and as `volumes` for parse_volumes.
folder_options = _combine(
    click.option(
        "--run-dir", type=_Folder(path_type=Path), help="The run folder. [default: runs/<name>]"
    ),
    click.option(
        "--volume",
        "volumes",
        multiple=True,
        metavar="NAME=DIR",
        help="A folder here for a volume of the job, by its name or mount path.",
    ),
)


def folder_words(
    job_file: Path, overrides: tuple[str, ...], run_dir: Path | None, volumes: tuple[str, ...]
) -> list[str]:
    """Return the arguments of a command with a job and the options of `folder_options`."""
    words = [str(job_file), *overrides]
    words += [] if run_dir is None else ["--run-dir", str(run_dir)]
    return words + [word for volume in volumes for word in ("--volume", volume)]


def parse_volumes(volumes: tuple[str, ...]) -> dict[str, Path]:
    """Return the folder of each --volume. Raises UserError for one that is not NAME=DIR."""
    pairs = [volume.partition("=") for volume in volumes]
    for name, equals, folder in pairs:
        if not (name and equals and folder):
            message = f"--volume {name}{equals}{folder} is not NAME=DIR."
            raise UserError(message, "such as data=./data.")
    return {name: Path(folder).absolute() for name, _, folder in pairs}


def defaults_option(default: str) -> Decorator:
    """Return the option --defaults, as `defaults_file`. `default` describes the default source."""
    text = f"The cluster defaults: a YAML file, plain or as a ConfigMap. [default: {default}]"
    return click.option("--defaults", "defaults_file", type=click.Path(path_type=Path), help=text)


def cluster_options(
    namespace_help: str = "The job's namespace. [default: the context's]",
) -> Decorator:
    """Return the options --namespace and --context, as `namespace` and `context`."""
    text = "The kubeconfig context to use. [default: the current one]"
    return _combine(
        click.option("-n", "--namespace", help=namespace_help), click.option("--context", help=text)
    )


# The options --local and --cluster, as `location`, which is None if neither is given.
location_options = _combine(
    click.option("--local", "location", flag_value="local", help="Only the runs of this machine."),
    click.option("--cluster", "location", flag_value="cluster", help="Only the cluster's jobs."),
)


def output_option(*formats: str) -> Decorator:
    """Return the option --output, as `output_format`. The first format is the default."""
    text, choice = f"The form of the output. [default: {formats[0]}]", click.Choice(formats)
    return click.option(
        "-o", "--output", "output_format", type=choice, default=formats[0], help=text
    )


def screen_output_option(text: str, *other_formats: str) -> Decorator:
    """Return the option --output, as `output_format`, which is None for a person's screen."""
    kind = click.Choice(["json", "yaml", "wide", *other_formats])
    return click.option("-o", "--output", "output_format", type=kind, help=text)


def watch_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add the option --watch, which runs a command again and again."""

    @functools.wraps(command)
    def run_command(*, is_watching: bool, **arguments: Any) -> None:
        if is_watching:
            output.repeat_output(lambda: command(**arguments))
        command(**arguments)

    return click.option(
        "-w",
        "--watch",
        "is_watching",
        is_flag=True,
        help="Show it again every 5 seconds until Ctrl-C.",
    )(run_command)


# The option --from-volume, as `is_from_volume`.
from_volume_option = click.option(
    "--from-volume",
    "is_from_volume",
    is_flag=True,
    help="Read the job's run folder on its volume through a short-lived pod; the job's own pods "
    "may be deleted.",
)


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
    """Return the options of a program of the trainer. Each has the name of its field."""
    decorators = []
    for field in dataclasses.fields(kind):
        if (option := programs.field_option(field)) is None:
            continue
        settings: dict[str, Any] = {"type": _click_type(option)}
        if field.default is False:
            settings = {"is_flag": True}
        elif field.default == ():
            settings["multiple"] = True
        elif field.default is dataclasses.MISSING:
            settings["required"] = True
        elif isinstance(field.default, int):
            settings["default"] = field.default
        names = (*programs.option_flags(field.name, option), field.name)
        settings |= {"metavar": option.metavar, "help": option.help}
        decorators.append(click.option(*names, **settings))
    return _combine(*decorators)


def _click_type(option: programs.Option) -> click.ParamType[Any] | None:
    if option.choices:
        return click.Choice(option.choices)
    if option.type is programs.parse_step:
        return _Step()
    low = option.minimum if option.exclusive_minimum is None else option.exclusive_minimum
    if option.type is int:
        return click.IntRange(low, option.maximum)
    if option.type is float:
        return click.FloatRange(low, option.maximum, min_open=option.exclusive_minimum is not None)
    return None


def parse_duration(option: str, value: str | None) -> float | None:
    """Return the seconds of a duration option. Raises UserError if it is not a duration."""
    if value is None:
        return None
    # Imported here, because other commands must not wait for pydantic.
    from jaxlaunch.launcher.job import types

    try:
        return types.parse_duration(value)
    except ValueError:
        message = f"{option} {value} is not a duration."
        raise UserError(message, "write 90s, 10m, 12h or 3d.") from None
