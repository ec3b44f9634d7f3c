"""Adapters in the format of Hugging Face's peft, and the choice of kernels that have adapters.

A peft folder holds adapter_config.json, which selects modules of the model by name, and
adapter_model.safetensors.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import pydantic
from etils import epath
from jax import Array

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import SpecError, pydantic_message
from jaxlaunch.trainer.huggingface import load, names, save
from jaxlaunch.trainer.huggingface.families import key_set
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.huggingface.save import Parameter
from jaxlaunch.trainer.huggingface.tensor_files import ADAPTER_CONFIG_FILE, TensorFiles
from jaxlaunch.trainer.spec import GPT2, Decoder, Lora, PublishedModel, TrainSpec, TransformersModel

# Suffixes, after the name of a kernel, of its adapter's two matrices and of its int8 factors.
A_SUFFIX, B_SUFFIX = ".lora_a", ".lora_b"
SCALE_SUFFIX = ".int8_scale"
# The parts of the names of parameters in peft's modules that the model itself does not have.
_MODULE_PART = re.compile(
    r"\.((lora_A|lora_B|lora_magnitude_vector|modules_to_save)\.|lora_embedding_[AB]$)"
)
# peft adds this prefix to the model's names of tensors.
TENSOR_PREFIX = "base_model.model."
ALL_LINEAR = "all-linear"
# The parameters that are kernels of layers.apply_kernel.
KERNEL_NAMES = ("query", "key", "value", "qkv", "out", "gate", "up", "down")


class Kernel(NamedTuple):
    """A kernel that can have an adapter: [layers, inputs ..., outputs ...].

    Attributes:
        name: Dotted name of the parameter.
        module: peft's name of the module within a layer, such as `self_attn.q_proj`.
        leaf: Layout of the parameter in a Hugging Face folder.
        inputs: Letters of the input axes in the leaf.
        outputs: Letters of the output axes in the leaf.
    """

    name: str
    module: str
    leaf: Leaf
    inputs: str
    outputs: str

    @property
    def short_name(self) -> str:
        """Last part of peft's name of the module, such as `q_proj`."""
        return self.module.rpartition(".")[2]

    def matches_target(self, target: str) -> bool:
        """Return whether a target selects this kernel.

        As in peft a target is the name of a module or the end of its dotted name. The names of our
        parameters are accepted too, and names without `_proj`.
        """
        if target in (ALL_LINEAR, self.short_name.removesuffix("_proj")):
            return True
        return any(f".{name}".endswith(f".{target}") for name in (self.module, self.name))

    def module_paths(self, model: PublishedModel) -> list[str]:
        """Return peft's full names of the module in each layer."""
        assert isinstance(model, Decoder | GPT2), "the spec checks it"
        layers = range(model.layers) if self.leaf.layers is None else self.leaf.layers
        return [self.leaf.name.removesuffix(".weight").format(l=layer) for layer in layers]


def find_kernels(model: PublishedModel) -> list[Kernel]:
    """Return every kernel of the model that can have an adapter. Those of experts cannot."""
    kernels = []
    for name, leaf in names.parameter_leaves(model).items():
        if leaf.stacked_axes == "l" and name.rpartition(".")[2] in KERNEL_NAMES:
            axes = leaf.theirs.split()
            inputs, outputs = axes if isinstance(model, GPT2) else reversed(axes)
            module = leaf.name.removesuffix(".weight").partition("{l}.")[2]
            kernels.append(Kernel(name, module, leaf, inputs, outputs))
    return kernels


def select_kernels(model: PublishedModel, lora: Lora) -> list[Kernel]:
    """Return the kernels that `lora.targets` selects. Raises SpecError for an unmatched target."""
    kernels = find_kernels(model)
    for target in lora.targets:
        if not any(kernel.matches_target(target) for kernel in kernels):
            raise _unmatched_error("train.lora.targets", target, model)
    return [kernel for kernel in kernels if any(map(kernel.matches_target, lora.targets))]


def read_targets(model: PublishedModel, modules: str | list[str], key: str) -> list[str]:
    """Translate `target_modules` of a peft folder to `train.lora.targets`.

    Args:
        model: Model that the adapters belong to.
        modules: A list of module names or of their ends, or a regular expression for full names.
        key: Name of the key in messages.

    Raises:
        SpecError: An entry matches no kernel, or a kernel in only some of its layers.
    """
    kernels = find_kernels(model)
    if isinstance(modules, list):
        if all(any(kernel.matches_target(module) for kernel in kernels) for module in modules):
            return sorted(modules)
        patterns = {module: rf"(.*\.)?{re.escape(module)}" for module in modules}
    elif modules == ALL_LINEAR:
        return [ALL_LINEAR]
    else:
        patterns = {modules: modules}
        try:
            re.compile(modules)
        except re.error as error:
            raise SpecError(f"{key} = {modules} is not a regular expression: {error}") from None
    by_kernel = {kernel.name: kernel.module_paths(model) for kernel in kernels}
    paths = [path for paths in by_kernel.values() for path in paths]
    matches: set[str] = set()
    for module, pattern in patterns.items():
        matching = {path for path in paths if re.fullmatch(pattern, path)}
        if not matching:
            raise _unmatched_error(key, module, model)
        matches |= matching
    targets = []
    for name, layers in by_kernel.items():
        missed = [layer for layer in layers if layer not in matches]
        if not missed:
            targets.append(name)
        elif len(missed) < len(layers):
            raise SpecError(
                f"{key}: {', '.join(patterns)} matches {name} in {len(layers) - len(missed)} of "
                f"{len(layers)} layers, not {missed[0]}: an adapter must cover a linear layer in "
                "all blocks"
            )
    return targets


