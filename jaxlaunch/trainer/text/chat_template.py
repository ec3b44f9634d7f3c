"""Renders chat templates as transformers does, and locates each message in the rendered text.

Templates run in a sandbox of jinja2 with the extensions of `transformers.utils.chat_template_utils`
of version 5, except that `strftime_now` uses a fixed date, so that the same files give the same
rows at any time.

Messages are located without searching for their text. The template is compiled a second time with
calls at the beginning of the body of every loop and after it. The calls write marks into the text
where a loop reaches a message and where it ends. If the marked text without its marks differs from
the plain text, the template depends on its own output, and the messages cannot be located.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The date that the templates of Llama use if strftime_now is not defined.
FIXED_DATE = datetime.datetime(2024, 7, 26)
# The beginning of a mark, two noncharacters of Unicode, which no text contains.
MARK = "\ufdd0\ufdd1"
_MARKS = re.compile(f"{MARK}([0-9]+):([0-9]*);")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

Spans = tuple[tuple[int, int], ...]


class Rendering(NamedTuple):
    """A text, and the ranges of its characters in {% generation %} blocks."""

    text: str
    spans: Spans


class Section(NamedTuple):
    """A range of the text, and the index of its message, None for text outside of messages."""

    message: int | None
    start: int
    end: int


class GenerationTagError(Exception):
    """Raised for a {% generation %} block whose place in the text is unknown."""


class _GenerationTag(Extension):
    """The tag {% generation %} … {% endgeneration %}, which records the places of its blocks.

    It also provides the calls that write the marks of messages.
    """

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        # Whether the template contains the tag; known after parsing.
        self.is_used = False
        # Number of characters rendered so far.
        self.length = 0
        self.blocks: list[tuple[int, str]] = []
        # The index of each message by its `id`; empty without marks.
        self._index_by_id: dict[int, int] = {}
        # Loops that have reached a message and not ended, and whether it is their loop variable.
        self._open_loops: dict[int, bool] = {}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a node that calls `record_block` with the block."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("record_block"), [], [], body).set_lineno(line)

    def record_block(self, caller: Callable[[], str]) -> str:
        """Render a block and record its place."""
        text = caller()
        self.blocks.append((self.length, text))
        return text

    def start_rendering(self, messages: Sequence[Any]) -> None:
        """Reset the record of blocks, and the messages to mark."""
        self.length, self.blocks = 0, []
        self._index_by_id = {id(message): index for index, message in enumerate(messages)}
        self._open_loops = {}

    def enter_message(self, loop: int, value: Any, is_variable: bool) -> str:
        """Return the mark of a message that a loop has reached, or "" for another value."""
        index = self._index_by_id.get(id(value))
        # A loop over messages may also assign other messages, such as the previous one.
        if index is None or (not is_variable and self._open_loops.get(loop)):
            return ""
        self._open_loops[loop] = is_variable
        return f"{MARK}{loop}:{index};"

    def leave_loop(self, loop: int) -> str:
        """Return the mark of the end of a loop over messages, or "" for another loop."""
        return "" if self._open_loops.pop(loop, None) is None else f"{MARK}{loop}:;"


class Template:
    """A template and its special tokens. Raises jinja2.TemplateSyntaxError if it is invalid."""

    def __init__(self, source: str, tokens: Mapping[str, Any]) -> None:
        self._source, self._tokens = source, tokens
        self._tag, self._template = _compile_source(source, has_marks=False)
        self.has_generation_tag = self._tag.is_used

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        prompt: bool = False,
    ) -> Rendering:
        """Render a chat with `tools`, and the start of an assistant's turn if `prompt`.

        `options` are further variables of the template. Raises jinja2.TemplateError if the template
        refuses the chat, GenerationTagError, and any exception of the template's code.
        """
        context = self._make_context(messages, tools, options, prompt)
        return _generate_text(self._tag, self._template, context, has_marks=False)

    def render_sections(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        prompt: bool = False,
    ) -> tuple[str, list[Section]]:
        """Render as `render` does, and return the text and its sections in order.

        The text differs from that of `render` if the template depends on its own output.
        """
        context = self._make_context(messages, tools, options, prompt)
        # Texts alternate with the loop and the message of a mark, which is "" at the end of a loop.
        pieces = _MARKS.split(_generate_text(*self._marked, context, has_marks=True).text)
        sections = []
        end = 0
        # The message that each of the nested loops has reached.
        message_by_loop: dict[str, int] = {}
        for piece, loop, index in itertools.zip_longest(pieces[::3], pieces[1::3], pieces[2::3]):
            if piece:
                # An inner loop may write later messages, or search earlier ones, for example for an
                # id.
                message = max(message_by_loop.values(), default=None)
                sections.append(Section(message, end, end := end + len(piece)))
            if index:
                message_by_loop[loop] = int(index)
            else:
                message_by_loop.pop(loop, None)
        return "".join(pieces[::3]), sections

    @functools.cached_property
    def _marked(self) -> tuple[_GenerationTag, jinja2.Template]:
        return _compile_source(self._source, has_marks=True)

    def _make_context(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any] | None,
        prompt: bool,
    ) -> dict[str, Any]:
        context: dict[str, Any] = {"messages": messages, "tools": tools, "documents": None}
        context["add_generation_prompt"] = prompt
        return {**self._tokens, **(options or {}), **context}


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as transformers 5 passes them to a template.

    Keys whose value is null are left out, because many templates write "None" for them. Reasoning
    gets all names under which templates read it.
    """
    normalized = []
    for message in messages:
        values = {key: value for key, value in message.items() if value is not None}
        reasoning = next((values[key] for key in REASONING_KEYS if key in values), None)
        if reasoning is not None:
            values = {"thinking": reasoning, **values, "reasoning_content": reasoning}
        normalized.append(values)
    return normalized


