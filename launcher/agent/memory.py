"""What must outlive a pod: the files of the run folder. A folder that fails is said once and costs no run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launcher.agent.history import Record

ATTEMPTS, SUMMARY, AGENTS = "attempts.jsonl", "summary.json", "agents.json"


class Memory:
    """The run folder, or none: then nothing is written and nothing is known of the past."""

    def __init__(self, folder: Path | None, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._has_complained = False

    def records(self, uid: str) -> list[Record]:
        """Every attempt of `uid` that ended, oldest first. Lines of others, or cut short by a kill, are left out."""
        if self._folder is None:
            return []
        try:
            lines = (self._folder / ATTEMPTS).read_text().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            self._complain(error)
            return []
        records = []
        for line in lines:
            try:
                record = Record.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue
            if record.uid == uid:
                records.append(record)
        return records

    def append(self, record: dict[str, Any]) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / ATTEMPTS).open("a") as file:
                file.write(json.dumps(record, default=str) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._complain(error)

    def write(self, name: str, value: dict[str, Any] | Sequence[Any]) -> None:
        """Replaces a file at once: a reader finds the old one or the new one, never half of either."""
        if self._folder is None:
            return
        draft = self._folder / f".{name}.{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(value, indent=2, default=str) + "\n")
            draft.replace(self._folder / name)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            self._say(f"the run folder {self._folder} cannot be used: {error}; this run will not be remembered")
        self._has_complained = True
