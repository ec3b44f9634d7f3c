"""The folder in which the workers of one pytest run share what they compiled."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

NAME = "TEST_COMPILED"  # of the environment variable that holds its path


def make_folder() -> None:
    """Makes the folder, for this process and the workers that it starts, until its end."""
    if NAME not in os.environ:
        os.environ[NAME] = tempfile.mkdtemp(prefix="compiled-")
        atexit.register(shutil.rmtree, os.environ[NAME], ignore_errors=True)


def put(self: object, key: str, value: bytes) -> None:
    """For JAX's LRUCache, which writes in place (jax 0.10): another worker might read half of it."""
    path = Path(os.environ[NAME], f"{key}-cache")
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(value)
    part.replace(path)
