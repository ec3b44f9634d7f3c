"""Adapters as peft's folder: adapter_config.json and adapter_model.safetensors, in and out."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import pydantic
from etils import epath
from jax import Array

from jaxlaunch.trainer.adapters import targets
from jaxlaunch.trainer.adapters.targets import Kernel
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import SpecError, said
from jaxlaunch.trainer.huggingface import load, save
from jaxlaunch.trainer.huggingface.save import Parameter
from jaxlaunch.trainer.huggingface.tensors import Files
from jaxlaunch.trainer.spec import GPT2, Lora, Published, TrainSpec

KEY = "train.lora.init_from"
CONFIG, STEM = "adapter_config.json", "adapter_model"
KEYS: Mapping[str, str] = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora"}
DEFAULTS: dict[str, Any] = {"rank": 8, "alpha": 8.0, "rslora": False}  # peft's, of keys that a file leaves out
SETS = ("rank", "alpha", "rslora", "targets")  # keys of ours that a folder sets
# Keys that change neither what an adapter computes nor where it is: of the base, of its training, of an initialization,
# and of a key beside them that is refused.
SAYING_NOTHING = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config fan_in_fan_out inference_mode layers_pattern "
    "loftq_config lora_dropout lora_ga_config megatron_core peft_version qalora_group_size revision "
    "runtime_config".split()
)
READ = frozenset({*KEYS, "peft_type", "target_modules"})
# What every other key may be, peft's default first: those of peft 0.21.2's LoraConfig, read in November 2026.
NOTHING: tuple[Any, ...] = (None, False, "", [], {})  # one of them is the default of all keys but these
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "init_lora_weights": (True, None, False, "gaussian", "orthogonal", "eva"),  # others changed the base as well
    "task_type": (None, "CAUSAL_LM"),  # others have a head of their own, or a base without one
}


def resolved(train: TrainSpec, *, is_here: bool = True) -> TrainSpec:
    """The spec with rank, alpha and targets of the peft folder that its adapters start from; as it is without one.

    With `is_here` False a folder that is not here is forgiven. Raises SpecError where the folder cannot be read, is of
    another kind of adapter, or does not agree with what the job says.
    """
    lora = train.lora
    if lora is None or lora.init_from is None:
        return train
    if not is_here and not remote.is_remote(lora.init_from) and not _path(lora.init_from).exists():
        return train
    assert isinstance(train.model, Published), "the spec checks it"
    theirs = described_by(lora.init_from, train.model)
    sets = {key: getattr(theirs, key) for key in SETS}
    for key in (key for key in SETS if key in lora.model_fields_set):
        own, value = getattr(lora, key), sets[key]
        is_equal = own == value if key != "targets" else _is_same(train.model, lora, theirs)
        if not is_equal:
            raise SpecError(
                f"{_path(lora.init_from)} describes another adapter than train.lora: {key} is {value} there and "
                f"{own} here; leave it out, as the folder sets it"
            )
    return train.model_copy(update={"lora": lora.model_copy(update=sets)})


def _is_same(model: Published, lora: Lora, theirs: Lora) -> bool:
    """Whether both name the same kernels, each in its words."""
    return targets.chosen(model, lora) == targets.chosen(model, theirs)


def _path(folder: str) -> epath.Path:
    return epath.Path(folder) / CONFIG


def described_by(folder: str, model: Published) -> Lora:
    """What the folder's adapter_config.json says of adapters of `model`. Raises SpecError; StorageError where a store
    fails."""
    try:
        if remote.is_remote(folder):
            remote.check(KEY, folder)
            with remote.storage(f"reading {KEY} = {folder}", SpecError):
                given = json.loads(_path(folder).read_text())
        else:
            given = json.loads(_path(folder).read_text())
    except (OSError, ValueError) as error:
        raise SpecError(f"{KEY} = {folder}: {CONFIG} cannot be read: {error}") from None
    if not isinstance(given, dict) or given.get("peft_type") != "LORA":
        kind = given.get("peft_type") if isinstance(given, dict) else None
        raise SpecError(f"{_path(folder)}: peft_type = {kind} is not LORA, the only supported kind")
    other = given.keys() - READ - SAYING_NOTHING
    wrong = [f"{key} = {given[key]}" for key in given if key in other and given[key] not in PLAIN.get(key, NOTHING)]
    if wrong:
        raise SpecError(
            f"{_path(folder)}: {', '.join(wrong)} is not supported: only LoRA of whole linear layers is; remove a key "
            "if the adapters were trained without it"
        )
    where: Any = given.get("target_modules")
    is_list = isinstance(where, list) and where and all(isinstance(each, str) for each in where)
    if not (is_list or isinstance(where, str)):
        raise SpecError(
            f"{_path(folder)}: target_modules = {where} is neither a list of names nor a regular expression"
        )
    said_there = {ours: given[theirs] for theirs, ours in KEYS.items() if theirs in given}
    try:
        found = Lora.model_validate(DEFAULTS | said_there)
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        key = next(theirs for theirs, ours in KEYS.items() if ours == fault["loc"][0])
        raise SpecError(f"{_path(folder)}: {key} = {given[key]}: {said(fault)}") from None
    return found.model_copy(update={"targets": targets.of_folder(model, where, f"{_path(folder)}: target_modules")})


def read(lora: Lora, chosen: Sequence[Kernel], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """The adapters `wanted` from the folder of `lora`, by our names, with their shapes, dtypes and shardings.

    Raises SpecError where a tensor is missing, left over or of another shape.
    """
    folder, leaves = lora.init_from or "", targets.leaves(chosen)
    files = Files(folder, KEY)
    load.check_tensors(folder, "train.lora", leaves, wanted, files)
    return {name: load.read(leaves[name], like, files) for name, like in wanted.items()}


def write(
    to: str,
    model: Published,
    lora: Lora,
    params: Mapping[str, Parameter],
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> list[str]:
    """Writes adapters as peft does, `beside` them the tokenizer's files; names of the weights' files.

    Raises SpecError where `to` is not empty.
    """
    chosen = targets.chosen(model, lora)
    config: dict[str, Mapping[str, Any] | bytes] = {CONFIG: config_of(model, lora, chosen), **beside}
    return save.write(to, targets.leaves(chosen), params, config, stem=STEM, file_bytes=sys.maxsize)


def config_of(model: Published, lora: Lora, chosen: Sequence[Kernel]) -> dict[str, Any]:
    """adapter_config.json of these adapters. What peft knows besides, it takes by its defaults."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.init_from,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": targets.modules(model, chosen),
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
