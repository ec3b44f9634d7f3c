"""A folder as one archive: equal files make equal bytes, whenever, wherever and by whom it is packed."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Collection, Sequence
from pathlib import Path

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.manifests import git_files, secret_files
from jaxlaunch.launcher.wording import count

NAMED = 5  # of the largest files
HOPELESS = 64  # times the limit: no source packs that well, so packing is not tried


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file or a link of the folder."""

    name: str
    content: bytes  # of a link: where it leads
    is_link: bool = False
    is_executable: bool = False


def pack(folder: Path, limit: int, include: Collection[str] = ()) -> bytes:
    """A gzipped tar of the folder's code, of `limit` bytes at most.

    `include` names files and folders that are packed although they look like credentials. Raises UserError if the
    folder cannot be packed.
    """
    if not folder.is_dir():
        raise UserError(f"code: {folder} is not a folder.", hint="it is relative to the job file.")
    sizes = {}
    for name in git_files.files(folder):
        # What git's index names and is deleted is left out.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = (folder / name).lstat()
            if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                sizes[name] = status.st_size
    if not sizes:
        raise UserError(f"code: {folder} holds no file that git does not ignore.")
    if (total := sum(sizes.values())) > HOPELESS * limit:
        raise _too_large(f"holds {_amount(total)}", sizes, limit)
    entries = [_read(folder, name) for name in sizes]
    packed = _packed(entries)
    if len(packed) > limit:
        raise _too_large(f"packs to {_amount(len(packed))}", sizes, limit)
    _refuse_credentials(entries, include)
    return packed


def _refuse_credentials(entries: Sequence[Entry], include: Collection[str]) -> None:
    """Raises UserError for files that look like credentials and are not named, and for a name of none of the files."""
    named = {posixpath.normpath(name) for name in include}
    unknown = {name for name in named if not any(_is_below(entry.name, name) for entry in entries)}
    if unknown:
        message = f"code.include: {', '.join(sorted(unknown))}: no such file or folder is shipped."
        raise UserError(message, hint="names are relative to code.folder; what git ignores stays here in any case.")
    found = {}
    for entry in entries:
        if entry.is_link or any(_is_below(entry.name, name) for name in named):
            continue
        if secret_files.by_name(entry.name):
            found[entry.name] = "by its name"
        elif (sign := secret_files.in_content(entry.content)) is not None:
            found[entry.name] = f"line {sign.line}: {sign.what}"
    if not found:
        return
    shown = "\n".join(f"  {name} ({why})" for name, why in list(found.items())[:NAMED])
    rest = f"\n  and {len(found) - NAMED} more" if len(found) > NAMED else ""
    first = next(iter(found))
    message = f"code: {count(len(found), 'file')} to be shipped {'looks' if len(found) == 1 else 'look'} like"
    raise UserError(
        f"{message} credentials, and anyone who may read ConfigMaps in the namespace could read them:\n{shown}{rest}",
        hint=f"leave them out in .gitignore (`git rm --cached {first}` if git tracks it) and mount a Secret: volumes: "
        f"[{{secret: …, path: …}}]. To ship one all the same: code: {{folder: ., include: "
        f"{{{first}: the reason why}}}}.",
    )


def _is_below(name: str, above: str) -> bool:
    return above in (".", name) or name.startswith(f"{above}/")


def _read(folder: Path, name: str) -> Entry:
    path = folder / name
    try:
        if not path.is_symlink():
            return Entry(name, path.read_bytes(), is_executable=bool(path.stat().st_mode & stat.S_IXUSR))
        target = os.readlink(path)
    except OSError as error:
        raise UserError(f"code: {path} cannot be read: {error.strerror}.", hint="leave it out in .gitignore.") from None
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if posixpath.isabs(target) or inside.split("/")[0] == "..":
        message = f"code: {name} is a link to {target}, outside of the folder, which no pod has."
        raise UserError(message, hint="leave it out in .gitignore, and mount a volume for what it points to.")
    return Entry(name, os.fsencode(target), is_link=True)


def _packed(entries: Sequence[Entry]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", 9, buffer, mtime=0) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8") as tar,
    ):
        for entry in entries:
            # The header holds nothing of the machine, the person or the day.
            header = tarfile.TarInfo(entry.name)
            header.mode = 0o755 if entry.is_executable else 0o644
            if entry.is_link:
                header.type, header.linkname = tarfile.SYMTYPE, os.fsdecode(entry.content)
                tar.addfile(header)
            else:
                header.size = len(entry.content)
                tar.addfile(header, io.BytesIO(entry.content))
    return buffer.getvalue()


def _too_large(what: str, sizes: dict[str, int], limit: int) -> UserError:
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:NAMED]
    named = ", ".join(f"{name} ({_amount(sizes[name])})" for name in largest)
    message = f"code: the folder {what}, and at most {_amount(limit)} fit into its ConfigMap."
    hint = "leave out in .gitignore what no pod needs; data belongs on a volume."
    return UserError(f"{message} The largest files: {named}.", hint=hint)


def _amount(size: int) -> str:
    if size < 1024:
        return f"{size} bytes"
    return f"{size / 1024:.0f} KiB" if size < 1024 * 1024 else f"{size / 1024 / 1024:.1f} MiB"
