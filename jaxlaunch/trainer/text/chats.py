"""Chats as documents: messages rendered by the tokenizer's template, the answers marked.

The marked words are those that the template's {% generation %} tag encloses. A template without the
tag is rendered turn by turn: the words of a turn are the text that it adds to the previous turns
and their generation prompt. The text is never searched for markers.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxlaunch import installation
from jaxlaunch.trainer.checkpoint import saved_files
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.text import documents
from jaxlaunch.trainer.text import tokenizer as tokenizers
from jaxlaunch.trainer.text.documents import Document, UnfitRowError, describe_value
from jaxlaunch.trainer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxlaunch.trainer.text.chat_template import Rendering, Spans, Template

MESSAGES_FIELD = "messages"
# Optional fields of a row: the tools that the assistant may call.
OPTIONAL_FIELDS = ("tools",)
# This file takes precedence over chat_template in tokenizer_config.json.
TEMPLATE_FILE = "chat_template.jinja"
# Names of the default template and of the template for rows with tools.
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
ASSISTANT = "assistant"


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
        identity = [sources if TOOL_TEMPLATE in sources else sources[DEFAULT_TEMPLATE], tokens]
        self.digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    def row_document(self, field: str, values: documents.Values) -> Document:
        """Render the chat of a row with its tools. Raises UnfitRowError."""
        try:
            return self.render_document(values[field], parse_tools(values.get(OPTIONAL_FIELDS[0])))
        except UnfitRowError as error:
            raise UnfitRowError(f"its field {field!r}: {error}") from None

    def render_document(
        self, messages: Any, tools: Sequence[Any] | None = None, skipped: int = 0
    ) -> Document:
        """Render messages with the spans of the assistant after the first `skipped` messages."""
        check_messages(messages)
        template = self._templates[DEFAULT_TEMPLATE]
        if tools is not None:
            template = self._templates.get(TOOL_TEMPLATE, template)
        text, spans = self._render_template(template, messages, tools)
        if not template.has_marks:
            spans = self._turn_spans(template, messages, text, tools, skipped)
        elif skipped:
            spans = spans[len(self._render_template(template, messages[:skipped], tools).spans) :]
        if not spans:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages[skipped:]))
            problem = f"it has no words of the role {ASSISTANT!r}, which are the targets"
            raise UnfitRowError(f"{problem}; its roles: {roles}")
        return Document(*documents.replace_surrogates(text), spans)

    def render_prompt(self, messages: Sequence[Any]) -> str:
        """Render messages and the beginning of the assistant's answer. Raises UnfitRowError."""
        template = self._templates[DEFAULT_TEMPLATE]
        return self._render_template(template, messages, prompt=True).text

    def answer_suffix(self) -> str:
        """Return the text that the template writes after an answer. Raises UnfitRowError."""
        answer = "an answer"
        turns = [{"role": "user", "content": "a question"}, {"role": ASSISTANT, "content": answer}]
        template = self._templates[DEFAULT_TEMPLATE]
        return self._render_template(template, turns).text.rpartition(answer)[2]

    def _turn_spans(
        self,
        template: Template,
        messages: Sequence[Mapping[str, Any]],
        text: str,
        tools: Any,
        skipped: int,
    ) -> Spans:
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT or index < skipped:
                continue
            turns = messages[:index]
            turn_text = self._render_template(template, [*turns, message], tools).text
            prompt_text = self._render_template(template, turns, tools, prompt=True).text
            if not turn_text.startswith(prompt_text):
                # The template begins an assistant's turn differently when it asks for one.
                prompt_text = self._render_template(template, turns, tools).text
            if not turn_text.startswith(prompt_text) or not text.startswith(turn_text):
                raise UnfitRowError(
                    f"the chat template of {self._name} renders message {index + 1} or those "
                    "before it otherwise when more follows, so the assistant's "
                    "words cannot be told apart; mark them in the template by {% generation %} and "
                    "{% endgeneration %}"
                )
            if len(turn_text) > len(prompt_text):
                spans.append((len(prompt_text), len(turn_text)))
        return tuple(spans)

    def _render_template(
        self, template: Template, messages: Sequence[Any], tools: Any = None, prompt: bool = False
    ) -> Rendering:
        import jinja2

        try:
            return template.render(messages, tools, prompt=prompt)
        except jinja2.TemplateError as error:
            # raise_exception in a template raises a TemplateError.
            problem = f"refuses its messages: {error}"
        except Exception as error:
            # The code of the template runs here.
            problem = f"fails on its messages: {type(error).__name__}: {error}"
        raise UnfitRowError(f"the chat template of {self._name} {problem}")

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
    """Return the default template and the one for rows with tools, if any. Raises SpecError."""
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
