"""`launcher plan`: what a job will hold, before anything is held."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from jaxlaunch.accelerators import KNOWN
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.cli.validate import lines, summarize
from jaxlaunch.launcher.errors import JobFaults, UserError
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.job.load import JobFile, JobSpec, override_argument
from jaxlaunch.launcher.local import trainer_process
from jaxlaunch.launcher.manifests.jobset import ResolvedJob, prepare, resolve
from jaxlaunch.launcher.plan import checkpoint_space, estimate, shapes
from jaxlaunch.launcher.plan.notes import notes
from jaxlaunch.launcher.wording import count, size
from jaxlaunch.trainer.spec import GPT2, Decoder, TrainSpec

HOUR = 3600.0
DAY = 24 * HOUR
Range = Sequence[float]  # the least and the most
NO_FIT = 2  # the training does not fit, and the user can change it


@click.command("plan")
@options.job
@options.defaults("none")
@click.option("--cluster", "for_cluster", is_flag=True, help="Reject a job that can only run here, not on a cluster.")
@click.option("--sharding", is_flag=True, help="List every parameter, and which axes of the mesh split it.")
@click.option(
    "--compile", "is_compiled", is_flag=True, help="Compile the steps for the job's devices, which are not needed here."
)
@click.option("--price", type=float, metavar="PER-HOUR", help="With --compile: the price of one chip or GPU per hour.")
@options.form("text", "json", "yaml")
def plan_command(
    job_file: Path,
    overrides: tuple[str, ...],
    defaults_file: Path | None,
    for_cluster: bool,
    sharding: bool,
    is_compiled: bool,
    price: float | None,
    form: str,
) -> int:
    """Estimate the memory that JOB_FILE needs, and whether it fits.

    The output has the devices, the mesh, the bytes of each device, the requests to the cluster, the Pod Security level
    that results, and who can connect to the pods. The command does not contact a cluster. If something is missing that
    only a cluster needs, such as an image, this is a note, or an error with --cluster.
    The bytes come from tracing the trainer here on virtual devices; nothing is allocated. With --compile the compiler
    of the job's TPUs or GPUs also compiles the train step and the eval step, without the device.
    The exit code is 2 if the training cannot fit.
    """
    known = defaults.load(defaults_file)
    file = jobs.read(job_file, overrides)
    job = resolve(file.spec, known)
    of_cluster = _of_cluster(job, file, known, for_cluster)
    found = _shapes(job.spec, file.folder, sharding=sharding, is_compiled=is_compiled)
    answer: dict[str, Any] = {**summarize(job.spec), "memory": None}
    if found is not None and job.spec.train is not None:
        answer["memory"] = _memory(job, job.spec.train, found, file.folder)
        if is_compiled:
            _complete_compiled(job.spec, job.spec.train, found["compiled"], price)
    answer |= of_cluster
    if form == "text":
        output.show(*_text(job.spec, answer))
    else:
        output.data(answer, form)
    return NO_FIT if answer["memory"] is not None and not _fits(answer["memory"]) else 0


def _of_cluster(job: ResolvedJob, file: JobFile, known: ClusterDefaults, is_required: bool) -> dict[str, Any]:
    """What the job asks of a cluster, or notes of what it lacks for one. Raises UserError for those if required."""
    try:
        jobset = prepare(file, known).manifests[0]
    except UserError as error:
        if is_required:
            raise
        faults = error.faults if isinstance(error, JobFaults) else (error,)
        lacks = [f"on a cluster: {' '.join(str(fault).split())}" for fault in faults]
        return {"cluster": None, "pod_security": None, "ingress": None, "notes": lacks}
    return {
        "cluster": estimate.asked(job, jobset),
        "pod_security": estimate.security(jobset),
        "ingress": estimate.ingress(job),
        "notes": list(notes(job)),
    }


def _fits(memory: Mapping[str, Any]) -> bool:
    """What the compiler says, where it was asked; else whether the estimate fits, or whether that is not known."""
    return bool(memory["compiled"]["fits"]) if "compiled" in memory else memory["fits"] is not False


def _shapes(job: JobSpec, base: Path, *, sharding: bool, is_compiled: bool) -> dict[str, Any] | None:
    """The trainer's shapes; None for a program that is not the trainer's, and where it is not installed."""
    if job.train is None or not trainer_process.is_installed():
        if sharding or is_compiled:
            if job.train is None:
                raise UserError("--sharding and --compile: a command's arrays are its own.")
            trainer_process.require("--sharding and --compile")
        return None
    if is_compiled:
        output.say(f"compiling for {count(job.devices, 'device')} of {job.accelerator.type}")
    return shapes.of(
        job, job.train, base, sharding=sharding, compiled=is_compiled, show=output.say if is_compiled else None
    )


def _memory(job: ResolvedJob, train: TrainSpec, found: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The shapes, and whether they fit: into the devices, and the checkpoints into their folder."""
    low, high = estimate.together(found)
    judged = estimate.verdict(job.spec, train, found, job.nodes.labels)
    of_all = {"together": [low, high], "fits": judged.fits, "says": judged.says, "hint": judged.hint}
    has = checkpoint_space.of(job, base)
    checkpoints = estimate.checkpoints(train, has.folder, found) | {"room": has.bytes, "room_says": has.says}
    return {**found, **of_all, "checkpoints": checkpoints}


