"""Looks at the ranks every few seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.leader.latest_writer import LatestWriter
from jaxlaunch.records.rank_history import ENDED, FILE, LETTERS, UNKNOWN, RankHistory
from jaxlaunch.runs.run_folder import RunFolder


class RankLooks:
    """Looks at the ranks every few seconds, and keeps what it saw in the run folder. Nothing waits for that."""

    def __init__(self, folder: RunFolder) -> None:
        self._history = RankHistory.from_json(folder.read(FILE))
        self._writer = LatestWriter[bytes](lambda data: folder.replace(FILE, data))
        self._kept_at = -math.inf

    def look(self, statuses: Sequence[Status], keep_every_s: float, *, is_due: bool = False) -> None:
        """Looks where it is time to, or `is_due`, and has the file written where the last time is long enough ago."""
        if not statuses or not (is_due or self._history.is_due(time.time())):
            return
        letters = (LETTERS.get(each.phase, UNKNOWN) if each.exit is None else ENDED for each in statuses)
        self._history.add(time.time(), letters, (each.step if each.stepped else None for each in statuses))
        if (now := time.monotonic()) - self._kept_at >= keep_every_s:
            self._kept_at = now
            self._writer.keep(self._history.encoded())
