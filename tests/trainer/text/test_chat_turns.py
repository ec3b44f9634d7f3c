"""Stock templates without marks: the assistant's turns in the final text, and what is counted.

The expected targets are written by hand from what the templates' authors say: a turn begins after
the generation prompt and ends with the token that ends it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.trainer.text import chat_coverage, chat_notes, chats, tokenizer
from jaxlaunch.trainer.text.chat_notes import NoteKind
from jaxlaunch.trainer.text.documents import Document, UnfitRowError
from tests.trainer.text import chat_corpora, stock_templates

ASK_1, ASK_2 = {"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Rome"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", **CALL}]}
RESULT = {"role": "tool", "content": "dry"}
TOOLS = [{"type": "function", "function": {"name": "rain", "description": "asks the sky"}}]


def answer(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


TURNS = [ASK_1, answer("First."), ASK_2, answer("Second.")]
WITH_CALL = [SYSTEM, ASK_1, CALLING, RESULT, answer("First."), ASK_2, answer("Second.")]


@pytest.fixture(scope="module")
def render(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Render a chat by a template."""
    folder = chat_corpora.save_chat_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer", "")

    def render(template: str, messages: Any, *arguments: Any) -> Document:
        loaded = tokenizer.load_tokenizer(folder)
        loaded.config = {**loaded.config, "chat_template": template}
        return chats.ChatTemplates(loaded).render_document(messages, *arguments)

    return render


def target_texts(document: Document) -> list[str]:
    return [document.text[start:end] for start, end in document.spans or ()]


def names_of(document: Document) -> dict[str, int]:
    """The notes of a document by kind and name."""
    return {f"{kind.value} {name}": count for (kind, name), count in document.notes.items()}


END = "<|end|>\n"
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "messages", "tools", "expected"),
    [
        ("QWEN3", TURNS, None, [f"First.{END}", f"{EMPTY}Second.{END}"]),
        (
            "QWEN3",
            [ASK_1, answer("First.", reasoning="Hm"), ASK_2, answer("Second.", thinking="Ah")],
            None,
            [f"First.{END}", f"<think>\nAh\n</think>\n\nSecond.{END}"],
        ),
        (
            "QWEN3",
            WITH_CALL,
            None,
            [
                '<tool_call>{"name": "rain", "arguments": {"city": "Rome"}}</tool_call>' + END,
                f"First.{END}",
                f"{EMPTY}Second.{END}",
            ],
        ),
        (
            "GPT_OSS",
            [ASK_1, answer("First.", thinking="Hm"), ASK_2, answer("Second.", thinking="Ah")],
            None,
            [
                "<|channel|>final<|message|>First.<|end|>",
                "<|channel|>analysis<|message|>Ah<|end|>"
                "<|start|>assistant<|channel|>final<|message|>Second.<|return|>",
            ],
        ),
        (
            "GPT_OSS",
            [ASK_1, CALLING, RESULT, answer("First.")],
            None,
            [
                ' to=rain<|message|>{"city": "Rome"}<|call|>',
                "<|channel|>final<|message|>First.<|return|>",
            ],
        ),
        ("PHI", TURNS, None, [f"First.{END}", f"Second.{END}<|end|>"]),
        ("MISTRAL", [SYSTEM, *TURNS], TOOLS, ["First.<|end|>", "Second.<|end|>"]),
        (
            "MISTRAL",
            WITH_CALL,
            TOOLS,
            [
                '[CALLS][{"name": "rain", "arguments": {"city": "Rome"}}]<|end|>',
                "First.<|end|>",
                "Second.<|end|>",
            ],
        ),
        ("DEEPSEEK", TURNS, None, ["First.<|end|>", "Second.<|end|>"]),
        ("COMMAND", TURNS, None, ["First.</turn>", "Second.</turn>"]),
        ("NAMES", TURNS, None, ["First.<|end|>", "Second.<|end|>"]),
        (
            "NAMES",
            [
                ASK_1,
                answer("First.", name="Bo"),
                answer("More."),
                ASK_2,
                answer("Last.", name="Al"),
            ],
            None,
            ["First.<|end|>", "More.<|end|>", "Last.<|end|>"],
        ),
        (
            "FIRST",
            [answer("Hello."), *TURNS],
            None,
            ["Hello." + END, "First." + END, "Second." + END],
        ),
    ],
)
def test_turns_are_what_the_model_writes(
    render: Any, template: str, messages: Any, tools: Any, expected: list[str]
) -> None:
    document = render(getattr(stock_templates, template), messages, tools)
    assert target_texts(document) == expected
    # The text is that of a single rendering, so a copy without spans is found in it.
    assert all(text in document.text for text in expected)


