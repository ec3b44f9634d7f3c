"""`launcher plan`: what a job will hold, before anything is held."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from launcher import ask, bundle, emit, jobset, plan, profile, shapes
from launcher import job as jobs
from launcher.cli import options
from launcher.cli.validate import lines, summarize
from launcher.errors import UserError
from launcher.job import JobSpec
from launcher.plan import size
from launcher.refusals import refusals
from launcher.wording import count

NO_FIT = 2  # what is asked for cannot work, and the user can mend it


@click.command("plan")
@options.job
@options.profile("none")
@click.option("--sharding", is_flag=True, help="List every parameter, and which axes of the mesh split it.")
@click.option("--compile", "compiled", is_flag=True, help="Compile the step for virtual CPU devices, and ask XLA.")
@click.option("-o", "--output", type=click.Choice(["text", "json", "yaml"]), default="text", help="[default: text]")
def plan_command(
    job_file: Path, overrides: tuple[str, ...], profile_file: Path | None, sharding: bool, compiled: bool, output: str
) -> int:
    """Say what JOB will hold, and whether it fits.

    Devices, mesh, bytes of each device, what the cluster will be asked for, and the Pod Security level that results.
    Asks no cluster. The bytes are of the trainer's own shapes, traced here on virtual devices; nothing is allocated.
    The exit code is 2 where the training cannot fit.
    """
    cluster = profile.load(profile_file)
    job = jobs.load(job_file, overrides, also=lambda job: refusals(job, cluster))
    base = job_file.absolute().parent
    manifest = jobset.render(job, cluster, bundle.of(job, base))[0]
    found = _shapes(job, base, sharding=sharding, compiled=compiled)
    answer: dict[str, Any] = {**summarize(job), "memory": None if found is None else _memory(job, cluster, found)}
    answer |= {"cluster": plan.asked(job, cluster, manifest), "pod_security": plan.security(manifest)}
    if output == "text":
        click.echo("\n".join(_text(job, answer)))
    else:
        click.echo(json.dumps(answer, indent=2) if output == "json" else emit.document(answer), nl=output == "json")
    return NO_FIT if answer["memory"] is not None and answer["memory"]["fits"] is False else 0


def _shapes(job: JobSpec, base: Path, *, sharding: bool, compiled: bool) -> dict[str, Any] | None:
    """The trainer's shapes; None for a program that is not the trainer's, and where it is not installed."""
    if job.train is None or not ask.is_here():
        if sharding or compiled:
            whose = "a command's arrays are its own" if job.train is None else "the trainer is not installed here"
            raise UserError(f"--sharding and --compile: {whose}.", None if job.train is None else ask.INSTALL)
        return None
    if compiled:
        click.echo(f"launcher: compiling for {count(job.devices, 'virtual CPU device')}", err=True)
    return shapes.of(job, base, sharding=sharding, compiled=compiled)


def _memory(job: JobSpec, cluster: profile.Profile, found: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes, and whether they fit."""
    low, high = plan.together(found)
    told = plan.verdict(job, found)
    of_all = {"together": [low, high], "fits": told.fits, "says": told.says, "hint": told.hint}
    return {**found, **of_all, "checkpoints": plan.checkpoints(job, cluster, found)}


# --- for a reader -----------------------------------------------------------------------------------------------------


def _text(job: JobSpec, answer: Mapping[str, Any]) -> Iterator[str]:
    yield from lines(job)
    if answer["memory"] is not None:
        yield from _bytes(job, answer["memory"])
    elif job.train is not None:
        yield f"bytes: not known, the trainer is not installed here; {ask.INSTALL}"
    asked, secured = answer["cluster"], answer["pod_security"]
    in_queue = f" through queue {asked['queue']}" if asked["queue"] else ""
    yield f"cluster: {count(asked['pods'], 'pod')} on {asked['platform']}{in_queue}"
    yield f"  each      {_amounts(asked['per_pod'])}"
    yield f"  together  {_amounts(asked['together'])}"
    yield f"pod security: {secured['level']}" + (f", for {'; '.join(secured['because'])}" if secured["because"] else "")


def _bytes(job: JobSpec, memory: Mapping[str, Any]) -> Iterator[str]:
    assert job.train is not None
    yield f"parameters: {memory['parameters']:,} in {count(memory['arrays'], 'array')}"
    yield f"bytes of each of {count(job.devices, 'device')}, estimated:"
    rows = [(name, size(much), "") for name, much in memory["device"].items() if much >= 1024 or name == "parameters"]
    rows.append(("activations", _range(memory["activations"]["asked"]), _other_remat(job, memory)))
    rows.append(("together", _range(memory["together"]), memory["says"]))
    yield from columns(rows)
    if memory["hint"]:
        yield f"  hint: {memory['hint']}"
    kept = memory["checkpoints"]
    yield f"checkpoints: {size(kept['bytes'])} each, {size(kept['most'])} with {kept['kept']} kept, in {kept['folder']}"
    if "sharding" in memory:
        yield from _sharding(memory["sharding"])
    if "compiled" in memory:
        yield from _compiled(memory["compiled"])


def _other_remat(job: JobSpec, memory: Mapping[str, Any]) -> str:
    assert job.train is not None
    others = [name for name in ("none", "full") if name != job.train.remat]
    told = ", ".join(f"{name} {_range(memory['activations'][name])}" for name in others)
    return f"remat {job.train.remat}; {told}"


def _sharding(listed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [("parameter", "shape", "type", "axes", "split over", "each device")]
    for each in listed:
        axes = " ".join(axis or "-" for axis in each["axes"])
        split = " ".join("+".join(axes) or "-" for axes in each["split"])
        shape = "×".join(map(str, each["shape"])) or "scalar"
        rows.append((each["name"], shape, each["dtype"], axes, split, size(each["bytes"])))
    yield "sharding:"
    yield from columns(rows)


def _compiled(found: Mapping[str, float]) -> Iterator[str]:
    """What XLA says, for CPUs: its own layouts and buffers, and float32 where they lack bfloat16."""
    yield "compiled for CPU, whose compiler is not the accelerator's; each device:"
    rows = [("arguments", size(found["argument"])), ("temporaries", size(found["temp"]))]
    rows.append(("not reused", size(found["output"] - found["alias"])))
    yield from columns(rows)
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    used = ", ".join(f"{found[name]:.0f} {name}" for name in names if found[name])
    yield f"  collectives, a loop's once: {used or 'none'}"


def _range(both: Sequence[int]) -> str:
    low, high = both
    return size(high) if size(low) == size(high) else f"{size(low)} to {size(high)}"


def _amounts(asked: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {much}" for name, much in asked.items()) or "nothing in particular"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned, indented lines."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
