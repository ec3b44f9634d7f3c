"""The lines of a run on this machine, from the files that its agents keep of every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from jaxlaunch import regular_files
from jaxlaunch.launcher.jobs.logs.lines import Line, Select
from jaxlaunch.launcher.jobs.status import read_run
from jaxlaunch.launcher.jobs.status.run_files import MAX_LOGS
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.records.lines import Lines
from jaxlaunch.runs.lock import find_holder

POLL_S = 0.2
Found = Iterator[tuple[int, int, list[Line]]]  # of each rank: its number, bytes left out before its lines, these
_CHUNK = 1 << 20
_LONGEST = 1 << 20  # bytes of a line: what a rank writes is cut far below


def ranks(folder: Path, chosen: Select) -> list[int]:
    """The ranks that are selected and have a log in the folder of a start."""
    return read_run.found(str(folder), chosen.ranks)


def read(run: Run, folder: Path, chosen: Select, tail: int | None, each: int) -> Found:
    """Each rank that has a log in the folder of a start of the run. `each`: processes of a host."""
    here = ranks(folder, chosen)
    for rank in here:
        log = read_run.log(str(run.folder), str(folder), rank, chosen.pattern, tail, MAX_LOGS // len(here))
        yield rank, log["left_out"], [Line(rank // each, rank, text) for text in log["text"].splitlines()]


def follow(run: Run, chosen: Select, tail: int | None, each: int, show: Callable[[Line], None]) -> None:
    """Shows the lines so far, the last `tail` of each rank, and then each as it comes, until nobody runs in the folder
    any more."""
    folder, files = run.start_folder, dict[int, _File]()
    is_first, is_over = True, False
    while True:
        for rank in ranks(folder, chosen):
            path = Path(read_run.log_path(str(folder), rank))
            texts = files.setdefault(rank, _File(path, run.folder)).more()
            wanted = [text for text in texts if chosen.pattern is None or chosen.pattern.search(text) is not None]
            for text in wanted if not is_first or tail is None else wanted[len(wanted) - min(tail, len(wanted)) :]:
                show(Line(rank // each, rank, text))
        if is_over:
            return
        is_first, is_over = False, find_holder(run.folder) is None  # then once more: what came until it ended
        time.sleep(0.0 if is_over else POLL_S)


class _File:
    """The log of a rank as it grows. What is old moves to another file, which is read to its end first.

    No link below the folder `below` is followed: it may lead to what only this user can read.
    """

    def __init__(self, path: Path, below: Path) -> None:
        self._path, self._below = path, below
        self._file = _opened(path.with_suffix(".log.1"), below) or _opened(path, below)
        self._split = Lines(_LONGEST)

    def more(self) -> list[str]:
        """The whole lines since the last call."""
        found = list[bytes]()
        while self._file is not None:
            while data := self._file.read(_CHUNK):
                found += self._split.feed(data)
            if not self._has_moved(self._file):
                break
            self._file.close()
            self._file = _opened(self._path, self._below)
        return [text.decode(errors="replace") for text in found if read_run.ROTATED.fullmatch(text) is None]

    def _has_moved(self, file: BinaryIO) -> bool:
        """Whether the path names another file by now."""
        try:
            return self._path.stat().st_ino != os.fstat(file.fileno()).st_ino
        except OSError:
            return False


def _opened(path: Path, below: Path) -> BinaryIO | None:
    try:
        return open(path, "rb", opener=regular_files.beneath(below))
    except OSError:
        return None
