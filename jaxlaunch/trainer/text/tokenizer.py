"""The byte tokenizer, and the tokenizers of Hugging Face folders.

tokenizer.json is read with the package `tokenizers` of the extra [text]; transformers is not
needed. The names of added tokens in a text are encoded as these tokens. Unless stated otherwise, no
special tokens are added around a text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from etils import epath

from jaxlaunch import installation
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.checkpoint import saved_files
from jaxlaunch.trainer.checkpoint.saved_files import TOKENIZER_FILE as MAIN
from jaxlaunch.trainer.checkpoint.saved_files import TOKENIZER_FILES as FILES
from jaxlaunch.trainer.errors import SpecError

# Name of the tokenizer whose tokens are bytes.
BYTE_TOKENIZER = "bytes"
# Keys of the special tokens in a tokenizer's configuration.
SPECIAL_TOKEN_KEYS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
REPLACEMENT_BYTES = "\ufffd".encode()

Ids = npt.NDArray[np.int32]
# Ranges of characters in a text.
Spans = Sequence[tuple[int, int]]
# The ids, and which of them are in a span, both [T].
Encoding = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]


class AddedToken(NamedTuple):
    """A token whose name a tokenizer recognizes in a text."""

    id: int
    # Whether decoding omits the token.
    special: bool


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    name = BYTE_TOKENIZER
    vocab = 256
    bos: int | None = None
    eos: int | None = None
    ends: tuple[int, ...] = ()
    prefix: int | None = None
    digest = BYTE_TOKENIZER
    files: Mapping[str, bytes] = {}
    config: Mapping[str, Any] = {}
    added_tokens: Mapping[str, AddedToken] = {}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the bytes of each text."""
        return [list(text.encode()) for text in texts]

    def encode_whole(self, texts: Sequence[str], length: int) -> tuple[list[Ids], int]:
        """Return up to `length` bytes of each text, and the number of texts that are longer."""
        ids_N = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
        return [ids[:length] for ids in ids_N], sum(len(ids) > length for ids in ids_N)

    def encode_spans(self, texts: Sequence[str], spans: Sequence[Spans]) -> list[Encoding]:
        """Return the bytes of each text, and whether each is in the text's only span, both [T]."""
        encodings = []
        for text, (span,) in zip(texts, spans, strict=True):
            ids_T = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
            first, last = (len(text[:index].encode()) for index in span)
            index_T = np.arange(len(ids_T))
            encodings.append((ids_T, (index_T >= first) & (index_T < last)))
        return encodings

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Decode bytes, with U+FFFD for invalid UTF-8 and for ids that are not bytes."""
        pieces = (bytes([token]) if token < self.vocab else REPLACEMENT_BYTES for token in ids)
        return b"".join(pieces).decode(errors="replace")

    @property
    def byte_counts(self) -> npt.NDArray[np.int64]:
        """The number of bytes of text of each token, [vocab]."""
        return np.ones(self.vocab, np.int64)


class HuggingFaceTokenizer:
    """The tokenizer of a folder or a tokenizer.json. Raises SpecError if it cannot be read."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self.name, self.files = name, files
        self._tokenizer = _parse_tokenizer(name, files[MAIN])
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not self._ids:
            raise SpecError(f"data.tokenizer = {name}: its vocabulary is empty")
        self.vocab = max(self._ids.values()) + 1
        # Configuration of the special tokens; tokenizer_config.json is the newer of the two files.
        self.config: dict[str, Any] = {}
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            try:
                keys = json.loads(files.get(file, b"{}"))
            except ValueError as error:
                problem = f"{file} cannot be read: {error}"
                raise SpecError(f"data.tokenizer = {name}: {problem}") from None
            if not isinstance(keys, dict):
                raise SpecError(f"data.tokenizer = {name}: {file} is not a block of keys")
            self.config |= {key: value for key, value in keys.items() if value is not None}
        self.eos, self.bos = self._special_id("eos_token"), self._special_id("bos_token")
        if not self._starts_with_bos():
            self.bos = None
        ids = json.dumps([self.bos, self.eos]).encode()
        self.digest = hashlib.sha256(files[MAIN] + ids).hexdigest()[:12]
        # Tokens that end a generated text.
        self.ends: tuple[int, ...] = () if self.eos is None else (self.eos,)
        # The token to place before a text whose every token is to be scored.
        self.prefix = self.eos if self.bos is None else self.bos

    def encode(self, text: str) -> list[int]:
        """Encode a text, with the bos token if the tokenizer uses one."""
        return [*([] if self.bos is None else [self.bos]), *self.encode_batch([text])[0]]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without special tokens around them."""
        encodings = self._encode_texts(self._tokenizer.encode_batch_fast, texts)
        return [encoding.ids for encoding in encodings]

    def encode_whole(self, texts: Sequence[str], length: int) -> tuple[list[Ids], int]:
        """Encode texts with the special tokens around them, cut to `length` tokens.

        Returns the ids [T] of each text, and the number of texts that were longer.
        """
        encode = self._tokenizer.encode_batch_fast
        self._tokenizer.enable_truncation(length)
        try:
            encodings = self._encode_texts(encode, texts, add_special_tokens=True)
        finally:
            self._tokenizer.no_truncation()
        cut = sum(bool(encoding.overflowing) for encoding in encodings)
        return [np.array(encoding.ids, np.int32) for encoding in encodings], cut

    def encode_spans(self, texts: Sequence[str], spans: Sequence[Spans]) -> list[Encoding]:
        """Encode texts, and return whether each token is in a span of its text, both [T]."""
        encodings = self._encode_texts(self._tokenizer.encode_batch, texts)
        return [
            (np.array(encoding.ids, np.int32), _tokens_in_spans(encoding.offsets, text_spans))
            for encoding, text_spans in zip(encodings, spans, strict=True)
        ]

    def _encode_texts(
        self,
        encode: Callable[..., Sequence[Any]],
        texts: Sequence[str],
        add_special_tokens: bool = False,
    ) -> Sequence[Any]:
        """Call `encode`. Raises SpecError for a text that the vocabulary cannot represent."""
        try:
            return encode(list(texts), add_special_tokens=add_special_tokens)
        except Exception as error:
            # The library raises a bare Exception for errors in Rust.
            if len(texts) > 1:
                return [self._encode_texts(encode, [text], add_special_tokens)[0] for text in texts]
            problem = f"has no token for a part of the text {texts[0][:40]!r}"
            raise SpecError(f"data.tokenizer = {self.name} {problem}: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @functools.cached_property
    def byte_counts(self) -> npt.NDArray[np.int64]:
        """The number of bytes of text of each token, [vocab], 0 for special tokens."""
        content = json.loads(self.files[MAIN])
        stages = json.dumps([content.get("decoder"), content.get("pre_tokenizer")])
        is_bytes = '"ByteLevel"' in stages
        prefix = content["model"].get("continuing_subword_prefix") or ""
        suffix = content["model"].get("end_of_word_suffix") or ""
        added = self._tokenizer.get_added_tokens_decoder()
        counts = np.zeros(self.vocab, np.int64)
        for token, token_id in self._ids.items():
            if token_id in added:
                counts[token_id] = 0 if added[token_id].special else len(token.encode())
            elif is_bytes:
                # Each character stands for one byte.
                counts[token_id] = len(token)
            else:
                counts[token_id] = _count_bytes(token, prefix, suffix)
        return counts

    @property
    def added_tokens(self) -> dict[str, AddedToken]:
        """The added tokens by their names."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {token.content: AddedToken(token_id, token.special) for token_id, token in added}

    @functools.cached_property
    def special_bytes(self) -> npt.NDArray[np.int64]:
        """The number of bytes of the name of each special token, [vocab], 0 for other tokens."""
        counts = np.zeros(self.vocab, np.int64)
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            if token.special:
                counts[token_id] = len(token.content.encode())
        return counts

    def _special_id(self, key: str) -> int | None:
        value = self.config.get(key)
        if value is None:
            return None
        token, prefix = token_text(value), f"data.tokenizer = {self.name}: its {key}"
        if not isinstance(token, str):
            raise SpecError(f"{prefix} is {json.dumps(value)[:80]}, not a text")
        if token not in self._ids:
            raise SpecError(
                f"{prefix} {token!r} is not in its {MAIN}; use the files of one tokenizer"
            )
        return self._ids[token]

    def _starts_with_bos(self) -> bool:
        """Return whether texts begin with bos: by the configuration, or else the post-processor."""
        adds_bos = self.config.get("add_bos_token")
        if adds_bos is not None and not isinstance(adds_bos, bool):
            problem = f"its add_bos_token is {adds_bos!r}, not true or false"
            raise SpecError(f"data.tokenizer = {self.name}: {problem}")
        if self.bos is None or adds_bos is not None:
            return self.bos is not None and bool(adds_bos)
        special_ids: list[int] = self._tokenizer.encode("", add_special_tokens=True).ids
        return special_ids[:1] == [self.bos]


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


