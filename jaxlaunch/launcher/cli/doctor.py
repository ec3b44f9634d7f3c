"""`launcher doctor`: what of a cluster and a namespace would keep jobs from running."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import click

from jaxlaunch.launcher.cli import completions, options, output
from jaxlaunch.launcher.diagnose.doctor import checks
from jaxlaunch.launcher.diagnose.doctor.finding import Finding, exit_code
from jaxlaunch.launcher.diagnose.doctor.target import Checkpoints, Target
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobFile
from jaxlaunch.launcher.job.types import Claim
from jaxlaunch.launcher.jobs import cluster_defaults, gang_secret
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.local import trainer_process
from jaxlaunch.launcher.manifests.jobset import ResolvedJob, prepare
from jaxlaunch.launcher.plan import checkpoint_space, estimate, shapes
from jaxlaunch.launcher.wording import count

# Stands in for a job where none is named: it asks for nothing that a cluster may lack.
SMALLEST = """
name: jaxlaunch-doctor
image: registry.example/none
accelerator: {type: cpu}
command: ["true"]
"""
_TEXT_AT = 26  # the column where findings begin


@click.command("doctor")
@click.argument("job_file", metavar="[JOB_FILE]", type=click.Path(path_type=Path), required=False)
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=completions.keys)
@options.place("Where jobs are to run. [default: the job's, else the context's]")
@click.option("-q", "--queue", help="A LocalQueue. [default: the job's, else the cluster defaults']")
@options.defaults("the cluster's ConfigMap jaxlaunch")
@options.form("text", "json", "yaml")
def doctor_command(
    job_file: Path | None,
    overrides: tuple[str, ...],
    namespace: str | None,
    context: str | None,
    queue: str | None,
    defaults_file: Path | None,
    form: str,
) -> int:
    """Check that the cluster can run JOB_FILE, or any job.

    Each finding says what is wrong, why, and how to fix it. Nothing is written: objects are created with dryRun=All.
    A check that needs rights which you do not have is `unknown`. The exit code is 2 if you can fix everything that
    fails, and 3 if the cluster administrator must fix some of it.
    """
    cluster = Cluster.connect(context, output.say)
    given = {key: value for key, value in (("namespace", namespace), ("queue", queue)) if value is not None}
    file = _file(job_file, overrides, given)
    where = file.spec.namespace or cluster.namespace
    found = checks.check_server(cluster)
    if exit_code(found) == 0:
        known = cluster_defaults.find(cluster, where)[0] if defaults_file is None else defaults.load(defaults_file)
        file = gang_secret.settled(file, cluster, where, output.say)
        prepared = prepare(file, known)
        sizes = partial(_checkpoints, prepared.job, file.folder)
        found += checks.check_job(Target(cluster, where, prepared.with_secret(), sizes, is_example=job_file is None))
    if form == "text":
        output.show(*lines(found))
        output.say(summary(found))
    else:
        output.data([finding.to_json() for finding in found], form)
    return exit_code(found)


def _file(job_file: Path | None, overrides: tuple[str, ...], given: Mapping[str, str]) -> JobFile:
    """The job, in the namespace and queue that are given; the smallest where no file is named."""
    if job_file is not None:
        return jobs.read(job_file, (*overrides, *(f"{key}={value}" for key, value in given.items())))
    return jobs.read_text(SMALLEST + "".join(f"{key}: {value}\n" for key, value in given.items()), "the smallest job")


def _checkpoints(job: ResolvedJob, base: Path) -> Checkpoints | None:
    """What the job's checkpoints take of a claim, by the trainer's own shapes; None where they are on none."""
    volume = checkpoint_space.volume_of(job)
    if not isinstance(volume, Claim) or job.spec.train is None or not trainer_process.is_installed():
        return None
    traced = shapes.of(job.spec, job.spec.train, base)
    found = estimate.checkpoints(job.spec.train, job.storage.checkpoints, traced)
    return Checkpoints(volume.claim, found["kept"], found["most"])


def lines(found: Sequence[Finding]) -> Iterator[str]:
    """The findings, each check's name once."""
    before = ""
    for each in found:
        yield f"{each.level:<8} {each.check if each.check != before else '':<{_TEXT_AT - 10}} {each.what}"
        before = each.check
        see = checks.see(each.check) if each.level == "fail" else None
        for name, text in (("why", each.why), ("fix", each.fix), ("see", see)):
            if text:
                yield f"{'':<{_TEXT_AT}}{name}: {text}"


def summary(found: Sequence[Finding]) -> str:
    """`14 ok, 1 warning, 2 failures, 3 unknown`."""
    counted = Counter(each.level for each in found)
    parts = [f"{counted['ok']} ok", count(counted["warn"], "warning"), count(counted["fail"], "failure")]
    return ", ".join([*parts, f"{counted['unknown']} unknown"])
