"""Run programs of the trainer in their own processes, because the launcher never imports jax."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from jaxlaunch import contract, installation, isolated
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.paths import map_paths
from jaxlaunch.runs.layout import CHECKPOINTS, JOB
from jaxlaunch.trainer.spec import GPT2, Decoder, TrainSpec


def is_installed() -> bool:
    """Return whether the trainer is installed; the base install does not have it."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "flax", "optax"))


def install_hint() -> str:
    """Return the command that adds the trainer to this installation."""
    return f"{installation.install_hint('train')}."


def require_trainer(feature: str) -> None:
    """Raise UserError if the trainer, which `feature` needs, is not installed."""
    if not is_installed():
        raise UserError(
            f"{feature} needs the trainer, which is not installed here.", install_hint()
        )


# --- programs -------------------------------------------------------------------------------------


def cpu_environ(job: JobSpec, train: TrainSpec, base: Path) -> dict[str, str]:
    """Return the environment of a trainer's program that uses only the CPU."""
    environ = {**os.environ, **job.env, "JAX_PLATFORMS": "cpu"}
    environ[contract.TRAIN_SPEC] = train.model_dump_json(exclude_unset=True)
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    if "PYTHONPATH" in job.env:
        # Relative entries start at the working folder of the job, which this program does not have.
        paths = map_paths(job, base, base, {})
        workdir = paths.find_workdir(job) or Path()
        job_path = paths.map_env({"PYTHONPATH": job.env["PYTHONPATH"]})["PYTHONPATH"]
        entries = [str(workdir / entry) for entry in job_path.split(os.pathsep) if entry]
    if job.code_folder:
        entries.insert(0, str(base / job.code_folder))
    if python_path := os.pathsep.join(filter(None, entries)):
        environ["PYTHONPATH"] = python_path
    return environ


def run_program(
    module: str,
    *arguments: str,
    environ: Mapping[str, str],
    hint: str | None = None,
    show: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run a program of the trainer, and return the JSON object that it prints.

    `show` is called with each line of its log. Raises UserError with the program's own message, and
    `hint`.
    """
    log = list[str]()
    with tempfile.TemporaryFile("w+") as result, tempfile.TemporaryFile("w+") as refusals:
        with _start_program(
            module,
            arguments,
            environ,
            refusals,
            stdin=subprocess.DEVNULL,
            stdout=result,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                log.append(line)
                if show is not None:
                    show(line.rstrip())
        result.seek(0)
        text = result.read()
        _check_end(
            module, process.returncode, "".join(log), refusals, hint, has_result=bool(text.strip())
        )
    record: dict[str, Any] = json.loads(text)
    return record


def stream_program(
    module: str,
    *arguments: str,
    environ: Mapping[str, str],
    answer: Callable[[], str | None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run a program of the trainer, and yield the JSON objects that it prints. Raises UserError.

    If `answer` is given, its return value is sent after each object with the key `ask`, once the
    caller has seen the object. None ends the program's input.
    """
    has_result, stdin = False, subprocess.DEVNULL if answer is None else subprocess.PIPE
    streams = {"stdin": stdin, "stdout": subprocess.PIPE}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        tempfile.TemporaryFile("w+") as refusals,
    ):
        with _start_program(module, arguments, environ, refusals, **streams, stderr=log) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    has_result = True
                    yield (event := json.loads(line))
                    if answer is not None and "ask" in event:
                        _send_answer(process, answer())
            except BaseException:
                # The caller has stopped reading.
                process.kill()
                raise
        log.seek(0)
        _check_end(module, process.returncode, log.read(), refusals, None, has_result=has_result)


def _start_program(
    module: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    refusals: IO[str],
    **streams: Any,
) -> subprocess.Popen[str]:
    """Start a program of the trainer that writes the record of its refusal to `refusals`."""
    environ = isolated.make_environ(environ) | {contract.REFUSAL_FD: str(refusals.fileno())}
    command = isolated.build_command(module, *arguments)
    return subprocess.Popen(
        command, env=environ, pass_fds=[refusals.fileno()], text=True, **streams
    )


def _send_answer(process: subprocess.Popen[str], text: str | None) -> None:
    """Write a text to a program as a line of JSON, or close its input if there is none."""
    assert process.stdin is not None
    # The pipe is broken if the program has ended, and its output gives the reason.
    with contextlib.suppress(BrokenPipeError):
        if text is None:
            process.stdin.close()
        else:
            print(json.dumps(text), file=process.stdin, flush=True)


