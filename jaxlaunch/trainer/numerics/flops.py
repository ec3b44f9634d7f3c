"""Counts a model's floating-point operations from its jaxpr.

The convention everywhere: model FLOPs only, two per multiply-add, of matrix multiplications and convolutions; a
training step is the forward pass plus twice that for the backward pass; where something is frozen, each product counts
once more for each of its operands that depends on what is trained. What rematerialization repeats is not counted,
what attention computes and masks away is, unless `causal` is 0.5: then causal attention counts half. A window counts as
if each query had so many keys; with 0.5, the pairs that are in it. Of experts those count that a token goes to, not the
room that is kept for tokens. XLA's own cost analysis counts the body of a scan
once, so it is not used.
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


def peak(devices: Iterable[jax.Device]) -> float | None:
    """Return the peak FLOP/s of all `devices` together, dense bf16; None when one of them is not in PEAK_FLOPS."""
    kinds = [device.device_kind for device in devices]
    return sum(PEAK_FLOPS[kind] for kind in kinds) if kinds and all(kind in PEAK_FLOPS for kind in kinds) else None


# Prefix of the scope in which trainer/attention/implementations computes causal attention.
CAUSAL = "causal"
_CAUSAL_SCOPE = re.compile(rf"{CAUSAL}(?:_(\d+)_of_(\d+))?")


def causal_scope(length: int, window: int | None) -> str:
    """Return the name of that scope, which has the window, where one hides keys."""
    return CAUSAL if window is None or window >= length else f"{CAUSAL}_{window}_of_{length}"


_SHARE_SCOPE = re.compile(r"(\d+)_of_(\d+)_rows")


def share_scope(rows: int, room: int) -> str:
    """Return the name of a scope in which so many rows of a buffer count as work."""
    return f"{rows}_of_{room}_rows"


# Name of the call in trainer/numerics/grouped. Its operands are the rows, the matrices, and the rows of each matrix.
GROUPED = "jaxlaunch_grouped_product"


def _share(scopes: str, causal: float) -> float:
    """Return the share of a product's FLOPs that counts: all, outside causal attention and buffers of rows."""
    if (rows := next(filter(None, map(_SHARE_SCOPE.fullmatch, scopes.split("/"))), None)) is not None:
        return int(rows[1]) / int(rows[2])
    match = next(filter(None, map(_CAUSAL_SCOPE.fullmatch, scopes.split("/"))), None)
    if match is None or match[1] is None:
        return 1.0 if match is None else causal
    share = int(match[1]) / int(match[2])
    return share * (1.0 - (1.0 - causal) * share)


def train_step(forward: Jaxpr, causal: float = 1.0, trained: int | None = None) -> float | None:
    """Return the FLOPs of a training step whose forward pass is `forward`.

    `causal` is the weight of a FLOP of causal attention: 0.5 counts those that its mask leaves. None when the FLOPs
    depend on the data: a loop of unknown length around a matrix multiplication. The first `trained` arguments are what
    is trained; None: everything is, and the backward pass is twice the forward pass.
    """
    counted = count(forward, causal)
    if math.isnan(counted) or trained is None:
        return None if math.isnan(counted) else 3 * counted
    return counted + backward(forward, causal, [at < trained for at in range(len(forward.invars))])[0]


def count(jaxpr: Jaxpr, causal: float | None = 1.0) -> float:
    """Return the FLOPs of one evaluation of `jaxpr`, NaN when they depend on the data. None: scopes do not count."""
    return sum((_count_equation(equation, causal) for equation in jaxpr.eqns), 0.0)


def _count_equation(equation: JaxprEqn, causal: float | None) -> float:
    if causal is not None and (share := _share(str(equation.source_info.name_stack), causal)) != 1.0:
        return share * _count_equation(equation, None)
    name, params = equation.primitive.name, equation.params
    if (summed := _summed_sizes(equation)) is not None:
        # Two operations for each element of the result and of what is summed into it.
        return 2.0 * math.prod(_aval(equation.outvars[0]).shape) * math.prod(summed)
    inner = [count(jaxpr, causal) for jaxpr in _jaxprs(params)]
    if name == "cond":
        return max(inner)
    if name == "while":
        return math.nan if any(inner) else 0.0
    return sum(inner, 0.0) * _times(name, params)


