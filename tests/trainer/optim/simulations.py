"""Every optimizer as its paper or torch states it, in float64 NumPy, against the product's.

    python -m tests.trainer.optim.simulations

runs every optimizer × clip × groups × decay_on × warm-up × resume, and prints how far the two are
apart at most.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlaunch.trainer.optim import optimizers, transforms
from jaxlaunch.trainer.spec import Optimizer

Array = Any
State = dict[str, Any]  # of one parameter
Rule = Callable[
    ..., Array
]  # (x, g, state, t, rate, decay, **options) -> x after update t = 1, 2, …

STEPS, RESUMES_AT, LR, DECAY, WARMUP, CLIP = 25, 7, 0.01, 0.1, 6, 1.0
# Of parameters: the shape, and the named axes (without that of stacked layers).
PARAMETERS: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None]] = {
    "embedding": ((6, 5), ("vocab", "embed")),
    "blocks.up": ((2, 5, 8), ("embed", "hidden")),
    "blocks.out": ((2, 2, 3, 5), ("heads", "head", "embed")),
    "blocks.scale": ((2, 5), ("embed",)),
    "bias": ((8,), ("hidden",)),  # which starts at 0
    "wide": ((12, 14), None),
    "tall": ((2, 14, 12), ("embed", "hidden")),
    "frozen": ((3, 3), None),
}
FACTORED = {
    "wide": (128, 136),
    "tall": (2, 136, 128),
}  # with adafactor, which factors nothing smaller
MATRICES = {"embedding", "blocks.up", "blocks.out", "wide", "tall", "frozen"}
# Inputs and outputs of what Muon has.
OF_MUON = {
    "blocks.up": (5, 8),
    "blocks.out": (6, 5),
    "wide": (12, 14),
    "tall": (14, 12),
    "frozen": (3, 3),
}
GROUPS: list[dict[str, Any]] = [
    {"match": r"blocks\..*", "lr": 0.5, "weight_decay": 0.02},
    {"match": "embedding", "lr": 2.0},
    {"match": "fro.*", "freeze": True},
]


# --- the rules ------------------------------------------------------------------------------------


def sgd(
    x: Array, g: Array, s: State, t: int, rate: float, decay: float, momentum: float, nesterov: bool
) -> Array:
    """torch.optim.SGD, with dampening 0."""
    g = g + decay * x
    s["m"] = momentum * s.get("m", 0.0) + g
    return x - rate * (g + momentum * s["m"] if nesterov else s["m"])


def adam_step(
    g: Array, s: State, t: int, b1: float, b2: float, eps: float, nesterov: bool = False
) -> Array:
    """Kingma and Ba 2015, algorithm 1; with nesterov Dozat 2016, algorithm 2, with one b1."""
    s["m"] = b1 * s.get("m", 0.0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * g**2
    mean = s["m"] / (1 - b1**t)
    if nesterov:
        mean = b1 * s["m"] / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
    return mean / (np.sqrt(s["v"] / (1 - b2**t)) + eps)


def adam(x: Array, g: Array, s: State, t: int, rate: float, decay: float, **options: Any) -> Array:
    """torch.optim.Adam: the decay joins the gradient."""
    return x - rate * adam_step(g + decay * x, s, t, **options)


def adamw(x: Array, g: Array, s: State, t: int, rate: float, decay: float, **options: Any) -> Array:
    """torch.optim.AdamW; Loshchilov and Hutter 2019, algorithm 2."""
    return x - rate * (adam_step(g, s, t, **options) + decay * x)


def lion(
    x: Array, g: Array, s: State, t: int, rate: float, decay: float, b1: float, b2: float
) -> Array:
    """Chen et al. 2023, algorithm 2."""
    m = s.get("m", 0.0)
    s["m"] = b2 * m + (1 - b2) * g
    return x - rate * (np.sign(b1 * m + (1 - b1) * g) + decay * x)


def lamb(x: Array, g: Array, s: State, t: int, rate: float, decay: float, **options: Any) -> Array:
    """You et al. 2020, algorithm 2, with the identity for scaling; a ratio without size is 1."""
    u = adam_step(g, s, t, **options) + decay * x
    sizes = np.linalg.norm(x), np.linalg.norm(u)
    return x - rate * (sizes[0] / sizes[1] if all(sizes) else 1.0) * u


def adafactor(
    x: Array, g: Array, s: State, t: int, rate: float, decay: float, b1: float | None, eps: float
) -> Array:
    """Shazeer and Stern 2018, algorithms 4 and 5 with the constants of section 9.

    The squares are factored where both axes hold 128 or more, as optax chooses.
    """
    beta, squares = 1.0 - t**-0.8, g**2 + eps
    if x.ndim >= 2 and min(x.shape[-2:]) >= 128:
        r = s["r"] = beta * s.get("r", 0.0) + (1 - beta) * squares.sum(-1, keepdims=True)
        c = s["c"] = beta * s.get("c", 0.0) + (1 - beta) * squares.sum(-2, keepdims=True)
        v = r * c / r.sum(-2, keepdims=True)
    else:
        v = s["v"] = beta * s.get("v", 0.0) + (1 - beta) * squares
    u = g / np.sqrt(v)
    move = max(1e-3, rms(x)) * rate * u / max(1.0, rms(u))
    if b1 is not None:
        s["m"] = move = b1 * s.get("m", 0.0) + (1 - b1) * move
    return x - move - rate * decay * x


def rms(x: Array) -> float:
    return float(np.sqrt((x**2).mean()))


def muon(
    x: Array,
    g: Array,
    s: State,
    t: int,
    rate: float,
    decay: float,
    sizes: tuple[int, int] | None,
    **options: Any,
) -> Array:
    """Jordan 2024 (`SingleDeviceMuonWithAuxAdam`); consistent_rms is Liu et al. 2025."""
    of_adam = {key: options.pop(key) for key in ("b1", "b2")}
    if sizes is None:
        return adamw(x, g, s, t, rate, decay, eps=options["eps"], **of_adam)
    beta, inputs, outputs = options["beta"], *sizes
    s["m"] = beta * s.get("m", 0.0) + (1 - beta) * g
    ahead = (1 - beta) * g + beta * s["m"]
    u = np.stack(
        [newton_schulz(matrix, options) for matrix in ahead.reshape(-1, inputs, outputs)]
    ).reshape(x.shape)
    scale = math.sqrt(max(1.0, outputs / inputs))
    if options["consistent_rms"] is not None:
        scale = options["consistent_rms"] * math.sqrt(max(inputs, outputs))
    return x - rate * (scale * u + decay * x)


def newton_schulz(x: Array, options: dict[str, Any]) -> Array:
    """By singular values: the iteration leaves the singular vectors as they are."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / (np.sqrt((s**2).sum()) + options["eps"])
    for _ in range(options["ns_steps"]):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


