"""The loss block: what is added to the cross-entropy, and the loss of a pair."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxlaunch.trainer.spec.block import Block, Fraction, Many, Weight


class Dpo(Block):
    """Direct preference optimization, of dpo.

    ```yaml
    train:
      task: dpo
      model: {init_from: weights/qwen3-0.6b, length: 1024}
      data: {source: text, path: "pairs/*.jsonl", format: preference, tokenizer: weights/qwen3-0.6b}
      loss: {dpo: {beta: 0.1}}  # larger: stays nearer to the model that it starts from
    ```
    """

    kind: Literal["sigmoid", "ipo"] = Field("sigmoid", description="loss of a pair: DPO's (sigmoid) or IPO's")
    beta: Annotated[float, Field(gt=0)] = Field(
        0.1, description="strength of the penalty for diverging from the reference model"
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="assumed share of pairs whose labels are swapped"
    )

    @model_validator(mode="after")
    def _is_of_the_kind(self) -> Dpo:
        if self.kind == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing is of kind sigmoid; leave it out with ipo")
        return self


class Loss(Block):
    """What training minimizes in addition to the cross-entropy, and how. Evaluation reports the cross-entropy alone.

    ```yaml
    train:
      task: lm
      loss: {chunks: 8, z: 1e-4}  # logits of an eighth of a sequence at a time: less memory
    ```
    """

    chunks: Literal["auto"] | Many = Field(
        "auto", description="tokens: sequence chunks for chunked cross-entropy; must divide length"
    )
    z: Weight = Field(0.0, description="weight of the z-loss (squared log of the softmax normalizer), such as 1e-4")
    smoothing: Fraction = Field(0.0, description="label smoothing: share of a label's weight spread over all classes")
    dpo: Dpo = Field(Dpo(), description="preferences: the loss of a pair")
    mixup: Weight = Field(0.0, description="images: alpha of the Beta distribution that blends pairs; 0: none")
