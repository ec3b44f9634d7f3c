"""The folder of jaxlaunch in the user's cache, which is XDG_CACHE_HOME or ~/.cache."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the path of a cache folder. Raises RuntimeError if the user has no home folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache").absolute() / "jaxlaunch" / name