def free(
    y: Array,
    g: Array,
    s: State,
    t: int,
    rate: float,
    decay: float,
    b1: float,
    b2: float,
    eps: float,
) -> Array:
    """Defazio et al. 2024, algorithm 1."""
    s.setdefault("x", y), s.setdefault("z", y)
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * g**2
    s["z"] = s["z"] - rate * (g / (np.sqrt(s["v"] / (1 - b2**t)) + eps) + decay * y)
    s["sum"] = s.get("sum", 0.0) + rate**2
    share = rate**2 / s["sum"] if s["sum"] else 0.0
    s["x"] = (1 - share) * s["x"] + share * s["z"]
    return (1 - b1) * s["z"] + b1 * s["x"]


RULES: dict[str, Rule] = {
    "adamw": adamw,
    "adam": adam,
    "adafactor": adafactor,
    "lion": lion,
    "sgd": sgd,
    "lamb": lamb,
    "muon": muon,
    "schedule-free": free,
}
# Options of each, by what a test is called.
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in RULES},
    "adamw b2": {"name": "adamw", "b1": 0.8, "b2": 0.95},
    "adam nesterov": {"name": "adam", "nesterov": True},
    "adafactor b1": {"name": "adafactor", "b1": 0.9},
    "sgd momentum": {"name": "sgd", "momentum": 0.9},
    "sgd nesterov": {"name": "sgd", "momentum": 0.9, "nesterov": True},
    "muon consistent": {"name": "muon", "consistent_rms": 0.2, "beta": 0.9},
    "schedule-free b1": {"name": "schedule-free", "b1": 0.8},
}
RESUMED_WITH = {"schedule-free b1": {"b1": 0.95}}  # options that the resumed run has otherwise


# --- a run ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
    """What surrounds the rule."""

    clips: bool
    has_groups: bool
    on_matrices: bool
    warms_up: bool
    resumes: bool

    def optimizer(self, variant: str, resumed: bool = False) -> Optimizer:
        """The block of job.yaml."""
        options = VARIANTS[variant] | (RESUMED_WITH.get(variant, {}) if resumed else {})
        return Optimizer(
            lr=LR,
            weight_decay=DECAY,
            decay_on="matrices" if self.on_matrices else "all",
            clip=CLIP if self.clips else None,
            schedule={"name": self.shape(variant), "warmup": WARMUP if self.warms_up else 0},
            groups=GROUPS if self.has_groups else [],
            **options,
        )

    @staticmethod
    def shape(variant: str) -> str:
        """Schedule-free needs no decay."""
        return "constant" if variant.startswith("schedule-free") else "linear"

    def rate(self, variant: str, step: int) -> float:
        """The learning rate, from step 0."""
        warmup = WARMUP if self.warms_up else 0
        if step < warmup:
            return LR * step / warmup
        return LR if self.shape(variant) == "constant" else LR * (STEPS - step) / (STEPS - warmup)


