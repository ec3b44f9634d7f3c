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

from trainer.adapters import targets
from trainer.adapters.keys import Lora
from trainer.adapters.targets import Kernel
from trainer.buckets import remote
from trainer.errors import SpecError, said
from trainer.huggingface import load, save
from trainer.huggingface.save import Parameter
from trainer.huggingface.tensors import Files
from trainer.spec import GPT2, Published, TrainSpec

KEY = "train.lora.init_from"
CONFIG, STEM = "adapter_config.json", "adapter_model"
KEYS: Mapping[str, str] = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora", "lora_dropout": "dropout"}
SETS = ("rank", "alpha", "rslora", "targets")  # keys of ours that a folder sets
# Keys of theirs that change what an adapter computes or where it is, and the values that change nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False, None),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "layers_to_transform": (),
    "layer_replication": (),
    "exclude_modules": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": (),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    "velora_config": (),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others changed the base as well
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
    theirs = described_by(lora.init_from)
    said_by_job = {key: getattr(lora, key) for key in SETS if key in lora.model_fields_set}
    for key, value in said_by_job.items():
        is_equal = value == theirs[key] if key != "targets" else _is_same(train, lora, theirs)
        if not is_equal:
            raise SpecError(
                f"{_path(lora.init_from)} describes another adapter than train.lora: {key} is {theirs[key]} there and "
                f"{value} here; leave it out, as the folder sets it"
            )
    own = {key: getattr(lora, key) for key in lora.model_fields_set if key not in SETS}
    try:
        made = Lora.model_validate({**theirs, **own})
    except pydantic.ValidationError as error:
        raise SpecError(f"{_path(lora.init_from)}: {said(error.errors()[0])}") from None
    return train.model_copy(update={"lora": made})


def _is_same(train: TrainSpec, lora: Lora, theirs: Mapping[str, Any]) -> bool:
    """Whether both name the same kernels, each in its words."""
    assert isinstance(train.model, Published), "the spec checks it"
    other = lora.model_copy(update={"targets": theirs["targets"]})
    return targets.chosen(train.model, lora) == targets.chosen(train.model, other)


def _path(folder: str) -> epath.Path:
    return epath.Path(folder) / CONFIG


def described_by(folder: str) -> dict[str, Any]:
    """What the folder's adapter_config.json says, by our keys. Raises SpecError; StorageError where a store fails."""
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
        raise SpecError(f"{_path(folder)}: peft_type = {kind} is not LORA, the kind of adapters that there is here")
    other = [f"{key} = {given[key]}" for key, fine in UNSUPPORTED.items() if given.get(key, None) not in (None, *fine)]
    if other:
        raise SpecError(f"{_path(folder)}: {', '.join(other)} is not supported: adapters are LoRA's of whole products")
    found = {ours: given[theirs] for theirs, ours in KEYS.items() if theirs in given}
    if "alpha" in found:
        found["alpha"] = float(found["alpha"])
    where = given.get("target_modules")
    found["targets"] = [where] if isinstance(where, str) else sorted(where or [])
    defaults = {"rank": 8, "alpha": 8.0, "rslora": False}  # peft's, of keys that a file leaves out
    return {**defaults, **found}


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