@functools.lru_cache(maxsize=8)
def load_tokenizer(name: str) -> Tokenizer:
    """Load `bytes`, or the tokenizer of a folder, file or URL. Raises SpecError, StorageError."""
    if name == BYTE_TOKENIZER:
        return ByteTokenizer()
    storage: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if remote.is_remote(name):
        remote.check_url("train.data.tokenizer", name)
        storage = remote.convert_errors(f"reading train.data.tokenizer = {name}", SpecError)
    with storage:
        location = epath.Path(name)
        main_file = location / MAIN if location.is_dir() else location
        if not main_file.exists():
            hint = "it does not exist"
            if location.is_dir():
                names = sorted(path.name for path in location.iterdir())[:5]
                hint = f"it holds {', '.join(names) or 'nothing'}"
            raise SpecError(
                f"data.tokenizer = {name} is neither bytes nor a folder or file of a {MAIN}; "
                f"{hint}; transformers' save_pretrained of a fast tokenizer writes {MAIN}"
            )
        other_files = saved_files.read_tokenizer(main_file.parent, FILES[1:])
        files = {MAIN: bytes(main_file.read_bytes()), **other_files}
    return HuggingFaceTokenizer(name, files)


def add_ends(
    tokenizer: Tokenizer, ids_T: npt.NDArray[np.int32], is_target_T: npt.NDArray[np.bool_]
) -> Encoding:
    """Add the bos token, and the eos token as a target, to a text that lacks them."""
    ends = [tokenizer.bos], [tokenizer.eos]
    bos_ids, eos_ids = ([end for end in side if end is not None] for side in ends)
    if len(ids_T) and ids_T[-1] == tokenizer.eos:
        eos_ids = []
    padding = (len(bos_ids), len(eos_ids))
    return (
        np.concatenate([bos_ids, ids_T, eos_ids]).astype(np.int32),
        np.pad(is_target_T, padding, constant_values=(False, True)),
    )


