"""The manifest of a step: the size and digest of every file in its folder.

Orbax stores no digests: after one flipped byte it restores other weights without an error (measured
on 0.12.8). Therefore the last file of a step is this manifest, with the sizes and digests of all
other files and with its own digest. The manifest also commits the step: on POSIX, gs:// and s3://,
a step without one was not finished.

The digest is SHA-256 and not CRC-32C, because SHA-256 is in the standard library, reads 1.5 GB/s
per core without the GIL, which is faster than most storage, and detects replaced files as reliably
as damaged ones.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from etils import epath

from jaxlaunch import atomic_file, contract
from jaxlaunch.trainer.buckets import remote

MANIFEST_FILE = contract.MANIFEST
# The name of a step's folder.
STEP_NAME = re.compile(r"0|[1-9][0-9]*")
FORMAT_VERSION = 1
# Bytes that one read returns.
CHUNK_BYTES = 1 << 20
# Limits of a path below a step, and of each of its parts. Linux's NAME_MAX is 255 bytes.
LONGEST_PATH, LONGEST_NAME = 1024, 255
# The size of a manifest of half a million files.
MAX_SMALL_BYTES = 64 << 20
# Half of the processors; the loop and the data pipeline use the others.
READ_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
# The exceptions of decoding JSON that may be damaged, and of reading its fields.
JSON_ERRORS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
K = TypeVar("K")
T = TypeVar("T")


class NotAFileError(OSError):
    """A path that cannot be read to its end: a FIFO, a device, or a file that is too large."""


class DamagedManifestError(Exception):
    """A manifest that exists but is not valid. The message says why."""


@dataclasses.dataclass(frozen=True)
class FileDigest:
    """One file: its size in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The files of `step`, by path relative to its folder, as written by run `uid`."""

    step: int
    uid: str
    files: Mapping[str, FileDigest]

    def to_bytes(self) -> bytes:
        """Encode the manifest as JSON with its own SHA-256. Equal manifests give equal bytes."""
        files = {name: [entry.size, entry.sha256] for name, entry in self.files.items()}
        body = {"format": FORMAT_VERSION, "step": self.step, "uid": self.uid, "files": files}
        return _to_json({"manifest": body, "sha256": hashlib.sha256(_to_json(body)).hexdigest()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Decode a manifest. Raises DamagedManifestError unless `to_bytes` returned `data`."""
        try:
            body = json.loads(data)["manifest"]
            files = {
                name: FileDigest(int(size), str(sha256))
                for name, (size, sha256) in body["files"].items()
            }
            manifest = cls(int(body["step"]), str(body["uid"]), files)
        except JSON_ERRORS as error:
            raise DamagedManifestError(f"{MANIFEST_FILE} cannot be read ({error})") from None
        if wrong_names := [name for name in files if not _is_relative_path(name)]:
            raise DamagedManifestError(
                f"{MANIFEST_FILE} names {wrong_names[0][:LONGEST_NAME]!r}, which is not a file of "
                "this folder"
            )
        if manifest.to_bytes() != data:
            raise DamagedManifestError(f"{MANIFEST_FILE} does not match its own digest")
        return manifest


def _is_relative_path(name: str) -> bool:
    """Return whether a name in a manifest is a path that stays inside the folder."""
    try:
        parts = os.fsencode(name).split(b"/")
    except UnicodeEncodeError:
        return False
    is_short = len(name) <= LONGEST_PATH and all(len(part) <= LONGEST_NAME for part in parts)
    return is_short and "\0" not in name and not {b"", b".", b".."}.intersection(parts)


def _to_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True).encode() + b"\n"


def write_manifest(folder: epath.Path, manifest: Manifest) -> None:
    """Write the manifest, which commits the step. Raises OSError."""
    replace_file(folder / MANIFEST_FILE, manifest.to_bytes())


