"""Handling of storage failures: conversion to StorageError, retries, and waiting for a file."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
from etils import epath

from jaxlaunch.trainer.buckets import faults, remote
from jaxlaunch.trainer.checkpoint import manifest
from jaxlaunch.trainer.errors import SpecError, StorageError, TrainerError, first_line

# Orbax's default for the background part of a save.
TIMEOUT_S = 1200
# Messages of the system about a full or broken disk, or about missing permissions.
SYSTEM_MESSAGES = tuple(map(os.strerror, (*faults.DISK_ERRNOS, *faults.REFUSED_ERRNOS)))
# Errors for a path that is wrong in the job, not for a failing storage.
WRONG_PATH_ERRNOS = (*faults.REFUSED_ERRNOS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)

T = TypeVar("T")


@contextlib.contextmanager
def storage_errors(action: str, error_type: type[Exception] = Exception) -> Iterator[None]:
    """Turn an exception into a StorageError if storage failed during `action`.

    These are exceptions of `error_type`, of an object store, and of any type with a message of the
    system about a disk. The default type is Exception, because tensorstore raises ValueError,
    RuntimeError and bare Exception. A TrainerError is raised unchanged.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        is_from_storage = isinstance(error, error_type) or faults.is_from_store(error)
        if not is_from_storage and not system_message(error):
            raise
        raise storage_error(action, error) from error


def storage_error(action: str, error: Exception) -> StorageError:
    """Return the StorageError for an exception that was raised during `action`.

    A message of the system replaces the exception's own message, to which libraries add names of
    files and places in their code.
    """
    message = system_message(error)
    if not message:
        return StorageError(f"{action} failed: {first_line(error)}")
    hint = ""
    if faults.is_disk_full(OSError(message)):
        hint = "; free space there, or lower train.checkpoint.keep"
    return StorageError(f"{message}: {action} failed{hint}")


def system_message(error: BaseException | None) -> str:
    """Return the message in SYSTEM_MESSAGES that an error or one of its causes has, else ""."""
    visited: list[BaseException] = []
    while error is not None and error not in visited:
        if message := next((text for text in SYSTEM_MESSAGES if text in str(error)), ""):
            return message
        visited.append(error)
        error = error.__cause__ or error.__context__
    return ""


def retry_storage(
    action: str, operation: Callable[[], T], error_type: type[Exception] = Exception
) -> T:
    """Call `operation`, and retry it while storage fails. Raises StorageError at the end."""

    def attempt() -> T:
        with storage_errors(action, error_type):
            return operation()

    return faults.retry_storage(attempt)


def wait_for(read: Callable[[], T | None], subject: str) -> T:
    """Poll `read` until it returns a value. Raises StorageError after TIMEOUT_S."""
    deadline, pause_s = time.monotonic() + TIMEOUT_S, 0.01
    while (value := read()) is None:
        if time.monotonic() > deadline:
            raise StorageError(f"waited {TIMEOUT_S} s for {subject}")
        time.sleep(pause_s)
        pause_s = min(1.0, 1.5 * pause_s)
    return value


def check_writable(path: str) -> None:
    """Write and remove a file in `path` on every process, to check the folder before training.

    Raises SpecError for a wrong path (no permission, read-only, not a folder). Raises StorageError
    if storage fails. A refusal is also a StorageError if this run has trained or the folder has
    saved steps, because the path was right then.
    """
    is_remote = remote.is_remote(path)
    if is_remote:
        remote.check_url("train.checkpoint.path", path)

    def probe_folder() -> None:
        file = epath.Path(path) / f".probe-{jax.process_index()}-{os.getpid()}"
        try:
            remote.create_folder(file.parent)
            with remote.name_missing_bucket(path) if is_remote else contextlib.nullcontext():
                file.write_text("")
            file.unlink()
        except Exception as error:
            # The clients of object stores raise exceptions of their own types.
            if is_remote:
                is_refused = faults.is_refusal(error)
            elif isinstance(error, OSError):
                is_refused = error.errno in WRONG_PATH_ERRNOS
            else:
                raise
            is_wrong = is_refused and not faults.has_trained() and not _has_steps(path)
            message = next(iter(str(error).splitlines()), type(error).__name__)
            error_type = SpecError if is_wrong else StorageError
            raise error_type(
                f"train.checkpoint.path = {path} cannot be written: {message}"
            ) from None

    faults.retry_storage(probe_folder)


def _has_steps(path: str) -> bool:
    try:
        return bool(manifest.committed_steps(epath.Path(path)))
    except Exception:
        # The clients of object stores raise exceptions of their own types.
        return False
