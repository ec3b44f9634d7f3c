"""The MLP of a table as a folder: its arrays in safetensors, its sizes in config.json, its columns in inputs.json.

Hugging Face has no such model. Arrays have our names and axes, so that a few lines of NumPy compute the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pydantic
from etils import epath
from jax import Array

from jaxlaunch.trainer.errors import SpecError, said
from jaxlaunch.trainer.huggingface import load, save
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.huggingface.save import Parameter
from jaxlaunch.trainer.huggingface.tensors import Files
from jaxlaunch.trainer.spec import MLP

TYPE = "jaxlaunch_mlp"
SIZES = ("layers", "width", "classes")


def write(to: str, model: MLP, params: Mapping[str, Parameter], beside: Mapping[str, bytes]) -> list[str]:
    """Writes the folder, all or nothing; the names of its safetensors. Raises SpecError where `to` is not empty."""
    config = {"model_type": TYPE, **{key: getattr(model, key) for key in SIZES}}
    leaves = {name: _leaf(name, len(array.shape)) for name, array in params.items()}
    return save.write(to, leaves, params, {"config.json": config, **beside})


def model_of(folder: str) -> MLP | None:
    """The model of a folder that `write` wrote; None for another folder. Raises SpecError where it is damaged."""
    try:
        config = json.loads((epath.Path(folder) / "config.json").read_text())
        if not isinstance(config, dict) or config.get("model_type") != TYPE:
            return None
        return MLP.model_validate({"kind": "mlp", **{key: config.get(key) for key in SIZES}})
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        raise SpecError(f"{folder}: config.json: {wrong['loc'][0]} {said(wrong)}") from None
    except ValueError as error:
        raise SpecError(f"{folder}: config.json cannot be read: {error}") from None


def read(folder: str, wanted: Mapping[str, Any]) -> dict[str, Array]:
    """The parameters, as `wanted` says their shapes and shardings. Raises SpecError for those of another model."""
    files = Files(folder, "the export")
    leaves = {name: _leaf(name, len(like.shape)) for name, like in wanted.items()}
    load.check_tensors(folder, "its config.json", leaves, wanted, files)
    return {name: load.read(leaves[name], like, files) for name, like in wanted.items()}


def _leaf(name: str, axes: int) -> Leaf:
    return Leaf("io"[-axes:], " ".join("io"[-axes:]), name)
