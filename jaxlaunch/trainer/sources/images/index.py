"""The index of a set of images: the place and the class of each, cached in the user's cache folder.

An image is a whole file, or a range of a file such as a member of a tar or a value of a column. The
index is sufficient to read an image by its number, and loads quickly for any number of images. A
class is a name, or an integer from 0.

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch import atomic_file, user_cache
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.data.files import printable_path
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images.picture import MAX_FILE_BYTES, BrokenImageError

# Version of the cached index. Increase it when an index is built differently.
VERSION = 2
# Number of images in the digest of an index, and number of bytes of each.
DIGEST_SAMPLES = 64
SAMPLE_BYTES = 4096
# Number of names in a message.
MAX_LISTED_NAMES = 5
MAX_CLASSES = 2**24
Label = str | int


@dataclasses.dataclass(frozen=True)
class Index:
    """The images of a split: image i is `size_N[i]` bytes from `start_N[i]` of file `file_N[i]`.

    Without `file_N` image i is the whole of file i.
    """

    # Folder of the files. Names that are absolute or URLs do not depend on it.
    root: str
    # Names of all files, concatenated.
    names: bytes
    # End of each name in `names`.
    end_F: npt.NDArray[np.int64]
    label_N: npt.NDArray[np.int32]
    # Empty if the labels are numbers without names.
    classes: tuple[str, ...]
    file_N: npt.NDArray[np.int32] | None = None
    start_N: npt.NDArray[np.int64] | None = None
    size_N: npt.NDArray[np.int64] | None = None
    # Number of each image in its file, from 1; None if the images of a file are consecutive.
    row_N: npt.NDArray[np.int32] | None = None
    # Hash of each image's identity, by which `eval_split` chooses images; None without eval_split.
    key_N: npt.NDArray[np.uint64] | None = None
    # Files to name in messages, if the images are read from copies in the cache.
    printed: tuple[str, ...] = ()
    # One sentence for each image that was left out.
    broken: tuple[str, ...] = ()
    # Number of files that are not images by their names.
    left_out: int = 0
    # Whether the names of the files contain the split.
    has_splits: bool = False
    # Digest of files that contain many images; whole files are identified by their names.
    identity: str = ""
    digest: str = ""

    def __len__(self) -> int:
        return len(self.label_N)

    def file_path(self, file: int) -> str:
        """Return the path or URL of file number `file`."""
        start = int(self.end_F[file - 1]) if file else 0
        return join_path(self.root, os.fsdecode(self.names[start : int(self.end_F[file])]))

    def locate_image(self, image: int) -> str:
        """Return the file of an image and the place in it, for a message."""
        file = self._find_file(image)
        path = printable_path(self.printed[file] if self.printed else self.file_path(file))
        if self.file_N is None or self.start_N is None:
            return path
        if self.row_N is not None:
            return f"{path}, image {self.row_N[image]}"
        return f"{path}, image {image - int(np.searchsorted(self.file_N, file)) + 1}"

    def read_image(self, image: int) -> bytes:
        """Read the bytes of an image. Raises OSError, StorageError, BrokenImageError."""
        path = self.file_path(self._find_file(image))
        if self.start_N is None or self.size_N is None:
            return read_file(path)
        return files.read_bytes(path, int(self.start_N[image]), int(self.size_N[image]))

    def identify_images(self, names: Sequence[str]) -> splits.Keys:
        """Return the hash of each image's identity.

        Whole files are identified by `names`, their names in the set. Images in larger files are
        identified by their content, because their numbers change when files are added.
        """
        if self.file_N is None or self.start_N is None or self.size_N is None:
            return splits.file_keys(names, [*map(self.file_path, range(len(self)))])
        paths = [*map(self.file_path, range(len(self.end_F)))]
        places = zip(self.file_N.tolist(), self.start_N.tolist(), self.size_N.tolist(), strict=True)
        keys = (splits.sample_key(paths[file], start, size) for file, start, size in places)
        return np.fromiter(keys, np.uint64, len(self))

    def select_images(self, is_selected_N: npt.NDArray[np.bool_], broken: Sequence[str]) -> Index:
        """Return the index of the selected images; `broken` describes the others."""
        file_N, row_N = self.file_N, self.row_N
        if file_N is None:
            file_N = np.arange(len(self), dtype=np.int32)
        elif row_N is None:
            row_N = (np.arange(1, len(self) + 1) - np.searchsorted(file_N, file_N)).astype(np.int32)
        numbered = dataclasses.replace(self, file_N=file_N, row_N=row_N, broken=tuple(broken))
        arrays = {
            key: array[is_selected_N] for key, array in numbered.arrays(_IMAGE_ARRAYS).items()
        }
        return dataclasses.replace(numbered, **arrays)

    def arrays(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the arrays with these names, without those that are None."""
        return {key: array for key in keys if (array := getattr(self, key)) is not None}

    def _find_file(self, image: int) -> int:
        return image if self.file_N is None else int(self.file_N[image])


