"""Preference data: pairs of a chosen and a rejected text, or single texts that are rated.

`chosen` and `rejected` are texts, or messages that the tokenizer's template renders. The prompt is
`prompt` or `messages`, or else the common beginning of both. A row with `system` or `question` is a
conversation, whose texts are messages. A rated row has one text after its prompt, and the `label`
whether the text is desirable (`layouts`).

Every process tokenizes all rows when a run starts and keeps them in memory, with 5 bytes per token.

T tokens, P rows, K texts of a row: 2 of a pair, 1 of a rated row, L length.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.data.source import DataSource, Split
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.spec import Text
from jaxlaunch.trainer.text import chat_notes, chats, documents, layouts, recipe, tokenizer
from jaxlaunch.trainer.text.chat_notes import NoteKind, Notes
from jaxlaunch.trainer.text.documents import Document, UnfitRowError, Values, describe_value
from jaxlaunch.trainer.text.tokenizer import Encoding, Tokenizer, add_ends

CHOSEN, REJECTED = layouts.CHOSEN, layouts.REJECTED
# Fields of the user's message, and of the system message before it.
QUESTION, SYSTEM = layouts.QUESTION, layouts.SYSTEM
# Fields of the prompt. The first one that a row has is used.
PROMPTS = ("prompt", "messages", QUESTION)
# Fields whose values are the identity of a row, in this order.
ROW_FIELDS: Mapping[str, tuple[str, ...]] = {
    layouts.PREFERENCE: (CHOSEN, REJECTED, *PROMPTS, SYSTEM, *chats.OPTIONAL_FIELDS),
    layouts.KTO: (layouts.PROMPT, layouts.COMPLETION, layouts.MESSAGES, *chats.OPTIONAL_FIELDS),
}
# Version of the tokens and targets. Increase it when the same files give different ones.
PAIRS_VERSION = 2
# Number of rows that are tokenized at once.
BATCH_PAIRS = 512


class Comparison(NamedTuple):
    """The texts of a row. Their `spans`, which are after the prompt, are predicted."""

    # The chosen and the rejected text, or the only text of a rated row.
    texts: tuple[Document, ...]
    # Whether the text of a rated row is desirable.
    is_desirable: bool = True


class TokenizedPairs(NamedTuple):
    """The rows of files. Of pairs, texts 2 p and 2 p + 1 are the chosen and the rejected text."""

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
    # Whether the text of each rated row is desirable; None for pairs.
    is_desirable_P: npt.NDArray[np.bool_] | None


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
    tokenized = _read_pairs(paths, digest, data.tokenizer, length, data.group, data.format)
    count = len(tokenized.key_P)
    share = 0.0 if has_eval_files else data.eval_split
    is_held_out_P = splits.choose_held_out(
        tokenized.key_P, share, data.split_seed, has_groups=data.group is not None
    )
    is_selected_P = is_held_out_P if split == "eval" and not has_eval_files else ~is_held_out_P
    pair_indices = np.flatnonzero(is_selected_P)
    if not len(pair_indices):
        raise DataError(
            f"data.path: {paths[0]} and what else matches hold {count} "
            f"{_row_noun(data.format)} that fit into "
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
    """A source of pairs: `tokens` int32 [K, L + 1], `mask` float32 [K, L], `length` int32 [K].

    Rated rows have no axis K, and an int32 `label` [], 1 for a desirable text.
    """

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
        pair, is_desirable_P = int(self._pair_indices[index]), self._tokenized.is_desirable_P
        count = 2 if is_desirable_P is None else 1
        tokens_KT = np.zeros((count, self._length + 1), np.int32)
        mask_KL = np.zeros((count, self._length), np.float32)
        ends = self._tokenized.ends
        counts = []
        for row, text in enumerate(range(count * pair, count * (pair + 1))):
            span = slice(ends[text - 1] if text else 0, ends[text])
            tokens = self._tokenized.tokens[span]
            tokens_KT[row, : len(tokens)] = tokens
            mask_KL[row, : len(tokens) - 1] = self._tokenized.is_target[span][1:]
            counts.append(len(tokens))
        example = {"tokens": tokens_KT, "mask": mask_KL, "length": np.array(counts, np.int32)}
        if is_desirable_P is None:
            return example
        rated = {name: values[0] for name, values in example.items()}
        return {**rated, "label": np.int32(is_desirable_P[pair])}

    def fingerprint(self) -> str:
        """Return the version, the split, digests of files and tokenizer, and the sizes of pairs."""
        noun = "pairs" if self._tokenized.is_desirable_P is None else "rated texts"
        count = f"{len(self)} {noun} of {self._length}"
        return f"preferences, version {PAIRS_VERSION}, {self._identity}, {count}"


def parse_rating(tokenizer: str, row: layouts.Row) -> Comparison:
    """Parse the text and the label of a rated row. Raises UnfitRowError."""
    document = chats.make_document(row, tokenizer)
    return Comparison((document,), bool(row.values[layouts.LABEL]))


def parse_pair(load_chats: Callable[[], chats.ChatTemplates], row: layouts.Row) -> Comparison:
    """Parse the two texts of a row. Raises UnfitRowError."""
    values = row.values
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
            # As in trl, a space before the difference belongs to the texts, whose first token often
            # contains it.
            prompt = os.path.commonprefix(texts).removesuffix(" ")
            texts = [text.removeprefix(prompt) for text in texts]
        pair = tuple(documents.join_texts(prompt, text) for text in texts)
    chosen, rejected = pair
    if chosen[:2] == rejected[:2]:
        problem = "are the same text: neither can be the better one"
        raise UnfitRowError(f"its 'chosen' and 'rejected' {problem}")
    notes = Counter(chosen.notes) + chats.count_notes(row)
    return Comparison((chosen._replace(notes=notes), rejected))


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


def _render_messages(
    chat: chats.ChatTemplates, system: str | None, prompt: Any, values: Values
) -> tuple[Document, ...]:
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
    return tuple(texts)


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
    paths: tuple[str, ...],
    digest: str,
    name: str,
    length: int,
    group: str | None,
    row_format: str,
) -> TokenizedPairs:
    documents.check_rows(paths, "preferences")
    row_fields = (*layouts.list_columns(row_format), *chats.OPTIONAL_FIELDS)

    def make_pair(values: Values) -> tuple[Comparison, int]:
        group_key = None
        if group is not None:
            group_key, values = documents.split_group(values, group, row_fields)
        row = layouts.read_row(values, row_format)
        key = splits.hash_value([row.values.get(field) for field in ROW_FIELDS[row_format]])
        key = key if group_key is None else group_key
        if row_format == layouts.KTO:
            return parse_rating(name, row), key
        return parse_pair(partial(chats.load_chats, name), row), key

    parts = list(itertools.chain.from_iterable(documents.split_units(paths)))
    fields = row_fields if group is None else (*row_fields, group)
    rows = (documents.read_rows(part, None, make_pair, fields) for part in parts)
    pairs = (pair for pair, _ in itertools.chain.from_iterable(rows))
    texts: list[Encoding] = []
    keys: list[int] = []
    too_long = empty = 0
    has_chats = False
    is_desirable: list[bool] = []
    notes = documents.note_columns(parts, fields)
    while batch := list(itertools.islice(pairs, BATCH_PAIRS)):
        for pair, _ in batch:
            for text in pair.texts:
                has_chats |= not text.is_plain
                notes.update(text.notes)
        encoded = _tokenize_pairs([pair for pair, _ in batch], tokenizer.load_tokenizer(name))
        for (pair, key), pair_encodings in zip(batch, encoded, strict=True):
            if max(len(ids) for ids, _ in pair_encodings) > length + 1:
                too_long += 1
            elif not all(is_target[1:].any() for _, is_target in pair_encodings):
                empty += 1
            else:
                texts += pair_encodings
                keys.append(key)
                is_desirable.append(pair.is_desirable)
    notes.pop((NoteKind.UNREAD_FIELD, group or ""), None)
    noun = _row_noun(row_format)
    _print_notes(notes, too_long, empty, total=f"{too_long + empty + len(keys)} {noun}")
    ends = np.cumsum([len(ids) for ids, _ in texts], dtype=np.int64)
    tokens = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in texts)])
    is_target = np.concatenate([np.zeros(0, np.bool_), *(targets for _, targets in texts)])
    key_P = np.array(keys, np.uint64)
    is_desirable_P = np.array(is_desirable, np.bool_) if row_format == layouts.KTO else None
    counts = (too_long, empty)
    return TokenizedPairs(tokens, is_target, ends, key_P, *counts, has_chats, is_desirable_P)


def _row_noun(row_format: str) -> str:
    return "rated texts" if row_format == layouts.KTO else "pairs"


def _print_notes(notes: Notes, too_long: int, empty: int, *, total: str) -> None:
    reasons = {
        "is longer than train.model.length + 1": too_long,
        "leaves no token to predict": empty,
    }
    left_out = [
        f"{count} of {total} are left out, one of whose texts {reason}"
        for reason, count in reasons.items()
        if count
    ]
    for sentence in [*chat_notes.describe_notes(notes), *left_out]:
        print(f"preferences: {sentence}", file=sys.stderr)


def _tokenize_pairs(pairs: Sequence[Comparison], tokenizer: Tokenizer) -> Iterator[list[Encoding]]:
    """Yield the tokens of the texts of each row, and which of them are predicted."""
    texts = [text for pair in pairs for text in pair.texts]
    spans = [text.spans or () for text in texts]
    encodings = iter(tokenizer.encode_spans([text.text for text in texts], spans))
    for pair in pairs:
        yield [
            add_ends(tokenizer, *encoding) if text.is_plain else encoding
            for text, encoding in zip(pair.texts, encodings, strict=False)
        ]
