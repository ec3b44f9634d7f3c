"""`launcher explain`: one answer on the screen."""

from __future__ import annotations

import json

import click

from launcher import emit, world
from launcher.cli import options
from launcher.cluster import Cluster
from launcher.explain import Explanation
from launcher.explain import explain as explain_world

UNKNOWN = 2  # no such job: the name is the user's to mend


@click.command("explain")
@click.argument("name")
@options.place()
@click.option("-o", "--output", type=click.Choice(["json", "yaml", "wide"]), help="Another form.")
def explain_command(name: str, namespace: str | None, context: str | None, output: str | None) -> int:
    """Say why job NAME waits, what it does, or how it ended.

    The first line names the situation; below it is what shows that, and what to do.
    """
    cluster = Cluster.connect(context)
    answer = explain_world(world.gather(cluster, namespace or cluster.namespace, name))
    if output == "json":
        click.echo(json.dumps(answer.to_json(), indent=2, ensure_ascii=False))
    elif output == "yaml":
        click.echo(emit.document(json.loads(json.dumps(answer.to_json()))), nl=False)
    else:
        _show(answer)
    return UNKNOWN if answer.situation == "unknown" else 0


def _show(answer: Explanation) -> None:
    click.echo(answer.headline)
    for line in answer.evidence:
        click.echo(f"  {line}")
    if answer.facts:
        click.echo()
    for fact in answer.facts:
        click.echo(f"  {fact}")
    if answer.next_move is not None:
        click.echo(f"\n  next: {answer.next_move}")
