"""Asks a program of the trainer's, in a process of its own: the launcher never imports jax."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from launcher.errors import UserError
from trainer import contract

INSTALL = "pip install 'jaxlaunch[train]' brings it."
# Codes that come with a sentence instead of a traceback.
_TOLD = (contract.BAD_SPEC, contract.BAD_DATA, contract.NO_CHECKPOINT, contract.STORAGE)


def is_here() -> bool:
    """Whether the trainer can be asked: the base install does not hold it."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "flax", "optax"))


def the_trainer(module: str, *arguments: str, environ: Mapping[str, str], hint: str | None = None) -> dict[str, Any]:
    """The JSON object that `python -m module` prints. Raises UserError with the trainer's own words, and `hint`."""
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ended.returncode in _TOLD:
        raise UserError(ended.stderr.strip().splitlines()[-1], hint)
    if ended.returncode:
        raise UserError(f"{ended.stderr.strip()}\n`python -m {module}` failed (exit {ended.returncode}).")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
