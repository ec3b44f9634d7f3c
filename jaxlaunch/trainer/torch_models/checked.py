"""The architectures whose results have been compared with PyTorch.

The table that comes with the package has the common ones. What `launcher model check` compares on
this machine is kept in the user's cache, for the versions of the libraries that were installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxlaunch import atomic_file, user_cache
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.torch_models.compare import Comparison

TABLE = Path(__file__).with_name("checked.json")
LIBRARIES = ("torch", "torchax", "transformers")


class Checked(NamedTuple):
    """What is known of an architecture.

    Attributes:
        is_equal: Whether logits and gradients agree with PyTorch.
        packs_rows: Whether packed rows are independent of each other.
        parameter: The parameter whose gradient differs most.
        gradient: This difference, as a share of the largest value.
    """

    is_equal: bool
    packs_rows: bool
    parameter: str
    gradient: float


def find_checked(model_type: str) -> Checked | None:
    """Return what is known of an architecture: from the user's cache, or from the table."""
    path = _cache_path(model_type)
    try:
        return Checked(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        row = read_table().get(model_type)
        return None if row is None else to_checked(row)


@functools.cache
def read_table() -> dict[str, Comparison]:
    """Return the comparisons that come with the package, by model_type."""
    rows = json.loads(TABLE.read_text())["architectures"]
    return {name: Comparison(**{**row, "model_type": name}) for name, row in rows.items()}


def to_checked(comparison: Comparison) -> Checked:
    """Return what a comparison says of its architecture."""
    return Checked(
        comparison.is_equal, comparison.packs_rows, comparison.parameter, comparison.gradient
    )


def store_comparison(comparison: Comparison) -> None:
    """Keep a comparison for this user and these versions."""
    path = _cache_path(comparison.model_type)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_checked(comparison)._asdict())
    atomic_file.write_file(path, text.encode())


def _cache_path(model_type: str) -> Path:
    versions = library_versions()
    folder = "_".join(f"{name}-{version}" for name, version in versions.items())
    return user_cache.cache_folder("architectures") / folder / f"{model_type}.json"


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that compute."""
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {**versions, "jax": jax.__version__}


def require_checked(folder: str, model_type: str, *, is_allowed: bool) -> Checked:
    """Return what is known of an architecture.

    Args:
        folder: Folder of the model, for messages.
        model_type: Name of the architecture in config.json.
        is_allowed: Whether the job sets `unchecked`.

    Raises:
        SpecError: The architecture was not compared, or its results differ, and the job does not
            allow that.
    """
    checked = find_checked(model_type)
    if checked is None:
        if is_allowed:
            return Checked(False, False, "", float("nan"))
        raise SpecError(
            f"{folder}: model_type = {model_type} has not been compared with PyTorch on these "
            f"versions; compare it with launcher model check {folder} (a minute), or set "
            "train.model.unchecked: true"
        )
    if not checked.is_equal and not is_allowed:
        raise SpecError(
            f"{folder}: model_type = {model_type} does not compute what PyTorch computes: the "
            f"gradient of {checked.parameter} differs by {checked.gradient:.1g} of its largest "
            "value. Set train.model.unchecked: true to train it all the same"
        )
    return checked


def encode_table(comparisons: Mapping[str, Comparison]) -> bytes:
    """Return the content of the table's file."""
    rows: dict[str, Any] = {}
    for name, comparison in sorted(comparisons.items()):
        row = comparison._asdict()
        del row["model_type"]
        digits = {
            key: float(f"{value:.1e}") if isinstance(value, float) else value
            for key, value in row.items()
            if (key, value) != ("rounding", 0.0)
        }
        rows[name] = digits
    table = {"versions": library_versions(), "architectures": rows}
    return json.dumps(table, indent=1).encode() + b"\n"
