"""Named precisions: the dtypes of a run, and the precision of XLA's float32 matrix products.

| name | compute | float32 products |
|---|---|---|
| fp32 | float32 | highest: true float32 on CPU and GPU, six bfloat16 passes on TPU |
| tf32 | float32 | tensorfloat32: 10-bit mantissas on GPUs since Ampere, three passes on TPU |
| bf16 | bfloat16 | as JAX is configured; the layers' own products are of bfloat16 operands |
| fp16 | float16 | likewise of float16 operands; the loss is scaled (trainer/optim/loss_scale) |

Parameters and outputs of all four are float32. By default JAX rounds float32 products to TF32 on
such GPUs and to bfloat16 on TPU, so fp32 sets `highest`. Whatever `compute` is, softmax, norms'
statistics, loss, gradient sums and optimizer state are float32.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxlaunch.trainer import spec


class Precision(NamedTuple):
    """Dtypes of parameters, arithmetic and outputs, and JAX's matmul precision.

    A step is traced under `jax.default_matmul_precision(matmul)`; None leaves JAX as it is
    configured. Products of the backward pass have the precision of their forward product.
    """

    params: jnp.dtype
    compute: jnp.dtype
    output: jnp.dtype
    matmul: str | None

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is scaled, because gradients would underflow in float16."""
        return bool(self.compute == jnp.float16)


POLICIES = {
    "fp32": spec.Policy(matmul="highest"),
    "tf32": spec.Policy(matmul="tensorfloat32"),
    "bf16": spec.Policy(compute="bfloat16"),
    "fp16": spec.Policy(compute="float16"),
}


def resolve_precision(precision: spec.Precision) -> Precision:
    """Return the dtypes of a precision of the spec, which is a name or a policy."""
    policy = precision if isinstance(precision, spec.Policy) else POLICIES[precision]
    matmul = None if policy.matmul == "default" else policy.matmul
    params, compute, output = map(jnp.dtype, (policy.params, policy.compute, policy.output))
    return Precision(params, compute, output, matmul)
