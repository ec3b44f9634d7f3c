"""A recurrent network that reads an image row by row.

Why lax.scan: a Python loop over the rows would be unrolled, so the program and the time to compile
it would grow with the length of the sequence. A scan compiles its body once, for any length, and
its backward pass is a scan too. The carry is the state h; the body must return it with the same
shape and dtype, or tracing fails. The gradient passes through every step, so the job clips it.
Under jax.checkpoint the body keeps only the carries and computes the rest again, and here the
carries are all that the backward pass needs. The weights of the body are read outside the scan and
are the same in each step; nnx variables are not touched inside it. A batch with a different length
would be compiled again, so rows of padding are masked and not cut off.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class RNN(nnx.Module):
    """A gated recurrent unit (Cho et al. 2014): images [B, rows, columns] -> logits [B, 10]."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.width = width
        self.read = nnx.Linear(8, 3 * width, rngs=rngs)  # reset, update and candidate, of a row
        self.recur = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        # One product for all rows.
        rows_TBF = self.read(images.reshape(*images.shape[:3])).swapaxes(0, 1)
        weights = self.recur.kernel[...]

        @jax.checkpoint
        def body(h_BD: jax.Array, row_BF: jax.Array) -> tuple[jax.Array, None]:
            reset, update, new = jnp.split(row_BF, 3, axis=-1)
            from_reset, from_update, from_new = jnp.split(h_BD @ weights, 3, axis=-1)
            keep = jax.nn.sigmoid(update + from_update)
            candidate = jnp.tanh(new + jax.nn.sigmoid(reset + from_reset) * from_new)
            return keep * h_BD + (1 - keep) * candidate, None

        first = jnp.zeros((len(images), self.width), rows_TBF.dtype)
        last, _ = jax.lax.scan(body, first, rows_TBF)
        return self.out(last)
