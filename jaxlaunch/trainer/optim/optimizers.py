"""Optimizers by name, out of optax: clip by global norm, the optimizer, weight decay, the schedule.

By default every parameter decays, biases and norms too, as with torch's `optimizer(model.parameters())` and in MaxText;
the decay is multiplied by the learning rate. docs/optimizers.md holds the formulas.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.optim import groups, muon, schedule_free, schedules, user_optimizers
from jaxlaunch.trainer.optim.groups import Axes, Named
from jaxlaunch.trainer.spec.optimizer import SCHEDULE_FREE, Link, is_own

PyTree = Any
Mask = Callable[[Named], dict[str, bool]] | None
Options = dict[str, Any]


def build(optimizer: spec.Optimizer, total_steps: int, axes: Axes | None = None) -> optax.GradientTransformation:
    """The optax transformation gradients -> updates of the parameters that are trained, in flat dicts by name.

    `init` and `update` both need the parameters; `axes` are the named axes of each, which tell a matrix from a stack of
    vectors. State and arithmetic are float32 whatever the parameters are: the second moment of Adam in bfloat16 would
    never change (1 - b2 = 0.001 is below its resolution of 0.004). The updates come in the dtypes of the parameters.

    Raises SpecError where the schedule or a transformation of the user's is none.
    """
    rate = schedules.build(optimizer, total_steps)
    clip = optax.identity() if optimizer.clip is None else optax.clip_by_global_norm(optimizer.clip)
    whole = _chain(optimizer, rate, None, axes or {})
    parts = {}
    for at, group in enumerate(optimizer.groups):
        if not group.freeze and (group.lr != 1.0 or _decay(optimizer, at) != _decay(optimizer, None)):
            parts[at] = _chain(optimizer, _scaled(rate, group.lr), at, axes or {})
    return _in_float32(optax.chain(clip, groups.split(optimizer.groups, parts, whole) if parts else whole))


def check(optimizer: spec.Optimizer, built: optax.GradientTransformation, params: Mapping[str, Any]) -> None:
    """Raises SpecError where a transformation of the user's does not update `params`, ShapeDtypeStructs by name."""
    if any(is_own(link.name) for link in optimizer.links()):
        user_optimizers.check(built, params)


def notes(optimizer: spec.Optimizer, params: Mapping[str, Any], axes: Axes) -> list[str]:
    """What a run says of its optimizer: its groups, what decays, and keys that reach nothing."""
    found, links = groups.notes(optimizer, params), optimizer.links()
    trained = {name: leaf for name, leaf in params.items() if name not in groups.frozen(optimizer, params)}
    decayed = [name for name, leaf in trained.items() if _decays(optimizer, name, leaf, axes)]
    if optimizer.decay_on == "matrices" and decayed:
        found.append(f"weight decay on matrices alone: {len(decayed)} of {len(trained)} arrays")
    if all(is_own(link.name) and not user_optimizers.takes(link).intersection(user_optimizers.RATES) for link in links):
        names = ", ".join(link.name for link in links)
        found.append(f"train.optimizer.lr and schedule have no effect: {names} takes no learning_rate")
    return found


def _decay(optimizer: spec.Optimizer, at: int | None) -> float | None:
    """The weight decay of group `at`, or of what is in none; None: a factory's own, where the job says nothing."""
    if at is not None and optimizer.groups[at].weight_decay is not None:
        return optimizer.groups[at].weight_decay
    has_own = any(is_own(link.name) for link in optimizer.links())
    return None if has_own and "weight_decay" not in optimizer.model_fields_set else optimizer.weight_decay


def _decays(optimizer: spec.Optimizer, name: str, leaf: Any, axes: Axes) -> bool:
    """Whether a parameter decays under decay_on: matrices."""
    decay, links = _decay(optimizer, groups.of(name, optimizer.groups)), optimizer.links()
    if not (decay or any(is_own(link.name) and user_optimizers.decays(link, decay) for link in links)):
        return False
    of_muon = any(link.name == "muon" for link in links)
    return muon.muon_axes(name, leaf, axes) is not None if of_muon else groups.is_matrix(name, leaf, axes)


def _scaled(rate: optax.Schedule, factor: float) -> optax.Schedule:
    return rate if factor == 1.0 else lambda step: factor * rate(step)


def _chain(optimizer: spec.Optimizer, rate: optax.Schedule, at: int | None, axes: Axes) -> optax.GradientTransformation:
    """The optimizer of group `at`, or of what is in none."""
    links, decay = optimizer.links(), _decay(optimizer, at)
    mask: Mask = None
    if optimizer.decay_on == "matrices":
        mask = lambda params: {name: groups.is_matrix(name, leaf, axes) for name, leaf in params.items()}  # noqa: E731
    if decay and all(is_own(link.name) and "weight_decay" not in user_optimizers.takes(link) for link in links):
        names = ", ".join(link.name for link in links)
        group = "" if at is None or optimizer.groups[at].weight_decay is None else f".groups.{at}"
        raise SpecError(
            f"train.optimizer{group}.weight_decay = {decay:g}, but {names} takes no weight_decay; leave it out, or add "
            "{name: optax:add_decayed_weights, args: {weight_decay: …}} to train.optimizer.chain"
        )
    built = [_link(link, rate, decay, mask, axes) for link in links]
    return built[0] if len(built) == 1 else optax.chain(*built)


