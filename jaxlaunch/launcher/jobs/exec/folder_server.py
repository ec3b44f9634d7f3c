"""Files of one side of a copy: list, digest, read and write them.

The source of this file is sent into pods, where it answers requests: a line of JSON, whose answer
is a line of JSON and the bytes that it announces. Empty lines before an answer show that the work
on a request continues. It needs only the standard library and Python >= 3.10.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

CHUNK_BYTES = 256 * 1024
# Suffix of a file that is being written. A later copy continues it.
PART_SUFFIX = ".jaxlaunch-part"
# Seconds between two empty lines while an answer takes long.
KEEPALIVE_S = 5.0


def resolve_path(path: str) -> tuple[str, str]:
    """Return the absolute path, and "folder", "file" or "none"."""
    path = os.path.abspath(os.path.expanduser(path))
    kind = "folder" if os.path.isdir(path) else "file" if os.path.lexists(path) else "none"
    return path, kind


def list_tree(path: str) -> dict[str, list[Any]]:
    """Return what a file or a folder contains, by names relative to it.

    Returns:
        `files`: pairs of a name, which is empty for a single file, and a mode. `folders`: names.
        `others`: names of what is neither, such as sockets, and links to folders or to nothing.

    Raises:
        OSError: If a folder cannot be read.
    """
    tree: dict[str, list[Any]] = {"files": [], "folders": [], "others": []}
    names = [] if os.path.isdir(path) else [""]
    for folder, folders, files in os.walk(path, onerror=_raise_error):
        relative = os.path.relpath(folder, path)
        names += [os.path.normpath(os.path.join(relative, name)) for name in files]
        for name in folders:
            # Links to folders are not followed, because they may lead back.
            kind = "others" if os.path.islink(os.path.join(folder, name)) else "folders"
            tree[kind].append(os.path.normpath(os.path.join(relative, name)))
    for name in sorted(names):
        try:
            status = os.stat(os.path.join(path, name) if name else path)
        except FileNotFoundError:
            tree["others"].append(name)
            continue
        if not stat.S_ISREG(status.st_mode):
            tree["others"].append(name)
        elif not name.endswith(PART_SUFFIX):
            tree["files"].append((name, stat.S_IMODE(status.st_mode)))
    return tree


def _raise_error(error: OSError) -> None:
    """Raise an error of `os.walk`, unless the path is that of a single file."""
    if not isinstance(error, NotADirectoryError):
        raise error


def digest_file(path: str, size: int | None = None) -> tuple[int, str]:
    """Return the number and the SHA-256 of a file's first `size` bytes, by default of all.

    The number is -1 if the file does not exist.
    """
    digest, count = hashlib.sha256(), 0
    try:
        with open(path, "rb") as file:
            while size is None or count < size:
                limit = CHUNK_BYTES if size is None else min(CHUNK_BYTES, size - count)
                if not (data := file.read(limit)):
                    break
                digest.update(data)
                count += len(data)
    except FileNotFoundError:
        return -1, ""
    return count, digest.hexdigest()


def read_file(path: str, offset: int, size: int) -> Iterator[bytes]:
    """Yield `size` bytes of a file from an offset. Raises EOFError if it has fewer."""
    with open(path, "rb") as file:
        file.seek(offset)
        while size:
            if not (data := file.read(min(CHUNK_BYTES, size))):
                raise EOFError(f"{path} became shorter while it was read")
            size -= len(data)
            yield data


def write_part(path: str, offset: int, chunks: Iterable[bytes]) -> None:
    """Write bytes from an offset on to the part of a file, and cut off what follows it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(path + PART_SUFFIX, "ab", opener=_open_private) as file:
            file.truncate(offset)
            for data in chunks:
                file.write(data)
    except OSError as error:
        # A failed write, as on a full disk, does not name its file.
        error.filename = error.filename or path
        raise


def _open_private(path: str, flags: int) -> int:
    """Open a file that only this user can read, because the source may be private."""
    return os.open(path, flags, 0o600)


def finish_file(path: str, digest: str, mode: int) -> bool:
    """Give a complete part its name. Return False, and remove it, if its digest is another."""
    size, part_digest = digest_file(path + PART_SUFFIX)
    if size < 0:
        # An earlier request, whose answer was lost in a cut, has done it.
        return digest_file(path)[1] == digest
    if part_digest != digest:
        os.unlink(path + PART_SUFFIX)
        return False
    # With the set-user-ID bit, a pod could leave a program here that runs as this user.
    os.chmod(path + PART_SUFFIX, mode & 0o777 | stat.S_IWUSR)
    os.replace(path + PART_SUFFIX, path)
    return True


def make_folders(paths: list[str]) -> None:
    """Create folders that do not exist."""
    for path in paths:
        os.makedirs(path, exist_ok=True)


# Requests whose answer is the result of a function.
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "resolve": resolve_path,
    "list": list_tree,
    "digest": digest_file,
    "finish": finish_file,
    "folders": make_folders,
}


class _Upload:
    """The bytes that follow a request to write. There are fewer if the connection is cut."""

    def __init__(self, stream: io.BufferedIOBase, size: int) -> None:
        self._stream, self._missing_bytes = stream, size
        self._is_waiting, self._reported_bytes = False, size

    def __iter__(self) -> Iterator[bytes]:
        while self._missing_bytes:
            self._is_waiting = True
            data = self._stream.read1(min(CHUNK_BYTES, self._missing_bytes))
            self._missing_bytes -= len(data)
            self._is_waiting = False
            if not data:
                return
            yield data

    def has_progress(self) -> bool:
        """Return whether bytes are being written, or have arrived since the last call."""
        missing_bytes = self._missing_bytes
        has_arrived = missing_bytes < self._reported_bytes
        self._reported_bytes = missing_bytes
        return has_arrived or not self._is_waiting


@contextlib.contextmanager
def _show_life(
    answers: io.BufferedIOBase, has_progress: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Write an empty line every KEEPALIVE_S seconds: the digest of a large file takes minutes.

    Without progress none is written, so that the other side notices that its bytes were lost.
    """
    has_ended = threading.Event()

    def write_lines() -> None:
        while not has_ended.wait(KEEPALIVE_S):
            if has_progress():
                answers.write(b"\n")
                answers.flush()

    thread = threading.Thread(target=write_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def serve(requests: io.BufferedIOBase, answers: io.BufferedIOBase) -> None:
    """Answer requests until their stream ends."""
    for line in requests:
        action, *arguments = json.loads(line)
        sent: Iterable[bytes] = ()
        upload: Iterable[bytes] = ()
        answer: dict[str, object] = {"result": None}
        try:
            if action == "read":
                sent = read_file(*arguments)
            elif action == "write":
                path, offset, size = arguments
                upload = _Upload(requests, size)
                with _show_life(answers, upload.has_progress):
                    write_part(path, offset, upload)
            else:
                with _show_life(answers):
                    answer["result"] = _FUNCTIONS[action](*arguments)
        except OSError as error:
            answer = {"error": f"{error.filename}: {error.strerror}"}
            # The next request follows the bytes that could not be written.
            for _ in upload:
                pass
        answers.write(json.dumps(answer).encode() + b"\n")
        for data in sent:
            answers.write(data)
        answers.flush()


if __name__ == "__main__":
    stdin, stdout = (cast(io.BufferedIOBase, file.buffer) for file in (sys.stdin, sys.stdout))
    serve(stdin, stdout)
