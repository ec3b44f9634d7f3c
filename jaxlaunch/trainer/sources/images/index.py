"""Where every image of a set lies and which class it has, found once and kept in the user's cache folder.

An image is a whole file, or bytes of one: a member of a tar, a value of a column. Reading it by number needs nothing
but this index, which a process loads in a blink, whatever the number of images.

N images, F files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch import atomic_file, user_cache
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.sources.images.picture import MOST_BYTES, Broken

VERSION = 1  # of what is kept: one that is made otherwise has another address
SAMPLES = 64  # images whose bytes go into the digest
SAMPLE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Index:
    """The images of one split in order: image i is in file `file_N[i]`, `size_N[i]` bytes from `start_N[i]` on.

    Without `file_N` image i is the whole of file i.
    """

    root: str  # of the files' names; of those with a name from / on, or a URL, nothing
    names: bytes  # of all files, one after the other
    end_F: npt.NDArray[np.int64]  # where each name ends
    label_N: npt.NDArray[np.int32]
    classes: tuple[str, ...]  # empty where labels are numbers without names
    file_N: npt.NDArray[np.int32] | None = None
    start_N: npt.NDArray[np.int64] | None = None
    size_N: npt.NDArray[np.int64] | None = None
    row_N: npt.NDArray[np.int32] | None = None  # which of its file each is, from 1; None where they follow each other
    printed: tuple[str, ...] = ()  # the files that the images are of, where they are copies of the cache
    broken: tuple[str, ...] = ()  # what was left out, a sentence each
    left_out: int = 0  # files that are no images by their names
    has_splits: bool = False  # names say of which split each image is
    identity: str = ""  # of the files that hold images in part; of whole files their names are it
    digest: str = ""

    def __len__(self) -> int:
        return len(self.label_N)

    def file(self, number: int) -> str:
        """The path or URL of a file."""
        start = int(self.end_F[number - 1]) if number else 0
        name = os.fsdecode(self.names[start : int(self.end_F[number])])
        return name if name.startswith("/") or remote.is_remote(name) else joined(self.root, name)

    def where(self, image: int) -> str:
        """The file of an image, and where in it the image is, to be printed."""
        number = self._number(image)
        file = shown(self.printed[number] if self.printed else self.file(number))
        if self.file_N is None or self.start_N is None:
            return file
        row = image - int(np.searchsorted(self.file_N, number)) + 1 if self.row_N is None else int(self.row_N[image])
        return f"{file}, image {row}"

    def read(self, image: int) -> bytes:
        """The bytes of an image. Raises OSError, StorageError, and Broken for a file that has no end."""
        path = self.file(self._number(image))
        if self.start_N is None or self.size_N is None:
            return whole(path)
        return files.read_bytes(path, int(self.start_N[image]), int(self.size_N[image]))

    def only(self, chosen_N: npt.NDArray[np.bool_], broken: Sequence[str]) -> Index:
        """The index of some of the images; what is `broken` says what was left out."""
        of_files = self._numbered()
        arrays: dict[str, Any] = {
            key: array[chosen_N] for key in _PER_IMAGE if (array := getattr(of_files, key)) is not None
        }
        return dataclasses.replace(of_files, **arrays, broken=tuple(broken))

    def _number(self, image: int) -> int:
        return image if self.file_N is None else int(self.file_N[image])

    def _numbered(self) -> Index:
        """The same, with the number of its file for each image, and which image of it that is."""
        if self.file_N is None:
            return dataclasses.replace(self, file_N=np.arange(len(self), dtype=np.int32))
        row_N = np.arange(1, len(self) + 1) - np.searchsorted(self.file_N, self.file_N)
        return dataclasses.replace(self, row_N=row_N.astype(np.int32) if self.row_N is None else self.row_N)


class Member(NamedTuple):
    """An image in a file of its kind, and its label; None where nothing says it."""

    start: int
    size: int
    label: str | int | None


_PER_IMAGE = ("label_N", "file_N", "start_N", "size_N", "row_N")
_ARRAYS = ("end_F", *_PER_IMAGE)


def joined(root: str, name: str) -> str:
    """A name below a folder or a URL."""
    return f"{root.rstrip('/')}/{name}" if root else name


def shown(path: str) -> str:
    """A path as it can be printed, on one line: names need not be UTF-8."""
    if path.isprintable():
        return path
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in path)


def of_files(
    root: str,
    names: Sequence[str],
    labels: Sequence[int] | npt.NDArray[np.int32],
    classes: Sequence[str],
    left_out: int = 0,
) -> Index:
    """The index of whole files, in the order given."""
    encoded = [os.fsencode(name) for name in names]
    return Index(
        root,
        b"".join(encoded),
        np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), dtype=np.int64),
        np.asarray(labels, np.int32),
        tuple(classes),
        left_out=left_out,
    )


def whole(path: str) -> bytes:
    """The bytes of a file. Raises OSError, StorageError, and Broken for one of more bytes than an image has."""
    if remote.is_remote(path):
        size = files.file_size(path)
    else:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= MOST_BYTES:
                return file.readall()
    if size > MOST_BYTES:
        raise Broken(f"has {size >> 20} MiB, more than an image has")
    return files.read_bytes(path, 0, size)


# --- what is kept -----------------------------------------------------------------------------------------------------


def kept(key: Any, marks: Callable[[], Any], made: Callable[[Path], Index]) -> Index:
    """The index of what `key` describes: from the cache where its `marks` are those of now, else made and kept.

    `made` may put files beside it, into the folder it is given. The processes of a host take turns.
    """
    return _kept(json.dumps([VERSION, key], sort_keys=True), marks, made)


@functools.lru_cache(maxsize=16)
def _of_process(address: str, mark: str) -> Index:
    return _load(user_cache.home("images") / address)


def _kept(key: str, marks: Callable[[], Any], made: Callable[[Path], Index]) -> Index:
    address = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:24]
    folder = user_cache.home("images") / address
    mark = hashlib.sha256(json.dumps(marks(), sort_keys=True).encode(errors="surrogatepass")).hexdigest()
    if not _is_of(folder, mark):
        with _locked(folder) as folder_or_none:
            if folder_or_none is None:
                return _digested(made(folder))
            if not _is_of(folder, mark):
                for old in folder.iterdir():
                    if old.name != "lock":
                        shutil.rmtree(old) if old.is_dir() else old.unlink()
                _store(folder, _digested(made(folder)), mark)
    return _of_process(address, mark)


def _is_of(folder: Path, mark: str) -> bool:
    try:
        return bool(json.loads((folder / "index.json").read_text())["mark"] == mark)
    except (OSError, ValueError, KeyError):
        return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path | None]:
    """The folder, while no other process of the host makes it; None where none can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError:
        yield None
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _store(folder: Path, index: Index, mark: str) -> None:
    about = {key: value for key, value in dataclasses.asdict(index).items() if key not in (*_ARRAYS, "names")}
    arrays = {key: array for key in _ARRAYS if (array := getattr(index, key)) is not None}
    with atomic_file.draft(folder / "index.npz") as draft, draft.open("wb") as file:
        np.savez(file, names=np.frombuffer(index.names, np.uint8), **arrays)
    with atomic_file.draft(folder / "index.json") as draft:
        draft.write_text(json.dumps({"mark": mark, "index": about}))


def _load(folder: Path) -> Index:
    about = json.loads((folder / "index.json").read_text())["index"]
    with np.load(folder / "index.npz") as arrays:
        found = {key: arrays[key] for key in _ARRAYS if key in arrays}
        names = arrays["names"].tobytes()
    listed: dict[str, Any] = {key: tuple(about.pop(key, ())) for key in ("classes", "broken", "printed")}
    return Index(names=names, **found, **listed, **about)


def _digested(index: Index) -> Index:
    """The index with a digest of names, places, labels and a bounded sample of the images' bytes.

    Names are those below the common folder: the same images may be mounted elsewhere on the next machine.
    """
    identity = index.identity.encode() or index.names
    hashed = hashlib.sha256(json.dumps(index.classes).encode(errors="surrogatepass") + identity)
    for key in ("label_N", "start_N", "size_N"):
        if (array := getattr(index, key)) is not None:
            hashed.update(np.ascontiguousarray(array).tobytes())
    for image in range(0, len(index), max(1, -(-len(index) // SAMPLES))):
        with contextlib.suppress(Broken):
            hashed.update(index.read(image)[:SAMPLE_BYTES])
    return dataclasses.replace(index, digest=hashed.hexdigest()[:12])
