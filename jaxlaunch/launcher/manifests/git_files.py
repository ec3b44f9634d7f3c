"""Which files of a folder are the user's code: what git tracks there, and what it would not ignore.

A folder outside of any repository is read the same way: its .gitignore files count there too. The folder may have come
from a stranger, with settings of git that run commands and an index that names anything: nothing of it is run, and no
name leads out of it. A repository inside of another is not asked at all; its index and .gitignore files are read.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from jaxlaunch.launcher.errors import UserError

# What programs leave beside code, ignored or not.
LEFT_OUT = {".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".ipynb_checkpoints", ".mypy_cache"}
LEFT_OUT |= {".pytest_cache", ".ruff_cache", ".tox", ".DS_Store"}
RUN_MARKS = ("job.yaml", "summary.json")  # of a run folder
GIT_S = 60  # a listing takes milliseconds; a network disk may take longer

# The settings of a repository that have a listing run a command, and the variables that keep it from fetching: of a
# sparse index, git asks the remote for the folders that a partial clone lacks, with whatever command that one names.
_NO_COMMANDS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
_NO_FETCHING = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
_LONGEST_POINTER = 4096  # bytes of a .git that is a file: a path


def files(folder: Path) -> list[str]:
    """Names below `folder`, sorted. What is not a file any more is among them.

    Raises UserError when git cannot list the folder, is needed and not installed, or names what is outside of it.
    """
    names = set(_without_git(folder) if shutil.which("git") is None else _listed(folder))

    def is_code(name: str) -> bool:
        path = PurePosixPath(name)
        # A run folder of `launcher run` is left out: otherwise each run would change the code.
        is_of_run = any(all(f"{parent}/{mark}" in names for mark in RUN_MARKS) for parent in [*path.parents][:-1])
        return not name.endswith(".pyc") and LEFT_OUT.isdisjoint(path.parts) and not is_of_run

    return list(filter(is_code, sorted(names)))


def _without_git(folder: Path) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        here = Path(root).relative_to(folder)
        if ".gitignore" in names:
            message = f"{Path(root) / '.gitignore'} lists what to leave out, and git, which reads it, is not installed."
            raise UserError(message, hint="install git.")
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        folders[:] = [name for name in folders if name not in LEFT_OUT and name not in links]
        for name in [*names, *links]:
            yield (here / name).as_posix()


def _listed(folder: Path) -> Iterator[str]:
    """The files of the folder and of the repositories inside of it: submodules and others."""
    if any((place / ".git").exists() for place in (folder, *folder.parents)):
        names = [*_git(folder, "--cached"), *_git(folder, "--others", "--exclude-standard")]
    else:
        names = _unasked(folder)
    yield from _with_repositories(folder, names)


def _with_repositories(folder: Path, names: list[str]) -> Iterator[str]:
    """The names, with the files of a repository in place of its folder.

    A link inside of the folder travels as itself, without the names behind it.
    """
    root = folder.resolve()
    ways = {way: (folder / way).resolve() for way in {posixpath.dirname(name.rstrip("/")) for name in names}}
    for name in names:
        way = posixpath.dirname(name.rstrip("/"))
        if name.startswith("/") or ".." in name.split("/") or not ways[way].is_relative_to(root):
            message = (
                f"git's index names {name!r}, which is outside of {folder}, and only that folder's files are shipped."
            )
            raise UserError(message, hint="`git rm --cached` takes the name out. Did you make this index yourself?")
        inner = folder / name
        if ways[way] != root / way:
            continue
        if not inner.is_dir() or inner.is_symlink():
            yield name
        elif (inner / ".git").exists():
            yield from (f"{name.rstrip('/')}/{below}" for below in _with_repositories(inner, _unasked(inner)))


def _unasked(folder: Path) -> list[str]:
    """What git lists of a folder for a repository of ours, so that none of the folder's own settings is read."""
    with tempfile.TemporaryDirectory() as bare:
        _run(folder, "init", "--quiet", "--bare", "--template=", bare)
        at = (f"--git-dir={bare}", f"--work-tree={folder}")
        options = ("--cached", "--others", "--exclude-standard")
        return _git(folder, *options, at=at, GIT_INDEX_FILE=str(_index(folder)))


def _index(folder: Path) -> Path:
    """Where the index of a repository is, if the folder is one: in .git, or in the folder that this names."""
    place = folder / ".git"
    if place.is_file():
        with place.open("rb") as file:
            pointer = file.read(_LONGEST_POINTER)
        place = folder / os.fsdecode(pointer.removeprefix(b"gitdir:").strip().replace(b"\0", b""))
    return (place / "index").absolute()


def _git(folder: Path, *options: str, at: tuple[str, ...] = (), **variables: str) -> list[str]:
    listed = _run(folder, *at, "ls-files", "-z", *options, **variables)
    return [os.fsdecode(name) for name in listed.split(b"\0") if name]


def _run(folder: Path, *arguments: str, **variables: str) -> bytes:
    # Of an environment such as a hook's, which names another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= _NO_FETCHING | variables
    command = ["git", *_NO_COMMANDS, *arguments]
    try:
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, timeout=GIT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"git did not list {folder} in {GIT_S} s.", hint="run `git status` there.") from None
    if done.returncode != 0:
        raise UserError(f"git cannot list {folder}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
