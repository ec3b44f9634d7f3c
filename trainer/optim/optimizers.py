"""Optimizers by name, out of optax: clip by global norm, the optimizer, weight decay, the schedule.

Every parameter decays, biases and norms too, as with torch's `optimizer(model.parameters())` and in MaxText; the decay
is multiplied by the learning rate. docs/optimizers.md holds the formulas.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from trainer import spec
from trainer.optim import schedules

PyTree = Any


def build(optimizer: spec.Optimizer, total_steps: int) -> optax.GradientTransformation:
    """The optax transformation gradients -> updates; `init` and `update` both need the parameters.

    State and arithmetic are float32 whatever the parameters are: the second moment of Adam in bfloat16 would never
    change (1 - b2 = 0.001 is below its resolution of 0.004). The updates come in the dtypes of the parameters.
    """
    clip = optax.identity() if optimizer.clip is None else optax.clip_by_global_norm(optimizer.clip)
    return _in_float32(optax.chain(clip, _named(optimizer, schedules.build(optimizer, total_steps))))


def _named(optimizer: spec.Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    options, decay = optimizer.options(), optimizer.weight_decay
    match optimizer.name:
        case "adamw":  # Loshchilov and Hutter 2019, algorithm 2
            return optax.adamw(rate, weight_decay=decay, **options)
        case "lion":  # Chen et al. 2023, algorithm 2
            return optax.lion(rate, weight_decay=decay, **options)
        case "sgd":  # torch's: the decay joins the gradient and passes through the momentum
            momentum = options["momentum"] or None  # at 0 optax would still hold a buffer as large as the parameters
            return optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, momentum, options["nesterov"]))
        case "adafactor":  # Shazeer and Stern 2018, algorithm 4; optax's decay is not multiplied by the rate, ours is
            return optax.adafactor(
                rate,
                momentum=options["b1"],
                eps=options["eps"],
                weight_decay_rate=(lambda step: decay * rate(step)) if decay else None,
            )


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
            updates, state = inner.update(_float32(grads), state, _float32(params))
        return jax.tree.map(lambda leaf, param: leaf.astype(param.dtype), updates, params), state

    return optax.GradientTransformation(lambda params: inner.init(_float32(params)), update)


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def with_schedule_counts(opt: PyTree, after: PyTree, when: jax.Array | bool = True) -> PyTree:
    """`opt` with the step counts of its schedules taken from `after` if `when`: a skipped step changes only these."""

    def is_schedule(state: Any) -> bool:
        return getattr(state, "_fields", None) == ("count",)

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

    `params` are arrays or ShapeDtypeStructs, `shardings` a NamedSharding for each of them in the same tree; the
    result has the tree of the optimizer's state, for jit's `out_shardings`. A leaf of its parameter's shape (moments,
    momentum) is sharded as the parameter. A parameter's mean over one axis (adafactor's rows and columns) is sharded as
    the parameter without that axis. The rest (counts, adafactor's unused leaves) is on every device.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    everywhere = NamedSharding(mesh, PartitionSpec())
    return optax.tree_utils.tree_map_params(
        transformation,
        lambda leaf, param, sharding: NamedSharding(mesh, _leaf_spec(leaf.shape, param.shape, sharding.spec)),
        jax.eval_shape(transformation.init, params),
        params,
        shardings,
        transform_non_params=lambda _: everywhere,
    )


def _leaf_spec(shape: tuple[int, ...], of: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
    if shape == of:
        return spec
    axes = (*spec, *[None] * (len(of) - len(spec)))
    for axis in reversed(range(len(of))):  # equal axes give equal shapes: then either is right, one may be faster
        if shape == of[:axis] + of[axis + 1 :]:
            return PartitionSpec(*axes[:axis], *axes[axis + 1 :])
    return PartitionSpec()
