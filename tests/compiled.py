"""How tests compile: quickly, and into a folder that the workers of one pytest run share."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

# Environment variables of a process that compiles far longer than it computes: a third of the processor time (jaxlib
# 0.10). LLVM IR of a fusion is written at once, not by way of MLIR.
QUICK_COMPILES = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}
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
