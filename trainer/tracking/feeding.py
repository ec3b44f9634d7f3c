"""Starts the program that hands a run's metrics to a tracker, beside the training, and ends it.

It is a process of its own that follows the journals of the run folder: whatever a tracker does, blocks, raises or takes
memory, no step waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping

from jaxlaunch import contract, isolated

LOG = "tracker.log"  # what it says, in the run folder
LATE = 75  # its exit code where the tracker does not return; EX_TEMPFAIL
ENDS_S = 30.0  # that the end of a training waits for what is not handed over yet


class Feed:
    """The program while it runs. Raises OSError where it cannot be started."""

    def __init__(self, folder: str, job: str) -> None:
        asked = json.dumps({"folder": folder, "uid": os.environ.get(contract.UID, folder), **json.loads(job)})
        self._log = os.path.join(folder, LOG)
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                isolated.command("jaxlaunch.trainer.tracking", asked),
                env=_without_devices(isolated.inherited(os.environ)),
                stdin=subprocess.PIPE,  # it closes with this process, however that ends
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the training
            )

    def close(self) -> str | None:
        """Has it hand over what is left, and waits for ENDS_S at most; a sentence where it could not."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            code = self._process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            code = None
            self._process.kill()
            self._process.wait()
        if code == 0:
            return None
        how = f"was still busy {ENDS_S:g} s after the training" if code in (None, LATE) else f"failed (exit {code})"
        return f"the tracker {how}: {self._log} has its words; the next start of the run hands over the rest"


def is_asked() -> bool:
    """Whether the job names a tracker."""
    return contract.TRACKER in os.environ


def writes_events() -> bool:
    """Whether the tracker is TensorBoard's event files: then nobody else writes them."""
    return is_asked() and json.loads(os.environ[contract.TRACKER])["tracker"] == "tensorboard"


def start(folder: str) -> Feed | None:
    """The feed of the job's tracker; None where it has none."""
    return Feed(folder, os.environ[contract.TRACKER]) if is_asked() else None


def _without_devices(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a program that is no rank: a tracker that imports JAX must take no device and join nobody.

    Without the run's uid nobody takes it for what a killed rank has left: it hands over the last lines of that.
    """
    of_jax = ("JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS")
    ours = (*of_jax, contract.PROGRESS_FD, contract.UID)
    return {name: value for name, value in environ.items() if not name.startswith(ours)} | {"JAX_PLATFORMS": "cpu"}
