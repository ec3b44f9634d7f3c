"""The eval block and stop_early: when the held-out set is evaluated, and what follows from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from jaxlaunch.trainer.spec.block import Block, Natural, Positive, Weight, Wide

EVAL = "eval/"  # before the name of a metric that an evaluation gives
FALLING = ("loss", "bits_per_byte")  # ends of the names of metrics that are known to be better when smaller


class Samples(Block):
    """Samples generated from prompts at each evaluation.

    ```yaml
    train:
      task: lm
      eval:
        every: 500
        samples: {prompts: ["def ", "import "], max_tokens: 32, temperature: 0.8}  # 0: the likeliest token
    ```
    """

    prompts: Annotated[list[str | list[Natural]], Field(min_length=1)] = Field(
        description="texts, or token ids if the data has no tokenizer"
    )
    max_tokens: Wide = Field(64, description="tokens of a sample")
    temperature: Weight = Field(0.0, description="0: greedy")


class Eval(Block):
    """Evaluation on the held-out set, every example once.

    ```yaml
    train:
      task: lm
      eval: {every: 500, batches: 20}  # 20 batches of the held-out set, and at the end
    ```
    """

    every: Positive | None = Field(500, description="steps between evaluations; null: only at the end")
    batches: Positive | None = Field(
        None, description="batches per evaluation, at least one per part of a mixture; null: all"
    )
    samples: Samples | None = Field(
        None, description="prompts to generate from, into samples.jsonl of the run folder; null: none"
    )


def _of_evaluation(metric: str) -> str:
    if not metric.startswith(EVAL) or metric == EVAL:
        raise ValueError(
            f"is not a metric of an evaluation; write {EVAL}loss, or another metric that the evaluation gives"
        )
    return metric


class Watched(Block):
    """A metric of the evaluations, and whether smaller or larger values are better."""

    metric: Annotated[str, AfterValidator(_of_evaluation)] = Field(
        "eval/loss", description="eval/loss, or eval/ and another metric of the task's evaluation"
    )
    mode: Literal["min", "max"] = Field(
        "min", description="which values are better; required unless the metric is a loss"
    )

    @model_validator(mode="after")
    def _says_which(self) -> Watched:
        if "mode" not in self.model_fields_set and not self.metric.endswith(FALLING):
            raise ValueError(f"needs mode for metric = {self.metric}: min or max, whichever values are better")
        return self


class StopEarly(Watched):
    """Ends a run that no longer improves; the run then counts as successful.

    ```yaml
    train:
      task: lm
      eval: {every: 100}
      stop_early: {metric: eval/loss, patience: 5, min_delta: 0.001}  # five in a row without a better one
    ```
    """

    patience: Positive = Field(description="evaluations in a row without a better value")
    min_delta: Weight = Field(0.0, description="how much better a value must be to count")
