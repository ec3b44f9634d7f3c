"""History of the phase and the lag of each rank, which the leader keeps in ranks.json.

Every PERIOD_S the leader adds a column. It has the phase of each rank, the number of steps by which
the rank is behind the foremost one, and its own time: the share of a step, in thousandths, that the
rank spends on data and on its host. All ranks of a gang end a step at the same time, because each
waits for the slowest one. The slow rank is therefore the one with the longest own time
(`list_slow_ranks`).

When there are more than MAX_COLUMNS, pairs of columns are merged and the period is doubled, so that
the size of the file is bounded for runs of any length. Columns are run-length encoded, so that the
file is small while the ranks proceed together. The module needs only the standard library and
Python >= 3.10.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

PERIOD_S = 2.0
MAX_COLUMNS, MAX_RANKS = 240, 1024
ENDED, UNKNOWN = "x", "-"
# A rank is slow if its mean own time exceeds the median of all ranks by SLOW_PERMILLE. With fewer
# columns, noise of a busy machine could have this effect.
SLOW_PERMILLE, MIN_SLOW_COLUMNS = 10, 3
# Letters for ranks after a hang. They are not in the file: its reader knows which ranks hung, and
# which waited for them.
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
# Equal values of consecutive ranks, as `encode_letters` and `_encode_numbers` write them.
_LETTER_RUN = re.compile(rf"([{''.join(LETTERS.values())}{ENDED}])([0-9]{{0,4}})")
_NUMBER_RUN = re.compile(rf"([0-9]{{1,15}}|{UNKNOWN})(?:x([0-9]{{1,4}}))?,")


class Column(NamedTuple):
    """The state of all ranks at a time, run-length encoded.

    Attributes:
        time: Unix time.
        letters: Letters of the phases.
        lags: Steps by which the ranks are behind the foremost one.
        own: Own times in thousandths of a step, `-` where one is unknown. Empty if no rank has
            reported one.
    """

    time: float
    letters: str
    lags: str
    own: str = ""


class SlowRank(NamedTuple):
    """A rank that the others wait for in each step.

    Attributes:
        rank: Number of the rank.
        own: Its own time in thousandths of a step.
        usual: The median own time of all ranks.
    """

    rank: int
    own: int
    usual: int


class CurrentHang(NamedTuple):
    """A rank that the others wait for now, before a timeout has passed.

    Attributes:
        rank: Number of the rank.
        place: The phase and the line of code where the rank is.
        since: Unix time of the newest step.
        has_waiting: Whether other ranks wait for it.
    """

    rank: int
    place: str
    since: float
    has_waiting: bool


class RankHistory:
    """The columns of a run, oldest first, and a rank that hangs now."""

    def __init__(self) -> None:
        self.period_s = PERIOD_S
        self.columns: list[Column] = []
        self.hang: CurrentHang | None = None

    def is_due(self, now: float) -> bool:
        """Return whether the next column is due at Unix time `now`."""
        # A column is also due after the clock was set back.
        return not self.columns or not 0 <= now - self.columns[-1].time < self.period_s

    def add_column(
        self,
        now: float,
        letters: Iterable[str],
        steps: Iterable[int | None],
        foremost: int | None = None,
        own_times: Iterable[int | None] = (),
    ) -> None:
        """Add a column.

        Args:
            now: Unix time.
            letters: Letter of the phase of each rank.
            steps: Step of each rank, None if it has not reported one.
            foremost: Step of the foremost rank at the time of the oldest of these reports, so that
                the age of a report does not count as lag. Default: the largest step.
            own_times: Own time of each rank in thousandths of a step, None if it is unknown.
        """
        rank_steps = list(itertools.islice(steps, MAX_RANKS))
        if foremost is None:
            foremost = max((step for step in rank_steps if step is not None), default=0)
        lags = [0 if step is None else max(0, foremost - step) for step in rank_steps]
        encoded_letters = encode_letters(itertools.islice(letters, MAX_RANKS))
        times = list(itertools.islice(own_times, MAX_RANKS))
        encoded_own = ""
        if any(time is not None for time in times):
            encoded_own = _encode_numbers(times)
        self.columns.append(
            Column(round(now, 1), encoded_letters, _encode_numbers(lags), encoded_own)
        )
        if len(self.columns) > MAX_COLUMNS:
            # Each pair of columns becomes one. If their number is odd, the last column has no pair.
            pairs = itertools.zip_longest(self.columns[::2], self.columns[1::2])
            self.columns = [
                _merge_columns(first, second) if second else first for first, second in pairs
            ]
            self.period_s *= 2

    def to_json_bytes(self) -> bytes:
        """Return the content of the file."""
        fields = {"period_s": self.period_s, "columns": self.columns}
        if self.hang is not None:
            fields["hang"] = self.hang._asdict()
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, fields: Any) -> RankHistory:
        """Return the history in a file. Columns that are invalid or out of order are omitted."""
        history = cls()
        if not isinstance(fields, Mapping) or not isinstance(fields.get("columns"), Sequence):
            return history
        period = fields.get("period_s")
        if isinstance(period, int | float) and PERIOD_S <= period < 1e9:
            history.period_s = float(period)
        for column in fields["columns"][: 2 * MAX_COLUMNS]:
            if _is_column(column) and (not history.columns or history.columns[-1].time < column[0]):
                history.columns.append(Column(float(column[0]), *column[1:]))
        history.hang = _read_hang(fields.get("hang"))
        return history

    def list_slow_ranks(self) -> list[SlowRank]:
        """Return the ranks that the others wait for, the slowest first."""
        times_by_rank = dict[int, list[int]]()
        for column in self.columns:
            for rank, own_time in enumerate(decode_own_times(column.own)):
                if own_time is not None:
                    times_by_rank.setdefault(rank, []).append(own_time)
        means = {
            rank: statistics.fmean(times)
            for rank, times in times_by_rank.items()
            if len(times) >= MIN_SLOW_COLUMNS
        }
        if len(means) < 2:
            return []
        usual = statistics.median_low(means.values())
        slow_ranks = [
            SlowRank(rank, round(mean), round(usual))
            for rank, mean in means.items()
            if mean - usual >= SLOW_PERMILLE
        ]
        return sorted(slow_ranks, key=lambda slow: (-slow.own, slow.rank))


def _read_hang(fields: Any) -> CurrentHang | None:
    if not isinstance(fields, Mapping):
        return None
    rank, place, since = (fields.get(name) for name in ("rank", "place", "since"))
    if type(rank) is not int or not isinstance(place, str):
        return None
    if not isinstance(since, int | float) or not math.isfinite(since):
        return None
    return CurrentHang(rank, place, float(since), fields.get("has_waiting") is True)


def _is_column(column: Any) -> bool:
    # Earlier versions wrote columns without own times.
    if not isinstance(column, list) or len(column) not in (3, 4):
        return False
    at, *texts = column
    if type(at) not in (int, float) or not math.isfinite(at):
        return False
    return all(isinstance(text, str) and len(text) < 32 * MAX_RANKS for text in texts)


def encode_letters(letters: Iterable[str]) -> str:
    """Encode letters: "s31d" is for 31 ranks in a step and one that waits for data."""
    runs = [(letter, len(list(run))) for letter, run in itertools.groupby(letters)]
    return "".join(letter if count == 1 else f"{letter}{count}" for letter, count in runs)


def _encode_numbers(numbers: Iterable[int | None]) -> str:
    """Encode numbers: "0x31,5," is for 31 foremost ranks and one that is 5 steps behind."""
    texts = (UNKNOWN if number is None else str(number) for number in numbers)
    runs = [(text, len(list(run))) for text, run in itertools.groupby(texts)]
    return "".join(f"{text}," if count == 1 else f"{text}x{count}," for text, count in runs)


def decode_letters(column: Column) -> list[str]:
    """Return the letter of each rank."""
    runs = _LETTER_RUN.findall(column.letters)
    return [letter for letter, count in runs for _ in range(int(count or 1))][:MAX_RANKS]


def decode_numbers(text: str) -> list[int]:
    """Return the number of each rank in the lags of a column."""
    return [number or 0 for number in decode_own_times(text)]


def decode_own_times(text: str) -> list[int | None]:
    """Return the own time of each rank in a column, None where it is unknown."""
    numbers = [
        None if number == UNKNOWN else int(number)
        for number, count in _NUMBER_RUN.findall(text)
        for _ in range(int(count or 1))
    ]
    return numbers[:MAX_RANKS]


def _merge_columns(first: Column, second: Column) -> Column:
    """Return a column with the later phases, the larger lags and the mean own times."""
    lag_pairs = itertools.zip_longest(
        decode_numbers(first.lags), decode_numbers(second.lags), fillvalue=0
    )
    own_pairs = itertools.zip_longest(decode_own_times(first.own), decode_own_times(second.own))
    mean_own = _encode_numbers(_mean_known(*pair) for pair in own_pairs)
    return Column(second.time, second.letters, _encode_numbers(map(max, lag_pairs)), mean_own)


def _mean_known(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return round((first + second) / 2)
