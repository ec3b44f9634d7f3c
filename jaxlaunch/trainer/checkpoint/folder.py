"""The folder of a run's checkpoints: which of its children are our steps, and which are foreign.

A folder that is named like a step may belong to another program; the trials of a sweep are
numbered, too. Therefore a save writes a mark as the first file of a step, before Orbax's files, and
a folder without a mark or a manifest is never removed. Even in a folder with one, only the files of
a save are removed, and all others remain.
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
from jaxlaunch.trainer.checkpoint.manifest import (
    STEP_NAME,
    DamagedManifestError,
    NotAFileError,
    is_remote,
    map_files,
)
from jaxlaunch.trainer.checkpoint.owner import OWNER_FILE
from jaxlaunch.trainer.checkpoint.storage import retry_storage
from jaxlaunch.trainer.errors import CheckpointError, list_first

MARK_FILE = "jaxlaunch.begun.json"
# The file with which Orbax completes a save on an object store, which has no rename.
COMMITTED_FILE = "commit_success.txt"
# Orbax's suffix for the name of an unfinished folder on a file system.
UNFINISHED_SUFFIX = ".orbax-checkpoint-tmp"
UNFINISHED_NAME = re.compile(rf"(0|[1-9][0-9]*){re.escape(UNFINISHED_SUFFIX)}(-[0-9]+)?")
# Orbax's file with metadata of a step.
METADATA_FILE = "_CHECKPOINT_METADATA"
# The names that a save writes into a step's folder.
SAVED_NAMES = (MARK_FILE, "state", "meta", METADATA_FILE, COMMITTED_FILE)
# The folder in which the processes write their digests, which process 0 collects.
DIGESTS_FOLDER = "jaxlaunch.digests"
DIGESTS_NAME = re.compile(r"[0-9a-f]+\.[0-9]+\.[0-9]+\.json(\.[0-9a-f]{16}\.tmp)?")
# A step that failed verification.
SET_ASIDE_NAME = re.compile(r"(0|[1-9][0-9]*)\.bad-[0-9]+")

T = TypeVar("T")


class CheckpointFolder:
    """A folder of checkpoints. The methods raise the exceptions of storage."""

    def __init__(self, path: str) -> None:
        folder = epath.Path(path)
        self.path = folder if is_remote(folder) else folder.expanduser().absolute()

    def __str__(self) -> str:
        return str(self.path)

    def step_folder(self, step: int) -> epath.Path:
        """Return the folder of a step."""
        return self.path / str(step)

    def digests_file(self, nonce: str, step: int, process: int) -> epath.Path:
        """Return the file of a process's digests. Each attempt has another nonce."""
        return self.path / DIGESTS_FOLDER / f"{nonce}.{step}.{process}.json"

    def read_with_retries(self, operation: Callable[[], T], step: int | None = None) -> T:
        """Call `operation`, which reads the folder or a step, and retry it if storage fails.

        Raises StorageError if it fails every time.
        """
        if step is None:
            return retry_storage(f"reading {self.path}", operation, OSError)
        return retry_storage(f"reading step {step} of {self.path}", operation)

    def clear_unfinished(self) -> list[str]:
        """Remove unfinished saves. Return the foreign names that remain in the place of steps."""
        foreign = []
        for child in sorted(self.path.iterdir()):
            is_unfinished = UNFINISHED_NAME.fullmatch(child.name) is not None
            if not (is_unfinished or STEP_NAME.fullmatch(child.name)) or not child.is_dir():
                continue
            may_lack_mark = is_unfinished and not is_remote(child)
            if _is_unfinished(child):
                foreign += [f"{child.name}/{name}" for name in remove_step(child)]
            elif may_lack_mark and set(manifest.list_files(child)) <= {MARK_FILE}:
                # The process was killed before the mark was complete.
                (child / MARK_FILE).unlink(missing_ok=True)
                _remove_empty_folders(child)
            elif not _is_step(child) and not _is_empty(child):
                foreign.append(f"{child.name}/")
        if (digests_folder := self.path / DIGESTS_FOLDER).is_dir():
            for file in digests_folder.iterdir():
                if DIGESTS_NAME.fullmatch(file.name):
                    file.unlink()
        return foreign

    def step_ownership(self) -> dict[int, bool]:
        """Return, for each child that is named like a step, whether it is ours or empty."""
        return {
            int(child.name): _is_ours(child) or _is_empty(child)
            for child in self.path.iterdir()
            if STEP_NAME.fullmatch(child.name)
        }

    def foreign_steps(self) -> list[tuple[int, str]]:
        """Return (step, name) for each foreign child that would block a save of this step."""
        ownership = self.step_ownership()
        foreign = [(step, f"{step}") for step, is_ours in ownership.items() if not is_ours]
        if not is_remote(self.path):
            for name in (child.name for child in self.path.iterdir()):
                if UNFINISHED_NAME.fullmatch(name) and name.endswith(UNFINISHED_SUFFIX):
                    foreign.append((int(name.removesuffix(UNFINISHED_SUFFIX)), name))
        return sorted(foreign)

    def blocking_names(self, step: int) -> list[str]:
        """Return the names of the children that block a save of this step."""
        unfinished = self.path / f"{step}{UNFINISHED_SUFFIX}"
        if unfinished.exists() and _has_mark(unfinished):
            # A save of this process failed and left the folder behind.
            remove_step(unfinished)
        paths = [self.step_folder(step)]
        if not is_remote(self.path):
            paths.append(unfinished)
        return [path.name for path in paths if path.exists()]

    def blocking_error(self, names: list[str]) -> CheckpointError:
        """Return the error for children that block the save of a step."""
        return CheckpointError(
            f"{self.path} holds {list_first(names)}, which no run saved, in the place of "
            "checkpoints that this run is to save; move that elsewhere, or set checkpoint.path to "
            "a folder of this run's own"
        )

    def list_steps(self) -> tuple[list[int], list[str]]:
        """Return the steps in the folder, including damaged ones, and the names of other files."""
        steps, foreign = [], []
        saved_names = (saved_files.INPUTS_FILE, saved_files.TOKENIZER_FOLDER)
        own_names = (".", OWNER_FILE, DIGESTS_FOLDER, *saved_names)
        for child in sorted(self.path.iterdir()):
            if STEP_NAME.fullmatch(child.name):
                if not child.is_dir() or _is_step(child) or _is_empty(child):
                    steps.append(int(child.name))
                continue
            is_known = SET_ASIDE_NAME.fullmatch(child.name) or UNFINISHED_NAME.fullmatch(child.name)
            if not is_known and not child.name.startswith(own_names):
                foreign.append(f"{child.name}/" if child.is_dir() else child.name)
        return steps, foreign

    def is_gone(self, step: int) -> bool:
        """Return whether the manifest of a committed step was deleted; False if unknown."""
        try:
            return not manifest.path_exists(self.step_folder(step) / manifest.MANIFEST_FILE)
        except Exception:
            # The next save reports that storage is unavailable.
            return False

    def set_aside(self, step: int) -> str:
        """Rename a damaged step; return its new name."""
        folder = self.step_folder(step)
        new_folders = (self.path / f"{step}.bad-{number}" for number in range(1, 1000))
        new_folder: epath.Path = next(path for path in new_folders if not path.exists())
        if is_remote(folder):
            # Object stores have no rename, and s3fs and gcsfs emulate it differently.
            names = manifest.list_files(folder, include_manifest=True)
            map_files(lambda name: (folder / name).copy(new_folder / name), names)
            map_files(lambda name: (folder / name).unlink(missing_ok=True), names)
        else:
            folder.rename(new_folder)
        return str(new_folder.name)