def _link(
    link: Link, rate: optax.Schedule, decay: float | None, mask: Mask, axes: Axes
) -> optax.GradientTransformation:
    if is_own(link.name):
        return user_optimizers.transformation(link, rate, decay, mask)
    if link.name == "muon":
        return muon.muon(rate, decay or 0.0, mask, axes, link.options())
    return MAKERS[link.name](rate, decay or 0.0, mask, link.options())


def _coupled(
    make: Callable[..., optax.GradientTransformation],
    rate: optax.Schedule,
    decay: float,
    mask: Mask,
    options: Options,
) -> optax.GradientTransformation:
    """torch's: the decay joins the gradient and passes through the moments."""
    if "momentum" in options:  # at 0 optax would still hold a buffer as large as the parameters
        options = options | {"momentum": options["momentum"] or None}
    return optax.chain(optax.add_decayed_weights(decay, mask) if decay else optax.identity(), make(rate, **options))


def _decoupled(
    make: Callable[..., optax.GradientTransformation],
    rate: optax.Schedule,
    decay: float,
    mask: Mask,
    options: Options,
) -> optax.GradientTransformation:
    return make(rate, weight_decay=decay, mask=mask, **options)


def _adafactor(rate: optax.Schedule, decay: float, mask: Mask, options: Options) -> optax.GradientTransformation:
    """Shazeer and Stern 2018, algorithm 4; optax's decay is not multiplied by the rate, ours is."""
    return optax.adafactor(
        rate,
        momentum=options["b1"],
        eps=options["eps"],
        weight_decay_rate=(lambda step: decay * rate(step)) if decay else None,
        weight_decay_mask=mask,
    )


# Loshchilov and Hutter 2019, algorithm 2 (adamw); Chen et al. 2023, algorithm 2 (lion); You et al. 2020 (lamb).
# torch's sgd and adam are the same.
MAKERS: Mapping[str, Callable[[optax.Schedule, float, Mask, Options], optax.GradientTransformation]] = {
    "sgd": partial(_coupled, optax.sgd),
    "adam": partial(_coupled, optax.adam),
    "adamw": partial(_decoupled, optax.adamw),
    "lion": partial(_decoupled, optax.lion),
    "lamb": partial(_decoupled, optax.lamb),
    "adafactor": _adafactor,
    SCHEDULE_FREE: schedule_free.schedule_free,
}


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        with _as_jax_is():
            updates, state = inner.update(_float32(grads), state, _float32(params))
        return jax.tree.map(lambda leaf, param: leaf.astype(param.dtype), updates, params), state

    def init(params: PyTree) -> PyTree:
        with _as_jax_is():
            return inner.init(_float32(params))

    return optax.GradientTransformation(init, update)


@contextlib.contextmanager
def _as_jax_is() -> Iterator[None]:
    """JAX's own rules of types and ranks: optax raises floats to integer counts, and users do as they like."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def with_schedule_counts(opt: PyTree, after: PyTree, when: jax.Array | bool = True) -> PyTree:
    """`opt` with the step counts of its schedules taken from `after` if `when`: a skipped step changes only these."""

    def is_schedule(state: Any) -> bool:
        # A NamedTuple with the one field `count`: optax.ScaleByScheduleState, and those of users' own schedules.
        return isinstance(state, tuple) and vars(type(state)).get("_fields") == ("count",)

    def counted(old: Any, new: Any) -> Any:
        return jax.tree.map(partial(jnp.where, when), new, old) if is_schedule(old) else old

    return jax.tree.map(counted, opt, after, is_leaf=is_schedule)


def ema_init(params: PyTree) -> PyTree:
    """The moving average before the first step: the parameters themselves, in float32, in buffers of their own."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)


def ema_update(ema: PyTree, params: PyTree, decay: float) -> PyTree:
    """decay × ema + (1 - decay) × params, float32: in bfloat16 a decay above 0.996 would never change it."""
    return optax.incremental_update(_float32(params), ema, 1.0 - decay)


def state_shardings(transformation: optax.GradientTransformation, params: PyTree, shardings: PyTree) -> PyTree:
    """The sharding of each leaf of `transformation.init(params)`, given those of the parameters.

    `params` are arrays or ShapeDtypeStructs by name, `shardings` a NamedSharding for each of them; the result has the
    tree of the optimizer's state, for jit's `out_shardings`. A leaf of its parameter's shape (moments, momentum) is
    sharded as the parameter. A parameter's mean over one axis (adafactor's rows and columns) is sharded as the
    parameter without that axis. The rest (counts, adafactor's unused leaves) is on every device.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh

    def placed(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        """Where a leaf of the state lies: with the parameter that its path names."""
        # By its path, not by optax's tree_map_params: that sees no parameter behind a mask, and no state but optax's.
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        owner = next((name for name in reversed(names) if name in params), None)
        of_whole = owner is None or leaf.shape == ()
        spec = PartitionSpec() if of_whole else _leaf_spec(leaf.shape, params[owner].shape, shardings[owner].spec)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(placed, jax.eval_shape(transformation.init, params))


def _leaf_spec(shape: tuple[int, ...], of: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
    if shape == of:
        return spec
    axes = (*spec, *[None] * (len(of) - len(spec)))
    for axis in reversed(range(len(of))):  # equal axes give equal shapes: then either is right, one may be faster
        if shape == of[:axis] + of[axis + 1 :]:
            return PartitionSpec(*axes[:axis], *axes[axis + 1 :])
    return PartitionSpec()
