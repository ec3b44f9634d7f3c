"""Rows in the layouts of public datasets, and the same rows as trl wants them.

`python -m tests.trainer.text.layout_rows FOLDER` writes the tokenizers and the rows for
`trl_rows.py`, whose output is tests/fixtures/layouts/trl.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.trainer.text import chat_corpora, corpora

# The tools and a variable of the row, and then the messages.
_HEAD = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if mood is defined %}<{{ mood }}>{% endif %}"
)
MARKED = _HEAD + chat_corpora.CHATML
PLAIN = MARKED.replace("{%- generation %}", "").replace("{% endgeneration %}", "")
TEMPLATES = {"marked": MARKED, "plain": PLAIN}

HI, HELLO, WHY, SO = "the quick brown fox?", "Hallo über dich!", "why 世界?", "deshalb, fox."


class Case(NamedTuple):
    """A row, what it is taken for, and the row of trl that must give the same tokens."""

    name: str
    format: str
    row: dict[str, Any]
    trl: dict[str, Any]
    layout: str
    template: str = "plain"


def turns(*texts: str, system: str = "") -> list[dict[str, str]]:
    """Return messages of the user and the assistant in turn, after one of the system."""
    messages = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return messages + [
        {"role": roles[number % 2], "content": text} for number, text in enumerate(texts)
    ]


def speakers(*texts: str, system: str = "") -> list[dict[str, str]]:
    """Return the same messages as ShareGPT has them."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [
        {"from": names[message["role"]], "value": message["content"]}
        for message in turns(*texts, system=system)
    ]


def one_turn(question: str, answer: str, system: str = "") -> dict[str, Any]:
    """Return a prompt and a completion of messages."""
    return {
        "prompt": turns(question, system=system),
        "completion": [{"role": "assistant", "content": answer}],
    }


def _answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


TOOL = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
CHAT, LONG = turns(HI, HELLO), turns(HI, HELLO, WHY, SO)
PAIR = {"prompt": turns(HI), "chosen": _answer(HELLO), "rejected": _answer(SO)}


def _chat(name: str, row: dict[str, Any], messages: Any, layout: str, **others: Any) -> Case:
    return Case(name, "chat", row, {"messages": messages, **others}, layout, "marked")


def _turn(name: str, row: dict[str, Any], question: str, layout: str, system: str = "") -> Case:
    return Case(name, "chat", row, one_turn(question, HELLO, system), layout)