# --- for a reader -----------------------------------------------------------------------------------------------------


def _text(job: JobSpec, answer: Mapping[str, Any]) -> Iterator[str]:
    yield from lines(job)
    if job.train is not None and answer["memory"] is not None:
        yield from _bytes(job, job.train, answer["memory"])
    elif job.train is not None:
        yield f"bytes: not known, the trainer is not installed here; {trainer_process.install_hint()}"
    if answer["cluster"] is not None:
        yield from _cluster(answer["cluster"], answer["pod_security"], answer["ingress"])
    yield from (f"note: {note}" for note in answer["notes"])


def _cluster(asked: Mapping[str, Any], secured: Mapping[str, Any], ingress: str) -> Iterator[str]:
    in_queue = f" through queue {asked['queue']}" if asked["queue"] else ""
    yield f"cluster: {count(asked['pods'], 'pod')} on {asked['platform']}{in_queue}"
    yield f"  each      {_amounts(asked['per_pod'])}"
    yield f"  together  {_amounts(asked['together'])}"
    yield f"pod security: {secured['level']}" + (f", for {'; '.join(secured['because'])}" if secured["because"] else "")
    yield f"ingress: {ingress}"


def _bytes(job: JobSpec, train: TrainSpec, memory: Mapping[str, Any]) -> Iterator[str]:
    trained = "" if memory["trained"] == memory["parameters"] else f", {memory['trained']:,} of them trained"
    yield f"parameters: {memory['parameters']:,} in {count(memory['arrays'], 'array')}{trained}"
    yield f"bytes of each of {count(job.devices, 'device')}, estimated:"
    rows = [(name, size(much), "") for name, much in memory["device"].items() if much >= 1024 or name == "parameters"]
    rows.append(("activations", _range(memory["activations"]["asked"]), _other_remat(train, memory)))
    if memory["samples"]:
        rows.append(("samples", size(memory["samples"]), "while an evaluation makes them, without activations"))
    rows.append(("together", _range(memory["together"]), memory["says"]))
    yield from output.columns(rows, gap=2, indent="  ")
    if memory["hint"]:
        yield f"  hint: {memory['hint']}"
    kept = memory["checkpoints"]
    most = f"{size(kept['most'])} with {kept['kept']} kept and one being written"
    free = "" if kept["room"] is None else f"{size(kept['room'])} "
    yield f"checkpoints: {size(kept['bytes'])} each, {most}, in {kept['folder']}: {free}{kept['room_says']}"
    if kept["room"] is not None and kept["room"] < kept["most"]:
        lacking = size(kept["most"] - kept["room"])
        todo = f"make {lacking} more room, or set a lower train.checkpoint.keep"
        yield f"  hint: they do not fit, and a save would fail and end the run: {todo}."
    if "sharding" in memory:
        yield from _sharding(memory["sharding"])
    if "compiled" in memory:
        yield from _compiled(job, train, memory["compiled"])


def _other_remat(train: TrainSpec, memory: Mapping[str, Any]) -> str:
    others = [name for name in ("none", "full") if name != train.remat]
    listed = ", ".join(f"{name} {_range(memory['activations'][name])}" for name in others)
    return f"remat {train.remat}; {listed}"


