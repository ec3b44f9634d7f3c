"""A folder as one archive: equal files make equal bytes, whenever, wherever and by whom it is packed."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path

from launcher import worktree
from launcher.errors import UserError

NAMED = 5  # of the largest files
HOPELESS = 64  # times the limit: no source packs that well, and nobody wants to wait for the proof

# A file that git does not track and that says so by its name or form. What git tracks is shared already.
_SECRET_NAMES = {".env", ".netrc", ".pypirc", ".git-credentials"}
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file or a link of the folder."""

    name: str
    content: bytes  # of a link: where it leads
    is_link: bool = False
    is_executable: bool = False

    def header(self) -> tarfile.TarInfo:
        """Nothing of the machine, the person or the day."""
        header = tarfile.TarInfo(self.name)
        header.mode = 0o755 if self.is_executable else 0o644
        if self.is_link:
            header.type, header.linkname = tarfile.SYMTYPE, os.fsdecode(self.content)
        else:
            header.size = len(self.content)
        return header


def pack(folder: Path, limit: int) -> bytes:
    """A gzipped tar of the folder's code, of `limit` bytes at most. Raises UserError, which says what is in the way."""
    if not folder.is_dir():
        raise UserError(f"code: {folder} is not a folder.", hint="it is relative to the job file.")
    found = worktree.files(folder)
    sizes = {name: size for name in found if (size := _size(folder / name)) is not None}
    if not sizes:
        raise UserError(f"code: {folder} holds no file that git does not ignore.")
    if (total := sum(sizes.values())) > HOPELESS * limit:
        raise _too_large(f"holds {_amount(total)}", sizes, limit)
    entries = [entry for name in sizes if (entry := _read(folder, name, found[name])) is not None]
    packed = _packed(entries)
    if len(packed) > limit:
        raise _too_large(f"packs to {_amount(len(packed))}", sizes, limit)
    return packed


def _size(path: Path) -> int | None:
    """In bytes; None for what is no file and no link, or was deleted and git not told."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode) else None


def _read(folder: Path, name: str, is_tracked: bool) -> Entry | None:
    path = folder / name
    try:
        if path.is_symlink():
            return Entry(name, _target(name, os.readlink(path)), is_link=True)
        content, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise UserError(f"code: {path} cannot be read: {error.strerror}.", hint="leave it out in .gitignore.") from None
    if not is_tracked and (path.name in _SECRET_NAMES or _PRIVATE_KEY.search(content)):
        message = f"code: {name} looks like a secret: whoever may read ConfigMaps could read it."
        raise UserError(
            message, hint="leave it out in .gitignore, and mount a Secret: volumes: [{secret: …, path: …}]."
        )
    return Entry(name, content, is_executable=bool(mode & stat.S_IXUSR))


def _target(name: str, target: str) -> bytes:
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if posixpath.isabs(target) or inside.split("/")[0] == "..":
        message = f"code: {name} is a link to {target}, outside of the folder: no pod has that."
        raise UserError(message, hint="leave it out in .gitignore, and mount a volume for what lies there.")
    return os.fsencode(target)


def _packed(entries: Sequence[Entry]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", 9, buffer, mtime=0) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8") as tar,
    ):
        for entry in entries:
            tar.addfile(entry.header(), None if entry.is_link else io.BytesIO(entry.content))
    return buffer.getvalue()


def _too_large(what: str, sizes: dict[str, int], limit: int) -> UserError:
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:NAMED]
    named = ", ".join(f"{name} ({_amount(sizes[name])})" for name in largest)
    message = f"code: the folder {what}, and {_amount(limit)} is what fits into its ConfigMap."
    return UserError(
        f"{message} The largest files: {named}.",
        hint="leave out in .gitignore what no pod needs; data belongs on a volume.",
    )


def _amount(size: int) -> str:
    if size < 1024:
        return f"{size} bytes"
    return f"{size / 1024:.0f} KiB" if size < 1024 * 1024 else f"{size / 1024 / 1024:.1f} MiB"
