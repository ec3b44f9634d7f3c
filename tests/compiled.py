"""How tests compile: quickly, once for all processes of a gang, and into a folder that the workers of a run share."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

# XLA's options for what compiles far longer than it computes (jaxlib 0.10). LLVM IR of a fusion is written at once, not
# by way of MLIR: less than half the processor time. A program's code is one module, not up to 32, each with a copy of
# what they share: three quarters of the rest.
QUICK_OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
# The same as environment variables of a process; and LLVM does without most of its passes.
QUICK_COMPILES = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": " ".join(f"--{name}={value}".lower() for name, value in QUICK_OPTIONS.items()),
}
# Of a gang, process 0 compiles for all: tests/site/sitecustomize.py, which must be on the path of each.
COMPILED_ONCE = {"JAX_SHARE_BINARY_BETWEEN_HOSTS": "1"}
SITE = str(Path(__file__).parent / "site")
# All of it, for a command that starts processes and has no path of its own.
QUICK_STARTS = {**QUICK_COMPILES, **COMPILED_ONCE, "PYTHONPATH": SITE}
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
