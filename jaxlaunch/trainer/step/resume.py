"""What changed between a checkpoint and the run that goes on from it, in a sentence. Pure.

A run may resume under other keys than those its checkpoint was trained with; what must not change is
preflight.check_resumed's. Nothing that may hold a secret is recorded: no arguments of a dataset, no paths.
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

# Keys that change no number of a training, and those that say the same as others.
ELSEWHERE = {
    "batch",
    "seed",
    "steps",
    "checkpoint",
    "compile_cache",
    "log_every",
    "profile",
    "steps_per_dispatch",
    "stop_early",
}
# How a step is computed, and what is looked at beside it: with others the training would have been the same.
ALIKE = ("mesh", "remat", "accumulate", "attention", "eval", "on_nonfinite", "loss.chunks", "data.deterministic")
DATA_ELSEWHERE = {
    "shuffle",
    "prefetch",
    "threads",
    "workers",
    "trace",
    "path",
    "eval_path",
    "data_dir",
    "args",
    "eval_args",
    "parts",
}
MODEL_ELSEWHERE = {"preset", "init_from", "scan"}


def record(spec: TrainSpec, attention: str, total_steps: int, eval_set: Source | None) -> dict[str, Any]:
    """What a checkpoint says of the training that made it; `attention` is the implementation in use."""
    left_out: Any = {
        "data": DATA_ELSEWHERE,
        "model": MODEL_ELSEWHERE,
        "eval": {"every", "samples"},
        "lora": {"init_from"},
    }
    keys = spec.model_dump(mode="json", exclude={name: True for name in ELSEWHERE} | left_out)
    held_out = None if eval_set is None else eval_set.fingerprint()
    return {"train": keys | {"attention": attention}, "total_steps": total_steps, "eval_data": held_out}


def completed(then: Any, now: Any, block: Any) -> Any:
    """What a checkpoint says of a block of the spec, with the default of each key of `now` that its version had not.

    `now` is what this run says of `block`. What is of another kind or source stays as it is.
    """
    is_block = isinstance(then, Mapping) and isinstance(now, Mapping) and isinstance(block, pydantic.BaseModel)
    if not is_block or any(then.get(key, now.get(key)) != now.get(key) for key in ("kind", "source")):
        return then
    found = dict(then)
    for key, field in type(block).model_fields.items():
        if key in now and (key in then or not field.is_required()):
            default = {} if isinstance(field.default, pydantic.BaseModel) else field.default
            found[key] = completed(then.get(key, default), now[key], getattr(block, key))
    return found


def retrained(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The keys of two records whose values would have trained something else, with both values."""
    if "train" not in then:
        return []
    alike = tuple(f"train.{key}." for key in ALIKE)
    return [row for row in _differing("train", then["train"], now["train"]) if not f"{row[0]}.".startswith(alike)]


def changes(then: Mapping[str, Any], now: Mapping[str, Any], step: int) -> str | None:
    """What differs between two records, from what to what, the learning rate after `step` steps included.

    None where nothing does, or where the checkpoint is of a version that recorded nothing.
    """
    if "train" not in then:
        return None
    said = [f"{key} {before} → {after}" for key, before, after in _differing("train", then["train"], now["train"])]
    for key, name in (("total_steps", "the steps of the run"), ("eval_data", "the held-out data")):
        if then.get(key) != now[key]:
            name += "".join(f", args.{each}" for each in changed_arguments(then.get(key), now[key]))
            said.append(f"{name} {_shown(then.get(key))} → {_shown(now[key])}")
    if not said:
        return None  # nor does the rate, which costs a compilation of several programs to know
    before, after = _rate(then, step), _rate(now, step)
    if before is not None and after is not None and not math.isclose(before, after, rel_tol=1e-6):
        said.append(f"the learning rate at step {step} {before:.3g} → {after:.3g}")
    return f"changed since step {step} was saved: {', '.join(said)}"


def _differing(path: str, then: Any, now: Any) -> Iterator[tuple[str, str, str]]:
    """Each dotted key whose values differ, with both; lists are values."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*then, *now]):
            yield from _differing(f"{path}.{key}", then.get(key), now.get(key))
    elif then != now:
        yield path, _shown(then), _shown(now)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _rate(recorded: Mapping[str, Any], step: int) -> float | None:
    """The learning rate that a recorded training has after `step` steps; None where this version cannot say."""
    try:
        optimizer = Optimizer.model_validate(recorded["train"]["optimizer"])
        return float(schedules.build(optimizer, recorded["total_steps"])(step))
    except (KeyError, SpecError, TypeError, pydantic.ValidationError):
        return None
