"""Which files of a folder are the user's code: what git tracks there, and what it would not ignore.

A folder outside of any repository is read the same way: its .gitignore files count there too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Container, Iterator
from pathlib import Path, PurePosixPath

from launcher.errors import UserError

# What programs leave beside code, ignored or not.
LEFT_OUT = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        ".venv",
        "venv",
        "node_modules",
        "__pycache__",
        ".ipynb_checkpoints",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".tox",
        ".DS_Store",
    }
)
RUN_MARKS = ("job.yaml", "summary.json")  # of a run folder
GIT_S = 60  # a listing takes milliseconds; a network disk may take longer


def files(folder: Path) -> dict[str, bool]:
    """Name below `folder` → whether git tracks it, sorted. What is no file any more is among them.

    Raises UserError when git cannot list the folder, or is needed and not installed.
    """
    found = dict(_without_git(folder) if shutil.which("git") is None else _listed(folder))
    return {name: found[name] for name in sorted(found) if not _is_left_out(name) and not _is_of_a_run(name, found)}


def _is_left_out(name: str) -> bool:
    return name.endswith(".pyc") or not LEFT_OUT.isdisjoint(PurePosixPath(name).parts)


def _is_of_a_run(name: str, found: Container[str]) -> bool:
    """Whether it lies in what `launcher run` left: every run would make other code of the same."""
    folders = list(PurePosixPath(name).parents)[:-1]
    return any(all(f"{folder}/{mark}" in found for mark in RUN_MARKS) for folder in folders)


def _without_git(folder: Path) -> Iterator[tuple[str, bool]]:
    for root, folders, names in os.walk(folder):
        here = Path(root).relative_to(folder)
        if ".gitignore" in names:
            message = f"{Path(root) / '.gitignore'} says what to leave out, and git, which reads it, is not installed."
            raise UserError(message, hint="install git.")
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        folders[:] = [name for name in folders if name not in LEFT_OUT and name not in links]
        for name in [*names, *links]:
            yield (here / name).as_posix(), False


def _listed(folder: Path) -> Iterator[tuple[str, bool]]:
    """Git's answer, with those of the repositories inside of it: submodules, and others that lie there."""
    if any((place / ".git").exists() for place in (folder, *folder.parents)):
        names = [(name, True) for name in _git(folder, "--cached")]
        names += [(name, False) for name in _git(folder, "--others", "--exclude-standard")]
    else:
        with tempfile.TemporaryDirectory() as bare:
            _run(folder, "init", "--quiet", "--bare", "--template=", bare)
            at = (f"--git-dir={bare}", f"--work-tree={folder}")
            names = [(name, False) for name in _git(folder, "--others", "--exclude-standard", at=at)]
    for name, is_tracked in names:
        inner = folder / name
        if not inner.is_dir() or inner.is_symlink():
            yield name, is_tracked
        elif (inner / ".git").exists():
            yield from ((f"{name.rstrip('/')}/{below}", known) for below, known in _listed(inner))


def _git(folder: Path, *options: str, at: tuple[str, ...] = ()) -> list[str]:
    return [os.fsdecode(name) for name in _run(folder, *at, "ls-files", "-z", *options).split(b"\0") if name]


def _run(folder: Path, *arguments: str) -> bytes:
    # Of an environment such as a hook's, which names another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, env=environ, capture_output=True, timeout=GIT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"git did not list {folder} in {GIT_S} s.", hint="run `git status` there.") from None
    if done.returncode != 0:
        raise UserError(f"git cannot list {folder}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
