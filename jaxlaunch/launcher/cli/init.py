"""`launcher init`: a first job.yaml, and where it is of one's own the code, which train on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from jaxlaunch.launcher.cli import output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs

HERE = Path(__file__).parent / "starters"
KINDS = ("classify", "lm", "own", "command")


@click.command("init")
@click.argument("name", required=False)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="classify",
    show_default=True,
    help="classify: images; lm: text; own: your own model, task and data; command: your own program.",
)
def init_command(name: str | None, kind: str) -> None:
    """Write a starter job.yaml.

    The job trains on CPU, without a network. NAME is the name of the job, and its file is NAME.yaml. The kinds own and
    command also write the code, NAME.py.
    """
    name = None if name is None else name.removesuffix(".yaml").removesuffix(".yml")
    file = Path("job.yaml" if name is None else f"{name}.yaml")
    title = name or {"classify": "digits", "command": "program"}.get(kind, kind)
    module = title.replace("-", "_").replace(".", "_")
    words = {"FILE": str(file), "NAME": title, "MODULE": module}
    job = _filled(f"{kind}.yaml", words)
    jobs.parse(job, str(file))  # an invalid NAME is refused before anything is written
    texts = {file: job}
    if (HERE / f"{kind}.py.txt").exists():
        texts[Path(f"{module}.py")] = _filled(f"{kind}.py.txt", words)
    if there := [path for path in texts if path.exists()]:
        raise UserError(f"{there[0]} already exists.", "choose another name.")
    for path, text in texts.items():
        _write(path, text)
    output.show(f"wrote {' and '.join(map(str, texts))}; train with: launcher run {file}")


def _filled(starter: str, words: dict[str, str]) -> str:
    """A starter with its words in capitals replaced."""
    text = (HERE / starter).read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} already exists.", "choose another name.") from None
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or 'not writable').lower()}.") from None
