"""Opens what `train.data` describes. Each kind of source has a module of its own, imported when a job uses it."""

from __future__ import annotations

from typing import Literal

from trainer.buckets import faults
from trainer.data.source import Source
from trainer.errors import DataError, SpecError
from trainer.spec import ArrayRecord, Synthetic, Text, Tfds, Torch, TrainSpec

BYTES = 256


def open_source(spec: TrainSpec, split: Literal["train", "eval"]) -> Source | None:
    """The source of `split`, or None when the job has none for evaluation.

    Raises DataError when there is nothing to read, StorageError when storage fails, SpecError when the model does not
    fit the data.
    """
    try:
        source = _opened(spec, split)
    except OSError as error:
        raise faults.unreadable(
            f"train.data: the {split} split of {spec.data.source} cannot be opened", error
        ) from error
    if source is not None and not len(source):
        raise DataError(f"train.data: the {split} split of {spec.data.source} has no examples")
    return source


def baselines(spec: TrainSpec, train: Source, held_out: Source | None) -> dict[str, float]:
    """Metrics of simpler models on the held-out data by name, reported beside those of the evaluation."""
    from trainer.data.sources import text

    if isinstance(train, text.Stream) and isinstance(held_out, text.Stream) and getattr(spec.data, "bigram", False):
        return {"bigram_bits_per_byte": text.bigram_bits_per_byte(train, held_out)}
    return {}


def _opened(spec: TrainSpec, split: Literal["train", "eval"]) -> Source | None:
    data = spec.data
    match data:
        case Tfds():
            from trainer.data.sources import tfds

            return tfds.source(data, split)
        case ArrayRecord():
            from trainer.data.sources import array_record

            return array_record.source(data, split)
        case Text():
            from trainer.data.sources import text

            length, vocab = _window(spec)
            if vocab < BYTES:
                raise SpecError(f"train.model.vocab = {vocab} is less than the {BYTES} of data.tokenizer = bytes")
            return text.source(data, length, split)
        case Torch():
            from trainer.data.sources import torch

            args = data.args if split == "train" else data.eval_args
            return None if args is None else torch.MapStyle(data.dataset, args)
        case Synthetic():
            return _synthetic(spec, data, split)


def _synthetic(spec: TrainSpec, data: Synthetic, split: Literal["train", "eval"]) -> Source | None:
    """Tokens for a model that has a length, images otherwise or when a shape is given."""
    from trainer.data.sources import synthetic

    # Evaluation goes on where training ends: other examples of the same kind.
    first, examples = (0, data.examples) if split == "train" else (data.examples, data.eval_examples)
    if not examples:
        return None
    if data.shape is None and hasattr(spec.model, "length"):
        length, vocab = _window(spec)
        return synthetic.Tokens(examples, length, vocab, first=first)
    return synthetic.Images(examples, tuple(data.shape or (28, 28)), data.classes, first=first)


def _window(spec: TrainSpec) -> tuple[int, int]:
    """Length and vocabulary of the model."""
    length, vocab = getattr(spec.model, "length", None), getattr(spec.model, "vocab", BYTES)
    if not isinstance(length, int) or length < 1:
        raise SpecError(f"data.source = {spec.data.source} needs train.model.length, the tokens of an example")
    return length, vocab
