"""How long the page of a large run takes to be drawn: `python -m tests.launcher.report.speed`, on a quiet machine.

A run of 100,000 points, three attempts and 1,000 ranks. Opened: from navigation to the frame with the curves. Updated:
from the arrival of the server's event to the frame. Time of the page's main thread is processor time.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxlaunch.launcher.report import page
from jaxlaunch.launcher.report.run import Followed
from jaxlaunch.launcher.report.server import Runs, Server
from tests.launcher.report import browser, made_runs
from tests.launcher.report.serving import serving

POINTS, RANKS, TIMES = 100_000, 1_000, 5
DRAWN = "performance.getEntriesByName('drawn')"


def main() -> None:
    """Prints both, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder, browser.page() as chromium:
        run = Path(folder) / "runs" / "large"
        wall_s = sum(made_runs.run(run, (137, 83, 0), points=POINTS).values())
        made_runs.ranks(run, RANKS, wall_s, slow=2)
        file = Path(folder) / "run.html"
        file.write_text(page.of("run", "large", Followed(run).read().to_json()))
        chromium.call("Performance.enable", timeDomain="threadTicks")
        print(f"page: {file.stat().st_size} bytes")
        opened = []
        for _ in range(TIMES + 1):
            chromium.open(file.as_uri())
            opened.append(chromium.until(f"{DRAWN}[0]?.duration"))
        print(f"opened: {told(opened[1:])}")
        with serving(Server(Runs(run.parent, None))) as server:
            update(chromium, server, run)


def update(chromium: browser.Page, server: Server, run: Path) -> None:
    """Adds points to a run while its page is open."""
    chromium.open(f"{server.address}run/{server.runs.table()['runs'][0]['id']}")
    chromium.until(f"{DRAWN}.length > 1")
    before = main_thread_ms(chromium)
    for at in range(TIMES):
        with open(run / "metrics.jsonl", "a") as file:
            row = {"step": POINTS + at + 1, "loss": 0.1, "grad_norm": 0.5, "learning_rate": 1e-3}
            file.write(json.dumps(row | {"time": made_runs.BEGAN + 100}) + "\n")
        chromium.until(f"{DRAWN}.length > {at + 2}")
    print(f"updated: {told(chromium.value(f'{DRAWN}.slice(2).map((each) => each.duration)'))}")
    print(f"main thread: {(main_thread_ms(chromium) - before) / TIMES:.0f} ms for each update")
    chromium.open("about:blank")


def main_thread_ms(chromium: browser.Page) -> float:
    """Processor time of the page's main thread so far."""
    found = chromium.call("Performance.getMetrics")["metrics"]
    return float(next(1000 * each["value"] for each in found if each["name"] == "TaskDuration"))


def told(durations: Sequence[float]) -> str:
    """The median, and all."""
    return f"median {statistics.median(durations):.0f} ms of {', '.join(f'{each:.0f}' for each in durations)}"


if __name__ == "__main__":
    main()
