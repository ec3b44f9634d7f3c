"""Text to tokens and back, of a model that has a tokenizer: bytes, or the tokenizer.json that it was trained with."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxlaunch.trainer.checkpoint.saved_tokenizer import MAIN
from jaxlaunch.trainer.text import tokenizer as texts

LOST = "\ufffd".encode()


class Tokenizer(Protocol):
    """What generation needs of one."""

    ends: tuple[int, ...]  # tokens that end a text
    prefix: int | None  # stands before a text of which every token is scored: bos, else eos

    def encode(self, text: str, /) -> list[int]:
        """The tokens of a text, after the one that begins it where the tokenizer puts one."""

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of tokens; a character that is not whole becomes U+FFFD."""


class Bytes:
    """A token is a byte of UTF-8."""

    ends: tuple[int, ...] = ()
    prefix: int | None = None

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes; a token that is none is U+FFFD too."""
        whole = b"".join(bytes([each]) if each < texts.Bytes.vocab else LOST for each in ids)
        return whole.decode(errors="replace")


class HuggingFace:
    """The tokenizer of these files. Raises SpecError where they cannot be read."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self._of = texts.HuggingFace(name, files)
        self.ends: tuple[int, ...] = () if self._of.eos is None else (self._of.eos,)
        self.prefix: int | None = self._of.eos if self._of.bos is None else self._of.bos

    def encode(self, text: str) -> list[int]:
        """The tokens of the text, after the bos token where the tokenizer puts one."""
        return [*([] if self._of.bos is None else [self._of.bos]), *self._of.encode_batch([text])[0]]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, special ones left out."""
        return self._of.decode(ids)


def of(vocab: int, data: Mapping[str, Any] | None, files: Mapping[str, bytes], place: str) -> Tokenizer | None:
    """The tokenizer whose `files` are at `place`; else bytes, where the training's `data` or a `vocab` of 256 say so.

    None where the tokens are another's, and where the package `tokenizers` is not installed. Raises SpecError for files
    that are none.
    """
    if MAIN in files:
        return HuggingFace(place, files) if importlib.util.find_spec("tokenizers") else None
    if data is not None and data.get("tokenizer") is not None:
        return Bytes() if data["tokenizer"] == texts.BYTES else None
    return Bytes() if vocab == texts.Bytes.vocab else None