def find_tokenizer(
    vocab: int, data: Mapping[str, Any] | None, files: Mapping[str, bytes], location: str
) -> Tokenizer | None:
    """Return the tokenizer of `files`, or the byte tokenizer if `data` or `vocab` imply it.

    Returns None if the tokenizer is unknown or the package `tokenizers` is not installed. Raises
    SpecError for files that cannot be read.
    """
    if MAIN in files:
        if importlib.util.find_spec("tokenizers"):
            return HuggingFaceTokenizer(location, files)
        return None
    if data is not None and data.get("tokenizer") is not None:
        return ByteTokenizer() if data["tokenizer"] == BYTE_TOKENIZER else None
    return ByteTokenizer() if vocab == ByteTokenizer.vocab else None


def token_text(token: Any) -> Any:
    """Return the name of a special token, which is configured as a string or as a block."""
    return token.get("content") if isinstance(token, Mapping) else token


def check_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    """Raise SpecError if the model's vocabulary is smaller than the tokenizer's."""
    if vocab < tokenizer.vocab:
        problem = f"is less than the {tokenizer.vocab} of data.tokenizer = {tokenizer.name}"
        hint = f"make it {tokenizer.vocab} or more"
        raise SpecError(f"train.model.vocab = {vocab} {problem}; {hint}")


def _parse_tokenizer(name: str, text: bytes) -> Any:
    try:
        import tokenizers
    except ImportError:
        hint = installation.install_hint("text")
        raise SpecError(f"data.tokenizer = {name} needs the package tokenizers: {hint}") from None
    try:
        return tokenizers.Tokenizer.from_str(text.decode())
    except Exception as error:
        # The library raises a bare Exception for errors in Rust.
        hint = f"; name the folder of a {MAIN}: no other file is read"
        hint = hint if name.endswith(".model") else ""
        raise SpecError(f"data.tokenizer = {name}: {MAIN} cannot be read: {error}{hint}") from None


def _count_bytes(token: str, prefix: str, suffix: str) -> int:
    """Count the bytes of text of a token: 1 for `<0x0A>`, 1 for `▁`, 0 for a prefix `##`."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    token = token.removeprefix(prefix)
    token = token.removesuffix(suffix) + " " if suffix and token.endswith(suffix) else token
    return len(token.replace("\u2581", " ").encode())


def _tokens_in_spans(offsets: Sequence[tuple[int, int]], spans: Spans) -> npt.NDArray[np.bool_]:
    """Return for each token whether one of its characters is in a span.

    `offsets` are the first and last characters of the tokens. A token without characters, such as a
    space whose offsets are trimmed, is in the spans that end at its position.
    """
    first_T, last_T = np.array(offsets, np.int64).reshape(-1, 2).T
    is_inside_T = np.zeros(len(first_T), np.bool_)
    for start, end in spans:
        is_inside_T |= (last_T > start) & ((first_T < end) | (last_T <= end))
    return is_inside_T
