"""Writes a trained model as transformers' `save_pretrained` would write it.

A module may stack tensors that published files keep apart, such as the weights of experts.
transformers knows how to undo that. The names and shapes of the result are found by undoing it for
tensors without memory; the values are then computed for one group of parameters at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import folder as folders
from jaxlaunch.trainer.huggingface import save
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.huggingface.save import Parameter
from jaxlaunch.trainer.huggingface.tensor_files import ADAPTER_CONFIG_FILE
from jaxlaunch.trainer.spec import Lora, TransformersModel
from jaxlaunch.trainer.spec.model import CAUSAL_LM, SEQUENCE_CLASSIFICATION
from jaxlaunch.trainer.torch_models import adapters, build


def save_model(
    target: str,
    model: TransformersModel,
    lora: Lora | None,
    params: Mapping[str, Parameter],
    extra_files: Mapping[str, bytes],
    turn_ends: tuple[int, ...] = (),
    classes: Sequence[str] = (),
) -> tuple[str, list[str]]:
    """Write a model as a folder of Hugging Face, or its adapters as a folder of peft.

    Args:
        target: Folder to write.
        model: Model, whose folder has the configuration.
        lora: The adapters that `params` are; None for a whole model.
        params: Parameters and persistent buffers by name.
        extra_files: Contents of further files by name.
        turn_ends: Tokens that end a turn of a chat.
        classes: Names of the classes of a classifier, if they have names.

    Returns:
        The name of the architecture, and the names of the safetensors files.

    Raises:
        SpecError: The configuration cannot be read, or the parameters are of another model.
    """
    source = model.init_from or ""
    module = build.empty_module(model)
    if lora is not None:
        return _save_adapters(target, source, module, lora, params, extra_files)
    if missing := sorted({name for name, _ in module.named_parameters()} - params.keys()):
        raise SpecError(
            f"{source}/config.json is of another model than the checkpoint, which has no "
            f"{', '.join(missing[:3])}"
        )
    tensors = list_tensors(module, params)
    leaves = {name: plain_leaf(name, len(tensor.shape)) for name, tensor in tensors.items()}
    config = json.loads((Path(source) / "config.json").read_text())
    # Weights of 8 bits are written in the dtype of the training.
    config.pop("quantization_config", None)
    dtype = next(iter(params.values())).dtype.name
    config |= {"architectures": [type(module).__name__], "dtype": dtype}
    files: dict[str, Mapping[str, Any] | bytes] = {**extra_files}
    if model.head == CAUSAL_LM:
        generation = folders.render_generation_config(source, extra_files, turn_ends)
        files[folders.GENERATION_FILE] = generation
    if model.head == SEQUENCE_CLASSIFICATION:
        config |= _render_classes(module, classes)
    files["config.json"] = config
    return type(module).__name__, save.write_folder(target, leaves, tensors, files)


def _render_classes(module: Any, classes: Sequence[str]) -> dict[str, Any]:
    """Return the keys of config.json for a classifier's labels and the token after a text."""
    pad_token = module.config.get_text_config().pad_token_id
    labels = dict(module.config.id2label) | dict(enumerate(classes))
    return {
        "id2label": {str(number): label for number, label in labels.items()},
        "label2id": {label: number for number, label in labels.items()},
        "pad_token_id": pad_token,
        "problem_type": "single_label_classification" if len(labels) > 1 else None,
    }


def plain_leaf(name: str, dims: int) -> Leaf:
    """Return the layout of a parameter that a file has as it is."""
    letters = string.ascii_lowercase[:dims]
    return Leaf(letters, " ".join(letters), name)


def _save_adapters(
    target: str,
    folder: str,
    module: Any,
    lora: Lora,
    params: Mapping[str, Parameter],
    extra_files: Mapping[str, bytes],
) -> tuple[str, list[str]]:
    """Write adapters as peft's `save_pretrained` would write them, and `extra_files`."""
    wrapper = adapters.add_adapters(module, lora)
    leaves = {
        name: plain_leaf(file_name, len(params[name].shape))
        for name, file_name in adapters.file_names(wrapper).items()
    }
    files: dict[str, Mapping[str, Any] | bytes] = {
        ADAPTER_CONFIG_FILE: adapters.render_config(wrapper, folder),
        **extra_files,
    }
    # peft reads one file.
    names = save.write_folder(
        target, leaves, params, files, stem="adapter_model", file_bytes=sys.maxsize
    )
    return f"adapters of {type(module).__name__}", names


@dataclasses.dataclass
class PublishedTensor:
    """A tensor of a published file, which is computed when it is sliced.

    Attributes:
        name: Name in the file.
        shape: Shape in the file.
        dtype: Dtype in the file.
        group: The parameters of the module that it comes from, and how.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    group: Group

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        part: np.ndarray[Any, Any] = self.group.values[self.name].astype(self.dtype)[index]
        return part


@dataclasses.dataclass
class Group:
    """Parameters that become tensors of a file together.

    Attributes:
        module: Module of transformers.
        params: Parameters by name.
    """

    module: Any
    params: Mapping[str, Parameter]

    @functools.cached_property
    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        """The tensors by name, in float32 while they are converted."""
        import torch

        arrays = {
            name: torch.from_numpy(np.array(param[(slice(None),) * len(param.shape)], np.float32))
            for name, param in self.params.items()
        }
        return {name: tensor.numpy() for name, tensor in _revert(self.module, arrays).items()}


def _revert(module: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Any] = revert_weight_conversion(module, dict(arrays))
    return reverted


def list_tensors(module: Any, params: Mapping[str, Parameter]) -> dict[str, PublishedTensor]:
    """Return the tensors of the published files of a module with these parameters, by name."""
    tensors: dict[str, PublishedTensor] = {}
    for names in _group_names(module, params):
        group = Group(module, {name: params[name] for name in names})
        dtype = params[names[0]].dtype
        for name, tensor in _revert(module, _without_memory(group.params)).items():
            tensors[name] = PublishedTensor(name, tuple(tensor.shape), dtype, group)
    return tensors


def _without_memory(params: Mapping[str, Parameter]) -> dict[str, Any]:
    import torch

    return {name: torch.empty(tuple(param.shape), device="meta") for name, param in params.items()}


def _group_names(module: Any, params: Mapping[str, Parameter]) -> list[list[str]]:
    """Return groups of the names of parameters that have to be converted together."""
    from transformers import conversion_mapping, core_model_loading

    transforms = conversion_mapping.get_model_conversion_mapping(module, add_legacy=False)
    reverses = [transform.reverse_transform() for transform in reversed(transforms)]
    converters = [
        reverse for reverse in reverses if isinstance(reverse, core_model_loading.WeightConverter)
    ]
    groups: dict[str, list[str]] = {}
    for name in params:
        key, pattern = core_model_loading.apply_converters(name, converters)
        groups.setdefault(name if pattern is None else f"{pattern} {key}", []).append(name)
    return list(groups.values())
