"""The tokenizer and the description of the inputs, saved next to the checkpoints.

The inputs are a JSON object from the task with which a prediction turns a file into an example: the
columns of a table with means, deviations and values, or the size of images, and the names of the
classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from jaxlaunch.trainer.checkpoint import manifest

INPUTS_FILE = "inputs.json"
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_FILE = "tokenizer.json"
# The files of a tokenizer's folder that are saved, as transformers' save_pretrained writes them.
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# A folder of further chat templates, NAME.jinja.
TEMPLATES_FOLDER = "additional_chat_templates/"


def save_inputs(checkpoints: str, inputs: Mapping[str, Any] | None) -> None:
    """Save the description of the inputs, or remove it. Raises the exceptions of storage."""
    folder = epath.Path(checkpoints)
    if read_inputs(checkpoints) == inputs:
        return
    if inputs is None:
        (folder / INPUTS_FILE).unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    manifest.replace_file(folder / INPUTS_FILE, encode_inputs(inputs))


def read_inputs(checkpoints: str) -> dict[str, Any] | None:
    """Read the inputs of a folder of checkpoints or of an export, if any. Raises ValueError."""
    path = epath.Path(checkpoints) / INPUTS_FILE
    return dict(json.loads(path.read_text())) if path.exists() else None


def encode_inputs(inputs: Mapping[str, Any]) -> bytes:
    """Return the content of the file."""
    return json.dumps(inputs).encode() + b"\n"


def save_tokenizer(checkpoints: str, files: Mapping[str, bytes]) -> None:
    """Save the files of a tokenizer, each atomically. Raises the exceptions of storage."""
    folder = epath.Path(checkpoints) / TOKENIZER_FOLDER
    if read_tokenizer(folder) == dict(files):
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        manifest.replace_file(folder / name, content)
    # Files of the previous tokenizer would be exported with this one.
    for name in {*TOKENIZER_FILES, *_list_templates(folder)} - set(files):
        (folder / name).unlink(missing_ok=True)


def read_saved_tokenizer(checkpoints: str) -> dict[str, bytes]:
    """Read the files of the saved tokenizer by name; empty if the model was trained without one."""
    return read_tokenizer(epath.Path(checkpoints) / TOKENIZER_FOLDER)


def read_tokenizer(folder: epath.Path, names: Sequence[str] = TOKENIZER_FILES) -> dict[str, bytes]:
    """Read a tokenizer's files in a folder by name, with its further chat templates."""
    present = [name for name in names if (folder / name).exists()]
    names = (*present, *_list_templates(folder))
    return {name: bytes((folder / name).read_bytes()) for name in names}


def _list_templates(folder: epath.Path) -> list[str]:
    templates_folder = folder / TEMPLATES_FOLDER
    if not templates_folder.exists():
        return []
    names = (file.name for file in templates_folder.iterdir() if file.suffix == ".jinja")
    return sorted(f"{TEMPLATES_FOLDER}{name}" for name in names)
