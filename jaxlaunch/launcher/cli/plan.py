"""`launcher plan` and `tune`: the memory of a job, and its fastest settings that fit."""

from __future__ import annotations

import itertools
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from jaxlaunch.accelerators import ACCELERATORS
from jaxlaunch.launcher.cli import options, output, screen_lines
from jaxlaunch.launcher.cli.validate import describe_request
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec, override_argument
from jaxlaunch.launcher.local import trainer_process
from jaxlaunch.launcher.plan import estimate
from jaxlaunch.launcher.plan.job_plan import HOUR_S, JobPlan, fits_devices, plan_job
from jaxlaunch.launcher.wording import format_count, format_size
from jaxlaunch.trainer.spec import TrainSpec

DAY_S = 24 * HOUR_S
# Exit code of a training that does not fit, which the user can change.
EXIT_NO_FIT = 2
# Choices of `tune --over`.
CHOICES = ("mesh", "remat", "accumulate", "attention", "precision")
# The largest number of candidates that were not compiled in the table.
MAX_NOT_COMPILED = 5

Data = Mapping[str, Any]


@click.command("plan")
@options.job_arguments
@options.defaults_option("none")
@click.option(
    "--cluster",
    "for_cluster",
    is_flag=True,
    help="Reject a job that can only run here, not on a cluster.",
)
@click.option(
    "--sharding", is_flag=True, help="List every parameter, and which axes of the mesh split it."
)
@click.option(
    "--compile",
    "is_compiled",
    is_flag=True,
    help="Compile the steps for the job's devices, which are not needed here.",
)
@click.option(
    "--price",
    type=float,
    metavar="PER-HOUR",
    help="With --compile: the price of one chip or GPU per hour.",
)
@options.output_option("text", "json", "yaml")
def plan_command(
    job_file: Path,
    overrides: tuple[str, ...],
    defaults_file: Path | None,
    for_cluster: bool,
    sharding: bool,
    is_compiled: bool,
    price: float | None,
    output_format: str,
) -> int:
    """Estimate the memory that JOB_FILE needs, and whether it fits.

    The output shows the devices, the mesh, the bytes of each device, the requests to the cluster,
    the Pod Security level of the pods, and who can connect to them. The command does not contact a
    cluster. If something is missing that only a cluster needs, such as an image, this is a note, or
    an error with --cluster. The bytes come from tracing the trainer here on virtual devices;
    nothing is allocated. With --compile the compiler of the job's TPUs or GPUs also compiles the
    train step and the eval step, without the device. The exit code is 2 if the training cannot fit.
    """
    cluster_defaults = defaults.load_defaults(defaults_file)
    file = jobs.read_job(job_file, overrides, may_have_roles=True)
    parts = [
        (
            part,
            plan_job(
                part,
                cluster_defaults,
                requires_cluster=for_cluster,
                lists_sharding=sharding,
                is_compiled=is_compiled,
                price=price,
                show=output.show_messages,
            ),
        )
        for part, _ in file.list_parts()
    ]
    plan = next(plan for part, plan in parts if part.spec is file.spec)
    if file.roles:
        names = [role.name for role in file.roles]
        role_plans = dict(zip(names, (plan for _, plan in parts), strict=True))
        plan = {**plan, "name": file.name, "roles": role_plans}
    texts = itertools.chain(*(_describe_plan(part.spec, plan) for part, plan in parts))
    output.show_result(plan, output_format, map(screen_lines.make_paragraph, texts))
    return 0 if all(fits_devices(plan) for _, plan in parts) else EXIT_NO_FIT


