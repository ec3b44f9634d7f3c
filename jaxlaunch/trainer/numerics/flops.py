"""Counts the model FLOPs of a training step from the jaxpr of its forward pass.

Model FLOPs are two per multiply-add of matrix products and convolutions, without rematerialization.
The backward pass has twice those of the forward pass. With frozen parameters, it has those of each
product once for every operand that depends on trained parameters. Masked scores of attention count,
unless `causal` is 0.5, which halves causal attention. Attention in a window counts as if each query
had as many keys as the window, or with 0.5 only the pairs inside of it. Experts count for the
tokens that they receive and not for their capacity. XLA's own cost analysis is not used, because it
counts the body of a scan only once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxlaunch.accelerators import PEAK_FLOPS


def peak_flops(devices: Iterable[jax.Device]) -> float | None:
    """Return the sum of the devices' dense bf16 peak FLOP/s; None if one is unknown."""
    peaks = [PEAK_FLOPS.get(device.device_kind, math.nan) for device in devices]
    return None if not peaks or math.isnan(total := sum(peaks)) else total


# Prefix of the name of the scope in which trainer/attention/implementations computes causal
# attention.
CAUSAL_PREFIX = "causal"
_CAUSAL_SCOPE = re.compile(rf"{CAUSAL_PREFIX}(?:_(\d+)_of_(\d+))?")


def causal_scope(length: int, window: int | None) -> str:
    """Return the name of the scope of causal attention, with the window if it hides keys."""
    if window is None or window >= length:
        return CAUSAL_PREFIX
    return f"{CAUSAL_PREFIX}_{window}_of_{length}"


_SHARE_SCOPE = re.compile(r"(\d+)_of_(\d+)_rows")


def share_scope(rows: int, capacity: int) -> str:
    """Return the name of a scope whose FLOPs count for `rows` of a buffer of `capacity` rows."""
    return f"{rows}_of_{capacity}_rows"


# Name of the jitted product in trainer/numerics/grouped. Its operands are the rows, the matrices,
# and the number of rows of each matrix.
GROUPED_PRODUCT = "jaxlaunch_grouped_product"


def _counted_share(equation: JaxprEqn, causal: float | None) -> float:
    """Return the share of a product's FLOPs that counts, by its scopes.

    `causal` None ignores the scopes.
    """
    if causal is None:
        return 1.0
    scopes = str(equation.source_info.name_stack).split("/")
    for match in filter(None, map(_SHARE_SCOPE.fullmatch, scopes)):
        return int(match[1]) / int(match[2])
    for match in filter(None, map(_CAUSAL_SCOPE.fullmatch, scopes)):
        share = int(match[1]) / int(match[2]) if match[1] else 1.0
        return share * (1.0 - (1.0 - causal) * share)
    return 1.0


def train_step_flops(
    forward: Jaxpr, causal: float = 1.0, trained: int | None = None
) -> float | None:
    """Return the FLOPs of a training step; None if they depend on the data.

    A loop of unknown length around a matrix product makes them depend on the data.

    Args:
        forward: The forward pass.
        causal: The weight of causal attention; 0.5 excludes masked scores.
        trained: The number of arguments that are trained, the first of `forward`. For None, the
            backward pass has exactly twice the FLOPs of the forward pass.
    """
    forward_flops = count_flops(forward, causal)
    if math.isnan(forward_flops):
        return None
    if trained is None:
        return 3 * forward_flops
    is_trained = [index < trained for index in range(len(forward.invars))]
    return forward_flops + backward_flops(forward, causal, is_trained)[0]


def count_flops(jaxpr: Jaxpr, causal: float | None = 1.0) -> float:
    """Return the FLOPs of `jaxpr`, NaN if they depend on the data.

    `causal` is as for train_step_flops; None ignores all scopes.
    """
    return sum((_count_equation(equation, causal) for equation in jaxpr.eqns), 0.0)


def _count_equation(equation: JaxprEqn, causal: float | None) -> float:
    if (share := _counted_share(equation, causal)) != 1.0:
        return share * _count_equation(equation, None)
    name, params = equation.primitive.name, equation.params
    if (contracted_sizes := _contracted_sizes(equation)) is not None:
        # Two operations for each element of the result and each element of the contracted axes.
        result: float = (
            2.0 * math.prod(_aval(equation.outvars[0]).shape) * math.prod(contracted_sizes)
        )
        return result
    inner = [count_flops(jaxpr, causal) for jaxpr in _inner_jaxprs(params)]
    if name == "cond":
        return max(inner)
    if name == "while":
        return math.nan if any(inner) else 0.0
    return sum(inner, 0.0) * _repetitions(name, params)


