"""Counts of what rows contain and their targets do not, and the sentences that say so."""

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
    UNTRAINED = "untrained"
    OPEN_END = "open_end"


# The kind of a note and the name of a key, a role or a field.
Notes = Counter[tuple[NoteKind, str]]


def describe_notes(notes: Mapping[tuple[NoteKind, str], int]) -> list[str]:
    """Return a sentence for each kind and name of a note."""
    return [
        _SENTENCES[kind].format(
            name=name, count=f"{count:,}", messages=f"{notes.get(_messages_note(name), 0):,}"
        )
        for (kind, name), count in sorted(notes.items())
        if kind in _SENTENCES
    ]


def notes_to_json(notes: Mapping[tuple[NoteKind, str], int]) -> dict[str, dict[str, int]]:
    """Return counts by kind and name."""
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


_LEFT_OUT = "the chat template leaves them out"
_SENTENCES = {
    NoteKind.MISSING_WORDS: "{count} words of the assistant in {name!r} are not targets, in "
    f"{{messages}} messages: {_LEFT_OUT}",
    NoteKind.UNSEEN_ROLE: f"{{count}} messages of the role {{name!r}} are not in the text: "
    f"{_LEFT_OUT}",
    NoteKind.UNUSED_KEY: "the key {name!r} of {count} messages has no effect on text or targets",
    NoteKind.UNUSED_TOOLS: f"the {{name}} of {{count}} rows are not in the text: {_LEFT_OUT}",
    NoteKind.UNREAD_FIELD: "the field {name!r} of {count} rows is not read",
    NoteKind.UNTRAINED: "{count} messages of the assistant are not targets, by their {name!r}",
    NoteKind.OPEN_END: "{count} chats end without a token after the {name}'s words: the chat "
    "template writes none",
}


def _messages_note(name: str) -> tuple[NoteKind, str]:
    return NoteKind.MISSING_MESSAGES, name