def _unmatched_error(key: str, target: str, model: PublishedModel) -> SpecError:
    modules = ", ".join(dict.fromkeys(kernel.short_name for kernel in find_kernels(model)))
    return SpecError(
        f"{key}: {target} matches no linear layer of train.model.kind = {model.kind}; there are "
        f"{modules}, and {ALL_LINEAR}"
    )


def module_names(model: PublishedModel, kernels: Sequence[Kernel]) -> list[str]:
    """Return the shortest module names by which peft selects exactly these kernels.

    A name is the last part of a module's name if no other module, such as one of an expert, ends in
    it. Otherwise it is the name within a layer, or else the full names in all layers.
    """
    kernel_names = {kernel.name for kernel in kernels}
    other_paths = [
        f".{leaf.name.removesuffix('.weight')}"
        for name, leaf in names.parameter_leaves(model).items()
        if name not in kernel_names
    ]
    modules: set[str] = set()
    for kernel in kernels:
        for name in (kernel.short_name, kernel.module):
            if not any(other.endswith(f".{name}") for other in other_paths):
                modules.add(name)
                break
        else:
            modules |= set(kernel.module_paths(model))
    return sorted(modules)


def adapter_leaves(kernels: Sequence[Kernel]) -> dict[str, Leaf]:
    """Return the layout of adapters in a peft folder: A as [r, inputs] and B as [outputs, r]."""
    leaves: dict[str, Leaf] = {}
    for kernel in kernels:
        stem = TENSOR_PREFIX + kernel.leaf.name.removesuffix(".weight")
        inputs, outputs, layers = kernel.inputs, kernel.outputs, kernel.leaf.layers
        a = Leaf(f"l{inputs}r", f"r {inputs}", f"{stem}.lora_A.weight", layers)
        b = Leaf(f"lr{outputs}", f"{outputs} r", f"{stem}.lora_B.weight", layers)
        leaves |= {kernel.name + A_SUFFIX: a, kernel.name + B_SUFFIX: b}
    return leaves


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, ours or one of peft's modules."""
    return name.endswith((A_SUFFIX, B_SUFFIX)) or _MODULE_PART.search(name) is not None


# --- the folder -----------------------------------------------------------------------------------

KEY = "train.lora.init_from"
CONFIG, STEM = ADAPTER_CONFIG_FILE, "adapter_model"
# peft's name of a key -> ours in train.lora.
CONFIG_KEYS: Mapping[str, str] = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora"}
# The same for the keys that only models of transformers have.
MODULE_KEYS: Mapping[str, str] = {
    "use_dora": "dora",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "modules_to_save": "modules_to_save",
    "exclude_modules": "exclude_modules",
    "layers_to_transform": "layers_to_transform",
}
# The values in peft of keys that a file leaves out.
DEFAULTS: dict[str, Any] = {"rank": 8, "alpha": 8.0, "rslora": False}
# Keys that do not affect which modules have adapters or what these compute. They describe the base,
# the training, the initialization, or an option whose main key is refused.
IGNORED_KEYS = key_set(
    "auto_mapping base_model_name_or_path corda_config eva_config fan_in_fan_out inference_mode "
    "layers_pattern loftq_config lora_dropout lora_ga_config megatron_core peft_version "
    "qalora_group_size revision runtime_config"
)
READ_KEYS = frozenset({*CONFIG_KEYS, "peft_type", "target_modules"})
# The supported values of all other keys: the defaults of LoraConfig in peft 0.21.2, as of November
# 2026, and values with the same effect.
UNSET_VALUES: tuple[Any, ...] = (None, False, "", [], {})
# The supported values of keys whose default is not in UNSET_VALUES.
PLAIN_VALUES: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    # The other methods of initialization change the base.
    "init_lora_weights": (True, None, False, "gaussian", "orthogonal", "eva"),
    # The models of other tasks have another head or none.
    "task_type": (None, "CAUSAL_LM"),
}