class Member(NamedTuple):
    """The range of an image in a file, and its label, which is None if unknown."""

    start: int
    size: int
    label: Label | None
    # Hash of its group, if the job has groups.
    group: int | None = None


_IMAGE_ARRAYS = ("label_N", "file_N", "start_N", "size_N", "row_N", "key_N")
_ARRAYS = ("end_F", *_IMAGE_ARRAYS)


def join_path(root: str, name: str) -> str:
    """Join a name to a folder or a URL. An absolute path or a URL is returned unchanged."""
    is_absolute = not root or name.startswith("/") or remote.is_remote(name)
    return name if is_absolute else f"{root.rstrip('/')}/{name}"


def make_index(
    root: str,
    names: Sequence[str],
    labels: Sequence[int] | npt.NDArray[np.int32],
    classes: Sequence[str],
    left_out: int = 0,
) -> Index:
    """Build the index of whole files in this order."""
    encoded, label_N = [os.fsencode(name) for name in names], np.asarray(labels, np.int32)
    ends_F = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    return Index(root, b"".join(encoded), ends_F, label_N, tuple(classes), left_out=left_out)


def read_file(path: str) -> bytes:
    """Read a file. Raises OSError, StorageError, and BrokenImageError if it is too large."""
    if remote.is_remote(path):
        size = files.file_size(path)
    else:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= MAX_FILE_BYTES:
                return file.readall()
    if size > MAX_FILE_BYTES:
        raise BrokenImageError(f"has {size >> 20} MiB, more than an image has")
    return files.read_bytes(path, 0, size)


# --- labels ---------------------------------------------------------------------------------------


def number_labels(
    labels: Sequence[Label], classes: Sequence[Label] | None, location: str
) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
    """Return the class number of each label, and the class names, empty if labels are numbers.

    `classes` are the allowed classes in order; None allows any. Raises DataError for a label that
    is not allowed, for names that differ only in case or spaces, and for numbers with gaps.
    """
    distinct = set(labels)
    if classes is None and all(isinstance(label, int) for label in distinct):
        _check_numbers({int(label) for label in distinct}, location)
        return np.asarray(labels, np.int32), ()
    if classes is None:
        classes = names = sorted(map(str, distinct))
        by_folded_name: dict[str, str] = {}
        for name in names:
            other = by_folded_name.setdefault(fold_name(name), name)
            if other != name:
                problem = f"the classes {other!r} and {name!r} differ only in case or spaces"
                raise DataError(f"{location}: {problem}; use one name")
    numbers = {str(name): number for number, name in enumerate(classes)}
    unknown = sorted({str(label) for label in distinct} - numbers.keys())
    if unknown:
        subject, verb = ("the label", "is") if len(unknown) == 1 else ("the labels", "are")
        raise DataError(
            f"{location}: {subject} {list_names(unknown)} {verb} not among the {len(numbers)} "
            f"classes ({list_names(list(numbers))}); leave those out, or name them in data.classes"
        )
    label_N = np.fromiter((numbers[str(label)] for label in labels), np.int32, len(labels))
    return label_N, tuple(numbers)


def fold_name(name: str) -> str:
    """Return the name of a class without differences of case and spaces."""
    return " ".join(name.casefold().split())


