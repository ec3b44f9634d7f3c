"""The recipe of a corpus: everything that determines its rows. Equal recipes give equal bytes.

The name of the folder of the rows is a digest of the recipe, so that prepared rows are reused, and
another file, tokenizer or key gives another folder.

Files are identified by their names and a SHA-256 of their contents. These digests are cached in the
folder of prepared rows, for all hosts that share it, and are valid while a file's path, size and
modification time (in nanoseconds) are unchanged. The digest of a file that changed a moment ago is
not cached, because its next change may have the same time. An object in a bucket is identified by
its generation or ETag.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch import atomic_file, user_cache
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.errors import DataError, SpecError, Stopped
from jaxlaunch.trainer.spec import Text
from jaxlaunch.trainer.text import chats, documents, layouts, tokenizer

# Version of the shards. Increase it when the same recipe gives different bytes.
FORMAT_VERSION = 3
# Version of the rule by which documents are held out.
SPLIT_VERSION = 1
# This file is written last, so a folder that contains it is complete.
INDEX_FILE = "index.json"
CHUNK_BYTES = 1 << 20
# File systems such as FAT store times with a resolution of two seconds.
SETTLED_S = 2.0
STOPPED = "stopped while the files of the text were hashed"

# The size, the modification time in nanoseconds, and the digest of each path.
Digests = dict[str, tuple[int, int, str]]
# Digests of this process, used if the folder is not writable.
_process_digests: Digests = {}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that determines the rows. `paths` are in reading order."""

    paths: tuple[str, ...]
    # Digest of the files.
    digest: str
    tokenizer: str
    tokenizer_digest: str
    field: str | None
    packing: str
    length: int
    eval_split: float
    seed: int
    # Digest of the chat template; None if rows are texts.
    template: str | None = None
    split_seed: int = 0
    # Field of the group of a row. All rows of a group are in the same split.
    group: str | None = None
    # The format of the rows, by which their layouts are recognized.
    format: str = "text"

    @property
    def has_targets(self) -> bool:
        """Whether only some tokens of a row are targets, as in chats."""
        return self.format != "text"

    @property
    def address(self) -> str:
        """The name of the folder: a digest of the recipe without the locations of files."""
        keys = dataclasses.asdict(self)
        del keys["paths"], keys["tokenizer"]
        if self.format in ("text", layouts.CHAT):
            # The template already distinguishes these formats.
            del keys["format"]
        if self.template is None:
            # Texts keep the addresses that they had before chats were supported.
            del keys["template"]
        # If nothing is held out, the rows do not depend on the rule for holding documents out.
        split = [SPLIT_VERSION, keys.pop("split_seed"), keys.pop("group")]
        keys |= {"split": split} if self.eval_split else {}
        text = json.dumps([FORMAT_VERSION, keys], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Encode the recipe for `from_json`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Decode a recipe that `to_json` encoded."""
        keys: dict[str, Any] = json.loads(text)
        return cls(**{**keys, "paths": tuple(keys["paths"])})


def make_recipe(
    data: Text,
    length: int,
    *,
    held_out: bool = False,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Recipe:
    """Return the recipe of a data block, or with `held_out` of its eval_path, for `length` targets.

    Raises DataError if no file matches or one has no chats, SpecError if the tokenizer or its chat
    template cannot be read, and Stopped once `is_stopped`.
    """
    assert data.eval_path is not None or not held_out
    eval_paths = [] if data.eval_path is None else documents.find_files(data.eval_path, "eval_path")
    paths = eval_paths if held_out else documents.find_files(data.path)
    has_layout = data.format != "text"
    if has_layout:
        documents.check_rows(paths, "chats")
    for key, name in (("field", data.field), ("group", data.group)):
        if name is not None and all(documents.file_kind(path) == "text" for path in paths):
            raise DataError(
                f"{paths[0]} is plain text, by its name, and has no field {name!r}, unlike JSON "
                f"lines (.jsonl), Parquet and Arrow. Leave data.{key} out to read the whole file "
                "as text"
            )
    return Recipe(
        paths=tuple(paths),
        digest=digest_files(paths, Path(prepared_root(data)), is_stopped),
        tokenizer=data.tokenizer,
        tokenizer_digest=tokenizer.load_tokenizer(data.tokenizer).digest,
        field=data.field or (chats.MESSAGES_FIELD if has_layout else None),
        packing=data.packing or "concat",
        length=length,
        eval_split=0.0 if data.eval_path is not None else data.eval_split,
        seed=data.seed,
        template=_template_digest(data) if has_layout else None,
        split_seed=data.split_seed,
        group=None if data.eval_path is not None else data.group,
        format=data.format,
    )


def _template_digest(data: Text) -> str | None:
    """Return the digest of the chat template, None if texts need none. Raises SpecError."""
    try:
        return chats.load_chats(data.tokenizer).digest
    except SpecError:
        if data.format != layouts.COMPLETION:
            raise
        return None


def prepared_root(data: Text) -> str:
    """Return the root folder of prepared rows: the job's, or one in the user's cache folder."""
    return data.data_dir if data.data_dir is not None else str(user_cache.cache_folder("text"))


def digest_files(
    paths: Sequence[str], folder: Path, is_stopped: Callable[[], bool] = lambda: False
) -> str:
    """Hash names and contents of files to 12 hexadecimal digits, caching digests in `folder`.

    The common folder is not part of the digest, because the same data may be mounted elsewhere on
    the next machine. Raises DataError for a file that cannot be read, StorageError, Stopped.
    """
    local_paths = [path for path in paths if not remote.is_remote(path)]
    content = _digest_contents(local_paths, folder, is_stopped)
    for path in paths:
        if remote.is_remote(path):
            content[path] = " ".join(map(str, files.stat_object(path)))
    digest = hashlib.sha256()
    for path, name in zip(paths, files.relative_names(paths), strict=True):
        digest.update(f"{name} {content[path]}\n".encode(errors="backslashreplace"))
    return digest.hexdigest()[:12]


def _digest_contents(
    paths: Sequence[str], folder: Path, is_stopped: Callable[[], bool]
) -> dict[str, str]:
    if not paths:
        return {}
    absolute = {path: os.path.abspath(path) for path in paths}
    key = hashlib.sha256(json.dumps([absolute[path] for path in paths]).encode()).hexdigest()[:16]
    cache_path = folder / "digests" / f"{key}.json"
    digests: Digests = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        # If the file does not exist or is truncated, all files are hashed again.
        digests = {
            name: (int(size), int(mtime_ns), str(digest))
            for name, (size, mtime_ns, digest) in json.loads(cache_path.read_text())
        }
    digests |= _process_digests
    marks = {}
    for path in absolute.values():
        try:
            stat = os.stat(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from None
        marks[path] = stat.st_size, stat.st_mtime_ns
    outdated = [path for path, mark in marks.items() if digests.get(path, (0, 0, ""))[:2] != mark]
    # Threads are enough, because hashing releases the interpreter lock.
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        hashes = pool.map(lambda path: _hash_file(path, is_stopped), outdated)
        for path, digest in zip(outdated, hashes, strict=True):
            digests[path] = (*marks[path], digest)
    if outdated:
        # Cache the digests of files that did not change recently. The cache of this process is used
        # if the folder is not writable.
        latest_ns = time.time_ns() - int(SETTLED_S * 1e9)
        settled = {path: digests[path] for path in marks if digests[path][1] < latest_ns}
        _process_digests.update(settled)
        with contextlib.suppress(OSError):
            cache_path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.write_file(cache_path, json.dumps(list(settled.items())).encode())
    return {path: digests[absolute[path]][2] for path in paths}


def _hash_file(path: str, is_stopped: Callable[[], bool]) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(CHUNK_BYTES):
                digest.update(block)
                if is_stopped():
                    raise Stopped(STOPPED)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return digest.hexdigest()
