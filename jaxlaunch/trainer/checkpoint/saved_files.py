"""Files beside the checkpoints, so that a use of the model needs nothing else: its tokenizer and its inputs.

The inputs are a JSON object that the task has described, from which a prediction makes an example of a file: of a table
its columns with means, deviations and values, of images their size; of both the names of the classes.
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
TEMPLATES = "additional_chat_templates/"  # a folder of NAME.jinja, chat templates besides that


def save_inputs(checkpoints: str, described: Mapping[str, Any] | None) -> None:
    """Make the folder say this of the inputs, or nothing. Raises what the storage raises; by one process."""
    folder = epath.Path(checkpoints)
    if read_inputs(checkpoints) == described:
        return
    if described is None:
        (folder / INPUTS).unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    manifest.replace(folder / INPUTS, encode_inputs(described))


def read_inputs(checkpoints: str) -> dict[str, Any] | None:
    """Return the inputs of a folder of checkpoints, or of an export, if there. Raises ValueError for damage."""
    path = epath.Path(checkpoints) / INPUTS
    return dict(json.loads(path.read_text())) if path.exists() else None


def encode_inputs(described: Mapping[str, Any]) -> bytes:
    """Return the content of the file."""
    return json.dumps(described).encode() + b"\n"


def save_tokenizer(checkpoints: str, files: Mapping[str, bytes]) -> None:
    """Make the folder hold these files, each whole or not at all. Raises what the storage raises; by one process."""
    folder = epath.Path(checkpoints) / TOKENIZER
    if read_tokenizer(folder) == dict(files):
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        manifest.replace(folder / name, content)
    # Files of the tokenizer before would be exported with this one.
    for name in {*TOKENIZER_FILES, *_templates(folder)} - set(files):
        (folder / name).unlink(missing_ok=True)


def saved_tokenizer(checkpoints: str) -> dict[str, bytes]:
    """Return the files of the saved tokenizer by name; none where the model was trained without one."""
    return read_tokenizer(epath.Path(checkpoints) / TOKENIZER)


def read_tokenizer(folder: epath.Path, names: Sequence[str] = TOKENIZER_FILES) -> dict[str, bytes]:
    """Return those of a tokenizer's files that a folder holds, by name, and its further chat templates."""
    there = [name for name in names if (folder / name).exists()]
    return {name: bytes((folder / name).read_bytes()) for name in (*there, *_templates(folder))}


def _templates(folder: epath.Path) -> list[str]:
    place = folder / TEMPLATES
    if not place.exists():
        return []
    return sorted(f"{TEMPLATES}{file.name}" for file in place.iterdir() if file.suffix == ".jinja")
