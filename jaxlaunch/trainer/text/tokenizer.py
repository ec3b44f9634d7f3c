"""Tokenizers: a token is a byte, or what the tokenizer.json of a Hugging Face folder makes of a text.

Read with the package `tokenizers`, of the extra [text]; transformers is not needed. Special tokens are never made of
text that looks like one's name alone: what the tokenizer's own added tokens say is done, and nothing is put around.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from etils import epath

from jaxlaunch import installation
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.checkpoint import saved_files
from jaxlaunch.trainer.checkpoint.saved_files import TOKENIZER_FILE as MAIN
from jaxlaunch.trainer.checkpoint.saved_files import TOKENIZER_FILES as FILES
from jaxlaunch.trainer.errors import SpecError

BYTES = "bytes"  # the tokenizer whose tokens are bytes
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))  # keys of a folder's


LOST = "\ufffd".encode()


class Bytes:
    """A token is a byte of the text's UTF-8."""

    name = BYTES
    vocab = 256
    bos: int | None = None
    eos: int | None = None
    ends: tuple[int, ...] = ()
    prefix: int | None = None
    digest = BYTES
    files: Mapping[str, bytes] = {}
    config: Mapping[str, Any] = {}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of each text."""
        return [list(text.encode()) for text in texts]

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]:
        """The bytes of each text, and which of them are of its one span, both [T]."""
        found = []
        for text, (span,) in zip(texts, spans, strict=True):
            first, last = (len(text[:at].encode()) for at in span)
            place_T = np.arange(len(ids := text.encode()))
            found.append((np.frombuffer(ids, np.uint8).astype(np.int32), (place_T >= first) & (place_T < last)))
        return found

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these bytes; what is not UTF-8, or not a byte, becomes U+FFFD."""
        whole = b"".join(bytes([each]) if each < self.vocab else LOST for each in ids)
        return whole.decode(errors="replace")

    @property
    def byte_counts(self) -> npt.NDArray[np.int64]:
        """Bytes of text that each token stands for, [vocab]."""
        return np.ones(self.vocab, np.int64)