def _describe_plan(job: JobSpec, plan: JobPlan) -> Iterator[str]:
    yield from describe_request(job)
    if job.train is not None and plan["memory"] is not None:
        yield from _describe_memory(job, job.train, plan["memory"])
    elif job.train is not None:
        install = trainer_process.install_hint()
        yield f"bytes: not known, the trainer is not installed here; {install}"
    if (cluster := plan["cluster"]) is not None:
        in_queue = f" through queue {cluster['queue']}" if cluster["queue"] else ""
        yield f"cluster: {format_count(cluster['pods'], 'pod')} on {cluster['platform']}{in_queue}"
        requests = {"each      ": cluster["per_pod"], "together  ": cluster["together"]}
        for label, quantities in requests.items():
            amounts = ", ".join(f"{name} {amount}" for name, amount in quantities.items())
            yield f"  {label}{amounts or 'nothing in particular'}"
    if (security := plan["pod_security"]) is not None:
        reasons = f", for {'; '.join(security['because'])}" if security["because"] else ""
        yield f"pod security: {security['level']}{reasons}"
        yield f"ingress: {plan['ingress']}"
    yield from (f"note: {note}" for note in plan["notes"])


def _describe_memory(job: JobSpec, train: TrainSpec, memory: Data) -> Iterator[str]:
    trained = ""
    if memory["trained"] != memory["parameters"]:
        trained = f", {memory['trained']:,} of them trained"
    arrays = format_count(memory["arrays"], "array")
    yield f"parameters: {memory['parameters']:,} in {arrays}{trained}"
    yield f"bytes of each of {format_count(job.devices, 'device')}, estimated:"
    rows = [
        (name, format_size(number), "")
        for name, number in memory["device"].items()
        if number >= 1024 or name == "parameters"
    ]
    sizes = {policy: _size_range(bounds) for policy, bounds in memory["activations"].items()}
    others = [f"{policy} {sizes[policy]}" for policy in ("none", "full") if policy != train.remat]
    rows.append(("activations", sizes["asked"], f"remat {train.remat}; {', '.join(others)}"))
    if memory["samples"]:
        note = "while an evaluation makes them, without activations"
        rows.append(("samples", format_size(memory["samples"]), note))
    rows.append(("together", _size_range(memory["together"]), memory["says"]))
    yield from output.format_notes(rows, gap=2, indent="  ")
    if memory["hint"]:
        yield f"  hint: {memory['hint']}"
    checkpoints = memory["checkpoints"]
    max_bytes, free_bytes = checkpoints["most"], checkpoints["room"]
    kept_text = f"{format_size(max_bytes)} with {checkpoints['kept']} kept and one being written"
    free_text = "" if free_bytes is None else f"{format_size(free_bytes)} "
    folder = f"{checkpoints['folder']}: {free_text}{checkpoints['room_says']}"
    yield f"checkpoints: {format_size(checkpoints['bytes'])} each, {kept_text}, in {folder}"
    if free_bytes is not None and free_bytes < max_bytes:
        missing_text = format_size(max_bytes - free_bytes)
        advice = f"make {missing_text} more room, or set a lower train.checkpoint.keep"
        yield f"  hint: they do not fit, and a save would fail and end the run: {advice}."
    if "sharding" in memory:
        yield "sharding:"
        yield from _describe_sharding(memory["sharding"])
    if "compiled" in memory:
        yield from _describe_compiled(memory["compiled"])


def _describe_sharding(arrays: Sequence[Data]) -> list[str]:
    rows = [("parameter", "shape", "type", "axes", "split over", "each device")]
    for array in arrays:
        axes = " ".join(axis or "-" for axis in array["axes"])
        split = " ".join("+".join(names) or "-" for names in array["split"])
        shape = "×".join(map(str, array["shape"])) or "scalar"
        size = format_size(array["bytes"])
        rows.append((array["name"], shape, array["dtype"], axes, split, size))
    return output.format_columns(rows, gap=2, indent="  ")


def _size_range(bounds: Sequence[int]) -> str:
    low, high = map(format_size, bounds)
    return high if low == high else f"{low} to {high}"


# --- results of --compile -------------------------------------------------------------------------