def _generate_text(
    tag: _GenerationTag,
    template: jinja2.Template,
    context: Mapping[str, Any],
    *,
    has_marks: bool,
) -> Rendering:
    tag.start_rendering(context["messages"] if has_marks else ())
    text = ""
    for piece in template.generate(**context):
        text += piece
        tag.length = len(text)
    blocks = [(start, block) for start, block in tag.blocks if block]
    if not all(text.startswith(block, start) for start, block in blocks):
        problem = "is inside of a macro or a set block, where it marks no place"
        raise GenerationTagError(f"its {{% generation %}} {problem}")
    return Rendering(text, tuple((start, start + len(block)) for start, block in blocks))


def _compile_source(source: str, *, has_marks: bool) -> tuple[_GenerationTag, jinja2.Template]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = FIXED_DATE.strftime
    tag = environment.extensions[_GenerationTag.identifier]
    assert isinstance(tag, _GenerationTag)
    tree = environment.parse(source)
    if has_marks:
        _add_marks(tree, tag, itertools.count(), None)
    return tag, environment.from_string(tree)


def _add_marks(
    node: nodes.Node, tag: _GenerationTag, loops: Iterator[int], loop: int | None
) -> None:
    """Add the calls that write marks to all loops below a node, which is in loop `loop`."""
    for _, value in node.iter_fields():
        statements = value if isinstance(value, list) else []
        for index in reversed(range(len(statements))):
            statement = statements[index]
            if isinstance(statement, nodes.For):
                number = next(loops)
                _add_marks(statement, tag, loops, number)
                variables = [statement.target, *statement.target.find_all(nodes.Name)]
                names = [name.name for name in variables if isinstance(name, nodes.Name)]
                calls = [_enter_call(tag, number, name, is_variable=True) for name in names]
                statement.body[:0] = calls
                statements.insert(index + 1, _method_call(tag, "leave_loop", [number]))
            elif isinstance(statement, nodes.Assign):
                if loop is not None and isinstance(statement.target, nodes.Name):
                    name = statement.target.name
                    call = _enter_call(tag, loop, name, is_variable=False)
                    statements.insert(index + 1, call)
            elif isinstance(statement, nodes.Node):
                _add_marks(statement, tag, loops, loop)


def _enter_call(tag: _GenerationTag, loop: int, name: str, *, is_variable: bool) -> nodes.Output:
    return _method_call(tag, "enter_message", [loop, nodes.Name(name, "load"), is_variable])


def _method_call(tag: _GenerationTag, method: str, arguments: Sequence[Any]) -> nodes.Output:
    expressions = [
        argument if isinstance(argument, nodes.Expr) else nodes.Const(argument)
        for argument in arguments
    ]
    return nodes.Output([tag.call_method(method, expressions)])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON, without the HTML escapes of jinja2's filter `tojson`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
