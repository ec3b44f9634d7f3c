"""Adapters of peft in modules of transformers.

peft replaces a linear layer by a module that holds the layer and the matrices of its adapter. A
parameter of the model keeps the name that it has without adapters (`…q_proj.weight`). One of an
adapter has peft's name without that of the adapter (`…q_proj.lora_A.weight`). In peft's files, a
whole module that is trained (`….modules_to_save.weight`) has the name of the module.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.spec import Lora
from jaxlaunch.trainer.torch_models import modules

ALL_LINEAR = "all-linear"
KEY = "train.lora.targets"
# peft adds this prefix to the names of tensors in its files.
FILE_PREFIX = "base_model.model."
SAVED_PART = ".modules_to_save"
ORIGINAL_PART = ".original_module"
MAGNITUDE_PART = ".lora_magnitude_vector"
# The parts of a name that peft adds to those of the model and of its files.
_LAYER_NUMBER = re.compile(r"\.(\d+)$")
_WRAPPERS = re.compile(r"\.(base_layer|original_module|default)(?=\.|$)")


def parameter_names(module: Any) -> dict[str, str]:
    """Return the published names of a module's parameters and buffers by their torch names."""
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    return {name: _WRAPPERS.sub("", name) for name in names}


def add_adapters(module: Any, lora: Lora) -> Any:
    """Add adapters without memory to a module, and return peft's wrapper of the module.

    Raises SpecError if peft is missing, a target is neither a linear layer nor an embedding, or a
    module or layer does not exist.
    """
    modules.check_versions(modules.ADAPTER_VERSIONS)
    import peft
    import torch

    check_saved_modules(module, lora.modules_to_save)
    check_selection(module, lora)
    targets = _find_targets(module, lora)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=_as_integer(lora.alpha),
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern={name: _as_integer(alpha) for name, alpha in lora.alpha_pattern.items()},
        target_modules=targets,
        modules_to_save=[*lora.modules_to_save] or None,
        exclude_modules=[*lora.exclude_modules] or None,
        layers_to_transform=[*lora.layers_to_transform] or None,
    )
    try:
        with modules.skip_weights(torch):
            wrapper = peft.get_peft_model(module, config)
    except peft.NoMatchingPeftModuleError as error:
        raise SpecError(f"train.lora: no layer gets an adapter: {error}") from None
    check_adapted(module, targets, lora.layers_to_transform)
    module.requires_grad_(False)
    return wrapper


def check_adapted(module: Any, targets: str | Sequence[str], numbers: Sequence[int]) -> None:
    """Raise SpecError unless each target and each layer number has got an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    names = [name for name, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)]
    for target in () if targets == ALL_LINEAR else targets:
        if not any(_matches(name, target) for name in names):
            raise SpecError(
                f"{KEY}: {target} gets no adapter, by exclude_modules and layers_to_transform"
            )
    for number in numbers:
        if not any(f".{number}." in f".{name}" for name in names):
            raise SpecError(
                f"train.lora.layers_to_transform: layer {number} has none of {KEY} and gets no "
                "adapter; leave it out"
            )


def check_saved_modules(module: Any, ends: Sequence[str]) -> None:
    """Raise SpecError if the model has no module of such a name, or it has buffers in its files."""
    published_names = module.state_dict().keys()
    for end in ends:
        submodules = [layer for layer in module.named_modules() if _matches(layer[0], end)]
        if not submodules:
            raise SpecError(f"train.lora.modules_to_save: the model has no module {end}")
        for name, submodule in submodules:
            for buffer, _ in submodule.named_buffers(name):
                if buffer in published_names:
                    raise SpecError(
                        f"train.lora.modules_to_save: {end} has the buffer {buffer}, which is not "
                        "trained; name the modules in it that have no buffer"
                    )


def check_selection(module: Any, lora: Lora) -> None:
    """Raise SpecError if an excluded module or a layer with adapters does not exist."""
    names = [name for name, _ in module.named_modules()]
    for end in lora.exclude_modules:
        if not any(_matches(name, end) for name in names):
            raise SpecError(f"train.lora.exclude_modules: the model has no module {end}")
    numbers = {int(match[1]) for match in map(_LAYER_NUMBER.search, names) if match}
    if missing := sorted({*lora.layers_to_transform} - numbers):
        raise SpecError(
            f"train.lora.layers_to_transform has {missing[0]}, and the layers of the model are "
            f"{min(numbers)} to {max(numbers)}"
        )
    if lora.layers_to_transform and ALL_LINEAR in lora.targets:
        raise SpecError(
            f"train.lora.layers_to_transform needs names in {KEY}, which has {ALL_LINEAR}"
        )


def _as_integer(alpha: float) -> float:
    """Return a whole number as an integer, as peft writes it."""
    return int(alpha) if alpha.is_integer() else alpha


def _matches(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _find_targets(module: Any, lora: Lora) -> str | list[str]:
    """Return peft's names of the targets, to which `_proj` may have to be added."""
    import torch
    from transformers.pytorch_utils import Conv1D

    if ALL_LINEAR in lora.targets:
        return ALL_LINEAR
    layers = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Embedding | Conv1D)
    ]
    targets = []
    for target in lora.targets:
        for candidate in (target, f"{target}_proj"):
            matching = [name for name in layers if _matches(name, candidate)]
            if lora.dora and any(
                isinstance(module.get_submodule(name), torch.nn.Embedding) for name in matching
            ):
                raise SpecError(f"{KEY}: {target} is an embedding, and dora is for linear layers")
            if matching:
                targets.append(candidate)
                break
        else:
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
            raise SpecError(
                f"{KEY}: {target} matches no layer of {type(module).__name__}; there are "
                f"{ends}, and {ALL_LINEAR}"
            )
    return targets


