"""The tokens that begin, end and pad a text, as a Hugging Face folder says them, and how to generate from it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import SpecError, StorageError

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


def of_tokenizer(files: Mapping[str, bytes]) -> dict[str, int]:
    """The special tokens that a tokenizer's files name and number; those alone that its tokenizer.json has.

    Read as JSON: an export needs no package that tokenizes. What cannot be read says nothing.
    """
    said: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the newer one last
        said |= {key: token for key, token in _parsed(files.get(name, b"")).items() if token is not None}
    main = _parsed(files.get("tokenizer.json", b""))
    vocab = main.get("model", {}).get("vocab")
    ids: dict[str, int] = dict(vocab) if isinstance(vocab, dict) else {}
    ids |= {each["content"]: each["id"] for each in main.get("added_tokens", [])}
    named = {key: said.get(key.removesuffix("_id")) for key in KEYS}
    tokens = {key: token.get("content") if isinstance(token, dict) else token for key, token in named.items()}
    return {key: ids[token] for key, token in tokens.items() if token in ids}


def _parsed(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    return {}


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
