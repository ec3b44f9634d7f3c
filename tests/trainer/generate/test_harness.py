"""The adapter for the evaluation harness, against a stand-in with its signatures.

As of lm_eval 0.4: `LM` of lm_eval.api.model has three abstract methods, each of which gets a list
of Instances whose `args` are the request's.
"""

from __future__ import annotations

import abc
import sys
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate import harness
from jaxlaunch.trainer.generate.text_model import TextModel
from jaxlaunch.trainer.text.tokenizer import ByteTokenizer
from tests.trainer.generate.generators import bytes_model, generator
from tests.trainer.tiny import DECODER


class LM(abc.ABC):
    """The harness's own base class, as far as a model meets it."""

    def __init__(self) -> None:
        self._rank, self._world_size = 0, 1

    @abc.abstractmethod
    def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]: ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests: Any) -> list[float]: ...

    @abc.abstractmethod
    def generate_until(self, requests: Any) -> list[str]: ...


@dataclass
class Instance:
    args: tuple[Any, ...]


def logprob_of(text: bytes) -> float:
    logprob_L, _ = bytes_model().compute_logprobs([list(text)])[0]
    return float(logprob_L.sum())


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in: Any = types.ModuleType("lm_eval.api.model")
    stand_in.LM = LM
    modules = {"lm_eval": types.ModuleType("lm_eval"), "lm_eval.api.model": stand_in}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "lm_eval.api", types.ModuleType("lm_eval.api"))
    return harness.model(TextModel(bytes_model(), ByteTokenizer(), 3), batch=2)


QUESTIONS = [("two and two", " are four"), ("one ", "and one"), ("", "none")]


def test_choices_are_scored_by_the_continuation(model: Any) -> None:
    assert isinstance(model, LM)
    actual = model.loglikelihood([Instance(pair) for pair in QUESTIONS])
    for (context, continuation), (score, is_greedy) in zip(QUESTIONS, actual, strict=True):
        row = list((context + continuation).encode())
        logprob_L, is_best_L = bytes_model().compute_logprobs([row])[0]
        count = len(continuation) - (not context) + len(context) - len(context.rstrip())
        assert score == pytest.approx(float(logprob_L[-count:].sum()), abs=1e-4)
        assert is_greedy == is_best_L[-count:].all()


def test_long_text_is_scored_in_windows(model: Any) -> None:
    text = "".join(chr(97 + index % 26) for index in range(150))
    instances = [Instance((item,)) for item in (text, "", "a")]
    actual, nothing, first = model.loglikelihood_rolling(instances)
    ids, total = list(text.encode()), 0.0
    # As the harness cuts it, the last one full.
    for row, count in ((ids[:65], 64), (ids[64:129], 64), (ids[85:], 21)):
        total += float(bytes_model().compute_logprobs([row])[0][0][-count:].sum())
    assert actual == pytest.approx(total, abs=1e-3)
    assert (nothing, first) == (0.0, 0.0)


def test_empty_continuation_is_certain_and_spaces_move_to_it(model: Any) -> None:
    pairs = [("", ""), ("a", ""), ("", "b"), ("  ", "b"), ("a" * 100, "b" * 100)]
    *few, (score, _) = model.loglikelihood([Instance(pair) for pair in pairs])
    assert few[:3] == [(0.0, True)] * 3
    assert few[3][0] == pytest.approx(logprob_of(b"  b"), abs=1e-4)
    (logprob_L, _) = bytes_model().compute_logprobs([list(b"b" * 65)])[0]
    # 64 tokens: as many as the model is for.
    assert score == pytest.approx(float(logprob_L.sum()), abs=1e-3)


def test_text_follows_the_begin_token(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "prefix", 0)
    (score, _), (blank, _) = model.loglikelihood([Instance(("", "ab")), Instance((" ", "ab"))])
    assert score == pytest.approx(logprob_of(b"\0ab"), abs=1e-4)
    assert blank == pytest.approx(logprob_of(b"\0 ab"), abs=1e-4)
    (rolled,) = model.loglikelihood_rolling([Instance(("ab",))])
    assert rolled == pytest.approx(score, abs=1e-4)
    assert model.generate_until([Instance(("", {"max_gen_toks": 2}))]) != [""]


def test_answer_ends_before_the_stop_text(model: Any) -> None:
    requests = {"until": [], "max_gen_toks": 20, "do_sample": False}
    (whole,) = model.generate_until([Instance(("say", requests))])
    stop = whole[7:9]
    (actual,) = model.generate_until([Instance(("say", {**requests, "until": [stop]}))])
    assert actual == whole[: whole.index(stop)]


def test_answers_are_batched_and_drawn_independently(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = []
    generate = model._loaded.generate

    def watched(calls: Any, **sampling: Any) -> Any:
        rows.append(sampling)
        return generate(calls, **sampling)

    monkeypatch.setattr(model._loaded, "generate", watched)
    greedy = {"max_gen_toks": 4}
    drawn = {"max_gen_toks": 4, "do_sample": True, "top_p": 0.9, "min_p": 0.01}
    requests = [("a", greedy), ("bcd", greedy), *[("e", drawn)] * 3, ("f", greedy)]
    actual = model.generate_until([Instance(item) for item in requests])
    assert [options.get("temperature") for options in rows] == [None, None, 1.0, 1.0]
    assert [options.get("min_p") for options in rows] == [None, None, 0.01, 0.01]
    assert len({options["seed"] for options in rows[2:]}) == 2 and len(set(actual[2:5])) > 1
    assert actual[5] == model.generate_until([Instance(("f", greedy))])[0]


def test_missing_harness_or_tokenizer_is_rejected(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match="sends texts, so it needs a model with a tokenizer"):
        harness.model(TextModel(generator(DECODER), None, None))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(
        SpecError, match="lm_eval is not installed; install it with pip install lm-eval"
    ):
        harness.model(TextModel(bytes_model(), ByteTokenizer(), 3))
    assert np.isfinite(model.loglikelihood([Instance(("a", "b"))])[0][0])
