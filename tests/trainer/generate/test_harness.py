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


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in: Any = types.ModuleType("lm_eval.api.model")
    stand_in.LM = LM
    for name, module in {
        "lm_eval": types.ModuleType("lm_eval"),
        "lm_eval.api.model": stand_in,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "lm_eval.api", types.ModuleType("lm_eval.api"))
    return harness.model(TextModel(bytes_model(), ByteTokenizer(), 3), batch=2)


QUESTIONS = [("two and two", " are four"), ("one ", "and one"), ("", "none")]


def test_a_task_of_choices_is_scored_by_the_continuation_alone(model: Any) -> None:
    assert isinstance(model, LM)
    found = model.loglikelihood([Instance(pair) for pair in QUESTIONS])
    for (context, continuation), (score, is_greedy) in zip(QUESTIONS, found, strict=True):
        logprob_L, is_best_L = bytes_model().compute_logprobs(
            [list((context + continuation).encode())]
        )[0]
        count = len(continuation) - (not context) + len(context) - len(context.rstrip())
        assert score == pytest.approx(float(logprob_L[-count:].sum()), abs=1e-4)
        assert is_greedy == is_best_L[-count:].all()


def test_a_text_longer_than_the_model_is_scored_in_windows_each_token_once(model: Any) -> None:
    text = "".join(chr(97 + at % 26) for at in range(150))
    found, nothing, one = model.loglikelihood_rolling(
        [Instance((each,)) for each in (text, "", "a")]
    )
    ids, total = list(text.encode()), 0.0
    for row, count in (
        (ids[:65], 64),
        (ids[64:129], 64),
        (ids[85:], 21),
    ):  # as the harness cuts it, the last one full
        total += float(bytes_model().compute_logprobs([row])[0][0][-count:].sum())
    assert found == pytest.approx(total, abs=1e-3)
    assert (nothing, one) == (0.0, 0.0)


def test_nothing_is_certain_and_blanks_belong_to_what_follows_them(model: Any) -> None:
    pairs = [("", ""), ("a", ""), ("", "b"), ("  ", "b"), ("a" * 100, "b" * 100)]
    *few, (score, _) = model.loglikelihood([Instance(pair) for pair in pairs])
    assert few[:3] == [(0.0, True)] * 3
    assert few[3][0] == pytest.approx(
        float(bytes_model().compute_logprobs([list(b"  b")])[0][0].sum()), abs=1e-4
    )
    (logprob_L, _) = bytes_model().compute_logprobs([list(b"b" * 65)])[0]
    assert score == pytest.approx(
        float(logprob_L.sum()), abs=1e-3
    )  # 64 tokens: as many as the model is for


def test_a_text_stands_behind_the_token_that_begins_texts(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "prefix", 0)
    (score, _), (blank, _) = model.loglikelihood([Instance(("", "ab")), Instance((" ", "ab"))])
    assert score == pytest.approx(
        float(bytes_model().compute_logprobs([list(b"\0ab")])[0][0].sum()), abs=1e-4
    )
    assert blank == pytest.approx(
        float(bytes_model().compute_logprobs([list(b"\0 ab")])[0][0].sum()), abs=1e-4
    )
    (rolled,) = model.loglikelihood_rolling([Instance(("ab",))])
    assert rolled == pytest.approx(score, abs=1e-4)
    assert model.generate_until([Instance(("", {"max_gen_toks": 2}))]) != [""]


def test_an_answer_ends_before_what_it_is_to_end_at(model: Any) -> None:
    asked = {"until": [], "max_gen_toks": 20, "do_sample": False}
    (whole,) = model.generate_until([Instance(("say", asked))])
    stop = whole[7:9]
    (found,) = model.generate_until([Instance(("say", {**asked, "until": [stop]}))])
    assert found == whole[: whole.index(stop)]


def test_answers_come_in_batches_and_what_is_drawn_is_drawn_anew(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = []
    generate = model._loaded.generate

    def watched(asked: Any, **how: Any) -> Any:
        rows.append(how)
        return generate(asked, **how)

    monkeypatch.setattr(model._loaded, "generate", watched)
    greedy = {"max_gen_toks": 4}
    drawn = {"max_gen_toks": 4, "do_sample": True, "top_p": 0.9, "min_p": 0.01}
    asked = [
        ("a", greedy),
        ("bcd", greedy),
        ("e", drawn),
        ("e", drawn),
        ("e", drawn),
        ("f", greedy),
    ]
    found = model.generate_until([Instance(each) for each in asked])
    assert [how.get("temperature") for how in rows] == [None, None, 1.0, 1.0]
    assert [how.get("min_p") for how in rows] == [None, None, 0.01, 0.01]
    assert len({how["seed"] for how in rows[2:]}) == 2 and len(set(found[2:5])) > 1
    assert found[5] == model.generate_until([Instance(("f", greedy))])[0]


def test_without_the_harness_or_a_tokenizer_it_is_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match="asks in text, and the model has no tokenizer here"):
        harness.model(TextModel(generator(DECODER), None, None))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(
        SpecError, match="lm_eval is not installed; install it with pip install lm-eval"
    ):
        harness.model(TextModel(bytes_model(), ByteTokenizer(), 3))
    assert np.isfinite(model.loglikelihood([Instance(("a", "b"))])[0][0])
