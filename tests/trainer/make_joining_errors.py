"""Make errors of JAX's coordination service: `python make_joining_errors.py PORT RANK KIND`.

Two processes join. With KIND `late`, rank 1 does not come to the barrier at the end, where rank 0
waits for two seconds. With `twice`, a third process joins with the number of rank 1, as a process
does that multiprocessing starts from a program without a guard. JAX ends all of them, with messages
of its coordination service on stderr.
"""

from __future__ import annotations

import sys
import time

import jax


def main(port: int, rank: int, kind: str) -> None:
    """Join as one of the processes, and stay."""
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, 2, min(rank, 1), shutdown_timeout_seconds=2)
    if kind == "twice" or rank:
        # Until it is killed: the third process may start late, on a busy machine.
        time.sleep(600)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
