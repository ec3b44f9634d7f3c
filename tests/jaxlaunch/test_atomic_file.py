"""A file is replaced as a whole, despite other writers and loss of power."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from jaxlaunch import atomic_file
from jaxlaunch.records.summary import Summary
from jaxlaunch.runs import layout
from jaxlaunch.runs.layout import SUMMARY
from jaxlaunch.runs.run_folder import RunFolder
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.tracking import __main__ as tracking


def test_writers_with_equal_pids_keep_content_whole(tmp_path: Path) -> None:
    """Two threads act as the agents of two pods with shared storage and equal process ids."""
    failures: list[str] = []

    def write(writer: int) -> None:
        folder = RunFolder(tmp_path, failures.append)
        for step in range(100):
            notes = [f"{writer}"] * 500
            folder.write_json(
                SUMMARY, Summary(None, step=step, seconds={}, restarts={}, notes=notes).to_json()
            )

    RunFolder(tmp_path, failures.append).write_json(
        SUMMARY, Summary(None, step=0, seconds={}, restarts={}, notes=["first"] * 500).to_json()
    )
    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(2)]
    for thread in writers:
        thread.start()
    while any(thread.is_alive() for thread in writers):
        summary = RunFolder(tmp_path, failures.append).read_summary()
        assert summary is not None and len(summary.notes) == 500 and len(set(summary.notes)) == 1
    for thread in writers:
        thread.join()
    assert failures == []
    assert [path.name for path in tmp_path.iterdir()] == [SUMMARY]
    summary = RunFolder(tmp_path, failures.append).read_summary()
    assert summary is not None and summary.step == 99


@pytest.mark.parametrize("failing_call", ["write", "fsync", "replace"])
def test_failed_write_keeps_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: str
) -> None:
    file = tmp_path / "summary.json"
    file.write_bytes(b"old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if failing_call == "write":
        monkeypatch.setattr(Path, "write_bytes", lambda path, data: (path.touch(), fail()))
    else:
        owner = os if failing_call == "fsync" else Path
        monkeypatch.setattr(owner, failing_call, fail)

    with pytest.raises(OSError, match="No space left"):
        atomic_file.write_file(file, b"new")

    assert [path.name for path in tmp_path.iterdir()] == [
        "summary.json"
    ] and file.read_bytes() == b"old"


def test_data_is_synced_before_rename_and_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(
            "sync of the folder" if path == tmp_path else f"sync of {path.read_bytes().decode()}"
        )
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        calls.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)

    atomic_file.write_file(tmp_path / "summary.json", b"all of it")

    assert calls == ["sync of all of it", "rename", "sync of the folder"]


def test_storage_without_folder_sync_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def sync_files_only(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_files_only)

    atomic_file.write_file(tmp_path / "summary.json", b"new")

    assert (tmp_path / "summary.json").read_bytes() == b"new"


def test_frequent_writes_are_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync can take seconds, for which a tracker and the training would wait."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    state = tracking._TrackerState(str(tmp_path), "wandb", "uid", "vision")
    sync_count = len(synced)
    for step in range(100):
        state.record_step("metrics", step)
    assert json.loads((tmp_path / layout.TRACKER).read_text())["sent"] == {"metrics": 99}
    for block in range(100):
        assert files._write_copy(tmp_path / "blocks" / str(block), [b"data"])
    assert len(synced) == sync_count

    state.sync_file()
    state.sync_file()
    assert len(synced) == sync_count + 2  # the file and its folder, once
