"""The gang as JAX sees it: joining, agreeing to stop, leaving together.

The private parts of JAX that this needs stay in this file.
"""

from __future__ import annotations

import os
import signal
import types

import jax
from jax.experimental import multihost_utils

from trainer import contract


def initialize(environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Joins the gang that the environment describes; alone when it describes none.

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


def shutdown() -> None:
    """Leaves the gang once every rank is ready to: rank 0 keeps the service that the others' lives hang on."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


class Stop:
    """Whether the gang was told to stop: every rank learns it at the same poll.

    `poll` must be called equally often by every rank: the polls are counted, and JAX's preemption service agrees on
    the count at which all of them say yes. Made before `initialize`, since a SIGTERM may come at any time; from
    `initialize` on JAX's own handler is in place (one set later would silence it), so `arm` hands over what came early.
    """

    def __init__(self) -> None:
        self._told = False
        self._agreed = False
        self._polls = 0
        signal.signal(signal.SIGTERM, self._heard)

    def _heard(self, signum: int, frame: types.FrameType | None) -> None:
        self._told = True

    def arm(self) -> None:
        """Hands a SIGTERM that came before `initialize` to the service that now listens."""
        if self._told and jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)

    def poll(self) -> bool:
        """Whether to stop now; once true it stays true. Never blocks."""
        self._polls += 1
        if not self._agreed:
            if jax.distributed.is_initialized():
                self._agreed = multihost_utils.reached_preemption_sync_point(self._polls)
            else:
                self._agreed = self._told
        return self._agreed
