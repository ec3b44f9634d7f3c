"""The folder of a run's checkpoints: which children are steps, and which of them belong to another program.

A folder that is named like a step may belong to another program: the trials of a sweep are numbered, too. Therefore the
first file of a step is a mark, written before Orbax's files, and nothing is removed without it or a manifest. Even in a
marked folder only the files of a save are removed; all others stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from typing import TypeVar

from etils import epath

from jaxlaunch.trainer.checkpoint import manifest, saved_files
from jaxlaunch.trainer.checkpoint.manifest import STEP, Damaged, NotAFile, is_remote, map_files
from jaxlaunch.trainer.checkpoint.owner import NAME as OWNER
from jaxlaunch.trainer.checkpoint.storage import retry
from jaxlaunch.trainer.errors import CheckpointError

MARK = "jaxlaunch.begun.json"
# Orbax's own mark. On object stores, which have no rename, it completes a save.
COMMITTED = "commit_success.txt"
# Orbax's suffix for the name of an unfinished folder on a file system.
MAKING = ".orbax-checkpoint-tmp"
UNFINISHED = re.compile(rf"(0|[1-9][0-9]*){re.escape(MAKING)}(-[0-9]+)?")
# Orbax's file on a step.
METADATA = "_CHECKPOINT_METADATA"
# The names that a save writes into a step's folder.
WRITTEN = (MARK, "state", "meta", METADATA, COMMITTED)
# Where the processes leave their digests for process 0 to collect.
DIGESTS = "jaxlaunch.digests"
DIGESTS_FILE = re.compile(r"[0-9a-f]+\.[0-9]+\.[0-9]+\.json(\.[0-9a-f]{16}\.tmp)?")
# A step that failed verification.
ASIDE = re.compile(r"(0|[1-9][0-9]*)\.bad-[0-9]+")
MAX_LISTED = 3

T = TypeVar("T")


class CheckpointFolder:
    """The folder at `path`. Its methods raise the exceptions of storage unless they say otherwise."""

    def __init__(self, path: str) -> None:
        folder = epath.Path(path)
        self.path = folder if is_remote(folder) else folder.expanduser().absolute()

    def __str__(self) -> str:
        return str(self.path)

    def step(self, step: int) -> epath.Path:
        """Return the folder of a step."""
        return self.path / str(step)

    def digests(self, nonce: str, step: int, process: int) -> epath.Path:
        """Return the file of a process's digests. The nonce separates it from those of an earlier attempt."""
        return self.path / DIGESTS / f"{nonce}.{step}.{process}.json"

    def read(self, act: Callable[[], T], step: int | None = None) -> T:
        """Call `act`, which reads the folder or a step, with retries while storage fails. Raises StorageError."""
        if step is None:
            return retry(f"reading {self.path}", act, OSError)
        return retry(f"reading step {step} of {self.path}", act)

    def clear(self) -> list[str]:
        """Remove unfinished saves. Return the children that are named like steps but belong to another program."""
        foreign = []
        for child in sorted(self.path.iterdir()):
            is_making = UNFINISHED.fullmatch(child.name) is not None
            if not (is_making or STEP.fullmatch(child.name)) or not child.is_dir():
                continue
            if _is_unfinished(child):
                foreign += [f"{child.name}/{name}" for name in remove_step(child)]
            elif is_making and not is_remote(child) and set(manifest.listing(child)) <= {MARK}:
                # The process was killed while it wrote the mark.
                (child / MARK).unlink(missing_ok=True)
                _prune(child)
            elif not _is_step(child) and not _is_empty(child):
                foreign.append(f"{child.name}/")
        if (digests := self.path / DIGESTS).is_dir():
            for file in digests.iterdir():
                if DIGESTS_FILE.fullmatch(file.name):
                    file.unlink()
        return foreign

    def step_owners(self) -> dict[int, bool]:
        """Return for each child that is named like a step whether it is ours or an empty folder."""
        children = {int(child.name): child for child in self.path.iterdir() if STEP.fullmatch(child.name)}
        return {step: _is_ours(child) or _is_empty(child) for step, child in children.items()}

    def foreign_steps(self) -> list[tuple[int, str]]:
        """Return the steps whose place a foreign file has, and its name. Unfinished saves without our mark count."""
        foreign = [(step, f"{step}") for step, is_ours in self.step_owners().items() if not is_ours]
        if not is_remote(self.path):
            names = [child.name for child in self.path.iterdir() if UNFINISHED.fullmatch(child.name)]
            foreign += [(int(name.removesuffix(MAKING)), name) for name in names if name.endswith(MAKING)]
        return sorted(foreign)

    def in_the_way(self, step: int) -> list[str]:
        """Return the names of files in the place of a step that is to be saved."""
        unfinished = self.path / f"{step}{MAKING}"
        if unfinished.exists() and _is_begun(unfinished):
            # It belongs to a failed save of this process.
            remove_step(unfinished)
        places = [self.step(step)] if is_remote(self.path) else [self.step(step), unfinished]
        return [path.name for path in places if path.exists()]

    def in_the_way_error(self, names: list[str]) -> CheckpointError:
        """Return the error for names in the place of steps."""
        return CheckpointError(
            f"{self.path} holds {first_few(names)}, which no run saved, in the place of checkpoints that this run is "
            "to save; move that elsewhere, or set checkpoint.path to a folder of this run's own"
        )

    def survey(self) -> tuple[list[int], list[str]]:
        """Return the steps in the folder, damaged ones included, and the names of files that are not checkpoints."""
        steps, foreign = [], []
        ours = (".", OWNER, DIGESTS, saved_files.INPUTS, saved_files.TOKENIZER)
        for child in sorted(self.path.iterdir()):
            if STEP.fullmatch(child.name):
                if not child.is_dir() or _is_step(child) or _is_empty(child):
                    steps.append(int(child.name))
            elif not (child.name.startswith(ours) or ASIDE.fullmatch(child.name) or UNFINISHED.fullmatch(child.name)):
                foreign.append(f"{child.name}/" if child.is_dir() else child.name)
        return steps, foreign

    def is_gone(self, step: int) -> bool:
        """Return whether the manifest of a committed step was deleted; False while storage is unavailable."""
        try:
            return not (self.step(step) / manifest.NAME).exists()
        except Exception:
            # The next save reports that storage is unavailable.
            return False

    def set_aside(self, step: int) -> str:
        """Rename a damaged step; return its new name."""
        folder = self.step(step)
        aside: epath.Path = next(path for n in range(1, 1000) if not (path := self.path / f"{step}.bad-{n}").exists())
        if is_remote(folder):
            # An object store has no rename, and s3fs and gcsfs differ in theirs.
            names = manifest.listing(folder, whole=True)
            map_files(lambda name: (folder / name).copy(aside / name), names)
            map_files(lambda name: (folder / name).unlink(missing_ok=True), names)
        else:
            folder.rename(aside)
        return str(aside.name)


