"""`launcher report`: the page of a run."""

from __future__ import annotations

from pathlib import Path

import click

from jaxlaunch.launcher.cli import completions, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import run_folders


@click.command("report")
@click.argument("run", shell_complete=completions.runs)
@click.option("-o", "--output", "to", type=click.Path(path_type=Path), help="The file to write. [default: RUN.html]")
@click.option(
    "--pictures", type=click.Path(path_type=Path), metavar="DIR", help="Also write each picture as SVG and PNG."
)
def report_command(run: str, to: Path | None, pictures: Path | None) -> None:
    """Write the page of RUN: one HTML file.

    RUN is the name of a run on this machine, or its folder. The page shows the state of the run and where every
    second went, above the loss on the same axis, and curves, attempts, checkpoints and logs. It needs no network.
    """
    from jaxlaunch.launcher.report import page
    from jaxlaunch.launcher.report.run import Followed

    folder = run_folders.folder(run)
    data = Followed(folder).read().to_json()
    write(to or Path(f"{folder.name}.html"), page.of("run", data["name"], data))
    if pictures is not None:
        from jaxlaunch.launcher.report.pictures import write_pictures

        output.show(*map(str, write_pictures(data, pictures)))


def write(to: Path, text: str) -> None:
    """Writes a page, and says where it is. Raises UserError where that cannot be."""
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{to} cannot be written: {(error.strerror or str(error)).lower()}.", "name another file with -o."
        ) from None
    output.show(str(to))
