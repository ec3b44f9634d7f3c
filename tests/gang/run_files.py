"""What a run that is killed at random moments has on disk: its attempts, steps and saves."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class RunFiles:
    """A run folder with its checkpoints, during or after the run."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def records(self) -> list[dict[str, Any]]:
        """Return the finished attempts."""
        with contextlib.suppress(OSError, ValueError):  # there is none yet, or it is being written
            return read_json_lines(self.run / "attempts.jsonl")
        return []

    def newest(self) -> int:
        """Return the newest step with a manifest, or 0."""
        manifests = self.run.glob("checkpoints/*/jaxlaunch.manifest.json")
        return max(
            (int(path.parent.name) for path in manifests if path.parent.name.isdecimal()), default=0
        )

    def step(self) -> int:
        """Return the newest step in metrics.jsonl."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(read_json_lines(self.run / "metrics.jsonl")[-1]["step"])
        return 0

    def saves(self) -> bool:
        """Check whether a step's folder has no manifest yet."""
        folders = [path for path in (self.run / "checkpoints").glob("*") if path.is_dir()]
        return any(not (path / "jaxlaunch.manifest.json").exists() for path in folders)
