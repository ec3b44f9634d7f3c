"""Chats as documents: rows of messages through the tokenizer's own template, with what the assistant says marked.

What the template's {% generation %} encloses is. A template without it is rendered turn by turn: an assistant's turn is
what it adds to the turns before it, behind the words that ask the assistant for it. Nothing is searched for.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.errors import SpecError
from trainer.text import documents, tokenizer
from trainer.text.documents import Document, Unfit, kind_of_value

if TYPE_CHECKING:
    from trainer.text.chat_template import Rendering, Spans, Template

FIELD = "messages"
FILE = "chat_template.jinja"  # beside tokenizer_config.json, whose chat_template it goes before
DEFAULT = "default"  # of several templates by name
ASSISTANT = "assistant"


class Chats:
    """The chat template of a tokenizer. Raises SpecError where there is none, or it cannot be read."""

    def __init__(self, of: tokenizer.Tokenizer) -> None:
        self._name = of.name
        source, named = _source(of), _named(of)
        self._template = self._compiled(source, named)
        self.digest = hashlib.sha256(json.dumps([source, named], sort_keys=True).encode()).hexdigest()[:12]

    def document(self, messages: Any) -> Document:
        """The text of a row's messages, its `spans` those of the assistant. Raises Unfit."""
        _check(messages)
        text, spans = self._render(messages)
        if not self._template.has_marks:
            spans = self._by_turns(messages, text)
        if not spans:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise Unfit(f"it has no words of the role {ASSISTANT!r}, which are the targets; its roles: {roles}")
        return Document(*documents.without_surrogates(text), spans)

    def _by_turns(self, messages: Sequence[Mapping[str, Any]], text: str) -> Spans:
        """The characters of the assistant's turns in the `text` of all messages."""
        found = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            through = self._render(messages[: number + 1]).text
            before = self._render(messages[:number], prompt=True).text
            if not through.startswith(before):  # the template asks with other words than a turn begins with
                before = self._render(messages[:number]).text
            if not through.startswith(before) or not text.startswith(through):
                raise Unfit(
                    f"the chat template of {self._name} renders message {number + 1} or those before it otherwise when "
                    "more follows, so whose words are whose is not known; mark the assistant's in the template by "
                    "{% generation %} and {% endgeneration %}"
                )
            if len(through) > len(before):
                found.append((len(before), len(through)))
        return tuple(found)

    def _render(self, messages: Sequence[Any], *, prompt: bool = False) -> Rendering:
        import jinja2

        try:
            return self._template.render(messages, prompt=prompt)
        except jinja2.TemplateError as error:  # raise_exception's are of these
            raise Unfit(f"the chat template of {self._name} refuses its messages: {error}") from None
        except Exception as error:  # the template's own code runs in there
            what = f"{type(error).__name__}: {error}"
            raise Unfit(f"the chat template of {self._name} fails on its messages: {what}") from None

    def _compiled(self, source: str, named: Mapping[str, Any]) -> Template:
        try:
            import jinja2
        except ImportError:
            raise SpecError(
                f"data.format = chat needs the package jinja2 for the template of {self._name}; install "
                "jaxlaunch[text] where the run runs"
            ) from None
        from trainer.text.chat_template import Template

        try:
            return Template(source, named)
        except jinja2.TemplateSyntaxError as error:
            raise SpecError(
                f"data.tokenizer = {self._name}: its chat template is not valid, line {error.lineno}: {error.message}"
            ) from None


@functools.lru_cache(maxsize=8)
def load(name: str) -> Chats:
    """The chats of the tokenizer `name`. Raises SpecError, StorageError."""
    return Chats(tokenizer.load(name))


def _check(messages: Any) -> None:
    """Raises Unfit for what is no list of messages."""
    if not isinstance(messages, list):
        raise Unfit(f"it is {kind_of_value(messages)}, not a list of messages")
    if not messages:
        raise Unfit("it is an empty list, without a message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise Unfit(f"its message {number} is {kind_of_value(message)}, not an object with a role")
        if not isinstance(message.get("role"), str):
            raise Unfit(f"its message {number} has no role; it has {', '.join(map(str, message)) or 'nothing'}")


def _source(of: tokenizer.Tokenizer) -> str:
    """The text of the template. Raises SpecError."""
    if FILE in of.files:
        return of.files[FILE].decode(errors="replace")
    given = of.config.get("chat_template")
    if given is None:
        raise SpecError(
            f"data.tokenizer = {of.name} has no chat template, which data.format = chat needs: no chat_template in "
            f"tokenizer_config.json and no {FILE}; take the tokenizer of a model for chats, or put one there"
        )
    if isinstance(given, list):  # several by name
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        if DEFAULT not in named:
            raise SpecError(
                f"data.tokenizer = {of.name} has chat templates named {', '.join(map(str, named)) or 'nothing'}, and "
                f"none is named {DEFAULT}; name that to train with so"
            )
        given = named[DEFAULT]
    if not isinstance(given, str):
        raise SpecError(f"data.tokenizer = {of.name}: its chat_template is {kind_of_value(given)}, not a text")
    return given


def _named(of: tokenizer.Tokenizer) -> dict[str, Any]:
    """The special tokens by the names that templates know them by."""
    found: dict[str, Any] = {}
    for key, value in of.config.items():
        if key == "additional_special_tokens" and isinstance(value, list):
            found[key] = [tokenizer.content(each) for each in value]
        elif key in tokenizer.SPECIAL:
            found[key] = tokenizer.content(value)
    return found
