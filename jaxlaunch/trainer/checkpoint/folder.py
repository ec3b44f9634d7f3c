"""The folder of a run's checkpoints: which children are steps, and which of them another program made.

What is named like a step may be another program's: the trials of a sweep are numbered too. So the first file of a step
is a mark, written before Orbax's own, and nothing is ever removed without it or a manifest. Of a folder that has one,
only what a save wrote is removed; what others put there stays.
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
COMMITTED = "commit_success.txt"  # Orbax's own mark; on object stores, which have no rename, its presence ends a save
MAKING = ".orbax-checkpoint-tmp"  # how Orbax ends the name of a folder in the making, on a file system
UNFINISHED = re.compile(rf"(0|[1-9][0-9]*){re.escape(MAKING)}(-[0-9]+)?")
METADATA = "_CHECKPOINT_METADATA"  # Orbax's file on a step
WRITTEN = (MARK, "state", "meta", METADATA, COMMITTED)  # what a save writes into a step's folder
# Where the processes leave their digests for process 0 to collect.
DIGESTS = "jaxlaunch.digests"
DIGESTS_FILE = re.compile(r"[0-9a-f]+\.[0-9]+\.[0-9]+\.json(\.[0-9a-f]{16}\.tmp)?")
# A step that failed verification.
ASIDE = re.compile(r"(0|[1-9][0-9]*)\.bad-[0-9]+")
MAX_LISTED = 3

T = TypeVar("T")


class CheckpointFolder:
    """The folder at `path`. Its methods read storage, and raise what storage raises unless they say otherwise."""

    def __init__(self, path: str) -> None:
        folder = epath.Path(path)
        self.path = folder if is_remote(folder) else folder.expanduser().absolute()

    def __str__(self) -> str:
        return str(self.path)

    def step(self, step: int) -> epath.Path:
        """Return the folder of a step."""
        return self.path / str(step)

    def digests(self, nonce: str, step: int, process: int) -> epath.Path:
        """Return the file of a process's digests; the nonce keeps those of an earlier attempt apart."""
        return self.path / DIGESTS / f"{nonce}.{step}.{process}.json"

    def read(self, act: Callable[[], T], step: int | None = None) -> T:
        """Return what `act` reads of the folder, or of a step, tried again while storage fails. Raises StorageError."""
        if step is None:
            return retry(f"reading {self.path}", act, OSError)
        return retry(f"reading step {step} of {self.path}", act)

    def clear(self) -> list[str]:
        """Remove what a killed save left. Return the children that are named like steps and that another made."""
        foreign = []
        for child in sorted(self.path.iterdir()):
            is_making = UNFINISHED.fullmatch(child.name) is not None
            if not (is_making or STEP.fullmatch(child.name)) or not child.is_dir():
                continue
            if _is_unfinished(child):
                foreign += [f"{child.name}/{name}" for name in remove_step(child)]
            elif is_making and not is_remote(child) and set(manifest.listing(child)) <= {MARK}:
                # It was killed while the mark was written.
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
        """Return for each child that is named like a step whether it is this product's, or an empty folder."""
        children = {int(child.name): child for child in self.path.iterdir() if STEP.fullmatch(child.name)}
        return {step: _is_ours(child) or _is_empty(child) for step, child in children.items()}

    def foreign_steps(self) -> list[tuple[int, str]]:
        """Return steps whose place another has, and its name: also that of an unfinished save without our mark."""
        foreign = [(step, f"{step}") for step, is_ours in self.step_owners().items() if not is_ours]
        if not is_remote(self.path):
            names = [child.name for child in self.path.iterdir() if UNFINISHED.fullmatch(child.name)]
            foreign += [(int(name.removesuffix(MAKING)), name) for name in names if name.endswith(MAKING)]
        return sorted(foreign)

    def in_the_way(self, step: int) -> list[str]:
        """Return the names of what is in the place of a step that is to be saved."""
        unfinished = self.path / f"{step}{MAKING}"
        if unfinished.exists() and _is_begun(unfinished):
            # It is of a save of this process that failed.
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
        """Return whether a step that was committed has no manifest any more; False while storage is away."""
        try:
            return not (self.step(step) / manifest.NAME).exists()
        except Exception:
            # A save reports that storage is away.
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
    """Make the folder of a step, the mark in it first. Raises FileExistsError when something is there already."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    folder.mkdir(parents=True)
    (folder / MARK).write_bytes(json.dumps(_mark(folder)).encode() + b"\n")


def remove_step(folder: epath.Path) -> list[str]:
    """Remove a step, its manifest last: half removed, it is seen to lack files. Return the files that no save wrote."""
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
    """Return whether this folder carries the mark, made for this step: a copy under another number does not count."""
    try:
        return bool(json.loads(manifest.read_small(folder / MARK)) == _mark(folder))
    except (FileNotFoundError, NotADirectoryError, NotAFile, ValueError, RecursionError):
        return False


def _is_ours(folder: epath.Path) -> bool:
    """Return whether this is the folder of a step that this product finished or began."""
    return (folder / manifest.NAME).exists() or _is_begun(folder)


def _is_step(folder: epath.Path) -> bool:
    """Return whether this product or Orbax finished this step: perhaps it can be restored."""
    return _is_ours(folder) or (folder / COMMITTED).exists()


def _is_unfinished(folder: epath.Path) -> bool:
    """Return whether this is a step that this product began and Orbax did not end."""
    if UNFINISHED.fullmatch(folder.name):
        return _is_begun(folder)
    if not is_remote(folder):
        return False  # on a file system the name is given by a rename, at the end
    return _is_begun(folder) and not any((folder / name).exists() for name in (manifest.NAME, COMMITTED))


def _is_empty(folder: epath.Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is None


def _prune(folder: epath.Path) -> None:
    """Remove the folders below and including `folder` that hold no file."""
    for parent, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(parent)
