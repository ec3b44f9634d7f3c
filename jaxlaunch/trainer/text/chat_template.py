"""Chat templates as transformers renders them: jinja2 in its sandbox, with the same filters, functions and tags.

After `transformers.utils.chat_template_utils` 4.57. One thing differs: `strftime_now` tells DAY, so that the same files
give the same rows whenever they are prepared.
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
DAY = datetime.datetime(2024, 7, 26)

Spans = tuple[tuple[int, int], ...]


class Rendering(NamedTuple):
    """A text, and the characters of it, from and to, that lie inside of {% generation %}."""

    text: str
    spans: Spans


class MarksError(Exception):
    """A {% generation %} block whose place in the text cannot be known."""


class _Marks(Extension):
    """The tag {% generation %} … {% endgeneration %}, which records where its blocks lie in what is rendered."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        # Whether the template contains the tag; known after parsing.
        self.are_there = False
        # Number of characters rendered so far.
        self.length = 0
        self.blocks: list[tuple[int, str]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a call of `keep` with the block."""
        self.are_there = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("keep"), [], [], body).set_lineno(line)

    def keep(self, caller: Callable[[], str]) -> str:
        """Record a block where it is rendered."""
        text = caller()
        self.blocks.append((self.length, text))
        return text


class Template:
    """A template and the special tokens that it may name. Raises jinja2.TemplateSyntaxError for what is none."""

    def __init__(self, source: str, tokens: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": DAY.strftime}
        marks = environment.extensions[_Marks.identifier]
        assert isinstance(marks, _Marks)
        self._marks, self._tokens = marks, tokens
        self._template = environment.from_string(source)
        self.has_marks = marks.are_there

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None = None, *, prompt: bool = False) -> Rendering:
        """Render the chat in which `tools` may be called, followed by the start of an assistant's turn if `prompt`.

        Raises jinja2.TemplateError where the template refuses it, MarksError, and anything that its code raises.
        """
        self._marks.length, self._marks.blocks = 0, []
        pieces: list[str] = []
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        for piece in self._template.generate(**given, **self._tokens):
            pieces.append(piece)
            self._marks.length += len(piece)
        text = "".join(pieces)
        for start, block in self._marks.blocks:
            if not text.startswith(block, start):
                raise MarksError("its {% generation %} is inside of a macro or a set block, where it marks no place")
        return Rendering(text, tuple((start, start + len(block)) for start, block in self._marks.blocks if block))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode without jinja2's own escapes of < and >, which are for a page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
