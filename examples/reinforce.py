"""REINFORCE on a cart-pole that is written in JAX: reinforcement learning without a dataset.

Why this is not a `train:` job: there are no examples. A step plays the games that it learns from,
and the next step continues them, so the positions and speeds of all carts belong to the state, like
the policy.
- Without `data` a step is `step(state)`. Its random numbers come from the key in the state, so a
  run that was killed plays exactly the games that it would have played.
- `sharding={"carts": ("batch", None)}` splits the carts over all devices, and each device plays its
  own carts; the policy is copied to all devices, and its gradient is the mean over all carts.
- The whole game is one `lax.scan` in the compiled step, without a call of the host between two
  moves. An environment in Python would be called through `jax.pure_callback`, or run in `data`, a
  function of the step.
- An exception in the environment ends all processes, with an error that names the rank, the step
  and the line.
Williams 1992; the dynamics are those of Barto, Sutton and Anderson 1983. `python
examples/reinforce.py` trains here.
"""

import sys

import jax
import jax.numpy as jnp
import optax

import jaxlaunch

CARTS, MOVES, DISCOUNT = 64, 32, 0.97
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 500
OPTIMIZER = optax.adam(1e-2)


def make():
    keys = jax.random.split(jax.random.key(0), 3)
    policy = {"w1": 0.5 * jax.random.normal(keys[0], (4, 32)), "w2": jnp.zeros((32,))}
    return {
        "policy": policy,
        "optimizer": OPTIMIZER.init(policy),
        "carts": fresh(keys[1]),
        "key": keys[2],
    }


def fresh(key):  # [CARTS, 4]: place, speed, angle, its speed
    return jax.random.uniform(key, (CARTS, 4), minval=-0.05, maxval=0.05)


def logit(policy, carts):  # of a push to the right
    return jnp.tanh(carts @ policy["w1"]) @ policy["w2"]


def moved(carts, pushes_right):
    place, speed, angle, turn = carts.T
    force = jnp.where(pushes_right, 10.0, -10.0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * turn**2 * sin) / 1.1
    turned = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    pushed = push - 0.05 * turned * cos / 1.1
    changes = jnp.stack([speed, pushed, turn, turned], axis=1)
    return carts + 0.02 * changes


def play(policy, carts, key):
    def move(carts, key):
        draw, again = jax.random.split(key)
        pushes_right = jax.random.bernoulli(draw, jax.nn.sigmoid(logit(policy, carts)))
        after = moved(carts, pushes_right)
        fell = (jnp.abs(after[:, 0]) > 2.4) | (jnp.abs(after[:, 2]) > 0.21)
        return jnp.where(fell[:, None], fresh(again), after), (carts, pushes_right, fell)

    return jax.lax.scan(move, carts, jax.random.split(key, MOVES))


def step(state):
    key, drawn = jax.random.split(state["key"])
    carts, (seen, pushes_right, fell) = play(state["policy"], state["carts"], drawn)

    def back(later, fell):
        gain = jnp.where(fell, 0.0, 1.0 + DISCOUNT * later)
        return gain, gain

    _, gains = jax.lax.scan(back, jnp.zeros(CARTS), fell, reverse=True)
    advantage = (gains - gains.mean(1, keepdims=True)) / (gains.std() + 1e-6)

    def policy_loss(policy):
        likely = jax.nn.log_sigmoid(jnp.where(pushes_right, 1, -1) * logit(policy, seen))
        return -jnp.mean(likely * advantage)

    lost, gradients = jax.value_and_grad(policy_loss)(state["policy"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
    policy = optax.apply_updates(state["policy"], updates)
    new = {"policy": policy, "optimizer": optimizer, "carts": carts, "key": key}
    return new, {"policy_loss": lost, "falls": fell.sum() / CARTS}


if __name__ == "__main__":
    often = {"every": max(STEPS // 10, 1), "log_every": max(STEPS // 20, 1)}
    jaxlaunch.run(step, make, steps=STEPS, sharding={"carts": ("batch", None)}, **often)
