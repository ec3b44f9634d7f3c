"""Which examples each process used at each step, written to the run folder: `examples/process-N.jsonl`.

One line a step, `{"step": 7, "ids": [3, 1, 4]}`; the ids are indexes of the source, in the order of the rows. A run
that resumes at step s first drops what was written of s and later, also by processes that it no longer has.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from jaxlaunch import regular_files


class Trace:
    """The open file of one process. Raises OSError when the folder cannot be written."""

    def __init__(self, folder: str | Path, process: int, start_step: int, *, processes: int) -> None:
        self._folder = Path(folder) / "examples"
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(process)
        path.touch()
        _drop(path, start_step)
        if process == 0:
            for other in self._folder.glob("process-*.jsonl"):
                number = re.fullmatch(r"process-(\d+)\.jsonl", other.name)
                if number and int(number[1]) >= processes:
                    _drop(other, start_step)
        self._file = open(path, "a", encoding="ascii", opener=regular_files.opener)

    def write(self, step: int, ids: list[int]) -> None:
        """Appends the ids of `step` and hands them to the system: a killed process leaves whole lines."""
        self._file.write(json.dumps({"step": step, "ids": ids}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _path(self, process: int) -> Path:
        return self._folder / f"process-{process}.jsonl"


def _drop(path: Path, start_step: int) -> None:
    """Cuts the file before its first line that is of `start_step` or later, or broken off."""
    kept = 0
    with open(path, "rb+", opener=regular_files.opener) as file:
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= start_step:
                break
            kept += len(line)
        file.truncate(kept)