def resolve_lora(train: TrainSpec, *, is_here: bool = True) -> TrainSpec:
    """Return the spec with the rank, alpha and targets of its peft folder, if it names one.

    Args:
        train: Spec of the training.
        is_here: Whether the spec is for this machine. Otherwise a missing folder is accepted.

    Raises:
        SpecError: The folder cannot be read, holds another kind of adapter, or contradicts the job.
    """
    lora = train.lora
    if lora is None or lora.init_from is None:
        return train
    path = epath.Path(lora.init_from) / CONFIG
    if not is_here and not remote.is_remote(lora.init_from) and not path.exists():
        return train
    assert isinstance(train.model, PublishedModel), "the spec checks it"
    folder_lora = read_lora_config(lora.init_from, train.model)
    keys = [*CONFIG_KEYS.values(), *MODULE_KEYS.values(), "targets"]
    settings = {key: getattr(folder_lora, key) for key in keys}
    for key in [key for key in settings if key in lora.model_fields_set]:
        value = getattr(lora, key)
        is_equal = value == settings[key]
        if key == "targets" and isinstance(train.model, TransformersModel):
            is_equal = sorted(value) == settings[key]
        elif key == "targets":
            # Two lists of targets may select the same kernels.
            is_equal = select_kernels(train.model, lora) == select_kernels(train.model, folder_lora)
        if not is_equal:
            raise SpecError(
                f"{path} describes another adapter than train.lora: {key} is {settings[key]} there "
                f"and {value} here; leave it out, as the folder sets it"
            )
    return train.model_copy(update={"lora": lora.model_copy(update=settings)})


def read_lora_config(folder: str, model: PublishedModel) -> Lora:
    """Read adapter_config.json of a folder with adapters of `model`.

    Raises SpecError, StorageError.
    """
    path = epath.Path(folder) / CONFIG
    storage: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if remote.is_remote(folder):
        remote.check_url(KEY, folder)
        storage = remote.convert_errors(f"reading {KEY} = {folder}", SpecError)
    try:
        with storage:
            config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SpecError(f"{KEY} = {folder}: {CONFIG} cannot be read: {error}") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise SpecError(f"{path}: peft_type = {kind} is not LORA, the only supported kind")
    is_module = isinstance(model, TransformersModel)
    config_keys = {**CONFIG_KEYS, **(MODULE_KEYS if is_module else {})}
    other_keys = [key for key in config if key not in READ_KEYS | IGNORED_KEYS | {*config_keys}]
    unsupported_keys = [
        key for key in other_keys if config[key] not in PLAIN_VALUES.get(key, UNSET_VALUES)
    ]
    if unsupported_keys:
        settings = ", ".join(f"{key} = {config[key]}" for key in unsupported_keys)
        raise SpecError(
            f"{path}: {settings} is not supported: only LoRA of whole linear layers is; remove a "
            "key if the adapters were trained without it"
        )
    modules: Any = config.get("target_modules")
    is_list = isinstance(modules, list) and {*map(type, modules)} == {str}
    if not (is_list or isinstance(modules, str)):
        problem = f"{modules} is neither a list of names nor a regular expression"
        raise SpecError(f"{path}: target_modules = {problem}")
    # peft writes null where there are no modules to save.
    names_by_key = {
        ours: theirs
        for theirs, ours in config_keys.items()
        if theirs in config and (config[theirs] is not None or theirs in CONFIG_KEYS)
    }
    keys = {ours: config[theirs] for ours, theirs in names_by_key.items()}
    try:
        lora = Lora.model_validate(DEFAULTS | keys)
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        key = names_by_key[str(fault["loc"][0])]
        raise SpecError(f"{path}: {key} = {config[key]}: {pydantic_message(fault)}") from None
    if is_module:
        if isinstance(modules, str) and modules != ALL_LINEAR:
            problem = "is a regular expression; write a list of module names"
            raise SpecError(f"{path}: target_modules = {modules} {problem}")
        targets = sorted([modules] if isinstance(modules, str) else modules)
    else:
        targets = read_targets(model, modules, f"{path}: target_modules")
    return lora.model_copy(update={"targets": targets})


def read_adapters(
    lora: Lora, kernels: Sequence[Kernel], abstract_params: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Array]:
    """Read adapters from the folder of `lora`, with shapes and shardings of `abstract_params`.

    Raises SpecError if a tensor is missing, unexpected or of another shape.
    """
    folder, leaves = lora.init_from or "", adapter_leaves(kernels)
    files = TensorFiles(folder, KEY, STEM)
    load.check_tensors(folder, "train.lora", leaves, abstract_params, files)
    return {
        name: load.read_parameter(leaves[name], target, files)
        for name, target in abstract_params.items()
    }


def write_adapters(
    folder: str,
    model: PublishedModel,
    lora: Lora,
    params: Mapping[str, Parameter],
    extra_files: Mapping[str, bytes] = MappingProxyType({}),
) -> list[str]:
    """Write adapters and `extra_files` as a peft folder, and return the names of weight files.

    Raises SpecError if `folder` is not empty.
    """
    kernels = select_kernels(model, lora)
    leaves = adapter_leaves(kernels)
    # The other keys of peft have their defaults.
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.init_from,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": module_names(model, kernels),
        # In GPT-2's files kernels are [inputs, outputs].
        "fan_in_fan_out": isinstance(model, GPT2),
        "bias": "none",
        "use_dora": False,
        "lora_bias": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "layers_to_transform": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    files: dict[str, Mapping[str, Any] | bytes] = {CONFIG: config, **extra_files}
    return save.write_folder(folder, leaves, params, files, stem=STEM, file_bytes=sys.maxsize)
