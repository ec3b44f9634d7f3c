"""The processes of a run in JAX: joining, agreeing when to stop, leaving together.

A private name of JAX that this needs, in 0.10 and 0.11: distributed.global_state, which has the coordination client.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import types
from collections.abc import Callable
from typing import TypeVar

import jax
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

from jaxlaunch import contract

T = TypeVar("T")
DAY_MS = 24 * 3600 * 1000  # the agents' timeouts come long before


def initialize(environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Joins the processes that the environment describes; does nothing when it describes none.

    Every value is passed and detection is off: JAX's own Kubernetes detection reads one Job's parallelism, wrong for a
    JobSet (so in jax 0.10 and 0.11, jax/_src/clusters/k8s_cluster.py).
    """
    if contract.COORDINATOR not in environ:
        return
    local = environ.get(contract.LOCAL_DEVICE_IDS)
    jax.distributed.initialize(
        environ[contract.COORDINATOR],
        int(environ[contract.NUM_PROCESSES]),
        int(environ[contract.PROCESS_ID]),
        [int(device) for device in local.split(",")] if local else None,
        cluster_detection_method="deactivate",
        initialization_timeout=int(float(environ.get(contract.TIMEOUT, "300"))),
        heartbeat_timeout_seconds=contract.HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=contract.SHUTDOWN_TIMEOUT_S,
    )


_meetings = itertools.count()  # of this process; each has another name


def meet(why: str, limit_s: float) -> None:
    """Waits until every process has come here, for so long at most; without a collective, which keeps a core busy.

    Every process calls it equally often.
    """
    if global_state.client is not None:
        with contextlib.suppress(RuntimeError):  # one came too late, or has died: the agents say so
            global_state.client.wait_at_barrier(f"jaxlaunch: {why} {next(_meetings)}", int(1000 * limit_s))


_answers = itertools.count()  # of process 0, as _meetings


def of_primary(find: Callable[[], T]) -> T:
    """What `find` returns (JSON) on process 0, on every process; without a collective, whose program would be compiled.

    Every process calls it equally often.
    """
    if global_state.client is None:
        return find()
    key = f"jaxlaunch: answer {next(_answers)}"
    if global_state.process_id == 0:
        found = find()
        global_state.client.key_value_set(key, json.dumps(found))
        return found
    answer: T = json.loads(global_state.client.blocking_key_value_get(key, DAY_MS))
    return answer


def shutdown() -> None:
    """Leaves once every rank is ready to: rank 0 runs the coordination service, without which the others abort."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


class Stop:
    """Whether the run is to stop: every rank learns it at the same poll.

    `poll` must be called equally often by every rank: the polls are counted, and JAX's preemption service agrees on
    the count at which all of them return true. Made before `initialize`, since a SIGTERM may come at any time; from
    `initialize` on JAX's own handler is in place (one set later would replace it), so `arm` passes on an early signal.
    """

    def __init__(self) -> None:
        self._is_requested = False
        self._is_agreed = False
        self._polls = 0
        # Of a program that has joined before, JAX's own handler is in place already.
        self._before = None if jax.distributed.is_initialized() else signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, signum: int, frame: types.FrameType | None) -> None:
        self._is_requested = True

    @property
    def is_requested(self) -> bool:
        """Whether this process got a SIGTERM before `initialize`; the others may not know yet."""
        return self._is_requested

    def arm(self) -> None:
        """Passes a SIGTERM that came before `initialize` on to JAX's preemption service."""
        if self._is_requested and jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)

    def forget(self) -> None:
        """Puts the handler back that was there before, in a program that goes on; JAX's own stays."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm and not jax.distributed.is_initialized():
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def poll(self) -> bool:
        """Whether to stop now; once true it stays true. Never blocks."""
        self._polls += 1
        if not self._is_agreed:
            if jax.distributed.is_initialized():
                self._is_agreed = multihost_utils.reached_preemption_sync_point(self._polls)
            else:
                self._is_agreed = self._is_requested
        return self._is_agreed
