"""Converts chats to documents: renders the messages, and marks the answers as targets.

The targets are the text in the template's {% generation %} blocks. In a template without the tag,
they are the text that it writes for the assistant's messages, after the prompt for an answer
(`chat_turns`). The rendered text is never searched for markers. The parts of a row that are missing
in its targets are counted (`chat_notes`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxlaunch import installation
from jaxlaunch.trainer.checkpoint import saved_files
from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.text import documents, layouts
from jaxlaunch.trainer.text import tokenizer as tokenizers
from jaxlaunch.trainer.text.chat_notes import NoteKind, Notes
from jaxlaunch.trainer.text.documents import Document, UnfitRowError, describe_value
from jaxlaunch.trainer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxlaunch.trainer.text.chat_template import Template
    from jaxlaunch.trainer.text.chat_turns import RowTemplate, Turns

MESSAGES_FIELD = layouts.MESSAGES
TOOLS_FIELD, OPTIONS_FIELD = layouts.TOOLS, layouts.OPTIONS
OPTIONAL_FIELDS = (TOOLS_FIELD, OPTIONS_FIELD)
# Variables of a template that a row cannot set.
RESERVED_OPTIONS = ("messages", "tools", "documents", "add_generation_prompt")
# This file takes precedence over chat_template in tokenizer_config.json.
TEMPLATE_FILE = "chat_template.jinja"
# Names of the default template and of the template for rows with tools.
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
ASSISTANT = "assistant"
# Version of the texts and spans. Increase it when the same template gives different ones.
CHATS_VERSION = 2
# Types of the parts of a message that are not text.
MEDIA_TYPES = (
    *("image", "image_url", "input_image", "video", "video_url"),
    *("audio", "audio_url", "input_audio", "file", "input_file"),
)


class ChatTemplates:
    """The chat templates of a tokenizer. Raises SpecError if none can be read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._name = tokenizer.name
        sources = _template_sources(tokenizer)
        # The special tokens by the names that templates use.
        tokens: dict[str, Any] = {}
        for key, value in tokenizer.config.items():
            if key == "additional_special_tokens" and isinstance(value, list):
                tokens[key] = [tokenizers.token_text(token) for token in value]
            elif key in tokenizers.SPECIAL_TOKEN_KEYS:
                tokens[key] = tokenizers.token_text(value)
        self._templates: dict[str, Template] = {}
        for name, source in sources.items():
            self._templates[name] = self._compile_template(source, tokens)
        template = sources if TOOL_TEMPLATE in sources else sources[DEFAULT_TEMPLATE]
        identity = [CHATS_VERSION, template, tokens]
        self.digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    def render_document(
        self,
        messages: Any,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        skipped: int = 0,
    ) -> Document:
        """Render messages as a document, whose targets are those after `skipped` messages.

        Raises UnfitRowError.
        """
        from jaxlaunch.trainer.text import chat_coverage, chat_template, chat_turns

        check_messages(messages)
        row = self._row_template(tools, options)
        turns = chat_turns.Turns(row, chat_template.normalize_messages(messages))
        check_printed_lists(messages, turns.text)
        untrained_notes: Notes = Counter()
        trained = []
        for index, message in enumerate(messages):
            key = find_untrained_key(message, index)
            if index < skipped:
                continue
            if key is None or message["role"] != ASSISTANT:
                trained.append(index)
            else:
                untrained_notes[NoteKind.UNTRAINED, str(key)] += 1
        spans = _select_spans(turns, trained, len(messages))
        check_answers(messages[skipped:], [messages[index] for index in trained], turns.text, spans)
        notes = chat_coverage.count_missing(row, messages, turns, trained) + untrained_notes
        return Document(*documents.replace_surrogates(turns.text), spans, notes=notes)

    def render_prompt(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> str:
        """Render messages and the beginning of the assistant's answer. Raises UnfitRowError."""
        return self._row_template(tools).render(messages, prompt=True).text

    def render_text(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> str:
        """Render messages without the beginning of an answer. Raises UnfitRowError."""
        return self._row_template(tools).render(messages).text

    def _row_template(
        self, tools: Sequence[Any] | None = None, options: Mapping[str, Any] | None = None
    ) -> RowTemplate:
        from jaxlaunch.trainer.text.chat_turns import RowTemplate

        template = self._templates[DEFAULT_TEMPLATE]
        if tools is not None:
            template = self._templates.get(TOOL_TEMPLATE, template)
        return RowTemplate(self._name, template, tools, options)

    def _compile_template(self, source: str, tokens: Mapping[str, Any]) -> Template:
        try:
            import jinja2
        except ImportError:
            hint = installation.install_hint("text")
            problem = f"The chat template of {self._name} needs the package jinja2"
            raise SpecError(f"{problem}: {hint}") from None
        from jaxlaunch.trainer.text.chat_template import Template

        try:
            return Template(source, tokens)
        except jinja2.TemplateSyntaxError as error:
            problem = f"its chat template is not valid, line {error.lineno}: {error.message}"
            raise SpecError(f"data.tokenizer = {self._name}: {problem}") from None


@functools.lru_cache(maxsize=8)
def load_chats(name: str) -> ChatTemplates:
    """Load the chat templates of the tokenizer `name`. Raises SpecError, StorageError."""
    return ChatTemplates(tokenizers.load_tokenizer(name))


def read_chat(
    row_format: str, field: str | None, tokenizer: str, values: documents.Values
) -> Document:
    """Return the document of a row in any layout of `row_format` (`layouts`).

    Raises UnfitRowError, SpecError.
    """
    return make_document(layouts.read_row(values, row_format, field), tokenizer)


def make_document(row: layouts.Row, tokenizer: str) -> Document:
    """Return the document of a row. A prompt and a completion that are texts need no template."""
    if row.is_plain:
        texts = [row.values[part] for part in (layouts.PROMPT, layouts.COMPLETION)]
        document = documents.join_texts(*texts)._replace(identity=splits.hash_value(texts))
    else:
        messages, chat = row.values[MESSAGES_FIELD], load_chats(tokenizer)
        try:
            extras = parse_extras(row.values)
            document = chat.render_document(messages, *extras, row.prompt_messages)
        except UnfitRowError as error:
            noun = "field" if len(row.sources) == 1 else "fields"
            names = " and ".join(map(repr, row.sources))
            raise UnfitRowError(f"its {noun} {names}: {error}") from None
        document = document._replace(identity=splits.hash_value(messages))
    return document._replace(notes=Counter(document.notes) + count_notes(row))


def count_notes(row: layouts.Row) -> Notes:
    """Count the columns of a row that its layout does not read, and a layout that is converted."""
    notes: Notes = Counter((NoteKind.UNREAD_FIELD, name) for name in row.unread)
    if not row.is_usual:
        notes[NoteKind.LAYOUT, row.layout] += 1
    return notes


def check_messages(messages: Any) -> None:
    """Raise UnfitRowError unless the value is a list of messages."""
    if not isinstance(messages, list):
        raise UnfitRowError(f"it is {describe_value(messages)}, not a list of messages")
    if not messages:
        raise UnfitRowError("it is an empty list, without a message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            problem = f"is {describe_value(message)}, not an object with a role"
            raise UnfitRowError(f"its message {number} {problem}")
        if not isinstance(message.get("role"), str):
            keys = ", ".join(map(str, message)) or "nothing"
            raise UnfitRowError(f"its message {number} has no role; it has {keys}")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for kind in (part.get("type") for part in parts if isinstance(part, dict)):
            if kind in MEDIA_TYPES:
                problem = f"its message {number} has a part of the type {kind!r}"
                raise UnfitRowError(f"{problem}, and only text is trained; leave the row out")


def check_printed_lists(messages: Sequence[Any], text: str) -> None:
    """Raise UnfitRowError if the template wrote the parts of a message as a Python list."""
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        if isinstance(content, list | dict) and content and str(content) in text:
            kind = describe_value(content)
            problem = f"its message {number} has {kind} as content, which the chat template prints"
            raise UnfitRowError(f"{problem} as Python does; give its content as a text")


def check_answers(
    messages: Sequence[Any], trained: Sequence[Any], text: str, spans: Sequence[tuple[int, int]]
) -> None:
    """Raise UnfitRowError if no words of the assistant are targets but some should be."""
    from jaxlaunch.trainer.text import chat_coverage

    answers = [message for message in trained if message["role"] == ASSISTANT]
    if not answers and any(message["role"] == ASSISTANT for message in messages):
        return
    values = [message.get(key) for message in answers for key in chat_coverage.WORD_KEYS]
    target_text = "".join(text[start:end] for start, end in spans)
    words = chat_coverage.count_words(values)
    if spans and (not words or words & chat_coverage.count_words(target_text)):
        return
    roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
    problem = f"it has no words of the role {ASSISTANT!r}, which are the targets"
    if words:
        problem = f"the chat template writes no words of the role {ASSISTANT!r}"
    raise UnfitRowError(f"{problem}; its roles: {roles}")


def find_untrained_key(message: Mapping[str, Any], index: int) -> str | None:
    """Return the key that excludes a message from the targets, or None. Raises UnfitRowError."""
    from jaxlaunch.trainer.text.chat_coverage import TRAIN_KEYS

    for key in TRAIN_KEYS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            problem = f"its message {index + 1} has {key} = {value!r}"
            raise UnfitRowError(
                f"{problem}; 0 or false leaves it out of the targets, and 1 or true"
            )
        if not value:
            return key
    return None


def _select_spans(turns: Turns, trained: Sequence[int], count: int) -> tuple[tuple[int, int], ...]:
    """Return the spans of the messages `trained` of `count` messages. Raises UnfitRowError."""
    spans = turns.spans_by_message
    if len(trained) < count and None in spans:
        raise UnfitRowError(
            "the chat template has a {% generation %} block outside of its loop over messages, so "
            "it is unknown which message it belongs to, and not all are trained"
        )
    return tuple(sorted(span for index in (None, *trained) for span in spans.get(index, ())))


def parse_extras(
    values: documents.Values,
) -> tuple[list[Any] | None, dict[str, Any] | None]:
    """Return the tools and the template variables of a row. Raises UnfitRowError."""
    options = values.get(OPTIONS_FIELD)
    if isinstance(options, str):
        with contextlib.suppress(ValueError):
            options = json.loads(options)
    if options is not None and not isinstance(options, dict):
        problem = f"the row's {OPTIONS_FIELD} is {describe_value(options)}"
        raise UnfitRowError(f"{problem}, not an object with variables of the chat template")
    for name in RESERVED_OPTIONS:
        if name in (options or {}):
            raise UnfitRowError(
                f"the row's {OPTIONS_FIELD} has {name!r}, which the row itself sets"
            )
    return parse_tools(values.get(TOOLS_FIELD)), options


def parse_tools(value: Any) -> list[Any] | None:
    """Parse the tools of a row, a list of schemas or its JSON. Raises UnfitRowError."""
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value)
        except ValueError as error:
            raise UnfitRowError(f"the row's tools are not JSON: {error}") from None
    if tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return tools
    raise UnfitRowError("the row's tools are not a list of objects, each the schema of a function")


def _template_sources(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the default template and, if it exists, that for rows with tools. Raises SpecError."""
    prefix = f"data.tokenizer = {tokenizer.name}"
    sources: dict[str, Any] = {}
    for name, text in tokenizer.files.items():
        folder, _, template_name = name.rpartition("/")
        if f"{folder}/" == saved_files.TEMPLATES_FOLDER:
            sources[template_name.removesuffix(".jinja")] = text.decode(errors="replace")
    if TEMPLATE_FILE in tokenizer.files:
        sources[DEFAULT_TEMPLATE] = tokenizer.files[TEMPLATE_FILE].decode(errors="replace")
    elif not sources:
        configured = tokenizer.config.get("chat_template")
        if configured is None:
            raise SpecError(
                f"{prefix} has no chat template, which messages need: no chat_template in "
                f"tokenizer_config.json and no {TEMPLATE_FILE}; take the tokenizer of a model for "
                "chats, or put one there"
            )
        sources = {DEFAULT_TEMPLATE: configured}
        if isinstance(configured, list):
            # The configuration contains several named templates.
            blocks = [entry for entry in configured if isinstance(entry, dict)]
            sources = {str(entry.get("name")): entry.get("template") for entry in blocks}
        for name, template in sources.items():
            if not isinstance(template, str):
                suffix = "" if name == DEFAULT_TEMPLATE else f" named {name}"
                kind = describe_value(template)
                raise SpecError(f"{prefix}: its chat_template{suffix} is {kind}, not a text")
    if DEFAULT_TEMPLATE not in sources:
        names = ", ".join(sources) or "nothing"
        problem = f"has chat templates named {names}, and none is named {DEFAULT_TEMPLATE}"
        raise SpecError(f"{prefix} {problem}; give the one to train with this name")
    return {name: sources[name] for name in (DEFAULT_TEMPLATE, TOOL_TEMPLATE) if name in sources}