class HuggingFace:
    """The tokenizer of a folder or of a tokenizer.json. Raises SpecError where it cannot be read."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self.name, self.files = name, files
        self._tokenizer = _parsed(name, files[MAIN])
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not self._ids:
            raise SpecError(f"data.tokenizer = {name}: its vocabulary is empty")
        self.vocab = max(self._ids.values()) + 1
        self.config: Mapping[str, Any] = _config(name, files)
        self.eos, self.bos = self._special("eos_token"), self._special("bos_token")
        if not self._puts_bos():
            self.bos = None
        named = json.dumps([self.bos, self.eos]).encode()
        self.digest = hashlib.sha256(files[MAIN] + named).hexdigest()[:12]
        self.ends: tuple[int, ...] = () if self.eos is None else (self.eos,)  # tokens that end a text
        # What stands before a text of which every token is scored.
        self.prefix = self.eos if self.bos is None else self.bos

    def encode(self, text: str) -> list[int]:
        """The ids of the text, after the bos token where the tokenizer puts one."""
        return [*([] if self.bos is None else [self.bos]), *self.encode_batch([text])[0]]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens around it: those of `tokenizers`' own encode_batch."""
        return [encoding.ids for encoding in self._encoded(self._tokenizer.encode_batch_fast, texts)]

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]:
        """Ids of each text as `encode_batch`, and which of them stand for a character of its spans, both [T]."""
        encodings = self._encoded(self._tokenizer.encode_batch, texts)
        pairs = zip(encodings, spans, strict=True)
        return [(np.array(each.ids, np.int32), _within(each.offsets, its)) for each, its in pairs]

    def _encoded(self, encode: Callable[..., Sequence[Any]], texts: Sequence[str]) -> Sequence[Any]:
        """What `encode` makes of the texts. Raises SpecError where the tokenizer cannot: some lack an unknown token."""
        try:
            return encode(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises what its Rust raises, a bare Exception
            if len(texts) > 1:
                return [each for text in texts for each in self._encoded(encode, [text])]
            raise SpecError(
                f"data.tokenizer = {self.name} has no token for a part of the text {texts[0][:40]!r}: {error}"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @functools.cached_property
    def byte_counts(self) -> npt.NDArray[np.int64]:
        """Bytes of text that each token stands for, [vocab]; 0 of a special token."""
        described = json.loads(self.files[MAIN])
        is_bytes = '"ByteLevel"' in json.dumps([described.get("decoder"), described.get("pre_tokenizer")])
        prefix = described["model"].get("continuing_subword_prefix") or ""
        suffix = described["model"].get("end_of_word_suffix") or ""
        added = self._tokenizer.get_added_tokens_decoder()
        counts = np.zeros(self.vocab, np.int64)
        for token, number in self._ids.items():
            if number in added:
                counts[number] = 0 if added[number].special else len(token.encode())
            elif is_bytes:  # each character stands for a byte
                counts[number] = len(token)
            else:
                counts[number] = _bytes_of(token, prefix, suffix)
        return counts

    @functools.cached_property
    def special_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of the name of each special token, [vocab]; 0 of the others."""
        counts = np.zeros(self.vocab, np.int64)
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            if token.special:
                counts[number] = len(token.content.encode())
        return counts

    def _special(self, key: str) -> int | None:
        """The id of a special token that the folder names; None where it names none."""
        given = self.config.get(key)
        if given is None:
            return None
        token = content(given)
        if not isinstance(token, str):
            raise SpecError(f"data.tokenizer = {self.name}: its {key} is {json.dumps(given)[:80]}, not a text")
        if token not in self._ids:
            raise SpecError(f"data.tokenizer = {self.name}: its {key} {token!r} is not in its {MAIN}")
        return self._ids[token]

    def _puts_bos(self) -> bool:
        """Whether a text begins with the bos token: the folder says so, or its post-processor puts one there."""
        says = self.config.get("add_bos_token")
        if says is not None and not isinstance(says, bool):
            raise SpecError(f"data.tokenizer = {self.name}: its add_bos_token is {says!r}, not true or false")
        if self.bos is None or says is not None:
            return self.bos is not None and bool(says)
        around: list[int] = self._tokenizer.encode("", add_special_tokens=True).ids
        return around[:1] == [self.bos]


Tokenizer = Bytes | HuggingFace


@functools.lru_cache(maxsize=8)
def load(name: str) -> Tokenizer:
    """The tokenizer `name`: `bytes`, or a folder or file here or in a bucket. Raises SpecError, StorageError."""
    return Bytes() if name == BYTES else HuggingFace(name, _files(name))


def of(vocab: int, data: Mapping[str, Any] | None, files: Mapping[str, bytes], place: str) -> Tokenizer | None:
    """The tokenizer whose `files` are at `place`; else bytes, where the training's `data` or a `vocab` of 256 say so.

    None where the tokens are another's, and where the package `tokenizers` is not installed. Raises SpecError for files
    that cannot be read.
    """
    if MAIN in files:
        return HuggingFace(place, files) if importlib.util.find_spec("tokenizers") else None
    if data is not None and data.get("tokenizer") is not None:
        return Bytes() if data["tokenizer"] == BYTES else None
    return Bytes() if vocab == Bytes.vocab else None


def content(token: Any) -> Any:
    """The text of a special token as a folder's config writes it: alone, or in a block with how it is matched."""
    return token.get("content") if isinstance(token, Mapping) else token


def fits(tokenizer: Tokenizer, vocab: int) -> None:
    """Raises SpecError where the model has fewer tokens than the tokenizer."""
    if vocab < tokenizer.vocab:
        raise SpecError(
            f"train.model.vocab = {vocab} is less than the {tokenizer.vocab} of data.tokenizer = {tokenizer.name}; "
            f"make it {tokenizer.vocab} or more"
        )


def _files(name: str) -> dict[str, bytes]:
    if remote.is_remote(name):
        remote.check("train.data.tokenizer", name)
        with remote.storage(f"reading train.data.tokenizer = {name}", SpecError):
            return _read(name)
    return _read(name)


def _read(name: str) -> dict[str, bytes]:
    place = epath.Path(name)
    main = place / MAIN if place.is_dir() else place
    if not main.exists():
        there = "nothing of that name is there"
        if place.is_dir():
            there = f"it holds {', '.join(sorted(each.name for each in place.iterdir())[:5]) or 'nothing'}"
        hint = f"{there}; transformers' save_pretrained of a fast tokenizer writes {MAIN}"
        raise SpecError(f"data.tokenizer = {name} is neither bytes nor a folder or file of a {MAIN}; {hint}")
    return {MAIN: bytes(main.read_bytes()), **saved_files.read_tokenizer(main.parent, FILES[1:])}


def _parsed(name: str, text: bytes) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise SpecError(f"data.tokenizer = {name} needs the package tokenizers: {installation.hint('text')}") from None
    try:
        return tokenizers.Tokenizer.from_str(text.decode())
    except Exception as error:  # the library raises what its Rust raises, a bare Exception
        hint = f"; name the folder of a {MAIN}: no other file is read" if name.endswith(".model") else ""
        raise SpecError(f"data.tokenizer = {name}: {MAIN} cannot be read: {error}{hint}") from None


def _config(name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    """What the folder says of its special tokens; tokenizer_config.json is the newer of the two files."""
    found: dict[str, Any] = {}
    for each in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            given = json.loads(files.get(each, b"{}"))
        except ValueError as error:
            raise SpecError(f"data.tokenizer = {name}: {each} cannot be read: {error}") from None
        if not isinstance(given, dict):
            raise SpecError(f"data.tokenizer = {name}: {each} is not a block of keys")
        found |= {key: value for key, value in given.items() if value is not None}
    return found


def _within(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Which tokens, of characters from and to, have one in a span; a token of none is of those that end where it is.

    Such are spaces, where the tokenizer trims its offsets.
    """
    first_T, last_T = np.array(offsets, np.int64).reshape(-1, 2).T
    found_T = np.zeros(len(first_T), np.bool_)
    for start, end in spans:
        found_T |= (last_T > start) & ((first_T < end) | (last_T <= end))
    return found_T


def _bytes_of(token: str, prefix: str, suffix: str) -> int:
    """Bytes of a token that is written as characters: `<0x0A>` is one, `▁` a space, `##` in front is nothing."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    token = token.removeprefix(prefix) if prefix else token
    token = token.removesuffix(suffix) + " " if suffix and token.endswith(suffix) else token
    return len(token.replace("\u2581", " ").encode())
