"""`launcher profile`: traces some steps of a run under way, and says what they spend."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import click

from launcher import profiling, runs
from launcher.cli import options
from launcher.cluster import Cluster
from launcher.errors import ClusterError, UserError
from launcher.profiling import Found
from trainer.contract import PROFILE_STEPS


@click.command("profile")
@click.argument("run")
@options.place()
@click.option("--steps", type=click.IntRange(1, PROFILE_STEPS), default=5, show_default=True, help="How many to trace.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Another form.")
def profile_command(run: str, namespace: str | None, context: str | None, steps: int, output: str) -> None:
    """Say what the steps of RUN spend their time on.

    RUN is a run folder here, the name of one in runs/, or a job on a cluster: always with -n or --context, else where
    there is no such folder. Its next steps are traced while it goes on; the trace lies in its run folder.
    """
    answers = profiling.profile(_agents(run, namespace, context), steps, options.say)
    if output == "json":
        click.echo(json.dumps({"ranks": {str(rank): one for rank, one in answers.items()}}, indent=2))
    else:
        for line in _lines(answers):
            click.echo(line)
    if not any(one["state"] == "done" for one in answers.values()):
        raise UserError("\n".join(["No rank was profiled.", *_why(answers)]))


def _agents(run: str, namespace: str | None, context: str | None) -> list[profiling.Agent]:
    is_remote = namespace is not None or context is not None
    if not is_remote and (folder := runs.find(run)) is not None:
        return profiling.here(folder)
    try:
        cluster = Cluster.connect(context)
    except ClusterError as error:
        if is_remote:
            raise
        raise UserError(f"There is no run folder {run} or runs/{run} here, and no cluster: {error.message}") from None
    return profiling.on_cluster(cluster, namespace or cluster.namespace, run)


def _lines(answers: Mapping[int, Found]) -> Iterator[str]:
    """The table of the first rank, and where every trace lies."""
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


def _why(answers: Mapping[int, Found]) -> Iterator[str]:
    """What became of the ranks that were not profiled."""
    for rank, one in answers.items():
        if one["state"] == "failed":
            yield f"rank {rank}: {one['fault']}"
        elif one["state"] == "gone":
            yield f"rank {rank}: its process ended first"
