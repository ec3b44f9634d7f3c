"""A program of your own in a gang, by `command:`: the trainer has no part in it.

Why one would: the loop exists already, is not JAX's usual one, or is to stay free of everything but
JAX. What it owes the gang is one line, `jax.distributed.initialize()`, which the agent has set the
environment for; what it gets is two hosts that start, fail and end together. `jaxlaunch.report` is
a line more. It is importable in every image, since the agent brings it, and tells how far the
program is: a hang is then found within the timeout of its phase and named with its step, `launcher
status` shows step and loss, and the work that a restart loses is counted. Without it the agent
knows only that the processes live. Saving stays the program's own: `jaxlaunch.run` is a loop that
has it, in gan.py. In this folder: `launcher run mine.yaml`. It is the program of
docs/your-script.md, which also has it on a cluster.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxlaunch

jax.distributed.initialize()  # no arguments: the agent has set the environment
mesh = Mesh(jax.devices(), ("dp",))
rows = NamedSharding(mesh, PartitionSpec("dp"))


def batch(step):  # each process makes its own part of one global batch
    rng = np.random.default_rng((step, jax.process_index()))
    x = rng.normal(size=(64 // jax.process_count(), 8)).astype(np.float32)
    return jax.make_array_from_process_local_data(rows, x), jax.make_array_from_process_local_data(
        rows, x.sum(1)
    )


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


@jax.jit
def train_step(w, x, y):
    value, gradient = jax.value_and_grad(loss)(w, x, y)
    return w - 0.1 * gradient, value


w = jnp.zeros(8)
for step in range(1, 101):
    w, value = train_step(w, *batch(step))
    jaxlaunch.report(step=step, loss=float(value))
    if step % 50 == 0 and jax.process_index() == 0:
        print(f"step {step} of 100 on {jax.device_count()} devices: loss {value:.4f}", flush=True)