def _describe_compiled(compiled: Data) -> Iterator[str]:
    program = f"compiled for {compiled['chips']} by {compiled['compiler']}"
    if not compiled["fits"]:
        yield f"{program}: does not fit"
        yield f"  {compiled['says']}"
        advice = "neither rematerialization, accumulation nor fsdp makes it fit: use more or "
        advice += "larger devices."
        if (change := compiled["change"]) is not None:
            changes = shlex.join(override_argument(*setting) for setting in change["set"].items())
            advice = f"{changes} fits: compiled, its peak is {format_size(change['peak'])}."
        yield f"  hint: {advice}"
        return
    yield f"{program} in {compiled['seconds']:.0f} s; each device:"
    memory = compiled["memory"]
    rows = [("", *memory)]
    for key, name in (("peak", "peak"), ("argument", "arguments"), ("temp", "temporaries")):
        rows.append((name, *(format_size(sizes[key]) for sizes in memory.values())))
    rows.append(("attention", compiled["attention"], ""))
    yield from output.format_columns([row[:3] for row in rows], gap=2, indent="  ")
    yield from (f"  {note}" for note in compiled["notes"])
    if "program" in compiled:
        yield f"  {compiled['program']}"
        return
    if not compiled["collectives"]:
        yield "  collectives: none"
    else:
        collectives = [("collective", "axes", "times", "sent", "not hidden")]
        for collective in compiled["collectives"]:
            sizes = (format_size(collective["wire"]), format_size(collective["exposed"]))
            axes, times = "+".join(collective["axes"]), f"{collective['times']:.0f}"
            collectives.append((collective["kind"], axes, times, *sizes))
        yield "  collectives of a step, on each device:"
        yield from output.format_columns(collectives, gap=2, indent="    ")
    if compiled["recomputed"]:
        yield f"  recomputation: {compiled['recomputed']:.0%} of the step's computation"
    if compiled["modelled"] is not None:
        yield from _describe_modelled(compiled["modelled"])


def _describe_modelled(modelled: Data) -> Iterator[str]:
    """Yield the modelled step time, rates and price. None of them was measured."""
    low, high = modelled["seconds"]
    yield f"  step time, modelled: {low * 1000:.3g} to {high * 1000:.3g} ms"
    units = (("tokens_per_second", "tokens/s"), ("examples_per_second", "examples/s"))
    rates = [f"{_number_range(modelled[key])} {unit}" for key, unit in units if key in modelled]
    if "mfu" in modelled:
        low, high = modelled["mfu"]
        rates.append(f"MFU {low:.0%} to {high:.0%}")
    yield f"    {', '.join(rates)}"
    if "seconds_to_end" in modelled:
        low, high = modelled["seconds_to_end"]
        unit_s, name = (DAY_S, "days") if high >= DAY_S else (HOUR_S, "hours")
        price = ""
        if "price" in modelled:
            price = f", {_number_range(modelled['price'])} in the unit of --price"
        yield f"    to the last step: {low / unit_s:.3g} to {high / unit_s:.3g} {name}{price}"


def _number_range(bounds: Sequence[float]) -> str:
    low, high = bounds
    return f"{low:,.0f} to {high:,.0f}" if low >= 10 else f"{low:.3g} to {high:.3g}"


# --- tune -----------------------------------------------------------------------------------------


def _parse_choices(_: click.Context, __: click.Parameter, text: str) -> tuple[str, ...]:
    keys = tuple(text.split(","))
    for key in keys:
        if key not in CHOICES:
            raise click.BadParameter(f"{key!r} is not one of {', '.join(CHOICES)}")
    return keys