def enable_adapters(module: Any, is_enabled: bool) -> None:
    """Have a module compute with its adapters, or as if it had none."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for layer in module.modules():
        if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper):
            layer.enable_adapters(is_enabled)
    module.requires_grad_(False)


def merge_adapters(module: Any, lora: Lora, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a module of transformers after the merge of its adapters.

    Args:
        module: The module without adapters, to which they are added.
        lora: Options of the adapters.
        params: The arrays of the base, which keep their dtypes, and of the adapters, by name.

    Raises:
        SpecError: An adapted weight, or one of a module that is trained whole, is tied to another.
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    add_adapters(module, lora)
    names = parameter_names(module)
    all_params = [*module.named_parameters(remove_duplicate=False)]
    uses = Counter(id(param) for _, param in all_params)
    check_saved_ties(name for name, param in all_params if uses[id(param)] > 1)
    merged: dict[str, Any] = {}
    for name in filter(params.__contains__, names.values()):
        if SAVED_PART in name:
            target = name.replace(SAVED_PART, "")
            merged[target] = _read_array(params[name]).astype(params[target].dtype)
        elif ".lora_" not in name:
            merged.setdefault(name, params[name])
    for path, layer in module.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        tensors = {}
        for name, param in layer.named_parameters():
            published = names.get(f"{path}.{name}", "")
            if uses[id(param)] > 1:
                raise SpecError(
                    f"the adapter of {path} cannot be merged, because its weight is tied to "
                    "another one; export without --merged"
                )
            value = merged[published] if published in merged else params[published]
            tensors[name] = torch.from_numpy(_read_array(value).astype(np.float32))
        with torch.no_grad(), torch.nn.utils.stateless._reparametrize_module(layer, tensors):
            layer.merge()
        for name, tensor in tensors.items():
            published = names[f"{path}.{name}"]
            if published in merged:
                merged[published] = tensor.numpy().astype(merged[published].dtype)
    return merged


def check_saved_ties(tied_names: Iterable[str]) -> None:
    """Raise SpecError if a module that is trained whole shares a weight of the base."""
    if name := next((name for name in tied_names if ORIGINAL_PART in name), None):
        raise SpecError(
            f"{name.replace(ORIGINAL_PART, '')} of train.lora.modules_to_save cannot be merged, "
            "because it is tied to another weight; export without --merged"
        )


def _read_array(value: Any) -> np.ndarray[Any, Any]:
    """Return a whole array, which may be in a file."""
    return np.asarray(value[(slice(None),) * len(value.shape)])


def norm_axes(module: Any) -> dict[str, int]:
    """Return the axis of the weight that each magnitude of DoRA is the norm over, by its name."""
    axes = {}
    for name, layer in module.named_modules():
        if getattr(layer, "lora_magnitude_vector", None):
            magnitude = f"{_WRAPPERS.sub('', name)}{MAGNITUDE_PART}.weight"
            axes[magnitude] = 0 if layer.fan_in_fan_out else 1
    return axes


def file_names(wrapper: Any) -> dict[str, str]:
    """Return the names of the tensors in peft's files by the names of the parameters."""
    import peft
    from peft.utils.other import AuxiliaryTrainingWrapper

    saved_modules = [
        name.removeprefix(FILE_PREFIX)
        for name, layer in wrapper.named_modules()
        if isinstance(layer, AuxiliaryTrainingWrapper)
    ]
    names = {}
    for file_name in peft.get_peft_model_state_dict(wrapper, save_embedding_layers=False):
        name = file_name.removeprefix(FILE_PREFIX)
        if name.endswith(MAGNITUDE_PART):
            name += ".weight"
        elif ".lora_" not in name:
            owner = next(owner for owner in saved_modules if name.startswith(f"{owner}."))
            name = f"{owner}{SAVED_PART}{name.removeprefix(owner)}"
        names[name] = file_name
    return names


def render_config(wrapper: Any, folder: str) -> Mapping[str, Any]:
    """Return the content of adapter_config.json, as peft writes it, for the base in `folder`."""
    config = wrapper.peft_config["default"]
    config.base_model_name_or_path, config.inference_mode = folder, True
    return {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
