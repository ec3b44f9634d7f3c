"""Which parameters are trained how: frozen ones, groups with a rate or a decay of their own, matrices.

Parameters are known by their dotted paths, as a checkpoint and `launcher plan --sharding` name them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optax

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.spec.optimizer import Group, Optimizer

Named = dict[str, Any]  # parameter name -> array
Axes = Mapping[str, tuple[str | None, ...] | None]  # parameter name -> its own named axes; None: not named
REST = "rest"  # the parameters of no group
SHOWN = 8  # names in a message


def of(name: str, groups: Sequence[Group]) -> int | None:
    """The group of a parameter: the first whose pattern matches its whole path; None: no group's."""
    return next((at for at, group in enumerate(groups) if re.fullmatch(group.match, name)), None)


def frozen(optimizer: Optimizer, names: Iterable[str]) -> frozenset[str]:
    """The parameters that are not trained. Raises SpecError for a group that gets none, or where all are frozen."""
    names, groups = list(names), optimizer.groups
    owners = {name: of(name, groups) for name in names}
    for at, group in enumerate(groups):
        if at in owners.values():
            continue
        key = f"train.optimizer.groups.{at}.match = {group.match}"
        if any(re.fullmatch(group.match, name) for name in names):
            raise SpecError(
                f"{key} matches only parameters of the groups before it, and the first group that matches has a "
                "parameter; move this group up, or remove it"
            )
        raise SpecError(f"{key} matches no parameter. There are: {_some(names)}")
    found = frozenset(name for name, owner in owners.items() if owner is not None and groups[owner].freeze)
    if found and len(found) == len(names):
        raise SpecError("train.optimizer.groups freeze every parameter; leave some to be trained")
    return found


def is_matrix(name: str, leaf: Any, axes: Axes) -> bool:
    """Whether a parameter has two axes or more of its own (without the one of stacked layers) and is no bias or scale:
    those of all heads have two axes as well."""
    own = axes.get(name)
    return (leaf.ndim if own is None else len(own)) >= 2 and not name.rpartition(".")[2].endswith(("bias", "scale"))


def split(
    groups: Sequence[Group], parts: Mapping[int, optax.GradientTransformation], rest: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The transformation that treats the parameters of the groups `parts` by them, all others by `rest`.

    The state is a dict by label, `group0` or `rest`, of states over the parameters of that label alone.
    """
    of_label = {f"group{at}": part for at, part in parts.items()} | {REST: rest}

    def by_label(tree: Named) -> dict[str, Named]:
        found: dict[str, Named] = {}
        for name, leaf in tree.items():
            label = f"group{of(name, groups)}"
            found.setdefault(label if label in of_label else REST, {})[name] = leaf
        return found

    def init(params: Named) -> Named:
        return {label: of_label[label].init(part) for label, part in by_label(params).items()}

    def update(grads: Named, state: Named, params: Named | None = None) -> tuple[Named, Named]:
        updates: Named = {}
        after: Named = {}
        of_params = by_label(params or {})
        for label, part in by_label(grads).items():
            new, after[label] = of_label[label].update(part, state[label], of_params.get(label))
            updates |= new
        return {name: updates[name] for name in grads}, after

    return optax.GradientTransformation(init, update)


def notes(optimizer: Optimizer, params: Mapping[str, Any]) -> list[str]:
    """What a run says of them: what is frozen, and what each group has."""
    found = []
    for at, group in enumerate(optimizer.groups):
        names = [name for name in params if of(name, optimizer.groups) == at]
        said = ["frozen"] if group.freeze else [f"lr × {group.lr:g}"]
        said += [] if group.weight_decay is None else [f"weight decay {group.weight_decay:g}"]
        numbers = sum(params[name].size for name in names)
        found.append(
            f"train.optimizer.groups.{at} ({group.match}): {len(names)} arrays, {numbers:,} numbers, {', '.join(said)}"
        )
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + more
