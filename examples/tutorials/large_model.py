"""A tour of training a large model as the tutorials have it, on a mesh of 2 × 4 devices.

Data and model parallelism by shardings, remat, bf16 and fp16, an optax chain with clipping and a
schedule, the cache of compiled programs, Orbax. Changed: the folder is an argument,
`jax.distributed.initialize()` has none, and its second call, as a notebook's cells make it, does
nothing.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import jaxlaunch

folder, steps = sys.argv[1], 20
jax.distributed.initialize()
jax.config.update("jax_compilation_cache_dir", f"{folder}/cache")
mesh = jax.make_mesh((2, 4), ("dp", "mp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
rows, whole, columns = (
    NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("dp",), (), (None, None, "mp"))
)
# Megatron's pair.
shardings = {"up": columns, "down": NamedSharding(mesh, PartitionSpec(None, "mp", None))}
rate = optax.warmup_cosine_decay_schedule(0.0, 0.01, warmup_steps=5, decay_steps=steps)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=1e-4))


@partial(jax.jit, out_shardings=shardings)
def init(key):  # made where it is kept: no device holds all of it
    up, down = (
        jax.random.normal(layer_key, (4, 32, 32)) / 16 for layer_key in jax.random.split(key)
    )
    return {"up": up, "down": down}


def loss(params, x, y, dtype, scale):
    @jax.checkpoint  # remat: a layer's inputs are kept, the rest is computed again
    def layer(x, weights):
        up, down = (weight.astype(dtype) for weight in weights)
        return x + jax.nn.relu(x @ up) @ down, None

    x, _ = jax.lax.scan(layer, x.astype(dtype), (params["up"], params["down"]))
    # The sum in float32; fp16 needs a scale.
    return scale * jnp.square(x.astype(jnp.float32) - y).mean()


@partial(jax.jit, static_argnames="dtype", donate_argnums=(0, 1))
def train_step(params, state, x, y, dtype):
    scale = 1024.0 if dtype == jnp.float16 else 1.0
    value, grads = jax.value_and_grad(loss)(params, x, y, dtype, scale)
    updates, state = optimizer.update(jax.tree.map(lambda grad: grad / scale, grads), state, params)
    return optax.apply_updates(params, updates), state, value / scale


def batch(step):  # each process makes its own rows
    rng = np.random.default_rng((step, jax.process_index()))
    x = rng.normal(size=(32 // jax.process_count(), 32)).astype(np.float32)
    return [
        jax.make_array_from_process_local_data(rows, array) for array in (x, np.roll(x, 1, axis=1))
    ]


params = init(jax.random.key(0))
state = jax.jit(optimizer.init)(params)
for step in range(1, steps + 1):
    dtype = jnp.bfloat16 if step <= steps // 2 else jnp.float16
    params, state, value = train_step(params, state, *batch(step), dtype=dtype)
    jaxlaunch.report(step=step, loss=float(value))

jax.distributed.initialize()  # the second call
with ocp.CheckpointManager(f"{folder}/checkpoints") as manager:
    manager.save(steps, args=ocp.args.StandardSave(params), force=True)
    manager.wait_until_finished()
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params
    )
    restored = manager.restore(steps, args=ocp.args.StandardRestore(like))
jaxlaunch.report(step=steps, committed=steps)
same = jax.jit(lambda a, b: jax.tree.reduce(jnp.logical_and, jax.tree.map(jnp.array_equal, a, b)))(
    params, restored
)
if jax.process_index() == 0:
    part = restored["up"].sharding.shard_shape(restored["up"].shape)
    print(
        f"loss {float(value):.2f} on {jax.device_count()} devices, each with {part}; restored as "
        f"saved: {bool(same)}"
    )
