"""Which folders are runs, who runs in them and whose they are. Nothing is written, and nobody is asked."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from jaxlaunch.runs import lock
from jaxlaunch.runs.layout import LOCK, SUMMARY, SWEEP
from jaxlaunch.runs.lock import Holder


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's. One that this user may not look into may be: who reads it says that."""
    try:
        return stat.S_ISREG(os.stat(f"{folder}/{LOCK}").st_mode)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep, whose runs are folders in it."""
    try:
        return (folder / SWEEP).is_file()
    except OSError:
        return False


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders below a folder and in its sweeps, by name."""
    for inner in _list(folder):
        if is_run(inner):
            yield inner
        # A link in a sweep may lead back to where it is, and is no run.
        elif is_sweep(inner):
            yield from filter(is_run, _list(inner))


def find_own_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders below a folder that a server may show, by name: no link leads it elsewhere."""
    for inner in _list(folder):
        has_files = os.path.lexists(inner / SUMMARY) or os.path.lexists(inner / LOCK)
        if has_files and not inner.is_symlink():
            yield inner


def _list(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def find_holder(folder: Path) -> Holder | None:
    """Return who runs in a folder. Raises OSError where this user may not read it."""
    if not os.access(folder, os.R_OK):
        # The error says why.
        os.listdir(folder)
    return lock.find_holder(folder)


def owner_name(folder: Path) -> str | None:
    """Return the name of the user whose folder it is, or None if that is not known."""
    try:
        return user_name(folder.stat().st_uid)
    except OSError:
        return None


def user_name(uid: int) -> str:
    """Return the name of a user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
