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

FAMILIES = (
    "llama_tiny",
    "qwen2_tiny",
    "qwen3_tiny",
    "mistral_tiny",
    "gemma2_tiny",
    "gemma3_tiny",
    "olmo2_tiny",
    "mixtral_tiny",
    "qwen3_moe_tiny",
)
POSITIONS = 96  # the fixture of GPT-2 has 64, of which a prompt takes half
TOKENS = 32


def gpt2(to: Path) -> Path:
    """A GPT-2 of drawn weights."""
    model = train_spec("gpt2_tiny", None, model={"positions": POSITIONS}).model
    shapes = step("gpt2_tiny", None, model={"positions": POSITIONS}).abstract.params
    draw = np.random.default_rng(0)
    assert isinstance(model, spec.PublishedModel)
    save.save_model(
        str(to),
        model,
        {name: draw.normal(0, 0.1, like.shape).astype("f") for name, like in shapes.items()},
    )
    return to


def prompts(case: str, lengths: tuple[int, ...]) -> list[list[int]]:
    return [tensors(case, "io")["input_ids"][0, :length].tolist() for length in lengths]


def call(folder: Path, rows: list[list[int]], tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "prompts": rows,
        "tokens": tokens,
        "end": None,
        "beams": 1,
        **more,
    }


def ours(loaded: TextModel, asked: dict[str, Any]) -> list[list[int]]:
    """As transformers gives it: the end included, and zeros up to the longest row."""
    generator = loaded._generator
    generator.ends = () if asked["end"] is None else (asked["end"],)
    found = loaded.generate(asked["prompts"], max_tokens=asked["tokens"], beams=asked["beams"])
    rows = [[*sample.ids, *([asked["end"]] if sample.ended else [])] for (sample, *_) in found]
    return [row + [0] * (max(map(len, rows)) - len(row)) for row in rows]


def test_greedy_tokens_and_beams_are_those_of_transformers(tmp_path: Path) -> None:
    try:
        environments.find_python("torch")
    except environments.MissingEnvironmentError as error:
        needs.absent(str(error))
    asked, found = [], []
    for case in (*FAMILIES, "gpt2_tiny"):
        place = gpt2(tmp_path / case) if case == "gpt2_tiny" else folder(case, tmp_path / case)
        loaded = load_text_model(str(place), mesh=one_device())
        place = (
            tmp_path / f"{case}-out"
        )  # as transformers reads it: the fixtures do not name their format
        save.save_model(str(place), loaded.config, loaded.params)
        calls = [
            call(place, prompts(case, (32, 7, 13)))
        ]  # the first is as long as ours are padded to
        found += [ours(loaded, each) for each in calls]
        if (
            case == "mistral_tiny"
        ):  # a text that ends before the others, and beams; both beyond its window
            ends = call(place, calls[0]["prompts"], end=found[-1][0][10])
            beams = call(place, calls[0]["prompts"], tokens=24, end=ends["end"], beams=3)
            calls, found = [*calls, ends, beams], [*found, ours(loaded, ends), ours(loaded, beams)]
        asked += calls
    (tmp_path / "calls.json").write_text(json.dumps(asked))
    program = Path(__file__).with_name("transformers_generate.py")
    answers = environments.run_program(
        "torch", str(program), str(tmp_path / "calls.json")
    ).splitlines()
    assert all(len(row) == TOKENS for row in found[0])
    for each, mine, line in zip(asked, found, answers, strict=True):
        assert mine == json.loads(line), {**each, "prompts": ...}


@pytest.mark.parametrize("case", ["mistral_tiny", "gpt2_tiny"])
def test_a_loaded_folder_says_the_reference_s_logits(case: str, tmp_path: Path) -> None:
    given = tensors(case, "io")
    loaded = load_text_model(str(folder(case, tmp_path / case)), mesh=one_device())
    np.testing.assert_allclose(loaded.model(given["input_ids"]), given["logits"], rtol=0, atol=1e-5)
    shares = given["logits"] - np.log(
        np.exp(given["logits"].astype(np.float64)).sum(-1, keepdims=True)
    )
    for row, found in zip(
        given["input_ids"], loaded.logprobs(given["input_ids"].tolist()), strict=True
    ):
        at = given["input_ids"].tolist().index(row.tolist())
        np.testing.assert_allclose(
            found, shares[at, np.arange(len(row) - 1), row[1:]], rtol=0, atol=2e-5
        )
