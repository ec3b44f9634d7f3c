"""The packed agent as a file on this machine: made once, in the user's cache, for all runs of one version."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from jaxlaunch.launcher.agent import pack

NAME = "agent-{}.pyz"


def path(otherwise: Path) -> Path:
    """The file; below the folder `otherwise` where the cache cannot be written, or is not this user's alone."""
    name = NAME.format(pack.address())
    try:
        folder = _cache()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _made(folder, name)
    except (OSError, RuntimeError):  # the second where the user has no home
        return _made(otherwise, name)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache").absolute() / "jaxlaunch" / "agent"


def _made(folder: Path, name: str) -> Path:
    """The file in this folder, whole whoever reads it. Raises OSError where it cannot be made."""
    file = folder / name
    if _is_mine(file):
        return file
    descriptor, draft = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    try:
        with os.fdopen(descriptor, "wb") as written:
            written.write(pack.pack_compiled())
            written.flush()
            os.fsync(descriptor)  # else a machine that loses its power may keep an empty file of that name
        os.replace(draft, file)
    except BaseException:
        os.unlink(draft)
        raise
    if not _is_mine(file):
        raise PermissionError(f"{file} is another user's")
    return file


def _is_mine(file: Path) -> bool:
    """Whether the file is there, and nobody else can have written it."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
