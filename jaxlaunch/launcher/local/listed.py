"""The status of each run below a folder, for a table of them. What runs that ended are is kept in the user's cache
directory, so that of ten thousand only those are read that have changed.

A kept row counts while nobody holds the run's lock and the two files that it was read from are the same: that the lock
is free is asked each time, and so are number, size and times of the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch import regular_files, user_cache
from jaxlaunch.launcher.jobs.status import job_status
from jaxlaunch.launcher.jobs.status.job_status import JobStatus, Restarts, State
from jaxlaunch.launcher.local import found, status
from jaxlaunch.launcher.local.divided import divided
from jaxlaunch.launcher.local.lock import Holder
from jaxlaunch.records import summary
from jaxlaunch.records.summary import FILE
from jaxlaunch.runs.starts import JOB

MANY = 500  # runs; fewer are read as quickly
DIVIDED = 500  # runs to be read; fewer are read before another process has begun
SETTLED_NS = 2_000_000_000  # since a file changed; a change within one tick of the storage's clock leaves its times
OLD_S = 30 * 86400.0  # after which what is kept of a folder is deleted
_MOST = 1 << 28  # bytes of what is kept of a folder

# What is not kept of a run that ended: fields that are the same in all, and those that are None.
_SAME: Mapping[str, Any] = {"namespace": "", "is_ours": True, "missing": (), "spares": (), "nodes": ()}
_NONE: Mapping[str, Any] = {field.name: None for field in dataclasses.fields(JobStatus)}
_OWN = ("name", "folder")

Stamp = list[int]  # what changes when a file does
Row = tuple[str, Stamp, Stamp, dict[str, Any]]  # path of the job, stamps of summary and job, fields of the status


def statuses(folder: Path) -> list[JobStatus]:
    """The status of every run below `folder` and in its sweeps, by name; those that this user may not read are left
    out."""
    with _without_collections():
        return _statuses(folder, list(found.folders_in(folder)))


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Without a search for garbage among what is kept: of ten thousand runs it takes a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _statuses(folder: Path, paths: Sequence[Path]) -> list[JobStatus]:
    before = _kept(folder) if len(paths) >= MANY else {}
    known = [before.get(os.path.abspath(path)) for path in paths]
    each = list(zip(paths, known, strict=True))
    is_divided = known.count(None) >= DIVIDED and threading.active_count() == 1  # a copy of threads may stand still
    looked = divided(_look_at_all, each) if is_divided else _look_at_all(each)
    after = {os.path.abspath(path): row for path, (_, row) in zip(paths, looked, strict=True) if row is not None}
    if len(paths) >= MANY and any(row is not one for (_, row), one in zip(looked, known, strict=True)):
        _keep(folder, after)
    both = zip(paths, looked, strict=True)
    listed = (one if row is None else _status(path, row[3]) for path, (one, row) in both)
    return [one for one in listed if one is not None]


def _look_at_all(runs: Sequence[tuple[Path, Row | None]]) -> list[tuple[JobStatus | None, Row | None]]:
    """Of each run, with what is kept of it: its status or, of one that ended, the row that has it; neither where this
    user may not read it."""
    return [_look_at(path, row) for path, row in runs]


def _look_at(path: Path, row: Row | None) -> tuple[JobStatus | None, Row | None]:
    try:
        holder = found.holder(path)
        if row is None or holder is not None or not _is_the_same(path, row):
            return _read(path, holder)
    except OSError:
        return None, None
    return None, row


def _is_the_same(path: Path, row: Row) -> bool:
    """Whether the files that a row was read from are as they were."""
    job, of_summary, of_job, _ = row
    return of_summary == _stamp(f"{path}/{FILE}") and of_job == _stamp(f"{path}/{job}")


def _read(path: Path, holder: Holder | None) -> tuple[JobStatus | None, Row | None]:
    """The row of a run, or its status where nothing is kept: while somebody runs in its folder, or of version 0.1."""
    of_summary = _stamp(f"{path}/{FILE}")  # before it is read: a change since is seen the next time
    run = found.row(path, holder)
    job = f"{run.start_folder}/{JOB}"
    of_job = _stamp(job)
    one = status.status_of(run, status.live(run))
    is_kept = holder is None and run.start_folder != path and _is_settled(of_summary) and _is_settled(of_job)
    return (None, (job.removeprefix(f"{path}/"), of_summary, of_job, _fields(one))) if is_kept else (one, None)


def _stamp(path: str) -> Stamp:
    """Of a file: its device and number, size and times; empty where there is none."""
    try:
        of = os.lstat(path)
    except OSError:
        return []
    return [of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns]


def _is_settled(stamp: Stamp) -> bool:
    return bool(stamp) and max(stamp[-2:]) < time.time_ns() - SETTLED_NS


def _fields(one: JobStatus) -> dict[str, Any]:
    """The fields that are not the same in every run that ended, and the moment that it began at; None is left out."""
    fields = vars(one) | {"restarts": vars(one.restarts), "age_s": time.time() - one.age_s}
    return {
        name: value for name, value in fields.items() if value is not None and name not in _SAME and name not in _OWN
    }


def _status(path: Path, fields: Mapping[str, Any]) -> JobStatus:
    of_run = {
        "name": path.name,
        "folder": str(path),
        "state": State(fields["state"]),
        "restarts": Restarts(**fields["restarts"]),
        "age_s": max(0.0, time.time() - fields["age_s"]),
    }
    return JobStatus(**{**_NONE, **_SAME, **fields, **of_run})


def _home(folder: Path) -> Path:
    return user_cache.home("lists") / hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:32]


def _kept(folder: Path) -> dict[str, Row]:
    """What is kept of the runs in a folder, by their paths; nothing of what other code or another user wrote."""
    try:
        path = _home(folder)
        seal, _, text = regular_files.read(path, _MOST).partition(b"\n")
        if path.stat().st_uid != os.geteuid() or seal != _seal(text):
            return {}
        kept: dict[str, Row] = json.loads(text)
    except (OSError, RuntimeError):  # the second where the user has no home
        return {}
    return kept


def _keep(folder: Path, rows: Mapping[str, Row]) -> None:
    """Keeps the rows of a folder, and deletes what is kept of folders that nobody has listed for OLD_S."""
    with contextlib.suppress(OSError, RuntimeError):
        path, text = _home(folder), json.dumps(rows).encode()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_seal(text) + b"\n" + text)
        os.replace(draft, path)
        for other in path.parent.iterdir():
            if other.stat().st_mtime < time.time() - OLD_S:
                other.unlink()


def _seal(text: bytes) -> bytes:
    """A digest of what is kept and of the code that it comes from."""
    digest = hashlib.sha256(text)
    for module in (__file__, summary.__file__, status.__file__, job_status.__file__):
        digest.update(Path(module).read_bytes())
    return digest.hexdigest().encode()
