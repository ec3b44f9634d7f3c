"""`launcher status`: how one job stands, on one screen."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from launcher import emit, world
from launcher.causes.memory import is_oom
from launcher.cli import options
from launcher.cluster import Cluster
from launcher.errors import UserError
from launcher.explain import explain, restarts_line
from launcher.objects import age
from launcher.seen import World
from launcher.status import JobStatus, fold

MAX_HOSTS = 32  # lines of -o wide without a failing host among them


@click.command("status")
@click.argument("name")
@options.place()
@click.option("-o", "--output", type=click.Choice(["json", "yaml", "wide"]), help="Another form; wide shows each host.")
def status_command(name: str, namespace: str | None, context: str | None, output: str | None) -> None:
    """Show how job NAME stands.

    The verdict comes first when there is one.
    """
    cluster = Cluster.connect(context)
    seen = world.gather(cluster, namespace or cluster.namespace, name)
    if seen.jobset is None:
        raise UserError(f"{explain(seen).headline}.", explain(seen).next_move)
    status = fold(seen)
    if output == "json":
        return click.echo(json.dumps(status.to_json(), indent=2, ensure_ascii=False))
    if output == "yaml":
        return click.echo(emit.document(json.loads(json.dumps(status.to_json()))), nl=False)
    for line in screen(status, seen):
        click.echo(line)
    for line in _each_host(seen) if output == "wide" else ():
        click.echo(line)


def screen(status: JobStatus, seen: World) -> Iterator[str]:
    """The lines of one job: the verdict, its state, and what is known beside it."""
    if status.verdict is not None:
        yield f"{status.verdict['cause']} ({status.verdict['code']}): {status.verdict['message']}"
    attempt = "" if status.attempt is None else f", attempt {status.attempt}"
    yield f"{status.name}: {status.state.value} (generation {status.generation}{attempt})"
    for label, text in _rows(status, seen):
        if text:
            yield f"  {label:<11}{text}"


def _rows(status: JobStatus, seen: World) -> Iterator[tuple[str, str]]:
    if status.phase is None and (status.verdict is None or is_oom(seen)):  # the agents cannot tell who sent a SIGKILL
        yield "why", explain(seen).headline.removeprefix(f"{status.name} ")
    yield "hosts", f"{status.ready} of {status.hosts} ready" + (f", queue {status.queue}" if status.queue else "")
    yield "phase", _phase(status)
    yield "restarts", restarts_line(status).removeprefix("restarts: ")
    yield "checkpoint", _checkpoint(status)
    yield "goodput", "" if status.goodput is None else f"{status.goodput:.1%}"
    yield "age", age(status.age_s) + ("" if status.lasted_s is None else f", ended after {age(status.lasted_s)}")
    yield "unknown", "; ".join(seen.unread)


def _phase(status: JobStatus) -> str:
    of = "" if status.steps is None else f" of {status.steps}"
    at = "" if status.step is None else f"step {status.step}{of}"
    if status.phase in (None, "step"):
        return at
    spent = "" if status.phase_s is None else f" for {age(status.phase_s)}"
    return f"{status.phase}{spent}" + (f", at {at}" if at else "")


def _checkpoint(status: JobStatus) -> str:
    if status.committed is None:
        return ""
    since = "before these pods" if status.committed_age_s is None else f"{age(status.committed_age_s)} ago"
    return f"step {status.committed}, {since}"


def _each_host(seen: World) -> Iterator[str]:
    """A table of the hosts; of many, those that are not ready first."""
    hosts = sorted(seen.hosts, key=lambda host: (host.is_ready, host.number))
    yield f"{'HOST':<6}{'READY':<7}{'STATE':<22}{'NODE':<24}POD"
    for host in hosts[:MAX_HOSTS]:
        state = host.waiting.get("reason") or host.ended.get("reason") or host.phase
        yield f"{host.number:<6}{'yes' if host.is_ready else 'no':<7}{state:<22}{host.node or '-':<24}{host.pod}"
    if len(hosts) > MAX_HOSTS:
        yield f"… and {len(hosts) - MAX_HOSTS} more hosts"
