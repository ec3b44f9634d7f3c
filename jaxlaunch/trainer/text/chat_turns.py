"""Locates the assistant's turns in the text of a chat, which are the characters to be learned.

A turn begins after the text that the template writes to prompt for an answer, and ends where the
next message begins. Marks in the text (`chat_template.Template.render_sections`) show where each
message is, so a template may write earlier turns differently when later ones follow. A template
without a loop over messages must only append to the text of the earlier turns.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from jaxlaunch.trainer.text.chat_template import Rendering, Section, Spans, Template
from jaxlaunch.trainer.text.documents import UnfitRowError

ASSISTANT = "assistant"
# The last character of a part of a turn's header, such as `<|assistant|>` or `Assistant:`.
_HEADER_PART_END = re.compile("[\n>\\]:\uff5c]")
# The last token of a prompt, such as `<|middle|>`.
_LAST_PART = re.compile(r"<[^<>]+>\s*$")
MARKS_HINT = "mark them in the template by {% generation %} and {% endgeneration %}"

Messages = Sequence[Mapping[str, Any]]
Sections = list[Section]


class RowTemplate:
    """A template with the tools and options of one row. Rendering raises UnfitRowError."""

    def __init__(
        self,
        name: str,
        template: Template,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.template = name, template
        self.tools, self.options = tools, options

    def render(self, messages: Messages, *, prompt: bool = False) -> Rendering:
        """Render messages, with the start of an assistant's turn if `prompt`."""
        try:
            return self.template.render(messages, self.tools, self.options, prompt=prompt)
        except jinja2.TemplateError as error:
            # raise_exception in a template raises a TemplateError.
            problem = f"refuses its messages: {error}"
        except Exception as error:
            # The code of the template runs here.
            problem = f"fails on its messages: {type(error).__name__}: {error}"
        if any("content" not in message for message in messages):
            problem += '; a message has no content, and some templates need "content": ""'
        raise UnfitRowError(f"the chat template of {self.name} {problem}")

    def try_render(self, messages: Messages, *, prompt: bool = False) -> Rendering | None:
        """Render messages as `render` does, or return None if the template refuses them."""
        try:
            return self.render(messages, prompt=prompt)
        except UnfitRowError:
            return None

    def render_sections(self, messages: Messages, *, prompt: bool = False) -> tuple[str, Sections]:
        """Return the text and the sections of messages, both empty if the marked template fails."""
        try:
            return self.template.render_sections(messages, self.tools, self.options, prompt=prompt)
        except Exception:
            # The code of the template runs here, and may fail because of the marks.
            return "", []

    def prompt_text(self, messages: Messages) -> str:
        """Return the text that the template adds to messages to prompt for an answer, or ""."""
        text, sections = self.render_sections(messages, prompt=True)
        ends = [part.end for part in sections if part.message is not None]
        if ends and ends[-1] < len(text):
            return text[ends[-1] :]
        plain, prompt = self.try_render(messages), self.try_render(messages, prompt=True)
        if plain is not None and prompt is not None and prompt.text.startswith(plain.text):
            return prompt.text[len(plain.text) :]
        return ""

    @functools.cached_property
    def default_prompt(self) -> str:
        """The text that the template adds to a question to prompt for an answer, or ""."""
        return self.prompt_text([{"role": "user", "content": "a question"}])