@click.command("tune")
@options.job_arguments
@click.option(
    "--over",
    callback=_parse_choices,
    metavar="KEYS",
    default="mesh,remat,accumulate",
    show_default=True,
    help=f"Keys of the train block that may change: {', '.join(CHOICES)}.",
)
@click.option(
    "--most",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="The largest number of candidates to compile.",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Time each on the devices of this machine, as for a job of type cpu.",
)
@click.option(
    "--write",
    "target",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the job with the best settings.",
)
@options.output_option("text", "json", "yaml")
def tune_command(
    job_file: Path,
    overrides: tuple[str, ...],
    over: tuple[str, ...],
    most: int,
    measure: bool,
    target: Path | None,
    output_format: str,
) -> None:
    """Find the fastest settings of JOB_FILE that fit its devices.

    The candidates are the combinations of mesh, rematerialization and micro-batches (on request,
    also attention and precision) that divide the job's batch. They are ranked by an estimate from
    the shapes of the arrays. The compiler of the job's accelerator, which need not be here,
    compiles the most promising ones, and their memory and modelled step time are compared. The
    global batch never changes, so the losses are equal up to rounding. A candidate that was not
    compiled is never proposed.
    """
    job = jobs.load_job(job_file, overrides)
    if job.train is None:
        raise UserError("tune changes train, and this job has a command.")
    trainer_process.require_trainer("tune compiles the trainer's step")
    if target is not None and target.exists():
        raise UserError(f"{target} exists.", "name a new file for --write.")
    # There is no model of the step time on a CPU.
    is_measured = measure or ACCELERATORS[job.accelerator.type].platform == "cpu"
    job_folder = job_file.absolute().parent
    tried_candidates, not_compiled = _search_candidates(
        job, job_folder, over, most, is_measured=is_measured
    )
    best = next(iter(_sort_compiled(tried_candidates)), None)
    if best is None:
        reasons = "; ".join(dict.fromkeys(candidate["refused"] for candidate in tried_candidates))
        raise UserError(
            f"None of the {format_count(len(tried_candidates), 'candidate')} compiles: {reasons}"
        )
    changes = [override_argument(key, value) for key, value in best["changes"].items()]
    if target is not None:
        target.write_text(jobs.dump_job(jobs.load_job(job_file, (*overrides, *changes))))
    lines = list(_describe_candidates(tried_candidates, not_compiled, is_measured=is_measured))
    if changes:
        gain, current = "", tried_candidates[0]
        if "seconds" in current:
            gain = f", {current['seconds'] / best['seconds']:.2f} × as fast as the job as it is"
        command = f"launcher run {job_file} {shlex.join(changes)}"
        lines.append(f"best: {_describe_outcome(best)}{gain}")
        lines.append(f"  {command if target is None else f'written to {target}'}")
    else:
        lines.append("The job's own settings are the best.")
    data = {"best": best, "overrides": changes, "tried": tried_candidates, "left": not_compiled}
    output.show_result(data, output_format, map(screen_lines.make_paragraph, lines))


def _search_candidates(
    job: JobSpec, job_folder: Path, over: Sequence[str], most: int, *, is_measured: bool
) -> tuple[list[Data], list[Data]]:
    """Return the candidates that the search tried, in its order, and those that it did not try."""
    assert job.train is not None
    arguments = ["--chips", estimate.describe_chips(job), "--over", *over, "--most", str(most)]
    environ = estimate.traced_environ(job, job.train, job_folder)
    if is_measured:
        arguments.append("--measure")
        environ["JAX_PLATFORMS"] = ACCELERATORS[job.accelerator.type].platform
    tried_candidates: list[Data] = []
    module = "jaxlaunch.trainer.tune"
    for candidate in trainer_process.stream_program(module, *arguments, environ=environ):
        if "left" in candidate:
            return tried_candidates, candidate["left"]
        tried_candidates.append(candidate)
        outcome = f"{_describe_settings(candidate['keys'])}: {_describe_outcome(candidate)}"
        output.show_messages(f"compiled {len(tried_candidates)} of at most {most}: {outcome}")
    raise UserError("the search ended without a result.")


def _sort_compiled(tried_candidates: Sequence[Data]) -> list[Data]:
    """Return the candidates that compiled, the fastest first."""
    compiled = [candidate for candidate in tried_candidates if "seconds" in candidate]
    return sorted(compiled, key=lambda candidate: float(candidate["seconds"]))


