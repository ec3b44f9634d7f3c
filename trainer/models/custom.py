"""Models of the user's, by module:Name."""

from __future__ import annotations

from flax import nnx

from trainer.errors import SpecError
from trainer.spec import CustomModel, Loss, TrainSpec
from trainer.task import load


def build(spec: TrainSpec, config: CustomModel, rngs: nnx.Rngs) -> nnx.Module:
    """`Name(**other keys, rngs=rngs)`. Raises SpecError for keys it does not take, and for remat and loss."""
    if spec.loss != Loss():
        raise SpecError(f"train.loss: {config.kind} is not ours; write a task whose loss adds what you want added")
    if spec.remat != "none":
        raise SpecError(f"train.remat = {spec.remat}: {config.kind} decides itself what it recomputes; leave remat out")
    make, keys = load(config.kind), config.model_extra or {}
    try:
        model = make(**keys, rngs=rngs)
    except TypeError as error:
        raise SpecError(f"train.model: {config.kind}({', '.join([*keys, 'rngs'])}) failed: {error}") from error
    if not isinstance(model, nnx.Module):
        raise SpecError(f"train.model: {config.kind} makes a {type(model).__name__}, not a flax.nnx.Module")
    return model
