"""The trainer as a process: environment to spec, gang, run, exit code.

An exception becomes a code of the contract here and nowhere else. The process leaves by os._exit: JAX's own atexit
barrier would hold the true code back for minutes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import NoReturn

import jax
import pydantic

from trainer import contract, distributed
from trainer.errors import SpecError, TrainerError
from trainer.progress import Progress
from trainer.spec import TASK_DEFAULTS, TrainSpec, with_defaults
from trainer.task import Task, load
from trainer.train import Place, Run


def main() -> NoReturn:
    """Trains as TRAIN_SPEC says and leaves with a code of the contract."""
    stop = distributed.Stop()
    fd = os.environ.get(contract.PROGRESS_FD)
    report = Progress(int(fd) if fd else None)
    report.hello()
    run: Run | None = None
    try:
        report.phase("init", 0)
        distributed.initialize()
        stop.arm()
        spec, task = read(os.environ)
        run = Run(spec, task, Place.from_environ(), stop, report)
        run.run()
        code = contract.DONE
    except BaseException as error:  # every way to end has a code
        code = code_of(error, has_stepped=run is not None and run.is_stepping)
        if run is not None and run.is_stepping and code != contract.PREEMPTED:
            run.let_go()
        say(error, code)
        report.error(error, code)
    leave(code, report)


def leave(code: int, report: Progress) -> NoReturn:
    """Ends the process with `code`. Ranks that ended together leave together, so that none aborts for a peer."""
    try:
        report.close()
        sys.stdout.flush()
        sys.stderr.flush()
        if code in (contract.DONE, contract.PREEMPTED):
            distributed.shutdown()
    finally:
        os._exit(code)


def read(environ: Mapping[str, str]) -> tuple[TrainSpec, Task]:
    """The spec and its task; the task's own defaults lie below what the job says. Raises SpecError."""
    try:
        raw = json.loads(environ[contract.TRAIN_SPEC])
    except KeyError:
        raise SpecError(f"{contract.TRAIN_SPEC} is not set; `launcher run job.yaml` sets it") from None
    except json.JSONDecodeError as error:
        raise SpecError(f"{contract.TRAIN_SPEC} is not JSON: {error}") from None
    name = str(raw.get("task"))
    task_class = load(name) if ":" in name else None
    if name not in TASK_DEFAULTS:
        raw = with_defaults(raw, getattr(task_class, "defaults", {}))
    try:
        spec = TrainSpec.model_validate(raw)
    except pydantic.ValidationError as error:
        faults = [
            f"train.{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors()
        ]
        raise SpecError("; ".join(faults)) from None
    if spec.compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", spec.compile_cache)
    assert task_class is not None, "the spec holds a task by module:Name"
    return spec, task_class()


def code_of(error: BaseException, *, has_stepped: bool) -> int:
    """The exit code an exception ends the process with."""
    if isinstance(error, TrainerError):
        return error.code
    return contract.CRASH if has_stepped else contract.STARTUP


def say(error: BaseException, code: int) -> None:
    """One sentence for what a person can mend; the traceback for what is a bug, ours or the user's."""
    if isinstance(error, TrainerError):
        print(f"trainer: {error} (exit {code})", file=sys.stderr)
    else:
        traceback.print_exception(error)


if __name__ == "__main__":
    main()
