"""Opens the source of `train.data`, and imports only the modules that it needs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.data.source import DataSource, Split
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.spec import SOURCES, Source, TrainSpec, model_sizes

BYTE_VOCAB = 256


def open_source(spec: TrainSpec, split: Literal["train", "eval"]) -> DataSource | None:
    """Open the data of the job's `train.data`, for the `source` of a task of your own.

    **Arguments:**

    - `spec`: the `train` block, as the task's `source` gets it.
    - `split`: `"train"`, or `"eval"` for the held-out examples.

    **Returns:**

    A [`Source`](#source), or `None` if the job has no held-out examples.

    **Raises:**

    [`TrainerError`](#trainererror) if there is nothing to read, storage fails, or the model does
    not fit the data.

    **Example:**

    ```python
    import jaxlaunch

    spec = jaxlaunch.TrainSpec.model_validate(
        {"task": "lm", "data": {"source": "tfds", "name": "digits"}}
    )
    source = jaxlaunch.open_source(spec, "train")
    assert source is not None and len(source) == 1437
    ```
    """
    subject = f"train.data: the {split} split of {spec.data.source}"
    try:
        source = open_block(spec.data, split, spec)
    except OSError as error:
        raise faults.read_error(f"{subject} cannot be opened", error) from error
    if source is not None and not len(source):
        raise DataError(f"{subject} has no examples")
    return source


def open_block(data: Source, split: Split, spec: TrainSpec | None = None) -> DataSource | None:
    """Open a split of a data block. Sources of images do not need `spec`."""
    return import_opener(data)(data, split, spec)


def open_for_worker(block: str, split: Split) -> DataSource:
    """Open a split of a data block, given as JSON, in a worker process."""
    source = open_block(SOURCES[json.loads(block)["source"]].model_validate_json(block), split)
    assert source is not None, "the trainer has opened this split"
    return source


def worker_opener(data: Source, split: Split) -> tuple[str, tuple[str, Split]]:
    """Return the `opener` of a source that needs only its data block."""
    return f"{__name__}:{open_for_worker.__name__}", (data.model_dump_json(), split)


def import_opener(data: Source) -> Callable[..., DataSource | None]:
    """Return the function that opens `data`, and import its module, without user modules."""
    # The import is late, because tensorflow-datasets takes a quarter of a second.
    module, _, function = data.opener.partition(":")
    opener: Any = getattr(importlib.import_module(f"jaxlaunch.trainer.{module}"), function)
    return opener  # type: ignore[no-any-return]


def tokenizer_files(data: Source) -> Mapping[str, bytes]:
    """Return the contents of the tokenizer files by name, {} for bytes and for other data."""
    from jaxlaunch.trainer.text import tokenizer

    path = data.locations().get(("tokenizer",))
    return {} if path is None else tokenizer.load_tokenizer(str(path)).files


def token_sizes(spec: TrainSpec) -> tuple[int, int]:
    """Return the length and vocabulary of rows of tokens. Raises SpecError without a length."""
    sizes = model_sizes(spec.model)
    if sizes.length is None or sizes.length < 1:
        need = "needs train.model.length, the tokens of an example"
        raise SpecError(f"data.source = {spec.data.source} {need}")
    return sizes.length, BYTE_VOCAB if sizes.vocab is None else sizes.vocab
