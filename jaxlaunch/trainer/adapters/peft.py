"""Which of a model's products have an adapter, and adapters as peft's folder, in and out.

The folder holds adapter_config.json and adapter_model.safetensors.
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
from jaxlaunch.trainer.errors import SpecError, said
from jaxlaunch.trainer.huggingface import load, names, save
from jaxlaunch.trainer.huggingface.load import Files
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.huggingface.save import Parameter
from jaxlaunch.trainer.spec import GPT2, Decoder, Lora, Published, TrainSpec

A, B = ".lora_a", ".lora_b"  # ends of the names of an adapter's two matrices, after its kernel's name
SCALE = ".int8_scale"  # end of the name of a quantized kernel's factors
PREFIX = "base_model.model."  # of a tensor's name with peft, before the model's own
ALL = "all-linear"
PRODUCTS = ("query", "key", "value", "qkv", "out", "gate", "up", "down")  # kernels that layers.product multiplies with


class Kernel(NamedTuple):
    """A kernel of a product, stacked over the layers: [layers, inputs ..., outputs ...]."""

    name: str
    module: str  # theirs, without the layers' part: self_attn.q_proj
    leaf: Leaf
    inputs: str  # the letters of its axes, by the leaf
    outputs: str

    @property
    def short_name(self) -> str:
        """The last part of their name of its modules."""
        return self.module.rpartition(".")[2]

    def matches(self, target: str) -> bool:
        """Return whether a target names it, as with peft: a module of this name, or whose dotted name ends so; ours
        too, whole or its end, and without `_proj`."""
        own_name, short = self.name.rpartition(".")[2], self.short_name
        if target in (ALL, short, short.removesuffix("_proj"), self.name, own_name, self.module):
            return True
        return self.module.endswith(f".{target}") or self.name.endswith(f".{target}")

    def modules(self, model: Published) -> list[str]:
        """Return their names of its modules, one of each layer."""
        assert isinstance(model, Decoder | GPT2), "the spec checks it"
        layers = range(model.layers) if self.leaf.layers is None else self.leaf.layers
        return [self.leaf.name.removesuffix(".weight").format(l=layer) for layer in layers]


def find_kernels(model: Published) -> list[Kernel]:
    """Return every kernel of the model that can have an adapter. No product of experts is a plain one: they cannot."""
    kernels = []
    for name, leaf in names.parameter_leaves(model).items():
        if leaf.stacked == "l" and name.rpartition(".")[2] in PRODUCTS:
            first, last = leaf.theirs.split()
            inputs, outputs = (first, last) if isinstance(model, GPT2) else (last, first)
            kernels.append(Kernel(name, leaf.name.removesuffix(".weight").partition("{l}.")[2], leaf, inputs, outputs))
    return kernels


def select_kernels(model: Published, lora: Lora) -> list[Kernel]:
    """Return the kernels that have an adapter. Raises SpecError for a target that matches none."""
    kernels = find_kernels(model)
    for target in lora.targets:
        if not any(kernel.matches(target) for kernel in kernels):
            raise _unmatched_error("train.lora.targets", target, model)
    return [kernel for kernel in kernels if any(kernel.matches(target) for target in lora.targets)]


def read_targets(model: Published, modules: str | list[str], key: str) -> list[str]:
    """Return `target_modules` of a peft folder as `train.lora.targets`: a list has names of modules or ends of them, a
    text is a regular expression of a whole name.

    `key` says where it is. Raises SpecError for what matches no product, or a product in some of its layers alone.
    """
    kernels = find_kernels(model)
    if isinstance(modules, list):
        if all(any(kernel.matches(module) for kernel in kernels) for module in modules):
            return sorted(modules)
        patterns = {module: rf"(.*\.)?{re.escape(module)}" for module in modules}
    elif modules == ALL:
        return [ALL]
    else:
        patterns = {modules: modules}
        try:
            re.compile(modules)
        except re.error as error:
            raise SpecError(f"{key} = {modules} is not a regular expression: {error}") from None
    by_kernel = {kernel.name: kernel.modules(model) for kernel in kernels}
    for module, pattern in patterns.items():
        if not any(re.fullmatch(pattern, layer) for layers in by_kernel.values() for layer in layers):
            raise _unmatched_error(key, module, model)
    targets = []
    for name, layers in by_kernel.items():
        missed = [layer for layer in layers if not any(re.fullmatch(pattern, layer) for pattern in patterns.values())]
        if missed and len(missed) < len(layers):
            raise SpecError(
                f"{key}: {', '.join(patterns)} matches {name} in {len(layers) - len(missed)} of {len(layers)} layers, "
                f"not {missed[0]}: an adapter must cover a linear layer in all blocks"
            )
        targets += [] if missed else [name]
    return targets


def _unmatched_error(key: str, target: str, model: Published) -> SpecError:
    known = ", ".join(dict.fromkeys(kernel.short_name for kernel in find_kernels(model)))
    return SpecError(
        f"{key}: {target} matches no linear layer of train.model.kind = {model.kind}; there are {known}, and {ALL}"
    )


def module_names(model: Published, kernels: Sequence[Kernel]) -> list[str]:
    """Return the names by which peft finds just these kernels: the last part of each, or more where that is another's
    too, as of an expert: the name within a layer, or those of all its layers."""
    ours = {kernel.name for kernel in kernels}
    others = [
        f".{leaf.name.removesuffix('.weight')}"
        for name, leaf in names.parameter_leaves(model).items()
        if name not in ours
    ]
    modules: set[str] = set()
    for kernel in kernels:
        for name in (kernel.short_name, kernel.module):
            if not any(other.endswith(f".{name}") for other in others):
                modules.add(name)
                break
        else:
            modules |= set(kernel.modules(model))
    return sorted(modules)


def adapter_leaves(kernels: Sequence[Kernel]) -> dict[str, Leaf]:
    """Return how the adapters of these kernels are stored, by our names: [r, inputs] and [outputs, r]."""
    leaves = {}
    for kernel in kernels:
        stem, layers = PREFIX + kernel.leaf.name.removesuffix(".weight"), kernel.leaf.layers
        leaves[kernel.name + A] = Leaf(f"l{kernel.inputs}r", f"r {kernel.inputs}", f"{stem}.lora_A.weight", layers)
        leaves[kernel.name + B] = Leaf(f"lr{kernel.outputs}", f"{kernel.outputs} r", f"{stem}.lora_B.weight", layers)
    return leaves


def is_adapter(name: str) -> bool:
    """Return whether a parameter is an adapter's."""
    return name.endswith((A, B))


