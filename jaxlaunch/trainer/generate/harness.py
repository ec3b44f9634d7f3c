"""Adapter of a loaded model to the language-model evaluation harness (lm_eval).

    lm_eval.simple_evaluate(model=harness.model(jaxlaunch.load("runs/lm")),
    tasks=["lambada_openai"])

The harness is not a dependency. It is imported when a model is wrapped.
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

# Number of rows that are scored or generated at a time.
DEFAULT_BATCH = 8
# The default length of an answer in the harness.
DEFAULT_MAX_TOKENS = 256
# A row, and the number of its last tokens whose scores count.
ScoredRow = tuple[Ids, int]


class HarnessModel:
    """The three request types of the harness, each a list of objects with `args`.

    As in the models of the harness, spaces at the end of a context belong to the continuation, a
    text without a context follows the tokenizer's bos or eos token, and texts that are too long are
    cut at the beginning. If the tokenizer has neither token, the first token of a text without a
    context is not scored.
    """

    def __init__(self, loaded: TextModel, batch: int = DEFAULT_BATCH, seed: int = 0) -> None:
        super().__init__()
        if loaded.tokenizer is None:
            raise SpecError(
                "the evaluation harness sends texts, so it needs a model with a tokenizer"
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
            # Each token after the first counts in exactly one window, with as much context as fits.
            windows.append([])
            for start in range(1, len(ids), self._length):
                end = min(start + self._length, len(ids))
                windows[-1].append((ids[max(end - self._length - 1, 0) : end], end - start))
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
        """Encode context and continuation as one row, and count the tokens of the continuation."""
        if not context:
            ids = self._encode_text(continuation)
            count = len(ids) - 1
        else:
            ids = self._tokenizer.encode(context + continuation)
            context_tokens = len(self._tokenizer.encode(context.rstrip()))
            if not context_tokens and self._tokenizer.prefix is not None:
                ids, context_tokens = [self._tokenizer.prefix, *ids], 1
            count = len(ids) - max(context_tokens, 1)
        return ids[-self._length - 1 :], min(count, self._length)

    def _encode_text(self, text: str) -> Ids:
        """Return the tokens of a text, preceded by the tokenizer's prefix token if it has one."""
        ids, prefix = self._tokenizer.encode(text), self._tokenizer.prefix
        return ids if prefix is None or ids[:1] == [prefix] else [prefix, *ids]

    def _score_rows(self, rows: Sequence[ScoredRow]) -> list[tuple[float, bool]]:
        # A row without counted tokens has probability 1.
        scores = [(0.0, True)] * len(rows)
        counted_rows = [index for index, (_, count) in enumerate(rows) if count > 0]
        for batch in self._sort_batches(counted_rows, lambda index: len(rows[index][0])):
            scored = self._loaded.scored([rows[index][0] for index in batch])
            for index, (logprob_L, is_best_L) in zip(batch, scored, strict=True):
                counted = slice(len(logprob_L) - rows[index][1], None)
                scores[index] = float(logprob_L[counted].sum()), bool(is_best_L[counted].all())
        return scores

    def _sort_batches(
        self, indexes: Sequence[int], length: Callable[[int], int]
    ) -> Iterator[Sequence[int]]:
        """Yield batches of similar lengths, the longest first, so that memory errors come early."""
        ordered = sorted(indexes, key=length, reverse=True)
        for start in range(0, len(ordered), self._batch):
            yield ordered[start : start + self._batch]

    def _generate_batch(self, contexts: Sequence[str], arguments: Mapping[str, Any]) -> list[str]:
        """Return the answers of one batch of requests with equal arguments."""
        until = arguments.get("until") or []
        max_tokens = min(int(arguments.get("max_gen_toks", DEFAULT_MAX_TOKENS)), self._length - 1)
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        options: dict[str, Any] = {"max_tokens": max_tokens}
        is_drawn = arguments.get("do_sample", bool(arguments.get("temperature")))
        if is_drawn and (temperature := arguments.get("temperature", 1.0)):
            options |= {"temperature": temperature, "seed": self._seed}
            options |= {key: arguments[key] for key in CUTTING_FIELDS if arguments.get(key)}
            # The same request in a later batch must draw different tokens.
            self._seed += 1
        prompts = [
            (self._tokenizer.encode(text) or self._encode_text(text))[max_tokens - self._length :]
            for text in contexts
        ]
        answers = []
        for (sample,) in self._loaded.generate(prompts, stop=stops, **options):
            text = self._loaded.text(sample) or ""
            for stop in stops:
                text = text.partition(stop)[0]
            answers.append(text)
        return answers


def model(loaded: TextModel, batch: int = DEFAULT_BATCH, seed: int = 0) -> Any:
    """Wraps a language model for the evaluation harness, which needs `pip install lm-eval`.

    See [the evaluation harness](using-models.md#the-evaluation-harness) in the guide.

    **Arguments:**

    - `loaded`: the model, with a tokenizer.
    - `batch`: the number of rows that are scored or generated at a time.
    - `seed`: the seed of random draws.

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
