"""Modules of transformers without memory for their weights.

A module only defines the arithmetic. Its parameters stay on torch's device `meta`, where a tensor
has a shape and a dtype, but no memory; the arrays come from JAX at each call. Buffers that a module
computes in its constructor, such as the frequencies of rotary embeddings, are real.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from jaxlaunch import installation
from jaxlaunch.trainer.errors import SpecError

# The versions that work together: torchax has no rules for some operators of later versions of
# torch, and earlier versions of transformers name the weights of experts otherwise.
REQUIRED_VERSIONS: Mapping[str, tuple[str, str]] = {
    "torch": ("2.10", "2.11"),
    "torchax": ("0.0.13", "0.1"),
    "transformers": ("5.20", "6"),
}
# What adapters need in addition.
ADAPTER_VERSIONS: Mapping[str, tuple[str, str]] = {"peft": ("0.21", "1")}
# Classes of transformers by the head of the model.
CAUSAL_LM, MASKED_LM = "AutoModelForCausalLM", "AutoModelForMaskedLM"
HEAD_CLASSES: Mapping[str, str] = {
    "causal_lm": CAUSAL_LM,
    "masked_lm": MASKED_LM,
    "sequence_classification": "AutoModelForSequenceClassification",
}
# The attention that an architecture computes by itself.
EAGER = "eager"


class UnsupportedAttentionError(Exception):
    """An architecture that computes attention by itself only."""


def check_versions(required: Mapping[str, tuple[str, str]] = REQUIRED_VERSIONS) -> None:
    """Raise SpecError unless packages have versions from the first to before the second."""
    for name, (first, end) in required.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise SpecError(
                f"train.model.kind = transformers needs {name}, which is not installed here: "
                f"{installation.install_hint('transformers')}"
            ) from None
        if not _version_key(first) <= _version_key(version) < _version_key(end):
            raise SpecError(
                f"train.model.kind = transformers needs {name} from {first} to before {end}, and "
                f"{version} is installed: {installation.install_hint('transformers')}"
            )


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())


def import_libraries() -> None:
    """Import torch, torchax and transformers. Raises SpecError if they are missing or too old."""
    check_versions()
    # Without this, transformers asks the hub whether a folder's files have newer versions.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torchax
    import transformers

    transformers.utils.logging.set_verbosity_error()
    # Tensors that a module makes are JAX arrays, too, so that it can combine them with its inputs.
    torchax.default_env().config.use_torch_native_for_cpu_tensor = False


def read_config(folder: str) -> Any:
    """Return the configuration of a folder. Raises SpecError if transformers does not know it."""
    import transformers

    path = epath.Path(folder) / "config.json"
    try:
        keys = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from None
    model_type = keys.get("model_type")
    try:
        return transformers.AutoConfig.for_model(**keys)
    except (ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SpecError(
            f"{path}: transformers {transformers.__version__} cannot read model_type = "
            f"{model_type}: {reason}"
        ) from None


def is_encoder(config: Any) -> bool:
    """Return whether a position of this architecture sees those after it."""
    import transformers

    encoders = transformers.AutoModelForMaskedLM._model_mapping
    return type(config) in encoders and not getattr(config, "is_decoder", False)


def build_module(config: Any, attention: str, auto_class: str = CAUSAL_LM) -> Any:
    """Return the module of a configuration with its parameters on the device `meta`.

    Args:
        config: A configuration of transformers.
        attention: The name by which transformers finds the implementation of attention.
        auto_class: The class of transformers that chooses the architecture.

    Raises:
        SpecError: The architecture has no such class.
        UnsupportedAttentionError: The architecture has no other attention than `eager`.
    """
    import torch
    import transformers

    # from_config writes the name of the attention into the configuration.
    config = copy.deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        config.quantization_config = None
    known = getattr(transformers, auto_class)._model_mapping
    if type(config) not in known:
        raise SpecError(f"transformers has no {auto_class} of model_type = {config.model_type}")
    module_class = known[type(config)]
    if isinstance(module_class, tuple):
        module_class = module_class[0]
    if attention != EAGER and not module_class._supports_sdpa:
        raise UnsupportedAttentionError(config.model_type)
    with skip_weights(torch):
        module = module_class._from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
    module.requires_grad_(False)
    return module


@contextlib.contextmanager
def skip_weights(torch: Any) -> Iterator[None]:
    """Build modules whose parameters have no memory and no initial values.

    Each parameter is moved to the device `meta` when its module registers it. Until then its memory
    is reserved, but not touched, because the functions that initialize it do nothing.
    """
    module_class, init = torch.nn.Module, torch.nn.init
    register = module_class.register_parameter
    functions = {name: function for name, function in vars(init).items() if name.endswith("_")}

    def register_without_memory(module: Any, name: str, parameter: Any) -> None:
        # A tied parameter is already there, and must stay the same object.
        if parameter is not None and parameter.device.type != "meta":
            requires_grad = parameter.requires_grad
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=requires_grad)
        register(module, name, parameter)

    def keep_values(tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    try:
        module_class.register_parameter = register_without_memory
        for name in functions:
            if callable(functions[name]) and not name.startswith("_"):
                setattr(init, name, keep_values)
        yield
    finally:
        module_class.register_parameter = register
        for name, function in functions.items():
            setattr(init, name, function)
