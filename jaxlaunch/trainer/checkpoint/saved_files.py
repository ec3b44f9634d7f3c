"""The tokenizer and the description of the inputs, saved next to the checkpoints so that the model can be used.

The inputs are a JSON object from the task with which a prediction turns a file into an example: the columns of a table
with means, deviations and values, or the size of images, and the names of the classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from jaxlaunch.trainer.checkpoint import manifest

INPUTS = "inputs.json"
TOKENIZER = "tokenizer"
TOKENIZER_FILE = "tokenizer.json"
# The files of a tokenizer's folder that are saved, as transformers' save_pretrained writes them.
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# A folder of further chat templates, NAME.jinja.
TEMPLATES = "additional_chat_templates/"


def save_inputs(checkpoints: str, described: Mapping[str, Any] | None) -> None:
    """Save the description of the inputs, or remove it. Called by one process. Raises the exceptions of storage."""
    folder = epath.Path(checkpoints)
    if read_inputs(checkpoints) == described:
        return
    if described is None:
        (folder / INPUTS).unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    manifest.replace(folder / INPUTS, encode_inputs(described))


def read_inputs(checkpoints: str) -> dict[str, Any] | None:
    """Read the inputs of a folder of checkpoints or of an export, if any. Raises ValueError for damage."""
    path = epath.Path(checkpoints) / INPUTS
    return dict(json.loads(path.read_text())) if path.exists() else None


def encode_inputs(described: Mapping[str, Any]) -> bytes:
    """Return the content of the file."""
    return json.dumps(described).encode() + b"\n"


def save_tokenizer(checkpoints: str, files: Mapping[str, bytes]) -> None:
    """Save the files of a tokenizer, each atomically. Called by one process. Raises the exceptions of storage."""
    folder = epath.Path(checkpoints) / TOKENIZER
    if read_tokenizer(folder) == dict(files):
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        manifest.replace(folder / name, content)
    # Files of the previous tokenizer would be exported with this one.
    for name in {*TOKENIZER_FILES, *_templates(folder)} - set(files):
        (folder / name).unlink(missing_ok=True)


def saved_tokenizer(checkpoints: str) -> dict[str, bytes]:
    """Read the files of the saved tokenizer by name; empty if the model was trained without one."""
    return read_tokenizer(epath.Path(checkpoints) / TOKENIZER)


def read_tokenizer(folder: epath.Path, names: Sequence[str] = TOKENIZER_FILES) -> dict[str, bytes]:
    """Read a tokenizer's files in a folder by name, with its further chat templates."""
    there = [name for name in names if (folder / name).exists()]
    return {name: bytes((folder / name).read_bytes()) for name in (*there, *_templates(folder))}


def _templates(folder: epath.Path) -> list[str]:
    place = folder / TEMPLATES
    if not place.exists():
        return []
    return sorted(f"{TEMPLATES}{file.name}" for file in place.iterdir() if file.suffix == ".jinja")
