"""The files of the run folder, which outlive a pod. An error of the folder is logged once and never ends a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxlaunch import atomic_file, regular_files
from jaxlaunch.records import checked, wire
from jaxlaunch.records.attempt import Record
from jaxlaunch.records.checked import Whole
from jaxlaunch.records.summary import Summary
from jaxlaunch.runs.layout import AGENTS, ATTEMPTS, STARTS, SUMMARY, log_path, start_folder

# What is read of one file, in bytes and in values: who shares the storage can write as much as it holds.
MAX_READ = 8 * 1024 * 1024  # of attempts.jsonl
MAX_JSON, MAX_VALUES = 32 * 1024 * 1024, 1_000_000  # the stacks of thousands of ranks; the ranks of as many hosts
TAIL_BYTES = 64 * 1024  # of all ranks' logs together
FIRST_BYTES, LEAST_BYTES = 16 * 1024, 2 * 1024  # of the log that matters most; of any other


class RunFolder:
    """The run folder; without one nothing is written, and earlier attempts are unknown."""

    def __init__(self, folder: Path | None, say: Callable[[str], None] = lambda text: None) -> None:
        self._folder, self._say = folder, say
        self._fault: str | None = None

    @property
    def gap(self) -> str | None:
        """Why earlier attempts are unknown; None when they are known."""
        return "the job has no run folder on storage that outlives its pods" if self._folder is None else self._fault

    def records(self, uid: str) -> list[Record]:
        """Every attempt of `uid` that ended, oldest first: in the last MAX_READ bytes, thousands of attempts.

        Lines that are no records, truncated ones among them, and those of another uid are left out.
        """
        if self._folder is None:
            return []
        try:
            lines = regular_files.read(self._folder / ATTEMPTS, MAX_READ, True, self._folder).splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            self._failed(error)
            return []
        records = []
        for line in lines:
            with contextlib.suppress(ValueError):
                records.append(checked.read(Record, checked.decoded(line)))
        return [record for record in records if record.uid == uid]

    def append(self, record: Record) -> None:
        """Adds an attempt to attempts.jsonl, on storage before this returns."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / ATTEMPTS, "a+b", opener=regular_files.opener) as file:
                line = json.dumps(record.to_json(), default=str).encode() + b"\n"
                file.write(line if _ends_a_line(file) else b"\n" + line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._failed(error)

    def amend(self, record: Record) -> None:
        """Replaces the last attempt of attempts.jsonl, of which more has become known."""
        if self._folder is None:
            return
        try:
            before = regular_files.read(self._folder / ATTEMPTS, MAX_READ, at_end=True).splitlines(keepends=True)[:-1]
        except OSError as error:
            return self._failed(error)
        self.replace(ATTEMPTS, b"".join(before) + json.dumps(record.to_json(), default=str).encode() + b"\n")

    def write(self, name: str, value: Mapping[str, Any] | Sequence[Any]) -> None:
        """Replaces a file by `value` as JSON, atomically: a reader finds the old content or the new."""
        self.replace(name, json.dumps(value, indent=2, default=str).encode() + b"\n")

    def replace(self, name: str, data: bytes) -> None:
        """Replaces a file, atomically."""
        if self._folder is None:
            return
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.write(path, data)
        except OSError as error:
            self._failed(error)

    def copy(self, name: str, to: str) -> None:
        """Replaces file `to` by a copy of `name`, atomically, where there is one."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self.replace(to, regular_files.read(self._folder / name, MAX_JSON))

    def starts(self) -> list[int]:
        """The starts whose record is in the folder."""
        if self._folder is None:
            return []
        names = (path.parent.name for path in self._folder.glob(f"{STARTS}/*/{SUMMARY}"))
        return sorted(int(name) for name in names if name.isdecimal())

    def summary(self, uid: str | None = None, name: str = SUMMARY) -> Summary | None:
        """The summary in a file, of run `uid` or of any; None where there is none, or another run's."""
        try:
            found = Summary.from_json(self.read(name))
        except ValueError:
            return None
        return found if uid is None or (found.of is not None and found.of.uid == uid) else None

    def row(self) -> Summary | None:
        """The summary of the run as a table shows it (`Summary.row_from_json`); None where there is none."""
        try:
            return Summary.row_from_json(self.read(SUMMARY))
        except ValueError:
            return None

    def read(self, name: str) -> dict[str, Any]:
        """What `write` put into a file; nothing where there is none, or one of more than MAX_JSON bytes."""
        if self._folder is None:
            return {}
        try:
            found = _json(f"{self._folder}/{name}", self._folder)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def tails(self, start: int, ranks: Sequence[int]) -> list[tuple[int, list[str]]]:
        """The last lines of the ranks' logs, the first rank's most; ranks beyond what fits in TAIL_BYTES are left out.

        A rank's log holds all attempts of a start: before the first line of this one it ends with the attempt before.
        """
        if self._folder is None:
            return []
        found, left = [], TAIL_BYTES
        for rank in ranks:
            size = max(LEAST_BYTES, TAIL_BYTES // len(ranks))
            size = max(size, FIRST_BYTES) if rank == ranks[0] else size
            if size > left:
                break
            if lines := _end(log_path(start_folder(self._folder, start), rank), size, self._folder):
                found.append((rank, lines))
                left -= size
        return found

    def _failed(self, error: OSError) -> None:
        if self._fault is None:
            self._fault = f"the run folder {self._folder} cannot be used: {error}"
            self._say(f"{self._fault}; its summary and attempts will be incomplete")


@dataclasses.dataclass(frozen=True)
class Listed:
    """Where the agent of a host answers."""

    host: Whole
    address: str
    pid: Whole


def agents(folder: Path) -> list[Listed]:
    """Where each host's agent answers, host 0's first; empty where agents.json does not say.

    Raises OSError when it cannot be read.
    """
    try:
        found: list[Listed] = checked.reader(Sequence[Listed])(_json(folder / AGENTS, folder))
    except ValueError:  # half written
        return []
    return found


def _json(path: Path | str, below: Path) -> Any:
    """The value in a file of a folder. Raises OSError, and ValueError where it is none, or larger than ours get."""
    data = regular_files.read(path, MAX_JSON + 1, below=below)
    if len(data) > MAX_JSON or (len(data) > MAX_VALUES and sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES):
        raise ValueError(f"{path} is too large")
    return wire.decoded(data)


def _ends_a_line(file: BinaryIO) -> bool:
    """Whether what is appended to a file begins a line; a writer that was killed may have left half of one."""
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _end(path: Path, size: int, below: Path) -> list[str]:
    """The last whole lines of a file of a folder, `size` bytes at most; none where it cannot be read."""
    try:
        found = regular_files.read(path, size + 1, True, below)
    except OSError:
        return []
    lines = found[-size:].decode(errors="replace").splitlines()
    return lines[1:] if len(found) > size else lines