ALL = [Setting(*switches) for switches in itertools.product((False, True), repeat=5)]
# Every two switches are seen in all four ways.
COVERING = [
    Setting(*map(bool, map(int, bits)))
    for bits in ("00000", "01111", "10111", "11011", "11101", "11110")
]


def draw_setting(optimizer: Optimizer) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    """Parameters, and a gradient of each for every step, of very different sizes; all float32."""
    random = np.random.default_rng(7)
    shapes = {name: shape for name, (shape, _) in PARAMETERS.items()}
    shapes |= FACTORED if optimizer.name == "adafactor" else {}
    params = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    params["bias"][:] = 0.0

    def gradient(leaf: Array) -> Array:
        return (np.exp(random.normal()) * random.normal(size=leaf.shape)).astype(np.float32)

    return params, [{name: gradient(leaf) for name, leaf in params.items()} for _ in range(STEPS)]


def run_formula(variant: str, setting: Setting) -> tuple[list[dict[str, Array]], dict[str, State]]:
    """The parameters after each update, and the states of the rule at the end."""
    start, grads = draw_setting(setting.optimizer(variant))
    owner = {
        name: next((g for g in GROUPS if re.fullmatch(g["match"], name)), {}) for name in start
    }
    if not setting.has_groups:
        owner = dict.fromkeys(start, {})
    params = {
        name: leaf.astype(np.float64)
        for name, leaf in start.items()
        if not owner[name].get("freeze")
    }
    states: dict[str, State] = {name: {} for name in params}
    points = []
    for step in range(STEPS):
        resumed = setting.resumes and step >= RESUMES_AT
        optimizer = setting.optimizer(variant, resumed)
        now = {name: grads[step][name].astype(np.float64) for name in params}
        norm = math.sqrt(sum(float((leaf**2).sum()) for leaf in now.values()))
        factor = min(1.0, CLIP / norm) if setting.clips else 1.0
        for name, x in params.items():
            group, options = owner[name], optimizer.options()
            is_spared = setting.on_matrices and name not in (
                OF_MUON if optimizer.name == "muon" else MATRICES
            )
            decay = 0.0 if is_spared else group.get("weight_decay", DECAY)
            if optimizer.name == "muon":
                options["sizes"] = OF_MUON.get(name)
            rate = group.get("lr", 1.0) * setting.rate(variant, step)
            params[name] = RULES[optimizer.name](
                x, factor * now[name], states[name], step + 1, rate, decay, **options
            )
        points.append(dict(params))
    return points, states


def run_optimizer(variant: str, setting: Setting) -> tuple[list[dict[str, Array]], Any]:
    """Return the product's parameters after each update, and its state, also after a resume."""
    optimizer = setting.optimizer(variant)
    start, grads = draw_setting(optimizer)
    axes = {name: axes for name, (_, axes) in PARAMETERS.items()}
    frozen = optimizers.find_frozen(optimizer, start)
    params = {name: jnp.asarray(leaf) for name, leaf in start.items() if name not in frozen}
    built = optimizers.build_optimizer(optimizer, STEPS, axes)
    state, update = built.init(params), jax.jit(built.update)
    points = []
    for step in range(STEPS):
        if setting.resumes and step == RESUMES_AT:
            state = jax.tree.map(lambda leaf: jnp.asarray(np.array(leaf)), state)
            update = jax.jit(
                optimizers.build_optimizer(
                    setting.optimizer(variant, resumed=True), STEPS, axes
                ).update
            )
        updates, state = update({name: grads[step][name] for name in params}, state, params)
        params = optax.apply_updates(params, updates)
        points.append({name: np.asarray(leaf) for name, leaf in params.items()})
    return points, state


def largest_distance(variant: str, setting: Setting) -> dict[str, float]:
    """Return the largest distance of each parameter over all steps, relative to 1 + |p|."""
    (expected, states), (result, state) = (
        run_formula(variant, setting),
        run_optimizer(variant, setting),
    )
    far = {
        name: max(
            relative(ours[name], theirs[name])
            for ours, theirs in zip(result, expected, strict=True)
        )
        for name in expected[0]
    }
    averaged = transforms.averaged_params(
        state, {name: jnp.asarray(leaf) for name, leaf in result[-1].items()}
    )
    return far | {
        f"x of {name}": relative(leaf, states[name]["x"]) for name, leaf in (averaged or {}).items()
    }


def relative(result: Array, expected: Array) -> float:
    return float((np.abs(np.asarray(result, np.float64) - expected) / (1 + np.abs(expected))).max())


def campaign() -> Iterator[tuple[str, int, float, str]]:
    """For each variant: the runs, the largest distance, and where that is."""
    for variant in VARIANTS:
        worst = max(
            (far, f"{name}, {setting}")
            for setting in ALL
            for name, far in largest_distance(variant, setting).items()
        )
        yield variant, len(ALL), *worst


if __name__ == "__main__":
    for variant, runs, far, place in campaign():
        print(
            f"{variant:16} {runs} runs of {STEPS} steps: {far:.1e} apart at most ({place})",
            flush=True,
        )
