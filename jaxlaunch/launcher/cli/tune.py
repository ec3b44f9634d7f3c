"""`launcher tune`: the fastest settings of a job that fit its devices, compiled for them."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from jaxlaunch.accelerators import KNOWN
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import override_argument as written_override
from jaxlaunch.launcher.local import trainer_process
from jaxlaunch.launcher.plan import shapes
from jaxlaunch.launcher.wording import count, size

CHOICES = ("mesh", "remat", "accumulate", "attention", "precision")
DEFAULT = "mesh,remat,accumulate"
LISTED = 5  # candidates that were not compiled, in the table
Found = Mapping[str, Any]


class _Choices(click.ParamType[tuple[str, ...]]):
    """Some of CHOICES, with commas between them."""

    name = "KEYS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The keys. Fails for one that tune does not know."""
        given = tuple(value.split(",")) if isinstance(value, str) else value
        for each in given:
            if each not in CHOICES:
                self.fail(f"{each!r} is not one of {', '.join(CHOICES)}", param, ctx)
        return tuple(given)


@click.command("tune")
@options.job
@click.option(
    "--over",
    type=_Choices(),
    default=DEFAULT,
    show_default=True,
    help=f"Keys of the train block that may change: {', '.join(CHOICES)}.",
)
@click.option(
    "--most", type=click.IntRange(1), default=8, show_default=True, help="The largest number of candidates to compile."
)
@click.option("--measure", is_flag=True, help="Time each on the devices of this machine, as for a job of type cpu.")
@click.option(
    "--write", "target", type=click.Path(path_type=Path), metavar="FILE", help="Write the job with the best settings."
)
@options.form("text", "json", "yaml")
def tune_command(
    job_file: Path,
    overrides: tuple[str, ...],
    over: tuple[str, ...],
    most: int,
    measure: bool,
    target: Path | None,
    form: str,
) -> None:
    """Find the fastest settings of JOB_FILE that fit its devices.

    The candidates are the combinations of mesh, rematerialization and micro-batches (on request, also attention and
    precision) that divide the job's batch. They are ranked by an estimate from the shapes of the arrays. The compiler
    of the job's accelerator, which need not be here, compiles the most promising ones, and their memory and modelled
    step time are compared. The global batch never changes, so the losses are equal up to rounding. A candidate that was
    not compiled is never proposed.
    """
    job = jobs.load(job_file, overrides)
    if job.train is None:
        raise UserError("tune changes train, and this job has a command.")
    trainer_process.require("tune compiles the trainer's step")
    if target is not None and target.exists():
        raise UserError(f"{target} exists.", "name a new file for --write.")
    is_measured = measure or KNOWN[job.accelerator.type].platform == "cpu"  # no model tells a CPU's time
    base = job_file.absolute().parent
    tried, left = _search(job, base, over, most, is_measured=is_measured)
    best = min((each for each in tried if "seconds" in each), key=lambda each: float(each["seconds"]), default=None)
    if best is None:
        reasons = "; ".join(dict.fromkeys(each["refused"] for each in tried))
        raise UserError(f"None of the {count(len(tried), 'candidate')} compiles: {reasons}")
    written = [written_override(key, value) for key, value in best["changes"].items()]
    if target is not None:
        target.write_text(jobs.dump(jobs.load(job_file, (*overrides, *written))))
    if form == "text":
        output.show(
            *_table(tried, left, is_measured=is_measured), *_proposal(job_file, tried[0], best, written, target)
        )
    else:
        output.data({"best": best, "overrides": written, "tried": tried, "left": left}, form)


def _search(
    job: jobs.JobSpec, base: Path, over: Sequence[str], most: int, *, is_measured: bool
) -> tuple[list[Found], list[Found]]:
    """The candidates that were compiled, in their order, and those that were not."""
    assert job.train is not None
    asked = ["--chips", shapes.chips(job), "--over", *over, "--most", str(most)]
    asked += ["--measure"] if is_measured else []
    environ = shapes.environment(job, job.train, base)
    if is_measured:
        environ["JAX_PLATFORMS"] = KNOWN[job.accelerator.type].platform
    tried: list[Found] = []
    for each in trainer_process.events("jaxlaunch.trainer.tune", *asked, environ=environ):
        if "left" in each:
            return tried, each["left"]
        tried.append(each)
        output.say(f"compiled {len(tried)} of at most {most}: {_settings(each['keys'])}: {_outcome(each)}")
    raise UserError("the search ended without a result.")


