"""The lora block of job.yaml: its keys, their types and defaults. Never imports jax."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxlaunch.trainer.spec.block import Block, Fraction, Many, Place, Rate


class Lora(Block):
    """Adapters that are trained instead of the model, which does not change. Hu et al. 2021.

    ```yaml
    train:
      task: lm
      model: {init_from: weights/qwen3-8b, length: 2048}
      lora: {rank: 16, alpha: 32, targets: [q, v], base: int8}  # the model itself is frozen, in int8
    ```
    """

    init_from: Place | None = Field(
        None,
        description="a peft folder or URL to start from: it sets rank, alpha, targets and rslora; default new adapters",
    )
    rank: Many = Field(16, description="columns of an adapter's first matrix, rows of its second")
    alpha: Rate = Field(32.0, description="the adapter's output is multiplied by alpha / rank")
    targets: Annotated[list[str], Field(min_length=1)] = Field(
        ["q", "v"],
        description="linear layers with an adapter: q, k, v, o, gate, up, down, peft's names (q_proj), or all-linear",
    )
    dropout: Fraction = Field(0.0, description="dropout probability on an adapter's input")
    rslora: bool = Field(
        False, description="multiply by alpha / √rank instead (rank-stabilized LoRA). Kalajdzievski 2023"
    )
    base: Literal["bf16", "int8"] | None = Field(
        None, description="precision of the frozen model: bf16, or int8 matrices; null: that of train.precision"
    )

    @property
    def scaling(self) -> float:
        """The factor of what an adapter adds."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
