"""`launcher status`: the state of one job, on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from jaxlaunch.launcher.cli import completions, from_volume, options, output, whose
from jaxlaunch.launcher.cli.job_view import ClusterView, JobView
from jaxlaunch.launcher.diagnose.explain.explanation import describe_ranks, describe_restarts
from jaxlaunch.launcher.diagnose.text import Renderer, Text
from jaxlaunch.launcher.jobs.status.job_status import OVER, JobStatus
from jaxlaunch.launcher.kubernetes.objects import format_age


@click.command("status")
@click.argument("name", metavar="JOB_NAME", shell_complete=completions.runs)
@options.place()
@options.whose
@options.from_volume
@options.screen_form("The form of the output; wide shows each host.")
def status_command(
    name: str, namespace: str | None, context: str | None, where: str | None, is_from_volume: bool, form: str | None
) -> None:
    """Show the state of job JOB_NAME, or of a run here.

    The job's result comes first if there is one. Give a run by its name below runs/, or by its folder.
    """
    view = whose.find_view(name, namespace, context, where or ("cluster" if is_from_volume else None))
    if is_from_volume and isinstance(view, ClusterView) and view.cluster is not None:
        view = ClusterView(from_volume.state(view.cluster, view.snapshot))
    if form in ("json", "yaml"):
        return output.data(view.status.to_json(), form)
    tables = view.details() if form == "wide" else ()
    output.show(*screen(view), *(line for table in tables for line in output.columns(table)))


def screen(view: JobView) -> Iterator[str]:
    """Yield the lines of one job: its result, its state, and what else is known."""
    status = view.status
    if status.verdict is not None:
        yield f"{status.verdict['cause']} ({status.verdict['code']}): {status.verdict['message']}"
    attempt = "" if status.attempt is None else f", attempt {status.attempt}"
    yield f"{status.name}: {status.state.value} (generation {status.generation}{attempt})"
    rows = [
        ("why", view.reason),
        *_numbers(status),
        ("as of", view.as_of),
        ("age", _age(status)),
        ("folder", status.folder or ""),
        ("unknown", "; ".join(view.unread)),
    ]
    yield from (f"  {label:<11}{text}" for label, text in rows if text)


def _numbers(status: JobStatus) -> Iterator[tuple[str, str]]:
    yield "hosts", _hosts(status) + (f", queue {status.queue}" if status.queue else "")
    yield "ranks", _text(status, describe_ranks(status)) if status.state not in OVER else ""
    yield "phase", _phase(status)
    yield "restarts", _text(status, describe_restarts(status))
    yield "checkpoint", _checkpoint(status)
    yield "last start", _seconds(status.restart_seconds)
    yield "goodput", "" if status.goodput is None else f"{status.goodput:.1%}"


def _text(status: JobStatus, text: Text) -> str:
    return Renderer(status.name, status.namespace).render(text)


def _seconds(by_cause: Mapping[str, float]) -> str:
    """How long the last start or restart took until its first step, and what that was spent on."""
    parts = ", ".join(f"{cause} {spent:.2f}" for cause, spent in by_cause.items() if spent >= 0.005)
    return f"{sum(by_cause.values()):.2f} s until its first step: {parts}" if parts else ""


def _age(status: JobStatus) -> str:
    return format_age(status.age_s) + (
        "" if status.lasted_s is None else f", ended after {format_age(status.lasted_s)}"
    )


def _hosts(status: JobStatus) -> str:
    """How many are ready; of a job that is over, that none is needed any more."""
    if status.state in OVER:
        return f"{status.hosts}, {status.state.value.lower()}"
    return f"{'?' if status.ready is None else status.ready} of {status.hosts} ready"


def _phase(status: JobStatus) -> str:
    of = "" if status.steps is None else f" of {status.steps}"
    at = "" if status.step is None else f"step {status.step}{of}"
    if status.phase in (None, "step"):
        return at
    spent = "" if status.phase_s is None else f" for {format_age(status.phase_s)}"
    return f"{status.phase}{spent}" + (f", at {at}" if at else "")


def _checkpoint(status: JobStatus) -> str:
    if status.committed is None:
        return ""
    if status.as_of is not None or status.folder is not None:
        return f"step {status.committed}"
    since = "before these pods" if status.committed_age_s is None else f"{format_age(status.committed_age_s)} ago"
    return f"step {status.committed}, {since}"
