"""The loss block: what is added to the cross-entropy, and the loss of a pair."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxlaunch.trainer.spec.block import Block, Fraction, Many, Rate, Weight


class Dpo(Block):
    """Direct preference optimization, for the task dpo.

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
            raise ValueError("label_smoothing applies only to kind sigmoid; leave it out with ipo")
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
    dpo: Dpo = Field(Dpo(), description="preferences: the loss of a pair of texts")
    target: Literal["class", "multi_label", "regression"] = Field(
        "class",
        description="images and tables: one class; multi_label: 0 or 1 for each class, by sigmoids; regression: "
        "numbers, by squared error",
    )
    class_weights: Annotated[list[Rate], Field(min_length=2)] | None = Field(
        None,
        description="images and tables: weight of each class; multi_label: of its positive rows; default 1 for each",
    )
    focal: Weight = Field(0.0, description="images and tables: gamma of the focal loss, such as 2; 0: none")
    mixup: Weight = Field(0.0, description="images: alpha of the Beta distribution that blends pairs; 0: none")
    cutmix: Weight = Field(
        0.0,
        description="images: alpha of the Beta distribution of the area that is pasted from another image; 0: none. "
        "With mixup, a step draws one of both",
    )

    @property
    def of_labels(self) -> list[str]:
        """The keys given that are of images and tables alone."""
        keys = ("target", "class_weights", "focal", "mixup", "cutmix")
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]

    @model_validator(mode="after")
    def _fits_the_target(self) -> Loss:
        if self.focal and self.smoothing and self.target == "class":
            raise ValueError(f"focal = {self.focal:g} and smoothing = {self.smoothing:g} are both given; keep one")
        if self.target == "multi_label" and self.z:
            raise ValueError("z applies to a softmax, and target: multi_label has none")
        if self.target == "regression":
            given = [
                key for key in ("z", "smoothing", "class_weights", "focal", "mixup", "cutmix") if getattr(self, key)
            ]
            if given:
                raise ValueError(f"{given[0]} applies to classes, and target is regression")
        return self