class Turns:
    """The text of a chat, and the spans of each of the assistant's turns in it.

    The key None of `spans_by_message` has the {% generation %} blocks outside of all loops over
    messages. Raises UnfitRowError if the template refuses the chat or a turn cannot be located.
    """

    def __init__(self, row: RowTemplate, messages: Messages) -> None:
        self._row, self._messages = row, messages
        rendering = row.render(messages)
        self.text = rendering.text
        text, sections = row.render_sections(messages)
        self.sections = self._extend_last_turn(sections) if text == self.text else []
        self.spans_by_message: dict[int | None, Spans] = {}
        if row.template.has_generation_tag:
            for span in rendering.spans:
                owner = self._message_at(span[0])
                self.spans_by_message[owner] = (*self.spans_by_message.get(owner, ()), span)
            return
        for index, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                self.spans_by_message[index] = self._turn_spans(index)

    @property
    def preamble(self) -> str:
        """The text before the first message."""
        first = next((part.start for part in self.sections if part.message is not None), None)
        return self.text[:first]

    def message_text(self, index: int) -> str:
        """Return the text that the template writes for a message."""
        spans = ((part.start, part.end) for part in self.sections if part.message == index)
        return "".join(self.text[start:end] for start, end in spans)

    def target_text(self, index: int | None) -> str:
        """Return the text of the spans of a message, and of those whose message is unknown."""
        owners = dict.fromkeys((None, index))
        return "".join(
            self.text[start:end]
            for owner in owners
            for start, end in self.spans_by_message.get(owner, ())
        )

    def _extend_last_turn(self, sections: Sections) -> Sections:
        """Add the text after the last message to its section, if it is an assistant's message."""
        last = len(self._messages) - 1
        numbers = [number for number, part in enumerate(sections) if part.message is not None]
        end = numbers[-1] + 1 if numbers else len(sections)
        if end == len(sections) or self._messages[last]["role"] != ASSISTANT:
            return sections
        is_written = any(part.message == last for part in sections)
        if is_written and self._prompt_text(last).startswith(self.text[sections[end].start :]):
            # Some templates always prompt for an answer at the end.
            return sections
        return [*sections[:end], *(part._replace(message=last) for part in sections[end:])]

    def _message_at(self, position: int) -> int | None:
        return next(
            (part.message for part in self.sections if part.start <= position < part.end), None
        )

    def _turn_spans(self, index: int) -> Spans:
        if all(part.message is None for part in self.sections):
            return self._added_span(index)
        parts = [part for part in self.sections if part.message == index]
        if not parts:
            # The template leaves the message out.
            return ()
        _, start, end = parts[0]
        start += self._header_length(index, self.text[start:end])
        edges = [start, end]
        for part in parts[1:]:
            # A section that continues the previous one extends its span.
            edges[-1:] = (
                [part.end] if part.start == edges[-1] else [edges[-1], part.start, part.end]
            )
        spans = zip(edges[::2], edges[1::2], strict=True)
        return tuple((start, end) for start, end in spans if start < end)

    def _header_length(self, index: int, turn: str) -> int:
        """Return the length of the header of a turn, which the prompt for an answer contains."""
        words_start = _find_first_words(turn, self._messages[index])
        prompt = self._prompt_text(index)
        length = _match_prompt(turn, prompt, words_start)
        # The template may not prompt for an answer after the earlier messages, and yet write the
        # header of one.
        return length or _match_prompt(turn, self._row.default_prompt, words_start)

    def _prompt_text(self, index: int) -> str:
        """Return the text that prompts for message `index` after the earlier messages."""
        return self._row.prompt_text(self._messages[:index])

    def _added_span(self, index: int) -> Spans:
        """Return the span that a message adds to the text of the earlier messages."""
        earlier = self._messages[:index]
        turn_text = self._row.render(self._messages[: index + 1]).text
        prompt_text = self._row.render(earlier, prompt=True).text
        words_start = _find_first_words(turn_text[len(prompt_text) :], self._messages[index])
        start = _match_prompt(turn_text, prompt_text, len(prompt_text) + words_start)
        is_added = turn_text.startswith(self._row.render(earlier).text, 0, start)
        if not is_added or not self.text.startswith(turn_text):
            raise UnfitRowError(
                f"the chat template of {self._row.name} renders message {index + 1} or those "
                "before it otherwise when more follows, and not in a loop over the messages, so "
                f"the assistant's words cannot be told apart; {MARKS_HINT}"
            )
        return ((start, len(turn_text)),) if start < len(turn_text) else ()


def _find_first_words(turn: str, message: Mapping[str, Any]) -> int:
    """Return where the first words of a message begin in its turn, or else the turn's length."""
    texts = (message.get(key) for key in ("reasoning_content", "content"))
    words = [text.strip()[:16] for text in texts if isinstance(text, str)]
    positions = [turn.find(start) for start in words if start]
    return min((position for position in positions if position >= 0), default=len(turn))


def _match_prompt(turn: str, prompt: str, words_start: int) -> int:
    """Return the end of a turn's header, which matches the prompt for the turn, or 0.

    The beginning of the text may precede the prompt. If the prompt continues otherwise than the
    turn, for example with a block of reasoning, the header ends with its last part that both have.
    A header with a name in it ends with the last token of the prompt.
    """
    if not prompt:
        return 0
    position = turn.find(prompt)
    if 0 <= position <= words_start - len(prompt):
        return position + len(prompt)
    common = os.path.commonprefix([turn, prompt])
    ends = [match.end() for match in _HEADER_PART_END.finditer(common)]
    last_part = _LAST_PART.search(prompt)
    if common and last_part is not None:
        position = turn.find(last_part.group(), ends[-1] if ends else 0, words_start)
        ends += [position + len(last_part.group())] if position >= 0 else []
    return ends[-1] if ends else 0
