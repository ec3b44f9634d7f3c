"""What a run of this machine trains, and where its weights are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.local import paths, run_folders
from jaxlaunch.runs.layout import CHECKPOINTS, JOB
from jaxlaunch.trainer.spec import GPT2, Decoder, TrainSpec


def weights(run: str) -> tuple[str, int | None]:
    """Where the weights of `run` are: a Hugging Face folder, or the folder or URL of its checkpoints; and the step
    whose folder `run` is.

    Raises UserError when there is no such folder, or the run's job.yaml does not determine it.
    """
    path = Path(run)
    if "://" in run or (path / "config.json").is_file():
        return run, None
    if path.name.isdecimal() and path.is_dir() and run_folders.find(run) is None:
        return checkpoints(str(path.absolute().parent)), int(path.name)
    return checkpoints(run), None


def checkpoints(run: str) -> str:
    """The folder or URL of a run's checkpoints; a URL, and a folder that is not a run's, are returned as they are.

    Raises UserError when the run's job.yaml does not determine it.
    """
    if "://" in run:
        return run
    home = run_folders.folder(run)
    if not (home / JOB).exists():
        return str(home)
    job = jobs.kept(home)
    hint = "give the folder of the checkpoints in place of the run."
    if job.train is None:
        raise UserError(f"Run {run} runs its own command, so the folder of its checkpoints is unknown.", hint)
    path = job.train.checkpoint.path
    if path is None:
        return str(home / CHECKPOINTS)
    if "://" not in path and not PurePosixPath(path).is_absolute():
        raise UserError(
            f"The job.yaml of run {run} keeps its checkpoints in {path}, relative to a folder that is unknown.", hint
        )
    return paths.of(job, home, home, {}).resolve(path)


def training(run: str, overrides: Sequence[str] = ()) -> tuple[JobSpec, TrainSpec, Path]:
    """The job of a run with `overrides`, its train block, and its folder. Raises UserError where it trains nothing."""
    home = run_folders.folder(run)
    if not (home / JOB).exists():
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


def has_job(run: str) -> bool:
    """Whether `run` is a run, or its folder, with the job.yaml that it was started from."""
    home = run_folders.find(run)
    return home is not None and (home / JOB).exists()


def generates_no_text(run: str) -> bool:
    """Whether `run` is a run, or its folder, whose training is not of a language model."""
    if not has_job(run):
        return False
    home = run_folders.folder(run)
    train = jobs.kept(home).train
    return train is not None and not isinstance(train.model, Decoder | GPT2)
