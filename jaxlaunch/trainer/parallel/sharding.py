"""The sharding of every array, from the table RULES of logical axis -> mesh axes.

A model names the logical axes of a parameter (`nnx.Param(value, axes=("embed", "hidden"))`), or its
task names them by path (`sharding = {r".*kernel": ("embed", "hidden")}`). The names are those of
the last dimensions; a dimension before them, which nnx.vmap adds, is `layers`. In addition, every
array of the state is split over fsdp along one divisible dimension. Vectors are not split, because
a collective for each of them would cost more than their bytes.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch.contract import BATCH_AXES
from jaxlaunch.trainer.errors import SpecError

# The name of each of the last dimensions: a logical axis, a mesh axis, or None.
Axes = tuple[str | None, ...]
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
# The mesh axes that split one dimension, outermost first.
Entry = tuple[str, ...]

# One table for weights and activations.
RULES: Mapping[str, Entry] = {
    "batch": BATCH_AXES,
    # The batch where fsdp splits columns instead of rows.
    "other_batch": tuple(axis for axis in BATCH_AXES if axis != "fsdp"),
    "columns": ("fsdp",),
    "layers": (),
    # Attention needs whole examples.
    "length": (),
    # The length where positions do not interact: in norms and between matrix products.
    "sequence": ("mp",),
    # The residual stream.
    "embed": (),
    "heads": ("mp",),
    "kv_heads": ("mp",),
    # Channels within a head.
    "head": (),
    # Channels inside an MLP.
    "hidden": ("mp",),
    "experts": ("ep",),
    "vocab": ("mp",),
    "classes": (),
    # Between the two matrices of an adapter.
    "rank": (),
}
# Axes that are not split if their size is not divisible. A class token lengthens a sequence by one,
# and GPT-2's vocabulary has an odd size.
OPTIONAL_AXES = ("sequence", "vocab")

_is_by_device: ContextVar[bool] = ContextVar("_is_by_device", default=False)


def state_sharding(
    name: str, shape: tuple[int, ...], axes: Axes | None, mesh: jax.sharding.Mesh
) -> NamedSharding:
    """Return the sharding of an array of the state. Raises SpecError if its axes do not fit."""
    axes = axes or ()
    if len(axes) > len(shape):
        raise SpecError(
            f"{name}: {len(axes)} axes {axes} are named for {len(shape)} dimensions {shape}; name "
            "at most one for each dimension"
        )
    logical_axes = ("layers" if axes else None,) * (len(shape) - len(axes)) + axes
    mesh_axes = [_mesh_axes(name, axis, mesh) for axis in logical_axes]
    entries = _drop_indivisible(shape, logical_axes, mesh_axes, mesh)
    used = [mesh_axis for entry in entries for mesh_axis in entry]
    if repeated := sorted({mesh_axis for mesh_axis in used if used.count(mesh_axis) > 1}):
        raise SpecError(
            f"{name}: axes {logical_axes} are split over {tuple(entries)}: two dimensions share "
            f"{', '.join(repeated)}; give one of them another axis, or None"
        )
    for size, axis, entry in zip(shape, logical_axes, entries, strict=True):
        if size % (parts := _count_parts(entry, mesh)):
            raise SpecError(
                f"{name}: {axis} = {size} cannot be split evenly over {' × '.join(entry)} = "
                f"{parts} devices"
            )
    return NamedSharding(mesh, PartitionSpec(*_split_fsdp(shape, logical_axes, entries, mesh)))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain `x` to the sharding of its named axes on the current mesh, if there is one.

    Without constraints the compiler may split activations like the weights, and gather the batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    unsplit_axes = (None, "batch") if _is_by_device.get() else (None,)
    mesh_axes = [() if axis in unsplit_axes else RULES[str(axis)] for axis in axes]
    entries = _drop_indivisible(x.shape, axes, mesh_axes, mesh)
    result: jax.Array = jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))
    return result


def gather_weight(weight: jax.Array, *axes: str | None) -> jax.Array:
    """Gather a weight over fsdp, and split it by its named axes only.

    Its gradient is split over fsdp, too. `constrain` would apply the sharding of the weight to the
    gradient, so that each device would hold the whole sum.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or _is_by_device.get():
        return constrain(weight, *axes)
    mesh_axes = [RULES[axis] if axis else () for axis in axes]
    entries = _drop_indivisible(weight.shape, axes, mesh_axes, mesh)
    gradient_entries = _split_fsdp(weight.shape, axes, entries, mesh)
    return _constrain_both(weight, PartitionSpec(*entries), PartitionSpec(*gradient_entries))


