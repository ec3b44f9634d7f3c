"""Seven transformations of JAX, and a step that is sharded over a mesh of 2 × 4 devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

jax.distributed.initialize()  # the agent sets the environment
key = jax.random.key(0)
w, x = jax.random.normal(key, (16, 16)), jnp.ones((32, 16))


# 1. jit with stable shapes, the state donated: updated in place, compiled once
@partial(jax.jit, donate_argnums=0)
def decay(state, rate):
    return jax.tree.map(lambda leaf: leaf * rate, state)


state = decay({"w": w + 0.0}, 0.5)
state = decay(state, 0.25)
assert decay._cache_size() == 1

# 2. vmap: from one example to a batch
norm = jax.vmap(lambda row: jnp.sqrt((row**2).sum()))(x)
np.testing.assert_allclose(norm, 4.0)

# 3. scan: a loop that is compiled once, with its carry
last, every = jax.lax.scan(lambda h, row: ((h + row) / 2, h), jnp.zeros(16), x)
assert every.shape == (32, 16)


# 4. remat: the activations of a block are computed again in the backward pass
@jax.checkpoint
def block(w, x):
    return jnp.tanh(x @ w)


# 5. value_and_grad with aux: the loss, what else it found, and its gradient
def loss(w, x):
    y = block(w, x)
    return (y**2).mean(), {"largest": jnp.abs(y).max()}


(value, aux), grad = jax.value_and_grad(loss, has_aux=True)(w, x)
assert grad.shape == w.shape and aux["largest"] <= 1

# 6. pmap: one row of the leading axis for each device of this process
rows = x.reshape(jax.local_device_count(), -1, 16)
means = jax.pmap(lambda part: jax.lax.pmean(part.mean(), "dp"), axis_name="dp")(rows)
np.testing.assert_allclose(means, 1.0)

# 7. pjit, which is jit with shardings now: a mesh of 2 × 4, the batch over dp, the weights over mp
mesh = jax.make_mesh((2, 4), ("dp", "mp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
over_dp, over_mp = (
    NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("dp", None), (None, "mp"))
)
w, x = jax.device_put(w, over_mp), jax.device_put(x, over_dp)


# the sharded step: the mean is global, so jit writes the all-reduce by itself
@partial(jax.jit, donate_argnums=0, out_shardings=(over_mp, None))
def step(w, x):
    (value, aux), grad = jax.value_and_grad(loss, has_aux=True)(w, x)
    return w - 0.1 * grad, value


for _ in range(5):
    w, now = step(w, x)
np.testing.assert_allclose(w.sharding.shard_shape(w.shape), (16, 4))
assert now < value
print(f"loss {value:.4f} -> {now:.4f} on {jax.device_count()} devices")
