"""`launcher submit`: submit a job, and optionally follow its logs or wait for its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from jaxlaunch import contract
from jaxlaunch.launcher import troubleshooting
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.client import submission
from jaxlaunch.launcher.diagnose.doctor import checks
from jaxlaunch.launcher.errors import (
    ApiError,
    ClusterError,
    UnreachableError,
    UserError,
    WaitTimeoutError,
)
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobFile
from jaxlaunch.launcher.jobs.lifecycle import BackgroundWait, ignore_message
from jaxlaunch.launcher.jobs.logs import follow, lines
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.submit import Submission, SubmitResult, record_words
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.kubernetes.objects import Obj, lead_name
from jaxlaunch.launcher.manifests.code import describe_code
from jaxlaunch.launcher.manifests.jobset import prepare

# Timeout of a call for a dry run, which needs no cluster.
_DRY_RUN_TIMEOUT_S = 3.0


class Submit(click.Command):
    """Command whose option --dry-run has an optional value, only with an equals sign."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. `--dry-run` alone means `--dry-run=client`."""
        args = ["--dry-run=client" if arg == "--dry-run" else arg for arg in args]
        return super().parse_args(ctx, args)


@click.command("submit", cls=Submit)
@options.job_arguments
@options.cluster_options("Where it runs. [default: the job's, else the context's]")
@options.defaults_option("the cluster's ConfigMap jaxlaunch")
@click.option(
    "--dry-run",
    type=click.Choice(["client", "server"]),
    metavar="[=server]",
    help="Print the manifests, also without a cluster; with =server, send them to the server to "
    "validate. Nothing is kept.",
)
@click.option(
    "-f",
    "--follow",
    "is_following",
    is_flag=True,
    help="Print its log until it ends, across restarts.",
)
@click.option(
    "--wait", "is_waiting", is_flag=True, help="Wait for its end; the exit code is the job's."
)
@click.option(
    "--timeout",
    metavar="DURATION",
    help="Longest time for --wait and --follow; then the exit code is 124.",
)
@click.option(
    "--replace", is_flag=True, help="Delete a finished or stopped job of the same name first."
)
@click.option(
    "--force",
    is_flag=True,
    help="Submit a job whose pods the namespace's Pod Security level rejects.",
)
@options.output_option("name", "json", "yaml")
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
    output_format: str,
) -> int:
    """Submit JOB_FILE to a cluster.

    Everything is checked first; then the JobSet and the objects that it owns are written.
    Submitting the same job again does not create a second one: a running job is not changed, and a
    stopped one resumes.
    """
    overrides = overrides if namespace is None else (*overrides, f"namespace={namespace}")
    is_watching = is_waiting or is_following
    if timeout is not None and not is_watching:
        raise UserError("--timeout needs --wait or --follow.", "add one of them.")
    limit_s = options.parse_duration("--timeout", timeout)
    file = jobs.read_job(job_file, overrides, may_have_roles=True)
    if dry_run == "client":
        print_manifests([file], context, defaults_file)
        return 0
    cluster = Cluster.connect(context, output.show_messages)
    job_namespace = file.spec.namespace or cluster.namespace
    say = output.show_messages
    default_values = submission.read_defaults(cluster, job_namespace, defaults_file, say)
    prepared = submission.prepare_job(file, cluster, job_namespace, default_values, say)
    manifests = prepared.manifests_with_secret()
    if (shipped_code := describe_code(manifests)) is not None:
        output.show_messages(f"code: {shipped_code}")
    record_words(manifests[0], job_file, overrides, defaults_file)
    to_submit = Submission(cluster, manifests, output.show_messages)
    try:
        notes = checks.check_submission(
            cluster, manifests, replace=replace, watch=is_watching, force=force
        )
        output.show_messages(*notes)
        if dry_run == "server":
            effects = to_submit.dry_run(replace=replace)
            output.show_lines(*(f"{line} (server dry run)" for line in effects))
            return 0
        submitted = to_submit.submit(replace=replace)
    except KeyboardInterrupt:
        output.show_messages(f"interrupted: {to_submit.describe_existing()}")
        raise
    try:
        _show_submitted(submitted, output_format)
        if not is_watching:
            return 0
        return _follow_to_end(cluster, submitted.jobset, is_following, limit_s)
    except (KeyboardInterrupt, ApiError, UnreachableError):
        # The error ends only the wait, not the job.
        metadata = submitted.jobset["metadata"]
        name, option = metadata["name"], f"-n {metadata['namespace']}"
        logs = f"`launcher logs {option} -f {name}` shows its lines again"
        stop = f"`launcher stop {option} {name}` ends it"
        output.show_messages(f"{name} keeps running. {logs}, {stop}")
        raise


