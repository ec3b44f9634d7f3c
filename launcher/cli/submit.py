"""`launcher submit`: a job onto a cluster, and if asked for, its lines and its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from launcher import bundle, clusterprofile, emit, follow, hosts, jobset, logs, podlogs, precheck, profile
from launcher import job as jobs
from launcher.cli import options
from launcher.cli.printer import Printer
from launcher.cluster import Cluster
from launcher.errors import Unreachable, UserError
from launcher.job import JobSpec
from launcher.kinds import JOBSETS
from launcher.profile import Profile
from launcher.refusals import refusals
from launcher.status import JobStatus
from launcher.submit import Submission, Submitted
from launcher.wait import Timeout, Waiting
from trainer import contract


class Submit(click.Command):
    """Takes `--dry-run` and `--dry-run=server`, but no word after it: that is the job's file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--dry-run=client" if word == "--dry-run" else word for word in args])


@click.command(cls=Submit)
@options.job
@options.place("Where it runs. [default: the job's, else the context's]")
@options.profile("the cluster's ConfigMap jaxlaunch")
@click.option(
    "--dry-run",
    type=click.Choice(["client", "server"]),
    metavar="[=server]",
    help="Print the manifests; with =server, let the server judge them. Nothing is kept.",
)
@click.option("-f", "--follow", "is_following", is_flag=True, help="Print its lines until it ends, over restarts.")
@click.option("--wait", "is_waiting", is_flag=True, help="Wait for its end; the exit code is the verdict's.")
@click.option("--timeout", metavar="DURATION", help="How long --wait and --follow last. Then the exit code is 124.")
@click.option("--replace", is_flag=True, help="Delete a finished or stopped job of the same name first.")
@click.option("-o", "--output", type=click.Choice(["name", "json", "yaml"]), default="name", help="[default: name]")
def submit(
    job_file: Path,
    overrides: tuple[str, ...],
    namespace: str | None,
    context: str | None,
    profile_file: Path | None,
    dry_run: str | None,
    is_following: bool,
    is_waiting: bool,
    timeout: str | None,
    replace: bool,
    output: str,
) -> int:
    """Run JOB on a cluster.

    Everything that can be wrong is asked first; then at most three objects are written. Submitting the same job again
    makes no second one: it is found running, or goes on where it was stopped.
    """
    overrides = overrides if namespace is None else (*overrides, f"namespace={namespace}")
    is_watching = is_waiting or is_following
    limit_s, job = _seconds(timeout, is_watching), jobs.load(job_file, overrides)
    if dry_run == "client" and profile_file is not None:
        click.echo(emit.documents(_manifests(job_file, overrides, profile.load(profile_file))), nl=False)
        return 0
    cluster = Cluster.connect(context)
    where = job.namespace or cluster.namespace
    known = _found(cluster, where) if profile_file is None else profile.load(profile_file)
    manifests = [_placed(manifest, where) for manifest in _manifests(job_file, overrides, known)]
    if dry_run == "client":
        click.echo(emit.documents(manifests), nl=False)
        return 0
    done = _write(cluster, manifests, replace=replace, is_watching=is_watching, is_rehearsal=dry_run == "server")
    if done is None:
        return 0
    if is_watching:
        return _to_its_end(cluster, done, output, is_following, limit_s)
    _report(done, output)
    return 0


def _write(
    cluster: Cluster, manifests: list[dict[str, Any]], *, replace: bool, is_watching: bool, is_rehearsal: bool
) -> Submitted | None:
    """Submits, once nothing is in the way; a rehearsal submits nothing. Interrupted, says what exists."""
    submission = Submission(cluster, manifests, options.say)
    try:
        for note in precheck.check(cluster, manifests, replace=replace, watch=is_watching):
            options.say(note)
        if not is_rehearsal:
            return submission.run(replace=replace)
        click.echo("\n".join(f"{line} (server dry run)" for line in submission.rehearse(replace=replace)))
        return None
    except KeyboardInterrupt:
        options.say(f"interrupted: {submission.what_exists()}")
        raise


def _seconds(timeout: str | None, is_watching: bool) -> float | None:
    if timeout is not None and not is_watching:
        raise UserError("--timeout says how long to wait, and nothing is waited for.", "add --wait or --follow.")
    return options.seconds("--timeout", timeout)


def _found(cluster: Cluster, namespace: str) -> Profile:
    """The cluster's profile; says where it is, for a job is judged by it."""
    found, where = clusterprofile.find(cluster, namespace)
    if where is not None:
        options.say(f"the cluster's profile is {where}")
    return found


def _manifests(job_file: Path, overrides: tuple[str, ...], known: Profile) -> list[dict[str, Any]]:
    """What is written, judged against the profile first."""
    job: JobSpec = jobs.load(job_file, overrides, also=lambda job: refusals(job, known))
    return jobset.render(job, known, bundle.of(job, job_file.absolute().parent))


def _placed(manifest: dict[str, Any], namespace: str) -> dict[str, Any]:
    return manifest | {"metadata": {**manifest["metadata"], "namespace": namespace}}


def _report(done: Submitted, output: str) -> None:
    metadata = done.jobset["metadata"]
    shown = {**done.jobset, "metadata": {key: value for key, value in metadata.items() if key != "managedFields"}}
    if output == "json":
        click.echo(json.dumps(shown, indent=2))
    elif output == "yaml":
        click.echo(emit.document(shown), nl=False)
    else:
        click.echo(f"{JOBSETS.titled(metadata['name'])} {done.how}")
    if done.how == "unchanged":
        options.say(f"already submitted at {metadata['creationTimestamp']}: the same job is there and was not changed")
    elif done.how == "resumed":
        options.say("it was stopped, and goes on from what it saved")


def _to_its_end(cluster: Cluster, done: Submitted, output: str, is_following: bool, limit_s: float | None) -> int:
    """Waits until the job is over, its lines on the screen meanwhile; the code to leave with."""
    found = done.jobset
    name, namespace = found["metadata"]["name"], found["metadata"]["namespace"]
    try:
        _report(done, output)
        waiting = Waiting(cluster, found, limit_s)
        if is_following:
            chosen = logs.usual(hosts.wanted(found) * podlogs.processes_per_host(found))
            printer = Printer(chosen)
            if chosen.ranks is not None:
                options.say(f"showing rank 0 alone; `launcher logs -f {name} --rank N` shows others")
            follow.follow(
                cluster, namespace, name, select=chosen, show=printer.show, say=options.say, until=waiting.is_over
            )
        return _conclude(waiting.result())
    except Timeout:
        options.say(f"{name} is not over; it goes on. `launcher status {name}` says how it stands")
        return options.WAITED_TOO_LONG
    except (KeyboardInterrupt, Unreachable):
        options.say(f"{name} goes on. `launcher logs -f {name}` shows it again, `launcher stop {name}` ends it")
        raise


def _conclude(stands: JobStatus) -> int:
    """Says how it ended."""
    code = contract.PREEMPTED if stands.code is None else stands.code
    step = "" if stands.step is None else f" at step {stands.step}"
    said = f": {stands.verdict['message']}" if stands.verdict else ""
    options.say(f"{stands.name} {stands.state.value}{step}{said} (exit {code})")
    return code
