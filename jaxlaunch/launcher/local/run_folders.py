"""The run folders of this machine, by their names. What runs are on a cluster must not wait for more to be imported."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.runs.layout import LOCK, SWEEP

HOME = Path("runs")


def find(run: str) -> Path | None:
    """The folder of a run, given by its name or by its folder; None if there is none."""
    of_sweep = HOME / run.rpartition("-")[0] / run
    return next((found.absolute() for found in (Path(run), HOME / run, of_sweep) if is_run(found)), None)


def find_sweep(name: str) -> Path | None:
    """The folder of a sweep, given by its name or by its folder; None if there is none."""
    return next((found.absolute() for found in (Path(name), HOME / name) if is_sweep(found)), None)


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's."""
    try:
        return (folder / SWEEP).is_file()
    except OSError:
        return False


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's. One that this user may not look into may be: who reads it says that."""
    try:
        return stat.S_ISREG(os.stat(f"{folder}/{LOCK}").st_mode)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False


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
