"""The user's cache folder, where what can be had again is kept: our part of XDG_CACHE_HOME or ~/.cache."""

from __future__ import annotations

import os
from pathlib import Path


def home(name: str) -> Path:
    """A folder of this program's there, as an absolute path. Raises RuntimeError where the user has no home."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache").absolute() / "jaxlaunch" / name