def _outcome(each: Found) -> str:
    return each["refused"] if "refused" in each else f"{_time(each['seconds'])}, peak {size(each['peak'])}"


# --- for a reader -----------------------------------------------------------------------------------------------------


def _table(tried: Sequence[Found], left: Sequence[Found], *, is_measured: bool) -> Iterator[str]:
    """What was compiled, the fastest first, with the frontier marked: what no other beats in both time and memory."""
    done = sorted((each for each in tried if "seconds" in each), key=lambda each: float(each["seconds"]))
    rows = [["", "mesh", "remat", "accumulate", "attention", "precision", "peak", "step", "modelled", "expected"]]
    least = float("inf")
    for each in done:
        is_frontier, least = each["peak"] < least, min(least, each["peak"])
        rows.append(["*" if is_frontier else "", *_columns(each), size(each["peak"]), *_times(each)])
    rest = [each for each in left if "refused" not in each]
    rows += [["", *_columns(each), "", "not compiled", "", _time(each["expected"])] for each in rest[:LISTED]]
    if not is_measured:  # then the step is what is modelled
        rows = [[*row[:-2], row[-1]] for row in rows]
    yield from output.columns(rows, gap=2)
    how = "measured here" if is_measured else "modelled from what the compiler says (docs/plan.md)"
    yield f"* no other has both a shorter step and a smaller peak. Steps are {how}; expected: by arithmetic before."
    if is_measured and (found := _rank_correlation(done)) is not None:
        yield f"Measured steps and those modelled from the compiled programs have a rank correlation of {found:.2f}."
    if len(rest) > LISTED:
        yield f"{count(len(rest) - LISTED, 'more candidate')} not compiled: --most compiles more."
    refused: dict[str, list[str]] = {}
    for each in (*tried, *left):
        if "refused" in each:
            refused.setdefault(str(each["refused"]), []).append(_settings(each["keys"]))
    for reason, settings in refused.items():
        more = f" and {len(settings) - 1} more" if len(settings) > 1 else ""
        yield f"refused: {settings[0]}{more}: {reason}"


def _times(each: Found) -> list[str]:
    """Of a step: what candidates are compared by, what the compiled program takes, and by arithmetic before."""
    return ["" if each[key] is None else _time(each[key]) for key in ("seconds", "modelled", "expected")]


def _rank_correlation(done: Sequence[Found]) -> float | None:
    """Spearman's, of what was measured and what was modelled; None for fewer than three candidates."""
    pairs = [(each["seconds"], each["modelled"]) for each in done if each["modelled"] is not None]
    if len(pairs) < 3 or any(len(set(values)) == 1 for values in zip(*pairs, strict=True)):
        return None
    measured, modelled = ([sorted(values).index(value) for value in values] for values in zip(*pairs, strict=True))
    return statistics.correlation(measured, modelled)


def _proposal(job_file: Path, own: Found, best: Found, written: Sequence[str], target: Path | None) -> Iterator[str]:
    """What to do with it."""
    if not written:
        yield "The job's own settings are the best of them."
        return
    gain = f", {own['seconds'] / best['seconds']:.2f} × as fast as the job as it is" if "seconds" in own else ""
    yield f"best: {_outcome(best)}{gain}"
    yield f"  launcher run {job_file} {shlex.join(written)}" if target is None else f"  written to {target}"


def _columns(each: Found) -> tuple[str, ...]:
    keys = each["keys"]
    return _mesh(keys), str(keys["remat"]), str(keys["accumulate"]), _attention(each), _precision(keys["precision"])


def _attention(each: Found) -> str:
    """What it asks for, and what it got."""
    asked, got = each["keys"]["attention"], each.get("compiled", {}).get("attention")
    return str(asked) if got in (None, asked) else f"{asked}: {got}"


def _precision(named: str) -> str:
    return "as in the job" if named.startswith("{") else named


def _settings(keys: Mapping[str, Any]) -> str:
    return f"{_mesh(keys)}, remat {keys['remat']}, accumulate {keys['accumulate']}"


def _mesh(keys: Mapping[str, Any]) -> str:
    return " × ".join(f"{axis} {count}" for axis, count in keys["mesh"].items())


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
