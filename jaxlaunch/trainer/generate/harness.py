"""A loaded model as the language-model evaluation harness (lm_eval) calls one.

    lm_eval.simple_evaluate(model=harness.model(jaxlaunch.load("runs/lm")), tasks=["lambada_openai"])

The harness is no dependency: it is imported when a model is made for it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.decoding import CUTTING
from jaxlaunch.trainer.generate.generator import Ids
from jaxlaunch.trainer.generate.loaded import TextModel

BATCH = 8  # rows scored or generated at a time
NEW_TOKENS = 256  # of an answer, where a task does not say: the harness's own default
Scored = tuple[Ids, int]  # a row, and how many of its last tokens count


class Answers:
    """The three kinds of requests, each a list of objects whose `args` say what is asked.

    As in the harness's own models, blanks at a context's end belong to what follows it, a text that nothing precedes
    stands behind the tokenizer's bos token, or eos, and what does not fit loses its beginning. Where the tokenizer has
    neither, a text's first token, before which there is nothing, is not scored.
    """

    def __init__(self, loaded: TextModel, batch: int = BATCH, seed: int = 0) -> None:
        super().__init__()
        if loaded.tokenizer is None:
            raise SpecError("the evaluation harness asks in text, and the model has no tokenizer here")
        self._loaded, self._batch, self._seed = loaded, batch, seed
        self._tokenizer = loaded.tokenizer
        self._length = loaded.config.reach if loaded.config.kind == "decoder" else loaded.config.rows

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return each (context, continuation)'s log-probability of the continuation, and whether it is greedy."""
        return self._score([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return each (text,)'s log-probability, in windows of the model's length, the last of them full too."""
        windows: list[list[Scored]] = []
        for request in requests:
            ids = self._encode_text(request.args[0])
            # Rows whose counted tokens are all of `ids` but the first, each once, behind as many as fit.
            ends = [(done, min(done + self._length, len(ids))) for done in range(1, len(ids), self._length)]
            windows.append([(ids[max(end - self._length - 1, 0) : end], end - done) for done, end in ends])
        scores = iter(self._score([row for rows in windows for row in rows]))
        return [sum(next(scores)[0] for _ in rows) for rows in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model goes on with, for each (context, arguments): `until`, `max_gen_toks`, `do_sample`,
        `temperature`, `top_k`, `top_p`, `min_p`. What is drawn depends on the seed and on the requests before it."""
        answers = [""] * len(requests)
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True, default=str)].append(index)
        for indexes in alike.values():
            arguments = requests[indexes[0]].args[1]
            for batch in self._batches(indexes, lambda index: len(requests[index].args[0])):
                contexts = [requests[index].args[0] for index in batch]
                for index, text in zip(batch, self._answer(contexts, arguments), strict=True):
                    answers[index] = text
        return answers

    def _pair(self, context: str, continuation: str) -> Scored:
        """Return both as one row, and how many of its last tokens count."""
        if not context:
            whole = self._encode_text(continuation)
            count = len(whole) - 1
        else:
            whole = self._tokenizer.encode(context + continuation)
            before = len(self._tokenizer.encode(context.rstrip()))
            if not before and self._tokenizer.prefix is not None:
                whole, before = [self._tokenizer.prefix, *whole], 1
            count = len(whole) - max(before, 1)
        return whole[-self._length - 1 :], min(count, self._length)

    def _encode_text(self, text: str) -> Ids:
        """Return the tokens of a text behind the one that every text stands behind, where there is one."""
        ids, prefix = self._tokenizer.encode(text), self._tokenizer.prefix
        return ids if prefix is None or ids[:1] == [prefix] else [prefix, *ids]

    def _score(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        # Nothing to count is certain: 0 and greedy.
        scores = [(0.0, True)] * len(rows)
        counted = [index for index, (_, count) in enumerate(rows) if count > 0]
        for batch in self._batches(counted, lambda index: len(rows[index][0])):
            scored = self._loaded.scored([rows[index][0] for index in batch])
            for index, (logprob_L, is_best_L) in zip(batch, scored, strict=True):
                last = slice(len(logprob_L) - rows[index][1], None)
                scores[index] = float(logprob_L[last].sum()), bool(is_best_L[last].all())
        return scores

    def _batches(self, indexes: Sequence[int], length: Callable[[int], int]) -> Iterator[Sequence[int]]:
        """Yield the indexes in batches of like lengths, the longest first: if a batch fits, those after it do."""
        ordered = sorted(indexes, key=length, reverse=True)
        return (ordered[start : start + self._batch] for start in range(0, len(ordered), self._batch))

    def _answer(self, contexts: Sequence[str], arguments: Mapping[str, Any]) -> list[str]:
        """Return the answers of one batch, whose arguments are equal."""
        until = arguments.get("until") or []
        tokens = min(int(arguments.get("max_gen_toks", NEW_TOKENS)), self._length - 1)
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        how: dict[str, Any] = {"max_tokens": tokens}
        is_drawn = arguments.get("do_sample", bool(arguments.get("temperature")))
        if is_drawn and (temperature := arguments.get("temperature", 1.0)):
            how |= {"temperature": temperature, "seed": self._seed}
            how |= {key: arguments[key] for key in CUTTING if arguments.get(key)}
            self._seed += 1  # the next batch draws anew, as the same request asked again
        prompts = [
            (self._tokenizer.encode(text) or self._encode_text(text))[tokens - self._length :] for text in contexts
        ]
        answers = []
        for (sample,) in self._loaded.generate(prompts, stop=stops, **how):
            text = self._loaded.text(sample) or ""
            for stop in stops:
                text = text.partition(stop)[0]
            answers.append(text)
        return answers


def model(loaded: TextModel, batch: int = BATCH, seed: int = 0) -> Any:
    """Gives a language model to the [evaluation harness](using-models.md#the-evaluation-harness), which is not a
    dependency: `pip install lm-eval`.

    **Arguments:**

    - `loaded`: the model, with a tokenizer.
    - `batch`: rows that are scored or generated at a time.
    - `seed`: of what is drawn.

    **Returns:**

    An `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(model=…)`.

    **Raises:**

    [`TrainerError`](#trainererror) where the harness is not installed, or the model has no tokenizer.
    """
    try:
        from lm_eval.api.model import LM  # type: ignore[import-not-found]
    except ImportError:
        raise SpecError("lm_eval is not installed; install it with pip install lm-eval") from None
    return type("Jaxlaunch", (Answers, LM), {})(loaded, batch, seed)
