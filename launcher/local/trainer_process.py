"""Runs a program of the trainer in a process of its own: the launcher never imports jax."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from launcher.errors import UserError
from trainer import contract

INSTALL = "install it with pip install 'jaxlaunch[train]'."


def is_installed() -> bool:
    """Whether the trainer is installed; the base install does not have it."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "flax", "optax"))


def run(module: str, *arguments: str, environ: Mapping[str, str], hint: str | None = None) -> dict[str, Any]:
    """The JSON object that `python -m module` prints. Raises UserError with its own message, and `hint`."""
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ended.returncode in contract.SENTENCES:
        raise UserError(contract.refusal_in(ended.stderr), hint)
    if ended.returncode:
        raise UserError(f"{ended.stderr.strip()}\n`python -m {module}` failed (exit {ended.returncode}).")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
