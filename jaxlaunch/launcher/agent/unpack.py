"""Unpacks the code of a job: files, and links that stay inside of the folder; nothing else.

Not tarfile's own extraction: its filters differ between the Pythons that an image may hold.
"""

from __future__ import annotations

import gzip
import os
import posixpath
import shutil
import tarfile
import zlib


class CodeError(Exception):
    """The archive of the job's code is damaged, or holds what `launcher submit` never packs."""


def unpack(archive: str, folder: str) -> None:
    """Writes the files of a gzipped tar below `folder`. Raises CodeError, or OSError if it cannot be written."""
    try:
        _unpack(archive, folder)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CodeError(f"{archive} is damaged: {error}") from None


def _unpack(archive: str, folder: str) -> None:
    links: list[tuple[str, str]] = []  # made last: nothing is written through one
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            target = os.path.join(folder, _inside(member.name, member.name))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if member.issym():
                _inside(posixpath.join(posixpath.dirname(member.name), member.linkname), member.name)
                links.append((member.linkname, target))
            elif (content := tar.extractfile(member)) is not None and member.isreg():
                with open(target, "wb") as file:
                    shutil.copyfileobj(content, file)
                os.chmod(target, 0o755 if member.mode & 0o100 else 0o644)
            else:
                raise CodeError(f"{archive}: {member.name} is neither a regular file nor a symbolic link")
    for source, target in links:
        os.symlink(source, target)


def _inside(path: str, name: str) -> str:
    """`path`, normalized. Raises CodeError when it leaves its folder."""
    normal = posixpath.normpath(path)
    if posixpath.isabs(normal) or normal.split("/")[0] == "..":
        raise CodeError(f"{name} points outside of the folder that it is unpacked to")
    return normal
