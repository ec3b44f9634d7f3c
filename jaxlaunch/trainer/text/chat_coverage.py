"""What a chat contains and its targets do not: words, messages, keys and tools.

A template may leave out anything without an error. What the assistant says is compared with the
text of its targets word by word. A message or a key without a visible effect is left out, and the
chat is rendered again: the same text means that the template does not write it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxlaunch.trainer.text.chat_notes import NoteKind, Notes
from jaxlaunch.trainer.text.chat_template import REASONING_KEYS, normalize_messages
from jaxlaunch.trainer.text.chat_turns import ASSISTANT, RowTemplate, Turns

# Keys of an assistant's message whose words are to be targets.
WORD_KEYS = ("content", *REASONING_KEYS, "tool_calls", "function_call")
# Keys that say whether a message is trained: OpenAI's, and those of axolotl.
TRAIN_KEYS = ("weight", "train", "training")
# Identifiers inside of tool calls, which are not words.
_CALL_KEYS = ("id", "type", "index")
_WORD = re.compile(r"\w+|[^\w\s\x00-\x7f]")
_THINK_TAG = re.compile(r"</?think>")
_JSON_ESCAPE = re.compile(r"\\[bfnrt]")


def count_missing(
    row: RowTemplate,
    messages: Sequence[Mapping[str, Any]],
    turns: Turns,
    trained: Collection[int],
) -> Notes:
    """Count what a chat contains and its text or its targets do not.

    `messages` have the keys of the row; `turns` are those of the normalized messages. The targets
    are the turns of the messages `trained`.
    """
    notes: Notes = Counter()
    extra_keys: Counter[str] = Counter()
    for index, message in enumerate(messages):
        is_assistant = message["role"] == ASSISTANT
        if is_assistant and index in trained:
            notes.update(_missing_words(message, turns.target_text(index)))
        elif not is_assistant and _is_unseen(row, messages, turns, index):
            notes[NoteKind.UNSEEN_ROLE, message["role"]] += 1
            continue
        used_keys = {"role", "content", *TRAIN_KEYS, *(WORD_KEYS if is_assistant else ())}
        extra_keys.update(key for key in message if key not in used_keys and message[key])
        notes.update(
            (NoteKind.UNUSED_KEY, key)
            for key in TRAIN_KEYS
            if not is_assistant and message.get(key)
        )
    groups = [list(extra_keys)] if extra_keys else []
    # Most keys have no effect, which a single rendering without them shows.
    for keys in groups:
        without = [
            {key: message[key] for key in message if key not in keys} for message in messages
        ]
        if _renders_equally(row, without, turns.text):
            notes.update({(NoteKind.UNUSED_KEY, key): extra_keys[key] for key in keys})
        elif len(keys) > 1:
            groups += [[key] for key in keys]
    if row.tools and not _contains_words(turns.text, row.tools):
        plain = RowTemplate(row.name, row.template, None, row.options)
        notes[NoteKind.UNUSED_TOOLS, "tools"] += _renders_equally(plain, messages, turns.text)
    last = len(messages) - 1
    words = messages[last].get("content") if last in trained else None
    if messages[last]["role"] == ASSISTANT and isinstance(words, str) and words.strip():
        # A model learns from the token there when to end.
        notes[NoteKind.OPEN_END, ASSISTANT] += turns.target_text(last).endswith(words.strip())
    return +notes


def words_of(value: Any) -> Counter[str]:
    """Count the words in the texts and numbers of a JSON value."""
    return Counter(_find_words(" ".join(_leaves(value))))


def _missing_words(message: Mapping[str, Any], target_text: str) -> Notes:
    """Count the words of an assistant's message that its targets do not have, by key."""
    notes: Notes = Counter()
    remaining: Counter[str] | None = None
    reasoning = None
    for key in WORD_KEYS:
        value = message.get(key)
        if not value or (key in REASONING_KEYS and value == reasoning):
            continue
        reasoning = value if key in REASONING_KEYS else reasoning
        if remaining is None:
            texts = [message.get(name) for name in WORD_KEYS if message.get(name)]
            if len(texts) == 1 and isinstance(value, str) and value.strip() in target_text:
                return notes
            remaining = Counter(_find_words(target_text))
        words = words_of(value)
        missing = words - remaining
        remaining -= words
        if missing:
            notes[NoteKind.MISSING_WORDS, key] += missing.total()
            notes[NoteKind.MISSING_MESSAGES, key] += 1
    return notes


def _is_unseen(
    row: RowTemplate, messages: Sequence[Mapping[str, Any]], turns: Turns, index: int
) -> bool:
    """Return whether the template writes nothing of a message."""
    content = messages[index].get("content")
    if not words_of(content) or _contains_words(turns.message_text(index), content):
        return False
    if isinstance(content, str) and content.strip() in turns.preamble:
        return False
    blank = {**messages[index], "content": ""}
    others = (messages[:index], messages[index + 1 :])
    return any(
        _renders_equally(row, [*others[0], *changed, *others[1]], turns.text)
        for changed in ([], [blank])
    )


def _renders_equally(row: RowTemplate, messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    rendering = row.try_render(normalize_messages(messages))
    return rendering is not None and rendering.text == text


def _contains_words(text: str, value: Any) -> bool:
    if isinstance(value, str) and value.strip() in text:
        return True
    return not words_of(value) - Counter(_find_words(text))


def _find_words(text: str) -> list[str]:
    return _WORD.findall(_JSON_ESCAPE.sub(" ", _THINK_TAG.sub(" ", text)))


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts, numbers and argument names in a value, without the ids of tool calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        is_call = "function" in value
        for key, item in value.items():
            if is_call and key in _CALL_KEYS:
                continue
            if key == "arguments" and isinstance(item, Mapping):
                yield from item
            if key != "type" or not isinstance(item, str):
                yield from _leaves(item)
    elif isinstance(value, Iterable):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
