"""Builds the model of a job that names a folder of transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax import Array

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.spec import Lora, TransformersModel
from jaxlaunch.trainer.spec.model import CAUSAL_LM, SEQUENCE_CLASSIFICATION
from jaxlaunch.trainer.torch_models import adapters, checked, modules, weights
from jaxlaunch.trainer.torch_models.network import TorchClassifier, TorchModel, build_torch_module

# The names of tables of learned positions, which have no row for a longer text.
POSITION_TABLES = frozenset({"position_embeddings", "wpe", "embed_positions", "positions_embed"})


def build_model(
    config: TransformersModel, rngs: nnx.Rngs, options: ModelOptions, lora: Lora | None = None
) -> TorchModel:
    """Return the model of a folder's config.json, with arrays of zeros in place of its weights.

    Raises SpecError if the extra is missing, the architecture is unknown or was not compared, or
    the model does not have the layers that `lora` adds adapters to.
    """
    folder = config.init_from or ""
    module = empty_module(config)
    model_type = module.config.model_type
    if config.head == CAUSAL_LM and modules.is_encoder(module.config):
        raise SpecError(
            f"{folder}: model_type = {model_type} is an encoder, which sees the token that it "
            "would predict; the task lm takes decoders, and classify takes encoders, too"
        )
    known = checked.require_checked(folder, model_type, is_allowed=config.unchecked)
    packs_rows = known.packs_rows or config.unchecked
    if lora is not None:
        adapters.add_adapters(module, lora)
    model_class = TorchClassifier if config.head == SEQUENCE_CLASSIFICATION else TorchModel
    return model_class(module, rngs, options, packs_rows=packs_rows, has_adapters=lora is not None)


def empty_module(model: TransformersModel) -> Any:
    """Return the module of a folder's config.json, without memory for its weights.

    Raises SpecError if the extra is missing, transformers does not know the architecture, or it has
    fewer positions than the model's length.
    """
    modules.import_libraries()
    config = _read_config(model)
    module = build_torch_module(config, modules.HEAD_CLASSES[model.head])
    check_positions(model, module)
    return module


def _read_config(model: TransformersModel) -> Any:
    """Return the configuration of the folder, for the classes of the job."""
    config = modules.read_config(model.init_from or "")
    if model.head == SEQUENCE_CLASSIFICATION:
        if model.classes not in (None, config.num_labels):
            config.num_labels = model.classes
        text_config = config.get_text_config()
        if text_config.pad_token_id is None:
            # As in trl, a text is padded with the token that ends it.
            ends = text_config.eos_token_id
            text_config.pad_token_id = ends[0] if isinstance(ends, list) else ends
        if text_config.pad_token_id is None:
            raise SpecError(
                f"{model.init_from}/config.json has neither pad_token_id nor eos_token_id, by "
                "which the model would know where a text ends; add pad_token_id"
            )
    return config


def check_positions(model: TransformersModel, module: Any) -> None:
    """Raise SpecError if the module has a table of learned positions with too few rows."""
    is_text = module.config.get_text_config() is module.config
    # A tower of images has tables of its own.
    for name, layer in (module if is_text else module.get_decoder()).named_modules():
        if name.rpartition(".")[2] in POSITION_TABLES and hasattr(layer, "num_embeddings"):
            # RoBERTa numbers positions after that of the padding, and OPT from its offset.
            first = 0 if layer.padding_idx is None else layer.padding_idx + 1
            first = getattr(layer, "offset", first)
            if model.length > (limit := layer.num_embeddings - first):
                raise SpecError(
                    f"train.model.length = {model.length}, and {model.init_from} has {limit} "
                    f"positions; make it {limit} or less"
                )


def iterate_parameters(
    config: TransformersModel,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    seed: int,
    *,
    is_cast: bool = True,
    draws_head: bool = True,
) -> Iterator[tuple[str, Array]]:
    """Yield the parameters of a folder one by one; ones drawn from `seed` if the job asks for that.

    Raises SpecError if the files do not match config.json, and without `draws_head` if they lack
    the head.
    """
    folder = config.init_from or ""
    if config.weights == "random":
        auto_class = modules.HEAD_CLASSES[config.head]
        yield from weights.iterate_random(_read_config(config), targets, seed, auto_class)
        return
    module = empty_module(config)
    has_new_head = config.head == SEQUENCE_CLASSIFICATION
    missing = yield from weights.iterate_parameters(
        module, folder, targets, is_cast=is_cast, has_new_head=has_new_head
    )
    if missing:
        names = ", ".join(missing)
        if not draws_head:
            raise SpecError(
                f"{folder} has no {names}, without which its model cannot predict; train a "
                "classifier that starts from it"
            )
        print(
            f"{folder} has no {names} of the model's shape: drawn from train.seed = {seed}",
            file=sys.stderr,
        )
        yield from weights.iterate_head(module, missing, seed)
