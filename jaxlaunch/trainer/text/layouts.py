"""Recognizes the layouts of rows: the columns by which public datasets name prompts and answers.

`LAYOUTS` is the table of all layouts. A row has the first layout of its format whose columns it
has, and is converted to the columns that the rest of the trainer reads:

| format | columns |
|---|---|
| chat | `messages`, or `prompt` and `completion` that are texts |
| preference | `chosen`, `rejected`, and optionally `prompt` or `question`, and `system` |
| kto | as chat, and `label` |

The columns `tools` and `chat_template_kwargs` belong to every layout, and columns that no layout
reads are kept, so that they can be reported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jaxlaunch.trainer.text.documents import UnfitRowError, Values, describe_value

MESSAGES, PROMPT, COMPLETION, SYSTEM, LABEL = "messages", "prompt", "completion", "system", "label"
# Optional columns of every layout: the tools that the assistant may call, and variables of the
# chat template.
TOOLS, OPTIONS = "tools", "chat_template_kwargs"
CHOSEN, REJECTED, QUESTION, INPUT, HISTORY = "chosen", "rejected", "question", "input", "history"
ROLE, FROM = "role", "from"
USER, ASSISTANT = "user", "assistant"
Format = Literal["chat", "preference", "kto"]
CHAT: Format = "chat"
PREFERENCE: Format = "preference"
KTO: Format = "kto"

Names = Mapping[str, tuple[str, ...]]
_SYSTEM_NAMES: Names = {SYSTEM: (SYSTEM, "system_prompt")}
_MESSAGES_NAMES = (MESSAGES, "conversations", "conversation")
# Roles of ShareGPT, which names the speaker of a message in `from`.
_ROLES = {
    "human": USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "model": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}


class Layout(NamedTuple):
    """A layout of rows.

    Attributes:
        name: The name, which `data.format` can give.
        format: What rows of this layout are: chat, preference or kto.
        required: For each part of a row, the columns that may contain it.
        optional: The same for parts that a row may lack.
        key: The key of each message, for layouts of messages.
        has_texts: Whether the required parts must be texts.
    """

    name: str
    format: Format
    required: Names
    optional: Names = {}
    key: str | None = None
    has_texts: bool = False


LAYOUTS = (
    Layout("messages", CHAT, {MESSAGES: _MESSAGES_NAMES}, key=ROLE),
    Layout("sharegpt", CHAT, {MESSAGES: _MESSAGES_NAMES}, _SYSTEM_NAMES, key=FROM),
    Layout("completion", CHAT, {PROMPT: (PROMPT,), COMPLETION: (COMPLETION,)}, _SYSTEM_NAMES),
    Layout(
        "alpaca",
        CHAT,
        {PROMPT: ("instruction",), COMPLETION: ("output", "response")},
        {INPUT: (INPUT, "context"), HISTORY: (HISTORY,), **_SYSTEM_NAMES},
        has_texts=True,
    ),
    Layout(
        "question",
        CHAT,
        {
            PROMPT: (QUESTION, "query", "problem", PROMPT, "inputs", INPUT),
            COMPLETION: ("answer", "response", "solution", "targets", "output"),
        },
        _SYSTEM_NAMES,
        has_texts=True,
    ),
    Layout(
        PREFERENCE,
        PREFERENCE,
        {
            CHOSEN: (CHOSEN, "chosen_response", "response_j"),
            REJECTED: (REJECTED, "rejected_response", "response_k"),
        },
        {
            PROMPT: (PROMPT, MESSAGES, QUESTION, "query", "instruction", "conversations"),
            INPUT: (INPUT,),
            **_SYSTEM_NAMES,
        },
    ),
    Layout(
        KTO,
        KTO,
        {PROMPT: (PROMPT,), COMPLETION: (COMPLETION, "response"), LABEL: (LABEL, "kto_tag")},
        _SYSTEM_NAMES,
    ),
    Layout(KTO, KTO, {MESSAGES: _MESSAGES_NAMES, LABEL: (LABEL, "kto_tag")}, _SYSTEM_NAMES),
)


class Row(NamedTuple):
    """A row with the columns of its format.

    Attributes:
        values: The columns, including those that no layout reads.
        layout: The name of the layout, and the columns that it took.
        sources: The columns of the messages, or of the prompt and the completion.
        unread: The columns with a value that the layout does not read.
        is_usual: Whether the columns have the names of the format, so that nothing was converted.
        is_plain: Whether the prompt and the completion are texts, which need no messages.
        prompt_messages: The number of messages that precede the answer; 0 if all are trained.
    """

    values: Values
    layout: str
    sources: tuple[str, ...]
    unread: tuple[str, ...] = ()
    is_usual: bool = True
    is_plain: bool = False
    prompt_messages: int = 0


def find_layouts(row_format: str, field: str | None = None) -> tuple[Layout, ...]:
    """Return the layouts of a format, or the layout with this name.

    If the job names the `field` of the messages, they are the layouts with messages there.
    """
    matches = [layout for layout in LAYOUTS if layout.format == row_format]
    matches = matches or [layout for layout in LAYOUTS if layout.name == row_format]
    if field is not None:
        matches = [
            layout._replace(required={**layout.required, MESSAGES: (field,)})
            for layout in matches
            if MESSAGES in layout.required
        ]
    return tuple(matches)


def list_columns(row_format: str, field: str | None = None) -> tuple[str, ...]:
    """Return all columns that the layouts of a format read."""
    columns: dict[str, None] = {}
    for layout in find_layouts(row_format, field):
        for names in (*layout.required.values(), *layout.optional.values()):
            columns |= dict.fromkeys(names)
    return tuple(columns)


def read_row(values: Values, row_format: str, field: str | None = None) -> Row:
    """Return a row with the columns of its format.

    Args:
        values: The columns of the row.
        row_format: A format, or the name of the only layout to try.
        field: The column of the messages, if the job names one.

    Raises:
        UnfitRowError: The row has none of the layouts. The message names its columns.
    """
    for layout in find_layouts(row_format, field):
        if (columns := match_layout(layout, values)) is not None:
            return _convert_row(layout, columns, values)
    # Report what is wrong with the values of a column that names the layout by itself.
    decisive = {CHAT: (field or MESSAGES,), MESSAGES: (field or MESSAGES,)}
    for name in decisive.get(row_format, (CHOSEN, REJECTED) if row_format == PREFERENCE else ()):
        if values.get(name) is not None:
            return Row({**values, MESSAGES: values.get(field or MESSAGES)}, row_format, (name,))
    mismatch = (
        f"it has the columns {', '.join(values) or 'none'}, and data.format = {row_format} reads "
        f"the layouts {describe_layouts(row_format, field)}"
    )
    raise UnfitRowError("; ".join([*find_unfit_values(values, row_format, field), mismatch]))


def describe_layouts(row_format: str, field: str | None = None) -> str:
    """Return the layouts of a format with the columns that each requires."""
    return "; ".join(
        f"{layout.name}: {' and '.join('/'.join(names) for names in layout.required.values())}"
        for layout in find_layouts(row_format, field)
    )


def find_unfit_values(values: Values, row_format: str, field: str | None = None) -> list[str]:
    """Return a sentence about each value that is wrong in a layout whose columns the row has."""
    problems: dict[str, str] = {}
    for layout in find_layouts(row_format, field):
        present = {
            part: [name for name in names if values.get(name) is not None]
            for part, names in layout.required.items()
        }
        for part, names in present.items() if all(present.values()) else ():
            if not any(_fits(layout, part, values[name]) for name in names):
                name, need = names[0], f"the layout {layout.name} needs a text"
                kind = "an empty list" if values[name] == [] else describe_value(values[name])
                if part == MESSAGES:
                    need = "messages are objects with role and content, or from and value"
                elif part == LABEL:
                    need = "a label is true, false, 0 or 1"
                problems.setdefault(name, f"its {name!r} is {kind}, and {need}")
    return [*problems.values()]


def recognize_row(values: Values) -> tuple[str, Row] | None:
    """Return the format of a row and the row in its layout, or None if it has none."""
    # Rated rows have the columns of a chat, too.
    for row_format in (PREFERENCE, KTO, CHAT):
        for layout in find_layouts(row_format):
            if (columns := match_layout(layout, values)) is not None:
                return row_format, _convert_row(layout, columns, values)
    return None


def match_layout(layout: Layout, values: Values) -> dict[str, str] | None:
    """Return the column of each part of a row in this layout, or None if it has another one."""
    columns: dict[str, str] = {}
    for part, names in layout.required.items():
        name = next((name for name in names if _fits(layout, part, values.get(name))), None)
        if name is None:
            return None
        columns[part] = name
    for part, names in layout.optional.items():
        used_names = [*columns.values()]
        unused_names = (
            name for name in names if values.get(name) is not None and name not in used_names
        )
        if name := next(unused_names, None):
            columns[part] = name
    return columns


def _fits(layout: Layout, part: str, value: Any) -> bool:
    """Return whether a value can be a part of a row in a layout."""
    if value is None:
        return False
    if part == LABEL:
        return isinstance(value, bool) or value in (0, 1)
    if part == MESSAGES:
        messages = parse_messages(value)
        first = messages[0] if isinstance(messages, list) and messages else None
        keys = (ROLE, FROM) if layout.key is None else (layout.key,)
        return isinstance(first, dict) and any(key in first for key in keys)
    return not layout.has_texts or isinstance(value, str)


def parse_messages(value: Any) -> Any:
    """Return the messages of a list, a single message or their JSON; other values as they are."""
    messages = value
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            messages = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(messages, dict) and (ROLE in messages or FROM in messages):
        return [messages]
    return messages if isinstance(messages, list) else value


def _parse_part(value: Any) -> Any:
    """Return the messages of a column that may contain a text, or the text.

    The text may be JSON without messages, such as an answer that is an object.
    """
    messages = parse_messages(value)
    if isinstance(value, str) and not (messages and all(map(_is_message, messages))):
        return value
    return messages


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    has_content = "content" in value or "tool_calls" in value
    is_role, is_speaker = (isinstance(value.get(key), str) for key in (ROLE, FROM))
    return (is_role and has_content) or (is_speaker and "value" in value)


def _convert_row(layout: Layout, columns: Mapping[str, str], values: Values) -> Row:
    parts = {part: values[name] for part, name in columns.items()}
    prompt, completion = (_parse_part(parts.get(part)) for part in (PROMPT, COMPLETION))
    # A prompt of a preference that is not named so is a question, which an input may follow.
    is_prompt = layout.format == PREFERENCE and columns.get(PROMPT) in (PROMPT, MESSAGES)
    if parts.get(INPUT) and (is_prompt or not isinstance(prompt, str)):
        columns = {part: name for part, name in columns.items() if part != INPUT}
        del parts[INPUT]
    taken = (*columns.values(), TOOLS, OPTIONS)
    others = {name: value for name, value in values.items() if name not in columns.values()}
    is_named = all(columns[part] == part for part in layout.required)
    row = Row(
        others,
        f"{layout.name} ({', '.join(columns.values())})",
        tuple(columns[part] for part in layout.required if part != LABEL),
        tuple(name for name in values if name not in taken and values[name] is not None),
        is_usual=is_named and layout.name in (MESSAGES, PREFERENCE, KTO),
    )
    if layout.format == PREFERENCE:
        return row._replace(values=others | _convert_preference(columns, parts))
    if layout.format == KTO:
        others[LABEL] = bool(parts[LABEL])
    system = (columns.get(SYSTEM, SYSTEM), parts.get(SYSTEM))
    if MESSAGES in parts:
        messages = _convert_messages(parse_messages(parts[MESSAGES]))
        messages = _prepend_system(messages, *system)
        prompt_count = len(messages) - 1 if layout.format == KTO else 0
        return row._replace(values={**others, MESSAGES: messages}, prompt_messages=prompt_count)
    is_text = isinstance(prompt, str) and isinstance(completion, str)
    if is_text and not layout.has_texts and not parts.get(SYSTEM):
        texts = {PROMPT: prompt, COMPLETION: completion}
        return row._replace(values=others | texts, is_plain=True)
    if parts.get(INPUT):
        prompt = f"{prompt}\n{parts[INPUT]}"
    history = _parse_history(parts.get(HISTORY))
    prompt_messages = _prepend_system([*history, *_as_messages(USER, prompt)], *system)
    messages = [*prompt_messages, *_as_messages(ASSISTANT, completion)]
    # In a conversation by columns, earlier answers are trained too.
    prompt_count = 0 if history else len(prompt_messages)
    return row._replace(values={**others, MESSAGES: messages}, prompt_messages=prompt_count)


def _convert_preference(columns: Mapping[str, str], parts: Values) -> dict[str, Any]:
    """Return the columns of a preference. A prompt that is not named so is a question."""
    converted = {part: _as_list(parts[part]) for part in (CHOSEN, REJECTED)}
    if PROMPT in parts:
        prompt = _as_list(parts[PROMPT])
        is_question = isinstance(prompt, str) and columns[PROMPT] not in (PROMPT, MESSAGES)
        if parts.get(INPUT):
            prompt = f"{prompt}\n{parts[INPUT]}"
        converted[QUESTION if is_question else PROMPT] = prompt
    return converted | ({SYSTEM: parts[SYSTEM]} if SYSTEM in parts else {})


def _as_list(value: Any) -> Any:
    messages = _parse_part(value)
    return _convert_messages(messages) if isinstance(messages, list) else messages


def _as_messages(role: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        return [{ROLE: role, "content": value}]
    if not isinstance(value, list):
        problem = f"the message of its {role} is {describe_value(value)}"
        raise UnfitRowError(f"{problem}, neither a text nor a list of messages")
    return _convert_messages(value)


def _convert_messages(messages: list[Any]) -> list[Any]:
    """Rename the keys and the roles of ShareGPT; other messages stay as they are."""
    return [
        {
            **{key: value for key, value in message.items() if key not in (FROM, "value")},
            ROLE: _ROLES.get(message[FROM], message[FROM]),
            "content": message.get("value", message.get("content")),
        }
        if isinstance(message, dict) and isinstance(message.get(FROM), str) and ROLE not in message
        else message
        for message in messages
    ]


def _prepend_system(messages: list[Any], column: str, system: Any) -> list[Any]:
    """Return the messages after that of the column for the system. Raises UnfitRowError."""
    if not system:
        return messages
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if first.get(ROLE) != SYSTEM:
        return [{ROLE: SYSTEM, "content": system}, *messages]
    if first.get("content") != system:
        raise UnfitRowError(
            f"its {column!r} differs from its first message, a system message; keep one of them"
        )
    return messages


def _parse_history(history: Any) -> list[Any]:
    """Return the messages of earlier rounds, each a list of a question and an answer."""
    messages = []
    for number, turns in enumerate(history or [], 1):
        if not isinstance(turns, list | tuple) or len(turns) != 2:
            problem = f"its {HISTORY!r} has {describe_value(turns)} as round {number}"
            raise UnfitRowError(f"{problem}, not a list of a question and an answer")
        for role, text in zip((USER, ASSISTANT), turns, strict=True):
            messages.append({ROLE: role, "content": text})
    return messages