# --- the folder -------------------------------------------------------------------------------------------------------

KEY = "train.lora.init_from"
CONFIG, STEM = "adapter_config.json", "adapter_model"
KEYS: Mapping[str, str] = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora"}
DEFAULTS: dict[str, Any] = {"rank": 8, "alpha": 8.0, "rslora": False}  # peft's, of keys that a file leaves out
# Keys that change neither what an adapter computes nor where it is: of the base, of its training, of an initialization,
# and of a key beside them that is refused.
IGNORED = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config fan_in_fan_out inference_mode layers_pattern "
    "loftq_config lora_dropout lora_ga_config megatron_core peft_version qalora_group_size revision "
    "runtime_config".split()
)
READ = frozenset({*KEYS, "peft_type", "target_modules"})
# What every other key may be, peft's default first: those of peft 0.21.2's LoraConfig, read in November 2026.
UNSET: tuple[Any, ...] = (None, False, "", [], {})  # one of them is the default of all keys but these
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "init_lora_weights": (True, None, False, "gaussian", "orthogonal", "eva"),  # others changed the base as well
    "task_type": (None, "CAUSAL_LM"),  # others have a head of their own, or a base without one
}


def resolved(train: TrainSpec, *, is_here: bool = True) -> TrainSpec:
    """Return the spec with rank, alpha and targets of the peft folder that its adapters start from; as it is without.

    With `is_here` False a folder that is not here is forgiven. Raises SpecError where the folder cannot be read, is of
    another kind of adapter, or does not agree with what the job says.
    """
    lora = train.lora
    if lora is None or lora.init_from is None:
        return train
    path = epath.Path(lora.init_from) / CONFIG
    if not is_here and not remote.is_remote(lora.init_from) and not path.exists():
        return train
    assert isinstance(train.model, Published), "the spec checks it"
    theirs = described_by(lora.init_from, train.model)
    settings = {"rank": theirs.rank, "alpha": theirs.alpha, "rslora": theirs.rslora, "targets": theirs.targets}
    ours = lora.model_dump(include=settings.keys() & lora.model_fields_set)
    for key in [key for key in settings if key in ours]:
        is_equal = ours[key] == settings[key]
        if key == "targets":
            # Both may name the same kernels, each in its words.
            is_equal = select_kernels(train.model, lora) == select_kernels(train.model, theirs)
        if not is_equal:
            raise SpecError(
                f"{path} describes another adapter than train.lora: {key} is {settings[key]} there and "
                f"{ours[key]} here; leave it out, as the folder sets it"
            )
    return train.model_copy(update={"lora": lora.model_copy(update=settings)})


