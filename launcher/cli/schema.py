"""`launcher schema`: the keys of job.yaml, for editors and for readers."""

from __future__ import annotations

import json

import click

from launcher import reference


@click.command()
@click.option("--markdown", is_flag=True, help="Print the reference page instead: every key with its meaning.")
def schema(markdown: bool) -> None:
    """Print the JSON schema of job.yaml.

    Editors complete and check by it: put `# yaml-language-server: $schema=FILE` at the top of a job.
    """
    click.echo(reference.markdown() if markdown else json.dumps(reference.json_schema(), indent=2), nl=not markdown)
