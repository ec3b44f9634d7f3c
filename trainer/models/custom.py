"""Models of the user's, by module:Name."""

from __future__ import annotations

from flax import nnx

from trainer.errors import SpecError
from trainer.plugin import is_linen, load
from trainer.spec import CustomModel, Loss, TrainSpec


def build(spec: TrainSpec, config: CustomModel, rngs: nnx.Rngs) -> nnx.Module:
    """The model `Name(**other keys, rngs=rngs)`. Raises SpecError for keys it does not take, and for remat and loss."""
    if spec.loss != Loss():
        raise SpecError(
            f"train.loss: {config.kind} is not a built-in model; add these terms in the loss of a task of your own"
        )
    if spec.remat != "none":
        raise SpecError(
            f"train.remat = {spec.remat}: {config.kind} is not a built-in model and rematerializes by itself; "
            "leave remat out"
        )
    make, keys = load(config.kind), config.model_extra or {}
    if is_linen(make):
        raise SpecError(f"train.model.kind = {config.kind} is a flax.linen module; the trainer takes flax.nnx modules")
    try:
        model = make(**keys, rngs=rngs)
    except TypeError as error:
        raise SpecError(f"train.model: {config.kind}({', '.join([*keys, 'rngs'])}) failed: {error}") from error
    if not isinstance(model, nnx.Module):
        raise SpecError(f"train.model: {config.kind} makes a {type(model).__name__}, not a flax.nnx.Module")
    return model
