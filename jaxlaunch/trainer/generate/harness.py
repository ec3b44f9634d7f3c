"""Adapter from a loaded model to the language-model evaluation harness (lm_eval).

    lm_eval.simple_evaluate(model=harness.model(jaxlaunch.load("runs/lm")),
    tasks=["lambada_openai"])

The harness is not a dependency; it is imported when a model is wrapped for it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.decoding import CUTTING_FIELDS
from jaxlaunch.trainer.generate.generator import Ids
from jaxlaunch.trainer.generate.text_model import TextModel

# Rows that are scored or generated at a time.
DEFAULT_BATCH = 8
# The harness's own default for the length of an answer.
DEFAULT_MAX_TOKENS = 256
ScoredRow = tuple[Ids, int]  # a row, and how many of its last tokens count


class HarnessModel:
    """The three request types of the harness, each a list of objects with `args`.

    As in the harness's own models, spaces at the end of a context belong to the continuation, a
    text without a context is preceded by the tokenizer's bos or eos token, and long texts lose
    their beginning. If the tokenizer has neither token, the first token of a text without context
    is not scored.
    """

    def __init__(self, loaded: TextModel, batch: int = DEFAULT_BATCH, seed: int = 0) -> None:
        super().__init__()
        if loaded.tokenizer is None:
            raise SpecError(
                "the evaluation harness asks in text, and the model has no tokenizer here"
            )
        self._loaded, self._batch, self._seed = loaded, batch, seed
        self._tokenizer = loaded.tokenizer
        config = loaded.config
        self._length = config.max_positions if config.kind == "decoder" else config.position_rows

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the likeliest."""
        return self._score_rows([self._encode_row(*request.args) for request in requests])

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, computed in windows of the model's length."""
        windows: list[list[ScoredRow]] = []
        for request in requests:
            ids = self._encode_text(request.args[0])
            # Each token of `ids` after the first is counted in exactly one row, after as much
            # context as fits.
            windows.append([])
            for done in range(1, len(ids), self._length):
                end = min(done + self._length, len(ids))
                windows[-1].append((ids[max(end - self._length - 1, 0) : end], end - done))
        scores = iter(self._score_rows([row for rows in windows for row in rows]))
        return [sum(next(scores)[0] for _ in rows) for rows in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the model's continuation for each (context, arguments).

        Supported arguments are `until`, `max_gen_toks`, `do_sample`, `temperature`, `top_k`,
        `top_p` and `min_p`. Draws depend on the seed and on the preceding requests.
        """
        answers = [""] * len(requests)
        indexes_by_arguments: defaultdict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            key = json.dumps(request.args[1], sort_keys=True, default=str)
            indexes_by_arguments[key].append(index)
        for indexes in indexes_by_arguments.values():
            arguments = requests[indexes[0]].args[1]
            for batch in self._sort_batches(indexes, lambda index: len(requests[index].args[0])):
                contexts = [requests[index].args[0] for index in batch]
                texts = self._generate_batch(contexts, arguments)
                for index, text in zip(batch, texts, strict=True):
                    answers[index] = text
        return answers

    def _encode_row(self, context: str, continuation: str) -> ScoredRow:
        """Encode context and continuation as one row, and count its last tokens to score."""
        if not context:
            whole = self._encode_text(continuation)
            count = len(whole) - 1
        else:
            whole = self._tokenizer.encode(context + continuation)
            context_tokens = len(self._tokenizer.encode(context.rstrip()))
            if not context_tokens and self._tokenizer.prefix is not None:
                whole, context_tokens = [self._tokenizer.prefix, *whole], 1
            count = len(whole) - max(context_tokens, 1)
        return whole[-self._length - 1 :], min(count, self._length)

    def _encode_text(self, text: str) -> Ids:
        """Return the tokens of a text, preceded by the tokenizer's prefix token if it has one."""
        ids, prefix = self._tokenizer.encode(text), self._tokenizer.prefix
        return ids if prefix is None or ids[:1] == [prefix] else [prefix, *ids]

    def _score_rows(self, rows: Sequence[ScoredRow]) -> list[tuple[float, bool]]:
        # A row without counted tokens has probability 1.
        scores = [(0.0, True)] * len(rows)
        counted = [index for index, (_, count) in enumerate(rows) if count > 0]
        for batch in self._sort_batches(counted, lambda index: len(rows[index][0])):
            scored = self._loaded.scored([rows[index][0] for index in batch])
            for index, (logprob_L, is_best_L) in zip(batch, scored, strict=True):
                last = slice(len(logprob_L) - rows[index][1], None)
                scores[index] = float(logprob_L[last].sum()), bool(is_best_L[last].all())
        return scores

    def _sort_batches(
        self, indexes: Sequence[int], length: Callable[[int], int]
    ) -> Iterator[Sequence[int]]:
        """Yield batches of similar lengths, longest first: memory errors show up at once."""
        ordered = sorted(indexes, key=length, reverse=True)
        for start in range(0, len(ordered), self._batch):
            yield ordered[start : start + self._batch]

    def _generate_batch(self, contexts: Sequence[str], arguments: Mapping[str, Any]) -> list[str]:
        """Return the answers of one batch of requests with equal arguments."""
        until = arguments.get("until") or []
        tokens = min(int(arguments.get("max_gen_toks", DEFAULT_MAX_TOKENS)), self._length - 1)
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        how: dict[str, Any] = {"max_tokens": tokens}
        is_drawn = arguments.get("do_sample", bool(arguments.get("temperature")))
        if is_drawn and (temperature := arguments.get("temperature", 1.0)):
            how |= {"temperature": temperature, "seed": self._seed}
            how |= {key: arguments[key] for key in CUTTING_FIELDS if arguments.get(key)}
            # The same request in a later batch must draw different tokens.
            self._seed += 1
        prompts = [
            (self._tokenizer.encode(text) or self._encode_text(text))[tokens - self._length :]
            for text in contexts
        ]
        answers = []
        for (sample,) in self._loaded.generate(prompts, stop=stops, **how):
            text = self._loaded.text(sample) or ""
            for stop in stops:
                text = text.partition(stop)[0]
            answers.append(text)
        return answers


def model(loaded: TextModel, batch: int = DEFAULT_BATCH, seed: int = 0) -> Any:
    """Gives a language model to the evaluation harness, which needs `pip install lm-eval`.

    The guide shows [the evaluation harness](using-models.md#the-evaluation-harness) in use.

    **Arguments:**

    - `loaded`: the model, with a tokenizer.
    - `batch`: rows that are scored or generated at a time.
    - `seed`: of what is drawn.

    **Returns:**

    An `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(model=…)`.

    **Raises:**

    [`TrainerError`](#trainererror) where the harness is not installed, or the model has no
    tokenizer.
    """
    try:
        from lm_eval.api.model import LM  # type: ignore[import-not-found]
    except ImportError:
        raise SpecError("lm_eval is not installed; install it with pip install lm-eval") from None
    return type("Jaxlaunch", (HarnessModel, LM), {})(loaded, batch, seed)
