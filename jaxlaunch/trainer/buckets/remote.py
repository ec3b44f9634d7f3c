"""Access to objects in gs:// and s3:// through fsspec, without importing jax.

Listings are never cached, because tensorstore and other processes write to the same buckets.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import fsspec

from jaxlaunch import installation
from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.counts import Counter
from jaxlaunch.trainer.errors import DataError, SpecError, StorageError, TrainerError, first_line
from jaxlaunch.trainer.spec import block

if TYPE_CHECKING:
    from etils import epath

# The name of each scheme in fsspec, which is also the extra of jaxlaunch, and the package it needs.
SCHEMES = {"gs": ("gcs", "gcsfs"), "s3": ("s3", "s3fs")}

READ_BYTES = Counter("jaxlaunch_bucket_read_bytes_total")

for _protocol, _ in SCHEMES.values():
    fsspec.config.conf.setdefault(_protocol, {})["use_listings_cache"] = False
# etils.epath sets this too, so that both use the same file system.
fsspec.config.conf["gcs"]["finalize_on_close"] = True
# gcsfs also logs the traceback of the errors that it raises, which we report as one sentence.
logging.getLogger("gcsfs").addFilter(lambda record: not record.exc_info)


def is_remote(path: str) -> bool:
    """Return whether `path` is a URL."""
    return "://" in path


def check_url(key: str, url: str) -> None:
    """Raise SpecError if the store of `url` is not supported or lacks its package.

    `key` is the setting that the message names.
    """
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        hint = f"use {' and '.join(f'{name}://' for name in SCHEMES)}"
        raise SpecError(f"{key} = {url}: {scheme}:// is not a supported object store; {hint}")
    if (fault := block.bucket_fault(url)) is not None:
        raise SpecError(f"{key} = {url} {fault}")
    extra, package = SCHEMES[scheme]
    if importlib.util.find_spec(package) is None and extra not in fsspec.registry:
        problem = f"{scheme}:// needs {package}, which is not installed"
        raise SpecError(f"{key} = {url}: {problem}: {installation.install_hint(extra)}")


def open_filesystem(url: str) -> Any:
    """Return fsspec's file system for `url`. Raises ImportError if its package is not installed."""
    return fsspec.filesystem(SCHEMES[url.partition("://")[0]][0])


def read_range(url: str, start: int, end: int) -> bytes:
    """Read the bytes of an object from `start` to `end`. Raises the errors of the store."""
    data: bytes = open_filesystem(url).cat_file(url, start=start, end=end)
    READ_BYTES.add(len(data))
    return data


def list_names(url: str) -> list[str]:
    """Return the sorted names of all objects below `url`, relative to it.

    Raises FileNotFoundError if the bucket does not exist.
    """
    filesystem = open_filesystem(url)
    root = str(filesystem._strip_protocol(url)).rstrip("/")
    with name_missing_bucket(url):
        objects = [name for name in filesystem.find(url) if not name.endswith("/")]
    return sorted(name.removeprefix(root).strip("/") for name in objects)


def match_urls(pattern: str) -> list[str]:
    """Return the URLs of objects that match a URL with `*`, `**`, `?` or `[…]`."""
    scheme = pattern.partition("://")[0]
    with convert_errors(f"listing {pattern}"):
        objects = open_filesystem(pattern).glob(pattern, detail=True)
    return [f"{scheme}://{name}" for name, info in objects.items() if info["type"] == "file"]


def list_entries(folder: str) -> list[str]:
    """Return the sorted names in a folder, or an empty list if it does not exist."""
    try:
        with convert_errors(f"listing {folder}"):
            paths = open_filesystem(folder).ls(folder, detail=False)
    except FileNotFoundError:
        return []
    return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)


@contextlib.contextmanager
def name_missing_bucket(url: str) -> Iterator[None]:
    """Let a FileNotFoundError say that the bucket of `url` does not exist.

    It has no other cause if objects are listed or written. s3fs says only NoSuchBucket, and gcsfs
    says only the URL of its request.
    """
    try:
        yield
    except FileNotFoundError as error:
        bucket = "/".join(url.split("/")[:3])
        raise FileNotFoundError(f"the bucket {bucket} does not exist; create it") from error


def create_folder(path: epath.Path) -> None:
    """Create a folder and its parents, unless they are in an object store, which has no folders.

    In an object store, s3fs and gcsfs would create a missing bucket. A run would then start from
    nothing in an empty bucket, although somebody has deleted the one with its checkpoints.
    """
    if not is_remote(os.fspath(path)):
        path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def convert_errors(action: str, permanent_error: type[TrainerError] = DataError) -> Iterator[None]:
    """Convert a store's errors to StorageError, or to `permanent_error` if they would recur."""
    try:
        yield
    except (FileNotFoundError, TrainerError):
        raise
    except Exception as error:
        # Stores raise errors of different libraries: aiohttp, botocore, Google's clients.
        error_type = permanent_error if faults.is_refusal(error) else StorageError
        raise error_type(f"{action} failed: {first_line(error)}") from error
