"""What looks like a credential, and what of a job must never be repeated in a message.

A literal in a job is readable by everyone who can read the file, the pod or the run folder; a Secret is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from launcher.errors import KeyPath

# A name that says it holds one. By whole words: MAX_TOKENS and TOKENIZERS_PARALLELISM hold none.
_SECRET_WORD = {"token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey"}
_KEY_BEFORE = {"api", "access", "private", "secret", "auth", "encryption", "account", "signing", "license"}
_ALWAYS = {"password", "passwd", "passphrase"}  # short ones too
_POINTS_ELSEWHERE = {"file", "path", "dir", "name", "url", "id"}  # TOKEN_FILE names where it lies
_SHORTEST = 8

# A value that says so by its form, wherever it stands.
_FORMS = re.compile(
    r"\bsk-(ant-api\d+|proj)-[\w-]{20,}|\b[rs]k[-_](live_|test_)?[A-Za-z0-9]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bhf_[A-Za-z0-9]{20,}|\bxox[abprs]-[\w-]{10,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}"
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|://[^/\s:@]+:[^/\s@]+@"
)
_PRIVATE_BLOCKS = {"env", "secrets", "command", "pod", "init", "args", "eval_args", "annotations"}


def in_value(text: str) -> bool:
    """Whether the text holds a credential of a well-known form."""
    return _FORMS.search(text) is not None


def in_variable(name: str, value: str) -> bool:
    """Whether an environment variable looks like one: by its value's form, or by its name and a value that could be."""
    if in_value(value):
        return True
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    named = any(word in _SECRET_WORD for word in words) or any(
        word == "key" and before in _KEY_BEFORE for before, word in zip(words, words[1:], strict=False)
    )
    if not named or not value:
        return False
    if _ALWAYS.intersection(words) and words[-1] not in _POINTS_ELSEWHERE:
        return True
    return not (words[-1] in _POINTS_ELSEWHERE and "key" not in words) and _could_be(value)


def _could_be(value: str) -> bool:
    """Long enough, and neither a path, a number, a truth, nor a special token such as <|endoftext|>."""
    innocent = re.fullmatch(
        r"[./~].*|[\d.,_+-]+|true|false|yes|no|on|off|none|null|<.*>|\[.*\]|\$\(.*\)", value, re.I | re.S
    )
    return innocent is None and len(value) >= _SHORTEST


def is_private(path: KeyPath) -> bool:
    """Whether values below this path are never repeated, whatever they look like."""
    return not _PRIVATE_BLOCKS.isdisjoint(path)


def strings(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every text in plain data, with its path."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from strings(below, (*path, key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from strings(below, (*path, index))
    elif isinstance(value, str):
        yield path, value
