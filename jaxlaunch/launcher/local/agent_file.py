"""The packed agent as a file on this machine: made once, in the user's cache, for all runs of one version."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

from jaxlaunch import atomic_file, user_cache
from jaxlaunch.launcher.agent import pack

NAME = "agent-{}.pyz"
KEPT, DAY_S = 5, 86_400.0


def path(otherwise: Path) -> Path:
    """The file; below the folder `otherwise` where the cache cannot be written, or is not this user's alone."""
    name = NAME.format(pack.address())
    try:
        folder = user_cache.home("agent")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = _made(folder, name)
        _prune(folder)
        return made
    except (OSError, RuntimeError):  # the second where the user has no home
        return _made(otherwise, name)


def _made(folder: Path, name: str) -> Path:
    """The file in this folder, whole whoever reads it. Raises OSError where it cannot be made."""
    file = folder / name
    if _is_mine(file):
        os.utime(file)  # when it was last used
        return file
    with atomic_file.draft(file) as draft:
        draft.touch(mode=0o600)
        draft.write_bytes(pack.pack_compiled())
    if not _is_mine(file):
        raise PermissionError(f"{file} is another user's")
    return file


def _prune(folder: Path) -> None:
    """Removes the files of other versions, but for the last KEPT that were used, and those of the last day: an agent
    has read all of its own by then. So are drafts of who was killed."""
    files = [*folder.glob(NAME.format("*")), *folder.glob(f"{NAME.format('*')}.*{atomic_file.DRAFT_SUFFIX}")]
    with contextlib.suppress(OSError):  # another run removes them too
        used = {file: file.lstat().st_mtime for file in files}
        for file in sorted(files, key=lambda each: used[each])[:-KEPT]:
            if used[file] < time.time() - DAY_S:
                file.unlink()


def _is_mine(file: Path) -> bool:
    """Whether the file is there, and nobody else can have written it."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
