"""`launcher doctor`: what of a cluster and a namespace would keep jobs from running."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from launcher import bundle, clusterprofile, doctor, emit, finding, jobset, profile
from launcher import job as jobs
from launcher.cli import options
from launcher.cluster import Cluster
from launcher.errors import Fault
from launcher.finding import Finding
from launcher.job import JobSpec
from launcher.profile import Profile
from launcher.refusals import refusals
from launcher.wording import count

# Stands in for a job where none is named: it asks for nothing that a cluster may lack.
SMALLEST = """
name: jaxlaunch-doctor
image: registry.example/none
accelerator: {type: cpu}
command: ["true"]
"""
_TEXT_AT = 26  # the column where findings begin


@click.command("doctor")
@click.argument("job_file", metavar="[JOB]", type=click.Path(path_type=Path), required=False)
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@options.place("Where jobs are to run. [default: the job's, else the context's]")
@click.option("-q", "--queue", help="A LocalQueue. [default: the job's, else the profile's]")
@options.profile("the cluster's ConfigMap jaxlaunch")
@click.option("-o", "--output", type=click.Choice(["text", "json", "yaml"]), default="text", help="[default: text]")
def doctor_command(
    job_file: Path | None,
    overrides: tuple[str, ...],
    namespace: str | None,
    context: str | None,
    queue: str | None,
    profile_file: Path | None,
    output: str,
) -> int:
    """Check that the cluster can run JOB, or any job.

    Each finding says what, why and what to do. Nothing is written: what it creates, the server only rehearses. What
    cannot be seen with these rights is said to be unknown. The exit code is 2 where you can mend what fails, 3 where
    the cluster's owner must.
    """
    cluster = Cluster.connect(context)
    given = {key: value for key, value in (("namespace", namespace), ("queue", queue)) if value is not None}
    load = partial(_loaded, job_file, overrides, given)
    where = load().namespace or cluster.namespace
    found = doctor.reach(cluster)
    if finding.exit_code(found) == 0:
        known = profile.load(profile_file) if profile_file is not None else clusterprofile.find(cluster, where)[0]
        found += doctor.examine(doctor.Patient(cluster, where, _manifests(load, job_file, known)))
    if output == "text":
        for line in lines(found):
            click.echo(line)
        click.echo(f"launcher: {summary(found)}", err=True)
    else:
        listed = [_plain(each) for each in found]
        click.echo(json.dumps(listed, indent=2) if output == "json" else emit.document(listed), nl=output == "json")
    return finding.exit_code(found)


def _loaded(
    job_file: Path | None,
    overrides: tuple[str, ...],
    given: Mapping[str, str],
    also: Callable[[JobSpec], Iterable[Fault]] = lambda job: (),
) -> JobSpec:
    """The job, in the namespace and queue that are given; the smallest where no file is named."""
    if job_file is not None:
        return jobs.load(job_file, (*overrides, *(f"{key}={value}" for key, value in given.items())), also)
    return jobs.parse(SMALLEST + "".join(f"{key}: {value}\n" for key, value in given.items()), "the smallest job")


def _manifests(load: Callable[..., JobSpec], job_file: Path | None, known: Profile) -> list[dict[str, Any]]:
    """The job as it would be submitted, judged against the profile first."""
    job = load(lambda job: refusals(job, known))
    base = Path() if job_file is None else job_file.absolute().parent
    return jobset.render(job, known, bundle.of(job, base))


def _plain(each: Finding) -> dict[str, str]:
    told = {"check": each.check} | {name: text for name, text in dataclasses.asdict(each).items() if text}
    return told if each.level == "fail" else {name: text for name, text in told.items() if name != "whose"}


def lines(found: Sequence[Finding]) -> Iterator[str]:
    """The findings, each check's name once."""
    before = ""
    for each in found:
        yield f"{each.level:<8} {each.check if each.check != before else '':<{_TEXT_AT - 10}} {each.what}"
        before = each.check
        for name, text in (("why", each.why), ("fix", each.fix)):
            if text:
                yield f"{'':<{_TEXT_AT}}{name}: {text}"


def summary(found: Sequence[Finding]) -> str:
    """`14 ok, 1 warning, 2 failures, 3 unknown`."""
    counted = Counter(each.level for each in found)
    parts = [f"{counted['ok']} ok", count(counted["warn"], "warning"), count(counted["fail"], "failure")]
    return ", ".join([*parts, f"{counted['unknown']} unknown"])