@pytest.mark.parametrize("key", chat_coverage.TRAIN_KEYS)
def test_untrained_messages_are_left_out(render: Any, key: str) -> None:
    first = answer("First.", **{key: 0 if key == "weight" else False})
    messages = [ASK_1, first, ASK_2, answer("Second.", **{key: 1})]
    for template in (stock_templates.PHI, chat_corpora.llama(marked=True)):
        document = render(template, messages)
        (target,) = target_texts(document)
        assert target.startswith("Second.")
        assert names_of(document) == {f"untrained {key}": 1}
    nothing = render(stock_templates.PHI, messages[:2])
    assert nothing.spans == () and names_of(nothing) == {f"untrained {key}": 1}
    with pytest.raises(UnfitRowError, match=f"its message 2 has {key} = 0.5; 0 or false leaves"):
        render(stock_templates.PHI, [ASK_1, answer("First.", **{key: 0.5})])
    asked = render(stock_templates.PHI, [ASK_1 | {key: 1}, answer("First.")])
    assert names_of(asked) == {f"unused_key {key}": 1}


def test_missing_words_messages_and_keys_are_counted(render: Any) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        ASK_1 | {"name": "Ann"},
        answer("<think>Well now</think>First.", score=3, flag=None),
        ASK_2,
        answer("Second.", reasoning_content="Let me see"),
    ]
    document = render(stock_templates.DEEPSEEK, messages, TOOLS)
    assert target_texts(document) == ["First.<|end|>", "Second.<|end|>"]
    assert names_of(document) == {
        "missing_words content": 2,
        "missing_messages content": 1,
        "missing_words reasoning_content": 3,
        "missing_messages reasoning_content": 1,
        "unseen_role developer": 1,
        "unused_key name": 1,
        "unused_key score": 1,
        "unused_tools tools": 1,
    }
    sentences = chat_notes.describe_notes(document.notes)
    assert len(sentences) == 6 and sentences[0] == (
        "the chat template leaves out 2 words of the assistant in 'content', in 1 message: they "
        "are not targets"
    )
    assert chat_notes.notes_from_json(chat_notes.notes_to_json(document.notes)) == document.notes
    full = render(stock_templates.GPT_OSS, [SYSTEM, ASK_1, answer("Yes\tor no \\n.")])
    assert names_of(full) == {}
    call = answer("", tool_calls=[{"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}])
    shown = render(stock_templates.QWEN3, [ASK_1, call])
    assert names_of(shown) == {}
    unended = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert names_of(render(unended, TURNS)) == {"open_end assistant": 1}


def test_null_content_is_no_word(render: Any) -> None:
    messages = [ASK_1, {**CALLING, "content": None}, RESULT, answer("Dry.", tool_calls=None)]
    document = render(stock_templates.MISTRAL, messages)
    assert "None" not in document.text and len(target_texts(document)) == 2
    words = 'has no attribute .content.; a message has no content, .* need "content": ""'
    with pytest.raises(UnfitRowError, match=words):
        render(stock_templates.QWEN3, messages)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            [{"type": "image_url", "image_url": "a.png"}],
            "part of the type 'image_url', and only text",
        ),
        ([{"type": "text", "text": "hi"}], "a list as content, which the chat template prints as"),
    ],
)
def test_parts_that_are_no_text_are_refused(render: Any, content: Any, words: str) -> None:
    template = stock_templates.PHI.replace("message['content'] +", "message['content'] | string +")
    with pytest.raises(UnfitRowError, match=words):
        render(template, [{"role": "user", "content": content}, answer("First.")])


def test_rows_set_variables_of_the_template(render: Any, tmp_path: Path) -> None:
    template = "{{ mood }}" + stock_templates.PHI
    options = {"mood": "calm", "eos_token": "!"}
    document = render(template, TURNS, None, options)
    assert document.text.startswith("calm") and document.text.endswith("!")
    with pytest.raises(UnfitRowError, match="chat_template_kwargs has 'messages', which the row"):
        chats.parse_extras({"chat_template_kwargs": {"messages": []}})
    with pytest.raises(UnfitRowError, match="chat_template_kwargs is a text, not an object"):
        chats.parse_extras({"chat_template_kwargs": "calm"})


def test_words_must_be_in_the_text(render: Any) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.text }}</{{ m.role }}>{% endfor %}"
    with pytest.raises(UnfitRowError, match="writes no words of the role 'assistant'; its roles"):
        render(template, TURNS)


def test_unknown_blocks_cannot_be_selected(render: Any) -> None:
    template = (
        "{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}"
    )
    assert target_texts(render(template, TURNS[:2])) == ["First."]
    with pytest.raises(UnfitRowError, match="block outside of its loop over messages"):
        render(template, [ASK_1, answer("First.", weight=0), ASK_2, answer("Second.")])


def test_kinds_of_notes_have_sentences() -> None:
    notes = {(kind, "x"): 1200 for kind in NoteKind}
    sentences = chat_notes.describe_notes(notes)
    assert len(sentences) == len(NoteKind) - 1
    assert all("1,200" in sentence for sentence in sentences)