def print_manifests(
    files: Sequence[JobFile], context: str | None, defaults_file: Path | None = None
) -> None:
    """Print the manifests of jobs, with the defaults of the cluster if there is one."""
    cluster, default_values = None, defaults.load_defaults(defaults_file)
    if defaults_file is None:
        try:
            cluster = Cluster.connect(context)
            cluster.limit_call_time(_DRY_RUN_TIMEOUT_S)
            namespace = files[0].spec.namespace or cluster.namespace
            say = output.show_messages
            default_values = submission.read_defaults(cluster, namespace, None, say)
        except ClusterError as error:
            if context is not None or isinstance(error, ApiError):
                raise
            cluster = None
            advice = "so the manifests are without its defaults, which --defaults FILE reads"
            output.show_messages(f"no cluster answers, {advice}: {error.message}")
    for file in files:
        if cluster is None:
            prepared = prepare(file, default_values)
        else:
            namespace = file.spec.namespace or cluster.namespace
            say = output.show_messages
            prepared = submission.prepare_job(file, cluster, namespace, default_values, say)
        output.show_documents(prepared.manifests)


def prepare_submissions(
    job_file: Path,
    overrides_by_job: Sequence[Sequence[str]],
    context: str | None,
) -> tuple[list[Submission], str]:
    """Read a job with several overrides, and check each as `launcher submit` does.

    Returns:
        The submissions, of which nothing is written yet, and the namespace of the jobs.
    """
    files = [jobs.read_job(job_file, overrides) for overrides in overrides_by_job]
    cluster = Cluster.connect(context, output.show_messages)
    job_namespace = files[0].spec.namespace or cluster.namespace
    say = output.show_messages
    default_values = submission.read_defaults(cluster, job_namespace, None, say)
    submissions = []
    for file, overrides in zip(files, overrides_by_job, strict=True):
        prepared = submission.prepare_job(file, cluster, job_namespace, default_values, say)
        manifests = prepared.manifests_with_secret()
        record_words(manifests[0], job_file, overrides, None)
        notes = checks.check_submission(cluster, manifests, replace=False, watch=False, force=False)
        output.show_messages(*notes)
        submissions.append(Submission(cluster, manifests, output.show_messages))
    return submissions, job_namespace


def submit_all(submissions: Sequence[Submission]) -> None:
    """Submit jobs one after the other, and print each. Existing jobs are not changed."""
    for prepared_submission in submissions:
        _show_submitted(prepared_submission.submit(replace=False), "name")


def _show_submitted(submitted: SubmitResult, output_format: str) -> None:
    metadata = submitted.jobset["metadata"]
    if output_format == "name":
        output.show_lines(f"{JOBSETS.qualified_name(metadata['name'])} {submitted.outcome}")
    else:
        own_metadata = {key: value for key, value in metadata.items() if key != "managedFields"}
        output.show_data({**submitted.jobset, "metadata": own_metadata}, output_format)
    if submitted.outcome == "unchanged":
        fact = f"already submitted at {metadata['creationTimestamp']}"
        output.show_messages(f"{fact}: the same job is there and was not changed")
    elif submitted.outcome == "resumed":
        output.show_messages("it was stopped, and continues from its last checkpoint")


def _follow_to_end(cluster: Cluster, jobset: Obj, is_following: bool, limit_s: float | None) -> int:
    """Wait until a job has ended, follow its logs if asked, and return its exit code."""
    name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    say = output.show_messages
    try:
        show_state = ignore_message if is_following else say
        wait = BackgroundWait(cluster, jobset, limit_s, show_state)
        if is_following:
            role = lead_name(jobset) if hosts.list_roles(jobset) else None
            members = hosts.initial_members(hosts.select_lead(jobset))
            selection = lines.default_selection(members.process_count)
            if selection.ranks is not None:
                command = f"launcher logs -n {namespace} -f {name} --rank N"
                say(f"showing rank 0 alone; `{command}` shows others")
            show = output.Printer(selection, role=role or "").show_line
            is_over = wait.is_over
            follow.follow_logs(
                cluster,
                namespace,
                name,
                selection=selection,
                show=show,
                say=say,
                should_stop=is_over,
                role=role,
            )
        status = wait.result()
    except WaitTimeoutError:
        command = f"launcher status -n {namespace} {name}"
        say(f"{name} has not ended and keeps running. `{command}` shows its state")
        return options.EXIT_TIMEOUT
    code = contract.PREEMPTED if status.code is None else status.code
    step = "" if status.step is None else f" at step {status.step}"
    message = f": {status.verdict['message']}" if status.verdict else ""
    say(f"{status.name} {status.state.value}{step}{message} (exit {code})")
    if (page := troubleshooting.command_for_code(code)) is not None:
        say(f"see: {page}")
    return code
