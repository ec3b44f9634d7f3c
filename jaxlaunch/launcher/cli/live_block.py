"""Live block at the bottom of a terminal with the progress of a run, its loss and its ranks.

A thread updates it once a second, from the files of the run and from host 0's metrics. The output
of the run scrolls above it.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlaunch.launcher.cli import output, screen_lines
from jaxlaunch.launcher.cli.screen_lines import Colour, Paragraph
from jaxlaunch.launcher.kubernetes.objects import format_age
from jaxlaunch.launcher.local.status import read_metrics
from jaxlaunch.launcher.report.curves import Curve
from jaxlaunch.launcher.report.remaining import estimate_remaining_s
from jaxlaunch.launcher.report.run_files import CurveFile, read_job
from jaxlaunch.launcher.wording import escape_controls, format_count
from jaxlaunch.records import rank_history
from jaxlaunch.records.rank_history import RankHistory
from jaxlaunch.runs import layout, run_folder
from jaxlaunch.runs.run_folder import RunFolder

PERIOD_S = 1.0
# The number of newest steps from which the remaining time is estimated without metrics.jsonl.
_MAX_READINGS = 64
# The most and the least columns of the progress bar and of the loss.
_MAX_BAR_CHARS, _MIN_BAR_CHARS = 40, 10
_SPARK_CHARS = "▁▂▃▄▅▆▇█"
_SAMPLE = re.compile(
    r"^jaxlaunch_(step|target_step|goodput_ratio|rank_step)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE
)
_PHASE_WORDS: Mapping[str | None, str] = {
    None: "starting",
    "prepare": "preparing",
    "init": "joining",
    "restore": "restoring",
    "compile": "compiling",
    "step": "training",
    "data": "waiting for data",
    "eval": "evaluating",
    "save": "saving",
    "done": "done",
}
_PHASE_BY_LETTER = {
    letter: _PHASE_WORDS[phase] for phase, letter in rank_history.LETTERS.items()
} | {rank_history.ENDED: "ended"}


class LiveBlock:
    """Context in which the terminal shows the progress of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, RunFolder(folder)
        self._rows = CurveFile(folder / layout.METRICS)
        self._is_done = threading.Event()
        # The times at which a new step was read, with the steps.
        self._readings = deque[tuple[float, int]](maxlen=_MAX_READINGS)
        self._job: Mapping[str, Any] | None = None
        self._thread = threading.Thread(target=self._update_until_done, name="block", daemon=True)

    def __enter__(self) -> LiveBlock:
        with contextlib.suppress(OSError):
            # The file may have the addresses of an earlier run's agents.
            (self._folder / layout.AGENTS).unlink()
        output.show_status("starting")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()
        output.show_status()

    def _update_until_done(self) -> None:
        while not self._is_done.wait(PERIOD_S):
            if values := self._read_values():
                self._rows.read_new_rows()
                history = RankHistory.from_json(self._files.read_json(layout.RANKS))
                lines = self._format_lines(values, self._rows.curves, history, time.monotonic())
                output.show_status(*map(screen_lines.make_paragraph, lines))

    def _read_values(self) -> dict[str, float]:
        """Return the finite metrics of host 0 and rank 0, or {} if no agent answers."""
        try:
            address = run_folder.read_agents(self._folder)[0].address
            text = read_metrics(address)
            values = {
                name: float(value)
                for name, labels, value in _SAMPLE.findall(text)
                if "rank=" not in labels or 'rank="0"' in labels
            }
        except (OSError, ValueError, LookupError):
            # The agent has not started yet or has ended, or its file is incomplete.
            return {}
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _format_lines(
        self,
        values: Mapping[str, float],
        curves: Mapping[str, Curve],
        history: RankHistory,
        now: float,
    ) -> list[str]:
        step = values.get("step", values.get("rank_step"))
        lines = ["starting"]
        if step is not None:
            total = values.get("target_step")
            if total is None and (summary := self._files.read_summary_row()) is not None:
                # A program that does not use `train:` may have reported the total.
                total = summary.steps
            lines = [self._describe_progress(step, total, now)]
        name = next((name for name in curves if name == "loss" or name.endswith("_loss")), None)
        if name is not None:
            text = f"{escape_controls(name)} {curves[name].points[-1][2]:.4g} "
            lines.append(text + _draw_sparkline(curves[name], _fit_bar(text)))
        goodput = f"goodput {values['goodput_ratio']:.0%}" if "goodput_ratio" in values else ""
        phases, problem = _describe_ranks(history)
        ranks = "; ".join(filter(None, [phases, problem]))
        ranks_line = ", ".join(filter(None, [ranks, goodput]))
        lines.append(Paragraph(ranks_line, coloured=problem, colour=Colour.YELLOW))
        return list(filter(None, lines))

    def _describe_progress(self, step: float, total: float | None, now: float) -> str:
        """Return a progress bar, such as `training ━━━━╌╌╌╌ 120/200, 47m left`."""
        readings = self._readings
        if readings and step < readings[-1][1]:
            # The run restarted.
            readings.clear()
        if not readings or step > readings[-1][1]:
            readings.append((now, int(step)))
        if not total:
            return f"training, step {step:.0f}"
        if self._job is None:
            self._job = read_job(self._folder)
        remaining_s = estimate_remaining_s(
            self._rows, self._job, int(step), int(total), list(readings)
        )
        remaining = "" if remaining_s is None else f", {format_age(remaining_s)} left"
        position = f" {step:.0f}/{total:.0f}{remaining}"
        width = _fit_bar(f"training {position}")
        filled = round(width * min(1.0, step / total))
        return f"training {'━' * filled}{'╌' * (width - filled)}{position}"


def _fit_bar(text: str) -> int:
    """Return the columns of a bar next to a text, in the width of the terminal."""
    room = output.status_width() - len(text)
    return max(_MIN_BAR_CHARS, min(_MAX_BAR_CHARS, room))


def _describe_ranks(history: RankHistory) -> tuple[str, str]:
    """Return the phases of the ranks, and the rank that hangs, is behind or is slow.

    For example "4 ranks: 3 training, 1 waiting for data" and "rank 2 is 5 steps behind".
    """
    if not history.columns:
        return "", ""
    letters = rank_history.decode_letters(history.columns[-1])
    lags = rank_history.decode_numbers(history.columns[-1].lags)
    phases = Counter(_PHASE_BY_LETTER[letter] for letter in letters)
    if len(letters) == 1:
        return f"1 rank: {next(iter(phases))}", ""
    phases_text = ", ".join(f"{count} {phase}" for phase, count in phases.most_common())
    slowest = max(range(len(lags)), key=lags.__getitem__, default=0)
    problem_text = ""
    if (hang := history.hang) is not None:
        problem_text = f"rank {hang.rank} hangs {escape_controls(hang.place)}"
    elif lags and lags[slowest] > 1:
        problem_text = f"rank {slowest} is {format_count(lags[slowest], 'step')} behind"
    elif slow := history.list_slow_ranks():
        problem_text = f"rank {slow[0].rank} is {(slow[0].own - slow[0].usual) / 10:.1f} % slower"
    return f"{len(letters)} ranks: {phases_text}", problem_text


def _draw_sparkline(curve: Curve, width: int = _MAX_BAR_CHARS) -> str:
    """Draw a curve in at most `width` characters, one for each range of steps."""
    middles = curve.values_by_range(width)
    low, high = min(middles), max(middles)
    scale = (len(_SPARK_CHARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARK_CHARS[round((value - low) * scale)] for value in middles)