def begin_step(folder: epath.Path) -> None:
    """Create the folder of a step with its mark. Raises FileExistsError."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    mark = json.dumps(_mark_content(folder)).encode() + b"\n"
    if is_remote(folder):
        manifest.replace_file(folder / MARK_FILE, mark)
        return
    folder.mkdir(parents=True)
    (folder / MARK_FILE).write_bytes(mark)


def remove_step(folder: epath.Path) -> list[str]:
    """Remove the files of a save, the manifest last. Return the names of all other files."""
    try:
        step_manifest = manifest.read_manifest(folder)
    except DamagedManifestError:
        step_manifest = None
    names = manifest.list_files(folder)
    if step_manifest is not None:
        own_names = set(step_manifest.files)
    else:
        top_names = {name: name.split("/")[0].split(UNFINISHED_SUFFIX)[0] for name in names}
        own_names = {name for name in names if top_names[name] in SAVED_NAMES}
    removed = [name for name in names if name in own_names - {MARK_FILE}]
    map_files(lambda name: (folder / name).unlink(missing_ok=True), removed)
    drafts = filter(manifest.is_draft, manifest.list_files(folder, include_manifest=True))
    # As long as the manifest exists, a partial removal is noticed.
    for name in (*drafts, MARK_FILE, manifest.MANIFEST_FILE):
        (folder / name).unlink(missing_ok=True)
    if not is_remote(folder):
        _remove_empty_folders(folder)
    return [name for name in names if name not in own_names | {MARK_FILE}]


def _mark_content(folder: epath.Path) -> dict[str, int]:
    return {"step": int(folder.name.split(".")[0])}


def _has_mark(folder: epath.Path) -> bool:
    """Return whether the folder has the mark of its own step, and not a copy of another's."""
    try:
        mark = json.loads(manifest.read_small_file(folder / MARK_FILE))
    except (FileNotFoundError, NotADirectoryError, NotAFileError, ValueError, RecursionError):
        return False
    return bool(mark == _mark_content(folder))


def _is_ours(folder: epath.Path) -> bool:
    """Return whether jaxlaunch began or finished this step."""
    return manifest.path_exists(folder / manifest.MANIFEST_FILE) or _has_mark(folder)


def _is_step(folder: epath.Path) -> bool:
    """Return whether jaxlaunch or Orbax wrote this step, so that it may be restorable."""
    return _is_ours(folder) or manifest.path_exists(folder / COMMITTED_FILE)


def _is_unfinished(folder: epath.Path) -> bool:
    """Return whether jaxlaunch began this step and Orbax did not finish it."""
    if UNFINISHED_NAME.fullmatch(folder.name):
        return _has_mark(folder)
    # On a file system a folder gets its final name at the end.
    final_names = (manifest.MANIFEST_FILE, COMMITTED_FILE)
    is_finished = not is_remote(folder) or any((folder / name).exists() for name in final_names)
    return not is_finished and _has_mark(folder)


def _is_empty(folder: epath.Path) -> bool:
    return manifest.is_folder(folder) and next(folder.iterdir(), None) is None


def _remove_empty_folders(folder: epath.Path) -> None:
    """Remove `folder` and the folders below it, as far as they hold no files."""
    for parent, _, _ in os.walk(folder, topdown=False):
        # The system refuses to remove a folder that is not empty.
        with contextlib.suppress(OSError):
            os.rmdir(parent)
