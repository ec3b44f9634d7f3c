"""Digits on eight devices as in tutorials: `pmap` over the devices, and `pmean` of the gradients.

Three things differ from a tutorial: the call of `jax.distributed.initialize()`, the calls of
`jaxlaunch.report`, and the data, which are scikit-learn's digits, because they need no network.
With several processes, each one has its own rows: `pmap` sees the devices of its process, and
`pmean` is over the devices of all processes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxlaunch

# The agent has set the environment, so no arguments are needed.
jax.distributed.initialize()
devices = jax.local_device_count()
digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target
optimizer = optax.adam(3e-3)


def forward(params, x):
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()


@partial(jax.pmap, axis_name="devices", donate_argnums=(0, 1))
def train_step(params, state, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    value, grads = jax.lax.pmean((value, grads), "devices")
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, value


keys = jax.random.split(jax.random.key(0))
params = {
    "w1": jax.random.normal(keys[0], (64, 64)) / 8,
    "b1": jnp.zeros(64),
    "w2": jax.random.normal(keys[1], (64, 10)) / 8,
    "b2": jnp.zeros(10),
}
replica = (params, optimizer.init(params))
# Every device has a copy of the parameters and of the optimizer's state.
params, state = jax.tree.map(lambda leaf: jnp.stack([leaf] * devices), replica)

rng = np.random.default_rng(0)
for step in range(1, 101):
    rows = rng.integers(0, 1500, 128)
    x, y = (array[rows].reshape(devices, -1, *array.shape[1:]) for array in (images, labels))
    params, state, value = train_step(params, state, x, y)
    jaxlaunch.report(step=step, loss=float(value[0]))

predictions = forward(jax.tree.map(lambda leaf: leaf[0], params), images[1500:]).argmax(-1)
print(
    f"accuracy {(predictions == labels[1500:]).mean():.2f} of {len(predictions)} digits held out, "
    f"on {devices} devices"
)
