"""The user's cache folder: our part of XDG_CACHE_HOME or ~/.cache."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return a folder in the user's cache. Raises RuntimeError without a home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache").absolute() / "jaxlaunch" / name
