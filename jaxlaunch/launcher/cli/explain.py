"""`launcher explain`: why a job is in its state, on one screen."""

from __future__ import annotations

import click

from jaxlaunch.launcher.cli import completions, options, output, whose
from jaxlaunch.launcher.diagnose.explain.explanation import Explanation

UNKNOWN = 2  # exit code: there is no job of that name


@click.command("explain")
@click.argument("name", metavar="JOB_NAME", shell_complete=completions.runs)
@options.place()
@options.whose
@options.screen_form("The form of the output.")
def explain_command(name: str, namespace: str | None, context: str | None, where: str | None, form: str | None) -> int:
    """Explain why job JOB_NAME waits, what it does, or how it ended.

    The first line names the situation; below it are the evidence and what to do. Give a run on this machine by its name
    below runs/, or by its folder.
    """
    answer = whose.find_view(name, namespace, context, where).explanation
    if form in ("json", "yaml"):
        output.data(answer.to_json(), form)
    else:
        _show(answer)
    return UNKNOWN if answer.situation == "unknown" else 0


def _show(answer: Explanation) -> None:
    output.show(answer.headline, *(f"  {line}" for line in answer.evidence))
    if answer.facts:
        output.show("", *(f"  {fact}" for fact in answer.facts))
    if answer.next_move is not None:
        output.show("", f"  next: {answer.next_move}")
    if answer.see is not None:
        output.show(f"  see: {answer.see}")
