"""Which of a model's products have an adapter, and how adapters are stored by peft's names. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import names
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.spec import Lora

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


def kernels(model: spec.Published) -> list[Kernel]:
    """Every kernel of the model that can have an adapter. Experts cannot: no product of theirs is a plain one."""
    found = []
    for name, leaf in names.leaves(model).items():
        if leaf.stacked != "l" or name.rpartition(".")[2] not in PRODUCTS:
            continue
        first, last = leaf.theirs.split()
        inputs, outputs = (first, last) if isinstance(model, spec.GPT2) else (last, first)
        found.append(Kernel(name, leaf.name.removesuffix(".weight").partition("{l}.")[2], leaf, inputs, outputs))
    return found


def chosen(model: spec.Published, lora: Lora) -> list[Kernel]:
    """The kernels that have an adapter. Raises SpecError for a target that matches none."""
    there = kernels(model)
    for target in lora.targets:
        if not any(_matches(target, kernel) for kernel in there):
            raise _unmatched("train.lora.targets", target, model)
    return [kernel for kernel in there if any(_matches(target, kernel) for target in lora.targets)]


def of_folder(model: spec.Published, given: str | list[str], key: str) -> list[str]:
    """`target_modules` of a peft folder as `train.lora.targets`: a list has names of modules or ends of them, a text is
    a regular expression of a whole name.

    `key` is where it is. Raises SpecError for what matches no product, or a product in some of its layers alone.
    """
    there = kernels(model)
    if isinstance(given, list) and all(any(_matches(each, kernel) for kernel in there) for each in given):
        return sorted(given)
    if given == ALL:
        return [ALL]
    asked, found = [given] if isinstance(given, str) else given, []
    patterns = [_pattern(given, key)] if isinstance(given, str) else [rf"(.*\.)?{re.escape(each)}" for each in given]
    by_layer = {kernel.name: _by_layer(kernel, model) for kernel in there}
    for each, pattern in zip(asked, patterns, strict=True):
        if not any(re.fullmatch(pattern, module) for layers in by_layer.values() for module in layers):
            raise _unmatched(key, each, model)
    for name, layers in by_layer.items():
        missed = [module for module in layers if not any(re.fullmatch(pattern, module) for pattern in patterns)]
        if missed and len(missed) < len(layers):
            raise SpecError(
                f"{key}: {', '.join(asked)} matches {name} in {len(layers) - len(missed)} of {len(layers)} layers, not "
                f"{missed[0]}: an adapter must cover a linear layer in all blocks"
            )
        found += [] if missed else [name]
    return found


def _pattern(text: str, key: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise SpecError(f"{key} = {text} is not a regular expression: {error}") from None
    return text


def _by_layer(kernel: Kernel, model: spec.Published) -> list[str]:
    """Their names of its modules, one of each layer."""
    assert isinstance(model, spec.Decoder | spec.GPT2), "the spec checks it"
    layers = range(model.layers) if kernel.leaf.layers is None else kernel.leaf.layers
    return [kernel.leaf.name.removesuffix(".weight").format(l=layer) for layer in layers]


def _unmatched(key: str, target: str, model: spec.Published) -> SpecError:
    there = ", ".join(dict.fromkeys(map(_short, kernels(model))))
    return SpecError(
        f"{key}: {target} matches no linear layer of train.model.kind = {model.kind}; there are {there}, and {ALL}"
    )


def _short(kernel: Kernel) -> str:
    return kernel.module.rpartition(".")[2]


def _matches(target: str, kernel: Kernel) -> bool:
    """As peft: a module of this name, or whose dotted name ends so; ours too, whole or its end, and without `_proj`."""
    last = _short(kernel)
    if target in (ALL, last, last.removesuffix("_proj"), kernel.name, kernel.name.rpartition(".")[2]):
        return True
    return kernel.module.endswith(f".{target}") or kernel.module == target or kernel.name.endswith(f".{target}")


def modules(model: spec.Published, kernels_: Sequence[Kernel]) -> list[str]:
    """The names by which peft finds just these kernels: the last part of each, or more where that is another's too, as
    of an expert: the name within a layer, or those of all its layers."""
    ours = {kernel.name for kernel in kernels_}
    others = [f".{leaf.name.removesuffix('.weight')}" for name, leaf in names.leaves(model).items() if name not in ours]
    found: set[str] = set()
    for kernel in kernels_:
        own = (each for each in (_short(kernel), kernel.module) if not any(of.endswith(f".{each}") for of in others))
        name = next(own, None)
        found |= set(_by_layer(kernel, model)) if name is None else {name}
    return sorted(found)


def leaves(kernels_: Sequence[Kernel]) -> dict[str, Leaf]:
    """How the adapters of these kernels are stored, by our names: [r, inputs] and [outputs, r]."""
    found = {}
    for kernel in kernels_:
        stem, layers = PREFIX + kernel.leaf.name.removesuffix(".weight"), kernel.leaf.layers
        found[kernel.name + A] = Leaf(f"l{kernel.inputs}r", f"r {kernel.inputs}", f"{stem}.lora_A.weight", layers)
        found[kernel.name + B] = Leaf(f"lr{kernel.outputs}", f"{kernel.outputs} r", f"{stem}.lora_B.weight", layers)
    return found


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return name.endswith((A, B))
