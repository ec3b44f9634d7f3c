"""A progress bar for a terminal: reads host 0's metrics once a second and shows the step, and the time that is left."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from jaxlaunch.launcher.agent.leader import run_folder
from jaxlaunch.launcher.cli import output
from jaxlaunch.launcher.kube.objects import age

PERIOD_S = 1.0
_TIMEOUT_S = 1.0
_WIDTH = 40
_SAMPLE = re.compile(r'^(jaxlaunch_(?:step|target_step))\{[^}]*rank="0"[^}]*\} (\S+)$', re.MULTILINE)


class Bar:
    """Shows how far the run of `folder` is while it is entered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done = threading.Event()
        self._first: tuple[float, float] | None = None  # the first step that was read, and when
        self._thread = threading.Thread(target=self._follow, name="bar", daemon=True)

    def __enter__(self) -> Bar:
        with contextlib.suppress(OSError):
            (self._folder / run_folder.AGENTS).unlink()  # an earlier run's addresses
        output.status("starting")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        output.status("")

    def _follow(self) -> None:
        while not self._done.wait(PERIOD_S):
            values = self._read()
            if "jaxlaunch_step" in values:
                output.status(
                    self._line(values["jaxlaunch_step"], values.get("jaxlaunch_target_step"), time.monotonic())
                )

    def _read(self) -> dict[str, float]:
        """Samples of rank 0; none while no agent answers."""
        try:
            address = run_folder.agents(self._folder)[0].address
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
                text = answer.read().decode()
            values = {name: float(value) for name, value in _SAMPLE.findall(text)}
        except (OSError, ValueError, LookupError):  # not there yet, half written, or gone
            return {}
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _line(self, step: float, total: float | None, now: float) -> str:
        """`training ━━━━━━╌╌╌╌ 120/200, 47m left`; the time left is that of as many steps since the first one read."""
        first, since = self._first = self._first or (step, now)
        if not total:
            return f"training, step {step:.0f}"
        filled = round(_WIDTH * min(1.0, step / total))
        left = f", {age((now - since) / (step - first) * max(0.0, total - step))} left" if step > first else ""
        return f"training {'━' * filled}{'╌' * (_WIDTH - filled)} {step:.0f}/{total:.0f}{left}"
