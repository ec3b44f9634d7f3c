"""Optimizers by name, built from optax: clipping, decay, the schedule, and groups.

Parameters are identified by their dotted paths, as in a checkpoint and in `launcher plan
--sharding`. By default every parameter decays, including biases and norms, as with torch's
`optimizer(model.parameters())` and in MaxText. The decay is multiplied by the learning rate.
docs/optimizers.md contains the formulas.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError, list_first
from jaxlaunch.trainer.optim import schedules, transforms
from jaxlaunch.trainer.optim.transforms import Axes, Mask, NamedArrays, PyTree
from jaxlaunch.trainer.spec.optimizer import SCHEDULE_FREE, Group, Link, is_user_path

Options = dict[str, Any]
# Label of the parameters that are in no group.
DEFAULT_LABEL = "rest"
# Number of names in a message.
MAX_LISTED = 8


def build_optimizer(
    optimizer: spec.Optimizer, total_steps: int, axes: Axes | None = None
) -> optax.GradientTransformation:
    """Build the optax transformation from gradients to updates of the trained parameters.

    `init` and `update` both need the parameters. State and arithmetic are always float32, since the
    second moment of Adam in bfloat16 would never change (1 - b2 = 0.001 is below its resolution of
    0.004). The updates have the dtypes of the parameters.

    `axes` are the named axes of each parameter, which distinguish a matrix from a stack of vectors.
    Raises SpecError if a user's schedule or transformation is not valid.
    """
    rate = schedules.build_schedule(optimizer, total_steps)
    clip = optax.identity() if optimizer.clip is None else optax.clip_by_global_norm(optimizer.clip)
    whole = _build_chain(optimizer, rate, None, axes or {})
    parts = {}
    for number, group in enumerate(optimizer.groups):
        is_other_decay = _group_decay(optimizer, number) != _group_decay(optimizer, None)
        if not group.freeze and (group.lr != 1.0 or is_other_decay):
            scaled = rate
            if group.lr != 1.0:
                scaled = partial(lambda step, factor: factor * rate(step), factor=group.lr)
            parts[number] = _build_chain(optimizer, scaled, number, axes or {})
    inner = split_groups(optimizer.groups, parts, whole) if parts else whole
    return _update_in_float32(optax.chain(clip, inner))


def check_optimizer(
    optimizer: spec.Optimizer,
    transformation: optax.GradientTransformation,
    params: Mapping[str, Any],
) -> None:
    """Raise SpecError if a user's transformation cannot update `params`, ShapeDtypeStructs."""
    if any(is_user_path(link.name) for link in optimizer.all_links()):
        schedules.check_transformation(transformation, params)


def describe_optimizer(
    optimizer: spec.Optimizer, params: Mapping[str, Any], axes: Axes
) -> list[str]:
    """Return the notes of a run on its groups, decayed parameters, and keys without effect."""
    notes, links = [], optimizer.all_links()
    for number, group in enumerate(optimizer.groups):
        names = [name for name in params if find_group(name, optimizer.groups) == number]
        terms = ["frozen"] if group.freeze else [f"lr × {group.lr:g}"]
        terms += [] if group.weight_decay is None else [f"weight decay {group.weight_decay:g}"]
        numbers = sum(params[name].size for name in names)
        notes.append(
            f"train.optimizer.groups.{number} ({group.match}): {len(names)} arrays, {numbers:,} "
            f"numbers, {', '.join(terms)}"
        )
    frozen = find_frozen(optimizer, params)
    trained = {name: leaf for name, leaf in params.items() if name not in frozen}
    decayed = [name for name, leaf in trained.items() if _is_decayed(optimizer, name, leaf, axes)]
    if optimizer.decay_on == "matrices" and decayed:
        notes.append(f"weight decay on matrices alone: {len(decayed)} of {len(trained)} arrays")
    if not any(_takes_any(link, schedules.RATE_PARAMETERS) for link in links):
        link_names = ", ".join(link.name for link in links)
        notes.append(
            f"train.optimizer.lr and schedule have no effect: {link_names} takes no learning_rate"
        )
    return notes


def find_group(name: str, groups: Sequence[Group]) -> int | None:
    """Return the number of the first group whose pattern matches a parameter, if any."""
    return next(
        (number for number, group in enumerate(groups) if re.fullmatch(group.match, name)), None
    )


def find_frozen(optimizer: spec.Optimizer, names: Iterable[str]) -> frozenset[str]:
    """Return the parameters that are not trained. Raises SpecError for unusable groups."""
    names, groups = sorted(names), optimizer.groups
    owners = {name: find_group(name, groups) for name in names}
    for number, group in enumerate(groups):
        if number in owners.values():
            continue
        key = f"train.optimizer.groups.{number}.match = {group.match}"
        if any(re.fullmatch(group.match, name) for name in names):
            raise SpecError(
                f"{key} matches only parameters of the groups before it, and the first group that "
                "matches has a parameter; move this group up, or remove it"
            )
        listed = list_first(names, MAX_LISTED)
        raise SpecError(f"{key} matches no parameter. There are: {listed}")
    frozen = frozenset(
        name for name, owner in owners.items() if owner is not None and groups[owner].freeze
    )
    if frozen and len(frozen) == len(names):
        raise SpecError("train.optimizer.groups freeze every parameter; leave some to be trained")
    return frozen


