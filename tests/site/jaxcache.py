"""The folder of compiled programs that JAX processes share: an entry appears whole.

The processes start and end at any time. The processes of one gang have to find the same entries:
the first one compiles only what it does not find, and the others wait for what they do not find. So
a gang sees those that were there before it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

# An environment variable, seconds since 1970: entries from then on are not found.
BEFORE = "TEST_COMPILED_BEFORE"


def path(cache: Any, key: str) -> Path:
    """Where JAX's LRUCache (jax 0.10) keeps an entry."""
    return Path(cache.path, f"{key}-cache")


def get(self: Any, key: str) -> bytes | None:
    """LRUCache.get. Raises what reading a file raises."""
    try:
        with path(self, key).open("rb") as file:
            return (
                file.read()
                if os.fstat(file.fileno()).st_mtime < float(os.environ.get(BEFORE, "inf"))
                else None
            )
    except FileNotFoundError:
        return None


def put(self: Any, key: str, value: bytes) -> None:
    """LRUCache.put. An entry that is there stays, with its time."""
    entry = path(self, key)
    part = entry.with_suffix(f".{os.getpid()}")
    part.write_bytes(value)
    with contextlib.suppress(FileExistsError):
        os.link(part, entry)
    part.unlink()


def install(lru_cache: Any) -> None:
    """Changes JAX's module `jax._src.lru_cache`."""
    lru_cache.LRUCache.get, lru_cache.LRUCache.put = get, put
