"""A progress bar for a terminal: asks host 0's metrics once a second where the run is."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PERIOD_S = 1.0
_SAMPLE = re.compile(r'^(jaxlaunch_(?:step|target_step))\{[^}]*rank="0"[^}]*\} (\S+)$', re.MULTILINE)


class Bar:
    """Follows the run of `folder` while it is entered; what is printed meanwhile appears above it."""

    def __init__(self, folder: Path) -> None:
        self._agents = folder / "agents.json"
        self._done = threading.Event()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._thread = threading.Thread(target=self._follow, name="bar", daemon=True)

    def __enter__(self) -> Bar:
        self._agents.unlink(missing_ok=True)  # an earlier run's addresses
        self._progress.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._progress.stop()

    def _follow(self) -> None:
        while not self._done.wait(PERIOD_S):
            values = self._ask()
            if "jaxlaunch_step" in values:
                total = values.get("jaxlaunch_target_step")
                self._progress.update(
                    self._task, completed=values["jaxlaunch_step"], total=total, description="training"
                )

    def _ask(self) -> dict[str, float]:
        """Samples of rank 0; none while there is nobody to ask."""
        try:
            address = json.loads(self._agents.read_text())[0]["address"]
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=PERIOD_S) as answer:
                text = answer.read().decode()
        except (OSError, ValueError, LookupError):  # not there yet, half written, or gone
            return {}
        return {name: float(value) for name, value in _SAMPLE.findall(text)}
