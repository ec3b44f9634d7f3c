"""The ranks of a run over its time, for the page: which phase each was in, and how many steps behind the foremost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxlaunch.launcher.report.timeline import Timeline
from jaxlaunch.records import rank_history
from jaxlaunch.records.rank_history import RankHistory
from jaxlaunch.runs.run_folder import RunFolder


def of(folder: Path, line: Timeline) -> dict[str, Any] | None:
    """The looks at the ranks as [from, to, letters, lags] on the axis of the strip; None where one rank was all.

    A look stands for the time since the one before it, or for a period where that is longer ago.
    """
    history = RankHistory.from_json(RunFolder(folder).read(rank_history.FILE))
    ranks = max((len(rank_history.letters_of(column)) for column in history.columns), default=0)
    if ranks < 2:
        return None
    columns, before = [], 0.0
    for column in history.columns:
        at = line.at(column[0])
        begin = before if at - before < 1.8 * history.period_s else at - history.period_s
        if at > begin:
            columns.append([round(begin, 2), round(at, 2), column[1], column[2]])
        before = max(before, at)
    return {"ranks": ranks, "letters": _phases(), "columns": columns}


def _phases() -> dict[str, str]:
    """The phase of each letter; what has ended, or has said nothing, is none."""
    return {letter: phase for phase, letter in rank_history.LETTERS.items() if phase is not None}
