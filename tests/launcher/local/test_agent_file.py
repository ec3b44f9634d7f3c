"""The packed agent in the user's cache, or in the run folder without a cache."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxlaunch.launcher.local import agents


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxlaunch" / "agent"


def test_concurrent_runs_share_one_packed_file(cache: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        files = set(pool.map(agents.pack_agent, [tmp_path / "run"] * 4))
    (file,) = files
    assert list(cache.iterdir()) == [file] and not (tmp_path / "run").exists()
    modified_at = file.stat()
    assert agents.pack_agent(tmp_path / "run") == file and file.stat().st_ino == modified_at.st_ino


def test_files_unused_for_a_day_are_removed_but_the_newest(cache: Path, tmp_path: Path) -> None:
    cache.mkdir(parents=True)
    names = [f"agent-{number}.pyz" for number in range(6)] + ["agent-6.pyz.0123456789abcdef.tmp"]
    for days, name in enumerate([*reversed(names), "agent-of-today.pyz", "mine.txt"]):
        (cache / name).touch()
        os.utime(
            cache / name,
            (then := time.time() - 86_400 * (0.5 if "of" in name else 10 - days), then),
        )
    file = agents.pack_agent(tmp_path)
    remaining = {path.name for path in cache.iterdir()}
    assert remaining == {
        file.name,
        "agent-of-today.pyz",
        "agent-0.pyz",
        "agent-1.pyz",
        "agent-2.pyz",
        "mine.txt",
    }


def test_packed_file_is_not_compiled_again(cache: Path, tmp_path: Path) -> None:
    """The same file, with sources that cannot be compiled."""
    broken = tmp_path / "agent.pyz"
    with (
        zipfile.ZipFile(agents.pack_agent(tmp_path)) as file,
        zipfile.ZipFile(broken, "w") as archive,
    ):
        for name in file.namelist():
            archive.writestr(name, file.read(name) if name.endswith(".pyc") else b"no Python")
    process = subprocess.run([sys.executable, "-I", broken], env={}, capture_output=True, text=True)
    assert process.returncode == 64 and process.stderr.startswith("agent: JAXLAUNCH_")


@pytest.mark.parametrize("home", ["/proc", "/dev/null"], ids=["read-only", "a file"])
def test_file_is_in_run_folder_without_a_cache(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert agents.pack_agent(tmp_path).parent == tmp_path


def test_file_writable_by_others_is_replaced(cache: Path, tmp_path: Path) -> None:
    file = agents.pack_agent(tmp_path)
    file.write_text("raise SystemExit('of somebody else')")
    file.chmod(0o666)
    assert agents.pack_agent(tmp_path) == file and zipfile.is_zipfile(file)
