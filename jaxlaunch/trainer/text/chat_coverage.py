"""Finds the parts of a chat that its targets do not contain: words, messages, keys and tools.

A chat template may omit anything without an error. The messages of the assistant are compared with
the text of their targets word by word. For other messages and keys, the chat is rendered again
without them: if the text is the same, the template does not write them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxlaunch.trainer.text.chat_notes import NoteKind, Notes
from jaxlaunch.trainer.text.chat_template import REASONING_KEYS, normalize_messages
from jaxlaunch.trainer.text.chat_turns import ASSISTANT, RowTemplate, Turns

# Keys of an assistant's message whose words should be targets.
WORD_KEYS = ("content", *REASONING_KEYS, "tool_calls", "function_call")
# Keys that say whether a message is a target, in the formats of OpenAI and axolotl.
TRAIN_KEYS = ("weight", "train", "training")
# Keys of tool calls whose values are not words.
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
    """Count the parts of a chat that its text or its targets do not contain.

    Args:
        row: Template with the tools and options of the row.
        messages: Messages with all keys of the row.
        turns: Turns of the normalized messages.
        trained: Indices of the messages whose turns are targets.
    """
    notes: Notes = Counter()
    extra_keys: Counter[str] = Counter()
    for index, message in enumerate(messages):
        is_assistant = message["role"] == ASSISTANT
        if is_assistant and index in trained:
            notes.update(_missing_words(message, turns.target_text(index)))
        elif not is_assistant and _is_omitted(row, messages, turns, index):
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
    # Usually no extra key has an effect, which a single rendering without all of them shows.
    # Otherwise each key is tried separately.
    for keys in groups:
        without_keys = [
            {key: message[key] for key in message if key not in keys} for message in messages
        ]
        if _renders_equally(row, without_keys, turns.text):
            notes.update({(NoteKind.UNUSED_KEY, key): extra_keys[key] for key in keys})
        elif len(keys) > 1:
            groups += [[key] for key in keys]
    if row.tools and not _contains_words(turns.text, row.tools):
        plain = RowTemplate(row.name, row.template, None, row.options)
        notes[NoteKind.UNUSED_TOOLS, "tools"] += _renders_equally(plain, messages, turns.text)
    last = len(messages) - 1
    content = messages[last].get("content") if last in trained else None
    if messages[last]["role"] == ASSISTANT and isinstance(content, str) and content.strip():
        # The model learns to end an answer only from a token after its last words.
        notes[NoteKind.OPEN_END, ASSISTANT] += turns.target_text(last).endswith(content.strip())
    return +notes


def count_words(value: Any) -> Counter[str]:
    """Count the words in the texts and numbers of a JSON value."""
    return Counter(_find_words(" ".join(_find_texts(value))))


def _missing_words(message: Mapping[str, Any], target_text: str) -> Notes:
    """Count the words of an assistant's message that are missing in its targets, by key."""
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
        words = count_words(value)
        missing = words - remaining
        remaining -= words
        if missing:
            notes[NoteKind.MISSING_WORDS, key] += missing.total()
            notes[NoteKind.MISSING_MESSAGES, key] += 1
    return notes


def _is_omitted(
    row: RowTemplate, messages: Sequence[Mapping[str, Any]], turns: Turns, index: int
) -> bool:
    """Return whether the template omits a message."""
    content = messages[index].get("content")
    if not count_words(content) or _contains_words(turns.message_text(index), content):
        return False
    if isinstance(content, str) and content.strip() in turns.preamble:
        return False
    blank_message = {**messages[index], "content": ""}
    earlier, later = messages[:index], messages[index + 1 :]
    return any(
        _renders_equally(row, [*earlier, *replacement, *later], turns.text)
        for replacement in ([], [blank_message])
    )


def _renders_equally(row: RowTemplate, messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    rendering = row.try_render(normalize_messages(messages))
    return rendering is not None and rendering.text == text


def _contains_words(text: str, value: Any) -> bool:
    if isinstance(value, str) and value.strip() in text:
        return True
    return not count_words(value) - Counter(_find_words(text))


def _find_words(text: str) -> list[str]:
    return _WORD.findall(_JSON_ESCAPE.sub(" ", _THINK_TAG.sub(" ", text)))


def _find_texts(value: Any) -> Iterator[str]:
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
                yield from _find_texts(item)
    elif isinstance(value, Iterable):
        for item in value:
            yield from _find_texts(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
