"""Opens the source of `train.data`, importing only the modules that a job needs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Literal

from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.data.source import DataSource
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.spec import (
    ArrayRecord,
    Data,
    Images,
    Mixture,
    Synthetic,
    Table,
    Text,
    Tfds,
    Torch,
    TrainSpec,
    model_sizes,
)

BYTE_VOCAB = 256
Split = Literal["train", "eval"]
# Modules by the kind of data, imported late: tensorflow-datasets takes a quarter of a second.
MODULES = {
    "tfds": ("sources.tfds",),
    "array_record": ("sources.array_record",),
    "images": ("sources.images.source",),
    "table": ("sources.tables.source",),
    "text": ("sources.text", "sources.mixture", "text.preferences"),
    "torch": ("sources.torch",),
    "synthetic": ("sources.synthetic",),
}


def open_source(spec: TrainSpec, split: Literal["train", "eval"]) -> DataSource | None:
    """Open what the job's `train.data` describes, as the `source` of a task of your own.

    **Arguments:**

    - `spec`: the `train` block, as the task's `source` gets it.
    - `split`: `"train"`, or `"eval"` for the held-out examples.

    **Returns:**

    A [`Source`](#source); `None` where the job has no held-out examples.

    **Raises:**

    [`TrainerError`](#trainererror) where there is nothing to read, storage fails or the model does
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
        source = _open_split(spec, spec.data, split)
    except OSError as error:
        raise faults.read_error(f"{subject} cannot be opened", error) from error
    if source is not None and not len(source):
        raise DataError(f"{subject} has no examples")
    return source


def import_modules(data: Data) -> None:
    """Import the modules that opening `data` needs, without those of the user."""
    for module in MODULES[data.part_kind if isinstance(data, Mixture) else data.source]:
        importlib.import_module(f"jaxlaunch.trainer.{module}")


def baseline_metrics(
    spec: TrainSpec, train: DataSource, held_out: DataSource | None
) -> dict[str, float]:
    """Return the metrics of baseline models on the held-out data, reported with the evaluation."""
    if isinstance(spec.data, Text) and spec.data.bigram:
        from jaxlaunch.trainer.sources import text

        if isinstance(train, text.TextStream) and isinstance(held_out, text.TextStream):
            return {"bigram_bits_per_byte": text.bigram_bits_per_byte(train, held_out)}
    return {}


def tokenizer_files(data: Data) -> Mapping[str, bytes]:
    """Return the tokenizer files of checkpoints by name, none for bytes and for other data."""
    from jaxlaunch.trainer.text import tokenizer

    if isinstance(data, Text | Mixture):
        return tokenizer.load_tokenizer(data.tokenizer).files
    return {}


def open_mixture(block: str, split: Split) -> DataSource:
    """Open a mixture of images from its JSON block in a worker process."""
    from jaxlaunch.trainer.sources.images import source as images

    source = images.open_mixture(Mixture.model_validate_json(block), split, _open_examples)
    assert source is not None, "the process that asks has it open"
    return source


def _open_split(spec: TrainSpec, data: Data, split: Split) -> DataSource | None:
    match data:
        case Tfds() | ArrayRecord() | Images():
            return _open_examples(data, split)
        case Table():
            from jaxlaunch.trainer.sources.tables import source as tables

            return tables.open_source(data, split, spec.loss.target)
        case Text():
            return _open_text(spec, data, split)
        case Mixture():
            return _open_mixture(spec, data, split)
        case Torch():
            return _open_torch(data, split)
        case Synthetic():
            return _open_synthetic(spec, data, split)


def _open_examples(data: Images | ArrayRecord | Tfds, split: Split) -> DataSource | None:
    if isinstance(data, Images):
        from jaxlaunch.trainer.sources.images import source as images

        return images.open_source(data, split)
    if isinstance(data, Tfds):
        from jaxlaunch.trainer.sources import tfds

        source: DataSource | None = tfds.open_source(data, split)
    else:
        from jaxlaunch.trainer.sources import array_record

        source = array_record.open_source(data, split)
    if source is None or (data.augment is None and data.size is None):
        return source
    from jaxlaunch.trainer.data.augment import AugmentedSource, Transform

    return AugmentedSource(source, Transform(data.augment, data.shape, split))


def _open_text(spec: TrainSpec, data: Text, split: Split) -> DataSource | None:
    from jaxlaunch.trainer.sources import text
    from jaxlaunch.trainer.text import preferences, tokenizer

    length, vocab = _text_sizes(spec)
    tokenizer.check_vocab(tokenizer.load_tokenizer(data.tokenizer), vocab)
    if data.format == "preference":
        return preferences.open_source(data, length, split)
    return (text.open_rows if data.is_prepared else text.open_stream)(data, length, split)


def _open_mixture(spec: TrainSpec, data: Mixture, split: Split) -> DataSource | None:
    """Open the parts of a split; an evaluation uses every example of all parts once."""
    if data.part_kind == "images":
        from jaxlaunch.trainer.sources.images import source as images

        return images.open_mixture(data, split, _open_examples)
    if data.part_kind == "table":
        from jaxlaunch.trainer.sources.tables import source as tables

        return tables.open_mixture(data, split, spec.loss.target)
    from jaxlaunch.trainer.sources import mixture

    weights = {name: part.weight for name, part in data.parts.items()}
    parts: dict[str, DataSource] = {}
    for name, part in data.text_parts().items():
        if weights[name] or split == "eval":
            source = _open_text(spec, part, split)
            parts |= {} if source is None else {name: source}
    if not parts:
        return None
    return mixture.Mixture(parts, weights if split == "train" else dict.fromkeys(parts, 1.0))


def _open_torch(data: Torch, split: Split) -> DataSource | None:
    from jaxlaunch.trainer.sources import torch

    workers = data.workers
    if split == "train":
        return torch.open_source(data.dataset, data.args, shuffle=data.shuffle, workers=workers)
    if data.eval_dataset is None and data.eval_args is None:
        return None
    dataset, args = data.eval_dataset or data.dataset, data.eval_args or {}
    return torch.open_source(dataset, args, workers=workers)


def _open_synthetic(spec: TrainSpec, data: Synthetic, split: Split) -> DataSource | None:
    from jaxlaunch.trainer.sources import synthetic

    # Evaluation uses the examples after those of training.
    first = 0 if split == "train" else data.examples
    examples = data.examples if split == "train" else data.eval_examples
    if not examples:
        return None
    if data.shape is None and model_sizes(spec.model).length is not None:
        return synthetic.Tokens(examples, *_text_sizes(spec), first=first)
    return synthetic.Images(examples, tuple(data.shape or (28, 28)), data.classes, first=first)


def _text_sizes(spec: TrainSpec) -> tuple[int, int]:
    sizes = model_sizes(spec.model)
    if sizes.length is None or sizes.length < 1:
        need = "needs train.model.length, the tokens of an example"
        raise SpecError(f"data.source = {spec.data.source} {need}")
    return sizes.length, BYTE_VOCAB if sizes.vocab is None else sizes.vocab