CASES = [
    _chat("messages", {"messages": LONG}, LONG, "messages"),
    _chat(
        "prompt beside messages",
        {"prompt": HI, "prompt_id": "a1", "messages": CHAT, "category": "Chat"},
        CHAT,
        "messages",
    ),
    _chat(
        "messages with a system",
        {"messages": turns(HI, HELLO, system="Kurz.")},
        turns(HI, HELLO, system="Kurz."),
        "messages",
    ),
    _chat("messages as JSON", {"messages": json.dumps(LONG)}, LONG, "messages"),
    _chat("conversations with roles", {"conversations": LONG}, LONG, "messages (conversations)"),
    _chat(
        "conversation with roles",
        {"conversation_id": "7", "model": "m", "conversation": CHAT, "turn": 1},
        CHAT,
        "messages (conversation)",
    ),
    _chat("tools", {"messages": CHAT, "tools": TOOL}, CHAT, "messages", tools=TOOL),
    _chat(
        "tools as JSON", {"messages": CHAT, "tools": json.dumps(TOOL)}, CHAT, "messages", tools=TOOL
    ),
    _chat(
        "template variables",
        {"messages": CHAT, "chat_template_kwargs": {"mood": "calm"}},
        CHAT,
        "messages",
        chat_template_kwargs={"mood": "calm"},
    ),
    _chat(
        "template variables as JSON",
        {"messages": CHAT, "chat_template_kwargs": '{"mood": "calm"}'},
        CHAT,
        "messages",
        chat_template_kwargs={"mood": "calm"},
    ),
    _chat("sharegpt", {"conversations": speakers(HI, HELLO, WHY, SO)}, LONG, "sharegpt"),
    _chat(
        "sharegpt with a system turn",
        {"id": "x_0", "conversations": speakers(HI, HELLO, system="Kurz.")},
        turns(HI, HELLO, system="Kurz."),
        "sharegpt",
    ),
    _chat(
        "sharegpt with a system column",
        {"system": "Kurz.", "conversations": speakers(HI, HELLO)},
        turns(HI, HELLO, system="Kurz."),
        "sharegpt (conversations, system)",
    ),
    _chat("sharegpt as JSON", {"conversations": json.dumps(speakers(HI, HELLO))}, CHAT, "sharegpt"),
    _chat(
        "sharegpt in messages",
        {"messages": speakers(HI, HELLO)},
        CHAT,
        "sharegpt (messages)",
    ),
    Case(
        "sharegpt by trl",
        "chat",
        {
            "conversations": [
                {"from": "user", "value": HI},
                {"from": "assistant", "value": HELLO},
            ]
        },
        {
            "conversations": [
                {"from": "user", "value": HI},
                {"from": "assistant", "value": HELLO},
            ]
        },
        "sharegpt",
        "marked",
    ),
    Case(
        "prompt and completion",
        "completion",
        {"prompt": HI, "completion": f" {HELLO}"},
        {"prompt": HI, "completion": f" {HELLO}"},
        "completion",
    ),
    Case(
        "completion with its end",
        "completion",
        {"prompt": HI, "completion": f" {HELLO}{corpora.END}"},
        {"prompt": HI, "completion": f" {HELLO}{corpora.END}"},
        "completion",
    ),
    Case(
        "prompt and completion among chats",
        "chat",
        {"prompt": f"{HI}\n", "completion": HELLO},
        {"prompt": f"{HI}\n", "completion": HELLO},
        "completion",
    ),
    Case(
        "messages of a completion", "chat", one_turn(HI, HELLO), one_turn(HI, HELLO), "completion"
    ),
    Case(
        "marked messages of a completion",
        "completion",
        one_turn(HI, HELLO),
        one_turn(HI, HELLO),
        "completion",
        "marked",
    ),
    Case(
        "long prompt",
        "chat",
        {"prompt": turns(HI, SO, WHY), "completion": _answer(HELLO)},
        {"prompt": turns(HI, SO, WHY), "completion": _answer(HELLO)},
        "completion",
    ),
    Case(
        "JSON of a completion",
        "chat",
        {key: json.dumps(value) for key, value in one_turn(HI, HELLO, "Kurz.").items()},
        one_turn(HI, HELLO, "Kurz."),
        "completion",
    ),
    _turn("alpaca", {"instruction": HI, "input": WHY, "output": HELLO}, f"{HI}\n{WHY}", "alpaca"),
    _turn("alpaca without input", {"instruction": HI, "input": "", "output": HELLO}, HI, "alpaca"),
    _turn(
        "alpaca with its text",
        {"instruction": HI, "input": "", "output": HELLO, "text": "Below is an instruction"},
        HI,
        "alpaca",
    ),
    _turn(
        "alpaca with a system",
        {"instruction": HI, "output": HELLO, "system": "Kurz."},
        HI,
        "alpaca",
        "Kurz.",
    ),
    _chat(
        "alpaca with a history",
        {"instruction": WHY, "input": "", "output": SO, "history": [[HI, HELLO]]},
        LONG,
        "alpaca",
    ),
    _turn(
        "dolly",
        {"instruction": HI, "context": WHY, "response": HELLO, "category": "closed_qa"},
        f"{HI}\n{WHY}",
        "alpaca (instruction, response, context)",
    ),
    _turn("gsm8k", {"question": HI, "answer": HELLO}, HI, "question"),
    _turn(
        "orca",
        {"id": "flan.1", "system_prompt": "Kurz.", "question": HI, "response": HELLO},
        HI,
        "question (question, response, system_prompt)",
        "Kurz.",
    ),
    _turn(
        "metamath",
        {"query": HI, "response": HELLO, "type": "GSM", "original_question": WHY},
        HI,
        "question (query, response)",
    ),
    _turn(
        "numina",
        {"source": "aops", "problem": HI, "solution": HELLO},
        HI,
        "question (problem, solution)",
    ),
    _turn(
        "helpsteer",
        {"prompt": HI, "response": HELLO, "helpfulness": 4},
        HI,
        "question (prompt, response)",
    ),
    _turn(
        "flan",
        {"inputs": HI, "targets": HELLO, "task": "nli"},
        HI,
        "question (inputs, targets)",
    ),
    _turn("input and output", {"input": HI, "output": HELLO}, HI, "question (input, output)"),
    Case(
        "texts of a preference",
        "preference",
        {"prompt": HI, "chosen": f" {HELLO}", "rejected": f" {SO}"},
        {"prompt": HI, "chosen": f" {HELLO}", "rejected": f" {SO}"},
        "preference",
    ),
    Case(
        "implicit prompt",
        "preference",
        {
            "chosen": f"\n\nHuman: {HI}\n\nAssistant: Ja.",
            "rejected": f"\n\nHuman: {HI}\n\nAssistant: Nein.",
        },
        {
            "chosen": f"\n\nHuman: {HI}\n\nAssistant: Ja.",
            "rejected": f"\n\nHuman: {HI}\n\nAssistant: Nein.",
        },
        "preference",
    ),
    Case("messages of a preference", "preference", PAIR, PAIR, "preference"),
    Case(
        "implicit prompt of messages",
        "preference",
        {"chosen": LONG, "rejected": turns(HI, HELLO, WHY, HI)},
        {"chosen": LONG, "rejected": turns(HI, HELLO, WHY, HI)},
        "preference",
    ),
    Case(
        "ultrafeedback",
        "preference",
        {
            "prompt": HI,
            "chosen": CHAT,
            "rejected": turns(HI, SO),
            "messages": CHAT,
            "score_chosen": 8.5,
            "score_rejected": 7.0,
        },
        PAIR,
        "preference",
    ),
    Case(
        "orca pairs",
        "preference",
        {"system": "Kurz.", "question": HI, "chosen": HELLO, "rejected": SO},
        {**PAIR, "prompt": turns(HI, system="Kurz.")},
        "preference",
    ),
    Case(
        "sharegpt pairs",
        "preference",
        {
            "conversations": speakers(HI),
            "chosen": {"from": "gpt", "value": HELLO},
            "rejected": {"from": "gpt", "value": SO},
        },
        PAIR,
        "preference (chosen, rejected, conversations)",
    ),
    Case(
        "alpaca pairs",
        "preference",
        {
            "instruction": HI,
            "input": WHY,
            "chosen_response": HELLO,
            "rejected_response": SO,
        },
        {**PAIR, "prompt": turns(f"{HI}\n{WHY}")},
        "preference (chosen_response, rejected_response, instruction, input)",
    ),
    Case(
        "stack exchange pairs",
        "preference",
        {"question": HI, "response_j": HELLO, "response_k": SO, "qid": 3},
        PAIR,
        "preference (response_j, response_k, question)",
    ),
    Case(
        "JSON of a preference",
        "preference",
        {key: json.dumps(value) for key, value in PAIR.items()},
        PAIR,
        "preference",
    ),
    Case(
        "texts with a label",
        "kto",
        {"prompt": HI, "completion": f" {HELLO}", "label": True},
        {"prompt": HI, "completion": f" {HELLO}", "label": True},
        "kto",
    ),
    Case(
        "messages of a completion with a label",
        "kto",
        {**one_turn(HI, HELLO), "label": False},
        {**one_turn(HI, HELLO), "label": False},
        "kto",
    ),
    Case(
        "sharegpt with a label",
        "kto",
        {"conversations": speakers(HI, SO, WHY, HELLO), "kto_tag": 1},
        {"prompt": turns(HI, SO, WHY), "completion": _answer(HELLO), "label": True},
        "kto (conversations, kto_tag)",
    ),
]


def save_tokenizers(folder: Path) -> dict[str, str]:
    """Write the tokenizer with each of the templates, and return its folders."""
    return {
        name: chat_corpora.save_chat_tokenizer(folder / name, template)
        for name, template in TEMPLATES.items()
    }


if __name__ == "__main__":
    save_tokenizers(Path(sys.argv[1]))
    rows = [(case.name, case.format, case.template, case.trl) for case in CASES]
    Path(sys.argv[1], "rows.json").write_text(json.dumps(rows))
