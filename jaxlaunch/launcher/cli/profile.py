"""`launcher profile`: traces the next steps of a run and shows where they spend their time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from jaxlaunch.contract import PROFILE_STEPS
from jaxlaunch.launcher import profile_requests
from jaxlaunch.launcher.cli import completions, options, output
from jaxlaunch.launcher.errors import ClusterError, UserError
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.profile_requests import Answer


@click.command("profile")
@click.argument("run", shell_complete=completions.runs)
@options.place()
@click.option(
    "--steps", type=click.IntRange(1, PROFILE_STEPS), default=5, show_default=True, help="How many steps to trace."
)
@options.form("text", "json")
def profile_command(run: str, namespace: str | None, context: str | None, steps: int, form: str) -> None:
    """Profile the next steps of RUN.

    The command shows where these steps spend their time. RUN is a run folder on this machine, the name of one in runs/,
    or a job on a cluster: with -n or --context, or if there is no such folder. The job is not interrupted; the trace is
    written to its run folder.
    """
    answers = profile_requests.profile(_agents(run, namespace, context), steps, output.say)
    if form == "json":
        output.data({"ranks": {str(rank): one for rank, one in answers.items()}}, form)
    else:
        output.show(*_lines(answers))
    if not any(one["state"] == "done" for one in answers.values()):
        raise UserError("\n".join(["No rank was profiled.", *_why(answers)]))


def _agents(run: str, namespace: str | None, context: str | None) -> list[profile_requests.Agent]:
    is_remote = namespace is not None or context is not None
    if not is_remote and (folder := run_folders.find(run)) is not None:
        return profile_requests.here(folder)
    try:
        cluster = Cluster.connect(context, output.say)
    except ClusterError as error:
        if is_remote:
            raise
        raise UserError(f"There is no run folder {run} or runs/{run} here. {error.message}", error.hint) from None
    return profile_requests.on_cluster(cluster, namespace or cluster.namespace, run)


def _lines(answers: Mapping[int, Answer]) -> Iterator[str]:
    """The table of the first rank, and the folder of every trace."""
    done = {rank: one for rank, one in answers.items() if one["state"] == "done"}
    for rank, one in list(done.items())[:1]:
        found = one["summary"]
        last = found["first_step"] + found["steps"] - 1
        yield f"steps {found['first_step']}-{last} on {found['devices']} devices of rank {rank} ({found['device']})"
        yield from one["table"]
    for rank, one in done.items():
        yield f"rank {rank}: {one['summary']['step_s'] * 1e3:.3f} ms a step, in {one['folder']}"
    if done:
        yield from _why(answers)


def _why(answers: Mapping[int, Answer]) -> Iterator[str]:
    """Why ranks were not profiled."""
    for rank, one in answers.items():
        if one["state"] == "failed":
            yield f"rank {rank}: {one['fault']}"
        elif one["state"] == "gone":
            yield f"rank {rank}: its process ended first"
