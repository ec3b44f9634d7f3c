"""Goes on over a server that does not answer for minutes: one that is upgraded, or behind a network that is away."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from jaxlaunch.launcher.errors import ApiError, Unreachable
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.watch import PATIENCE_S, may_pass

TELL_AFTER_S = 40.0  # a watch that is quiet begins anew every 20 s, so a server that is well is never silent for longer
_TELL_AGAIN_S = 60.0
_PAUSE_S = 2.0

T = TypeVar("T")


class Outage:
    """Asks again until the server answers, and says meanwhile for how long it has not."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._cluster, self._say = cluster, say
        self._told_at: float | None = None

    def tell(self) -> None:
        """Says that the server does not answer, once a minute, and then that it answers again."""
        silent_s, now = self._cluster.silent_s, time.monotonic()
        if silent_s < TELL_AFTER_S:
            if self._told_at is not None:
                self._say("the server answers again")
            self._told_at = None
        elif self._told_at is None or now - self._told_at >= _TELL_AGAIN_S:
            self._say(f"the server has not answered for {silent_s:.0f} s; trying again")
            self._told_at = now

    def ride(self, call: Callable[[], T], end: float | None = None) -> T:
        """What `call` returns once the server answers. It may be called many times.

        Raises the error of a server that refuses, the last one when the server has not answered for PATIENCE_S, and
        TimeoutError at `end` (of time.monotonic()).
        """
        began = time.monotonic()
        while True:
            try:
                found = call()
            except (ApiError, Unreachable) as error:
                now = time.monotonic()
                if end is not None and now >= end and may_pass(error):
                    raise TimeoutError from None
                if not may_pass(error) or now - began > PATIENCE_S:
                    error.hint = None if isinstance(error, Unreachable) else error.hint  # the network was fine before
                    raise
                self.tell()
                time.sleep(_PAUSE_S if end is None else max(0.0, min(_PAUSE_S, end - now)))
            else:
                self.tell()
                return found
