"""Reads the weights that a job starts from, for a built-in model and for one of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
from jax import Array

from jaxlaunch.trainer.huggingface import load
from jaxlaunch.trainer.spec import PublishedModel, TransformersModel
from jaxlaunch.trainer.torch_models import build


def iterate_parameters(
    model: PublishedModel,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    seed: int,
    *,
    is_cast: bool = True,
    draws_head: bool = True,
) -> Iterator[tuple[str, Array]]:
    """Yield the parameters of `model.init_from` one by one, so that the caller can release each.

    Args:
        model: Model of the job.
        targets: Shapes, dtypes and shardings by name.
        seed: Seed of the weights if `model.weights` is random.
        is_cast: Whether to cast to the dtypes of `targets` instead of keeping those of the folder.
        draws_head: Whether a head that the folder lacks is drawn from `seed`.

    Raises:
        SpecError: config.json describes another model, or a tensor is missing, unexpected or of
            another shape.
    """
    if not isinstance(model, TransformersModel):
        return load.iterate_parameters(model, targets, is_cast=is_cast)
    return build.iterate_parameters(model, targets, seed, is_cast=is_cast, draws_head=draws_head)
