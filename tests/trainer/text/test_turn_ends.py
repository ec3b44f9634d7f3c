"""The tokens that end a turn, from templates in the manner of published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import folder
from jaxlaunch.trainer.text.turn_ends import read_turn_ends

EOS = "<|endoftext|>"
SPECIAL = (
    *(EOS, "<s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|user|>", "<|assistant|>", "<|observation|>", "<|close|>", "<|end_of_msg|>", "<|message|>"),
)
# Tokens of their own that decoding keeps.
PLAIN = ("</tool_call>", "<end>")

LOOP = "{% for m in messages %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}"
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    + LOOP
    + "<|im_start|>{{ m.role }}\n{{ m.content }}"
    + CALLS
    + "</tool_call>{% endif %}<|im_end|>\n{% endfor %}"
)
LLAMA = (
    "<s>" + LOOP + "{% if not m.content is string %}{{ raise_exception('text only') }}{% endif %}"
    "{{ m.role }}\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "assistant\n\n{% endif %}"
)
PHI = (
    LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
GPT_OSS = (
    LOOP
    + "{{ m.role }}<|message|>{{ m.content }}"
    + CALLS
    + "<|call|>{% elif m.role == 'assistant'"
    " and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
)
GLM = (
    LOOP
    + "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n{{ m.content }}"
    + CALLS
    + "</tool_call>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A turn of parts, each of which ends with the same token.
KIMI = LOOP + "{{ m.role }}{{ m.content }}<|close|><|end_of_msg|>\n{% endfor %}"
PARTS = LOOP + "{{ m.role }}{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>{% endfor %}"
CASES: dict[str, tuple[str, list[str]]] = {
    "chatml": (CHATML + ASKS, ["<|im_end|>"]),
    "chatml that always asks for an answer": (
        CHATML + "<|im_start|>assistant\n",
        ["<|im_end|>"],
    ),
    "llama": (LLAMA, ["<|eot_id|>"]),
    "phi": (PHI, ["<|end|>"]),
    "gpt-oss": (GPT_OSS, ["<|return|>", "<|call|>"]),
    "glm": (GLM, ["<|user|>", "<|observation|>"]),
    "kimi": (KIMI, ["<|end_of_msg|>"]),
    "parts": (PARTS, ["<|im_end|>"]),
    "no special token": (LOOP + "{{ m.role }}: {{ m.content }}<end>\n{% endfor %}", ["<end>"]),
    "eos": (LOOP + "[{{ m.role }}] {{ m.content }} {{ eos_token }}{% endfor %}", [EOS]),
    "words": (LOOP + "### {{ m.role }}: {{ m.content }}\n\n{% endfor %}", []),
    "no answers": (LOOP + "{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", []),
    "refusal": ("{{ raise_exception('no') }}", []),
}


def tokenizer_files(template: str | None, **config: Any) -> dict[str, bytes]:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in PLAIN])
    keys = {"eos_token": EOS, **({} if template is None else {"chat_template": template})}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(keys | config).encode(),
    }


@pytest.mark.parametrize(("template", "ends"), CASES.values(), ids=CASES)
def test_turn_ends_are_read_from_the_template(template: str, ends: list[str]) -> None:
    tokens = ["a", *SPECIAL, *PLAIN]
    files = tokenizer_files(template)
    assert [tokens[token] for token in read_turn_ends("x", files)] == ends
    moved = files | {"chat_template.jinja": template.encode()}
    moved["tokenizer_config.json"] = tokenizer_files(None)["tokenizer_config.json"]
    assert [tokens[token] for token in read_turn_ends("x", moved)] == ends


def test_turn_ends_need_a_template() -> None:
    assert read_turn_ends("x", {}) == ()
    assert read_turn_ends("x", tokenizer_files(None)) == ()
    with pytest.raises(SpecError, match="its chat template is not valid, line 1"):
        read_turn_ends("x", tokenizer_files("{% if %}"))


def test_generation_ends_with_a_text_or_a_turn(tmp_path: Path) -> None:
    files = tokenizer_files(CHATML)
    eos, turn_end = 1, 4
    expected = {"eos_token_id": [eos, turn_end]}
    assert folder.render_generation_config(None, files, (turn_end,)) == expected
    # The folder's own tokens come first, and its other keys are kept.
    source = {"eos_token_id": [7, turn_end], "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(source))
    config = folder.render_generation_config(str(tmp_path), files, (turn_end,))
    assert config == {"eos_token_id": [7, turn_end, eos], "temperature": 0.6}
    assert folder.render_generation_config(None, {}, ()) == {}
    assert folder.render_generation_config(None, files, (eos,)) == {"eos_token_id": eos}


@pytest.mark.parametrize("name", [None, "TokenizersBackend", "Qwen2Tokenizer"])
def test_exported_tokenizers_name_a_class_of_both_versions(name: str | None) -> None:
    files = tokenizer_files(CHATML, tokenizer_class=name)
    files["special_tokens_map.json"] = json.dumps({"eos_token": "a", "pad_token": "<s>"}).encode()
    config = json.loads(folder.complete_tokenizer_config(files)["tokenizer_config.json"])
    expected = name if name == "Qwen2Tokenizer" else "PreTrainedTokenizerFast"
    assert config["tokenizer_class"] == expected
    assert (config["eos_token"], config["pad_token"]) == (EOS, "<s>")
    alone = folder.complete_tokenizer_config({"tokenizer.json": files["tokenizer.json"]})
    assert json.loads(alone["tokenizer_config.json"]) == {
        "tokenizer_class": "PreTrainedTokenizerFast"
    }
    assert folder.complete_tokenizer_config({"inputs.json": b"{}"}) == {"inputs.json": b"{}"}
