"""Which of a model's products have an adapter, and how adapters are stored by peft's names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer import spec
from trainer.adapters.keys import Lora
from trainer.errors import SpecError
from trainer.huggingface import names
from trainer.huggingface.names import Leaf

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
            raise SpecError(
                f"train.lora.targets: {target} matches no product of train.model.kind = {model.kind}; "
                f"there are {', '.join(dict.fromkeys(map(_short, there)))}, and {ALL}"
            )
    return [kernel for kernel in there if any(_matches(target, kernel) for target in lora.targets)]


def _short(kernel: Kernel) -> str:
    return kernel.module.rpartition(".")[2]


def _matches(target: str, kernel: Kernel) -> bool:
    """As peft: a module of this name, or whose dotted name ends so; ours too, and without `_proj`."""
    last = _short(kernel)
    if target in (ALL, last, last.removesuffix("_proj"), kernel.name.rpartition(".")[2]):
        return True
    return kernel.module.endswith(f".{target}") or kernel.module == target or kernel.name.endswith(f".{target}")


def modules(model: spec.Published, kernels_: Sequence[Kernel]) -> list[str]:
    """The names by which peft finds just these kernels: the last part of each, or the whole where that is another's."""
    others = {_short(each) for each in kernels(model) if each not in kernels_}
    return sorted({each.module if _short(each) in others else _short(each) for each in kernels_})


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
