"""Opens what `train.data` describes. Each kind of source has a module of its own, imported when a job uses it."""

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

BYTES = 256
Split = Literal["train", "eval"]
Opener = Callable[[TrainSpec, Split], DataSource | None]


def open_source(spec: TrainSpec, split: Literal["train", "eval"]) -> DataSource | None:
    """Opens what the job's `train.data` describes: the `source` of a task of yours whose data is not its own.

    **Arguments:**

    - `spec`: the `train` block, as the task's `source` gets it.
    - `split`: `"train"`, or `"eval"` for the held-out examples.

    **Returns:**

    A [`Source`](#source); `None` where the job has no held-out examples.

    **Raises:**

    [`TrainerError`](#trainererror) where there is nothing to read, storage fails or the model does not fit the data.

    **Example:**

    ```python
    import jaxlaunch

    spec = jaxlaunch.TrainSpec.model_validate({"task": "lm", "data": {"source": "tfds", "name": "digits"}})
    source = jaxlaunch.open_source(spec, "train")
    assert source is not None and len(source) == 1437
    ```
    """
    try:
        source = _opener(spec.data)(spec, split)
    except OSError as error:
        raise faults.unreadable(
            f"train.data: the {split} split of {spec.data.source} cannot be opened", error
        ) from error
    if source is not None and not len(source):
        raise DataError(f"train.data: the {split} split of {spec.data.source} has no examples")
    return source


def get_ready(data: Data) -> None:
    """Imports what opening `data` imports; nothing is opened, and nothing of the user's imported."""
    _opener(data)


def baselines(spec: TrainSpec, train: DataSource, held_out: DataSource | None) -> dict[str, float]:
    """Metrics of simpler models on the held-out data by name, reported beside those of the evaluation."""
    from jaxlaunch.trainer.sources import text

    has_bigram = isinstance(spec.data, Text) and spec.data.bigram
    if has_bigram and isinstance(train, text.Stream) and isinstance(held_out, text.Stream):
        return {"bigram_bits_per_byte": text.bigram_bits_per_byte(train, held_out)}
    return {}


def tokenizer_files(data: Data) -> Mapping[str, bytes]:
    """The files of the data's tokenizer by name, which checkpoints carry; none of bytes and of other data."""
    from jaxlaunch.trainer.text import tokenizer

    return tokenizer.load(data.tokenizer).files if isinstance(data, Text | Mixture) else {}


def _opener(data: Data) -> Opener:
    """What opens `data`. Its modules are imported here: those of tensorflow-datasets take a quarter of a second."""
    match data:
        case Tfds() | ArrayRecord() | Images():
            examples = _examples_opener(data)
            return lambda spec, split: examples(split)
        case Table():
            from jaxlaunch.trainer.sources.tables import source as tables

            return lambda spec, split: tables.source(data, split, spec.loss.target)
        case Text():
            texts = _text_opener()
            return lambda spec, split: texts(spec, data, split)
        case Mixture():
            return _mixture_opener(data)
        case Torch():
            return _torch_opener(data)
        case Synthetic():
            return _synthetic_opener(data)


def _torch_opener(data: Torch) -> Opener:
    from jaxlaunch.trainer.sources import torch

    def _opened(spec: TrainSpec, split: Split) -> DataSource | None:
        if split == "train":
            return torch.source(data.dataset, data.args, shuffle=data.shuffle, workers=data.workers)
        if data.eval_dataset is None and data.eval_args is None:
            return None
        name, args = data.eval_dataset or data.dataset, data.eval_args or {}
        return torch.source(name, args, shuffle=False, workers=data.workers)

    return _opened


def mixed(block: str, split: Split) -> DataSource:
    """The source of a mixture of images that is given as JSON: what a worker process opens."""
    from jaxlaunch.trainer.sources.images import mixed as images

    found = images.source(Mixture.model_validate_json(block), split, _examples)
    assert found is not None, "the process that asks has it open"
    return found