def backward_flops(
    jaxpr: Jaxpr, causal: float | None, is_dependent: Sequence[bool]
) -> tuple[float, list[bool]]:
    """Return the FLOPs of the backward pass, and for each result whether it depends on parameters.

    `is_dependent` has the same flag for each argument. A product counts once for each operand that
    depends on parameters, for the gradient of this operand.
    """
    dependent_ids = {
        id(variable) for variable, flag in zip(jaxpr.invars, is_dependent, strict=True) if flag
    }
    total = 0.0
    for equation in jaxpr.eqns:
        operands = [id(variable) in dependent_ids for variable in equation.invars]
        if not any(operands):
            continue
        flops, results = _backward_equation(equation, causal, operands)
        total += flops
        for variable, flag in zip(equation.outvars, results, strict=True):
            if flag and jnp.issubdtype(_aval(variable).dtype, jnp.floating):
                dependent_ids.add(id(variable))
    return total, [id(variable) in dependent_ids for variable in jaxpr.outvars]


def _backward_equation(
    equation: JaxprEqn, causal: float | None, is_dependent: list[bool]
) -> tuple[float, list[bool]]:
    """Count one equation like `backward_flops`."""
    if (share := _counted_share(equation, causal)) != 1.0:
        flops, results = _backward_equation(equation, None, is_dependent)
        return share * flops, results
    name, params = equation.primitive.name, equation.params
    if _contracted_sizes(equation) is not None:
        return _count_equation(equation, None) * sum(is_dependent), [any(is_dependent)]
    inner = list(_inner_jaxprs(params))
    if name == "cond":
        branches = [backward_flops(branch, causal, is_dependent[1:]) for branch in inner]
        results = [any(flags) for flags in zip(*(flags for _, flags in branches), strict=True)]
        return max(flops for flops, _ in branches), results
    if name == "scan":
        # A carried value that depends on parameters after an iteration does so in the next one.
        consts, carries = consts_and_carries(params)
        end, previous = consts + carries, None
        while is_dependent != previous:
            previous, results = is_dependent, backward_flops(inner[0], causal, is_dependent)[1]
            carried = map(max, is_dependent[consts:end], results[:carries])
            is_dependent = [*is_dependent[:consts], *carried, *is_dependent[end:]]
    if len(inner) != 1 or name == "while" or len(inner[0].invars) != len(is_dependent):
        return 0.0, [any(is_dependent)] * len(equation.outvars)
    flops, results = backward_flops(inner[0], causal, is_dependent)
    return flops * _repetitions(name, params), results


def consts_and_carries(scan: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of constants and of carries of a scan."""
    if "num_consts" in scan:
        return scan["num_consts"], scan["num_carry"]
    # JAX 0.12 and later.
    consts, carries, _ = scan["ft_in"].unpack()
    return len(consts), len(carries)


def _repetitions(name: str, params: Mapping[str, Any]) -> int:
    """Return how many times the body of a primitive runs."""
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":
        # The body has the shapes of one device.
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1


def _inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """Yield every jaxpr in `params`, but not the rules of a custom_vjp, which are functions."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield item.jaxpr if isinstance(item, ClosedJaxpr) else item


def _contracted_sizes(equation: JaxprEqn) -> list[int] | None:
    """Return the sizes of the axes that a product sums over; None for other operations."""
    name, params = equation.primitive.name, equation.params
    if name == "conv_general_dilated":
        # The input features of the kernel are already those of one group.
        kernel = _aval(equation.invars[1]).shape
        features = params["dimension_numbers"].rhs_spec[0]
        return [size for axis, size in enumerate(kernel) if axis != features]
    if params.get("name") == GROUPED_PRODUCT:
        return list(_aval(equation.invars[0]).shape[1:])
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
    elif name == "ragged_dot_general":
        # Rows, each with the matrix of its group.
        (contracted, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    else:
        return None
    return [_aval(equation.invars[0]).shape[axis] for axis in contracted]


def _aval(variable: Any) -> Any:
    # JAX's type of a variable's aval declares neither shape nor dtype.
    return variable.aval
