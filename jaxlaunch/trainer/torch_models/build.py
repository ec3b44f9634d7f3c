"""Builds the model of a job that names a folder of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax import Array

from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.spec import Lora, TransformersModel
from jaxlaunch.trainer.torch_models import adapters, checked, modules, weights
from jaxlaunch.trainer.torch_models.network import TorchModel, build_torch_module


def build_model(
    config: TransformersModel, rngs: nnx.Rngs, options: ModelOptions, lora: Lora | None = None
) -> TorchModel:
    """Return the model of a folder's config.json, with arrays of zeros in place of its weights.

    Raises SpecError if the extra is missing, the architecture is unknown or was not compared, or
    the model does not have the layers that `lora` adds adapters to.
    """
    folder = config.init_from or ""
    module = empty_module(folder)
    model_type = module.config.model_type
    known = checked.require_checked(folder, model_type, is_allowed=config.unchecked)
    packs_rows = known.packs_rows or config.unchecked
    if lora is not None:
        adapters.add_adapters(module, lora)
    return TorchModel(module, rngs, options, packs_rows=packs_rows, has_adapters=lora is not None)


def empty_module(folder: str) -> Any:
    """Return the module of a folder's config.json, without memory for its weights.

    Raises SpecError if the extra is missing, or transformers does not know the architecture.
    """
    modules.import_libraries()
    return build_torch_module(modules.read_config(folder))


def iterate_parameters(
    config: TransformersModel,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    seed: int,
    *,
    is_cast: bool = True,
) -> Iterator[tuple[str, Array]]:
    """Yield the parameters of a folder one by one; ones drawn from `seed` if the job asks for that.

    Raises SpecError if the files do not match config.json.
    """
    folder = config.init_from or ""
    if config.weights == "random":
        yield from weights.iterate_random(modules.read_config(folder), targets, seed)
    else:
        module = empty_module(folder)
        yield from weights.iterate_parameters(module, folder, targets, is_cast=is_cast)
