"""The processes of a run in JAX: how they join, agree on a stop, and leave together.

Private name of JAX 0.10 and 0.11 in use: distributed.global_state, which has the client of the
coordination service.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

from jaxlaunch import contract

T = TypeVar("T")
# In effect no timeout, because those of the agents are much shorter.
DAY_MS = 24 * 3600 * 1000


def initialize(environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Join the other processes, if the environment names a coordinator.

    All values are passed explicitly and cluster detection is off. JAX's detection of Kubernetes
    reads the parallelism of one Job, which is wrong for a JobSet (jax 0.10 and 0.11,
    jax/_src/clusters/k8s_cluster.py).
    """
    if contract.COORDINATOR not in environ:
        return
    device_ids = environ.get(contract.LOCAL_DEVICE_IDS)
    jax.distributed.initialize(
        environ[contract.COORDINATOR],
        int(environ[contract.NUM_PROCESSES]),
        int(environ[contract.PROCESS_ID]),
        [int(device) for device in device_ids.split(",")] if device_ids else None,
        cluster_detection_method="deactivate",
        initialization_timeout=int(float(environ.get(contract.INIT_TIMEOUT, "300"))),
        heartbeat_timeout_seconds=contract.HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=contract.SHUTDOWN_TIMEOUT_S,
    )


# Each broadcast needs a new key in the key-value store.
_broadcast_numbers = itertools.count()


def broadcast_from_primary(compute: Callable[[], T]) -> T:
    """Return the JSON result of `compute` on process 0 to every process, without a collective.

    Every process must call it equally often.
    """
    if global_state.client is None:
        return compute()
    key = f"jaxlaunch: answer {next(_broadcast_numbers)}"
    if global_state.process_id == 0:
        result = compute()
        global_state.client.key_value_set(key, json.dumps(result))
        return result
    answer: T = json.loads(global_state.client.blocking_key_value_get(key, DAY_MS))
    return answer


def shutdown() -> None:
    """Leave together, when every rank is ready.

    Rank 0 runs the coordination service, and the other ranks abort if it ends before them.
    """
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


class Stop:
    """The agreement of all ranks on the step at which they stop after a SIGTERM.

    Every rank counts its calls of `poll` and must call it equally often. JAX's preemption service
    agrees on a count at which `poll` returns true on all ranks. An instance is created before
    `initialize`, because a SIGTERM may arrive at any time. `initialize` then installs JAX's own
    handler, which must not be replaced, so `forward_early_signal` passes an earlier SIGTERM on.
    """

    def __init__(self) -> None:
        self._is_requested = False
        self._is_agreed = False
        self._polls = 0
        # If the program has already joined, JAX's handler is installed.
        self._previous_handler: Any = None
        if not jax.distributed.is_initialized():
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, signum: int, frame: types.FrameType | None) -> None:
        self._is_requested = True

    @property
    def is_requested(self) -> bool:
        """Whether this process received a SIGTERM before `initialize`."""
        return self._is_requested

    def forward_early_signal(self) -> None:
        """Forward a SIGTERM that came before `initialize` to JAX's preemption service."""
        if self._is_requested and jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)

    def restore_handler(self) -> None:
        """Restore the previous signal handler, unless JAX's is installed."""
        is_ours = signal.getsignal(signal.SIGTERM) == self._on_sigterm
        if is_ours and not jax.distributed.is_initialized():
            signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)

    def poll(self) -> bool:
        """Return whether to stop now, without blocking. Once true, the result stays true."""
        self._polls += 1
        if not self._is_agreed:
            if jax.distributed.is_initialized():
                self._is_agreed = multihost_utils.reached_preemption_sync_point(self._polls)
            else:
                self._is_agreed = self._is_requested
        return self._is_agreed