def begin_step(folder: epath.Path) -> None:
    """Create the folder of a step and write the mark first. Raises FileExistsError when it exists."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    folder.mkdir(parents=True)
    (folder / MARK).write_bytes(json.dumps(_mark(folder)).encode() + b"\n")


def remove_step(folder: epath.Path) -> list[str]:
    """Remove a step, its manifest last so that a partial removal is noticed. Return the files that no save wrote."""
    try:
        written = manifest.read(folder)
    except Damaged:
        written = None
    names = manifest.listing(folder)
    ours = set(written.files) if written else {name for name in names if name.split("/")[0].split(MAKING)[0] in WRITTEN}
    map_files(lambda name: (folder / name).unlink(missing_ok=True), [name for name in names if name in ours - {MARK}])
    drafts = [name for name in manifest.listing(folder, whole=True) if manifest.is_draft(name)]
    for name in (*drafts, MARK, manifest.NAME):
        (folder / name).unlink(missing_ok=True)
    if not is_remote(folder):
        _prune(folder)
    return [name for name in names if name not in ours | {MARK}]


def first_few(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _mark(folder: epath.Path) -> dict[str, int]:
    return {"step": int(folder.name.split(".")[0])}


def _is_begun(folder: epath.Path) -> bool:
    """Return whether the folder has the mark for its step. A copy under another number does not count."""
    try:
        return bool(json.loads(manifest.read_small(folder / MARK)) == _mark(folder))
    except (FileNotFoundError, NotADirectoryError, NotAFile, ValueError, RecursionError):
        return False


def _is_ours(folder: epath.Path) -> bool:
    """Return whether this product finished or began this step."""
    return (folder / manifest.NAME).exists() or _is_begun(folder)


def _is_step(folder: epath.Path) -> bool:
    """Return whether this product or Orbax finished this step, so that it can perhaps be restored."""
    return _is_ours(folder) or (folder / COMMITTED).exists()


def _is_unfinished(folder: epath.Path) -> bool:
    """Return whether this is a step that this product began and Orbax did not end."""
    if UNFINISHED.fullmatch(folder.name):
        return _is_begun(folder)
    if not is_remote(folder):
        # On a file system the final name is given by a rename at the end.
        return False
    return _is_begun(folder) and not any((folder / name).exists() for name in (manifest.NAME, COMMITTED))


def _is_empty(folder: epath.Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is None


def _prune(folder: epath.Path) -> None:
    """Remove the folders below and including `folder` that hold no file."""
    for parent, _, _ in os.walk(folder, topdown=False):
        # A folder that is not empty stays.
        with contextlib.suppress(OSError):
            os.rmdir(parent)
