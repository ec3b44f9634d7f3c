"""Make errors between two processes of JAX: `python make_peer_errors.py PORT RANK`.

Rank 0 prints a JSON object of messages by name. Rank 1 kills itself in the middle of a sum; of that
rank 0 gets an error, and fifteen seconds later JAX's coordination service ends it, with messages of
its own on stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HEARTBEAT_S = 5


def message(make: Callable[[], Any]) -> str:
    """What the last line of the traceback would say."""
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(port: int, rank: int) -> None:
    """One of the two processes."""

    def join() -> None:
        jax.distributed.initialize(
            f"127.0.0.1:{port}", 2, rank, heartbeat_timeout_seconds=HEARTBEAT_S
        )

    join()
    created = {"twice": message(join)}
    client: Any = distributed.global_state.client
    if rank == 0:
        created["barrier"] = message(lambda: client.wait_at_barrier("of rank 0 alone", 100))
        created["key"] = message(lambda: client.blocking_key_value_get("that nobody writes", 100))
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("dp",)), PartitionSpec("dp"))
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(rows.mesh, PartitionSpec()))
    x = jax.make_array_from_process_local_data(rows, np.ones(1, np.float32))
    total(x).block_until_ready()
    created["other process"] = message(lambda: np.asarray(x))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    created["sum"] = message(lambda: [total(x).block_until_ready() for _ in range(1000)])
    print(json.dumps(created), flush=True)
    time.sleep(20 * HEARTBEAT_S)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
