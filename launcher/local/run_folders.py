"""The run folders of this machine, and their checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.local import lock, paths
from jaxlaunch.trainer.spec import GPT2, Decoder, TrainSpec

HOME = Path("runs")
SWEEP = "sweep.jsonl"  # in the folder of a sweep, whose runs are folders in it


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


def weights(run: str) -> tuple[str, int | None]:
    """Where the weights of `run` are: a Hugging Face folder, or the folder or URL of its checkpoints; and the step
    whose folder `run` is.

    Raises UserError when there is no such folder, or the run's job.yaml does not determine it.
    """
    path = Path(run)
    if "://" in run or (path / "config.json").is_file():
        return run, None
    if path.name.isdecimal() and path.is_dir() and find(run) is None:
        return checkpoints(str(path.absolute().parent)), int(path.name)
    return checkpoints(run), None


def checkpoints(run: str) -> str:
    """The folder or URL of a run's checkpoints; a URL, and a folder that is not a run's, are returned as they are.

    Raises UserError when the run's job.yaml does not determine it.
    """
    if "://" in run:
        return run
    home = folder(run)
    if not (home / "job.yaml").exists():
        return str(home)
    job = jobs.kept(home)
    hint = "give the folder of the checkpoints in place of the run."
    if job.train is None:
        raise UserError(f"Run {run} runs its own command, so the folder of its checkpoints is unknown.", hint)
    path = job.train.checkpoint.path
    if path is None:
        return str(home / "checkpoints")
    if "://" not in path and not PurePosixPath(path).is_absolute():
        raise UserError(
            f"The job.yaml of run {run} keeps its checkpoints in {path}, relative to a folder that is unknown.", hint
        )
    return paths.of(job, home, home, {}).resolve(path)


def training(run: str, overrides: Sequence[str] = ()) -> tuple[JobSpec, TrainSpec, Path]:
    """The job of a run with `overrides`, its train block, and its folder. Raises UserError where it trains nothing."""
    home = folder(run)
    if not (home / "job.yaml").exists():
        raise UserError(
            f"{home} is not the folder of a run: it has no job.yaml, which says the task and the data.",
            "give the name of a run, or its folder.",
        )
    job = jobs.kept(home, overrides)
    if job.train is None:
        raise UserError(
            f"Run {run} runs its own command: the launcher knows neither its model nor its data.",
            "jaxlaunch.run, called again with the same steps, returns the state that it reached.",
        )
    return job, job.train, home


def generates_no_text(run: str) -> bool:
    """Whether `run` is a run, or its folder, whose training is not of a language model."""
    home = find(run)
    if home is None or not (home / "job.yaml").exists():
        return False
    train = jobs.kept(home).train
    return train is not None and not isinstance(train.model, Decoder | GPT2)
