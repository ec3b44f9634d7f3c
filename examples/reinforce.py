"""REINFORCE on a cart-pole that is written in JAX: reinforcement learning without a dataset.

This is not a `train:` job, because there are no examples. A step plays the games that it learns
from, and the next step continues them, so the state contains the positions and speeds of all carts
as well as the policy.

- Without `data`, a step is `step(state)`. Its random numbers come from the key in the state, so a
  run that was killed plays exactly the games that it would have played.
- `sharding={"carts": ("batch", None)}` splits the carts over all devices, and each device plays its
  own carts. The policy is copied to all devices, and its gradient is the mean over all carts.
- The whole game is one `lax.scan` in the compiled step, without a call of the host between two
  moves. An environment in Python would be called through `jax.pure_callback`, or run in `data`, a
  function of the step.
- An exception in the environment ends all processes, with an error that names the rank, the step
  and the line.

The algorithm is that of Williams 1992, and the dynamics are those of Barto, Sutton and Anderson
1983. `python examples/reinforce.py` trains on this machine.
"""

import sys

import jax
import jax.numpy as jnp
import optax

import jaxlaunch

CARTS, MOVES, DISCOUNT = 64, 32, 0.97
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 500
OPTIMIZER = optax.adam(1e-2)


def make_state():
    keys = jax.random.split(jax.random.key(0), 3)
    policy = {"w1": 0.5 * jax.random.normal(keys[0], (4, 32)), "w2": jnp.zeros((32,))}
    return {
        "policy": policy,
        "optimizer": OPTIMIZER.init(policy),
        "carts": reset_carts(keys[1]),
        "key": keys[2],
    }


def reset_carts(key):
    """Return carts at the start: [CARTS, 4] of position, speed, angle and angular speed."""
    return jax.random.uniform(key, (CARTS, 4), minval=-0.05, maxval=0.05)


def push_logit(policy, carts):
    """Return the logits [CARTS] of a push to the right."""
    return jnp.tanh(carts @ policy["w1"]) @ policy["w2"]


def move_carts(carts, pushes_right):
    """Return the carts after a push to the right or to the left and 0.02 seconds."""
    position, speed, angle, angular_speed = carts.T
    force = jnp.where(pushes_right, 10.0, -10.0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * angular_speed**2 * sin) / 1.1
    angular_acceleration = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    acceleration = push - 0.05 * angular_acceleration * cos / 1.1
    rates = jnp.stack([speed, acceleration, angular_speed, angular_acceleration], axis=1)
    return carts + 0.02 * rates


def play(policy, carts, key):
    """Play MOVES moves. A cart whose pole falls starts again."""

    def move(carts, key):
        push_key, reset_key = jax.random.split(key)
        pushes_right = jax.random.bernoulli(push_key, jax.nn.sigmoid(push_logit(policy, carts)))
        moved = move_carts(carts, pushes_right)
        fell = (jnp.abs(moved[:, 0]) > 2.4) | (jnp.abs(moved[:, 2]) > 0.21)
        next_carts = jnp.where(fell[:, None], reset_carts(reset_key), moved)
        return next_carts, (carts, pushes_right, fell)

    return jax.lax.scan(move, carts, jax.random.split(key, MOVES))


def step(state):
    next_key, play_key = jax.random.split(state["key"])
    carts, (observed, pushes_right, fell) = play(state["policy"], state["carts"], play_key)

    def discount(later_return, fell):
        discounted_return = jnp.where(fell, 0.0, 1.0 + DISCOUNT * later_return)
        return discounted_return, discounted_return

    _, returns = jax.lax.scan(discount, jnp.zeros(CARTS), fell, reverse=True)
    advantage = (returns - returns.mean(1, keepdims=True)) / (returns.std() + 1e-6)

    def policy_loss(policy):
        logits = push_logit(policy, observed)
        log_probability = jax.nn.log_sigmoid(jnp.where(pushes_right, 1, -1) * logits)
        return -jnp.mean(log_probability * advantage)

    loss, gradients = jax.value_and_grad(policy_loss)(state["policy"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
    policy = optax.apply_updates(state["policy"], updates)
    next_state = {"policy": policy, "optimizer": optimizer, "carts": carts, "key": next_key}
    return next_state, {"policy_loss": loss, "falls": fell.sum() / CARTS}


if __name__ == "__main__":
    intervals = {"every": max(STEPS // 10, 1), "log_every": max(STEPS // 20, 1)}
    jaxlaunch.run(step, make_state, steps=STEPS, sharding={"carts": ("batch", None)}, **intervals)
