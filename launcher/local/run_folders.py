"""The run folders of this machine, by their names. What runs are on a cluster must not wait for more to be imported."""

from __future__ import annotations

from pathlib import Path

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import lock

HOME = Path("runs")


def find(run: str) -> Path | None:
    """The folder of a run, given by its name or by its folder; None if there is none."""
    return next((found.absolute() for found in (Path(run), HOME / run) if is_run(found)), None)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's. One that this user may not look into may be: who reads it says that."""
    try:
        return (folder / lock.FILE).is_file()
    except PermissionError:
        return True


def looked_for(run: str) -> str:
    """Where find() has looked, as a clause."""
    return f"neither {run} nor {HOME / run} is a run folder"


def folder(run: str) -> Path:
    """The same, or any other folder of this path. Raises UserError when there is none."""
    if (own := find(run)) is not None:
        return own
    for found in (Path(run), HOME / run):
        if found.is_dir():
            return found.absolute()
    raise UserError(
        f"There is no run {run}: neither {run} nor {HOME / run} is a folder.", "give the name of a run or its folder."
    )