def read_manifest(folder: epath.Path) -> Manifest | None:
    """Read the manifest of a step's folder; None without one. Raises DamagedManifestError."""
    try:
        data = read_small_file(folder / MANIFEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except NotAFileError as error:
        raise DamagedManifestError(f"{MANIFEST_FILE} {error.strerror}") from None
    return Manifest.from_bytes(data)


def open_file(path: epath.Path) -> BinaryIO:
    """Open a file for reading. Raises OSError; NotAFileError if it is not a regular file."""
    if is_remote(path):
        result: BinaryIO = path.open("rb")
        return result
    # Without O_NONBLOCK a FIFO would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise NotAFileError(errno.EINVAL, "is not a regular file", os.fspath(path))


def read_small_file(path: epath.Path) -> bytes:
    """Read a file of at most MAX_SMALL_BYTES. Raises OSError; NotAFileError if it is larger."""
    with open_file(path) as file:
        data = file.read(MAX_SMALL_BYTES + 1)
    if len(data) > MAX_SMALL_BYTES:
        raise NotAFileError(errno.EFBIG, f"has more than {MAX_SMALL_BYTES} bytes", os.fspath(path))
    return data


def path_exists(path: epath.Path) -> bool:
    """Return whether a file or a folder exists. Raises OSError if storage fails.

    The `exists` of a local path returns False then, and a checkpoint would count as deleted.
    """
    return bool(path.exists()) if is_remote(path) else _local_mode(path) is not None


def is_folder(path: epath.Path) -> bool:
    """Return whether a path is a folder. Unlike `is_dir`, it raises OSError if storage fails."""
    if not is_remote(path):
        mode = _local_mode(path)
        return mode is not None and stat.S_ISDIR(mode)
    url = os.fspath(path)
    try:
        return bool(remote.open_filesystem(url).info(url)["type"] == "directory")
    except FileNotFoundError:
        return False


def _local_mode(path: epath.Path) -> int | None:
    """Return the mode of a local path, or None if nothing is there. Raises OSError."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise


def committed_steps(folder: epath.Path) -> list[int]:
    """Return the steps in `folder` that have a manifest, oldest first, unverified."""
    children = folder.iterdir() if path_exists(folder) else iter(())
    names = [child.name for child in children if STEP_NAME.fullmatch(child.name)]
    return sorted(int(name) for name in names if path_exists(folder / name / MANIFEST_FILE))


def list_files(folder: epath.Path, include_manifest: bool = False) -> list[str]:
    """Return the sorted relative paths of all files below `folder`.

    The manifest and its drafts are only included if `include_manifest` is set.
    """
    if is_remote(folder):
        # The `walk` of etils calls a method that s3fs does not have.
        names = remote.list_names(os.fspath(folder))
        return [name for name in names if include_manifest or name != MANIFEST_FILE]
    names, root = [], ""
    for parent, _, files in folder.walk():
        # The first parent is `folder`, in the spelling of the file system.
        root = root or os.fspath(parent)
        subfolder = os.fspath(parent)[len(root) :].strip("/")
        names += [f"{subfolder}/{name}" if subfolder else name for name in files]
    if not include_manifest:
        names = [name for name in names if name != MANIFEST_FILE and not is_draft(name)]
    return sorted(names)


def is_draft(name: str) -> bool:
    """Return whether a file is a draft of a manifest, which a killed process leaves behind."""
    return name.startswith(f"{MANIFEST_FILE}.") and name.endswith(atomic_file.DRAFT_SUFFIX)


def digest_file(path: epath.Path, expected_bytes: int | None = None) -> FileDigest:
    """Digest a file. A local file of another size than `expected_bytes` is not read.

    Raises OSError.
    """
    sha256, size = hashlib.sha256(), 0
    with open_file(path) as file:
        if expected_bytes is not None and not is_remote(path):
            current_bytes = os.fstat(file.fileno()).st_size
            if current_bytes != expected_bytes:
                return FileDigest(current_bytes, "")
        while chunk := file.read(CHUNK_BYTES):
            sha256.update(chunk)
            size += len(chunk)
    return FileDigest(size, sha256.hexdigest())


def digest_files(folder: epath.Path, names: Iterable[str]) -> dict[str, FileDigest]:
    """Digest the files `names` below `folder`. Raises OSError."""
    return map_files(lambda name: digest_file(folder / name), list(names))


def files_of_process(sizes: Mapping[str, int], index: int, count: int) -> list[str]:
    """Return the files that process `index` of `count` reads, an about equal share of the bytes."""
    return sorted(sizes, key=lambda name: (-sizes[name], name))[index::count]


def find_damage(
    folder: epath.Path, manifest: Manifest, index: int = 0, count: int = 1
) -> list[str]:
    """Describe each missing or changed file among those of process `index`. Raises OSError."""
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    names = files_of_process(sizes, index, count)
    damages = map_files(lambda name: _describe_damage(folder, name, manifest.files[name]), names)
    return [damages[name] for name in sorted(names) if damages[name]]


def _describe_damage(folder: epath.Path, name: str, entry: FileDigest) -> str:
    try:
        current = digest_file(folder / name, entry.size)
    except (FileNotFoundError, NotADirectoryError):
        return f"file {name} is missing"
    except IsADirectoryError:
        return f"file {name} is a folder"
    except NotAFileError as error:
        return f"file {name} {error.strerror}"
    if current.size < entry.size:
        return f"file {name} cut short ({current.size} of {entry.size} bytes)"
    if current.size > entry.size:
        return f"file {name} grew ({current.size} bytes, {entry.size} were written)"
    if current != entry:
        return f"file {name} has changed since it was written (SHA-256 differs)"
    return ""


def map_files(operation: Callable[[K], T], names: Sequence[K]) -> dict[K, T]:
    """Return `operation(name)` for every name, computed in several threads."""
    with concurrent.futures.ThreadPoolExecutor(READ_THREADS, "digest") as threads:
        return dict(zip(names, threads.map(operation, names), strict=True))


def replace_file(path: epath.Path, data: bytes) -> None:
    """Replace a small file atomically. Raises OSError."""
    if is_remote(path):
        with remote.name_missing_bucket(os.fspath(path)):
            path.write_bytes(data)
    else:
        atomic_file.write_file(Path(path), data)


def is_remote(path: epath.Path) -> bool:
    """Return whether `path` is in an object store, which has atomic writes but no rename."""
    return "://" in os.fspath(path)
