"""The built-in tasks, and what a train block leaves out: the defaults of its task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxlaunch.trainer.spec import model as models

LM, CLASSIFY, DPO = "lm", "classify", "dpo"

# Where the built-in tasks are, by the name that `task` takes.
TASKS: Mapping[str, str] = {
    CLASSIFY: "jaxlaunch.trainer.tasks.classify:Classify",
    LM: "jaxlaunch.trainer.tasks.lm:NextToken",
    DPO: "jaxlaunch.trainer.tasks.dpo:Preference",
}

# Defaults of the built-in tasks. A task of the user's has the same as its class attribute `defaults`.
TASK_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    CLASSIFY: {"model": {"kind": "mlp"}, "data": {"source": "tfds", "name": "digits"}},
    LM: {"model": {"kind": "decoder"}, "data": {"source": "synthetic"}},
    DPO: {"model": {"kind": "decoder"}, "data": {"source": "synthetic"}},
}


def over_task(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The train block `given` over the `defaults` of its task, of whose model a folder to start from leaves little."""
    if "model" in given:
        given = {**given, "model": models.named(given["model"])}
    model, below = given.get("model"), models.named(defaults.get("model"))
    if isinstance(model, Mapping) and model.get("init_from") is not None and isinstance(below, Mapping):
        defaults = {**defaults, "model": _beside_folder(model, below)}
    return with_defaults(given, defaults)


def _beside_folder(model: Mapping[str, Any], default: Mapping[str, Any]) -> Mapping[str, Any]:
    """What stays of a task's default model beside a folder, whose config.json says the sizes and, unasked, the kind."""
    kind = default.get("kind")
    if ":" in str(kind):  # init_from is an argument of the user's model
        return default
    kept = {key: default[key] for key in ("length", "scan") if key in default}
    if "kind" in model:
        return {**kept, "kind": kind}
    return {**kept, "kind": "vit"} if kind in ("mlp", "vit") else kept


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `defaults`, key by key; a block of another kind, source or optimizer replaces the default."""
    merged = dict(defaults)
    for key, value in given.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping) and _same_kind(value, below):
            value = with_defaults(value, below)
        merged[key] = value
    return merged


def _same_kind(given: Mapping[str, Any], default: Mapping[str, Any]) -> bool:
    # The name of an optimizer or a schedule says which keys apply; that of a data source only says which data.
    if "chain" in given:
        return False
    keys = ["kind", "source", *(["name"] if "name" in default and "source" not in default else [])]
    return all(given.get(key, default.get(key)) == default.get(key) for key in keys)