def _examples(data: Images | ArrayRecord | Tfds, split: Split) -> DataSource | None:
    """Images as they lie, or as records have them."""
    return _examples_opener(data)(split)


def _examples_opener(data: Images | ArrayRecord | Tfds) -> Callable[[Split], DataSource | None]:
    match data:
        case Tfds():
            from jaxlaunch.trainer.sources import tfds

            return lambda split: _seen(tfds.source(data, split), data, split)
        case ArrayRecord():
            from jaxlaunch.trainer.sources import array_record

            return lambda split: _seen(array_record.source(data, split), data, split)
        case Images():
            from jaxlaunch.trainer.sources.images import source as images

            return lambda split: images.source(data, split)


def _seen(source: DataSource | None, data: Tfds | ArrayRecord, split: Split) -> DataSource | None:
    """The source with its images in the size, and changed in the way, that the job asks for."""
    if source is None or (data.augment is None and data.size is None):
        return source
    from jaxlaunch.trainer.data.augment import AugmentedSource, Transform

    return AugmentedSource(source, Transform(data.augment, data.shape, split))


def _text_opener() -> Callable[[TrainSpec, Text, Split], DataSource | None]:
    """What opens one stream of bytes, rows of documents that are prepared once, or pairs of texts."""
    from jaxlaunch.trainer.sources import packed, text
    from jaxlaunch.trainer.text import preferences, tokenizer

    def _opened(spec: TrainSpec, data: Text, split: Split) -> DataSource | None:
        length, vocab = _window(spec)
        tokenizer.fits(tokenizer.load(data.tokenizer), vocab)
        if data.format == "preference":
            return preferences.source(data, length, split)
        return packed.source(data, length, split) if data.is_prepared else text.source(data, length, split)

    return _opened


def _mixture_opener(data: Mixture) -> Opener:
    """What opens the parts that have examples of the split; all of them count in an evaluation, where each comes
    once."""
    if data.of == "images":
        from jaxlaunch.trainer.sources.images import mixed as images

        return lambda spec, split: images.source(data, split, _examples)
    if data.of == "table":
        from jaxlaunch.trainer.sources.tables import mixed as tables

        return lambda spec, split: tables.source(data, split, spec.loss.target)
    from jaxlaunch.trainer.sources import mixture

    open_text = _text_opener()

    def _opened(spec: TrainSpec, split: Split) -> DataSource | None:
        weights = {name: part.weight for name, part in data.parts.items()}
        texts = {name: part for name, part in data.texts().items() if weights[name] or split == "eval"}
        found = {name: open_text(spec, part, split) for name, part in texts.items()}
        parts = {name: each for name, each in found.items() if each is not None}
        return mixture.Mixture(parts, weights if split == "train" else dict.fromkeys(parts, 1.0)) if parts else None

    return _opened


def _synthetic_opener(data: Synthetic) -> Opener:
    """What opens tokens for a model that has a length, images otherwise or when a shape is given."""
    from jaxlaunch.trainer.sources import synthetic

    def _opened(spec: TrainSpec, split: Split) -> DataSource | None:
        # Evaluation goes on where training ends: other examples of the same kind.
        first, examples = (0, data.examples) if split == "train" else (data.examples, data.eval_examples)
        if not examples:
            return None
        if data.shape is None and hasattr(spec.model, "length"):
            length, vocab = _window(spec)
            return synthetic.Tokens(examples, length, vocab, first=first)
        return synthetic.Images(examples, tuple(data.shape or (28, 28)), data.classes, first=first)

    return _opened


def _window(spec: TrainSpec) -> tuple[int, int]:
    sizes = model_sizes(spec.model)
    if sizes.length is None or sizes.length < 1:
        raise SpecError(f"data.source = {spec.data.source} needs train.model.length, the tokens of an example")
    return sizes.length, BYTES if sizes.vocab is None else sizes.vocab