def described_by(folder: str, model: Published) -> Lora:
    """Return what the folder's adapter_config.json says of adapters of `model`. Raises SpecError, StorageError."""
    path = epath.Path(folder) / CONFIG
    try:
        if is_remote := remote.is_remote(folder):
            remote.check(KEY, folder)
        with remote.storage(f"reading {KEY} = {folder}", SpecError) if is_remote else contextlib.nullcontext():
            config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SpecError(f"{KEY} = {folder}: {CONFIG} cannot be read: {error}") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise SpecError(f"{path}: peft_type = {kind} is not LORA, the only supported kind")
    unknown = config.keys() - READ - IGNORED
    refused = [key for key in config if key in unknown and config[key] not in PLAIN.get(key, UNSET)]
    if refused:
        settings = ", ".join(f"{key} = {config[key]}" for key in refused)
        raise SpecError(
            f"{path}: {settings} is not supported: only LoRA of whole linear layers is; remove a key "
            "if the adapters were trained without it"
        )
    modules: Any = config.get("target_modules")
    is_list = isinstance(modules, list) and modules and all(isinstance(module, str) for module in modules)
    if not (is_list or isinstance(modules, str)):
        raise SpecError(f"{path}: target_modules = {modules} is neither a list of names nor a regular expression")
    try:
        lora = Lora.model_validate(
            DEFAULTS | {ours: config[theirs] for theirs, ours in KEYS.items() if theirs in config}
        )
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        key = next(theirs for theirs, ours in KEYS.items() if ours == fault["loc"][0])
        raise SpecError(f"{path}: {key} = {config[key]}: {said(fault)}") from None
    return lora.model_copy(update={"targets": read_targets(model, modules, f"{path}: target_modules")})


def read_adapters(
    lora: Lora, kernels: Sequence[Kernel], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Array]:
    """Read the adapters `wanted` from the folder of `lora`, by our names, with their shapes, dtypes and shardings.

    Raises SpecError where a tensor is missing, left over or of another shape.
    """
    folder, leaves = lora.init_from or "", adapter_leaves(kernels)
    files = Files(folder, KEY)
    load.check_tensors(folder, "train.lora", leaves, wanted, files)
    return {name: load.read_parameter(leaves[name], like, files) for name, like in wanted.items()}


def write_adapters(
    folder: str,
    model: Published,
    lora: Lora,
    params: Mapping[str, Parameter],
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> list[str]:
    """Write adapters as peft does, `beside` them the tokenizer's files; return the names of the weights' files.

    Raises SpecError where `folder` is not empty.
    """
    kernels = select_kernels(model, lora)
    # What peft knows besides, it takes by its defaults.
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.init_from,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": module_names(model, kernels),
        "fan_in_fan_out": isinstance(model, GPT2),  # its kernels are [inputs, outputs]
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
    files: dict[str, Mapping[str, Any] | bytes] = {CONFIG: config, **beside}
    return save.write_folder(folder, adapter_leaves(kernels), params, files, stem=STEM, file_bytes=sys.maxsize)
