"""Restore, save and restore again as one rank of a gang, and print the result as a line of JSON.

python checkpoint_rank.py PORT COUNT RANK FOLDER UID STEP...
"""

import json
import sys

import jax

port, count, rank = map(int, sys.argv[1:4])
folder, uid, *steps = sys.argv[4:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4 // count)
jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, cluster_detection_method="deactivate")

from jaxlaunch.trainer.checkpoint.consensus import BLOCK_BYTES, HEADER_BYTES, gather_values  # noqa: E402 (the gang is joined first)
from jaxlaunch.trainer.checkpoint.store import Store  # noqa: E402 (the gang is joined first)
from jaxlaunch.trainer.errors import TrainerError  # noqa: E402 (the gang is joined first)
from tests.trainer.checkpoint.state import abstract, mesh, same, state  # noqa: E402 (the gang is joined first)

for size in (
    0,
    BLOCK_BYTES - HEADER_BYTES - 3,
    BLOCK_BYTES - HEADER_BYTES - 2,
    BLOCK_BYTES - HEADER_BYTES - 1,
    2 * BLOCK_BYTES - HEADER_BYTES - 1,
):  # in JSON, 2 bytes more
    assert gather_values(f"{rank}" * size * (rank + 1)) == [
        f"{other}" * size * (other + 1) for other in range(count)
    ]
result: dict[str, object] = {"notes": (notes := []), "restored": None}
store = Store(folder, keep=3, uid=uid, note=notes.append)
try:
    store.claim()
    if (restored := store.restore(abstract(mesh()))) is not None:
        assert same(restored[1], restored[0])
        result["restored"] = [restored[0], restored[2]]
    for step in map(int, steps):
        store.save(step, state(step, mesh()), {"at": step})
        store.wait()
        assert store.newest_committed_step() == step
    result["steps"] = store.committed_steps()
except TrainerError as error:
    result["error"] = [error.code, str(error)]
print(json.dumps(result), flush=True)
store.close()
jax.distributed.shutdown()
