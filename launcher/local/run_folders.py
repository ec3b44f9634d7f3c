"""Where the runs of this machine lie, and what they keep."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from launcher import job as jobs
from launcher import paths
from launcher.errors import UserError

HOME = Path("runs")


def find(run: str) -> Path | None:
    """The folder of a run that is given by its name or by its folder; None where there is none."""
    return next((found.absolute() for found in (Path(run), HOME / run) if (found / ".lock").is_file()), None)


def folder(run: str) -> Path:
    """The same, or any folder that is called so. Raises UserError when there is none."""
    if (own := find(run)) is not None:
        return own
    for found in (Path(run), HOME / run):
        if found.is_dir():
            return found.absolute()
    raise UserError(f"There is no run {run}: neither {run} nor {HOME / run} is a folder.", "name a run or its folder.")


def checkpoints(run: str) -> str:
    """The folder or URL where a run keeps its checkpoints; a folder that is no run's, and a URL, are that already.

    Raises UserError where the run's folder does not say.
    """
    if "://" in run:
        return run
    home = folder(run)
    if not (home / "job.yaml").exists():
        return str(home)
    job = jobs.load(home / "job.yaml")
    if job.train is None:
        raise UserError(f"Run {run} is of a command, whose checkpoints are its own.")
    path = job.train.checkpoint.path
    if path is None:
        return str(home / "checkpoints")
    if "://" not in path and not PurePosixPath(path).is_absolute():
        hint = "name the folder of checkpoints in place of the run."
        raise UserError(f"Run {run} keeps its checkpoints in {path}, relative to the file of its job.", hint)
    return paths.of(job, home, home, {}).here(path)