def _check_numbers(numbers: set[int], location: str) -> None:
    lowest, highest = min(numbers, default=0), max(numbers, default=0)
    if lowest < 0 or highest >= MAX_CLASSES:
        label = lowest if lowest < 0 else highest
        raise DataError(f"{location}: the label {label} is not the number of a class")
    if numbers and (missing := sorted(set(range(highest + 1)) - numbers)[:MAX_LISTED_NAMES]):
        raise DataError(
            f"{location}: the labels are whole numbers up to {highest}, without "
            f"{list_names(missing)}; number the classes from 0, or list the labels in data.classes"
        )


def parse_label(label: Label) -> Label:
    """Convert a label that consists of digits to an integer."""
    digits = label.removeprefix("-") if isinstance(label, str) else ""
    return int(label) if digits.isascii() and digits.isdecimal() and len(digits) < 10 else label


def list_names(names: Sequence[Label]) -> str:
    """Return the first names as a list for a message."""
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(map(repr, names[:MAX_LISTED_NAMES])) + more


# --- the cache ------------------------------------------------------------------------------------


def cached_index(
    key: Any, read_marks: Callable[[], Any], build_index: Callable[[Path], Index]
) -> Index:
    """Return the index for `key` from the cache, or build it.

    The cached index is valid while the result of `read_marks` is unchanged. `build_index` may write
    files to the folder that it gets. Of several processes of a host, one builds while the others
    wait.
    """
    folder = user_cache.cache_folder("images") / _json_digest([VERSION, key])[:24]
    mark = _json_digest(read_marks())
    if not _has_mark(folder, mark):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("a")
        except OSError:
            # The cache is not writable, so the index is built and not stored.
            return _with_digest(build_index(folder))
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _has_mark(folder, mark):
                for entry in folder.iterdir():
                    if entry.name != "lock":
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                _store_index(_with_digest(build_index(folder)), folder, mark)
    return _load_index(folder, mark)


def _json_digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _store_index(index: Index, folder: Path, mark: str) -> None:
    names = np.frombuffer(index.names, np.uint8)
    with atomic_file.open_draft(folder / "index.npz") as draft, draft.open("wb") as file:
        np.savez(file, names=names, **index.arrays(_ARRAYS))
    fields = dataclasses.asdict(index).items()
    scalars = {key: value for key, value in fields if key not in (*_ARRAYS, "names")}
    content = json.dumps({"mark": mark, "index": scalars})
    atomic_file.write_file(folder / "index.json", content.encode())


def _has_mark(folder: Path, mark: str) -> bool:
    try:
        return bool(json.loads((folder / "index.json").read_text())["mark"] == mark)
    except (OSError, ValueError, KeyError):
        return False


@functools.lru_cache(maxsize=16)
def _load_index(folder: Path, mark: str) -> Index:
    scalars = json.loads((folder / "index.json").read_text())["index"]
    with np.load(folder / "index.npz") as arrays:
        loaded = {key: arrays[key] for key in _ARRAYS if key in arrays}
        names = arrays["names"].tobytes()
    scalars |= {key: tuple(scalars[key]) for key in ("classes", "broken", "printed")}
    return Index(names=names, **loaded, **scalars)


def _relative_names(index: Index) -> bytes:
    """Return the names of all files relative to their common folder."""
    if index.root or not len(index.end_F):
        return index.names
    # The files of a glob or a list have absolute names.
    paths = [index.file_path(file) for file in range(len(index.end_F))]
    return b"\0".join(map(os.fsencode, files.relative_names(paths)))


def _with_digest(index: Index) -> Index:
    """Add a digest of names, ranges, labels and a bounded sample of the images' bytes to the index.

    Names are relative to the common folder, because the same images may be mounted elsewhere on the
    next machine.
    """
    identity = index.identity.encode() or _relative_names(index)
    digest = hashlib.sha256(json.dumps(index.classes).encode(errors="surrogatepass") + identity)
    for array in index.arrays(("label_N", "start_N", "size_N")).values():
        digest.update(np.ascontiguousarray(array).tobytes())
    for image in range(0, len(index), max(1, -(-len(index) // DIGEST_SAMPLES))):
        with contextlib.suppress(BrokenImageError):
            digest.update(index.read_image(image)[:SAMPLE_BYTES])
    return dataclasses.replace(index, digest=digest.hexdigest()[:12])
