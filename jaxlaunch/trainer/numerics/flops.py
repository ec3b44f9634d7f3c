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
    """Peak FLOP/s of all `devices` together, dense bf16; None when one of them is not in PEAK_FLOPS."""
    peaks = [PEAK_FLOPS.get(device.device_kind) for device in devices]
    known = [each for each in peaks if each is not None]
    return sum(known) if known and len(known) == len(peaks) else None


CAUSAL = "causal"  # begins the scope in which trainer/attention/implementations computes causal attention
_CAUSAL_SCOPE = re.compile(rf"{CAUSAL}(?:_(\d+)_of_(\d+))?")


def causal_scope(length: int, window: int | None) -> str:
    """The name of that scope: it says the window, where one hides keys."""
    return CAUSAL if window is None or window >= length else f"{CAUSAL}_{window}_of_{length}"


_SHARE_SCOPE = re.compile(r"(\d+)_of_(\d+)_rows")


def share_scope(rows: int, room: int) -> str:
    """The name of a scope in which so many rows of a buffer count as work."""
    return f"{rows}_of_{room}_rows"


GROUPED = "jaxlaunch_grouped_product"  # the call of trainer/numerics/grouped: rows, matrices, the rows of each matrix


def _share(scopes: str, causal: float) -> float:
    """The share of a product's FLOPs that counts in these scopes: all, outside causal attention and buffers of rows."""
    if (rows := next(filter(None, map(_SHARE_SCOPE.fullmatch, scopes.split("/"))), None)) is not None:
        return int(rows[1]) / int(rows[2])
    found = next(filter(None, map(_CAUSAL_SCOPE.fullmatch, scopes.split("/"))), None)
    if found is None or found[1] is None:
        return 1.0 if found is None else causal
    share = int(found[1]) / int(found[2])
    return share * (1.0 - (1.0 - causal) * share)


def train_step(forward: Jaxpr, causal: float = 1.0, trained: int | None = None) -> float | None:
    """FLOPs of a training step whose forward pass is `forward`.

    `causal` is the weight of a FLOP of causal attention: 0.5 counts those that its mask leaves. None when the FLOPs
    depend on the data: a loop of unknown length around a matrix multiplication. The first `trained` arguments are what
    is trained; None: everything is, and the backward pass is twice the forward pass.
    """
    counted = count(forward, causal)
    if math.isnan(counted) or trained is None:
        return None if math.isnan(counted) else 3 * counted
    return counted + backward(forward, causal, [at < trained for at in range(len(forward.invars))])[0]


def count(jaxpr: Jaxpr, causal: float | None = 1.0) -> float:
    """FLOPs of one evaluation of `jaxpr`, NaN when they depend on the data. With None the scopes say nothing."""
    return sum((_of_equation(equation, causal) for equation in jaxpr.eqns), 0.0)


def _of_equation(equation: JaxprEqn, causal: float | None) -> float:
    if causal is not None and (share := _share(str(equation.source_info.name_stack), causal)) != 1.0:
        return share * _of_equation(equation, None)
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _of_matmul(equation)
    if name == "ragged_dot_general":
        return _of_grouped(equation)
    if name == "conv_general_dilated":
        return _of_convolution(equation)
    if params.get("name") == GROUPED:  # whatever it does for it
        return _multiply_adds(equation, _shape(equation.invars[0])[1:])
    inner = [count(jaxpr, causal) for jaxpr in _jaxprs(params)]
    if name == "cond":
        return max(inner)
    if name == "while":
        return math.nan if any(inner) else 0.0
    return sum(inner, 0.0) * _times(name, params)


def backward(jaxpr: Jaxpr, causal: float | None, moves: Sequence[bool]) -> tuple[float, list[bool]]:
    """FLOPs of the backward pass of `jaxpr`, of whose arguments those that `moves` depend on what is trained; and which
    results do. A product counts once for each operand that does: the gradient of the other operand is its by-product.
    """
    moving = {id(variable) for variable, does in zip(jaxpr.invars, moves, strict=True) if does}
    flops = 0.0
    for equation in jaxpr.eqns:
        given = [id(variable) in moving for variable in equation.invars]
        if not any(given):
            continue
        each, results = _backward_of(equation, causal, given)
        flops += each
        moving |= {id(var) for var, does in zip(equation.outvars, results, strict=True) if does and _is_float(var)}
    return flops, [id(variable) in moving for variable in jaxpr.outvars]


def _is_float(variable: Any) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.floating))


def _backward_of(equation: JaxprEqn, causal: float | None, given: list[bool]) -> tuple[float, list[bool]]:
    """FLOPs of the backward pass of one equation, and which of its results depend on what is trained."""
    if causal is not None and (share := _share(str(equation.source_info.name_stack), causal)) != 1.0:
        flops, results = _backward_of(equation, None, given)
        return share * flops, results
    name, params = equation.primitive.name, equation.params
    if name in ("dot_general", "ragged_dot_general", "conv_general_dilated") or params.get("name") == GROUPED:
        return _of_equation(equation, None) * sum(given), [any(given)]
    inner = list(_jaxprs(params))
    if name == "cond":
        each = [backward(branch, causal, given[1:]) for branch in inner]
        return max(flops for flops, _ in each), [any(of) for of in zip(*(found for _, found in each), strict=True)]
    if name == "scan":
        given = _through_scan(inner[0], causal, given, *consts_and_carries(params))
    if len(inner) != 1 or name == "while" or len(inner[0].invars) != len(given):
        return 0.0, [any(given)] * len(equation.outvars)
    flops, results = backward(inner[0], causal, given)
    return flops * _times(name, params), results


def consts_and_carries(scan: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a scan's arguments are constants, and how many it carries; JAX 0.12 groups its arguments instead."""
    if "num_consts" in scan:
        return scan["num_consts"], scan["num_carry"]
    consts, carries, _ = scan["ft_in"].unpack()
    return len(consts), len(carries)


def _through_scan(body: Jaxpr, causal: float | None, given: list[bool], consts: int, carries: int) -> list[bool]:
    """`given` with what an earlier round of the loop hands to a later one."""
    while True:
        results = backward(body, causal, given)[1][:carries]
        after = [*given[:consts], *map(max, given[consts : consts + carries], results), *given[consts + carries :]]
        if after == given:
            return given
        given = after


def _times(name: str, params: Mapping[str, Any]) -> int:
    """How many times the body of a primitive runs."""
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":  # its body has the shapes of one device
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1


def _jaxprs(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """Every jaxpr among `params`; a custom_vjp's forward and backward rules are functions, so they are not."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each


def _of_matmul(equation: JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = _shape(equation.invars[0])
    return _multiply_adds(equation, (left[axis] for axis in contracted))


def _of_grouped(equation: JaxprEqn) -> float:
    """Rows, each with the matrix of its group."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    left = _shape(equation.invars[0])
    return _multiply_adds(equation, (left[axis] for axis in contracted))


def _of_convolution(equation: JaxprEqn) -> float:
    kernel = _shape(equation.invars[1])  # its input features are already those of one group
    features = equation.params["dimension_numbers"].rhs_spec[0]
    return _multiply_adds(equation, (size for axis, size in enumerate(kernel) if axis != features))


def _multiply_adds(equation: JaxprEqn, summed: Iterable[int]) -> float:
    """Two operations for each element of the result and of what is summed into it."""
    return 2.0 * math.prod(_shape(equation.outvars[0])) * math.prod(summed)


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)
