"""Pictures of the pages of six runs that went wrong.

`python -m tests.launcher.report.six_runs FOLDER` makes the run folders as a launcher leaves them,
and takes each page at 1,200 and 400 px in light and in dark. It needs chromium on PATH.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from jaxlaunch import contract
from jaxlaunch.launcher.report import page
from jaxlaunch.launcher.report.run import RunReader
from jaxlaunch.records.rank_history import CurrentHang, RankHistory
from jaxlaunch.records.summary import AttemptProgress, StartRecord, Summary
from jaxlaunch.records.verdict import Failure, FailureKind, verdict_for_code
from jaxlaunch.runs import layout
from tests.launcher.report import browser, made_runs

WALL_S = 120.0
RANKS = 4
FAILURES = {
    "killed": verdict_for_code(contract.KILLED, Failure(FailureKind.SIGNAL, rank=2, signal=9)),
    "nan": verdict_for_code(
        contract.NOT_FINITE,
        "rank 0 raised in step: NotFiniteError: the loss of step 412 is nan",
        rank=0,
    ),
    "oom": verdict_for_code(contract.KILLED, Failure(FailureKind.OOM_KILLED, rank=1, signal=9)),
    "full": verdict_for_code(
        contract.STORAGE, "rank 0 raised in save: StorageError: No space left on device", rank=0
    ),
}
SHOWN = ("hang", "slow", *FAILURES)


def make_run(folder: Path, name: str) -> None:
    """Write the run of this name; the two that have not failed are still running."""
    verdict = FAILURES.get(name)
    began, ended = made_runs.BEGAN, made_runs.BEGAN + WALL_S
    seconds = {"init": 5.0, "compile": 15.0, "step": 100.0}
    progress = AttemptProgress("uid", 0, 1, began, ended, seconds=seconds, first_step=1)
    code = None if verdict is None else verdict.code
    start = StartRecord(1, "uid", began, None if code is None else ended, code, 1, 600)
    summary = Summary(
        verdict, step=600, committed=500, seconds=seconds, of=progress, starts=[start], restarts={}
    )
    folder.mkdir(parents=True)
    made_runs.write(folder, summary, [])
    made_runs.rows(folder, 60, WALL_S)
    add_memory(folder, 1.0 if name == "oom" else 0.3)
    make_ranks(folder, name)


def add_memory(folder: Path, most: float) -> None:
    """Let the memory of the host grow to this share of its limit of 8 GiB."""
    lines = [json.loads(line) for line in (folder / layout.METRICS).read_text().splitlines()]
    for at, line in enumerate(lines, 1):
        used_gib = 8 * most * at / len(lines)
        line |= {"host_gib": used_gib, "host_limit_gib": 8.0, "process_gib": used_gib / 2}
        line |= {"host_cpu": 0.6}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / layout.METRICS).write_text(text)


def make_ranks(folder: Path, name: str) -> None:
    """Write ranks.json: of "slow" rank 2 is 2 % slower, of "hang" it has hung for 40 s."""
    history = RankHistory()
    for look in range(10, 60):
        own = [3, 4, 24 if name == "slow" else 3, 3]
        step = min(look, 40) if name == "hang" else look
        history.add_column(made_runs.BEGAN + 2.0 * look, "s" * RANKS, [step] * RANKS, None, own)
    if name == "hang":
        place = "in step in read (tasks.py:12)"
        history.hang = CurrentHang(2, place, made_runs.BEGAN + 80.0, has_waiting=True)
    (folder / layout.RANKS).write_bytes(history.to_json_bytes())


def render_page(folder: Path, name: str) -> str:
    """Return the page of a run, which is held while it has no verdict."""
    make_run(folder, name)
    if name in FAILURES:
        return page.render_page("run", name, RunReader(folder).read_report().to_json())
    with layout.hold_lock(folder):
        return page.render_page("run", name, RunReader(folder).read_report().to_json())


def main(target: Path) -> None:
    """Take all pictures."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root, browser.page() as chromium:
        for name in SHOWN:
            file = Path(root) / f"{name}.html"
            file.write_text(render_page(Path(root) / name, name))
            for width in (1200, 400):
                for is_dark in (False, True):
                    chromium.open(file.as_uri(), width, is_dark)
                    theme = "dark" if is_dark else "light"
                    picture = chromium.picture(width, most=1400)
                    (target / f"{name}-{width}-{theme}.png").write_bytes(picture)
        assert not chromium.errors, chromium.errors


if __name__ == "__main__":
    main(Path(sys.argv[1]))
