"""The tokenizer and the description of the inputs, saved next to the checkpoints.

A prediction needs them to turn a file into examples. The description of the inputs is a JSON object
from the task: the names of the classes, and the size of images or the columns of a table with their
means, deviations and values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.checkpoint import manifest

INPUTS_FILE = "inputs.json"
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_FILE = "tokenizer.json"
# The files that are saved of a tokenizer, named as by transformers' save_pretrained.
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# The folder of additional chat templates, NAME.jinja.
TEMPLATES_FOLDER = "additional_chat_templates/"


def save_inputs(checkpoints: str, inputs: Mapping[str, Any] | None) -> None:
    """Save the description of the inputs; None removes it. Raises the exceptions of storage."""
    folder = epath.Path(checkpoints)
    if read_inputs(checkpoints) == inputs:
        return
    if inputs is None:
        (folder / INPUTS_FILE).unlink(missing_ok=True)
        return
    remote.create_folder(folder)
    manifest.replace_file(folder / INPUTS_FILE, encode_inputs(inputs))


def read_inputs(checkpoints: str) -> dict[str, Any] | None:
    """Read the description in a folder of checkpoints or an export; None without one.

    Raises ValueError if the file is not valid.
    """
    path = epath.Path(checkpoints) / INPUTS_FILE
    return dict(json.loads(path.read_text())) if path.exists() else None


def encode_inputs(inputs: Mapping[str, Any]) -> bytes:
    """Return the content of INPUTS_FILE."""
    return json.dumps(inputs).encode() + b"\n"


def save_tokenizer(checkpoints: str, files: Mapping[str, bytes]) -> None:
    """Save the files of a tokenizer, each atomically. Raises the exceptions of storage."""
    folder = epath.Path(checkpoints) / TOKENIZER_FOLDER
    if read_tokenizer(folder) == dict(files):
        return
    remote.create_folder(folder)
    for name, content in files.items():
        remote.create_folder((folder / name).parent)
        manifest.replace_file(folder / name, content)
    # Files of the previous tokenizer would be exported with this one.
    for name in {*TOKENIZER_FILES, *_list_templates(folder)} - set(files):
        (folder / name).unlink(missing_ok=True)


def read_saved_tokenizer(checkpoints: str) -> dict[str, bytes]:
    """Read the files of the saved tokenizer by name; empty if the model was trained without one."""
    return read_tokenizer(epath.Path(checkpoints) / TOKENIZER_FOLDER)


def read_tokenizer(folder: epath.Path, names: Sequence[str] = TOKENIZER_FILES) -> dict[str, bytes]:
    """Read the files of a tokenizer in a folder by name, with its additional chat templates."""
    present = [name for name in names if (folder / name).exists()]
    names = (*present, *_list_templates(folder))
    return {name: bytes((folder / name).read_bytes()) for name in names}


def _list_templates(folder: epath.Path) -> list[str]:
    templates_folder = folder / TEMPLATES_FOLDER
    if not templates_folder.exists():
        return []
    names = (file.name for file in templates_folder.iterdir() if file.suffix == ".jinja")
    return sorted(f"{TEMPLATES_FOLDER}{name}" for name in names)
