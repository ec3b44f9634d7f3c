"""Greedy texts and beams are those of transformers, for every family, on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.generate.text_model import TextModel, load_text_model
from jaxlaunch.trainer.huggingface import save
from tests import environments, needs
from tests.trainer.generate.generators import one_device
from tests.trainer.references import folder, step, tensors, train_spec

pytestmark = pytest.mark.extended

FAMILY_NAMES = "llama qwen2 qwen3 mistral gemma2 gemma3 olmo2 mixtral qwen3_moe"
FAMILIES = [f"{name}_tiny" for name in FAMILY_NAMES.split()]
POSITIONS = 96  # the fixture of GPT-2 has 64, of which a prompt takes half
TOKENS = 32


def gpt2_folder(target: Path) -> Path:
    """A GPT-2 of drawn weights."""
    model = train_spec("gpt2_tiny", None, model={"positions": POSITIONS}).model
    shapes = step("gpt2_tiny", None, model={"positions": POSITIONS}).abstract.params
    draw = np.random.default_rng(0).normal
    assert isinstance(model, spec.PublishedModel)
    params = {name: draw(0, 0.1, like.shape).astype("f") for name, like in shapes.items()}
    save.save_model(str(target), model, params)
    return target


def make_prompts(case: str, lengths: tuple[int, ...]) -> list[list[int]]:
    return [tensors(case, "io")["input_ids"][0, :length].tolist() for length in lengths]


def make_request(folder: Path, rows: list[list[int]], **changed: Any) -> dict[str, Any]:
    request = {"folder": str(folder), "prompts": rows, "tokens": TOKENS, "end": None, "beams": 1}
    return request | changed


def generate_here(loaded: TextModel, requests: dict[str, Any]) -> list[list[int]]:
    """As transformers gives it: the end included, and zeros up to the longest row."""
    generator = loaded._generator
    generator.ends = () if requests["end"] is None else (requests["end"],)
    options = {"max_tokens": requests["tokens"], "beams": requests["beams"]}
    actual = loaded.generate(requests["prompts"], **options)
    rows = [[*sample.ids, *([requests["end"]] if sample.ended else [])] for (sample, *_) in actual]
    return [row + [0] * (max(map(len, rows)) - len(row)) for row in rows]


def test_greedy_and_beam_tokens_equal_transformers(tmp_path: Path) -> None:
    try:
        environments.find_python("torch")
    except environments.MissingEnvironmentError as error:
        needs.absent(str(error))
    requests, actual = [], []
    for case in (*FAMILIES, "gpt2_tiny"):
        path = tmp_path / case
        place = gpt2_folder(path) if case == "gpt2_tiny" else folder(case, path)
        loaded = load_text_model(str(place), mesh=one_device())
        # The fixtures do not name their format, which transformers needs.
        place = tmp_path / f"{case}-out"
        save.save_model(str(place), loaded.config, loaded.params)
        # The first prompt is as long as ours are padded to.
        prompts = make_prompts(case, (32, 7, 13))
        calls = [make_request(place, prompts)]
        actual.append(generate_here(loaded, calls[0]))
        if case == "mistral_tiny":
            # A text that ends before the others, and beams; both beyond its window.
            end = actual[-1][0][10]
            calls.append(make_request(place, prompts, end=end))
            calls.append(make_request(place, prompts, tokens=24, end=end, beams=3))
            actual += [generate_here(loaded, call) for call in calls[1:]]
        requests += calls
    (tmp_path / "calls.json").write_text(json.dumps(requests))
    program = Path(__file__).with_name("transformers_generate.py")
    answers = environments.run_program(
        "torch", str(program), str(tmp_path / "calls.json")
    ).splitlines()
    assert all(len(row) == TOKENS for row in actual[0])
    for item, mine, line in zip(requests, actual, answers, strict=True):
        assert mine == json.loads(line), {**item, "prompts": ...}


@pytest.mark.parametrize("case", ["mistral_tiny", "gpt2_tiny"])
def test_loaded_folder_has_the_reference_logits(case: str, tmp_path: Path) -> None:
    inputs = tensors(case, "io")
    loaded = load_text_model(str(folder(case, tmp_path / case)), mesh=one_device())
    tokens, logits = inputs["input_ids"], inputs["logits"].astype(np.float64)
    np.testing.assert_allclose(loaded.model(tokens), logits, rtol=0, atol=1e-5)
    shares = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logprobs = loaded.logprobs(tokens.tolist())
    for row, share, actual in zip(tokens, shares, logprobs, strict=True):
        expected = share[np.arange(len(row) - 1), row[1:]]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)
