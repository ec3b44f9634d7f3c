"""Your own program on several hosts, with `command:` and without the trainer.

Use this if you already have a training loop, or if your program should depend on nothing but JAX.
It needs one line, `jax.distributed.initialize()`, for which the agent has set the environment. In
return all hosts start, fail and end together.

`jaxlaunch.report` is optional. It can be imported in every image, because the agent brings it, and
it tells the agent the step of the program. A hang is then detected within the timeout of its phase,
`launcher status` shows step and loss, and the work that a restart loses is counted. Without it the
agent only knows that the processes are alive. The program must save its state by itself;
`jaxlaunch.run`, which examples/gan.py uses, is a loop that does this for you.

Run it in this folder with `launcher run mine.yaml`. docs/your-script.md explains the program, and
shows how to run it on a cluster.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxlaunch

# The agent has set the environment, so no arguments are needed.
jax.distributed.initialize()
mesh = Mesh(jax.devices(), ("dp",))
rows = NamedSharding(mesh, PartitionSpec("dp"))


def batch(step):
    # Each process makes its own part of the global batch.
    rng = np.random.default_rng((step, jax.process_index()))
    x = rng.normal(size=(64 // jax.process_count(), 8)).astype(np.float32)
    return [jax.make_array_from_process_local_data(rows, array) for array in (x, x.sum(1))]


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
