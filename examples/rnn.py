"""A recurrent network that reads an image row by row.

A Python loop over the rows would be unrolled, so the program and the time to compile it would grow
with the length of the sequence. lax.scan compiles its body once, for any length, and its backward
pass is a scan too. What to know about it:

- The carry is the state h. The body must return it with the same shape and dtype, or tracing fails.
- The gradient passes through every step, so the job clips it.
- Under jax.checkpoint the backward pass keeps only the carries and computes the rest again.
- The weights of the body are read outside of the scan and are the same in each step. nnx variables
  are not accessed inside it.
- A batch of another length would be compiled again, so padding should be masked, not cut off.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class RNN(nnx.Module):
    """A gated recurrent unit (Cho et al. 2014): images [B, rows, columns] -> logits [B, 10]."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.width = width
        # Each product computes the reset gate, the update gate and the candidate.
        self.read = nnx.Linear(8, 3 * width, rngs=rngs)
        self.recur = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        # The inputs do not depend on the state, so one product reads all rows.
        rows_TBF = self.read(images.reshape(*images.shape[:3])).swapaxes(0, 1)
        weights = self.recur.kernel[...]

        @jax.checkpoint
        def body(h_BD: jax.Array, row_BF: jax.Array) -> tuple[jax.Array, None]:
            row_reset, row_update, row_candidate = jnp.split(row_BF, 3, axis=-1)
            h_reset, h_update, h_candidate = jnp.split(h_BD @ weights, 3, axis=-1)
            update = jax.nn.sigmoid(row_update + h_update)
            reset = jax.nn.sigmoid(row_reset + h_reset)
            candidate = jnp.tanh(row_candidate + reset * h_candidate)
            return update * h_BD + (1 - update) * candidate, None

        first_h = jnp.zeros((len(images), self.width), rows_TBF.dtype)
        last_h, _ = jax.lax.scan(body, first_h, rows_TBF)
        return self.out(last_h)