def constrain_value(weight: jax.Array, weight_sharding: NamedSharding) -> jax.Array:
    """Constrain `weight` to a sharding, but not its gradient.

    This is for casts of weights to bfloat16. Without it XLA's compiler for GPUs gathers a split
    weight before the cast, in float32.
    """
    return _constrain_both(weight, weight_sharding, None)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _constrain_both(weight: jax.Array, weight_sharding: Any, gradient_sharding: Any) -> jax.Array:
    """Constrain `weight` to one sharding, and its gradient to another unless that is None."""
    return jax.lax.with_sharding_constraint(weight, weight_sharding)  # type: ignore[no-any-return]


def _constrain_forward(weight: jax.Array, weight_sharding: Any, gradient_sharding: Any) -> Any:
    return jax.lax.with_sharding_constraint(weight, weight_sharding), None


def _constrain_backward(
    weight_sharding: Any, gradient_sharding: Any, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    if gradient_sharding is not None:
        gradient = jax.lax.with_sharding_constraint(gradient, gradient_sharding)
    return (gradient,)


_constrain_both.defvjp(_constrain_forward, _constrain_backward)


@contextlib.contextmanager
def map_by_device() -> Iterator[None]:
    """Trace with batches of one device's rows, which `constrain` does not split."""
    token = _is_by_device.set(True)
    try:
        yield
    finally:
        _is_by_device.reset(token)


def axes_by_path(
    rules: Mapping[str, Sequence[str | None]], model_axes: Mapping[str, Axes | None]
) -> dict[str, Axes | None]:
    """Return the axes of every parameter: those of the first matching rule, else of the model.

    `rules` map patterns of names to axes. Raises SpecError for an invalid rule, and for one that
    matches no parameter, because a typing error would silently leave an array replicated.
    """
    if not isinstance(rules, Mapping):
        raise SpecError(
            f"sharding is a {type(rules).__name__}, not a dict of patterns: {{r'.*kernel': "
            "('embed', 'hidden')}"
        )
    named_axes = dict(model_axes)
    # The first matching rule wins, so the rules are applied in reverse order.
    for pattern, axes in reversed(list(rules.items())):
        rule = f"sharding rule {pattern!r}"
        is_tuple = isinstance(axes, list | tuple)
        if not is_tuple or not all(axis is None or isinstance(axis, str) for axis in axes):
            raise SpecError(f"{rule}: {axes!r} is not a tuple of axes, such as ('embed', None)")
        try:
            names = [name for name in model_axes if re.fullmatch(pattern, name)]
        except (re.error, TypeError) as error:
            raise SpecError(f"{rule} is not a pattern: {error}") from None
        if not names:
            listed = ", ".join(sorted(model_axes))
            raise SpecError(f"{rule} matches no parameter. There are: {listed}")
        named_axes |= dict.fromkeys(names, tuple(axes))
    return named_axes


def _mesh_axes(name: str, axis: str | None, mesh: jax.sharding.Mesh) -> Entry:
    if axis is None:
        return ()
    if axis in RULES:
        return RULES[axis]
    if axis in mesh.axis_names:
        return (axis,)
    raise SpecError(
        f"{name}: unknown axis {axis!r}; name one of {', '.join((*RULES, *mesh.axis_names))}"
    )


def _drop_indivisible(
    shape: tuple[int, ...], axes: Axes, entries: list[Entry], mesh: AnyMesh
) -> list[Entry]:
    """Empty the entries of optional axes whose sizes are not divisible."""
    return [
        () if axis in OPTIONAL_AXES and size % _count_parts(entry, mesh) else entry
        for size, axis, entry in zip(shape, axes, entries, strict=True)
    ]


def _split_fsdp(
    shape: tuple[int, ...], axes: Axes, entries: list[Entry], mesh: AnyMesh
) -> list[Entry]:
    """Add fsdp to one divisible dimension, if any: `embed`, or else the largest one.

    Sizes are compared after the division by other mesh axes. `layers` is never split, because a
    scan would then gather each layer's weights from a single device.
    """
    is_vector = sum(axis != "layers" for axis in axes) == 1
    if mesh.shape["fsdp"] == 1 or is_vector or any("fsdp" in entry for entry in entries):
        return entries
    fsdp = mesh.shape["fsdp"]
    sizes = [size // _count_parts(entry, mesh) for size, entry in zip(shape, entries, strict=True)]
    divisible = [i for i, size in enumerate(sizes) if axes[i] != "layers" and size % fsdp == 0]
    if not divisible:
        return entries
    best = max(divisible, key=lambda i: (axes[i] == "embed", sizes[i], -i))
    return [(*entry, "fsdp") if i == best else entry for i, entry in enumerate(entries)]


def _count_parts(entry: Entry, mesh: AnyMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in entry)
