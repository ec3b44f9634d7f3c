"""Sources of tensorflow-datasets, which are prepared as array_record and read without TensorFlow.

If several processes of a host need a dataset, one prepares it under a file lock while the others
wait. The folder of a dataset is renamed when it is complete. Most builders use TensorFlow only to
open files and to encode images, which this module replaces by plain Python. A builder that needs
more of TensorFlow fails with an error that names it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import logging
import os
import re
import socket
import sys
import types
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import extractor

from jaxlaunch import installation, user_cache
from jaxlaunch.spelling import find_nearest
from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.data.augment import to_pil_image, transform_images
from jaxlaunch.trainer.data.source import DataSource, Split
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.spec import Tfds, TrainSpec

# Number of examples in the fingerprint.
DIGEST_SAMPLES = 16
# Random access needs array_record; the builders' default, TFRecord, has none.
FILE_FORMAT = "array_record"
# The builder of this package (sources/digits), which tensorflow-datasets does not list.
LOCAL_BUILDER = "digits"

# Messages that are logged for every dataset that is prepared, and for its first image. Images are
# decoded by Pillow on purpose.
IGNORED_LOGS = re.compile(r"Variant folder .* has no dataset_info.json|OpenCV is not installed")
logging.getLogger("absl").addFilter(lambda record: not IGNORED_LOGS.match(record.getMessage()))


def open_source(data: Tfds, split: Split, spec: TrainSpec | None = None) -> DataSource | None:
    """Open a split, or None if the job has no such split. Prepares the dataset if necessary.

    Slices such as `train[:90%]` are supported. Raises DataError for an unknown split, and if the
    preparation fails.
    """
    name = data.split if split == "train" else data.eval_split
    if name is None:
        return None
    folder = data.data_dir or str(user_cache.cache_folder("tfds"))
    return transform_images(TfdsSplit(data.name, name, folder), data, split)


class TfdsSplit(DataSource):
    """A source of examples that the builder decodes: images to uint8, labels to integers."""

    def __init__(self, dataset: str, split: str, folder: str) -> None:
        self.name = f"tfds {dataset} {split}"
        builder = prepare_dataset(dataset, folder)
        self._title = f"tfds {builder.info.full_name} {split}"
        try:
            self._data = builder.as_data_source(split=split)
        except ValueError as error:
            names = f"it has {', '.join(sorted(builder.info.splits))}, and slices such as"
            raise DataError(f"{dataset} has no split {split!r}; {names} train[:90%]") from error
        except NotImplementedError as error:
            raise DataError(
                f"{dataset} is stored in {folder} as {builder.info.file_format}, which has no "
                "random access; prepare it with file_format='array_record', or set data.data_dir "
                "to another folder"
            ) from error

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record: dict[str, Any] = self._data[index]
        return record

    def fingerprint(self) -> str:
        """Return dataset, version, split, number of examples, and a digest of decoded samples."""
        # Hash decoded examples and not files, because another version of zlib compresses a PNG
        # differently.
        digest = hashlib.sha256()
        for index in np.linspace(0, len(self) - 1, min(DIGEST_SAMPLES, len(self)), dtype=int):
            _update_digest(digest, self[int(index)])
        return f"{self._title}, {len(self)} examples, sha256 {digest.hexdigest()[:12]}"


def _update_digest(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value):
            digest.update(key.encode())
            _update_digest(digest, value[key])
    else:
        array = np.asarray(value)
        digest.update(f"{array.dtype.kind} {array.shape}".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes())


def prepare_dataset(name: str, folder: str) -> Any:
    """Return the builder of `name`, prepared in `folder` if necessary. Raises DataError."""
    builder = _make_builder(name, folder)
    if builder.is_prepared():
        return builder
    path = Path(folder) / f".{name.replace('/', '-')}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError as error:
        problem = f"{name} is not prepared in {folder}, which cannot be written ({error})"
        raise DataError(f"{problem}; set data.data_dir") from error
    with lock:
        # The kernel releases the lock when its holder dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have prepared the dataset in the meantime.
        builder = _make_builder(name, folder)
        if not builder.is_prepared():
            _prepare_builder(builder, name, folder)
            builder = _make_builder(name, folder)
    return builder


def _make_builder(name: str, folder: str) -> Any:
    if name == LOCAL_BUILDER:
        from jaxlaunch.trainer.sources.digits.digits_dataset_builder import Builder

        return Builder(data_dir=folder)
    try:
        return tfds.builder(name, data_dir=folder)
    except tfds.core.registered.DatasetNotFoundError as error:
        names = [LOCAL_BUILDER, *tfds.list_builders(with_community_datasets=False)]
        suggestions = find_nearest(name, names, 3)
        hint = "name one of tensorflow-datasets, or digits"
        if suggestions:
            hint = f"did you mean {' or '.join(suggestions)}?"
        raise DataError(f"data.name = {name} is not a dataset; {hint}") from error


def _prepare_builder(builder: Any, name: str, folder: str) -> None:
    if name == LOCAL_BUILDER and importlib.util.find_spec("sklearn") is None:
        raise DataError(
            "data.name = digits needs scikit-learn, which has the images: "
            f"{installation.install_hint('train')}"
        )
    _require_network(builder, name, folder)
    tfds.disable_progress_bar()
    # Standard output is reserved for results.
    output: TextIO = sys.stderr
    if not builder.url_infos:
        print(f"preparing {name} in {folder}", file=sys.stderr)
        # There is no download, but tensorflow-datasets would report one of unknown size.
        output = io.StringIO()
    try:
        with without_tensorflow(builder), contextlib.redirect_stdout(output):
            builder.download_and_prepare(file_format=FILE_FORMAT)
    except Exception as error:
        # The code of any builder runs here.
        raise faults.error_class(error)(
            f"{name} is not prepared in {folder} and preparing it failed ({type(error).__name__}: "
            f"{error}); prepare it where that works and set data.data_dir to its folder"
        ) from error


def _require_network(builder: Any, name: str, folder: str) -> None:
    """Raise DataError if no download host has an address, because retries take minutes."""
    urls = map(urllib.parse.urlsplit, builder.url_infos or {})
    hosts = sorted({url.hostname or "" for url in urls} - {""})
    if not hosts or urllib.request.getproxies():
        # A proxy resolves the names of hosts itself.
        return
    for host in hosts:
        with contextlib.suppress(socket.gaierror):
            socket.getaddrinfo(host, None)
            return
    raise DataError(
        f"{name} is not prepared in {folder} and there is no network to download it ({hosts[0]} "
        "has no address); prepare it where there is one and set data.data_dir to its folder"
    )


# This object replaces the name `tf` in modules that only open files with it.
TENSORFLOW_STUB = types.SimpleNamespace(
    compat=types.SimpleNamespace(as_text=os.fsdecode),
    io=types.SimpleNamespace(gfile=types.SimpleNamespace(GFile=open)),
)


@contextlib.contextmanager
def without_tensorflow(builder: Any) -> Iterator[None]:
    """Let `builder` open files and encode images without TensorFlow if it is not installed."""
    if importlib.util.find_spec("tensorflow") is not None:
        yield
        return
    # Builders make their examples in this documented method.
    generate = builder._generate_examples
    images = {
        key
        for key, feature in (builder.info.features or {}).items()
        if isinstance(feature, tfds.features.Image) and feature.np_dtype == np.uint8
    }

    def generate_encoded(*args: Any, **kwargs: Any) -> Any:
        examples = generate(*args, **kwargs)
        # Builders that use Beam return something else.
        return _encode_images(examples, images) if isinstance(examples, Iterator) else examples

    builder._generate_examples = generate_encoded
    with contextlib.ExitStack() as stack:
        for module in (extractor, sys.modules[type(builder).__module__]):
            if hasattr(module, "tf"):
                stack.callback(setattr, module, "tf", module.tf)
                # mypy would reject an assignment to the attribute, whose type it knows.
                setattr(module, "tf", TENSORFLOW_STUB)  # noqa: B010
        yield


def _encode_images(
    examples: Iterator[tuple[Any, Any]], images: set[str]
) -> Iterator[tuple[Any, Any]]:
    for key, example in examples:
        encoded = dict(example)
        for name in images & set(example):
            if isinstance(image_HWC := example[name], np.ndarray):
                file = io.BytesIO()
                to_pil_image(image_HWC).save(file, "png")
                encoded[name] = io.BytesIO(file.getvalue())
        yield key, encoded
