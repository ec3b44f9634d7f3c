"""Saves every step of a folder as fast as it can, until it is killed: python saves.py FOLDER."""

import itertools
import sys

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)

from jaxlaunch.trainer.checkpoint.store import Store  # noqa: E402 (devices are counted first)
from tests.trainer.checkpoint.state import abstract, mesh, same, state  # noqa: E402 (devices are counted first)

store = Store(sys.argv[1], keep=2, uid=sys.argv[2], note=print)
store.claim()
restored = store.restore(abstract(mesh()))
if restored is not None:
    step, tree, meta = restored
    assert same(tree, step) and meta == {"step": step}, f"step {step} came back with other values"
print("ready", flush=True)
for step in itertools.count(0 if restored is None else restored[0] + 1):
    store.save(step, state(step, mesh()), {"step": step})
    print(f"saved {store.newest_committed_step()}", flush=True)
