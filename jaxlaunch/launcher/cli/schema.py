"""`launcher schema`: the keys of job.yaml, for editors and for people."""

from __future__ import annotations

import click

from jaxlaunch.launcher.cli import job_reference, output


@click.command()
@click.option("--markdown", is_flag=True, help="Print the reference page instead: every key with its meaning.")
def schema(markdown: bool) -> None:
    """Print the JSON schema of job.yaml.

    Editors use it to complete and check keys: put `# yaml-language-server: $schema=FILE` at the top of a job.
    """
    if markdown:
        output.show(job_reference.markdown().removesuffix("\n"))
    else:
        output.data(job_reference.json_schema(), "json")
