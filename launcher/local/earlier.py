"""What an earlier run left in the run folder, kept until the run that begins has done something of its own.

A run that is refused (another model, a wrong data path), or stopped before its first step, leaves the folder as it
found it, byte for byte: the record of a finished run is worth more than that of a mistake.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxlaunch.launcher.agent.leader.run_folder import AGENTS, ATTEMPTS, RunFolder
from jaxlaunch.launcher.agent.leader.summary import FILE, Summary, stands, stored
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.local import ending, orphans

KEPT = ".earlier"
JOB = "job.yaml"
_FILES = (JOB, FILE, AGENTS, ATTEMPTS, "metrics.jsonl", "eval.jsonl", "samples.jsonl")
_SIZES = "sizes.json"


class Earlier:
    """The record of an earlier run in `folder`: `keep` it, then `restore` or `drop` it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._kept = folder, folder / KEPT
        self.step: int | None = None  # at which that run stands
        self.is_kept = False

    def keep(self) -> None:
        """Keeps the record, where that run has done anything. Links, no copies: what replaces a file leaves the link,
        and what appends to one is cut off again."""
        orphans.end(self._uid)  # of agents that were killed: they would write beside this run's
        if (self._kept / _SIZES).exists():  # of a launcher that was killed
            self._decide()
        ending.close(RunFolder(self._folder, lambda text: None))
        found = stored(RunFolder(self._folder, lambda text: None))
        self.step = next((step for step in (found.get("step"), found.get("saved")) if step), None)
        if not stands(found):
            return self.drop()
        shutil.rmtree(self._kept, ignore_errors=True)
        sizes = {}
        for path in self._files():
            name = path.relative_to(self._folder)
            (self._kept / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, self._kept / name)
            except OSError:  # a file system without links
                shutil.copy2(path, self._kept / name)
            stat = path.stat()
            sizes[str(name)] = stat.st_size, stat.st_mtime_ns
        (self._kept / _SIZES).write_text(json.dumps(sizes))  # last: without it nothing is kept
        self.is_kept = True

    def restore(self) -> bool:
        """Puts the record back, and removes what was written beside it. False, and nothing is changed, where what was
        kept is gone."""
        try:
            sizes = json.loads((self._kept / _SIZES).read_text())
        except (OSError, ValueError):
            self.drop()
            return False
        for path in list(self._files()):
            if str(path.relative_to(self._folder)) not in sizes:
                path.unlink()
        for name in sorted(sizes, key=lambda name: name == FILE):  # the summary last: it tells `keep`
            size, changed = sizes[name]
            if (self._kept / name).exists():  # else it was put back before a kill
                os.truncate(self._kept / name, size)
                os.utime(self._kept / name, ns=(changed, changed))
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self._kept / name, self._folder / name)
        self.drop()
        return True

    def drop(self) -> None:
        """Forgets the record: the run that began goes on from there."""
        shutil.rmtree(self._kept, ignore_errors=True)
        self.is_kept = False

    def _decide(self) -> None:
        """Puts the record back where the run after it, whose launcher was killed, had done nothing yet."""
        if self._is_untouched():
            self.restore()
            return
        summary = Summary.read(RunFolder(self._folder, lambda text: None), self._uid)
        if summary is not None and summary.is_void(self._is_train()):
            self.restore()

    @property
    def _uid(self) -> str:
        """Of the run whose summary.json the folder has; empty where there is none."""
        of = stored(RunFolder(self._folder, lambda text: None)).get("of") or {}
        return str(of.get("uid", ""))

    def _is_untouched(self) -> bool:
        """Whether summary.json is still, or again, that of the run whose record is kept."""
        try:
            return (self._kept / FILE).read_bytes() == (self._folder / FILE).read_bytes()
        except FileNotFoundError:
            return not (self._kept / FILE).exists()  # it is put back last

    def _is_train(self) -> bool:
        """Whether the run that the folder has now is one of the trainer."""
        try:
            return jobs.load(self._folder / JOB).train is not None
        except UserError:  # of another version
            return False

    def _files(self) -> Iterator[Path]:
        yield from (path for name in _FILES if (path := self._folder / name).is_file())
        with contextlib.suppress(FileNotFoundError):
            yield from sorted(path for path in (self._folder / "logs").iterdir() if path.is_file())
