"""The differences between a checkpoint's training and the run that resumes from it. Pure functions.

A run may resume with keys other than those of its checkpoint; preflight.check_resumed checks those that must not
change. Nothing that may hold a secret is recorded: no arguments of a dataset, no paths.
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

# Keys that change no number of a training, and keys that repeat others.
NOT_RECORDED = "batch seed steps checkpoint compile_cache log_every profile steps_per_dispatch stop_early".split()
NOT_RECORDED_OF: Any = {
    "data": set("shuffle prefetch threads workers trace path eval_path data_dir args eval_args parts".split()),
    "model": {"preset", "init_from", "scan"},
    "eval": {"every", "samples"},
    "lora": {"init_from"},
}
# Keys of how a step is computed and what is observed. Other values give the same training.
SAME_TRAINING = "mesh remat accumulate attention eval on_nonfinite loss.chunks data.deterministic".split()


def record(spec: TrainSpec, attention: str, total_steps: int, eval_set: Source | None) -> dict[str, Any]:
    """Return the record of a training for its checkpoints; `attention` is the implementation in use."""
    keys = spec.model_dump(mode="json", exclude=dict.fromkeys(NOT_RECORDED, True) | NOT_RECORDED_OF)
    held_out = None if eval_set is None else eval_set.fingerprint()
    return {"train": keys | {"attention": attention}, "total_steps": total_steps, "eval_data": held_out}


def completed(then: Any, now: Any, block: Any) -> Any:
    """Fill the record of a block with the default of each key of `now` that its version did not have.

    `now` is this run's record of `block`. A block of another kind or source stays unchanged.
    """
    is_block = isinstance(then, Mapping) and isinstance(now, Mapping) and isinstance(block, pydantic.BaseModel)
    if not is_block or any(then.get(key, now.get(key)) != now.get(key) for key in ("kind", "source")):
        return then
    filled = dict(then)
    for key, field in type(block).model_fields.items():
        if key in now and (key in then or not field.is_required()):
            default = {} if isinstance(field.default, pydantic.BaseModel) else field.default
            filled[key] = completed(then.get(key, default), now[key], getattr(block, key))
    return filled


def retrained(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the keys whose values would have given another training, with both values."""
    if "train" not in then:
        return []
    prefixes = tuple(f"train.{key}." for key in SAME_TRAINING)
    rows = _find_differences("train", then["train"], now["train"])
    return [row for row in rows if not f"{row[0]}.".startswith(prefixes)]


def changes(then: Mapping[str, Any], now: Mapping[str, Any], step: int) -> str | None:
    """Describe the differences between two records with both values, and the learning rate after `step` steps.

    Returns None if they are equal, or if the version that saved the checkpoint recorded nothing.
    """
    if "train" not in then:
        return None
    differences = [f"{key} {a} → {b}" for key, a, b in _find_differences("train", then["train"], now["train"])]
    for key, name in (("total_steps", "the steps of the run"), ("eval_data", "the held-out data")):
        if then.get(key) != now[key]:
            name += "".join(f", args.{argument}" for argument in changed_arguments(then.get(key), now[key]))
            differences.append(f"{name} {_render(then.get(key))} → {_render(now[key])}")
    if not differences:
        # The learning rate is equal, too. Computing it would compile several programs.
        return None
    old, new = _learning_rate(then, step), _learning_rate(now, step)
    if old is not None and new is not None and not math.isclose(old, new, rel_tol=1e-6):
        differences.append(f"the learning rate at step {step} {old:.3g} → {new:.3g}")
    return f"changed since step {step} was saved: {', '.join(differences)}"


def _find_differences(path: str, then: Any, now: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each dotted key whose values differ, with both values. Lists are values."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*then, *now]):
            yield from _find_differences(f"{path}.{key}", then.get(key), now.get(key))
    elif then != now:
        yield path, _render(then), _render(now)


def _render(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _learning_rate(recorded: Mapping[str, Any], step: int) -> float | None:
    """Return the learning rate of a recorded training after `step` steps; None if this version cannot tell."""
    try:
        optimizer = Optimizer.model_validate(recorded["train"]["optimizer"])
        return float(schedules.build_schedule(optimizer, recorded["total_steps"])(step))
    except (KeyError, SpecError, TypeError, pydantic.ValidationError):
        return None
