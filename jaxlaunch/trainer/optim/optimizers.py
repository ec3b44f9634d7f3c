"""Optimizers by name, built from optax: clipping, decay, the schedule, and groups.

Parameters are named by dotted paths, as in checkpoints and in `launcher plan --sharding`. By
default every parameter decays, including biases and norms, as in MaxText and in torch's
`optimizer(model.parameters())`. The decay is multiplied by the learning rate. docs/optimizers.md
has the formulas.
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
# Label of the parameters that are in no group with options of its own.
DEFAULT_LABEL = "rest"
# Number of names that a message lists.
MAX_LISTED = 8


def build_optimizer(
    optimizer: spec.Optimizer, total_steps: int, axes: Axes | None = None
) -> optax.GradientTransformation:
    """Build the optax transformation from gradients to updates of the trained parameters.

    `init` and `update` both need the parameters. State and arithmetic are always float32: in
    bfloat16 the second moment of Adam would never change, because 1 - b2 = 0.001 is below the
    resolution of 0.004. The updates have the dtypes of the parameters.

    `axes` are the named axes of each parameter, which distinguish a matrix from a stack of vectors.
    Raises SpecError if a user's schedule or transformation is not valid.
    """
    rate = schedules.build_schedule(optimizer, total_steps)
    clip = optax.identity() if optimizer.clip is None else optax.clip_by_global_norm(optimizer.clip)
    default = _build_chain(optimizer, rate, None, axes or {})
    by_group = {}
    for number, group in enumerate(optimizer.groups):
        has_other_decay = _group_decay(optimizer, number) != _group_decay(optimizer, None)
        if not group.freeze and (group.lr != 1.0 or has_other_decay):
            group_rate = rate
            if group.lr != 1.0:
                group_rate = partial(lambda step, factor: factor * rate(step), factor=group.lr)
            by_group[number] = _build_chain(optimizer, group_rate, number, axes or {})
    inner = split_groups(optimizer.groups, by_group, default) if by_group else default
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
    """Return notes for a run's log: the groups, the decayed parameters, and unused keys."""
    notes, links = [], optimizer.all_links()
    for number, group in enumerate(optimizer.groups):
        names = [name for name in params if find_group(name, optimizer.groups) == number]
        terms = ["frozen"] if group.freeze else [f"lr × {group.lr:g}"]
        terms += [] if group.weight_decay is None else [f"weight decay {group.weight_decay:g}"]
        size = sum(params[name].size for name in names)
        notes.append(
            f"train.optimizer.groups.{number} ({group.match}): {len(names)} arrays, {size:,} "
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
    """Return the number of the first group whose pattern matches a parameter's name, if any."""
    return next(
        (number for number, group in enumerate(groups) if re.fullmatch(group.match, name)), None
    )


def find_frozen(optimizer: spec.Optimizer, names: Iterable[str]) -> frozenset[str]:
    """Return the parameters that are not trained.

    Raises SpecError if a group has no parameters, or if every parameter is frozen.
    """
    names, groups = sorted(names), optimizer.groups
    group_by_name = {name: find_group(name, groups) for name in names}
    for number, group in enumerate(groups):
        if number in group_by_name.values():
            continue
        key = f"train.optimizer.groups.{number}.match = {group.match}"
        if any(re.fullmatch(group.match, name) for name in names):
            raise SpecError(
                f"{key} matches only parameters of the groups before it, and a parameter belongs "
                "to the first group that matches; move this group up, or remove it"
            )
        listed = list_first(names, MAX_LISTED)
        raise SpecError(f"{key} matches no parameter. There are: {listed}")
    frozen = frozenset(
        name
        for name, number in group_by_name.items()
        if number is not None and groups[number].freeze
    )
    if frozen and len(frozen) == len(names):
        raise SpecError("train.optimizer.groups freeze every parameter; leave some to be trained")
    return frozen


def split_groups(
    groups: Sequence[Group],
    by_group: Mapping[int, optax.GradientTransformation],
    default: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Return a transformation that applies `by_group` to these groups and `default` to all others.

    The state is a dict by label, such as `group0` or `rest`, of the states for the parameters with
    this label.
    """
    by_label = {f"group{number}": part for number, part in by_group.items()}
    by_label[DEFAULT_LABEL] = default

    def split_by_label(tree: NamedArrays) -> dict[str, NamedArrays]:
        split: dict[str, NamedArrays] = {}
        for name, leaf in tree.items():
            group_label = f"group{find_group(name, groups)}"
            label = group_label if group_label in by_label else DEFAULT_LABEL
            split.setdefault(label, {})[name] = leaf
        return split

    def init(params: NamedArrays) -> NamedArrays:
        split_params = split_by_label(params)
        return {label: by_label[label].init(part) for label, part in split_params.items()}

    def update(
        grads: NamedArrays, state: NamedArrays, params: NamedArrays | None = None
    ) -> tuple[NamedArrays, NamedArrays]:
        updates: NamedArrays = {}
        new_state: NamedArrays = {}
        split_params = split_by_label(params or {})
        for label, part_grads in split_by_label(grads).items():
            part_updates, new_state[label] = by_label[label].update(
                part_grads, state[label], split_params.get(label)
            )
            updates |= part_updates
        return {name: updates[name] for name in grads}, new_state

    return optax.GradientTransformation(init, update)


def _group_decay(optimizer: spec.Optimizer, group: int | None) -> float | None:
    """Return the weight decay of a group; None leaves it to the default of a user's factory.

    For `group` None it is that of the ungrouped parameters.
    """
    if group is not None and optimizer.groups[group].weight_decay is not None:
        return optimizer.groups[group].weight_decay
    has_user_link = any(is_user_path(link.name) for link in optimizer.all_links())
    if has_user_link and "weight_decay" not in optimizer.model_fields_set:
        return None
    return optimizer.weight_decay


def _is_decayed(optimizer: spec.Optimizer, name: str, leaf: Any, axes: Axes) -> bool:
    """Return whether a parameter decays with `decay_on: matrices`."""
    decay = _group_decay(optimizer, find_group(name, optimizer.groups))
    links = optimizer.all_links()
    user_links = [link for link in links if is_user_path(link.name)]
    if not decay and not any(schedules.may_decay(link, decay) for link in user_links):
        return False
    if any(link.name == "muon" for link in links):
        return transforms.muon_axes(name, leaf, axes) is not None
    return transforms.is_matrix(name, leaf, axes)


def _mask_matrices(params: NamedArrays, axes: Axes) -> dict[str, bool]:
    return {name: transforms.is_matrix(name, leaf, axes) for name, leaf in params.items()}


def _build_chain(
    optimizer: spec.Optimizer, rate: optax.Schedule, number: int | None, axes: Axes
) -> optax.GradientTransformation:
    """Build the optimizer of a group; `number` None is for the ungrouped parameters."""
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
            transformation = FACTORIES[link.name](rate, decay or 0.0, mask, link.options())
        transformations.append(transformation)
    return transformations[0] if len(transformations) == 1 else optax.chain(*transformations)


def _takes_any(link: Link, names: Iterable[str]) -> bool:
    """Return whether a link takes one of these arguments. Ours all take a rate and a decay."""
    return not is_user_path(link.name) or not schedules.factory_parameters(link).isdisjoint(names)


Factory = Callable[..., optax.GradientTransformation]


def _make_coupled(
    factory: Factory, rate: optax.Schedule, decay: float, mask: Mask, options: Options
) -> optax.GradientTransformation:
    """Return an optimizer with L2 decay as in torch: it is added to the gradient."""
    if "momentum" in options:
        # For momentum 0, optax would hold a useless buffer as large as the parameters.
        options = options | {"momentum": options["momentum"] or None}
    l2_decay = optax.add_decayed_weights(decay, mask) if decay else optax.identity()
    return optax.chain(l2_decay, factory(rate, **options))


def _make_decoupled(
    factory: Factory, rate: optax.Schedule, decay: float, mask: Mask, options: Options
) -> optax.GradientTransformation:
    return factory(rate, weight_decay=decay, mask=mask, **options)


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


# Sources: Loshchilov and Hutter 2019, algorithm 2 (adamw); Chen et al. 2023, algorithm 2 (lion);
# You et al. 2020 (lamb). sgd and adam are those of torch.
FACTORIES: Mapping[str, Factory] = {
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


def with_schedule_counts(
    opt: PyTree, new_opt: PyTree, is_counted: jax.Array | bool = True
) -> PyTree:
    """Return `opt` with the step counts of schedules from `new_opt`, if `is_counted`.

    A skipped step changes nothing else in the optimizer's state.
    """

    def is_schedule(state: Any) -> bool:
        # A NamedTuple with `count` as its only field, like optax.ScaleByScheduleState and the
        # states of users' schedules.
        return isinstance(state, tuple) and vars(type(state)).get("_fields") == ("count",)

    def take_counts(old: Any, new: Any) -> Any:
        return jax.tree.map(partial(jnp.where, is_counted), new, old) if is_schedule(old) else old

    return jax.tree.map(take_counts, opt, new_opt, is_leaf=is_schedule)


def init_ema(params: PyTree) -> PyTree:
    """Return the initial moving average, a float32 copy of the parameters."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)


def update_ema(ema: PyTree, params: PyTree, decay: float) -> PyTree:
    """Return decay × ema + (1 - decay) × params, in float32."""
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
        # The last dict key that is the name of a parameter. optax.tree_map_params finds neither
        # parameters behind a mask nor those in states that are not optax's.
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        owner = next((name for name in reversed(names) if name in params), None)
        leaf_spec = PartitionSpec()
        if owner is not None and leaf.shape != ():
            leaf_spec = _leaf_spec(leaf.shape, params[owner].shape, shardings[owner].spec)
        return NamedSharding(mesh, leaf_spec)

    abstract = jax.eval_shape(transformation.init, params)
    return jax.tree_util.tree_map_with_path(leaf_sharding, abstract)


def _leaf_spec(
    shape: tuple[int, ...], param_shape: tuple[int, ...], param_spec: PartitionSpec
) -> PartitionSpec:
    """Return the spec of a leaf with the shape of its parameter, or with one axis less."""
    if shape == param_shape:
        return param_spec
    axes = (*param_spec, *[None] * (len(param_shape) - len(param_spec)))
    # Without either of two equal axes the shape is the same. Both specs are then correct, although
    # one may be faster.
    for axis in reversed(range(len(param_shape))):
        if shape == param_shape[:axis] + param_shape[axis + 1 :]:
            return PartitionSpec(*axes[:axis], *axes[axis + 1 :])
    return PartitionSpec()
