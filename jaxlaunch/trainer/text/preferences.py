"""Preference data: pairs of a chosen and a rejected text after the same prompt.

`chosen` and `rejected` are texts, or messages that the tokenizer's template renders. The prompt is
`prompt` or `messages`, or else the common beginning of both. A row with `system` or `question` is a
conversation, whose texts are messages.

Every process tokenizes all pairs when a run starts and keeps them in memory, with 5 bytes per
token.

T tokens, P pairs, K = 2 texts of a pair, L length.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.data.source import DataSource, Split
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.spec import Text
from jaxlaunch.trainer.text import chat_notes, chats, documents, recipe, tokenizer
from jaxlaunch.trainer.text.chat_notes import NoteKind, Notes
from jaxlaunch.trainer.text.documents import Document, UnfitRowError, Values, describe_value
from jaxlaunch.trainer.text.tokenizer import Encoding, Tokenizer

CHOSEN, REJECTED = "chosen", "rejected"
# Fields of the user's message, and of the system message before it.
QUESTION, SYSTEM = "question", "system"
# Fields of the prompt. The first one that a row has is used.
PROMPTS = ("prompt", "messages", QUESTION)
ROW_FIELDS = (REJECTED, *PROMPTS, SYSTEM, *chats.OPTIONAL_FIELDS)
# Number of pairs that are tokenized at once.
BATCH_PAIRS = 512


class Pair(NamedTuple):
    """A chosen and a rejected text. Their `spans`, which are after the prompt, are predicted."""

    chosen: Document
    rejected: Document
    # Whether a template wrote the tokens that begin and end the texts.
    is_chat: bool


class TokenizedPairs(NamedTuple):
    """The pairs of files. Texts 2 p and 2 p + 1 are the chosen and the rejected text of pair p."""

    # Tokens of all texts, concatenated.
    tokens: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    # End of each text in `tokens`.
    ends: npt.NDArray[np.int64]
    # Hash of each pair's texts or group.
    key_P: splits.Keys
    # Number of pairs that were left out because a text is too long.
    too_long: int
    # Number of pairs that were left out because a text has nothing to predict.
    empty: int
    # Whether a template wrote some of the texts.
    has_chats: bool


def open_source(data: Text, length: int, split: Split) -> Pairs | None:
    """Open the pairs of a split for rows of `length` targets, None if nothing is held out.

    Raises DataError naming file and row, and SpecError if the tokenizer or its template cannot be
    read.
    """
    has_eval_files = data.eval_path is not None
    if split == "eval" and not has_eval_files and not data.eval_split:
        return None
    if data.eval_path is not None and split == "eval":
        paths = tuple(documents.find_files(data.eval_path, "eval_path"))
    else:
        paths = tuple(documents.find_files(data.path))
    digest = recipe.digest_files(paths, Path(recipe.prepared_root(data)))
    tokenized = _read_pairs(paths, digest, data.tokenizer, length, data.group)
    count = len(tokenized.key_P)
    share = 0.0 if has_eval_files else data.eval_split
    is_held_out_P = splits.choose_held_out(
        tokenized.key_P, share, data.split_seed, has_groups=data.group is not None
    )
    is_selected_P = is_held_out_P if split == "eval" and not has_eval_files else ~is_held_out_P
    pair_indices = np.flatnonzero(is_selected_P)
    if not len(pair_indices):
        raise DataError(
            f"data.path: {paths[0]} and what else matches hold {count} pairs that fit into "
            f"train.model.length = {length} ({tokenized.too_long} are longer, {tokenized.empty} "
            f"have no token to predict), and data.eval_split = {data.eval_split} leaves the "
            f"{split} split none of them"
        )
    tokenizer_digest = tokenizer.load_tokenizer(data.tokenizer).digest
    part_label = str(data.eval_split)
    if share:
        part_label = splits.split_part(
            is_held_out_P, split, share=share, seed=data.split_seed, group=data.group
        ).label
    identity = f"{split}, {part_label} of sha256 {digest}, tokenizer {tokenizer_digest}"
    if tokenized.has_chats:
        identity += f", template {chats.load_chats(data.tokenizer).digest}"
    pairs = Pairs(tokenized, pair_indices, length, identity)
    if split == "eval" and share and data.group is None:
        pairs.notes = splits.divided_copies_notes(tokenized.key_P, is_held_out_P)
    return pairs


class Pairs(DataSource):
    """A source of pairs: `tokens` int32 [K, L + 1], `mask` float32 [K, L], `length` int32 [K]."""

    name = "preferences"

    def __init__(
        self,
        tokenized: TokenizedPairs,
        pair_indices: npt.NDArray[np.int64],
        length: int,
        identity: str,
    ) -> None:
        self._tokenized, self._pair_indices = tokenized, pair_indices
        self._length, self._identity = length, identity

    def __len__(self) -> int:
        return len(self._pair_indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens_KT = np.zeros((2, self._length + 1), np.int32)
        mask_KL = np.zeros((2, self._length), np.float32)
        first = 2 * int(self._pair_indices[index])
        ends = self._tokenized.ends
        counts = []
        for row, text in enumerate((first, first + 1)):
            span = slice(ends[text - 1] if text else 0, ends[text])
            tokens = self._tokenized.tokens[span]
            tokens_KT[row, : len(tokens)] = tokens
            mask_KL[row, : len(tokens) - 1] = self._tokenized.is_target[span][1:]
            counts.append(len(tokens))
        return {"tokens": tokens_KT, "mask": mask_KL, "length": np.array(counts, np.int32)}

    def fingerprint(self) -> str:
        """Return the split, digests of files and tokenizer, and the number and length of pairs."""
        return f"preferences {self._identity}, {len(self)} pairs of {self._length}"


def parse_pair(load_chats: Callable[[], chats.ChatTemplates], values: Values) -> Pair:
    """Parse the two texts of a row. Raises UnfitRowError."""
    for field in (CHOSEN, REJECTED):
        if values.get(field) is None:
            names = ", ".join(key for key in values if values[key] is not None)
            raise UnfitRowError(f"it has no {field!r}; it has {names}")
    prompts = [key for key in PROMPTS if values.get(key) is not None]
    for field in (CHOSEN, REJECTED, *prompts):
        if not isinstance(values[field], str | list):
            kind = describe_value(values[field])
            raise UnfitRowError(f"its {field!r} is {kind}, neither a text nor a list of messages")
    prompt = values[prompts[0]] if prompts else None
    system = values.get(SYSTEM) or None
    if system is not None and not isinstance(system, str):
        raise UnfitRowError(f"its {SYSTEM!r} is {describe_value(system)}, not a text")
    is_conversation = system is not None or prompts[:1] == [QUESTION]
    if is_conversation or any(
        isinstance(values[key], list) for key in (CHOSEN, REJECTED, *prompts)
    ):
        pair = _render_messages(_load_chats(load_chats, is_conversation), system, prompt, values)
    else:
        texts = [values[CHOSEN], values[REJECTED]]
        if prompt is None:
            prompt = os.path.commonprefix(texts)
            texts = [text.removeprefix(prompt) for text in texts]
        pair = Pair(_join_texts(prompt, texts[0]), _join_texts(prompt, texts[1]), is_chat=False)
    if pair.chosen[:2] == pair.rejected[:2]:
        problem = "are the same text: neither can be the better one"
        raise UnfitRowError(f"its 'chosen' and 'rejected' {problem}")
    read_fields = {CHOSEN, *prompts[:1], SYSTEM, REJECTED, *chats.OPTIONAL_FIELDS}
    unread = [key for key in values if key not in read_fields and values[key] is not None]
    notes = Counter((NoteKind.UNREAD_FIELD, key) for key in unread)
    return pair._replace(chosen=pair.chosen._replace(notes=Counter(pair.chosen.notes) + notes))


def _load_chats(
    load_chats: Callable[[], chats.ChatTemplates], is_conversation: bool
) -> chats.ChatTemplates:
    try:
        return load_chats()
    except SpecError as error:
        if not is_conversation:
            raise
        hint = "name it prompt if it is the beginning of a text"
        raise SpecError(
            f"a row with {SYSTEM!r} or {QUESTION!r} is a conversation ({hint}), and {error}"
        ) from None


def _join_texts(prompt: str, text: str) -> Document:
    full_text, replaced = documents.replace_surrogates(prompt + text)
    return Document(full_text, replaced, ((len(prompt), len(full_text)),))


def _render_messages(
    chat: chats.ChatTemplates, system: str | None, prompt: Any, values: Values
) -> Pair:
    prompt_messages = [] if prompt is None else _as_messages("user", prompt)
    answers = [_as_messages(chats.ASSISTANT, values[key]) for key in (CHOSEN, REJECTED)]
    if prompt_messages and _contain_prompt(
        prompt_messages, answers, is_text=isinstance(prompt, str)
    ):
        prompt_messages = []
    skipped = len(prompt_messages)
    if not prompt_messages:
        is_shared = [chosen == rejected for chosen, rejected in zip(*answers, strict=False)]
        skipped = [*is_shared, False].index(False)
    if system is not None:
        role, content = _role_and_content((prompt_messages or answers[0])[:1])
        if role == SYSTEM and content != system:
            raise UnfitRowError(
                f"its {SYSTEM!r} differs from its first message, a system message; keep one of them"
            )
        if role != SYSTEM:
            prompt_messages = [{"role": SYSTEM, "content": system}, *prompt_messages]
            skipped += 1
    texts: list[Document] = []
    for field, messages in zip((CHOSEN, REJECTED), answers, strict=True):
        try:
            extras = chats.parse_extras(values)
            texts.append(chat.render_document([*prompt_messages, *messages], *extras, skipped))
        except UnfitRowError as error:
            raise UnfitRowError(f"its {field!r}: {error}") from None
    chosen, rejected = texts
    return Pair(chosen, rejected, is_chat=True)


def _contain_prompt(prompt: list[Any], answers: list[list[Any]], *, is_text: bool) -> bool:
    """Return whether both answers are conversations that contain the messages of the prompt.

    Raises UnfitRowError if they begin with a question and do not contain a prompt that is a text.
    """
    if any(_role_and_content(answer[:1])[0] not in (SYSTEM, "user") for answer in answers):
        return False
    contents = [[_role_and_content([message]) for message in answer] for answer in answers]
    if all(_role_and_content([message]) in content for message in prompt for content in contents):
        return True
    if is_text:
        hint = "leave the prompt out"
        problem = f"begin with a message of the role {contents[0][0][0]!r}"
        raise UnfitRowError(
            f"its {CHOSEN!r} and {REJECTED!r} {problem}, and none of their messages is its prompt; "
            f"{hint}"
        )
    return False


def _role_and_content(messages: Sequence[Any]) -> tuple[Any, Any]:
    """Return the role and the content of the first message, None if there is no message."""
    message = messages[0] if messages and isinstance(messages[0], dict) else {}
    return message.get("role"), message.get("content")


def _as_messages(role: str, value: str | list[Any]) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


# Training and evaluation may read the same files.
@functools.lru_cache(maxsize=2)
def _read_pairs(
    paths: tuple[str, ...], digest: str, name: str, length: int, group: str | None
) -> TokenizedPairs:
    documents.check_rows(paths, "preferences")

    def make_pair(values: Values) -> tuple[Pair, int]:
        key = splits.hash_value([values.get(field) for field in (CHOSEN, *ROW_FIELDS)])
        if group is not None:
            key, values = documents.split_group(values, group, (CHOSEN, *ROW_FIELDS))
        return parse_pair(partial(chats.load_chats, name), values), key

    parts = list(itertools.chain.from_iterable(documents.split_units(paths)))
    fields = ROW_FIELDS if group is None else (*ROW_FIELDS, group)
    rows = (documents.read_rows(part, CHOSEN, make_pair, fields) for part in parts)
    pairs = (pair for pair, _ in itertools.chain.from_iterable(rows))
    texts: list[Encoding] = []
    keys: list[int] = []
    too_long = empty = 0
    has_chats = False
    notes = documents.note_columns(parts, (CHOSEN, *fields))
    while batch := list(itertools.islice(pairs, BATCH_PAIRS)):
        for pair, _ in batch:
            has_chats |= pair.is_chat
            notes.update(pair.chosen.notes)
            notes.update(pair.rejected.notes)
        encoded = _tokenize_pairs([pair for pair, _ in batch], tokenizer.load_tokenizer(name))
        for (_, key), pair_encodings in zip(batch, encoded, strict=True):
            if max(len(ids) for ids, _ in pair_encodings) > length + 1:
                too_long += 1
            elif not all(is_target[1:].any() for _, is_target in pair_encodings):
                empty += 1
            else:
                texts += pair_encodings
                keys.append(key)
    notes.pop((NoteKind.UNREAD_FIELD, group or ""), None)
    _print_notes(notes, too_long, empty, total=too_long + empty + len(keys))
    ends = np.cumsum([len(ids) for ids, _ in texts], dtype=np.int64)
    tokens = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in texts)])
    is_target = np.concatenate([np.zeros(0, np.bool_), *(targets for _, targets in texts)])
    key_P = np.array(keys, np.uint64)
    return TokenizedPairs(tokens, is_target, ends, key_P, too_long, empty, has_chats)


def _print_notes(notes: Notes, too_long: int, empty: int, *, total: int) -> None:
    reasons = {
        "is longer than train.model.length + 1": too_long,
        "leaves no token to predict": empty,
    }
    left_out = [
        f"{count} of {total} pairs are left out, one of whose texts {reason}"
        for reason, count in reasons.items()
        if count
    ]
    for sentence in [*chat_notes.describe_notes(notes), *left_out]:
        print(f"preferences: {sentence}", file=sys.stderr)


def _tokenize_pairs(pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[list[Encoding]]:
    """Yield the tokens of the texts of each pair, and which of them are predicted."""
    texts = [text for pair in pairs for text in pair[:2]]
    spans = [text.spans or () for text in texts]
    encodings = tokenizer.encode_spans([text.text for text in texts], spans)
    bos_ids = [] if tokenizer.bos is None else [tokenizer.bos]
    eos_ids = [] if tokenizer.eos is None else [tokenizer.eos]
    for number, pair in enumerate(pairs):
        pair_encodings = encodings[2 * number : 2 * number + 2]
        if not pair.is_chat:
            # Plain texts get the bos and eos tokens, and the eos token is predicted too.
            for row, (ids_T, is_target_T) in enumerate(pair_encodings):
                ids_T = np.concatenate([bos_ids, ids_T, eos_ids]).astype(np.int32)
                padding = (len(bos_ids), len(eos_ids))
                is_target_T = np.pad(is_target_T, padding, constant_values=(False, True))
                pair_encodings[row] = ids_T, is_target_T
        yield pair_encodings
