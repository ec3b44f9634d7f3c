"""Log lines of a run on this machine, from the log files of its ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from jaxlaunch import regular_files
from jaxlaunch.launcher.jobs.logs.lines import Line, Selection
from jaxlaunch.launcher.jobs.status import read_run
from jaxlaunch.launcher.jobs.volume import MAX_LOG_BYTES
from jaxlaunch.launcher.local.run_folders import Run, open_run
from jaxlaunch.records.log_lines import LineSplitter
from jaxlaunch.runs import layout

POLL_S = 0.2
_CHUNK_BYTES = 1 << 20
# Lines of ranks are cut far below this length.
_MAX_LINE_BYTES = 1 << 20


def list_ranks(folder: Path, selection: Selection) -> list[int]:
    """Return the selected ranks that have a log in the folder of a start."""
    return read_run.find_ranks(str(folder), layout.LOG, selection.ranks)


def read_logs(
    run: Run, folder: Path, selection: Selection, tail: int | None, processes_per_host: int
) -> Iterator[tuple[int, int, list[Line]]]:
    """Yield each selected rank, the bytes left out of its log, and the lines after them."""
    ranks = list_ranks(folder, selection)
    for rank in ranks:
        log = read_run.read_log(
            str(run.folder),
            str(layout.log_path(folder, rank)),
            rank,
            selection.pattern,
            tail,
            MAX_LOG_BYTES // len(ranks),
        )
        lines = [Line(rank // processes_per_host, rank, text) for text in log["text"].splitlines()]
        yield rank, log["left_out"], lines


def follow_logs(
    run: Run,
    selection: Selection,
    tail: int | None,
    processes_per_host: int,
    show: Callable[[Line], None],
    limit_s: float | None = None,
) -> None:
    """Show the last `tail` lines of each rank, and then new ones until the run has ended.

    After `limit_s` seconds the run is no longer waited for.
    """
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    folder, files = run.start_folder, dict[int, _LogFile]()
    is_first, is_over = True, False
    with contextlib.ExitStack() as stack:
        while True:
            for rank in list_ranks(folder, selection):
                if rank not in files:
                    files[rank] = _LogFile(layout.log_path(folder, rank), run.folder)
                    stack.callback(files[rank].close)
                texts = files[rank].read_lines()
                if selection.pattern is not None:
                    texts = list(filter(selection.pattern.search, texts))
                if is_first and tail is not None:
                    texts = texts[max(0, len(texts) - tail) :]
                for text in texts:
                    show(Line(rank // processes_per_host, rank, text))
            if is_over:
                return
            # The files are read again, because the last lines may have been written meanwhile.
            is_first = False
            is_over = layout.find_holder(run.folder) is None or time.monotonic() >= deadline
            time.sleep(0.0 if is_over else POLL_S)


def follow_roles(
    job: Run,
    names: Sequence[str],
    selection: Selection,
    tail: int | None,
    show: Callable[[Line], None],
) -> None:
    """Follow the logs of roles of a job as `follow_logs` does, until the job has ended."""

    def has_begun(folder: Path) -> bool:
        """Return whether the role has started since the job was started."""
        if layout.find_holder(folder) is not None:
            return True
        start = open_run(folder).newest_start if layout.is_run(folder) else None
        job_start = open_run(job.folder).newest_start
        return start is not None and job_start is not None and start.started >= job_start.started

    def follow(name: str) -> None:
        folder = job.folder / name
        while not has_begun(folder) and layout.find_holder(job.folder) is not None:
            time.sleep(POLL_S)
        if layout.is_run(folder):
            run = open_run(folder)
            per_host = 1 if run.job is None else run.job.process_count_per_host

            def show_role(line: Line) -> None:
                show(dataclasses.replace(line, role=name))

            follow_logs(run, selection, tail, per_host, show_role)

    # Ctrl-C must not wait for them.
    threads = [threading.Thread(target=follow, args=[name], daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _LogFile:
    """The log of a rank that may still run, with the rotated file of its older lines.

    Links below the folder `below` are not followed: they may lead to files that only this user can
    read.
    """

    def __init__(self, path: Path, below: Path) -> None:
        self._path, self._below = path, below
        self._file = self._open_file(path.with_suffix(".log.1")) or self._open_file(path)
        self._splitter = LineSplitter(_MAX_LINE_BYTES)

    def _open_file(self, path: Path) -> BinaryIO | None:
        try:
            return open(path, "rb", opener=regular_files.make_opener(self._below))
        except OSError:
            return None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def read_lines(self) -> list[str]:
        """Return the complete lines that were written since the last call."""
        lines = list[bytes]()
        while self._file is not None:
            while data := self._file.read(_CHUNK_BYTES):
                lines += self._splitter.feed(data)
            try:
                was_rotated = self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
            except OSError:
                was_rotated = False
            if not was_rotated:
                break
            self._file.close()
            self._file = self._open_file(self._path)
        return [
            line.decode(errors="replace")
            for line in lines
            if read_run.ROTATION_LINE.fullmatch(line) is None
        ]
