"""Storage that fails may be back in a moment: what a start reads and writes is tried again, at growing intervals."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from jaxlaunch import contract
from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.errors import StorageError

LONGEST_PAUSE_S = 8.0

T = TypeVar("T")


def again(act: Callable[[], T]) -> T:
    """What `act` returns; called again while it raises a StorageError, for the seconds that the agent allows.

    Raises the first error: those that follow may only be its consequences. A full disk is not waited for.
    """
    until = time.monotonic() + float(os.environ.get(contract.STORAGE_WAIT, 0.0))
    pause_s, first = 1.0, None
    while True:
        try:
            return act()
        except StorageError as error:
            first = first or error
            left_s = until - time.monotonic()
            if faults.is_full(error) or left_s <= 0:
                raise first from first.__cause__
            pause_s = min(pause_s, left_s)
        print(f"{first}; trying again in {pause_s:.0f} s", flush=True)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
