"""Folders that a run cannot use: each a sentence, and nothing is made."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import paths


def check_rejection(folder: Path, **volumes: Path) -> str:
    """Return the message of the error."""
    with pytest.raises(UserError) as raised:
        paths.check_folders(folder, volumes)
    return str(raised.value)


@pytest.mark.parametrize("subject", ["run", "base", "volume"])
def test_folder_name_must_be_utf8(tmp_path: Path, subject: str) -> None:
    folders = {name: tmp_path / name for name in ("run", "base", "volume")}
    folders[subject] = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    with pytest.raises(UserError, match=r"caf\\xe9, has a name that is not UTF-8"):
        paths.check_utf8_names(folders["run"], folders["base"], {"data": folders["volume"]})
    assert list(tmp_path.iterdir()) == []


def test_utf8_name_is_not_blamed_for_another_locale(tmp_path: Path) -> None:
    """With LC_ALL=C and PYTHONUTF8=0, Python escapes the bytes of a name that is UTF-8."""
    folder = Path(str(tmp_path / "café").encode().decode("ascii", "surrogateescape"))
    with pytest.raises(UserError, match="and the run folder, .*/café, has other char") as raised:
        paths.check_utf8_names(folder, tmp_path, {})
    assert raised.value.hint == "set LC_ALL=C.UTF-8, or unset PYTHONUTF8 if it is 0."


def test_obstacle_of_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    assert "cannot be used: it is a file, not a folder." in check_rejection(tmp_path / "file")
    assert f"cannot be used: {tmp_path / 'file'} is a file, not a folder." in check_rejection(
        tmp_path / "file" / "deep" / "er"
    )
    assert "cannot be used: it is a link to nothing." in check_rejection(tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
    assert (tmp_path / "file").read_text() == "mine"


def test_unwritable_folder_is_reported_with_system_error() -> None:
    """Root may write anywhere but where the kernel has the files."""
    assert "The run folder /proc/run cannot be used: " in check_rejection(Path("/proc/run"))
    assert "The run folder /proc/self cannot be used: " in check_rejection(Path("/proc/self"))


def test_full_disk_is_reported_before_the_run(tmp_path: Path) -> None:
    entries = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, entries[1]))
    try:
        message = check_rejection(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, entries)
    assert "cannot be used: file too large.\n  hint: name another folder with --run-dir." in message
    assert list(tmp_path.iterdir()) == []


def test_volume_must_not_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = check_rejection(tmp_path / "run", data=tmp_path / "file")
    assert (
        f"--volume data={tmp_path / 'file'} cannot be used: it is a file, not a folder." in message
    )
    assert not (tmp_path / "run").exists()


def test_usable_folder_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    paths.check_folders(tmp_path, {"new": tmp_path / "data"})
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
