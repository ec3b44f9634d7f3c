"""Functions of all programs of the trainer: they read the spec, print results, and exit."""

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
from jaxlaunch.trainer.errors import SpecError, TrainerError, pydantic_message
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.sources import open as sources
from jaxlaunch.trainer.spec import (
    TASK_DEFAULTS,
    TASKS,
    TrainSpec,
    format_axes,
    merge_task_defaults,
    shrink_to_devices,
)
from jaxlaunch.trainer.start import compile_cache, distributed
from jaxlaunch.trainer.task import Task, make_task, task_class
from jaxlaunch.trainer.user_code import error_place, load_object


def print_result(compute: Callable[[], Mapping[str, Any]]) -> int:
    """Print the result of `compute` as one JSON object, or its error. Return the exit code."""
    # Standard output is only for the result, and user code may print.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            result = compute()
        except (Exception, SystemExit) as exception:
            error = to_user_error(exception)
            code = exit_code(error, has_stepped=False)
            print_error(error, code)
            return code
    print(json.dumps(result))
    return DONE


def read_spec(environ: Mapping[str, str]) -> tuple[TrainSpec, Task]:
    """Return the train block in TRAIN_SPEC, with the defaults of its task, and the task."""
    hint = "`launcher run job.yaml` sets it"
    try:
        raw = json.loads(environ[contract.TRAIN_SPEC])
    except KeyError:
        raise SpecError(f"{contract.TRAIN_SPEC} is not set; {hint}") from None
    except json.JSONDecodeError as error:
        raise SpecError(f"{contract.TRAIN_SPEC} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise SpecError(f"{contract.TRAIN_SPEC} is not a train block")
    name = str(raw.get("task"))
    path = TASKS.get(name, name)
    task_type = task_class(name, load_object(path)) if ":" in path else None
    default_keys: set[str] = set()
    if task_type is not None and name not in TASK_DEFAULTS:
        default_keys = task_type.defaults.keys() - raw.keys()
        raw = merge_task_defaults(raw, task_type.defaults)
    try:
        spec = TrainSpec.model_validate(raw)
    except pydantic.ValidationError as error:
        errors = []
        for fault in error.errors():
            path = ".".join(map(str, fault["loc"]))
            is_default = fault["loc"] and fault["loc"][0] in default_keys
            origin = f" (of the defaults of {name})" if is_default else ""
            errors.append(f"train.{path}: {pydantic_message(fault)}{origin}")
        raise SpecError("; ".join(errors)) from None
    compile_cache.configure_cache(spec.compile_cache)
    assert task_type is not None, "a name that is not a path is one of TASKS"
    return spec, make_task(spec.task, task_type)


def get_ready(environ: Mapping[str, str]) -> None:
    """Prepare a standby process: read the spec, and import its task and its data source.

    A user's task is not imported, because its module may have side effects. Errors are ignored; the
    attempt for which the process stands by will report them.
    """
    with contextlib.suppress(Exception):
        if json.loads(environ[contract.TRAIN_SPEC]).get("task") in TASKS:
            sources.import_opener(read_spec(environ)[0].data)


def fit_to_processes(
    spec: TrainSpec, environ: Mapping[str, str], note: Callable[[str], None]
) -> TrainSpec:
    """Return the spec, with a smaller mesh if the job continues with fewer hosts than it requested.

    Raises SpecError if the mesh or the batch cannot be divided.
    """
    processes, devices = jax.process_count(), jax.device_count()
    full_processes = int(environ.get(contract.FULL_PROCESSES) or processes)
    if full_processes == processes:
        return spec
    try:
        fitted = shrink_to_devices(spec, devices, devices // processes * full_processes)
    except ValueError as error:
        raise SpecError(f"with {processes} of {full_processes} processes: {error}") from None
    mesh = format_axes(fitted.mesh.model_dump(include=set(contract.MESH_AXES)))
    note(
        f"trains on {processes} of {full_processes} processes: mesh {mesh}, accumulate "
        f"{fitted.accumulate}"
    )
    return fitted


def to_user_error(error: BaseException) -> BaseException:
    """Return a SpecError for an extra that is not installed, else the error itself."""
    reason = installation.missing_extra_message(error)
    return error if reason is None else SpecError(reason)


def exit_code(error: BaseException, *, has_stepped: bool) -> int:
    """Return the exit code for an error.

    A TrainerError has its own code, and an error of a full or broken disk that of storage. Any
    other exception is a bug: 83, or 70 before the first step.
    """
    if (code := contract.exception_code(error)) is not None:
        return code
    if isinstance(error, OSError) and error.errno in faults.DISK_ERRNOS:
        return contract.STORAGE
    return contract.CRASH if has_stepped else contract.STARTUP


def describe_exit(error: BaseException) -> str:
    """Describe a call of sys.exit, which has no message; return "" for any other error."""
    if not isinstance(error, SystemExit):
        return ""
    location = error_place(error)
    suffix = f" ({location})" if location else ""
    return f"sys.exit({error.code!r}){suffix} ends no run; raise an error to end it"


def requested_exit_code(error: BaseException) -> int | None:
    """Return the code of a sys.exit if the job lists it in `restarts.codes`, else None."""
    if not isinstance(error, SystemExit) or not isinstance(error.code, int):
        return None
    job = json.loads(os.environ.get(contract.JOB, "{}"))
    return error.code if str(error.code) in job.get("requeue_codes", {}) else None


def print_error(error: BaseException, code: int) -> None:
    """Print the message of a TrainerError, and the traceback of any other exception."""
    if isinstance(error, TrainerError):
        contract.refuse(str(error), code)
    else:
        traceback.print_exception(error)


def exit_process(code: int, progress: Progress) -> NoReturn:
    """End the process with `code`. Ranks that all end, complete or stopped, leave together."""
    try:
        progress.close()
        sys.stdout.flush()
        sys.stderr.flush()
        if code == DONE or contract.outcome_for_code(code).is_stop:
            distributed.shutdown()
    finally:
        os._exit(code)
