"""The differences between the training that saved a checkpoint and the run that resumes from it.

Each checkpoint has a record of its train block. A run may resume with other values, and its log
names them; preflight.check_resumed checks the keys that must not change. The record has no
arguments of datasets and no paths, because these may hold secrets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic

from jaxlaunch.trainer.data.source import Source, changed_arguments
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.optim import schedules
from jaxlaunch.trainer.spec import Optimizer, TrainSpec

# Keys without an effect on the numbers of a training, and keys that the checkpoint records
# elsewhere.
NOT_RECORDED: Any = {
    **dict.fromkeys(("batch", "seed", "steps", "checkpoint", "compile_cache", "log_every"), True),
    **dict.fromkeys(("profile", "steps_per_dispatch", "stop_early"), True),
    "data": {
        *("shuffle", "prefetch", "threads", "workers", "trace", "path", "eval_path", "data_dir"),
        *("args", "eval_args", "parts"),
    },
    "model": {"preset", "init_from", "scan"},
    "eval": {"every", "samples"},
    "lora": {"init_from"},
}
# Keys that decide how a step is computed or what is observed. Other values of them give the same
# training.
SAME_TRAINING_KEYS = (
    *("mesh", "remat", "accumulate", "attention", "eval", "on_nonfinite", "loss.chunks"),
    "data.deterministic",
)


def training_record(
    spec: TrainSpec, attention: str, total_steps: int, eval_set: Source | None
) -> dict[str, Any]:
    """Return the record of a training for its checkpoints; `attention` is the one in use."""
    keys = spec.model_dump(mode="json", exclude=NOT_RECORDED)
    return {
        "train": keys | {"attention": attention},
        "total_steps": total_steps,
        "eval_data": None if eval_set is None else eval_set.fingerprint(),
    }


def fill_defaults(recorded: Any, current: Any, block: Any) -> Any:
    """Add keys to a record that an older version of jaxlaunch did not have, with their defaults.

    `current` is this run's record of `block`. The record of a block of another kind or source is
    returned unchanged.
    """
    are_mappings = isinstance(recorded, Mapping) and isinstance(current, Mapping)
    if not are_mappings or not isinstance(block, pydantic.BaseModel):
        return recorded
    if any(recorded.get(key, current.get(key)) != current.get(key) for key in ("kind", "source")):
        return recorded
    filled = dict(recorded)
    for key, field in type(block).model_fields.items():
        if key in current and (key in recorded or not field.is_required()):
            default = {} if isinstance(field.default, pydantic.BaseModel) else field.default
            value = recorded.get(key, default)
            filled[key] = fill_defaults(value, current[key], getattr(block, key))
    return filled


def find_training_changes(
    recorded: Mapping[str, Any], current: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """Return the keys that would have given another training: (key, recorded, current)."""
    if "train" not in recorded:
        return []
    prefixes = tuple(f"train.{key}." for key in SAME_TRAINING_KEYS)
    rows = _find_differences("train", recorded["train"], current["train"])
    return [row for row in rows if not f"{row[0]}.".startswith(prefixes)]


def describe_changes(
    recorded: Mapping[str, Any], current: Mapping[str, Any], step: int
) -> str | None:
    """Describe the differences between two records, and the learning rate after `step` steps.

    Returns None if they are equal, or if the version that saved the checkpoint recorded nothing.
    """
    if "train" not in recorded:
        return None
    rows = _find_differences("train", recorded["train"], current["train"])
    differences = [f"{key} {old} → {new}" for key, old, new in rows]
    for key, name in (("total_steps", "the steps of the run"), ("eval_data", "the held-out data")):
        old, new = recorded.get(key), current[key]
        if old != new:
            name += "".join(f", args.{argument}" for argument in changed_arguments(old, new))
            differences.append(f"{name} {_format_value(old)} → {_format_value(new)}")
    if not differences:
        # The learning rate is equal, too, and computing it would compile several programs.
        return None
    old_rate, new_rate = _learning_rate(recorded, step), _learning_rate(current, step)
    if None not in (old_rate, new_rate) and not math.isclose(old_rate, new_rate, rel_tol=1e-6):
        differences.append(f"the learning rate at step {step} {old_rate:.3g} → {new_rate:.3g}")
    return f"changed since step {step} was saved: {', '.join(differences)}"


def _find_differences(path: str, recorded: Any, current: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, recorded, current) where the values differ. A list is one value."""
    if isinstance(recorded, Mapping) and isinstance(current, Mapping):
        for key in dict.fromkeys([*recorded, *current]):
            yield from _find_differences(f"{path}.{key}", recorded.get(key), current.get(key))
    elif recorded != current:
        yield path, _format_value(recorded), _format_value(current)


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _learning_rate(recorded: Mapping[str, Any], step: int) -> Any:
    """Return the rate of a recorded training after `step` steps; None if unknown."""
    try:
        optimizer = Optimizer.model_validate(recorded["train"]["optimizer"])
        return float(schedules.build_schedule(optimizer, recorded["total_steps"])(step))
    except (KeyError, SpecError, TypeError, pydantic.ValidationError):
        return None
