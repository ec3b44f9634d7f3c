"""What a run that is killed at random moments has on disk: its attempts, its steps and its saves."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


class RunFiles:
    """The run folder `run`, whose checkpoints are in it, while processes write there or after they have ended."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def records(self) -> list[dict[str, Any]]:
        """The attempts that ended."""
        with contextlib.suppress(OSError, ValueError):  # there is none yet, or it is being written
            return [
                json.loads(line) for line in (self.run / "attempts.jsonl").read_text().splitlines()
            ]
        return []

    def newest(self) -> int:
        """The newest step whose save is whole; 0 before the first."""
        manifests = self.run.glob("checkpoints/*/jaxlaunch.manifest.json")
        return max(
            (int(path.parent.name) for path in manifests if path.parent.name.isdecimal()), default=0
        )

    def step(self) -> int:
        """The newest step in metrics.jsonl."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(
                json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
            )
        return 0

    def saves(self) -> bool:
        """Whether a step's folder is there without its manifest."""
        folders = [path for path in (self.run / "checkpoints").glob("*") if path.is_dir()]
        return any(not (path / "jaxlaunch.manifest.json").exists() for path in folders)
