"""`launcher init` and `validate`: write a starter job, and check a job."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import click

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import checks
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.job.request import list_smaller_gangs, summarize_file, summarize_job
from jaxlaunch.launcher.local import job_notes
from jaxlaunch.launcher.wording import format_count
from jaxlaunch.trainer.spec import format_axes

STARTERS = Path(__file__).parent / "starters"
KINDS = ("classify", "lm", "own", "command")


@click.command("init")
@click.argument("name", required=False)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="classify",
    show_default=True,
    help="classify: images; lm: text; own: your own model, task and data; command: your "
    "own program.",
)
def init_command(name: str | None, kind: str) -> None:
    """Write a starter job.yaml.

    The job trains on CPU, without a network. NAME is the name of the job, and its file is
    NAME.yaml. The kinds own and command also write the code, NAME.py.
    """
    name = None if name is None else name.removesuffix(".yaml").removesuffix(".yml")
    if name in ("", ".", ".."):
        raise UserError(f"{name!r} is not a name of a job.", "such as `launcher init digits`.")
    file = Path("job.yaml" if name is None else f"{name}.yaml")
    title = name or {"classify": "digits", "command": "program"}.get(kind, kind)
    module = title.replace("-", "_").replace(".", "_")
    placeholders = {"@FILE@": str(file), "@NAME@": title, "@MODULE@": module}
    texts = {}
    for path, starter in ((file, f"{kind}.yaml"), (Path(f"{module}.py"), f"{kind}.py.txt")):
        if (STARTERS / starter).exists():
            text = (STARTERS / starter).read_text(encoding="utf-8")
            for placeholder, value in placeholders.items():
                text = text.replace(placeholder, value)
            texts[path] = text
    # An invalid NAME is an error before anything is written.
    jobs.parse_job(texts[file], str(file))
    if existing := [path for path in texts if path.exists()]:
        raise UserError(f"{existing[0]} already exists.", "choose another name.")
    for path, text in texts.items():
        try:
            with path.open("x", encoding="utf-8") as stream:
                stream.write(text)
        except FileExistsError:
            raise UserError(f"{path} already exists.", "choose another name.") from None
        except OSError as error:
            raise UserError(f"{path}: {(error.strerror or 'not writable').lower()}.") from None
    output.show_lines(f"wrote {' and '.join(map(str, texts))}; train with: launcher run {file}")


@click.command("validate")
@options.job_arguments
@options.output_option("text", "json", "yaml")
def validate_command(job_file: Path, overrides: tuple[str, ...], output_format: str) -> None:
    """Check JOB_FILE, and show what it requests.

    The command needs no cluster and no accelerator. KEY=VALUE sets a key, as in train.steps=100.
    All errors are reported at once, each with its line; the exit code is then 2. Notes say what
    `run` would refuse in the files of this machine, such as a missing column of a table.
    """
    file = jobs.read_job(job_file, overrides, may_have_roles=True)
    specs = [role.file.spec for role in file.roles] or [file.spec]
    lines = itertools.chain(
        [f"{job_file}: ok"], *(_describe_job(spec, file.folder) for spec in specs)
    )
    output.show_result(summarize_file(file), output_format, lines)


def _describe_job(job: JobSpec, folder: Path) -> Iterator[str]:
    """Yield what the job requests, its data, and notes on what `run` would refuse."""
    yield from describe_request(job)
    yield from (f"data: {note}" for note in job_notes.describe_data(job, folder))
    notes = itertools.chain(
        job_notes.find_refusals(job, folder),
        job_notes.find_unexportable_options(job),
        job_notes.list_missing_modules(job, folder),
        job_notes.find_lost_exit_codes(job, folder),
        job_notes.find_unexpanded_variables(job),
    )
    yield from (f"note: {note}" for note in notes)


def describe_request(job: JobSpec) -> list[str]:
    """Return lines about the request of a job."""
    summary = summarize_job(job)
    devices = f"{checks.describe_devices(job)} of type {job.accelerator.type}"
    per_process = format_count(job.devices_per_process, "device")
    processes = f"{format_count(job.processes, 'process')} of {per_process}"
    lines = [f"{job.name}: {devices}, {processes}"]
    if job.train is None:
        lines.append(f"command: {job.command[0] if job.command else ''}")
    else:
        micro = f", in {summary['accumulate']} micro-batches" if job.train.accumulate > 1 else ""
        batch = f"{summary['batch']} examples a step{micro}"
        lines.append(f"mesh: {format_axes(summary['mesh'])}")
        lines.append(f"batch: {batch}, {summary['batch_per_device']} per device")
    return lines + _describe_lost_host(job)


def _describe_lost_host(job: JobSpec) -> list[str]:
    if job.host_count == 1:
        return []
    if not job.replaces_hosts:
        reason = ": a TPU slice is lost as a whole" if job.accelerator.platform == "tpu" else ""
        return [f"a lost host: all pods are replaced{reason}"]
    verb = "takes" if job.spares == 1 else "take"
    spare = f"{format_count(job.spares, 'spare')} {verb} its ranks, and " if job.spares else ""
    first = f"a lost host: {spare}only its pod is created again"
    rows = []
    for row in list_smaller_gangs(job):
        text = f"  {format_count(row['hosts'], 'host')}: "
        if "mesh" in row:
            text += f"{format_axes(row['mesh'])}, {row['batch_per_device']} per device, "
            text += f"accumulate {row['accumulate']}"
        rows.append(text)
    return [f"{first}; after timeouts.replace it continues with fewer:", *rows] if rows else [first]
