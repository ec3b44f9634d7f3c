"""Precision and remat: the dtype of each part, and which activations are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from jaxlaunch.trainer.spec.block import Block


class Policy(Block):
    """Precision in full: dtypes of parameters, compute and outputs, and the matmul precision of XLA.

    ```yaml
    train:
      task: lm
      precision: {params: bfloat16, compute: bfloat16}  # less memory than the usual precision: bf16
    ```
    """

    params: Literal["float32", "bfloat16"] = Field("float32", description="dtype the parameters are kept in")
    compute: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of layers and activations")
    output: Literal["float32", "bfloat16"] = Field("float32", description="dtype of what the model returns")
    matmul: Literal["default", "tensorfloat32", "highest"] = Field("default", description="XLA's matmul precision")


Precision = Literal["fp32", "tf32", "bf16", "fp16"] | Policy
Remat = Literal["none", "full", "dots", "dots_no_batch", "offload"] | list[str]