def _check_end(
    module: str, code: int, log: str, refusals: IO[str], hint: str | None, *, has_result: bool
) -> None:
    """Raise UserError, with the refusal or the log, if the program failed."""
    if contract.outcome_for_code(code).is_user_fixable:
        refusals.seek(0)
        messages = [json.loads(line)["refusal"]["message"] for line in refusals]
        raise UserError((messages or log.strip().splitlines() or [""])[-1], hint)
    if code:
        raise UserError(f"{log.strip()}\n`python -m {module}` failed (exit {code}).")
    # Code of the job may have called os._exit(0).
    if not has_result:
        raise UserError(
            f"{log.strip()}\n`python -m {module}` ended without a result (exit 0).".lstrip()
        )


# --- training of a run ----------------------------------------------------------------------------


class Training(NamedTuple):
    """A run whose job has a train block: the job, the block, and the run folder."""

    job: JobSpec
    train: TrainSpec
    folder: Path

    def device_environ(self) -> dict[str, str]:
        """Return the environment of a program that uses the job's kind of devices."""
        environ = cpu_environ(self.job, self.train, self.folder)
        # A model that was trained on accelerators may need them.
        if self.job.accelerator.platform != "cpu":
            environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "")
        return environ


def open_training(run: str, overrides: Sequence[str] = ()) -> Training:
    """Return the training of a run, with `overrides`. Raises UserError if it has no train block."""
    folder = run_folders.resolve_folder(run)
    if not (folder / JOB).exists():
        raise UserError(
            f"{folder} is not the folder of a run: it has no job.yaml, which says the task "
            "and the data.",
            "give the name of a run, or its folder.",
        )
    job = jobs.read_run_job(folder, overrides)
    if job.train is None:
        raise UserError(
            f"Run {run} runs its own command: the launcher knows neither its model nor its data.",
            "jaxlaunch.run, called again with the same steps, returns the state that it reached.",
        )
    return Training(job, job.train, folder)


def find_weights(run: str) -> tuple[str, int | None]:
    """Return the place of the weights of `run`, and the step if `run` is the folder of a step.

    The place is a Hugging Face folder, or the folder or URL of checkpoints. Raises UserError if
    there is no such folder, or the run's job.yaml does not determine it.
    """
    if "://" in run or (Path(run) / "config.json").is_file():
        return run, None
    return find_checkpoint_step(run)


def find_checkpoint_step(run: str) -> tuple[str, int | None]:
    """Return the folder or URL of a run's checkpoints, and the step if `run` is its folder.

    Raises UserError as `find_checkpoints` does.
    """
    path = Path(run)
    if path.name.isdecimal() and path.is_dir() and run_folders.find_run(run) is None:
        return find_checkpoints(str(path.absolute().parent)), int(path.name)
    return find_checkpoints(run), None


def find_checkpoints(run: str) -> str:
    """Return the folder or URL of a run's checkpoints. Other folders and URLs are returned as is.

    Raises UserError if the run's job.yaml does not determine it.
    """
    if "://" in run:
        return run
    folder = run_folders.resolve_folder(run)
    if not (folder / JOB).exists():
        return str(folder)
    job = jobs.read_run_job(folder)
    if job.train is not None:
        path = job.train.checkpoint.path
        if path is None:
            return str(folder / CHECKPOINTS)
        if "://" in path or PurePosixPath(path).is_absolute():
            return map_paths(job, folder, folder, {}).resolve_path(path)
        message = (
            f"The job.yaml of run {run} keeps its checkpoints in {path}, relative to a folder that "
            "is unknown."
        )
    else:
        message = f"Run {run} runs its own command, so the folder of its checkpoints is unknown."
    raise UserError(message, "give the folder of the checkpoints in place of the run.")


def require_best_step(run: str) -> None:
    """Raise UserError if the job of a run records no best step, before the trainer is loaded."""
    if not has_job(run):
        return
    train = jobs.read_run_job(run_folders.resolve_folder(run)).train
    if train is not None and train.checkpoint.best is None:
        raise UserError(
            f"Run {run} records no best step: its job has no train.checkpoint.best.",
            "name a step, as --step 1000, or leave --step out for the newest.",
        )


def has_job(run: str) -> bool:
    """Return whether `run` is the name or folder of a run with a job.yaml."""
    folder = run_folders.find_run(run)
    return folder is not None and (folder / JOB).exists()


def generates_no_text(run: str) -> bool:
    """Return whether `run` is the name or folder of a run that trained no language model."""
    if not has_job(run):
        return False
    train = jobs.read_run_job(run_folders.resolve_folder(run)).train
    return train is not None and not isinstance(train.model, Decoder | GPT2)
