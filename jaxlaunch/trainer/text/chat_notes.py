"""Counts of the parts of rows that are not trained, and the sentences that report them."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping


class NoteKind(enum.StrEnum):
    """A kind of content that is not trained."""

    MISSING_WORDS = "missing_words"
    MISSING_MESSAGES = "missing_messages"
    UNSEEN_ROLE = "unseen_role"
    UNUSED_KEY = "unused_key"
    UNUSED_TOOLS = "unused_tools"
    UNREAD_FIELD = "unread_field"
    LAYOUT = "layout"
    UNTRAINED = "untrained"
    OPEN_END = "open_end"


# Counts by the kind of content, and by the name of a key, a role or a field.
Notes = Counter[tuple[NoteKind, str]]


def describe_notes(notes: Mapping[tuple[NoteKind, str], int]) -> list[str]:
    """Return a sentence for each count."""
    sentences = []
    for (kind, name), count in sorted(notes.items()):
        if kind in _SENTENCES:
            phrases = {f"{noun}s": _count_noun(count, noun) for noun in _NOUNS}
            if kind == NoteKind.MISSING_WORDS:
                messages = notes.get((NoteKind.MISSING_MESSAGES, name), 0)
                phrases["messages"] = _count_noun(messages, "message")
            sentences.append(_SENTENCES[kind].format(name=name, **phrases))
    return sentences


def notes_to_json(notes: Mapping[tuple[NoteKind, str], int]) -> dict[str, dict[str, int]]:
    """Encode the counts as a JSON object by kind and name."""
    record: dict[str, dict[str, int]] = {}
    for (kind, name), count in sorted(notes.items()):
        record.setdefault(kind.value, {})[name] = count
    return record


def notes_from_json(record: Mapping[str, Mapping[str, int]]) -> Notes:
    """Decode the counts of `notes_to_json`."""
    return Counter(
        {
            (NoteKind(kind), name): count
            for kind, counts in record.items()
            for name, count in counts.items()
        }
    )


_LEAVES_OUT = "the chat template leaves out"
_SENTENCES = {
    NoteKind.MISSING_WORDS: f"{_LEAVES_OUT} {{words}} of the assistant in {{name!r}}, in "
    "{messages}: they are not targets",
    NoteKind.UNSEEN_ROLE: f"{_LEAVES_OUT} {{messages}} of the role {{name!r}}",
    NoteKind.UNUSED_KEY: "the key {name!r} has no effect on text or targets, in {messages}",
    NoteKind.UNUSED_TOOLS: f"{_LEAVES_OUT} the {{name}} of {{rows}}",
    NoteKind.LAYOUT: "{rows} read as {name}",
    NoteKind.UNREAD_FIELD: "the field {name!r} is not read, in {rows}",
    NoteKind.UNTRAINED: "{messages} of the assistant left out of the targets by {name!r}",
    NoteKind.OPEN_END: "the chat template writes no token after the last words of the {name}, in "
    "{chats}",
}
_NOUNS = ("word", "message", "row", "chat")


def _count_noun(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
