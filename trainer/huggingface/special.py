"""The tokens that begin, end and pad a text, as a Hugging Face folder says them, and how to generate from it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from etils import epath

from trainer.buckets import remote
from trainer.errors import SpecError, StorageError

GENERATION = "generation_config.json"
KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def generation(folder: str | None) -> dict[str, Any]:
    """What generation_config.json of a folder says, over the special tokens of its config.json.

    Empty without a folder, and where it is no longer there or cannot be read.
    """
    if folder is None:
        return {}
    config = _read(folder, "config.json")
    known = {key: config[key] for key in KEYS if config.get(key) is not None}
    return {**known, **_read(folder, GENERATION)}


def ends(folder: str) -> tuple[int, ...]:
    """The tokens that end a text."""
    found = generation(folder).get("eos_token_id")
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)


def _read(folder: str, name: str) -> dict[str, Any]:
    path = epath.Path(folder) / name
    reading = remote.storage(f"reading {path}", SpecError) if remote.is_remote(folder) else contextlib.nullcontext()
    try:
        with reading:
            found = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError, SpecError, StorageError):  # the model is whole without it
        return {}
    return found if isinstance(found, dict) else {}