def _sharding(listed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [("parameter", "shape", "type", "axes", "split over", "each device")]
    for each in listed:
        axes = " ".join(axis or "-" for axis in each["axes"])
        split = " ".join("+".join(axes) or "-" for axes in each["split"])
        shape = "×".join(map(str, each["shape"])) or "scalar"
        rows.append((each["name"], shape, each["dtype"], axes, split, size(each["bytes"])))
    yield "sharding:"
    yield from output.columns(rows, gap=2, indent="  ")


def _range(both: Sequence[int]) -> str:
    low, high = both
    return size(high) if size(low) == size(high) else f"{size(low)} to {size(high)}"


def _amounts(asked: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {much}" for name, much in asked.items()) or "nothing in particular"


# --- the compiler's answer, with --compile ----------------------------------------------------------------------------


def _complete_compiled(job: JobSpec, train: TrainSpec, found: dict[str, Any], price: float | None) -> None:
    """Adds to the compiler's answer what follows from its step time: throughput, MFU, the time to the end, its cost.

    `price` is that of one chip or GPU an hour.
    """
    modelled = found.get("modelled")
    if modelled is None:
        return
    low, high = modelled["seconds"]
    modelled["examples_per_second"] = [train.batch / high, train.batch / low]
    if isinstance(train.model, Decoder | GPT2):
        length = train.model.length
        modelled["tokens_per_second"] = [train.batch * length / high, train.batch * length / low]
    peak = KNOWN[job.accelerator.type].peak
    if peak is not None and found["model_flops"]:
        rate = found["model_flops"] / job.devices / peak
        modelled["mfu"] = [rate / high, rate / low]
    if train.epochs is None:
        modelled["seconds_to_end"] = [low * train.steps, high * train.steps]
        if price is not None:
            hourly = price * job.host_count * job.accelerator.per_host
            modelled["price"] = [seconds / HOUR * hourly for seconds in modelled["seconds_to_end"]]


def _compiled(job: JobSpec, train: TrainSpec, found: Mapping[str, Any]) -> Iterator[str]:
    """The answer for a reader."""
    if not found["fits"]:
        yield f"compiled for {found['chips']} by {found['compiler']}: does not fit"
        yield f"  {found['says']}"
        yield from _change(found["change"])
        return
    yield f"compiled for {found['chips']} by {found['compiler']} in {found['seconds']:.0f} s; each device:"
    memory = found["memory"]
    rows = [("", *memory)]
    rows += [(name, *(size(each[key]) for each in memory.values())) for key, name in _PARTS.items()]
    rows += [("attention", found["attention"], "")]
    yield from output.columns([row[:3] for row in rows], gap=2, indent="  ")
    yield from (f"  {note}" for note in found["notes"])
    if "program" in found:
        yield f"  {found['program']}"
        return
    yield from _collectives(found["collectives"])
    if found["recomputed"]:
        yield f"  recomputation: {found['recomputed']:.0%} of the step's computation"
    if found["modelled"] is not None:
        yield from _modelled(found["modelled"])


_PARTS = {"peak": "peak", "argument": "arguments", "temp": "temporaries"}


def _change(change: Mapping[str, Any] | None) -> Iterator[str]:
    if change is None:
        yield "  hint: neither rematerialization, accumulation nor fsdp makes it fit: use more or larger devices."
        return
    changes = shlex.join(override_argument(key, value) for key, value in change["set"].items())
    yield f"  hint: {changes} fits: compiled, its peak is {size(change['peak'])}."


def _collectives(listed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not listed:
        yield "  collectives: none"
        return
    rows = [("collective", "axes", "times", "sent", "not hidden")]
    for each in listed:
        times = f"{each['times']:.0f}"
        rows.append((each["kind"], "+".join(each["axes"]), times, size(each["wire"]), size(each["exposed"])))
    yield "  collectives of a step, on each device:"
    yield from output.columns(rows, gap=2, indent="    ")


def _modelled(found: Mapping[str, Any]) -> Iterator[str]:
    """By the model in docs/plan.md: nothing of it was measured."""
    low, high = found["seconds"]
    yield f"  step time, modelled: {low * 1000:.3g} to {high * 1000:.3g} ms"
    rates = [f"{_span(found[key])} {unit}" for key, unit in _RATES.items() if key in found]
    if "mfu" in found:
        least, most = found["mfu"]
        rates.append(f"MFU {least:.0%} to {most:.0%}")
    yield f"    {', '.join(rates)}"
    if "seconds_to_end" in found:
        least, most = found["seconds_to_end"]
        unit, name = (DAY, "days") if most >= DAY else (HOUR, "hours")
        price = f", {_span(found['price'])} in the unit of --price" if "price" in found else ""
        yield f"    to the last step: {least / unit:.3g} to {most / unit:.3g} {name}{price}"


_RATES = {"tokens_per_second": "tokens/s", "examples_per_second": "examples/s"}


def _span(both: Range) -> str:
    low, high = both
    return f"{low:,.0f} to {high:,.0f}" if low >= 10 else f"{low:.3g} to {high:.3g}"
