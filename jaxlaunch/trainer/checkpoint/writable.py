"""Whether a checkpoint folder can be written, before hours of training depend on it."""

from __future__ import annotations

import errno
import os

import jax
from etils import epath

from jaxlaunch.trainer.buckets import faults, remote
from jaxlaunch.trainer.buckets.again import again
from jaxlaunch.trainer.checkpoint import manifest
from jaxlaunch.trainer.errors import SpecError, StorageError

OF_THE_SPEC = (*faults.REFUSED, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)


def check(path: str) -> None:
    """Has every process write a file in `path` and remove it.

    Raises SpecError for a wrong path (no permission, read-only, not a folder), StorageError when storage fails: also
    when it refuses a run that has trained, or a folder in which one has saved.
    """
    if remote.is_remote(path):
        remote.check("train.checkpoint.path", path)
    again(lambda: _probe(path))


def _probe(path: str) -> None:
    probe = epath.Path(path) / f".probe-{jax.process_index()}-{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except Exception as error:  # the clients of object stores have errors of their own
        if not isinstance(error, OSError) and not remote.is_remote(path):
            raise
        is_wrong = _is_wrong(path, error) and not faults.has_trained() and not _has_steps(path)
        what = next(iter(str(error).splitlines()), type(error).__name__)
        kind = SpecError if is_wrong else StorageError
        raise kind(f"train.checkpoint.path = {path} cannot be written: {what}") from None


def _is_wrong(path: str, error: Exception) -> bool:
    """Whether no attempt can write there, unless somebody changes the folder or the job."""
    if remote.is_remote(path):
        return faults.is_refusal(error)
    return isinstance(error, OSError) and error.errno in OF_THE_SPEC


def _has_steps(path: str) -> bool:
    """Whether a run has saved there, as far as can be seen now."""
    try:
        return bool(manifest.committed(epath.Path(path)))
    except Exception:  # as above
        return False
