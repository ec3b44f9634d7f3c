"""Arguments and options that several commands take, said once, and how their values are read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launcher import duration
from launcher.errors import UserError

WAITED_TOO_LONG = 124  # exit code

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def job(command: Callable[..., Any]) -> Callable[..., Any]:
    """JOB and what is set in it: `job_file` and `overrides`."""
    command = click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)(command)
    return click.argument("job_file", metavar="JOB", type=click.Path(path_type=Path))(command)


def profile(default: str) -> Decorator:
    """`profile_file`; `default` says which profile counts without it."""
    text = f"The cluster's profile: YAML, plain or as a ConfigMap. [default: {default}]"
    return click.option("--profile", "profile_file", type=click.Path(path_type=Path), help=text)


def place(what: str = "Where the job is. [default: the context's]") -> Decorator:
    """`namespace` and `context`; `what` says of which namespace."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        text = "A context of the kubeconfig. [default: its current one]"
        command = click.option("--context", help=text)(command)
        return click.option("-n", "--namespace", help=what)(command)

    return add


def seconds(option: str, given: str | None) -> float | None:
    """The duration that `option` was given. Raises UserError for what is none."""
    try:
        return None if given is None else duration.seconds(given)
    except ValueError:
        raise UserError(f"{option} {given} is not a duration.", "write 90s, 10m, 12h or 3d.") from None


def say(text: str) -> None:
    """Talk, on stderr."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)