def backward(jaxpr: Jaxpr, causal: float | None, moves: Sequence[bool]) -> tuple[float, list[bool]]:
    """Return the FLOPs of the backward pass of `jaxpr`, and which of its results depend on what is trained.

    `moves` says which of its arguments do. A product counts once for each operand that does: the gradient of the other
    operand is its by-product.
    """
    moving = {id(variable) for variable, does in zip(jaxpr.invars, moves, strict=True) if does}
    total = 0.0
    for equation in jaxpr.eqns:
        operands = [id(variable) in moving for variable in equation.invars]
        if not any(operands):
            continue
        flops, results = _backward_equation(equation, causal, operands)
        total += flops
        for variable, does in zip(equation.outvars, results, strict=True):
            if does and jnp.issubdtype(_aval(variable).dtype, jnp.floating):
                moving.add(id(variable))
    return total, [id(variable) in moving for variable in jaxpr.outvars]


def _backward_equation(equation: JaxprEqn, causal: float | None, moves: list[bool]) -> tuple[float, list[bool]]:
    """Return the FLOPs of the backward pass of one equation, and which of its results depend on what is trained."""
    if causal is not None and (share := _share(str(equation.source_info.name_stack), causal)) != 1.0:
        flops, results = _backward_equation(equation, None, moves)
        return share * flops, results
    name, params = equation.primitive.name, equation.params
    if _summed_sizes(equation) is not None:
        return _count_equation(equation, None) * sum(moves), [any(moves)]
    inner = list(_jaxprs(params))
    if name == "cond":
        flops_of, results_of = zip(*(backward(branch, causal, moves[1:]) for branch in inner), strict=True)
        return max(flops_of), [any(branches) for branches in zip(*results_of, strict=True)]
    if name == "scan":
        moves = _through_scan(inner[0], causal, moves, *consts_and_carries(params))
    if len(inner) != 1 or name == "while" or len(inner[0].invars) != len(moves):
        return 0.0, [any(moves)] * len(equation.outvars)
    flops, results = backward(inner[0], causal, moves)
    return flops * _times(name, params), results


def consts_and_carries(scan: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many of a scan's arguments are constants, and how many it carries; JAX 0.12 groups them instead."""
    if "num_consts" in scan:
        return scan["num_consts"], scan["num_carry"]
    consts, carries, _ = scan["ft_in"].unpack()
    return len(consts), len(carries)


def _through_scan(body: Jaxpr, causal: float | None, moves: list[bool], consts: int, carries: int) -> list[bool]:
    """Return `moves` with what an earlier round of the loop hands to a later one."""
    while True:
        results = backward(body, causal, moves)[1][:carries]
        after = [*moves[:consts], *map(max, moves[consts : consts + carries], results), *moves[consts + carries :]]
        if after == moves:
            return moves
        moves = after


def _times(name: str, params: Mapping[str, Any]) -> int:
    """Return how many times the body of a primitive runs."""
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":
        # The body has the shapes of one device.
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1


def _jaxprs(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """Yield every jaxpr among `params`; a custom_vjp's forward and backward rules are functions, so they are none."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield item.jaxpr if isinstance(item, ClosedJaxpr) else item


def _summed_sizes(equation: JaxprEqn) -> list[int] | None:
    """Return the sizes of the axes that a product or convolution sums over; None for any other operation."""
    name, params = equation.primitive.name, equation.params
    if name == "conv_general_dilated":
        # The input features of the kernel are already those of one group.
        kernel = _aval(equation.invars[1]).shape
        features = params["dimension_numbers"].rhs_spec[0]
        return [size for axis, size in enumerate(kernel) if axis != features]
    if params.get("name") == GROUPED:
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
