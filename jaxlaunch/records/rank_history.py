"""History of the phase and the lag of each rank, which the leader keeps in ranks.json.

Every PERIOD_S a column is added with the phase of each rank and the number of steps that it is
behind the foremost rank. When there are more than MAX_COLUMNS, pairs of columns are merged and the
period is doubled, so that the file has a bounded size for runs of any length. Columns are
run-length encoded, so that the file is small if ranks move together. This module needs only the
standard library and Python >= 3.10.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PERIOD_S = 2.0
MAX_COLUMNS, MAX_RANKS = 240, 1024
ENDED, UNKNOWN = "x", "-"
# Letters that a reader gives to ranks once it is known which of them hung.
HUNG, WAITS = "h", "w"
# The letter in a column for each phase of jaxlaunch.contract.
LETTERS: Mapping[str | None, str] = {
    None: UNKNOWN,
    "prepare": "p",
    "init": "i",
    "restore": "r",
    "compile": "c",
    "step": "s",
    "data": "d",
    "eval": "e",
    "save": "v",
    "done": "f",
}
_PHASES = re.compile(rf"([{''.join(LETTERS.values())}{ENDED}])([0-9]{{0,4}})")
_LAGS = re.compile(r"([0-9]{1,15})(?:x([0-9]{1,4}))?,")

# Unix time, and the run-length encoded letters and lags of all ranks.
Column = tuple[float, str, str]


class RankHistory:
    """The columns of a run, oldest first."""

    def __init__(self) -> None:
        self.period_s = PERIOD_S
        self.columns: list[Column] = []

    def is_due(self, now: float) -> bool:
        """Return whether the next column is due. `now`, Unix time, may have been set back."""
        return not self.columns or not 0 <= now - self.columns[-1][0] < self.period_s

    def add_column(self, now: float, letters: Iterable[str], steps: Iterable[int | None]) -> None:
        """Add a column.

        Args:
            now: Unix time.
            letters: Letter of the phase of each rank.
            steps: Step of each rank, None if it has not reported one.
        """
        known_steps = list(itertools.islice(steps, MAX_RANKS))
        foremost = max((step for step in known_steps if step is not None), default=0)
        lags = [0 if step is None else foremost - step for step in known_steps]
        encoded = encode_letters(itertools.islice(letters, MAX_RANKS))
        self.columns.append((round(now, 1), encoded, _encode_lags(lags)))
        if len(self.columns) > MAX_COLUMNS:
            # Each pair of columns becomes one. With an odd number the first stays.
            pairs = itertools.zip_longest(self.columns[::2], self.columns[1::2])
            self.columns = [
                _merge_columns(first, second) if second else first for first, second in pairs
            ]
            self.period_s *= 2

    def to_json_bytes(self) -> bytes:
        """Return the content of the file."""
        fields = {"period_s": self.period_s, "columns": self.columns}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, fields: Any) -> RankHistory:
        """Return the history in a file, without columns that are invalid or out of order."""
        history = cls()
        if not isinstance(fields, Mapping) or not isinstance(fields.get("columns"), Sequence):
            return history
        period = fields.get("period_s")
        if isinstance(period, int | float) and PERIOD_S <= period < 1e9:
            history.period_s = float(period)
        for column in fields["columns"][: 2 * MAX_COLUMNS]:
            if _is_column(column) and (not history.columns or history.columns[-1][0] < column[0]):
                history.columns.append((float(column[0]), column[1], column[2]))
        return history


def _is_column(column: Any) -> bool:
    if not isinstance(column, list) or len(column) != 3:
        return False
    at, letters, lags = column
    if type(at) not in (int, float) or not math.isfinite(at) or not isinstance(letters, str):
        return False
    return isinstance(lags, str) and len(letters) + len(lags) < 64 * MAX_RANKS


def encode_letters(letters: Iterable[str]) -> str:
    """Return `s31d` for 31 ranks in a step and one that waits for data."""
    runs = [(letter, len(list(run))) for letter, run in itertools.groupby(letters)]
    return "".join(letter if count == 1 else f"{letter}{count}" for letter, count in runs)


def _encode_lags(lags: Iterable[int]) -> str:
    """Return `0x31,5,` for 31 ranks that are foremost and one that is 5 steps behind."""
    runs = [(lag, len(list(run))) for lag, run in itertools.groupby(lags)]
    return "".join(f"{lag}," if count == 1 else f"{lag}x{count}," for lag, count in runs)


def decode_letters(column: Column) -> list[str]:
    """Return the letter of each rank."""
    runs = _PHASES.findall(column[1])
    return [letter for letter, count in runs for _ in range(int(count or 1))][:MAX_RANKS]


def decode_lags(column: Column) -> list[int]:
    """Return the number of steps that each rank is behind."""
    runs = _LAGS.findall(column[2])
    return [int(lag) for lag, count in runs for _ in range(int(count or 1))][:MAX_RANKS]


def _merge_columns(first: Column, second: Column) -> Column:
    """Return the later phases and the larger lags."""
    lags = itertools.zip_longest(decode_lags(first), decode_lags(second), fillvalue=0)
    return second[0], second[1], _encode_lags(map(max, lags))
