"""Preferences: rows with a chosen and a rejected text after the same prompt, as pairs of rows of tokens.

`chosen` and `rejected` are texts, or messages that the tokenizer's own template makes a text of; `prompt`, or
`messages`, is what both come after. A row without it has the prompt in both: what they begin with alike.

They are tokenized when a run starts, by each process, and held: 5 bytes a token.

T tokens, P pairs, L length.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data.order import Share
from jaxlaunch.trainer.data.source import DataSource
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.spec import Text
from jaxlaunch.trainer.text import chats, digests, documents, recipe, tokenizer
from jaxlaunch.trainer.text.documents import Document, Unfit, Values, kind_of_value
from jaxlaunch.trainer.text.tokenizer import Tokenizer

CHOSEN, REJECTED = "chosen", "rejected"
PROMPTS = ("prompt", "messages")  # either
ALSO = (REJECTED, *PROMPTS, *chats.ALSO)
BATCH = 512  # pairs that are tokenized at once


class Pair(NamedTuple):
    """Two texts, of which what follows the prompt is predicted, by their `spans`."""

    chosen: Document
    rejected: Document
    is_chat: bool  # a template has written what begins and ends them


class Held(NamedTuple):
    """The pairs of some files: texts 2 p and 2 p + 1 are the chosen and the rejected one of pair p."""

    tokens: npt.NDArray[np.int32]  # of all texts, one after the other
    is_target: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.int64]  # of each text
    too_long: int  # pairs that are left out for that
    empty: int  # and those of which a text leaves nothing to predict


def source(data: Text, length: int, split: Literal["train", "eval"]) -> Pairs | None:
    """The pairs of a split for rows of `length` targets; None where nothing is held out.

    Raises DataError naming file and row, SpecError where the tokenizer or its template cannot be read.
    """
    is_apart = data.eval_path is not None
    if split == "eval" and not is_apart and not data.eval_split:
        return None
    if data.eval_path is not None and split == "eval":
        paths = tuple(documents.found(data.eval_path, "eval_path"))
    else:
        paths = tuple(documents.found(data.path))
    digest = digests.of(paths, Path(recipe.root(data)))
    held = _held(paths, digest, data.tokenizer, length)
    count = len(held.ends) // 2
    share = Share(0.0 if is_apart else data.eval_split, count)
    is_held_out_P = share.is_held_out(np.arange(count))
    chosen_P = np.flatnonzero(is_held_out_P if split == "eval" and not is_apart else ~is_held_out_P)
    if not len(chosen_P):
        raise DataError(
            f"data.path: {paths[0]} and what else matches hold {count} pairs that fit into train.model.length = "
            f"{length} ({held.too_long} are longer, {held.empty} have no token to predict), and data.eval_split = "
            f"{data.eval_split} leaves the {split} split none of them"
        )
    return Pairs(held, chosen_P, length, f"{split}, {data.eval_split} of sha256 {digest}, ", data)


class Pairs(DataSource):
    """`tokens` int32 [2, L + 1], `mask` float32 [2, L], `length` int32 [2] of each pair, filled up with zeros."""

    def __init__(self, held: Held, chosen_P: npt.NDArray[np.int64], length: int, what: str, data: Text) -> None:
        self.name = "preferences"
        self._held, self._chosen_P, self._length = held, chosen_P, length
        self._what = f"{what}tokenizer {tokenizer.load(data.tokenizer).digest}"

    def __len__(self) -> int:
        return len(self._chosen_P)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens_2T = np.zeros((2, self._length + 1), np.int32)
        mask_2L = np.zeros((2, self._length), np.float32)
        first = 2 * int(self._chosen_P[index])
        ends = self._held.ends
        counts = []
        for row, text in enumerate((first, first + 1)):
            whole = slice(ends[text - 1] if text else 0, ends[text])
            tokens = self._held.tokens[whole]
            tokens_2T[row, : len(tokens)] = tokens
            mask_2L[row, : len(tokens) - 1] = self._held.is_target[whole][1:]
            counts.append(len(tokens))
        return {"tokens": tokens_2T, "mask": mask_2L, "length": np.array(counts, np.int32)}

    def fingerprint(self) -> str:
        """Split, files, tokenizer, pairs and length."""
        return f"preferences {self._what}, {len(self)} pairs of {self._length}"


def pair(load: Callable[[], chats.Chats], values: Values) -> Pair:
    """The two texts of a row, with the prompt in front. Raises Unfit."""
    for field in (CHOSEN, REJECTED):
        if values.get(field) is None:
            raise Unfit(f"it has no {field!r}; it has {', '.join(key for key in values if values[key] is not None)}")
    asked = [key for key in PROMPTS if values.get(key) is not None][:1]
    for field in (CHOSEN, REJECTED, *asked):
        if not isinstance(values[field], str | list):
            raise Unfit(f"its {field!r} is {kind_of_value(values[field])}, neither a text nor a list of messages")
    prompt = values[asked[0]] if asked else None
    is_chat = any(isinstance(values[field], list) for field in (CHOSEN, REJECTED, *asked))
    made = _of_messages(load(), prompt, values) if is_chat else _of_texts(prompt, values)
    if made.chosen[:2] == made.rejected[:2]:
        raise Unfit("its 'chosen' and 'rejected' are the same text: neither can be the better one")
    return made


def _of_texts(prompt: str | None, values: Values) -> Pair:
    texts = [values[CHOSEN], values[REJECTED]]
    if prompt is None:
        prompt = os.path.commonprefix(texts)
        texts = [text.removeprefix(prompt) for text in texts]
    return Pair(_after(prompt, texts[0]), _after(prompt, texts[1]), is_chat=False)


def _after(prompt: str, text: str) -> Document:
    before, replaced = documents.without_surrogates(prompt)
    behind, more = documents.without_surrogates(text)
    return Document(before + behind, replaced + more, ((len(before), len(before) + len(behind)),))


def _of_messages(chat: chats.Chats, prompt: Any, values: Values) -> Pair:
    begin = [] if prompt is None else _messages("user", prompt)
    both = [_messages(chats.ASSISTANT, values[key]) for key in (CHOSEN, REJECTED)]
    given = len(begin)
    if prompt is None:
        alike = itertools.takewhile(lambda turns: turns[0] == turns[1], zip(*both, strict=False))
        given = sum(1 for _ in alike)
    made = []
    for field, messages in zip((CHOSEN, REJECTED), both, strict=True):
        try:
            made.append(chat.document([*begin, *messages], chats.tools(values.get(chats.ALSO[0])), given))
        except Unfit as error:
            raise Unfit(f"its {field!r}: {error}") from None
    return Pair(made[0], made[1], is_chat=True)


def _messages(role: str, given: str | list[Any]) -> list[Any]:
    return [{"role": role, "content": given}] if isinstance(given, str) else given


@functools.lru_cache(maxsize=2)  # training and evaluation read the same files
def _held(paths: tuple[str, ...], digest: str, name: str, length: int) -> Held:
    """The pairs of files whose digest this is, for rows of `length` targets."""
    if (plain := next((path for path in paths if documents.kind_of(path) == "text"), None)) is not None:
        raise DataError(f"{plain} is plain text; preferences are rows of JSON lines (.jsonl), Parquet or Arrow")
    made = partial(pair, partial(chats.load, name))
    units = documents.units(paths)
    found = (each for unit in units for part in unit for each, _ in documents.rows(part, CHOSEN, made, ALSO))
    texts: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]] = []
    too_long = empty = 0
    while lot := list(itertools.islice(found, BATCH)):
        for both in _tokenized(lot, tokenizer.load(name)):
            if max(len(ids) for ids, _ in both) > length + 1:
                too_long += 1
            elif not all(is_target[1:].any() for _, is_target in both):
                empty += 1
            else:
                texts += both
    whys = {"is longer than train.model.length + 1": too_long, "leaves no token to predict": empty}
    for why, count in whys.items():
        if count:
            said = f"{count} of {too_long + empty + len(texts) // 2} pairs are left out"
            print(f"preferences: {said}, one of whose texts {why}", file=sys.stderr)
    ends = np.cumsum([len(ids) for ids, _ in texts], dtype=np.int64)
    tokens = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in texts)])
    is_target = np.concatenate([np.zeros(0, np.bool_), *(each for _, each in texts)])
    return Held(tokens, is_target, ends, too_long, empty)


def _tokenized(
    lot: Sequence[Pair], of: Tokenizer
) -> Iterator[list[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]]:
    """The tokens of each pair's two texts, and which of them are predicted."""
    found = [(text, each.is_chat) for each in lot for text in each[:2]]
    texts, spans = [text.text for text, _ in found], [text.spans or () for text, _ in found]
    encoded = zip(of.encode_spans(texts, spans), found, strict=True)
    whole = [ids if is_chat else _ended(*ids, of) for ids, (_, is_chat) in encoded]
    for at in range(0, len(whole), 2):
        yield whole[at : at + 2]


def _ended(
    ids_T: npt.NDArray[np.int32], is_target_T: npt.NDArray[np.bool_], of: Tokenizer
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """A plain text with the tokens that begin and end one; the end is predicted too."""
    before, behind = ([] if each is None else [each] for each in (of.bos, of.eos))
    ids = np.concatenate([before, ids_T, behind]).astype(np.int32)
    return ids, np.concatenate([np.zeros(len(before)), is_target_T, np.ones(len(behind))]).astype(np.bool_)
