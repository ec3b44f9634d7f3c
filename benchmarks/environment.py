"""The virtual environment of what ours is compared with: built once, into the user's cache folder."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import subprocess
import sys

from benchmarks.table import log

# The last line of transformers with Flax, on the jax and optax of this environment; torch takes 5 GB.
SHARED = ("jax", "jaxlib", "flax", "optax", "numpy", "safetensors")
REQUIREMENTS = ("transformers==4.57.6", "torch==2.15.0")


def python() -> str:
    """The interpreter of the environment, which is built where it is missing."""
    wanted = [*REQUIREMENTS, *(f"{name}=={importlib.metadata.version(name)}" for name in SHARED)]
    key = hashlib.sha256("\0".join([sys.version, *wanted]).encode()).hexdigest()[:12]
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(cache, "jaxlaunch", "benchmarks", key)
    ready, found = folder / "ready", str(folder / "bin" / "python")
    if not ready.exists():
        log(f"building {folder}: {', '.join(wanted)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([found, "-m", "pip", "install", "--quiet", *wanted], check=True, stdout=sys.stderr)
        ready.touch()
    return found
