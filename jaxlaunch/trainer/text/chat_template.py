"""Chat templates, rendered as in transformers: sandboxed jinja2 with the same extensions.

This follows `transformers.utils.chat_template_utils` 4.57, except that `strftime_now` uses a fixed
date, so that the same files give the same rows at any time.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The date that Llama's own templates use if there is no clock.
FIXED_DATE = datetime.datetime(2024, 7, 26)

Spans = tuple[tuple[int, int], ...]


class Rendering(NamedTuple):
    """A text, and the ranges of its characters inside {% generation %} blocks."""

    text: str
    spans: Spans


class GenerationTagError(Exception):
    """A {% generation %} block whose place in the text is unknown."""


class _GenerationTag(Extension):
    """The tag {% generation %} … {% endgeneration %}, which records the places of its blocks."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        # Whether the template contains the tag; known after parsing.
        self.is_used = False
        # Number of characters rendered so far.
        self.length = 0
        self.blocks: list[tuple[int, str]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a call of `keep` with the block."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("keep"), [], [], body).set_lineno(line)

    def keep(self, caller: Callable[[], str]) -> str:
        """Record a block when it is rendered."""
        text = caller()
        self.blocks.append((self.length, text))
        return text


class Template:
    """A template and its special tokens. Raises jinja2.TemplateSyntaxError if it is invalid."""

    def __init__(self, source: str, tokens: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = FIXED_DATE.strftime
        marks = environment.extensions[_GenerationTag.identifier]
        assert isinstance(marks, _GenerationTag)
        self._marks, self._tokens = marks, tokens
        self._template = environment.from_string(source)
        self.has_marks = marks.is_used

    def render(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None, *, prompt: bool = False
    ) -> Rendering:
        """Render a chat with `tools`, and the start of an assistant's turn if `prompt`.

        Raises jinja2.TemplateError if the template refuses it, GenerationTagError, and any error of
        its code.
        """
        self._marks.length, self._marks.blocks = 0, []
        text = ""
        context = {"messages": messages, "tools": tools, "documents": None}
        pieces = self._template.generate(**context, add_generation_prompt=prompt, **self._tokens)
        for piece in pieces:
            text += piece
            self._marks.length = len(text)
        blocks = [(start, block) for start, block in self._marks.blocks if block]
        if not all(text.startswith(block, start) for start, block in blocks):
            problem = "is inside of a macro or a set block, where it marks no place"
            raise GenerationTagError(f"its {{% generation %}} {problem}")
        return Rendering(text, tuple((start, start + len(block)) for start, block in blocks))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
