"""Shared by the trainer's programs (train, plan, export): reading the spec, exit codes, printing results and errors."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import pydantic

from jaxlaunch import contract, installation
from jaxlaunch.contract import DONE
from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.errors import SpecError, TrainerError, said
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.sources import open as sources
from jaxlaunch.trainer.spec import TASK_DEFAULTS, TASKS, TrainSpec, on_devices, over_task
from jaxlaunch.trainer.spec import said as spelled
from jaxlaunch.trainer.start import compile_cache, distributed
from jaxlaunch.trainer.task import Task, make, task_class
from jaxlaunch.trainer.user_code import load, raised_at


def print_result(find: Callable[[], Mapping[str, Any]]) -> int:
    """Prints the result of `find` as one JSON object on stdout; returns the exit code, also of what it raises."""
    with contextlib.redirect_stdout(sys.stderr):  # notes, and what the user's imports print, are not results
        try:
            found = find()
        except (Exception, SystemExit) as raised:  # what user code calls sys.exit(0) for is no result
            error = refused(raised)
            code = exit_code(error, has_stepped=False)
            print_error(error, code)
            return code
    print(json.dumps(found))
    return DONE


def read_spec(environ: Mapping[str, str]) -> tuple[TrainSpec, Task]:
    """The train block in TRAIN_SPEC over its task's defaults, and the task. Raises SpecError."""
    try:
        raw = json.loads(environ[contract.TRAIN_SPEC])
    except KeyError:
        raise SpecError(f"{contract.TRAIN_SPEC} is not set; `launcher run job.yaml` sets it") from None
    except json.JSONDecodeError as error:
        raise SpecError(f"{contract.TRAIN_SPEC} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise SpecError(f"{contract.TRAIN_SPEC} is not a train block")
    name = str(raw.get("task"))
    path = TASKS.get(name, name)
    named = task_class(name, load(path)) if ":" in path else None
    brought: set[str] = set()
    if named is not None and name not in TASK_DEFAULTS:
        brought, raw = named.defaults.keys() - raw.keys(), over_task(raw, named.defaults)
    try:
        spec = TrainSpec.model_validate(raw)
    except pydantic.ValidationError as error:
        errors = [
            f"train.{'.'.join(map(str, each['loc']))}: {said(each)}"
            + (f" (of the defaults of {name})" if each["loc"] and each["loc"][0] in brought else "")
            for each in error.errors()
        ]
        raise SpecError("; ".join(errors)) from None
    compile_cache.settle(spec.compile_cache)
    assert named is not None, "a name that is not a path is one of TASKS: the spec was validated"
    return spec, make(spec.task, named)


def get_ready(environ: Mapping[str, str]) -> None:
    """Does in a standby process what no attempt changes: reads the spec, and imports its task and its data source.

    A task of the user's own is left to the attempt: its module may do anything when it is imported. So is what is
    wrong, for the attempt to say.
    """
    with contextlib.suppress(Exception):
        if json.loads(environ[contract.TRAIN_SPEC]).get("task") in TASKS:
            sources.import_modules(read_spec(environ)[0].data)


def of_all_hosts(spec: TrainSpec, environ: Mapping[str, str], note: Callable[[str], None]) -> TrainSpec:
    """The training on the processes that there are, of a job that goes on with fewer hosts than it has at most.

    Raises SpecError where it cannot be divided so.
    """
    full = int(environ.get(contract.FULL) or jax.process_count())
    if full == jax.process_count():
        return spec
    try:
        found = on_devices(spec, jax.device_count(), jax.device_count() // jax.process_count() * full)
    except ValueError as error:
        raise SpecError(f"with {jax.process_count()} of {full} processes: {error}") from None
    mesh = spelled(found.mesh.model_dump(include=set(contract.MESH_AXES)))
    note(f"trains on {jax.process_count()} of {full} processes: mesh {mesh}, accumulate {found.accumulate}")
    return found


def refused(error: BaseException) -> BaseException:
    """The error as a person can fix it: a SpecError for an extra that is not installed, else the error itself."""
    why = installation.lacking(error)
    return error if why is None else SpecError(why)


def exit_code(error: BaseException, *, has_stepped: bool) -> int:
    """The exit code of a process that ends by `error`: 83, or 70 before its first step, for what is no TrainerError.

    A disk that is full or broken is storage's fault, wherever it shows.
    """
    if isinstance(error, TrainerError):
        return error.code
    if isinstance(error, OSError) and error.errno in faults.OF_A_DISK:
        return contract.STORAGE
    return contract.CRASH if has_stepped else contract.STARTUP


def of_exit(error: BaseException) -> str:
    """What to say of a call of sys.exit, whose own words are a number; "" of any other error."""
    if not isinstance(error, SystemExit):
        return ""
    where = raised_at(error)
    return f"sys.exit({error.code!r}){f' ({where})' if where else ''} ends no run; raise an error to end it"


def print_error(error: BaseException, code: int) -> None:
    """Report one sentence for a TrainerError, which a person can fix; print a traceback for any other."""
    if isinstance(error, TrainerError):
        contract.refuse(str(error), code)
    else:
        traceback.print_exception(error)


def leave(code: int, report: Progress) -> NoReturn:
    """Ends the process with `code`. Ranks that finish or stop together shut JAX down together, so that none aborts."""
    try:
        report.close()
        sys.stdout.flush()
        sys.stderr.flush()
        if code in (contract.DONE, contract.PREEMPTED):
            distributed.shutdown()
    finally:
        os._exit(code)
