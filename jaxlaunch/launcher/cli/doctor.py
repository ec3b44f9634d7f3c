"""`launcher doctor`: problems of a cluster and a namespace that would keep jobs from running."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.cli.screen_lines import Colour, Paragraph
from jaxlaunch.launcher.diagnose.doctor import checks
from jaxlaunch.launcher.diagnose.doctor.finding import Checkpoints, Finding, Target, exit_code
from jaxlaunch.launcher.errors import Fault, JobFaultsError
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.types import Claim
from jaxlaunch.launcher.jobs import cluster_defaults
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.local import trainer_process
from jaxlaunch.launcher.manifests.jobset import ResolvedJob, prepare, prepare_despite_faults
from jaxlaunch.launcher.plan import estimate
from jaxlaunch.launcher.wording import format_count

# The job that is checked if none is given. It requests nothing that a cluster may lack.
SMALLEST_JOB = """
name: jaxlaunch-doctor
image: registry.example/none
accelerator: {type: cpu}
command: ["true"]
"""
# The column at which findings begin.
_TEXT_COLUMN = 26
_LEVEL_COLOURS = {"fail": Colour.RED, "warn": Colour.YELLOW, "unknown": Colour.YELLOW}


@click.command("doctor")
@click.argument(
    "job_file",
    metavar="[JOB_FILE]",
    type=click.Path(path_type=Path),
    required=False,
    callback=options.check_job_file,
)
@click.argument(
    "overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=options.complete_keys
)
@options.cluster_options("Where jobs are to run. [default: the job's, else the context's]")
@click.option(
    "-q", "--queue", help="A LocalQueue. [default: the job's, else the cluster defaults']"
)
@options.defaults_option("the cluster's ConfigMap jaxlaunch")
@options.output_option("text", "json", "yaml")
def doctor_command(
    job_file: Path | None,
    overrides: tuple[str, ...],
    namespace: str | None,
    context: str | None,
    queue: str | None,
    defaults_file: Path | None,
    output_format: str,
) -> int:
    """Check that the cluster can run JOB_FILE, or any job.

    Each finding says what is wrong, why, and how to fix it. If JOB_FILE lacks something, that is a
    failure, and the other checks continue. Nothing is written: objects are created with dryRun=All.
    A check that needs permissions that you do not have is `unknown`. The exit code is 2 if you can
    fix everything that fails, and 3 if the cluster administrator must fix some of it.
    """
    cluster = Cluster.connect(context, output.show_messages)
    options_by_key = {"namespace": namespace, "queue": queue}
    settings = {key: value for key, value in options_by_key.items() if value is not None}
    file = jobs.read_job_text(_smallest_job(settings), "the smallest job")
    faults: tuple[Fault, ...] = ()
    is_example = job_file is None
    if job_file is not None:
        changes = [f"{key}={value}" for key, value in settings.items()]
        try:
            file = jobs.read_job(job_file, (*overrides, *changes))
        except JobFaultsError as error:
            faults, is_example = error.faults, True
    job_namespace = file.spec.namespace or cluster.namespace
    findings = checks.check_server(cluster)
    if exit_code(findings) == 0:
        if defaults_file is None:
            default_values, _ = cluster_defaults.find_defaults(cluster, job_namespace)
        else:
            default_values = defaults.load_defaults(defaults_file)
        file = cluster_defaults.resolve_gang_secret(
            file, cluster, job_namespace, output.show_messages
        )
        more_faults, prepared = prepare_despite_faults(file, default_values)
        faults += more_faults
        findings += checks.list_job_faults(faults)
        if prepared is None:
            is_example = True
            smallest = jobs.read_job_text(_smallest_job(settings), "the smallest job")
            prepared = prepare(smallest, default_values)
        read_checkpoints = functools.partial(_read_checkpoints, prepared.job, file.folder)
        target = Target(
            cluster,
            job_namespace,
            prepared.manifests_with_secret(),
            (lambda: None) if faults else read_checkpoints,
            is_example=is_example,
        )
        findings += checks.check_target(target)
    data = [finding.to_json() for finding in findings]
    output.show_result(data, output_format, describe_findings(findings))
    if output_format == "text":
        output.show_messages(count_findings(findings))
    return exit_code(findings)


def _smallest_job(settings: Mapping[str, str]) -> str:
    return SMALLEST_JOB + "".join(f"{key}: {value}\n" for key, value in settings.items())


def _read_checkpoints(job: ResolvedJob, base: Path) -> Checkpoints | None:
    """Return the size of the job's checkpoints, if they are on a claim and it is known."""
    volume, train = estimate.checkpoint_volume(job), job.spec.train
    if not isinstance(volume, Claim) or train is None or not trainer_process.is_installed():
        return None
    shapes = estimate.trace_shapes(job.spec, train, base)
    sizes = estimate.checkpoint_sizes(train, job.storage.checkpoints, shapes)
    return Checkpoints(volume.claim, sizes["kept"], sizes["most"])


def describe_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines of the findings. The name of a check is in its first line only."""
    previous_check = ""
    for finding in findings:
        check = finding.check if finding.check != previous_check else ""
        line = f"{finding.level:<8} {check:<{_TEXT_COLUMN - 10}} {finding.summary_text}"
        colour = _LEVEL_COLOURS.get(finding.level)
        yield Paragraph(line, indent=_TEXT_COLUMN, coloured=finding.level, colour=colour)
        previous_check = finding.check
        texts: dict[str, str | None] = {"why": finding.reason_text, "fix": finding.remedy_text}
        if finding.level == "fail":
            texts["see"] = checks.section_link(finding.check)
        for name, text in texts.items():
            if text:
                indent = _TEXT_COLUMN + len(name) + 2
                yield Paragraph(f"{'':<{_TEXT_COLUMN}}{name}: {text}", indent=indent)


def count_findings(findings: Sequence[Finding]) -> str:
    """Count the findings by level, as `14 ok, 1 warning, 2 failures, 3 unknown`."""
    counts = Counter(finding.level for finding in findings)
    warnings, failures = format_count(counts["warn"], "warning"), counts["fail"]
    problems = f"{warnings}, {format_count(failures, 'failure')}"
    return f"{counts['ok']} ok, {problems}, {counts['unknown']} unknown"
