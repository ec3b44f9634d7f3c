"""GRPO with a trainer and a sampler, which are two roles of one job (grpo.yaml).

The model answers whether the sum of two digits is even or odd, and the reward of a right answer is
1. The sampler answers each prompt GROUP times with the weights of the newest checkpoint, and writes
the answers with their rewards and log-probabilities to a file for each step. The trainer waits for
the file of its step. It saves every EVERY steps, so the answers are at most that many steps old,
which the clipped ratio allows for.

A sampler that was killed continues at the first file that is missing. A trainer that was killed
resumes from its newest checkpoint and reads the same files again, so the result is the same. More
samplers would each write a share of the files.

The loss is that of DeepSeekMath (Shao et al. 2024) without its penalty for the distance from a
reference model, because there is none here.
"""

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jaxlaunch

STEPS, EVERY = 60, 5
PROMPTS, GROUP, WIDTH, CLIP = 128, 8, 128, 0.2
SAMPLES = Path(os.environ["SAMPLES"])
OPTIMIZER = optax.adam(2e-2)


def make_state():
    keys = jax.random.split(jax.random.key(0), 2)
    policy = {
        "w1": 0.5 * jax.random.normal(keys[0], (20, WIDTH)),
        "b1": jnp.zeros(WIDTH),
        "w2": 0.1 * jax.random.normal(keys[1], (WIDTH, 2)),
    }
    return {"policy": policy, "optimizer": OPTIMIZER.init(policy)}


def answer_logprobs(policy, digits):
    """Return the log-probabilities [N, 2] of the answers even and odd to two digits [N, 2]."""
    prompt = jax.nn.one_hot(digits, 10).reshape(-1, 20)
    hidden = jax.nn.relu(prompt @ policy["w1"] + policy["b1"])
    return jax.nn.log_softmax(hidden @ policy["w2"])


# --- the role `trainer` ---------------------------------------------------------------------------


def step(state, batch):
    rewards = batch["rewards"]
    deviation = rewards.std(axis=1, keepdims=True)
    advantage = (rewards - rewards.mean(axis=1, keepdims=True)) / (deviation + 1e-4)

    def loss(policy):
        logprobs = answer_logprobs(policy, batch["digits"])
        logprobs = jnp.take_along_axis(logprobs, batch["answers"], axis=1)
        ratio = jnp.exp(logprobs - batch["logprobs"])
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        return -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))

    value, gradients = jax.value_and_grad(loss)(state["policy"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
    policy = optax.apply_updates(state["policy"], updates)
    return {"policy": policy, "optimizer": optimizer}, {"loss": value, "reward": rewards.mean()}


def read_samples(step):
    """Return the samples for a step, once the sampler has written them."""
    path = SAMPLES / f"{step}.npz"
    while not path.exists():
        time.sleep(0.01)
    with np.load(path) as arrays:
        return dict(arrays)


def train():
    jaxlaunch.run(step, make_state, read_samples, steps=STEPS, every=EVERY, log_every=10)


# --- the role `sampler` ---------------------------------------------------------------------------


def find_newest_step(checkpoints):
    """Return the newest complete step of the trainer, which has a manifest, or 0."""
    manifests = checkpoints.glob("*/jaxlaunch.manifest.json")
    return max((int(manifest.parent.name) for manifest in manifests), default=0)


def load_policy(checkpoints, step):
    """Return the policy of a checkpoint, or the first one for step 0."""
    policy = make_state()["policy"]
    if step == 0:
        return policy
    # A saved state is a dict of arrays, whose names are the paths in the state.
    names = [f"policy.{name}" for name in policy]
    restore = ocp.args.PyTreeRestore(
        {"state": dict.fromkeys(names, 0)},
        restore_args={"state": dict.fromkeys(names, ocp.RestoreArgs(np.ndarray))},
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore(checkpoints / str(step) / "state", args=restore)["state"]
    return {name: arrays[f"policy.{name}"] for name in policy}


@jax.jit
def answer(policy, digits, key):
    """Return GROUP answers to each prompt, and their log-probabilities, both [N, GROUP]."""
    logprobs = answer_logprobs(policy, digits)
    answers = jax.random.categorical(key, logprobs[:, None], shape=(len(digits), GROUP))
    return answers, jnp.take_along_axis(logprobs, answers, axis=1)


def sample():
    checkpoints = Path(os.environ["JAXLAUNCH_ROLE_TRAINER_RUN_DIR"], "checkpoints")
    SAMPLES.mkdir(parents=True, exist_ok=True)
    policy_step, policy = 0, load_policy(checkpoints, 0)
    for step in range(STEPS):
        path = SAMPLES / f"{step}.npz"
        if path.exists():
            continue
        while (newest_step := find_newest_step(checkpoints)) < step // EVERY * EVERY:
            time.sleep(0.01)
        if newest_step != policy_step:
            policy_step, policy = newest_step, load_policy(checkpoints, newest_step)
        digits = np.random.default_rng(step).integers(0, 10, (PROMPTS, 2))
        answers, logprobs = answer(policy, digits, jax.random.key(step))
        rewards = (answers == digits.sum(axis=1, keepdims=True) % 2).astype(np.float32)
        draft = path.with_suffix(".draft")
        with draft.open("wb") as file:
            np.savez(file, digits=digits, answers=answers, logprobs=logprobs, rewards=rewards)
        draft.rename(path)
        # The wait for the next checkpoint may take as long as timeouts.data.
        jaxlaunch.report(step=step + 1, phase="data", reward=float(rewards.mean()))


if __name__ == "__main__":
    sample() if os.environ["JAXLAUNCH_ROLE"] == "sampler" else train()
