"""Training of a large model as in tutorials, on a mesh of 2 × 4 devices.

It shows data and model parallelism by shardings, remat, bf16 and fp16, an optax chain with clipping
and a schedule, the compilation cache, and checkpoints with Orbax.

Two things differ from a tutorial: the folder for the cache and the checkpoints is an argument, and
`jax.distributed.initialize()` has no arguments. Its second call, which happens in notebooks whose
cells are run again, does nothing.
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
# As in Megatron, the first matrix is split by columns and the second one by rows, so that the pair
# needs one sum over the devices.
shardings = {"up": columns, "down": NamedSharding(mesh, PartitionSpec(None, "mp", None))}
rate = optax.warmup_cosine_decay_schedule(0.0, 0.01, warmup_steps=5, decay_steps=steps)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=1e-4))


@partial(jax.jit, out_shardings=shardings)
def init(key):
    # Each device only creates its own part, because jit knows the shardings of the outputs.
    up, down = (
        jax.random.normal(layer_key, (4, 32, 32)) / 16 for layer_key in jax.random.split(key)
    )
    return {"up": up, "down": down}


def loss(params, x, y, dtype, scale):
    # With remat only the inputs of a layer are kept, and the rest is computed again.
    @jax.checkpoint
    def layer(x, weights):
        up, down = (weight.astype(dtype) for weight in weights)
        return x + jax.nn.relu(x @ up) @ down, None

    x, _ = jax.lax.scan(layer, x.astype(dtype), (params["up"], params["down"]))
    # The loss is computed in float32. fp16 needs a scale, or small gradients would underflow.
    return scale * jnp.square(x.astype(jnp.float32) - y).mean()


@partial(jax.jit, static_argnames="dtype", donate_argnums=(0, 1))
def train_step(params, state, x, y, dtype):
    scale = 1024.0 if dtype == jnp.float16 else 1.0
    value, grads = jax.value_and_grad(loss)(params, x, y, dtype, scale)
    updates, state = optimizer.update(jax.tree.map(lambda grad: grad / scale, grads), state, params)
    return optax.apply_updates(params, updates), state, value / scale


def batch(step):
    # Each process makes its own rows.
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

jax.distributed.initialize()
with ocp.CheckpointManager(f"{folder}/checkpoints") as manager:
    manager.save(steps, args=ocp.args.StandardSave(params), force=True)
    manager.wait_until_finished()
    abstract_params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params
    )
    restored = manager.restore(steps, args=ocp.args.StandardRestore(abstract_params))
jaxlaunch.report(step=steps, committed=steps)


@jax.jit
def all_equal(a, b):
    return jax.tree.reduce(jnp.logical_and, jax.tree.map(jnp.array_equal, a, b))


is_equal = all_equal(params, restored)
if jax.process_index() == 0:
    part = restored["up"].sharding.shard_shape(restored["up"].shape)
    print(
        f"loss {float(value):.2f} on {jax.device_count()} devices, each with {part}; restored as "
        f"saved: {bool(is_equal)}"
    )
