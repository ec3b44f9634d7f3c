"""A task whose ranks end at different times, as ENDING describes: [first rank, seconds]."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import jax

from jaxlaunch.trainer.start import distributed
from jaxlaunch.trainer.tasks.classify import Classify

_shutdown = distributed.shutdown


def shut_down_late() -> None:
    """Wait before the end, unless this rank is the first."""
    first, seconds = json.loads(os.environ["ENDING"])
    rank = jax.process_index()
    (Path(os.environ["MARKS"]) / f"trained-{rank}").touch()
    if rank != first:
        time.sleep(seconds)
    _shutdown()


class Late(Classify):
    """Classify, and a late end."""


distributed.shutdown = shut_down_late
