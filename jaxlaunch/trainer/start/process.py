"""Functions shared by the trainer's programs: reading the spec, exit codes, printing of results and errors."""

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
    """Print the result of `find` as one JSON object on stdout and return the exit code, also of its exceptions."""
    # Notes and the output of user imports are not results.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            found = find()
        except (Exception, SystemExit) as raised:
            error = refused(raised)
            code = exit_code(error, has_stepped=False)
            print_error(error, code)
            return code
    print(json.dumps(found))
    return DONE


def read_spec(environ: Mapping[str, str]) -> tuple[TrainSpec, Task]:
    """Return the train block of TRAIN_SPEC merged over the defaults of its task, and the task. Raises SpecError."""
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
            f"train.{'.'.join(map(str, fault['loc']))}: {said(fault)}"
            + (f" (of the defaults of {name})" if fault["loc"] and fault["loc"][0] in brought else "")
            for fault in error.errors()
        ]
        raise SpecError("; ".join(errors)) from None
    compile_cache.settle(spec.compile_cache)
    assert named is not None, "a name that is not a path is one of TASKS: the spec was validated"
    return spec, make(spec.task, named)


def get_ready(environ: Mapping[str, str]) -> None:
    """Prepare a standby process: read the spec and import its task and its data source.

    A user's task is left to the attempt, because importing its module may have side effects. Faults are left to the
    attempt too, which reports them.
    """
    with contextlib.suppress(Exception):
        if json.loads(environ[contract.TRAIN_SPEC]).get("task") in TASKS:
            sources.import_modules(read_spec(environ)[0].data)


def of_all_hosts(spec: TrainSpec, environ: Mapping[str, str], note: Callable[[str], None]) -> TrainSpec:
    """Return the training for the present processes, if the job continues with fewer hosts.

    Raises SpecError if mesh or batch cannot be divided.
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
    """Return a SpecError for an extra that is not installed, else the error itself."""
    why = installation.lacking(error)
    return error if why is None else SpecError(why)


def exit_code(error: BaseException, *, has_stepped: bool) -> int:
    """Return the exit code for an error; if it is not a TrainerError, 83 or, before the first step, 70.

    Errors of a full or broken disk have the exit code of storage, wherever they occur.
    """
    if isinstance(error, TrainerError):
        return error.code
    if isinstance(error, OSError) and error.errno in faults.OF_A_DISK:
        return contract.STORAGE
    return contract.CRASH if has_stepped else contract.STARTUP


def of_exit(error: BaseException) -> str:
    """Describe a call of sys.exit, which has no message; return "" for any other error."""
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
    """End the process with `code`. Ranks that finish or stop together shut JAX down together, so that none aborts."""
    try:
        report.close()
        sys.stdout.flush()
        sys.stderr.flush()
        if code in (contract.DONE, contract.PREEMPTED):
            distributed.shutdown()
    finally:
        os._exit(code)
