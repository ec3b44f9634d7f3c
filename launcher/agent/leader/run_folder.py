"""What must outlive a pod: the files of the run folder. A folder that fails is said once and costs no run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launcher.agent.history import Record

ATTEMPTS, SUMMARY, AGENTS = "attempts.jsonl", "summary.json", "agents.json"
TAIL_BYTES = 64 * 1024  # of all ranks' logs together
FIRST_BYTES, LEAST_BYTES = 16 * 1024, 2 * 1024  # of the log that matters most; of any other


class Memory:
    """The run folder, or none: then nothing is written and nothing is known of the past."""

    def __init__(self, folder: Path | None, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._fault: str | None = None

    @property
    def gap(self) -> str | None:
        """Why the past is not known; None when it is."""
        return "the job has no folder that outlives its pods" if self._folder is None else self._fault

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

    def tails(self, ranks: Sequence[int]) -> list[tuple[int, list[str]]]:
        """The last lines of the ranks' logs, the first rank's most; ranks beyond what fits in TAIL_BYTES are left out.

        A rank's log holds all attempts, so before this one's first line it ends with the attempt before.
        """
        if self._folder is None:
            return []
        found, left = [], TAIL_BYTES
        for rank in ranks:
            size = max(LEAST_BYTES, TAIL_BYTES // len(ranks))
            size = max(size, FIRST_BYTES) if rank == ranks[0] else size
            if size > left:
                break
            if lines := _end(log_path(self._folder, rank), size):
                found.append((rank, lines))
                left -= size
        return found

    def _complain(self, error: OSError) -> None:
        if self._fault is None:
            self._fault = f"the run folder {self._folder} cannot be used: {error}"
            self._say(f"{self._fault}; this run will not be remembered")


def log_path(folder: Path, rank: int) -> Path:
    """Where a rank's lines of all attempts lie; what no longer fitted lies beside it."""
    return folder / "logs" / f"rank-{rank}.log"


def _end(path: Path, size: int) -> list[str]:
    """The last whole lines of a file, `size` bytes at most; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - size)
            file.seek(start)
            lines = file.read(size).decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[1:] if start else lines
