"""Copy files between this machine and the pod of a rank.

A file is written as a part, which gets its name only when its digest is that of the source. After a
cut, and in a later call, the copy continues at the end of the part, if the source begins with the
same bytes. A file that the target already has is not sent.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from jaxlaunch.launcher.errors import ClusterError, UnreachableError, UserError
from jaxlaunch.launcher.jobs.exec import folder_server
from jaxlaunch.launcher.jobs.exec.rank_pod import RankPod
from jaxlaunch.launcher.kubernetes import streams

# Connections in a row that were cut before a byte was copied.
MAX_IDLE_CUTS = 5
_FIRST_PAUSE_S = 0.5
# `folder_server` writes an empty line every KEEPALIVE_S seconds while it works on a request.
_SILENCE_S = 45.0


class Side(Protocol):
    """One side of a copy. The functions are those of `folder_server`."""

    def resolve_path(self, path: str) -> tuple[str, str]:
        """Return the absolute path, and its kind."""

    def list_tree(self, path: str) -> dict[str, Any]:
        """List a file or a folder."""

    def digest_file(self, path: str, size: int | None = None) -> tuple[int, str]:
        """Digest the first bytes of a file."""

    def read_file(self, path: str, offset: int, size: int) -> Iterator[bytes]:
        """Read bytes of a file."""

    def write_part(self, path: str, offset: int, size: int, chunks: Iterable[bytes]) -> None:
        """Write the part of a file."""

    def finish_file(self, path: str, digest: str, mode: int) -> bool:
        """Give a part its name."""

    def make_folders(self, paths: list[str]) -> None:
        """Create folders."""


class LocalSide:
    """The files of this machine."""

    resolve_path = staticmethod(folder_server.resolve_path)
    list_tree = staticmethod(folder_server.list_tree)
    digest_file = staticmethod(folder_server.digest_file)
    read_file = staticmethod(folder_server.read_file)
    finish_file = staticmethod(folder_server.finish_file)
    make_folders = staticmethod(folder_server.make_folders)

    @staticmethod
    def write_part(path: str, offset: int, size: int, chunks: Iterable[bytes]) -> None:
        """Write the part of a file."""
        folder_server.write_part(path, offset, chunks)


class PodSide:
    """The files of a pod. A method raises UnreachableError if the connection is cut."""

    def __init__(self, pod: RankPod) -> None:
        self._pod = pod
        self._stream: streams.CommandStream | None = None
        self._unread, self._messages = b"", b""

    def close(self) -> None:
        """Close the connection. The next call opens another one."""
        if self._stream is not None:
            self._stream.__exit__()
        self._stream, self._unread, self._messages = None, b"", b""

    def resolve_path(self, path: str) -> tuple[str, str]:
        """Return the absolute path, and its kind."""
        absolute, kind = self._ask("resolve", path)
        self._check_name(os.path.basename(absolute))
        return absolute, kind

    def list_tree(self, path: str) -> dict[str, Any]:
        """List a file or a folder. Raises UserError for names outside of it.

        A program in the pod may have answered in place of ours.
        """
        result: dict[str, Any] = self._ask("list", path)
        for name in (*(name for name, _ in result["files"]), *result["folders"]):
            self._check_name(name)
        return result

    def digest_file(self, path: str, size: int | None = None) -> tuple[int, str]:
        """Digest the first bytes of a file."""
        count, digest = self._ask("digest", path, size)
        return count, digest

    def read_file(self, path: str, offset: int, size: int) -> Iterator[bytes]:
        """Read bytes of a file."""
        self._ask("read", path, offset, size)
        while size:
            received = self._unread or self._receive()
            data, self._unread = received[:size], received[size:]
            size -= len(data)
            yield data

    def write_part(self, path: str, offset: int, size: int, chunks: Iterable[bytes]) -> None:
        """Write the part of a file."""
        self._send(json.dumps(["write", path, offset, size]).encode() + b"\n")
        for chunk in chunks:
            self._send(chunk)
        self._read_answer()

    def finish_file(self, path: str, digest: str, mode: int) -> bool:
        """Give a part its name."""
        return bool(self._ask("finish", path, digest, mode))

    def make_folders(self, paths: list[str]) -> None:
        """Create folders."""
        self._ask("folders", paths)

    def _check_name(self, name: str) -> None:
        if name.startswith("/") or ".." in name.split("/"):
            raise UserError(f"Pod {self._pod.pod} lists {name!r}, which leaves its folder.")

    def _ask(self, *request: object) -> Any:
        self._send(json.dumps(request).encode() + b"\n")
        return self._read_answer()

    def _read_answer(self) -> Any:
        self._unread = self._unread.lstrip(b"\n")
        while b"\n" not in self._unread:
            self._unread = (self._unread + self._receive()).lstrip(b"\n")
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(f"In pod {self._pod.pod}: {answer['error']}.")
        return answer["result"]

    def _send(self, data: bytes) -> None:
        if self._stream is None:
            self._stream = self._pod.start_program(folder_server)
        for start in range(0, len(data), streams.PIECE_BYTES):
            self._stream.send(data[start : start + streams.PIECE_BYTES])

    def _receive(self) -> bytes:
        assert self._stream is not None, "every answer follows a request"
        ready, _ = self._stream.wait(timeout_s=_SILENCE_S)
        if not ready:
            message = f"Pod {self._pod.pod} has been silent for {_SILENCE_S:.0f} s."
            raise UnreachableError(message, sent=True)
        channel, data = self._stream.receive()
        if self._stream.exit_code is not None:
            text = self._messages.decode(errors="replace").strip()
            last_line = text.rpartition("\n")[2] or f"exit code {self._stream.exit_code}"
            raise ClusterError(f"The copy ended in pod {self._pod.pod}: {last_line}.")
        if channel == streams.STDERR:
            self._messages = (self._messages + data)[-4096:]
        return data if channel == streams.STDOUT else b""


@dataclasses.dataclass
class CopyCounts:
    """The number of files and bytes of a copy.

    Attributes:
        files: Files that were sent.
        unchanged: Files that the target already had.
        sent_bytes: Bytes that were sent.
        resumed_bytes: Bytes of parts that did not have to be sent again.
    """

    files: int = 0
    unchanged: int = 0
    sent_bytes: int = 0
    resumed_bytes: int = 0


class Copy:
    """One copy of a file or of a folder with all that it contains."""

    def __init__(self, pod: PodSide, *, is_download: bool, say: Callable[[str], None]) -> None:
        self._pod, self._say, self.counts = pod, say, CopyCounts()
        local = LocalSide()
        self._source: Side = pod if is_download else local
        self._target: Side = local if is_download else pod
        self._idle_cuts = 0
        # The size of the part that the target had when its copy began or continued last.
        self._part_size = 0

    def run(self, source: str, target: str) -> CopyCounts:
        """Copy `source` to `target`, or into it if that is a folder, as `cp -r` does.

        Raises:
            UserError: If there is no such file, or it cannot be read or written.
            ClusterError: If the pod cannot be reached.
        """
        try:
            source, kind = self._repeat(lambda: self._source.resolve_path(source))
            if kind == "none":
                raise UserError(f"There is no file or folder {source} to copy.")
            root, target_kind = self._repeat(lambda: self._target.resolve_path(target))
            if target_kind == "folder" or (target.endswith("/") and kind == "file"):
                root = os.path.join(root, os.path.basename(source))
            tree = self._repeat(lambda: self._source.list_tree(source))
            if kind == "folder":
                folders = [root, *(os.path.join(root, name) for name in tree["folders"])]
                self._repeat(lambda: self._target.make_folders(folders))
            for name in tree["others"]:
                problem = "is a link to a folder, or neither a file nor a folder"
                self._say(f"{name or source} {problem}, and is left out")
            for name, mode in tree["files"]:
                file, goal = (os.path.join(path, name) if name else path for path in (source, root))
                self._copy_file(file, goal, mode)
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}.") from None
        except EOFError as error:
            raise UserError(f"{error}.", "copy it when nothing writes to it.") from None
        finally:
            self._pod.close()
        return self.counts

    def _copy_file(self, source: str, target: str, mode: int) -> None:
        # A part to which another process has written is damaged, and the file is sent whole.
        for _ in range(2):
            size, digest = self._repeat(lambda: self._source.digest_file(source))
            if self._repeat(lambda: self._target.digest_file(target)) == (size, digest):
                self.counts.unchanged += 1
                self._idle_cuts = 0
                return
            self._part_size = 0
            self._repeat(functools.partial(self._send_rest, source, target, size))
            finish = functools.partial(self._target.finish_file, target, digest, mode)
            if self._repeat(finish):
                self.counts.files += 1
                self._idle_cuts = 0
                return
        raise UserError(
            f"{source} changed while it was copied: the digests of both sides differ.",
            "copy it when nothing writes to it.",
        )

    def _send_rest(self, source: str, target: str, size: int) -> None:
        """Send what the part of the target lacks."""
        part_size, part_digest = self._target.digest_file(target + folder_server.PART_SUFFIX)
        if part_size > self._part_size:
            # The connection was cut after bytes had arrived.
            self._part_size, self._idle_cuts = part_size, 0
        offset = 0
        part = (part_size, part_digest)
        if 0 < part_size <= size and self._source.digest_file(source, part_size) == part:
            offset = part_size
            self.counts.resumed_bytes += offset
        chunks = self._count_bytes(self._source.read_file(source, offset, size - offset))
        self._target.write_part(target, offset, size - offset, chunks)

    def _count_bytes(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.counts.sent_bytes += len(chunk)
            yield chunk

    def _repeat(self, action: Callable[[], Any]) -> Any:
        """Return the result of an action, which is repeated after the connection was cut."""
        while True:
            try:
                return action()
            except UnreachableError as error:
                self._pod.close()
                self._idle_cuts += 1
                if self._idle_cuts > MAX_IDLE_CUTS:
                    raise
                self._say(f"{error.message} Continuing.")
                time.sleep(_FIRST_PAUSE_S * 2 ** (self._idle_cuts - 1))
