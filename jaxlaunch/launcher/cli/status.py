"""`launcher status` and `explain`: the state of one job, and the reason for it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from jaxlaunch.launcher.cli import options, output, screen_lines
from jaxlaunch.launcher.cli.list import format_table
from jaxlaunch.launcher.cli.screen_lines import Colour, Paragraph
from jaxlaunch.launcher.client.job_view import ClusterView, JobView, find_view
from jaxlaunch.launcher.diagnose.explain.explanation import (
    Explanation,
    describe_ranks,
    describe_restarts,
)
from jaxlaunch.launcher.diagnose.explain.failures import describe_hold
from jaxlaunch.launcher.diagnose.text import Renderer
from jaxlaunch.launcher.jobs.status.job_status import FINAL_STATES, JobStatus, State
from jaxlaunch.launcher.kubernetes.objects import format_age
from jaxlaunch.launcher.report.remaining import estimate_remaining_s
from jaxlaunch.launcher.report.run_files import CurveFile, read_job
from jaxlaunch.runs import layout

# Exit code of `explain` for a job that does not exist.
EXIT_NO_SUCH_JOB = 2
# Situations of a job that has failed, and those that a person need not look at. In all others a job
# waits or hangs.
_FAILED = frozenset({"failed", "held", "deadline", "killed", "oom", "ephemeral-storage"})
_UNREMARKABLE = frozenset(
    {"running", "restarted", "spare-used", "shrunk", "stopped", "deleting", "init-runs", "unknown"}
)
# The column at which the values of `status` begin.
_VALUE_COLUMN = 13


@click.command("status")
@options.name_argument
@options.cluster_options()
@options.location_options
@options.from_volume_option
@options.screen_output_option("The form of the output; wide shows each host.")
@options.watch_option
def status_command(
    name: str,
    namespace: str | None,
    context: str | None,
    location: str | None,
    is_from_volume: bool,
    output_format: str | None,
) -> None:
    """Show the state of job JOB_NAME, or of a run here.

    The job's result comes first if there is one. Give a run by its name below runs/, or by its
    folder.
    """
    location = location or ("cluster" if is_from_volume else None)
    view = find_view(name, namespace, context, location, output.show_messages)
    if is_from_volume and isinstance(view, ClusterView) and view.cluster is not None:
        from jaxlaunch.launcher.cli.logs import read_volume_summary

        view = ClusterView(read_volume_summary(view.cluster, view.snapshot))
    output.show_result(
        view.status.to_json(), output_format, describe_job(view, is_wide=output_format == "wide")
    )


def describe_job(view: JobView, *, is_wide: bool = False) -> Iterator[str]:
    """Yield the lines of a job: its result, state and numbers, and if wide its tables."""
    status = view.status
    if status.verdict is not None:
        verdict = status.verdict
        yield Paragraph(f"{verdict['cause']} ({verdict['code']}): {verdict['message']}")
    attempt = "" if status.attempt is None else f", attempt {status.attempt}"
    state = f"{status.name}: {status.state.value}"
    if status.role is not None and status.verdict is not None:
        state += f", by role {status.role}"
    yield Paragraph(
        f"{state} (generation {status.generation}{attempt})",
        coloured=state,
        colour=screen_lines.colour_of(status.state),
    )
    ended = "" if status.lasted_s is None else f", ended after {format_age(status.lasted_s)}"
    rows = [
        ("why", view.reason),
        ("held", Renderer(status.name, status.namespace).render(describe_hold(status))),
        *_list_numbers(status),
        ("as of", view.as_of),
        ("age", format_age(status.age_s) + ended),
        ("folder", status.folder or ""),
        ("refused", _describe_refusal(status)),
        ("unknown", "; ".join(view.unread)),
    ]
    for label, text in rows:
        if text:
            yield Paragraph(f"  {label:<{_VALUE_COLUMN - 2}}{text}", indent=_VALUE_COLUMN)
    if status.roles:
        yield from format_table(
            [(name, [role]) for name, role in status.roles.items()], False, is_wide
        )
    for table in view.detail_tables() if is_wide else ():
        yield from output.format_columns(table)


def _list_numbers(status: JobStatus) -> Iterator[tuple[str, str]]:
    renderer = Renderer(status.name, status.namespace)
    # A job that has ended needs no hosts.
    if status.state in FINAL_STATES:
        hosts, ranks = f"{status.hosts}, {status.state.value.lower()}", ""
    else:
        hosts = f"{'?' if status.ready is None else status.ready} of {status.hosts} ready"
        ranks = renderer.render(describe_ranks(status))
    yield "hosts", hosts + (f", queue {status.queue}" if status.queue else "")
    yield "ranks", ranks
    yield "phase", _describe_phase(status)
    yield "restarts", renderer.render(describe_restarts(status))
    yield "checkpoint", _describe_checkpoint(status)
    seconds = status.restart_seconds
    spent = [f"{cause} {spent_s:.2f}" for cause, spent_s in seconds.items() if spent_s >= 0.005]
    if spent:
        total_s = sum(seconds.values())
        yield "last start", f"{total_s:.2f} s until its first step: {', '.join(spent)}"
    yield from status.describe_numbers()


def _describe_phase(status: JobStatus) -> str:
    total_text = "" if status.steps is None else f" of {status.steps}"
    step_text = "" if status.step is None else f"step {status.step}{total_text}"
    if step_text and (remaining_s := _remaining_s(status)) is not None:
        step_text += f", {format_age(remaining_s)} left"
    if status.phase in (None, "step"):
        return step_text
    spent = "" if status.phase_s is None else f" for {format_age(status.phase_s)}"
    return f"{status.phase}{spent}" + (f", at {step_text}" if step_text else "")


def _remaining_s(status: JobStatus) -> float | None:
    """Return the seconds that a run on this machine still needs, or None if they are unknown."""
    if status.folder is None or status.state is not State.RUNNING:
        return None
    if status.step is None or status.steps is None:
        return None
    folder = Path(status.folder)
    metrics = CurveFile(folder / layout.METRICS)
    metrics.read_new_rows()
    return estimate_remaining_s(metrics, read_job(folder), status.step, status.steps)


def _describe_refusal(status: JobStatus) -> str:
    if (refusal := status.refused_start) is None:
        return ""
    return f"start {refusal['start']}: {refusal['message']} (exit {refusal['code']})"


def _describe_checkpoint(status: JobStatus) -> str:
    if status.committed is None:
        return ""
    text = f"step {status.committed}"
    if status.as_of is not None or status.folder is not None:
        return text
    if status.committed_age_s is None:
        return f"{text}, before these pods"
    return f"{text}, {format_age(status.committed_age_s)} ago"


@click.command("bundle")
@options.name_argument
@options.cluster_options()
@options.location_options
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The archive. [default: JOB_NAME.bundle.tar.gz]",
)
def bundle_command(
    name: str,
    namespace: str | None,
    context: str | None,
    location: str | None,
    path: Path | None,
) -> None:
    """Write all information about job JOB_NAME, or a run here, to an archive.

    The archive contains the job, its objects and events, the ends of its logs, summaries and
    versions, as text. Values of environment variables are omitted, and text that looks like a
    credential is hidden; read the files before you send them. `launcher explain FILE` shows the
    explanation.
    """
    from jaxlaunch.launcher.client.handle import find_handle

    handle = find_handle(name, namespace, context, location, output.show_messages)
    output.show_lines(str(handle.bundle(path)))


@click.command("explain")
@options.name_argument
@options.cluster_options()
@options.location_options
@options.screen_output_option("The form of the output.")
def explain_command(
    name: str,
    namespace: str | None,
    context: str | None,
    location: str | None,
    output_format: str | None,
) -> int:
    """Explain why job JOB_NAME waits, what it does, or how it ended.

    The first line names the situation; below it are the evidence and what to do. Give a run on this
    machine by its name below runs/, or by its folder; and a bundle by its file.
    """
    if name.endswith(".tar.gz") and os.path.isfile(name):
        # Imported here, because few explanations are those of bundles.
        from jaxlaunch.launcher.client.bundle import read_explanation

        answer = read_explanation(Path(name))
    else:
        answer = find_view(name, namespace, context, location, output.show_messages).explanation
    lines = list(describe_explanation(answer))
    output.show_result(answer.to_json(), output_format, lines)
    return EXIT_NO_SUCH_JOB if answer.situation == "unknown" else 0


def describe_explanation(answer: Explanation) -> Iterator[str]:
    """Yield the lines of an explanation."""
    colour = _explanation_colour(answer)
    yield Paragraph(answer.headline, coloured=answer.headline, colour=colour)
    yield from (Paragraph(f"  {line}", indent=4) for line in answer.evidence)
    if answer.facts:
        yield ""
        yield from (Paragraph(f"  {fact}", indent=4) for fact in answer.facts)
    if answer.next_move is not None:
        yield ""
        commands = [shlex.join(words) for words in answer.commands]
        yield Paragraph(f"  next: {answer.next_move}", indent=8, commands=commands)
    if answer.see is not None:
        yield Paragraph(f"  see: {answer.see}", indent=7, commands=[answer.see])


def _explanation_colour(answer: Explanation) -> Colour | None:
    """Return the colour of an explanation's headline, or None if nothing needs attention."""
    if answer.situation == "done":
        return Colour.GREEN
    if answer.situation in _FAILED:
        return Colour.RED
    return None if answer.situation in _UNREMARKABLE else Colour.YELLOW
