"""Packing of the user's code into a reproducible archive: equal files produce equal bytes.

The archive contains the files that git tracks and the untracked files that it does not ignore, also
in a folder outside of a repository. The folder is not trusted: a repository may configure git to
run commands, and its index may name files anywhere. Git therefore runs without hooks, fsmonitor and
fetching, and names outside of the folder are refused. For a repository inside another, git runs
with an empty configuration and reads only the inner index and .gitignore files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import io
import os
import posixpath
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import credentials
from jaxlaunch.launcher.wording import format_count
from jaxlaunch.runs import layout

# A message lists at most this many files.
SHOWN_FILES = 5
# Source code compresses by less than this factor. A folder that exceeds the limit by it is refused
# without packing it.
_MAX_COMPRESSION_FACTOR = 64


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file or a symbolic link of the folder. The content of a link is its target."""

    name: str
    content: bytes
    is_link: bool = False
    is_executable: bool = False


def pack_folder(
    folder: Path,
    limit: int,
    include: Collection[str] = (),
    extra_files: Mapping[str, bytes] | None = None,
) -> bytes:
    """Return a gzipped tar of the folder's code, of at most `limit` bytes.

    Args:
        folder: The folder.
        limit: The largest size of the archive.
        include: Files and folders that are packed although they look like credentials.
        extra_files: Contents of further files by their names, which replace those of the folder.

    Raises:
        UserError: If the folder cannot be packed.
    """
    extra_files = extra_files or {}
    if not folder.is_dir():
        raise UserError(f"code: {folder} is not a folder.", hint="it is relative to the job file.")
    sizes = {}
    for name in list_files(folder):
        # Deleted files that are still in git's index are left out.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = (folder / name).lstat()
            if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                sizes[name] = status.st_size
    if not sizes:
        raise UserError(f"code: {folder} holds no file that git does not ignore.")
    if (total := sum(sizes.values())) > _MAX_COMPRESSION_FACTOR * limit:
        raise _size_error(f"holds {_format_size(total)}", sizes, limit)
    entries = [_read_entry(folder, name) for name in sizes if name not in extra_files]
    # They are not files of the user, so they need no check for credentials.
    extra_entries = [Entry(name, content) for name, content in extra_files.items()]
    sizes |= {name: len(content) for name, content in extra_files.items()}
    archive = _write_archive([*entries, *extra_entries])
    if len(archive) > limit:
        raise _size_error(f"packs to {_format_size(len(archive))}", sizes, limit)
    _refuse_credentials(entries, include)
    return archive


