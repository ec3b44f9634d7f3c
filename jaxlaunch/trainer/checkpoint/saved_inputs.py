"""How a file becomes what the model reads, beside the checkpoints and in an export: a prediction needs no more data.

A JSON object that the task has described: of a table its columns with means, deviations and values, of images their
size; of both the names of the classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from jaxlaunch.trainer.checkpoint import manifest

FILE = "inputs.json"  # in the folder of checkpoints, beside the steps


def keep(checkpoints: str, described: Mapping[str, Any] | None) -> None:
    """Makes the folder say this, or nothing. Raises what the storage raises; by one process."""
    folder = epath.Path(checkpoints)
    if kept(checkpoints) == described:
        return
    if described is None:
        (folder / FILE).unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    manifest.replace(folder / FILE, encoded(described))


def kept(checkpoints: str) -> dict[str, Any] | None:
    """What a folder of checkpoints, or of an export, says; None where it says nothing. Raises ValueError for damage."""
    path = epath.Path(checkpoints) / FILE
    return dict(json.loads(path.read_text())) if path.exists() else None


def encoded(described: Mapping[str, Any]) -> bytes:
    """The content of the file."""
    return json.dumps(described).encode() + b"\n"
