"""Lets builders of tensorflow-datasets prepare where TensorFlow is not installed.

Most builders use it for two things only, opening files and encoding images; both are done here in plain Python. A
builder that needs more still fails with an error that names TensorFlow.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image
from tensorflow_datasets.core.download import extractor

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
