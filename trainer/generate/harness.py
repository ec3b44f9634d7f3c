"""A loaded model as the language-model evaluation harness (lm_eval) calls one.

    lm_eval.simple_evaluate(model=harness.model(jaxlaunch.load("runs/lm")), tasks=["lambada_openai"])

The harness is no dependency: it is imported when a model is made for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainer.errors import SpecError
from trainer.generate.generator import Ids
from trainer.generate.loaded import Loaded

BATCH = 8  # rows scored or generated at a time
NEW_TOKENS = 256  # of an answer, where a task does not say: the harness's own default


class Answers:
    """The three kinds of requests, each a list of objects whose `args` say what is asked."""

    def __init__(self, loaded: Loaded, batch: int = BATCH) -> None:
        super().__init__()
        if loaded.tokenizer is None:
            raise SpecError("the evaluation harness asks in text, and the model has no tokenizer here")
        self._loaded, self._batch, self._encode = loaded, batch, loaded.tokenizer.encode
        self._length = loaded.config.reach if loaded.config.kind == "decoder" else loaded.config.rows

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of each (context, continuation) the continuation's log-probability, and whether it is the greedy one."""
        return self._scored([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each (text,) its log-probability but for the first token; each token sees as many as the model is for."""
        found = []
        for request in requests:
            windows = list(self._windows(self._encode(request.args[0])))
            found.append(sum(score for score, _ in self._scored(windows)))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model goes on with, for each (context, arguments): `until`, `max_gen_toks`, `do_sample`, and as in
        transformers."""
        return [self._answer(*request.args) for request in requests]

    def _pair(self, context: str, continuation: str) -> tuple[Ids, int]:
        """Both as one row, and how many of its last tokens count: as in the harness, blanks between them do.

        Without a context the first token, before which there is nothing, does not.
        """
        before, whole = self._encode(context.rstrip()), self._encode(context + continuation)
        return whole[-self._length :], min(len(whole) - max(len(before), 1), self._length - 1)

    def _windows(self, ids: Ids) -> Iterator[tuple[Ids, int]]:
        """Rows of the model's length whose counted tokens are all of `ids` but the first, each once."""
        for start in range(0, max(len(ids) - 1, 0), self._length - 1):
            row = ids[start : start + self._length]
            yield row, len(row) - 1

    def _scored(self, rows: Sequence[tuple[Ids, int]]) -> list[tuple[float, bool]]:
        found = []
        for at in range(0, len(rows), self._batch):
            part = [(row, count) for row, count in rows[at : at + self._batch]]
            scored = self._loaded.scored([row for row, _ in part])
            for (_, count), (logprob_L, is_best_L) in zip(part, scored, strict=True):
                last = slice(len(logprob_L) - count, None)
                found.append((float(logprob_L[last].sum()), bool(is_best_L[last].all())))
        return found

    def _answer(self, context: str, asked: dict[str, Any]) -> str:
        until, tokens = asked.get("until") or [], int(asked.get("max_gen_toks", NEW_TOKENS))
        stops = [until] if isinstance(until, str) else list(until)
        is_drawn = asked.get("do_sample", bool(asked.get("temperature")))
        how = {key: asked[key] for key in ("temperature", "top_p", "top_k") if is_drawn and asked.get(key)}
        prompt = self._encode(context)[-max(self._length - tokens, 1) :]
        sample = self._loaded.generate([prompt], stop=stops, max_tokens=tokens, **how)[0][0]
        text = self._loaded.text(sample) or ""
        for stop in stops:
            text = text.partition(stop)[0]
        return text


def model(loaded: Loaded, batch: int = BATCH) -> Any:
    """The model as an `lm_eval.api.model.LM`. Raises SpecError where the harness is not installed."""
    try:
        from lm_eval.api.model import LM  # type: ignore[import-not-found]
    except ImportError:
        raise SpecError("lm_eval is not installed; install it with pip install lm-eval") from None
    return type("Jaxlaunch", (Answers, LM), {})(loaded, batch)
