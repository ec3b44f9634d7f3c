"""Chats in many scripts, and templates such as models for chats have."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.text import chats as templates
from jaxlaunch.trainer.text import tokenizer
from tests.trainer.text import corpora

MARKS = "{% generation %}", "{% endgeneration %}"
CHATML = """\
{%- for message in messages %}
    {{- '<|begin|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|begin|>assistant\\n' }}{% endif %}
"""
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{{ '<|begin|>' + message['role'] + "
    "'<|end|>\\n\\n' }}(*{{ message['content'] | trim + eos_token }}*){% endfor %}{% if "
    "add_generation_prompt %}{{ '<|begin|>assistant<|end|>\\n\\n' }}{% endif %}"
)
TOOLS = """\
{% for message in messages %}
{% if message.role == 'system' %}
<<{{ message.content }}>>
{% elif message.role == 'tool' %}
[tool]{{ {'result': message.content} | tojson }}
{% elif message.role == 'user' %}
{% if not message.content %}{% continue %}{% endif %}
[user]{{ message.content }}
{% elif message.role == 'assistant' %}
[assistant]{% generation %}{{ message.content }}\
{% if message.calls is defined %}{{ message.calls | tojson(indent=1) }}\
{% endif %}{{ eos_token }}
{% endgeneration %}
{% else %}
{{ raise_exception('no role ' + message.role) }}
{% endif %}
{% endfor %}
"""


CALLS = (
    "{% if tools %}{{ tools | tojson(indent=2) }}"
    "{% for tool in tools %}|{{ tool.function.name }}{% endfor %}{% endif %}"
)


def llama(*, marked: bool) -> str:
    """With the assistant's words marked, or without marks: the same text."""
    begin, end = ("", "")
    if marked:
        begin = f"{{% if message['role'] == 'assistant' %}}{MARKS[0]}"
        end = f"{MARKS[1]}{{% else %}}"
        words = "{{ message['content'] | trim + eos_token }}"
        return LLAMA.replace(f"(*{words}*)", f"{begin}{words}{end}{words}{{% endif %}}")
    return LLAMA.replace("(*", begin).replace("*)", end)


def make_chats(count: int, seed: int = 0) -> list[list[dict[str, Any]]]:
    """Return chats of one to four rounds, some with a system turn, tools or empty turns."""
    draw = random.Random(seed)
    texts = corpora.make_texts(1000, seed=seed, longest=12)
    result = []
    for _ in range(count):
        chat: list[dict[str, Any]] = (
            [{"role": "system", "content": draw.choice(texts)}] if draw.random() < 0.5 else []
        )
        for _ in range(draw.randint(1, 4)):
            chat.append({"role": "user", "content": draw.choice([*texts, ""])})
            chat.append({"role": "assistant", "content": draw.choice(texts)})
            if draw.random() < 0.3:
                chat[-1]["calls"] = [
                    {"name": draw.choice(texts), "arguments": {"<x>": draw.random() < 0.5}}
                ]
                chat.append({"role": "tool", "content": draw.choice(texts)})
                chat.append({"role": "assistant", "content": draw.choice(texts)})
        result.append(chat)
    return result


def save_chat_tokenizer(folder: Path, template: Any, kind: str = "bpe", **config: Any) -> str:
    """A tokenizer with a chat template."""
    options = {"bos_token": "<|begin|>", "chat_template": template}
    return corpora.save_tokenizer(
        folder, kind, **(options if kind == "bpe" else {"chat_template": template}), **config
    )


def make_tools(number: int) -> list[dict[str, Any]] | None:
    """What may be called in the chat of this number: nothing in most."""
    schema = {
        "name": f"look_up_{number}",
        "description": "Что это? <b>",
        "parameters": {"type": "object"},
    }
    return [{"type": "function", "function": schema}] if number % 3 == 0 else None


def encode_chat(
    folder: str, conversations: list[Any], tools: list[Any] | None = None
) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]:
    """The ids of each chat by the tokenizer of a folder, and which of them are the assistant's."""
    item = zip(conversations, tools or [None] * len(conversations), strict=True)
    built = [templates.load_chats(folder).render_document(*chat) for chat in item]
    actual = tokenizer.load_tokenizer(folder)
    assert isinstance(actual, tokenizer.HuggingFaceTokenizer)
    return actual.encode_spans(
        [encoding.text for encoding in built], [encoding.spans or () for encoding in built]
    )


def write_lines(path: Path, values: list[Any], field: str = "messages") -> str:
    """A file of JSON lines."""
    path.write_text(
        "".join(json.dumps({"id": at, field: chat}) + "\n" for at, chat in enumerate(values))
    )
    return str(path)
