"""Datasets of tensorflow-datasets, found by name and prepared once as array_record, without TensorFlow.

Several processes of a host may need a dataset at once: one prepares it, under a file lock, the others wait. The folder
of a dataset appears by a rename, when it is complete. Most builders use TensorFlow for two things only, opening files
and encoding images; both are done here in plain Python. A builder that needs more fails with an error that names it.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from PIL import Image
from tensorflow_datasets.core.download import extractor

from jaxlaunch import installation
from jaxlaunch.spelling import nearest
from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.errors import DataError

# Random access needs array_record; the builders' default, TFRecord, has none.
FORMAT = "array_record"
OURS = "digits"  # the builder that is ours and not in tensorflow-datasets' list

# Logged for every dataset that is about to be prepared, and for every first image (we depend on Pillow, on purpose).
NOISE = re.compile(r"Variant folder .* has no dataset_info.json|OpenCV is not installed")
logging.getLogger("absl").addFilter(lambda record: not NOISE.match(record.getMessage()))


def prepared(name: str, folder: str) -> Any:
    """The builder of `name`, prepared in `folder`. Raises DataError when it is not prepared and cannot be."""
    builder = _builder(name, folder)
    if not builder.is_prepared():
        with _locked(folder, name):
            builder = _builder(name, folder)  # another process may have prepared it meanwhile
            if not builder.is_prepared():
                _prepare(builder, name, folder)
                builder = _builder(name, folder)
    return builder


def _builder(name: str, folder: str) -> Any:
    if name == OURS:
        from jaxlaunch.trainer.sources.digits.digits_dataset_builder import Builder

        return Builder(data_dir=folder)
    try:
        return tfds.builder(name, data_dir=folder)
    except tfds.core.registered.DatasetNotFoundError as error:
        near = nearest(name, [OURS, *tfds.list_builders(with_community_datasets=False)], 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "name one of tensorflow-datasets, or digits"
        raise DataError(f"data.name = {name} is not a dataset; {hint}") from error


@contextlib.contextmanager
def _locked(folder: str, name: str) -> Iterator[None]:
    """Holds the lock of one dataset; the kernel releases it when its holder dies."""
    path = Path(folder) / f".{name.replace('/', '-')}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        why = f"{name} is not prepared in {folder}, which cannot be written ({error}); set data.data_dir"
        raise DataError(why) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prepare(builder: Any, name: str, folder: str) -> None:
    if name == OURS and importlib.util.find_spec("sklearn") is None:
        raise DataError(f"data.name = digits needs scikit-learn, which has the images: {installation.hint('train')}")
    _require_network(builder, name, folder)
    tfds.disable_progress_bar()
    said: TextIO = sys.stderr  # results belong on stdout, what tensorflow-datasets prints is not a result
    if not builder.url_infos:
        print(f"preparing {name} in {folder}", file=sys.stderr)
        said = io.StringIO()  # it would speak of a download of unknown size
    try:
        with without_tensorflow(builder), contextlib.redirect_stdout(said):
            builder.download_and_prepare(file_format=FORMAT)
    except Exception as error:  # any builder's own code runs in there
        raise faults.kind_of(error)(
            f"{name} is not prepared in {folder} and preparing it failed ({type(error).__name__}: {error}); "
            "prepare it where that works and set data.data_dir to its folder"
        ) from error


def _require_network(builder: Any, name: str, folder: str) -> None:
    """Raises DataError when no host that `builder` downloads from has an address: retrying that takes minutes."""
    hosts = sorted({urllib.parse.urlsplit(url).hostname or "" for url in builder.url_infos or {}} - {""})
    if not hosts or urllib.request.getproxies():  # behind a proxy names are resolved by the proxy
        return
    for host in hosts:
        with contextlib.suppress(socket.gaierror):
            socket.getaddrinfo(host, None)
            return
    raise DataError(
        f"{name} is not prepared in {folder} and there is no network to download it ({hosts[0]} has no address); "
        "prepare it where there is one and set data.data_dir to its folder"
    )


# Replaces the name `tf` in the modules that only open files with it.
FILES_ONLY = types.SimpleNamespace(
    compat=types.SimpleNamespace(as_text=os.fsdecode),
    io=types.SimpleNamespace(gfile=types.SimpleNamespace(GFile=open)),
)


@contextlib.contextmanager
def without_tensorflow(builder: Any) -> Iterator[None]:
    """Within it, `builder` opens files and encodes images without TensorFlow, if that is not installed."""
    if importlib.util.find_spec("tensorflow") is not None:
        yield
        return
    builder._generate_examples = _encoding(builder)  # the documented place where a builder makes its examples
    modules = [module for module in (extractor, sys.modules[type(builder).__module__]) if hasattr(module, "tf")]
    with contextlib.ExitStack() as restored:
        for module in modules:
            restored.callback(setattr, module, "tf", module.tf)
            setattr(module, "tf", FILES_ONLY)  # noqa: B010  # as an attribute mypy would know its type
        yield


def _encoding(builder: Any) -> Any:
    generate = builder._generate_examples
    images = {
        key
        for key, feature in (builder.info.features or {}).items()
        if isinstance(feature, tfds.features.Image) and feature.np_dtype == np.uint8
    }

    def encoded(*args: Any, **kwargs: Any) -> Any:
        made = generate(*args, **kwargs)
        return _with_png(made, images) if isinstance(made, Iterator) else made  # else a Beam transform

    return encoded


def _with_png(made: Iterator[tuple[Any, Any]], images: set[str]) -> Iterator[tuple[Any, Any]]:
    """The same examples, arrays under a key of `images` as PNG files."""
    for key, example in made:
        arrays = {name: example[name] for name in images & set(example) if isinstance(example[name], np.ndarray)}
        yield key, {**example, **{name: _png(array) for name, array in arrays.items()}}


def _png(image_HWC: Any) -> io.BytesIO:
    file = io.BytesIO()
    Image.fromarray(image_HWC[..., 0] if image_HWC.shape[-1] == 1 else image_HWC).save(file, "png")
    return io.BytesIO(file.getvalue())