def split_groups(
    groups: Sequence[Group],
    parts: Mapping[int, optax.GradientTransformation],
    default: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Return a transformation that applies `parts` to their groups, and `default` to others.

    The state is a dict by label, such as `group0` or `default`, of states for the parameters with
    this label.
    """
    transformations = {f"group{number}": part for number, part in parts.items()}
    transformations[DEFAULT_LABEL] = default

    def by_label(tree: NamedArrays) -> dict[str, NamedArrays]:
        labelled: dict[str, NamedArrays] = {}
        for name, leaf in tree.items():
            group = f"group{find_group(name, groups)}"
            label = group if group in transformations else DEFAULT_LABEL
            labelled.setdefault(label, {})[name] = leaf
        return labelled

    def init(params: NamedArrays) -> NamedArrays:
        parts = by_label(params)
        return {label: transformations[label].init(part) for label, part in parts.items()}

    def update(
        grads: NamedArrays, state: NamedArrays, params: NamedArrays | None = None
    ) -> tuple[NamedArrays, NamedArrays]:
        updates: NamedArrays = {}
        after: NamedArrays = {}
        labelled = by_label(params or {})
        for label, part in by_label(grads).items():
            update = transformations[label].update
            part_updates, after[label] = update(part, state[label], labelled.get(label))
            updates |= part_updates
        return {name: updates[name] for name in grads}, after

    return optax.GradientTransformation(init, update)


def _group_decay(optimizer: spec.Optimizer, group: int | None) -> float | None:
    """Return the weight decay of a group, or of the others; None is a factory's default."""
    if group is not None and optimizer.groups[group].weight_decay is not None:
        return optimizer.groups[group].weight_decay
    has_own = any(is_user_path(link.name) for link in optimizer.all_links())
    if has_own and "weight_decay" not in optimizer.model_fields_set:
        return None
    return optimizer.weight_decay


def _is_decayed(optimizer: spec.Optimizer, name: str, leaf: Any, axes: Axes) -> bool:
    """Return whether a parameter decays with `decay_on: matrices`."""
    decay, links = (
        _group_decay(optimizer, find_group(name, optimizer.groups)),
        optimizer.all_links(),
    )
    own_links = [link for link in links if is_user_path(link.name)]
    if not decay and not any(schedules.may_decay(link, decay) for link in own_links):
        return False
    if any(link.name == "muon" for link in links):
        return transforms.muon_axes(name, leaf, axes) is not None
    return transforms.is_matrix(name, leaf, axes)


def _mask_matrices(params: NamedArrays, axes: Axes) -> dict[str, bool]:
    return {name: transforms.is_matrix(name, leaf, axes) for name, leaf in params.items()}


def _build_chain(
    optimizer: spec.Optimizer, rate: optax.Schedule, number: int | None, axes: Axes
) -> optax.GradientTransformation:
    """Build the optimizer of a group, or of ungrouped parameters."""
    links, decay = optimizer.all_links(), _group_decay(optimizer, number)
    is_masked = optimizer.decay_on == "matrices"
    mask: Mask = partial(_mask_matrices, axes=axes) if is_masked else None
    if decay and not any(_takes_any(link, ("weight_decay",)) for link in links):
        names, group = ", ".join(link.name for link in links), ""
        if number is not None and optimizer.groups[number].weight_decay is not None:
            group = f".groups.{number}"
        raise SpecError(
            f"train.optimizer{group}.weight_decay = {decay:g}, but {names} takes no weight_decay; "
            "leave it out, or add {name: optax:add_decayed_weights, args: {weight_decay: …}} to "
            "train.optimizer.chain"
        )
    transformations = []
    for link in links:
        if is_user_path(link.name):
            transformation = schedules.build_transformation(link, rate, decay, mask)
        elif link.name == "muon":
            transformation = transforms.make_muon(rate, decay or 0.0, mask, axes, link.options())
        else:
            transformation = MAKERS[link.name](rate, decay or 0.0, mask, link.options())
        transformations.append(transformation)
    return transformations[0] if len(transformations) == 1 else optax.chain(*transformations)


def _takes_any(link: Link, names: Iterable[str]) -> bool:
    """Return whether an optimizer of ours, or a user's factory, takes one of the arguments."""
    return not is_user_path(link.name) or not schedules.factory_parameters(link).isdisjoint(names)


Make = Callable[..., optax.GradientTransformation]


def _make_coupled(
    make: Make, rate: optax.Schedule, decay: float, mask: Mask, options: Options
) -> optax.GradientTransformation:
    """Return an optimizer with torch's L2 decay, which passes through the moments."""
    if "momentum" in options:
        # With momentum 0 optax would still hold a buffer as large as the parameters.
        options = options | {"momentum": options["momentum"] or None}
    l2_decay = optax.add_decayed_weights(decay, mask) if decay else optax.identity()
    return optax.chain(l2_decay, make(rate, **options))


def _make_decoupled(
    make: Make, rate: optax.Schedule, decay: float, mask: Mask, options: Options
) -> optax.GradientTransformation:
    return make(rate, weight_decay=decay, mask=mask, **options)


def _make_adafactor(
    rate: optax.Schedule, decay: float, mask: Mask, options: Options
) -> optax.GradientTransformation:
    """Return Adafactor (Shazeer and Stern 2018, algorithm 4), whose decay follows the rate."""
    return optax.adafactor(
        rate,
        momentum=options["b1"],
        eps=options["eps"],
        weight_decay_rate=(lambda step: decay * rate(step)) if decay else None,
        weight_decay_mask=mask,
    )


# Loshchilov and Hutter 2019, algorithm 2 (adamw); Chen et al. 2023, algorithm 2 (lion); You et al.
# 2020 (lamb). torch's sgd and adam are the same.
MAKERS: Mapping[str, Make] = {
    "sgd": partial(_make_coupled, optax.sgd),
    "adam": partial(_make_coupled, optax.adam),
    "adamw": partial(_make_decoupled, optax.adamw),
    "lion": partial(_make_decoupled, optax.lion),
    "lamb": partial(_make_decoupled, optax.lamb),
    "adafactor": _make_adafactor,
    SCHEDULE_FREE: transforms.make_schedule_free,
}


def _update_in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        with _jax_rules():
            updates, state = inner.update(_to_float32(grads), state, _to_float32(params))
        return jax.tree.map(lambda leaf, param: leaf.astype(param.dtype), updates, params), state

    def init(params: PyTree) -> PyTree:
        with _jax_rules():
            return inner.init(_to_float32(params))

    return optax.GradientTransformation(init, update)


@contextlib.contextmanager
def _jax_rules() -> Iterator[None]:
    """Allow JAX's default promotion of types and ranks, which transformations rely on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _to_float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def with_schedule_counts(opt: PyTree, after: PyTree, when: jax.Array | bool = True) -> PyTree:
    """Return `opt` with the counts of the schedules of `after`, if `when`: a step is skipped."""

    def is_schedule(state: Any) -> bool:
        # A NamedTuple with the one field `count`: optax.ScaleByScheduleState, and those of users'
        # own schedules.
        return isinstance(state, tuple) and vars(type(state)).get("_fields") == ("count",)

    def take_counts(old: Any, new: Any) -> Any:
        return jax.tree.map(partial(jnp.where, when), new, old) if is_schedule(old) else old

    return jax.tree.map(take_counts, opt, after, is_leaf=is_schedule)


def init_ema(params: PyTree) -> PyTree:
    """Return the initial moving average, a float32 copy of the parameters."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)


def update_ema(ema: PyTree, params: PyTree, decay: float) -> PyTree:
    """Return decay × ema + (1 - decay) × params in float32; bfloat16 has too few digits."""
    return optax.incremental_update(_to_float32(params), ema, 1.0 - decay)


def state_shardings(
    transformation: optax.GradientTransformation, params: PyTree, shardings: PyTree
) -> PyTree:
    """Return the sharding of each leaf of `transformation.init(params)`, for jit's `out_shardings`.

    A leaf with the shape of its parameter (moments, momentum) is sharded like the parameter. A mean
    over one axis of the parameter (Adafactor's rows and columns) is sharded like the parameter
    without that axis. All others (counts, Adafactor's unused leaves) are replicated.

    `params` are arrays or ShapeDtypeStructs by name, `shardings` a NamedSharding for each.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh

    def leaf_sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        # optax's tree_map_params would miss parameters behind a mask, and states that are not
        # optax's.
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        owner = next((name for name in reversed(names) if name in params), None)
        spec = PartitionSpec()
        if owner is not None and leaf.shape != ():
            spec = _leaf_spec(leaf.shape, params[owner].shape, shardings[owner].spec)
        return NamedSharding(mesh, spec)

    abstract = jax.eval_shape(transformation.init, params)
    return jax.tree_util.tree_map_with_path(leaf_sharding, abstract)


def _leaf_spec(
    shape: tuple[int, ...], param_shape: tuple[int, ...], spec: PartitionSpec
) -> PartitionSpec:
    if shape == param_shape:
        return spec
    axes = (*spec, *[None] * (len(param_shape) - len(spec)))
    # Equal axes give equal shapes. Then both results are correct, although one may be faster.
    for axis in reversed(range(len(param_shape))):
        if shape == param_shape[:axis] + param_shape[axis + 1 :]:
            return PartitionSpec(*axes[:axis], *axes[axis + 1 :])
    return PartitionSpec()
