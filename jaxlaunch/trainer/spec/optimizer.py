"""The optimizer block of job.yaml: its keys, their types and defaults. Never imports jax."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from jaxlaunch.spelling import find_completions, find_nearest
from jaxlaunch.trainer.spec.block import (
    Block,
    Few,
    Fraction,
    Natural,
    Positive,
    PredicateError,
    Rate,
    Unset,
    Weight,
    allow_text,
)

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Arguments = dict[str, Any]

# `module:Name` of an object of the user.
USER_PATH = re.compile(r"[\w.]+:[\w.]+")
# The name of an optimizer that consists of a chain of transformations.
CHAIN = "chain"
SCHEDULE_FREE = "schedule-free"

# Options of each optimizer in addition to lr, weight_decay and clip, with optax's defaults. Other
# keys are errors.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adam": {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "nesterov": False},
    "adamw": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
    "adafactor": {"b1": None, "eps": 1e-30},
    "lion": {"b1": 0.9, "b2": 0.99},
    "sgd": {"momentum": 0.0, "nesterov": False},
    "lamb": {"b1": 0.9, "b2": 0.999, "eps": 1e-6},
    "muon": {
        "b1": 0.9,
        "b2": 0.999,
        "eps": 1e-8,
        "beta": 0.95,
        "ns_steps": 5,
        "consistent_rms": None,
    },
    SCHEDULE_FREE: {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
}
# Other optimizers of optax. Their names need the prefix `optax:`.
OPTAX_NAMES = (
    *("adadelta", "adagrad", "adamax", "adan", "lars"),
    *("nadam", "novograd", "radam", "rmsprop", "yogi"),
)
OPTIONS = tuple(dict.fromkeys(key for defaults in OPTIMIZERS.values() for key in defaults))
SCHEDULE_NAMES = ("constant", "linear", "cosine", "exponential", "wsd")


def _describe_defaults(key: str) -> str:
    """Return the optimizers with this option and its default: "lion 0.99, adam, adamw 0.999"."""
    names_by_default: dict[Any, list[str]] = {}
    for name, defaults in OPTIMIZERS.items():
        if key in defaults:
            names_by_default.setdefault(defaults[key], []).append(name)

    def format_value(value: float | bool | None) -> str:
        if value is None or isinstance(value, bool):
            return "none" if value is None else str(value).lower()
        return f"{value:g}".replace("e-0", "e-")

    return ", ".join(
        f"{', '.join(names)} {format_value(value)}" for value, names in names_by_default.items()
    )


def is_user_path(name: str) -> bool:
    """Return whether a name is `module:Name` and not built in."""
    return ":" in name


def _check_name(name: str, names: tuple[str, ...], noun: str) -> str:
    if name in names or USER_PATH.fullmatch(name):
        return name
    if matches := find_nearest(name, names) or find_completions(name, names):
        raise PredicateError(f'is not a known {noun} (did you mean "{matches[0]}"?)')
    choices = f"{', '.join(names)}, or module:Name"
    raise PredicateError(f"is not a known {noun}; write one of {choices}")


def _check_link_name(name: str) -> str:
    if name in OPTAX_NAMES:
        raise PredicateError(f"is written optax:{name}, with its options under args")
    return _check_name(name, tuple(OPTIMIZERS), "optimizer")


def _check_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        hint = "write .* for any text and \\. for a dot"
        raise PredicateError(f"is not a pattern ({error}); {hint}") from None
    return text


class Schedule(Block):
    """The learning rate by step: linear warm-up to lr, then the shape down to `final` × lr.

    ```yaml
    train:
      task: lm
      steps: 10000
      # constant from 200 to 8000
      optimizer: {lr: 3e-4, schedule: {name: wsd, warmup: 200, decay: 2000}}
    ```
    """

    name: Annotated[
        str, AfterValidator(lambda name: _check_name(name, SCHEDULE_NAMES, "schedule"))
    ] = Field(
        "cosine",
        description="constant, linear, cosine, exponential, wsd (constant, then a short "
        "decay), after the warmup; or module:Name",
    )
    warmup: Natural = Field(
        0, description="steps of linear warmup to lr; if longer than the run, lr is never reached"
    )
    start: Share = Field(0.0, description="fraction of lr at step 0 of the warmup")
    decay: Positive | None = Field(
        None, description="wsd only: steps of the decay", json_schema_extra=Unset("a tenth of all")
    )
    shape: Literal["cosine", "linear"] | None = Field(
        None, description="wsd only: shape of the decay", json_schema_extra=Unset("cosine")
    )
    final: Share | None = Field(
        None,
        validate_default=True,
        description="fraction of lr at the end of the run; not with constant; required with "
        "exponential",
        json_schema_extra=Unset("0"),
    )
    args: Arguments = Field(
        {}, description="module:Name only: its arguments, in addition to lr and total_steps"
    )

    @field_validator("start")
    @classmethod
    def _check_start(cls, start: float, info: ValidationInfo) -> float:
        if start and not info.data.get("warmup"):
            raise PredicateError("does not apply without a warmup")
        return start

    @field_validator("warmup", "decay", "shape", "final", "args")
    @classmethod
    def _check_applies(cls, value: Any, info: ValidationInfo) -> Any:
        # The name is missing if it is invalid, which is an error of its own.
        name = info.data.get("name")
        if not value or name is None:
            return value
        if is_user_path(name) != (info.field_name == "args"):
            hint = "; give it in args" if is_user_path(name) else ""
            raise PredicateError(f"does not apply to {name}{hint}")
        needs_wsd = info.field_name in ("decay", "shape")
        needs_decay = info.field_name == "final"
        if (needs_wsd and name != "wsd") or (needs_decay and name == "constant"):
            raise PredicateError(f"does not apply to {name}")
        return value

    @field_validator("final")
    @classmethod
    def _check_final(cls, final: float | None, info: ValidationInfo) -> float | None:
        if info.data.get("name") == "exponential" and not final:
            raise PredicateError(
                "must be above 0 with exponential, which never reaches 0; write 0.01, for example"
            )
        return final

    def decay_steps(self, total_steps: int) -> int:
        """Return the steps of the decay. Raises ValueError if wsd's steps do not fit."""
        after_warmup = max(0, total_steps - self.warmup)
        if self.name == "constant" or is_user_path(self.name):
            return 0
        if self.name != "wsd":
            return after_warmup
        if self.decay is not None and self.decay > after_warmup:
            steps = f"schedule.warmup = {self.warmup} and decay = {self.decay}"
            raise ValueError(f"{steps} do not fit in {total_steps} steps")
        return self.decay or min(max(1, total_steps // 10), after_warmup)


class Link(Block):
    """One optax transformation: an optimizer by name, or module:Name with its arguments.

    ```yaml
    train:
      task: lm
      optimizer:
        lr: 3e-4
        chain:
          - {name: "optax:clip_by_block_rms", args: {threshold: 1.0}}  # first
          - {name: adamw, b2: 0.95}                                    # then
    ```
    """

    name: Annotated[str, AfterValidator(_check_link_name)] = Field(
        description=f"{', '.join(OPTIMIZERS)}; or module:Name of an optax transformation"
    )
    args: Arguments = Field(
        {}, description="module:Name only: its arguments, in addition to learning_rate"
    )
    b1: Fraction | None = Field(
        None,
        description="decay of the first moment; muon's is its Adam's",
        json_schema_extra=Unset(_describe_defaults("b1")),
    )
    b2: Fraction | None = Field(
        None,
        description="decay of the second moment; muon's is its Adam's",
        json_schema_extra=Unset(_describe_defaults("b2")),
    )
    eps: Rate | None = Field(
        None,
        description="avoids a division by zero",
        json_schema_extra=Unset(_describe_defaults("eps")),
    )
    momentum: Fraction | None = Field(
        None,
        description="share of the previous step that is kept",
        json_schema_extra=Unset(_describe_defaults("momentum")),
    )
    nesterov: bool | None = Field(
        None,
        description="Nesterov's momentum; all but adam need a momentum",
        json_schema_extra=Unset(_describe_defaults("nesterov")),
    )
    beta: Fraction | None = Field(
        None, description="muon's momentum", json_schema_extra=Unset(_describe_defaults("beta"))
    )
    ns_steps: Few | None = Field(
        None,
        description="Newton-Schulz iterations",
        json_schema_extra=Unset(_describe_defaults("ns_steps")),
    )
    consistent_rms: Rate | None = Field(
        None,
        description="RMS of muon's updates; 0.2 is the size of Adam's",
        json_schema_extra=Unset(_describe_defaults("consistent_rms")),
    )

    @field_validator("args", *OPTIONS)
    @classmethod
    def _check_applies(cls, value: Any, info: ValidationInfo) -> Any:
        # The name is missing if it is invalid, which is an error of its own.
        name, key = info.data.get("name"), info.field_name
        if value is None or value == {} or name is None:
            return value
        if name == CHAIN:
            raise PredicateError("does not apply to a chain; give it in the entry that takes it")
        if is_user_path(name) and key != "args":
            raise PredicateError(f"does not apply to {name}; give it in args")
        if not is_user_path(name) and key not in OPTIMIZERS[name]:
            raise PredicateError(
                f"does not apply to {name}, which takes {', '.join(OPTIMIZERS[name])}"
            )
        if (name, key, value) == (SCHEDULE_FREE, "b1", 0.0):
            raise PredicateError("must be above 0: schedule-free divides by it")
        needs_momentum = key == "nesterov" and value and "momentum" in OPTIMIZERS.get(name, {})
        if needs_momentum and not info.data.get("momentum"):
            raise PredicateError("needs a momentum above 0")
        return value

    def options(self) -> dict[str, Any]:
        """Return the options with their defaults; empty if the optimizer is not built in."""
        defaults = OPTIMIZERS.get(self.name, {})
        values = {key: getattr(self, key) for key in defaults}
        return {**defaults, **{key: value for key, value in values.items() if value is not None}}


class Group(Block):
    """Parameters that are trained in another way; the first matching group counts.

    ```yaml
    train:
      task: lm
      optimizer:
        groups:
          - {match: embedding, freeze: true}
          - {match: ".*bias", lr: 2.0, weight_decay: 0}  # twice the rate, no decay
    ```
    """

    match: Annotated[str, AfterValidator(_check_pattern)] = Field(
        description="a regular expression for the whole dotted path: blocks\\..*, .*bias"
    )
    lr: Rate = Field(1.0, description="a factor of the learning rate")
    weight_decay: Weight | None = Field(
        None,
        description="weight decay of these parameters",
        json_schema_extra=Unset("the optimizer's"),
    )
    freeze: bool = Field(
        False, description="the parameters do not change: they have no gradient and no state"
    )

    @field_validator("freeze")
    @classmethod
    def _check_freeze(cls, freeze: bool, info: ValidationInfo) -> bool:
        if freeze and (info.data.get("lr") != 1.0 or info.data.get("weight_decay") is not None):
            problem = "which do not apply to frozen parameters; keep one"
            raise PredicateError(f"is given together with lr or weight_decay, {problem}")
        return freeze


def _expand_name(schedule: Any) -> Any:
    return {"name": schedule} if isinstance(schedule, str) else schedule


def _is_schedule_free(info: ValidationInfo) -> bool:
    links: list[Link] = info.data.get("chain") or []
    return SCHEDULE_FREE in (info.data.get("name"), *(link.name for link in links))


class Optimizer(Link):
    """An optax optimizer by name, or a chain, with clipping, schedule and moving average.

    ```yaml
    train:
      task: lm
      optimizer:
        name: adamw
        lr: 3e-4
        weight_decay: 0.1
        decay_on: matrices    # not biases and norms
        clip: 1.0             # global norm of the gradients
        schedule: {name: cosine, warmup: 200, final: 0.1}
    ```
    """

    name: Annotated[
        str, AfterValidator(lambda name: name if name == CHAIN else _check_link_name(name))
    ] = Field(
        "adamw",
        description=f"{', '.join(OPTIMIZERS)}; or module:Name of an optax transformation; "
        "chain with one",
    )
    chain: list[Link] = Field(
        [], validate_default=True, description="transformations applied in order, instead of name"
    )
    lr: Rate = Field(3e-4, description="largest learning rate")
    weight_decay: Weight = Field(
        0.0, description="weight decay of every parameter, multiplied by lr"
    )
    decay_on: Literal["all", "matrices"] = Field(
        "all",
        description="parameters that weight_decay applies to; matrices: those with two or "
        "more axes, except biases and scales",
    )
    clip: Rate | None = Field(
        1.0, description="clip gradients to this global norm; null: no clipping"
    )
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="decay of a moving average of the weights, which eval then uses",
        json_schema_extra=Unset("none", "null:"),
    )
    schedule: Annotated[Schedule, BeforeValidator(_expand_name)] = Field(
        Schedule(),
        description="learning rate schedule, or only its name",
        json_schema_extra=allow_text,
    )
    groups: list[Group] = Field(
        [],
        description="groups of parameters, by path, that have their own rate or decay, "
        "or are frozen",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, raw: Any) -> Any:
        """Set the name of a chain, and the default schedule of schedule-free optimizers."""
        if not isinstance(raw, Mapping):
            return raw
        raw = {"name": CHAIN, **raw} if raw.get("chain") else dict(raw)
        links = raw["chain"] if isinstance(raw.get("chain"), list) else []
        names = [link.get("name") for link in [raw, *links] if isinstance(link, Mapping)]
        schedule = _expand_name(raw.get("schedule", {}))
        if SCHEDULE_FREE in names and isinstance(schedule, Mapping):
            raw["schedule"] = {"name": "constant", **schedule}
        return raw

    @field_validator("chain")
    @classmethod
    def _check_chain(cls, chain: list[Link], info: ValidationInfo) -> list[Link]:
        name = info.data.get("name")
        if chain and name not in (CHAIN, None):
            hint = "make that an entry of the chain"
            raise PredicateError(f"is given together with name = {name}; {hint}")
        if name == CHAIN and not chain:
            raise PredicateError("is empty, but name = chain needs its entries")
        if len(builtin_names := [link.name for link in chain if not is_user_path(link.name)]) > 1:
            names = " and ".join(builtin_names)
            problem = f"{names} would each multiply by the rate"
            raise PredicateError(f"must have one optimizer by name; {problem}")
        return chain

    @field_validator("ema")
    @classmethod
    def _check_average(cls, ema: float | None, info: ValidationInfo) -> float | None:
        if ema is not None and _is_schedule_free(info):
            raise PredicateError("does not apply to schedule-free, which averages by itself")
        return ema

    @field_validator("schedule")
    @classmethod
    def _check_schedule(cls, schedule: Schedule, info: ValidationInfo) -> Schedule:
        name = schedule.name
        if name in SCHEDULE_NAMES and name != "constant" and _is_schedule_free(info):
            hint = "write constant, or leave it out"
            raise ValueError(f"{name} decays, and schedule-free needs no decay; {hint}")
        return schedule

    def all_links(self) -> list[Link]:
        """Return the transformations in order: the chain, or this optimizer alone."""
        return self.chain or [self]
