"""Opens the source of `train.data`, importing only the modules that a job needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
Opener = Callable[[TrainSpec, Split], DataSource | None]


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
    try:
        source = _find_opener(spec.data)(spec, split)
    except OSError as error:
        raise faults.read_error(
            f"train.data: the {split} split of {spec.data.source} cannot be opened", error
        ) from error
    if source is not None and not len(source):
        raise DataError(f"train.data: the {split} split of {spec.data.source} has no examples")
    return source


def import_modules(data: Data) -> None:
    """Import the modules that opening `data` needs, without those of the user."""
    _find_opener(data)


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

    return (
        tokenizer.load_tokenizer(data.tokenizer).files if isinstance(data, Text | Mixture) else {}
    )


def open_mixture(block: str, split: Split) -> DataSource:
    """Open a mixture of images from its JSON block in a worker process."""
    from jaxlaunch.trainer.sources.images import source as images

    source = images.open_mixture(Mixture.model_validate_json(block), split, _open_examples)
    assert source is not None, "the process that asks has it open"
    return source


def _find_opener(data: Data) -> Opener:
    """Return the function that opens `data`.

    Modules are imported here, because importing tensorflow-datasets takes a quarter of a second.
    """
    match data:
        case Tfds() | ArrayRecord() | Images():
            open_examples = _examples_opener(data)
            return lambda spec, split: open_examples(split)
        case Table():
            from jaxlaunch.trainer.sources.tables import source as tables

            return lambda spec, split: tables.open_source(data, split, spec.loss.target)
        case Text():
            open_text = _text_opener()
            return lambda spec, split: open_text(spec, data, split)
        case Mixture():
            return _mixture_opener(data)
        case Torch():
            from jaxlaunch.trainer.sources import torch

            def open_torch(spec: TrainSpec, split: Split) -> DataSource | None:
                if split == "train":
                    return torch.open_source(
                        data.dataset, data.args, shuffle=data.shuffle, workers=data.workers
                    )
                if data.eval_dataset is None and data.eval_args is None:
                    return None
                return torch.open_source(
                    data.eval_dataset or data.dataset, data.eval_args or {}, workers=data.workers
                )

            return open_torch
        case Synthetic():
            from jaxlaunch.trainer.sources import synthetic

            def open_synthetic(spec: TrainSpec, split: Split) -> DataSource | None:
                # Evaluation uses the examples after those of training.
                first, examples = (
                    (0, data.examples) if split == "train" else (data.examples, data.eval_examples)
                )
                if not examples:
                    return None
                if data.shape is None and model_sizes(spec.model).length is not None:
                    length, vocab = _text_sizes(spec)
                    return synthetic.Tokens(examples, length, vocab, first=first)
                return synthetic.Images(
                    examples, tuple(data.shape or (28, 28)), data.classes, first=first
                )

            return open_synthetic


def _open_examples(data: Images | ArrayRecord | Tfds, split: Split) -> DataSource | None:
    return _examples_opener(data)(split)


def _examples_opener(data: Images | ArrayRecord | Tfds) -> Callable[[Split], DataSource | None]:
    match data:
        case Tfds():
            from jaxlaunch.trainer.sources import tfds

            return lambda split: _apply_augmentation(tfds.open_source(data, split), data, split)
        case ArrayRecord():
            from jaxlaunch.trainer.sources import array_record

            return lambda split: _apply_augmentation(
                array_record.open_source(data, split), data, split
            )
        case Images():
            from jaxlaunch.trainer.sources.images import source as images

            return lambda split: images.open_source(data, split)


def _apply_augmentation(
    source: DataSource | None, data: Tfds | ArrayRecord, split: Split
) -> DataSource | None:
    if source is None or (data.augment is None and data.size is None):
        return source
    from jaxlaunch.trainer.data.augment import AugmentedSource, Transform

    return AugmentedSource(source, Transform(data.augment, data.shape, split))


def _text_opener() -> Callable[[TrainSpec, Text, Split], DataSource | None]:
    from jaxlaunch.trainer.sources import text
    from jaxlaunch.trainer.text import preferences, tokenizer

    def open_text(spec: TrainSpec, data: Text, split: Split) -> DataSource | None:
        length, vocab = _text_sizes(spec)
        tokenizer.check_vocab(tokenizer.load_tokenizer(data.tokenizer), vocab)
        if data.format == "preference":
            return preferences.open_source(data, length, split)
        if data.is_prepared:
            return text.open_rows(data, length, split)
        return text.open_stream(data, length, split)

    return open_text


def _mixture_opener(data: Mixture) -> Opener:
    """Return the function that opens a split; an evaluation uses all examples of all parts once."""
    if data.part_kind == "images":
        from jaxlaunch.trainer.sources.images import source as images

        return lambda spec, split: images.open_mixture(data, split, _open_examples)
    if data.part_kind == "table":
        from jaxlaunch.trainer.sources.tables import source as tables

        return lambda spec, split: tables.open_mixture(data, split, spec.loss.target)
    from jaxlaunch.trainer.sources import mixture

    open_text = _text_opener()

    def open_texts(spec: TrainSpec, split: Split) -> DataSource | None:
        weights = {name: part.weight for name, part in data.parts.items()}
        texts = {
            name: part
            for name, part in data.text_parts().items()
            if weights[name] or split == "eval"
        }
        sources = {name: open_text(spec, part, split) for name, part in texts.items()}
        parts = {name: source for name, source in sources.items() if source is not None}
        if parts:
            return mixture.Mixture(
                parts, weights if split == "train" else dict.fromkeys(parts, 1.0)
            )
        return None

    return open_texts


def _text_sizes(spec: TrainSpec) -> tuple[int, int]:
    sizes = model_sizes(spec.model)
    if sizes.length is None or sizes.length < 1:
        raise SpecError(
            f"data.source = {spec.data.source} needs train.model.length, the tokens of an example"
        )
    return sizes.length, BYTE_VOCAB if sizes.vocab is None else sizes.vocab