def _describe_candidates(
    tried_candidates: Sequence[Data], not_compiled: Sequence[Data], *, is_measured: bool
) -> Iterator[str]:
    """Yield the compiled candidates, the fastest first; a * marks the best trade-offs."""
    compiled = _sort_compiled(tried_candidates)
    header = ["", "mesh", "remat", "accumulate", "attention", "precision", "peak", "step"]
    rows = [[*header, "modelled", "expected"]]
    lowest_peak = float("inf")
    for candidate in compiled:
        peak = candidate["peak"]
        # The step time by which candidates are compared, the one modelled from the compiled
        # program, and the estimate before compilation.
        times = [_format_time(candidate[key]) for key in ("seconds", "modelled", "expected")]
        mark = "*" if peak < lowest_peak else ""
        rows.append([mark, *_candidate_columns(candidate), format_size(peak), *times])
        lowest_peak = min(lowest_peak, peak)
    unrefused = [candidate for candidate in not_compiled if "refused" not in candidate]
    for candidate in unrefused[:MAX_NOT_COMPILED]:
        times = ["", "not compiled", "", _format_time(candidate["expected"])]
        rows.append(["", *_candidate_columns(candidate), *times])
    step_source = "measured here"
    # Without measurements, the column of modelled times would repeat the step times.
    if not is_measured:
        rows = [[*row[:-2], row[-1]] for row in rows]
        step_source = "modelled from what the compiler says (docs/plan.md)"
    yield from output.format_columns(rows, gap=2)
    fact = f"Steps are {step_source}; expected: estimated before compilation."
    yield f"* no other has both a shorter step and a smaller peak. {fact}"
    if is_measured and (correlation := _rank_correlation(compiled)) is not None:
        fact = f"have a rank correlation of {correlation:.2f}"
        yield f"Measured steps and those modelled from the compiled programs {fact}."
    if len(unrefused) > MAX_NOT_COMPILED:
        more = format_count(len(unrefused) - MAX_NOT_COMPILED, "more candidate")
        yield f"{more} not compiled: --most compiles more."
    settings_by_reason: dict[str, list[str]] = {}
    for candidate in (*tried_candidates, *not_compiled):
        if "refused" in candidate:
            settings = _describe_settings(candidate["keys"])
            settings_by_reason.setdefault(str(candidate["refused"]), []).append(settings)
    for reason, settings_texts in settings_by_reason.items():
        more = f" and {len(settings_texts) - 1} more" if len(settings_texts) > 1 else ""
        yield f"refused: {settings_texts[0]}{more}: {reason}"


def _rank_correlation(candidates: Sequence[Data]) -> float | None:
    """Return Spearman's correlation of measured and modelled times, None for fewer than three."""
    modelled_candidates = [
        candidate for candidate in candidates if candidate["modelled"] is not None
    ]
    columns = [
        [candidate[key] for candidate in modelled_candidates] for key in ("seconds", "modelled")
    ]
    if len(modelled_candidates) < 3 or any(len(set(values)) == 1 for values in columns):
        return None
    ranks = [[sorted(values).index(value) for value in values] for values in columns]
    return statistics.correlation(*ranks)


def _candidate_columns(candidate: Data) -> tuple[str, ...]:
    keys = candidate["keys"]
    attention, compiled = keys["attention"], candidate.get("compiled", {}).get("attention")
    attention = str(attention) if compiled in (None, attention) else f"{attention}: {compiled}"
    precision = "as in the job" if keys["precision"].startswith("{") else keys["precision"]
    return _describe_mesh(keys), str(keys["remat"]), str(keys["accumulate"]), attention, precision


def _describe_settings(keys: Data) -> str:
    return f"{_describe_mesh(keys)}, remat {keys['remat']}, accumulate {keys['accumulate']}"


def _describe_mesh(keys: Data) -> str:
    return " × ".join(f"{axis} {number}" for axis, number in keys["mesh"].items())


def _describe_outcome(candidate: Data) -> str:
    if "refused" in candidate:
        return str(candidate["refused"])
    return f"{_format_time(candidate['seconds'])}, peak {format_size(candidate['peak'])}"


def _format_time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
