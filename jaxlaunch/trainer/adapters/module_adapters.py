"""Adapters of models of transformers, which are peft's own modules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.adapters.lora import RNG_STREAM, Adapters
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import load
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.huggingface.tensor_files import TensorFiles
from jaxlaunch.trainer.spec import TrainSpec, TransformersModel
from jaxlaunch.trainer.torch_models import adapters, build, export
from jaxlaunch.trainer.torch_models.network import TorchModel


class ModuleAdapters(Adapters):
    """The adapters of a training whose modules are peft's."""

    def __init__(self, spec: TrainSpec, params_dtype: jnp.dtype) -> None:
        assert spec.lora is not None, "the job has adapters"
        assert isinstance(spec.model, TransformersModel), "the adapters of others are ours"
        self._model: TransformersModel = spec.model
        self._lora = spec.lora
        self._frozen_dtype = params_dtype if spec.lora.base is None else jnp.dtype("bfloat16")
        self._norm_axes: Mapping[str, int] = {}

    def attach_to_model(self, model: TorchModel, key: Array) -> None:
        """Draw the first matrices from `key` as peft does; the second ones are zeros."""
        rngs = nnx.Rngs(jax.random.fold_in(key, RNG_STREAM))
        self._norm_axes = adapters.norm_axes(model.torch_module)
        for name, variable in model.variables().items():
            if ".lora_A." in name:
                shape = variable.shape
                # torch's nn.Linear has the same bound.
                bound = 1 / math.sqrt(shape[1])
                drawn = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
                variable.set_value(drawn)
            elif name.endswith(".lora_embedding_B"):
                variable.set_value(jax.random.normal(rngs.params(), variable.shape, jnp.float32))

    @property
    def late_cast_names(self) -> frozenset[str]:
        """No names: the modules take their parameters in the dtype of the computation."""
        return frozenset()

    @property
    def target_names(self) -> Sequence[str]:
        """Names of the adapted modules, for messages."""
        return self._lora.targets

    def read_initial_adapters(
        self, abstract_params: Mapping[str, jax.ShapeDtypeStruct], base: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Read the adapters of the job's peft folder, or compute what depends on the base.

        Raises SpecError if the folder has other tensors, or a module to save has weights that
        another module has, too.
        """
        if self._lora.init_from is not None:
            return self._read_folder(self._lora.init_from, abstract_params)
        initial: dict[str, Array] = {}
        for name, target in abstract_params.items():
            if adapters.SAVED_PART in name:
                source = name.replace(adapters.SAVED_PART, "")
                if source not in base:
                    raise SpecError(
                        f"train.lora.modules_to_save: {source} is tied to another parameter of "
                        f"{self._model.init_from}, so it cannot be trained apart; leave it out"
                    )
                initial[name] = _copy_array(target.sharding, base[source])
            elif name in self._norm_axes:
                weight = base[f"{name.partition(adapters.MAGNITUDE_PART)[0]}.weight"]
                initial[name] = _compute_norms(target.sharding, self._norm_axes[name], weight)
        return initial

    def _read_folder(
        self, folder: str, abstract_params: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, Array]:
        wrapper = adapters.add_adapters(build.empty_module(self._model), self._lora)
        files, names = TensorFiles(folder, peft.KEY, peft.STEM), adapters.file_names(wrapper)
        leaves: dict[str, Leaf] = {
            name: export.plain_leaf(names[name], len(target.shape))
            for name, target in abstract_params.items()
        }
        load.check_tensors(folder, "train.lora", leaves, abstract_params, files)
        return {
            name: load.read_parameter(leaves[name], target, files)
            for name, target in abstract_params.items()
        }


def _copy_array(sharding: Any, array: Array) -> Array:
    # The state is donated to a step, so that no two of its arrays may share their memory.
    copy: Array = jax.jit(jnp.copy, out_shardings=sharding)(array)
    return copy


def _compute_norms(sharding: Any, axis: int, weight: Array) -> Array:
    norm = partial(jnp.linalg.norm, axis=axis)
    norms: Array = jax.jit(norm, out_shardings=sharding)(weight.astype(jnp.float32))
    return norms
