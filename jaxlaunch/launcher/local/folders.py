"""The folders of a run on this machine: tried before anything else, and told in a sentence where they are of no use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.local.paths import Paths

PROBE_BYTES = 4096  # what a full disk or quota refuses: it takes an empty file


def check_names(folder: Path, base: Path, volumes: Mapping[str, Path]) -> None:
    """Raises UserError for a folder whose name is no UTF-8: records, variables and pages of the run hold its path."""
    named = {"The run folder": folder, "The job file's folder": base}
    for what, path in {**named, **{f"--volume {name}": given for name, given in volumes.items()}}.items():
        try:
            str(path).encode()
        except UnicodeEncodeError:
            where = os.fsencode(path).decode(errors="backslashreplace")
            raise UserError(f"{what}, {where}, has a name that is not UTF-8.", "rename it, or name another.") from None


def check(folder: Path, volumes: Mapping[str, Path]) -> None:
    """Makes the run folder and writes into it once. Raises UserError where that fails, or a volume's is none."""
    for name, given in volumes.items():
        with told(f"--volume {name}={given}", "name a folder that exists or can be made."):
            _look(given)
    probe = folder / f".probe-{os.getpid()}"
    with told(f"The run folder {folder}", "name another folder with --run-dir."):
        _look(folder)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with probe.open("xb") as file:
                file.write(b"\0" * PROBE_BYTES)
        finally:
            probe.unlink(missing_ok=True)


def program(job: JobSpec, paths: Paths) -> None:
    """Raises UserError where the folder of the job's code, or the one that its program starts in, is not there."""
    code = paths.base / job.code_folder if job.code_folder else None
    for key, folder, hint in (
        ("code", code, "it is relative to the job file."),
        ("workdir", paths.workdir(job), "here it is relative to the job file, or below a volume."),
    ):
        if folder is not None and not folder.is_dir() and folder not in paths.mounts.values():  # those are made
            raise UserError(f"{key}: {folder} {'is not a folder' if folder.exists() else 'does not exist'}.", hint)


@contextlib.contextmanager
def told(what: str, hint: str) -> Iterator[None]:
    """Raises UserError, of `what`, for an OSError."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"{what} cannot be used: {why[:1].lower()}{why[1:]}.", hint) from None


def _look(folder: Path) -> None:
    """Raises NotADirectoryError with what is in the way of a folder that is made by mkdir -p."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        what = "a file, not a folder" if there.exists() else "a link to nothing"
        raise NotADirectoryError(0, f"{there} is {what}" if there != folder else f"it is {what}")
