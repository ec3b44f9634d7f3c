"""The sharding of every array, from one table of logical axis -> mesh axes.

A model names the axes of a parameter (`nnx.Param(value, axes=("embed", "hidden"))`), or its task
names them by path (`sharding = {r".*kernel": ("embed", "hidden")}`). The names belong to the last
dimensions; a dimension before them, which nnx.vmap adds, is `layers`. In addition, every array of
the state is split over fsdp along one divisible dimension. Vectors are not, because a collective
for each of them would cost more than their bytes.
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

# A logical axis, a mesh axis, or None for each of the last dimensions.
Axes = tuple[str | None, ...]
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Entry = tuple[str, ...]  # the mesh axes that split one dimension, outermost first

# Weights and activations share the table: change a strategy by changing one line.
RULES: Mapping[str, Entry] = {
    "batch": BATCH_AXES,
    # Used where fsdp splits columns instead.
    "other_batch": tuple(axis for axis in BATCH_AXES if axis != "fsdp"),
    "columns": ("fsdp",),
    "layers": (),
    # Attention needs whole examples.
    "length": (),
    # The length where positions do not interact: norms, and the residual stream between products.
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
# These stay whole if they do not divide. A class token lengthens a sequence by one, and GPT-2's
# vocabulary is odd.
OPTIONAL_AXES = ("sequence", "vocab")

_is_by_device: ContextVar[bool] = ContextVar("_is_by_device", default=False)


def state_sharding(
    name: str, shape: tuple[int, ...], axes: Axes | None, mesh: jax.sharding.Mesh
) -> NamedSharding:
    """Return the sharding of an array by its named axes, then fsdp. Raises SpecError."""
    axes = axes or ()
    if len(axes) > len(shape):
        raise SpecError(
            f"{name}: {len(axes)} axes {axes} are named for {len(shape)} dimensions {shape}"
        )
    logical_axes = ("layers" if axes else None,) * (len(shape) - len(axes)) + axes
    mesh_axes = [_mesh_axes(name, axis, mesh) for axis in logical_axes]
    entries = _keep_whole(shape, logical_axes, mesh_axes, mesh)
    used = [mesh_axis for entry in entries for mesh_axis in entry]
    if twice := sorted({mesh_axis for mesh_axis in used if used.count(mesh_axis) > 1}):
        raise SpecError(
            f"{name}: axes {logical_axes} translate to {tuple(entries)}: two dimensions share "
            f"{', '.join(twice)}"
        )
    for size, axis, entry in zip(shape, logical_axes, entries, strict=True):
        if size % (ways := _count_ways(entry, mesh)):
            raise SpecError(
                f"{name}: {axis} = {size} cannot be split evenly over {' × '.join(entry)} = "
                f"{ways} devices"
            )
    return NamedSharding(mesh, PartitionSpec(*_split_fsdp(shape, logical_axes, entries, mesh)))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain `x` to the sharding of its named axes on the current mesh, if there is one.

    Otherwise the compiler may split activations like the weights, and gather the batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    by_device = _is_by_device.get()
    whole = (None, "batch") if by_device else (None,)
    mesh_axes = [() if axis in whole else RULES[str(axis)] for axis in axes]
    entries = _keep_whole(x.shape, axes, mesh_axes, mesh)
    result: jax.Array = jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))
    return result


def gather_weight(weight: jax.Array, *axes: str | None) -> jax.Array:
    """Gather a weight over fsdp, and keep its named axes split; its gradient is split over fsdp.

    `constrain` would apply the same sharding to the gradient, and each device would get the whole
    sum.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or _is_by_device.get():
        return constrain(weight, *axes)
    entries = _keep_whole(weight.shape, axes, [RULES[axis] if axis else () for axis in axes], mesh)
    split = _split_fsdp(weight.shape, axes, entries, mesh)
    return _constrain_both(weight, PartitionSpec(*entries), PartitionSpec(*split))


def constrain_value(weight: jax.Array, weight_sharding: NamedSharding) -> jax.Array:
    """Constrain `weight` to a sharding, but not its gradient.

    This is for the cast of a weight that the state splits. Without it XLA's compiler for GPUs moves
    the sharding through the cast to its operand, and gathers in float32 instead of bfloat16.
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
    """Treat a batch as the rows of one device, which `constrain` does not split."""
    token = _is_by_device.set(True)
    try:
        yield
    finally:
        _is_by_device.reset(token)


def axes_by_path(
    rules: Mapping[str, Sequence[str | None]], model_axes: Mapping[str, Axes | None]
) -> dict[str, Axes | None]:
    """Return the axes of every parameter, by the first rule that matches its name, or the model.

    Raises SpecError for invalid rules, and for rules that match no parameter, since a typing error
    would silently replicate an array that should be split.
    """
    if not isinstance(rules, Mapping):
        raise SpecError(
            f"sharding is a {type(rules).__name__}, not a dict of patterns: {{r'.*kernel': "
            "('embed', 'hidden')}"
        )
    named_axes = dict(model_axes)
    # The first rule that matches wins, so it is applied last.
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


def _keep_whole(
    shape: tuple[int, ...], axes: Axes, entries: list[Entry], mesh: AnyMesh
) -> list[Entry]:
    """Clear the entries of optional axes that do not divide."""
    return [
        () if axis in OPTIONAL_AXES and size % _count_ways(entry, mesh) else entry
        for size, axis, entry in zip(shape, axes, entries, strict=True)
    ]


def _split_fsdp(
    shape: tuple[int, ...], axes: Axes, entries: list[Entry], mesh: AnyMesh
) -> list[Entry]:
    """Add fsdp to one divisible dimension, if any: `embed`, or else the one with the largest share.

    `layers` is never split, because a scan would then gather each layer's weights from a single
    device.
    """
    is_vector = sum(axis != "layers" for axis in axes) == 1
    if mesh.shape["fsdp"] == 1 or is_vector or any("fsdp" in entry for entry in entries):
        return entries
    fsdp = mesh.shape["fsdp"]
    shares = [size // _count_ways(entry, mesh) for size, entry in zip(shape, entries, strict=True)]
    fits = [i for i, share in enumerate(shares) if axes[i] != "layers" and share % fsdp == 0]
    if not fits:
        return entries
    best = max(fits, key=lambda i: (axes[i] == "embed", shares[i], -i))
    return [(*entry, "fsdp") if i == best else entry for i, entry in enumerate(entries)]


def _count_ways(entry: Entry, mesh: AnyMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in entry)
