"""What in a checkpoint folder this product began, and the removal of just that. Never imports jax.

What is named like a step may be another's: the trials of a sweep are numbered too. So the first file of a step is a
mark, written before Orbax's own, and nothing is ever removed without it or a manifest. Of a folder that has one, only
what a save wrote is removed; what others put there stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable

from etils import epath

from jaxlaunch.trainer.checkpoint import manifest
from jaxlaunch.trainer.checkpoint.manifest import STEP, Damaged, NotAFile, each, is_remote

NAME = "jaxlaunch.begun.json"
COMMITTED = "commit_success.txt"  # Orbax's own mark; on object stores, which have no rename, its presence ends a save
MAKING = ".orbax-checkpoint-tmp"  # how Orbax ends the name of a folder in the making, on a file system
UNFINISHED = re.compile(rf"(0|[1-9][0-9]*){re.escape(MAKING)}(-[0-9]+)?")
METADATA = "_CHECKPOINT_METADATA"  # Orbax's file on a step
WRITTEN = (NAME, "state", "meta", METADATA, COMMITTED)  # what a save writes into a step's folder


def begin(folder: epath.Path) -> None:
    """Makes the folder of a step, the mark in it first. Raises FileExistsError when something is there already."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(json.dumps({"step": _step(folder)}).encode() + b"\n")


def is_begun(folder: epath.Path) -> bool:
    """Whether this folder carries the mark, made for this step: a copy under another number does not count."""
    try:
        return bool(json.loads(manifest.read_small(folder / NAME)) == {"step": _step(folder)})
    except (FileNotFoundError, NotADirectoryError, NotAFile, ValueError, RecursionError):
        return False


def is_own(folder: epath.Path) -> bool:
    """Whether this is the folder of a step that this product finished or began."""
    return (folder / manifest.NAME).exists() or is_begun(folder)


def is_step(folder: epath.Path) -> bool:
    """The same, or that of a step that Orbax finished: one that can perhaps be restored."""
    return is_own(folder) or (folder / COMMITTED).exists()


def is_unfinished(folder: epath.Path) -> bool:
    """Whether this is a step that this product began and Orbax did not end."""
    if UNFINISHED.fullmatch(folder.name):
        return is_begun(folder)
    if not is_remote(folder) or not STEP.fullmatch(folder.name):
        return False  # on a file system the name is given by a rename, at the end
    return is_begun(folder) and not any((folder / name).exists() for name in (manifest.NAME, COMMITTED))


def clear(folder: epath.Path) -> list[str]:
    """Removes from a checkpoint folder the saves that were begun and not ended. Returns what was left although it is
    named like a step, because another made it."""
    left = []
    for child in sorted(folder.iterdir()):
        if not (STEP.fullmatch(child.name) or UNFINISHED.fullmatch(child.name)) or not child.is_dir():
            continue
        if is_unfinished(child):
            left += [f"{child.name}/{name}" for name in remove(child)]
        elif UNFINISHED.fullmatch(child.name) and not is_remote(child) and set(manifest.listing(child)) <= {NAME}:
            _unlink(child / NAME)  # killed while the mark was written
            _prune(child)
        elif not is_step(child) and next(child.iterdir(), None) is not None:
            left.append(f"{child.name}/")
    return left


def remove(folder: epath.Path) -> list[str]:
    """Removes a step. Returns the files that no save wrote: they are left, in their places.

    The manifest goes last: a step that is half removed is known by the files that it lacks.
    """
    try:
        written = manifest.read(folder)
    except Damaged:
        written = None
    names = manifest.listing(folder)
    own = set(written.files) if written else {name for name in names if name.split("/")[0].split(MAKING)[0] in WRITTEN}
    each(lambda name: _unlink(folder / name), [name for name in names if name in own and name != NAME])
    drafts = [name for name in manifest.listing(folder, whole=True) if manifest.is_draft(name)]
    for name in (*drafts, NAME, manifest.NAME):
        _unlink(folder / name)
    left = [name for name in names if name not in own and name != NAME]
    if not is_remote(folder):
        _prune(folder)
    return left


def move(folder: epath.Path, to: epath.Path) -> None:
    """Renames a step's folder. On an object store, which has no rename, file by file: s3fs and gcsfs differ in it."""
    if not is_remote(folder):
        folder.rename(to)
        return
    names = manifest.listing(folder, whole=True)
    each(lambda name: (folder / name).copy(to / name), names)
    each(lambda name: _unlink(folder / name), names)


def _unlink(path: epath.Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _prune(folder: epath.Path) -> None:
    """Removes the folders below and including `folder` that hold no file."""
    parents: Iterable[str] = [parent for parent, _, _ in os.walk(folder, topdown=False)]
    for parent in parents:
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(parent)


def _step(folder: epath.Path) -> int:
    return int(folder.name.split(".")[0])