def describe_archive(archive: bytes) -> str:
    """Return a sentence with the number, the size and the largest files of an archive."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        sizes = {member.name: member.size for member in tar}
    total, packed = _format_size(sum(sizes.values())), _format_size(len(archive))
    text = f"{format_count(len(sizes), 'file')} of {total}, packed to {packed}"
    return f"{text}; the largest: {_list_largest(sizes)}"


def _refuse_credentials(entries: Sequence[Entry], include: Collection[str]) -> None:
    included = {posixpath.normpath(name) for name in include}
    names = [entry.name for entry in entries]
    unknown = [name for name in included if not any(_is_within(inner, name) for inner in names)]
    if unknown:
        message = f"code.include: {', '.join(sorted(unknown))}: no such file or folder is shipped."
        hint = "names are relative to code.folder, and files that git ignores are never shipped."
        raise UserError(message, hint)
    reasons = {}
    for entry in entries:
        if entry.is_link or any(_is_within(entry.name, name) for name in included):
            continue
        if credentials.is_credential_file(entry.name):
            reasons[entry.name] = "by its name"
        elif (sign := credentials.find_credential(entry.content)) is not None:
            reasons[entry.name] = f"line {sign.line}: {sign.kind}"
    if not reasons:
        return
    first, count = next(iter(reasons)), len(reasons)
    shown_reasons = list(reasons.items())[:SHOWN_FILES]
    lines = "\n".join(f"  {name} ({reason})" for name, reason in shown_reasons)
    if count > SHOWN_FILES:
        lines += f"\n  and {count - SHOWN_FILES} more"
    looks = f"{format_count(count, 'file')} to be shipped {'looks' if count == 1 else 'look'}"
    raise UserError(
        f"code: {looks} like credentials, and anyone who may read ConfigMaps in the namespace "
        f"could read them:\n{lines}",
        f"leave them out in .gitignore (`git rm --cached {first}` if git tracks it) and mount "
        "a Secret: volumes: [{secret: …, path: …}]. To ship one all the same: code: {folder: ., "
        f"include: {{{first}: the reason why}}}}.",
    )


def _is_within(name: str, folder: str) -> bool:
    return folder in (".", name) or name.startswith(f"{folder}/")


def _read_entry(folder: Path, name: str) -> Entry:
    path = folder / name
    try:
        if not path.is_symlink():
            is_executable = bool(path.stat().st_mode & stat.S_IXUSR)
            return Entry(name, path.read_bytes(), is_executable=is_executable)
        target = os.readlink(path)
    except OSError as error:
        message = f"code: {path} cannot be read: {error.strerror}."
        raise UserError(message, "leave it out in .gitignore.") from None
    resolved = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if posixpath.isabs(target) or resolved.split("/")[0] == "..":
        message = f"code: {name} is a link to {target}, outside of the folder, which no pod has."
        hint = "leave it out in .gitignore, and mount a volume for what it points to."
        raise UserError(message, hint)
    return Entry(name, os.fsencode(target), is_link=True)


def _write_archive(entries: Sequence[Entry]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", 9, buffer, mtime=0) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8") as tar,
    ):
        for entry in entries:
            # Without time and owner, so that the archive is reproducible.
            header = tarfile.TarInfo(entry.name)
            content = None
            header.mode = 0o755 if entry.is_executable else 0o644
            if entry.is_link:
                header.type, header.linkname = tarfile.SYMTYPE, os.fsdecode(entry.content)
            else:
                header.size, content = len(entry.content), io.BytesIO(entry.content)
            tar.addfile(header, content)
    return buffer.getvalue()


def _size_error(problem: str, sizes: dict[str, int], limit: int) -> UserError:
    message = (
        f"code: the folder {problem}, and at most {_format_size(limit)} fit into its ConfigMap."
    )
    hint = "leave out in .gitignore what no pod needs; data belongs on a volume."
    return UserError(f"{message} The largest files: {_list_largest(sizes)}.", hint)


def _list_largest(sizes: dict[str, int]) -> str:
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:SHOWN_FILES]
    return ", ".join(f"{name} ({_format_size(sizes[name])})" for name in largest)


def _format_size(size: int) -> str:
    if size < 1024:
        return f"{size} bytes"
    return f"{size / 1024:.0f} KiB" if size < 1024 * 1024 else f"{size / 1024 / 1024:.1f} MiB"


# Folders and files that tools create next to code. They are left out even if git tracks them.
EXCLUDED_NAMES = {
    *(".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".ipynb_checkpoints"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".DS_Store"),
}
# A listing takes milliseconds, and longer on a network disk.
GIT_TIMEOUT_S = 60

# These settings of a repository could make a listing run commands. With a sparse index, git would
# also fetch missing folders of a partial clone, with a command that the remote names.
_NO_COMMANDS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
_NO_FETCHING = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
# A .git file contains only the path of the repository.
_MAX_POINTER_BYTES = 4096


def list_files(folder: Path) -> list[str]:
    """Return the sorted names below `folder`, including deleted files that git still tracks.

    Raises UserError if git cannot list the folder, is required but not installed, or names files
    outside of it.
    """
    list_names = _walk_without_git if shutil.which("git") is None else _list_with_git
    names = set(list_names(folder))
    # Run folders of `launcher run` are left out: otherwise each run would change the archive.
    suffix = f"/{layout.JOB}"
    run_folders = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    run_folders = [run for run in run_folders if f"{run}/{layout.SUMMARY}" in names]

    def is_code(name: str) -> bool:
        if name.endswith(".pyc") or not EXCLUDED_NAMES.isdisjoint(name.split("/")):
            return False
        return not any(_is_within(name, run) for run in run_folders)

    return list(filter(is_code, sorted(names)))


def _walk_without_git(folder: Path) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        if ".gitignore" in names:
            message = f"{root}/.gitignore lists what to leave out, "
            message += "and git, which reads it, is not installed."
            raise UserError(message, "install git.")
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        folders[:] = [name for name in folders if name not in EXCLUDED_NAMES and name not in links]
        for name in [*names, *links]:
            yield (Path(root).relative_to(folder) / name).as_posix()


def _list_with_git(folder: Path) -> Iterator[str]:
    if any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        names = _list_git_files(folder, "--cached")
        names += _list_git_files(folder, "--others", "--exclude-standard")
    else:
        names = _list_isolated(folder)
    yield from _expand_repositories(folder, names)


def _expand_repositories(folder: Path, names: list[str]) -> Iterator[str]:
    """Yield the names, with the files of inner repositories in place of their folders."""
    root, resolve = folder.resolve(), functools.cache(Path.resolve)
    for name in names:
        parent = posixpath.dirname(name.rstrip("/"))
        resolved_parent = resolve(folder / parent)
        is_path_inside = not name.startswith("/") and ".." not in name.split("/")
        if not is_path_inside or not resolved_parent.is_relative_to(root):
            message = f"git's index names {name!r}, which is outside of {folder}, "
            message += "and only that folder's files are shipped."
            hint = "`git rm --cached` takes the name out. Did you make this index yourself?"
            raise UserError(message, hint)
        inner = folder / name
        # Files behind a link to a folder are not shipped.
        if resolved_parent != root / parent:
            continue
        if not inner.is_dir() or inner.is_symlink():
            yield name
        elif (inner / ".git").exists():
            for inner_name in _expand_repositories(inner, _list_isolated(inner)):
                yield f"{name.rstrip('/')}/{inner_name}"


def _list_isolated(folder: Path) -> list[str]:
    """List a folder with a temporary repository, which ignores the folder's git settings."""
    with tempfile.TemporaryDirectory() as repository:
        _run_git(folder, "init", "--quiet", "--bare", "--template=", repository)
        git_options = (f"--git-dir={repository}", f"--work-tree={folder}")
        options = ("--cached", "--others", "--exclude-standard")
        index = str(_index_path(folder))
        return _list_git_files(folder, *options, git_options=git_options, GIT_INDEX_FILE=index)


def _index_path(folder: Path) -> Path:
    """Return the path of a repository's index, following a .git file."""
    path = folder / ".git"
    if path.is_file():
        with path.open("rb") as file:
            pointer = file.read(_MAX_POINTER_BYTES)
        path = folder / os.fsdecode(pointer.removeprefix(b"gitdir:").strip().replace(b"\0", b""))
    return (path / "index").absolute()


def _list_git_files(
    folder: Path, *options: str, git_options: tuple[str, ...] = (), **variables: str
) -> list[str]:
    output = _run_git(folder, *git_options, "ls-files", "-z", *options, **variables)
    return [os.fsdecode(name) for name in output.split(b"\0") if name]


def _run_git(folder: Path, *arguments: str, **variables: str) -> bytes:
    # In a git hook, variables such as GIT_DIR name another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= _NO_FETCHING | variables
    command = ["git", *_NO_COMMANDS, *arguments]
    try:
        result = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, timeout=GIT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        message = f"git did not list {folder} in {GIT_TIMEOUT_S} s."
        raise UserError(message, "run `git status` there.") from None
    if result.returncode != 0:
        reason = result.stderr.decode(errors="replace").strip()
        raise UserError(f"git cannot list {folder}: {reason}")
    return result.stdout
