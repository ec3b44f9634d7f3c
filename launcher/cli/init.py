"""`launcher init`: a first job.yaml, which trains here and now."""

from __future__ import annotations

from pathlib import Path

import click

from launcher import job as jobs
from launcher.errors import UserError

STARTER = """\
# Train here: launcher run job.yaml      All keys: launcher schema --markdown
name: {name}
accelerator: {{type: cpu, per_host: 4}}    # four virtual devices
train:
  task: trainer.tasks.classify:Classify  # or your own, as module:Name
  data: {{source: tfds, name: digits}}     # 8 × 8 images of handwritten digits; needs no network
  mesh: {{dp: 4}}                          # the batch over four devices
  batch: 128
  steps: 500
  optimizer: {{lr: 1e-3}}
"""


@click.command()
@click.argument("name", default="digits")
@click.option("-f", "--file", type=click.Path(path_type=Path), default=Path("job.yaml"), help="[default: job.yaml]")
def init(name: str, file: Path) -> None:
    """Write a starter job.yaml.

    It trains a small network on handwritten digits, on CPU, as a job called NAME.
    """
    text = STARTER.format(name=name)
    jobs.parse(text, str(file))  # a NAME that is none is refused before anything is written
    try:
        with file.open("x", encoding="utf-8") as job:
            job.write(text)
    except FileExistsError:
        raise UserError(f"{file} exists.", "name another file with --file.") from None
    except OSError as error:
        raise UserError(f"{file}: {(error.strerror or 'cannot be written').lower()}.") from None
    click.echo(f"wrote {file}; train with: launcher run {file}")
