"""`launcher init`: a first job.yaml, which trains on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.cli import output
from launcher.errors import UserError
from launcher.job import load as jobs

STARTER = """\
# launcher run {file} trains this here; launcher schema --markdown lists every key
name: {name}
accelerator: {{type: cpu, per_host: 4}}    # four virtual devices
train:
  task: trainer.tasks.classify:Classify  # or your own, as module:Name
  data: {{source: tfds, name: digits}}     # 8 × 8 images of handwritten digits; needs no network
  mesh: {{dp: 4}}                          # splits the batch over the devices
  batch: 128
  epochs: 40
  optimizer: {{name: adamw, lr: 3e-3}}
"""


@click.command()
@click.argument("name", required=False)
def init(name: str | None) -> None:
    """Write a starter job.yaml.

    It trains a small network on handwritten digits, on CPU. With NAME the job is called that, and its file NAME.yaml.
    """
    file = Path("job.yaml" if name is None else f"{name}.yaml")
    text = STARTER.format(name=name or "digits", file=file)
    jobs.parse(text, str(file))  # an invalid NAME is refused before anything is written
    try:
        with file.open("x", encoding="utf-8") as job:
            job.write(text)
    except FileExistsError:
        raise UserError(f"{file} already exists.", "choose another name.") from None
    except OSError as error:
        raise UserError(f"{file}: {(error.strerror or 'not writable').lower()}.") from None
    output.show(f"wrote {file}; train with: launcher run {file}")
