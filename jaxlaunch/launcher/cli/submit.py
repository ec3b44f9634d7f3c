"""`launcher submit`: a job onto a cluster; with --follow its lines, with --wait its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from jaxlaunch import contract
from jaxlaunch.launcher import troubleshooting
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.diagnose.doctor import precheck
from jaxlaunch.launcher.errors import ApiError, Unreachable, UserError
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.job.load import JobFile
from jaxlaunch.launcher.jobs import cluster_defaults, gang_secret
from jaxlaunch.launcher.jobs.logs import follow, lines
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.job_status import JobStatus
from jaxlaunch.launcher.jobs.submit import Submission, Submitted
from jaxlaunch.launcher.jobs.wait import Timeout, Waiting, quietly
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.manifests.jobset import prepare


class Submit(click.Command):
    """Takes `--dry-run` and `--dry-run=server`; the argument after it is the job file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, with `--dry-run` written out."""
        return super().parse_args(ctx, ["--dry-run=client" if arg == "--dry-run" else arg for arg in args])


@click.command("submit", cls=Submit)
@options.job
@options.place("Where it runs. [default: the job's, else the context's]")
@options.defaults("the cluster's ConfigMap jaxlaunch")
@click.option(
    "--dry-run",
    type=click.Choice(["client", "server"]),
    metavar="[=server]",
    help="Print the manifests; with =server, send them to the server to validate. Nothing is kept.",
)
@click.option("-f", "--follow", "is_following", is_flag=True, help="Print its log until it ends, across restarts.")
@click.option("--wait", "is_waiting", is_flag=True, help="Wait for its end; the exit code is the job's.")
@click.option("--timeout", metavar="DURATION", help="Longest time for --wait and --follow; then the exit code is 124.")
@click.option("--replace", is_flag=True, help="Delete a finished or stopped job of the same name first.")
@click.option("--force", is_flag=True, help="Submit a job whose pods the namespace's Pod Security level rejects.")
@options.form("name", "json", "yaml")
def submit_command(
    job_file: Path,
    overrides: tuple[str, ...],
    namespace: str | None,
    context: str | None,
    defaults_file: Path | None,
    dry_run: str | None,
    is_following: bool,
    is_waiting: bool,
    timeout: str | None,
    replace: bool,
    force: bool,
    form: str,
) -> int:
    """Submit JOB_FILE to a cluster.

    Everything is checked first; then at most four objects are written. Submitting the same job again does not create a
    second one: a running job is not changed, and a stopped one resumes.
    """
    overrides = overrides if namespace is None else (*overrides, f"namespace={namespace}")
    is_watching = is_waiting or is_following
    limit_s, file = _seconds(timeout, is_watching), jobs.read(job_file, overrides)
    if dry_run == "client" and defaults_file is not None:
        output.documents(prepare(file, defaults.load(defaults_file)).manifests)
        return 0
    cluster = Cluster.connect(context, output.say)
    where = file.spec.namespace or cluster.namespace
    known = _found(cluster, where) if defaults_file is None else defaults.load(defaults_file)
    prepared = prepare(gang_secret.settled(file, cluster, where, output.say), known, where)
    if dry_run == "client":
        output.documents(prepared.manifests)
        return 0
    manifests = prepared.with_secret()
    submission = Submission(cluster, manifests, output.say)
    try:
        for note in precheck.check(cluster, manifests, replace=replace, watch=is_watching, force=force):
            output.say(note)
        if dry_run == "server":
            output.show(*(f"{line} (server dry run)" for line in submission.rehearse(replace=replace)))
            return 0
        done = submission.run(replace=replace)
    except KeyboardInterrupt:
        output.say(f"interrupted: {submission.what_exists()}")
        raise
    with _said_to_run_on(done.jobset):
        _report(done, form)
        return _to_its_end(cluster, done.jobset, is_following, limit_s) if is_watching else 0


def many(files: Sequence[JobFile], context: str | None, *, is_rehearsal: bool) -> str:
    """Submits jobs one after the other, as the command does with one; the namespace. A rehearsal prints them alone."""
    cluster = Cluster.connect(context, output.say)
    where = files[0].spec.namespace or cluster.namespace
    known = _found(cluster, where)
    for file in files:
        prepared = prepare(gang_secret.settled(file, cluster, where, output.say), known, where)
        if is_rehearsal:
            output.documents(prepared.manifests)
            continue
        manifests = prepared.with_secret()
        for note in precheck.check(cluster, manifests, replace=False, watch=False, force=False):
            output.say(note)
        _report(Submission(cluster, manifests, output.say).run(replace=False), "name")
    return where


def _seconds(timeout: str | None, is_watching: bool) -> float | None:
    if timeout is not None and not is_watching:
        raise UserError("--timeout needs --wait or --follow.", "add one of them.")
    return options.seconds("--timeout", timeout)


def _found(cluster: Cluster, namespace: str) -> ClusterDefaults:
    """The cluster's own defaults; reports where they are, because the job is checked against them."""
    found, where = cluster_defaults.find(cluster, namespace)
    if where is not None:
        output.say(f"the cluster defaults are in {where}")
    return found


def _report(done: Submitted, form: str) -> None:
    metadata = done.jobset["metadata"]
    if form == "name":
        output.show(f"{JOBSETS.titled(metadata['name'])} {done.how}")
    else:
        kept = {key: value for key, value in metadata.items() if key != "managedFields"}
        output.data({**done.jobset, "metadata": kept}, form)
    if done.how == "unchanged":
        output.say(f"already submitted at {metadata['creationTimestamp']}: the same job is there and was not changed")
    elif done.how == "resumed":
        output.say("it was stopped, and continues from its last checkpoint")


@contextmanager
def _said_to_run_on(jobset: Obj) -> Iterator[None]:
    """Says that an interrupt, or a server that cannot be asked, ends only the waiting."""
    try:
        yield
    except (KeyboardInterrupt, ApiError, Unreachable):
        name, where = jobset["metadata"]["name"], f"-n {jobset['metadata']['namespace']}"
        again = f"`launcher logs {where} -f {name}` shows its lines again, `launcher stop {where} {name}` ends it"
        output.say(f"{name} keeps running. {again}")
        raise


def _to_its_end(cluster: Cluster, jobset: Obj, is_following: bool, limit_s: float | None) -> int:
    """The exit code of a job once it is over; its lines are shown meanwhile if `is_following`."""
    name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    try:
        waiting = Waiting(cluster, jobset, limit_s, quietly if is_following else output.say)
        if is_following:
            chosen = lines.usual(hosts.table(jobset).processes)
            printer = output.Printer(chosen)
            if chosen.ranks is not None:
                output.say(f"showing rank 0 alone; `launcher logs -n {namespace} -f {name} --rank N` shows others")
            follow.follow(
                cluster, namespace, name, select=chosen, show=printer.show, say=output.say, until=waiting.is_over
            )
        return _conclude(waiting.result())
    except Timeout:
        shows = f"`launcher status -n {namespace} {name}` shows its state"
        output.say(f"{name} has not ended and keeps running. {shows}")
        return options.WAITED_TOO_LONG


def _conclude(status: JobStatus) -> int:
    """The exit code of a job that is over, after a line about how it ended."""
    code = contract.PREEMPTED if status.code is None else status.code
    step = "" if status.step is None else f" at step {status.step}"
    message = f": {status.verdict['message']}" if status.verdict else ""
    output.say(f"{status.name} {status.state.value}{step}{message} (exit {code})")
    if (page := troubleshooting.of_code(code)) is not None:
        output.say(f"see: {page}")
    return code
