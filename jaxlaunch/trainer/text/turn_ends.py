"""Finds the tokens with which a chat template ends an assistant's turn.

The tokenizer names one token that ends a text, but a chat template may end turns with another, such
as <|im_end|> or <|eot_id|>. A trial chat is rendered twice: with the answer as its last turn, and
with one more turn. The text that follows the answer in both ends a turn. The last special token in
that text is the result, because earlier ones may end a part of a turn, such as its reasoning.
Templates differ: Phi writes one more token after the last turn, gpt-oss writes another token there
than between turns, and GLM writes a token only between turns. A turn that calls a tool may end
differently (<|call|> of gpt-oss), so such a turn is rendered as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch.trainer.checkpoint import saved_files
from jaxlaunch.trainer.text.chats import ASSISTANT, ChatTemplates
from jaxlaunch.trainer.text.documents import UnfitRowError
from jaxlaunch.trainer.text.tokenizer import AddedToken, HuggingFaceTokenizer, Tokenizer

# Words that no template contains.
_QUESTION, _ANSWER = "trial-question", "trial-answer"
_TOOL = {
    "name": "trial_tool",
    "description": "a trial",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "description": "any text"}},
        "required": ["text"],
    },
}
# Mistral's templates accept only ids of nine letters and digits.
_CALL_ID = "trialcall"


def read_turn_ends(name: str, files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Return the tokens that end a turn, according to the files of the tokenizer `name`.

    The result is empty for files without a tokenizer or a chat template. Raises SpecError if they
    cannot be read or a package is missing.
    """
    has_template = any(file.endswith(".jinja") for file in files)
    if not has_template and b'"chat_template"' not in files.get("tokenizer_config.json", b""):
        return ()
    if saved_files.TOKENIZER_FILE not in files:
        return ()
    tokenizer = HuggingFaceTokenizer(name, files)
    return turn_end_tokens(ChatTemplates(tokenizer), tokenizer)


def turn_end_tokens(chats: ChatTemplates, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of the added tokens that end an assistant's turn, with or without a tool call.

    The result is empty if the template writes no such token, or refuses the trial messages: an
    answer then ends only with the tokenizer's own token.
    """
    trial = _TrialChats(chats, tokenizer.added_tokens)
    return tuple(dict.fromkeys([*trial.find_answer_ends(), *trial.find_call_ends()]))


class _TrialChats:
    """Renders trial chats, and finds the added tokens of the tokenizer in them."""

    def __init__(self, chats: ChatTemplates, added_tokens: Mapping[str, AddedToken]) -> None:
        self._chats = chats
        self._added_tokens = {name: token for name, token in added_tokens.items() if name.strip()}
        longest_first = sorted(self._added_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def find_answer_ends(self) -> list[int]:
        """Return the token that ends an answer."""
        for as_parts in (False, True):
            user = _message("user", _QUESTION, as_parts)
            suffixes = self._render_suffixes(user, _message(ASSISTANT, _ANSWER, as_parts), user)
            if suffixes is not None:
                last, inner = suffixes
                # Some tokenizers do not mark the token that ends a turn as special.
                plain = self._tokens(os.path.commonprefix([last, inner]))[-1:]
                return self._turn_end(last, inner) or plain or self._special_tokens(inner)[:1]
        return []

    def find_call_ends(self) -> list[int]:
        """Return the token that ends a turn with a call of a tool."""
        user = _message("user", _QUESTION)
        result = {**_message("tool", _QUESTION), "name": _TOOL["name"], "tool_call_id": _CALL_ID}
        tools = [{"type": "function", "function": _TOOL}]
        arguments = {"text": _ANSWER}
        for value in (arguments, json.dumps(arguments)):
            function = {"name": _TOOL["name"], "arguments": value}
            call = {"id": _CALL_ID, "type": "function", "function": function}
            turn = {**_message(ASSISTANT, ""), "tool_calls": [call]}
            suffixes = self._render_suffixes(user, turn, result, tools)
            if suffixes is not None:
                return self._turn_end(*suffixes) or self._special_tokens(suffixes[1])[:1]
        return []

    def _render_suffixes(
        self,
        user: Mapping[str, Any],
        turn: Mapping[str, Any],
        follower: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
    ) -> tuple[str, str] | None:
        """Return the text after `turn` as the last message, and the text between it and `follower`.

        The result is None if the template refuses the messages or omits the answer.
        """
        try:
            text = self._chats.render_text([user, turn], tools)
            request = self._chats.render_text([user], tools)
            always_prompts = request == self._chats.render_prompt([user], tools)
        except UnfitRowError:
            return None
        _, answer, last = text.rpartition(_ANSWER)
        if not answer:
            return None
        inner = ""
        with contextlib.suppress(UnfitRowError):
            longer_text = self._chats.render_text([user, turn, follower], tools)
            inner = longer_text.rpartition(_ANSWER)[2].partition(_QUESTION)[0]
        token = self._pattern.search(last)
        if always_prompts and token is not None and not inner.startswith(last):
            # The template writes the beginning of another answer after every chat.
            last = last[: token.end()]
        return last, inner

    def _turn_end(self, last: str, inner: str) -> list[int]:
        """Return the last special token of the common beginning of the texts, or else of `last`."""
        shared = os.path.commonprefix([last, inner])
        return self._special_tokens(shared)[-1:] or self._special_tokens(last)[-1:]

    def _tokens(self, text: str) -> list[int]:
        return [self._added_tokens[match[0]].id for match in self._pattern.finditer(text)]

    def _special_tokens(self, text: str) -> list[int]:
        matches = (self._added_tokens[match[0]] for match in self._pattern.finditer(text))
        return [token.id for token in matches if token.special]


def _message(role: str, text: str, as_parts: bool = False) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
