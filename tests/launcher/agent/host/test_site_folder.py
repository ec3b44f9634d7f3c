"""What the site hook does to a Python below the agent before its program runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.host.folders import SiteFolder

COLLECTS = "import gc; print(gc.isenabled())"
IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COLLECTS!r}])"


# Frozen modules of a package that is a file, and files; each by its own import statement, and an
# attribute of it.
USES = """
import importlib
import importlib.machinery
import importlib.util
import importlib.abc
import collections.abc
import os.path
import logging.handlers
print(importlib.machinery.PathFinder, importlib.util.find_spec("json").name)
print(importlib.abc.Loader, os.path.sep)
"""


@pytest.fixture(scope="module")
def plain_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that imports next to nothing when it starts."""
    folder = tmp_path_factory.mktemp("plain")
    venv.create(folder, with_pip=False)
    return str(folder / "bin" / "python")


@pytest.fixture
def folder() -> Iterator[SiteFolder]:
    created = SiteFolder()
    yield created
    created.close()


@pytest.mark.parametrize(
    ("program", "environ", "collects"),
    [
        (COLLECTS, {contract.TRAIN_SPEC: "{}"}, False),
        (IN_A_CHILD, {contract.TRAIN_SPEC: "{}"}, True),
        (COLLECTS, {}, True),
    ],
    ids=["the trainer", "a process that the trainer starts", "a user's program"],
)
def test_garbage_collection_is_off_during_imports_of_the_trainer(
    folder: SiteFolder, program: str, environ: dict[str, str], collects: bool
) -> None:
    reports, end = os.pipe()
    environ = {**os.environ, "PYTHONPATH": folder.site, contract.PROGRESS_FD: str(end), **environ}
    command = [sys.executable, "-c", program]
    printed = subprocess.run(
        command, env=environ, pass_fds=[end], capture_output=True, text=True, check=True
    )
    os.close(end)
    os.close(reports)
    assert printed.stdout.strip() == str(collects)


@pytest.mark.parametrize("removed", ["", "site", "site/sitecustomize.py"])
def test_files_that_were_removed_are_restored(folder: SiteFolder, removed: str) -> None:
    top = Path(folder.site).parent

    def list_files() -> set[Path]:
        return {path for path in Path(folder.site).rglob("*") if path.is_file()}

    previous, path = list_files(), top / removed
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.restore_files()
    assert list_files() == previous and top.stat().st_mode & 0o777 == 0o700


def test_folder_of_another_user_is_not_used(
    folder: SiteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="is not a folder of this user"):
        folder.restore_files()


def test_site_hook_leaves_no_partial_packages(folder: SiteFolder, plain_python: str) -> None:
    environ = {**os.environ, "PYTHONPATH": folder.site}
    alone, below = (
        subprocess.run([plain_python, "-c", USES], env=env, capture_output=True, text=True)
        for env in (os.environ, environ)
    )
    assert below.stderr == "" and below.stdout == alone.stdout != ""
