"""What the Tab key offers: runs of this machine, topics of `help`, and keys of a job after its file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pydantic import BaseModel

RUNS = Path("runs")


def runs(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """The names of the runs below runs/."""
    folders = (path.parent for path in RUNS.glob(f"{begun}*/job.yaml")) if "/" not in begun else ()
    return sorted(folder.name for folder in folders)


def topics(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """The pages and the commands that `launcher help` shows."""
    from jaxlaunch.launcher.cli import pages
    from jaxlaunch.launcher.cli.main import COMMANDS

    docs = pages.folder()
    known = {*COMMANDS, *([] if docs is None else pages.names(docs))}
    return sorted(name for name in known if name.startswith(begun))


def keys(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """The keys of the block that has been typed so far: `train.m` has `train.mesh.` and `train.model.`."""
    from jaxlaunch.launcher.job import introspection
    from jaxlaunch.launcher.job.schema import JobSpec

    block = begun.rpartition(".")[0]
    dot = block and "."
    models: list[type[BaseModel]] = [JobSpec]
    for name in block.split(".") if block else ():
        fields = [introspection.fields(model).get(name) for model in models]
        kinds = [introspection.Type.of_field(field) for field in fields if field is not None]
        models = [found for kind in kinds for found in introspection.blocks(kind)]
    offered = {
        f"{block}{dot}{name}" + ("." if introspection.blocks(introspection.Type.of_field(field)) else "=")
        for model in models
        for name, field in introspection.fields(model).items()
    }
    return sorted(key for key in offered if key.startswith(begun))
