"""The removal of temporary folders of agents that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jaxlaunch.launcher.agent.host import folders

MAKES = """
import sys, time
from jaxlaunch.launcher.agent.host import folders
made, _ = folders.make_folder("run-")
open(made + "/file", "w").close()
print(made, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_folder_of_a_killed_process_is_removed(place: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKES], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        folders.sweep_folders()
        assert (folder / "file").exists() and folder.parent == place
        process.kill()
    folders.sweep_folders()
    assert list(place.iterdir()) == []


def test_unlocked_folder_is_removed_after_a_week_unless_in_use(place: Path) -> None:
    created = {
        name: place / f"jaxlaunch-{name}" for name in ("old", "told", "new", "profiles-x", "killed")
    }
    for name, folder in created.items():
        (folder / ("step-1" if name == "profiles-x" else "site")).mkdir(parents=True)
    (created["killed"] / "site").rmdir()
    for name in created.keys() - {"new"}:
        os.utime(created[name], (0, 0))
    environ = {"PYTHONPATH": f"{created['told']}/site"}
    with subprocess.Popen(["/bin/cat"], env=environ, stdin=subprocess.PIPE):
        folders.sweep_folders()
    assert set(place.iterdir()) == {created["told"], created["new"], created["profiles-x"]}


def test_folders_that_may_be_in_use_stay(place: Path) -> None:
    mine, lock = folders.make_folder()
    others = place / "elsewhere"
    (others / "inner").mkdir(parents=True)
    (others / folders.LOCK_FILE).touch()
    (place / "jaxlaunch-link").symlink_to(others)
    (place / "jaxlaunch-file").touch()
    (place / "jaxlaunch-of-another-version").mkdir()
    (place / "jaxlaunch-fifo").mkdir()
    os.mkfifo(place / "jaxlaunch-fifo" / folders.LOCK_FILE)
    previous = sorted(place.rglob("*"))
    folders.sweep_folders()
    assert sorted(place.rglob("*")) == previous and Path(mine).is_dir()
    os.close(lock)


def test_concurrent_sweeps_do_not_fail(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.listdir
    monkeypatch.setattr(
        os, "listdir", lambda folder: [*listed(folder), "jaxlaunch-removed-by-another"]
    )
    folders.sweep_folders()
