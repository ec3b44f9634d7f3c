"""Sends tokens to their experts and back: on one device, or over the mesh axis `ep` by two all-to-alls.

Runs on each device by itself (inside `shard_map`), so every size is fixed before: without a capacity the buffers hold
whatever a router may ask for, so that no token is left out; with one they hold so many tokens of an example for each
expert, and the others are left out. Which these are does not depend on the mesh.

T tokens of a device, K experts of each, P = T × K pairs, E experts, W devices along ep, R rows that one may send to
another, B examples, L length, C places of an example with an expert, D model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

EXPERTS = "ep"  # the mesh axis
Grouped = Callable[[Array, Array], Array]  # (rows [R, D], so many of each expert) -> [R, D]
Stacked = Callable[[Array], Array]  # rows of each expert [E, R, D] -> [E, R, D]


def sorted_by_expert(x_TD: Array, expert_TK: Array, experts: int, ways: int, apply: Grouped) -> Array:
    """What each token's experts make of it, [T, K, D]: `apply` gets the rows of its experts one after the other.

    Over `ways` devices each sends to any other as many rows as these may need at most.
    """
    (tokens, each), local = expert_TK.shape, experts // ways
    pairs, rows = tokens * each, tokens * each if ways == 1 else tokens * min(each, local)
    expert_P, index_P = expert_TK.reshape(pairs), jnp.arange(pairs, dtype=jnp.int32)
    order_P = jnp.argsort(expert_P, stable=True)
    counts_WE = _counts(expert_P, experts).reshape(ways, local)
    starts_W = _starts(counts_WE.sum(1))
    way_P = expert_P[order_P] // local
    sorted_P = way_P * rows + index_P - starts_W[way_P]
    place_P = jnp.zeros_like(index_P).at[order_P].set(sorted_P, unique_indices=True)
    sent_RD = jnp.zeros((ways * rows, x_TD.shape[1]), x_TD.dtype)
    sent_RD = sent_RD.at[place_P].set(jnp.repeat(x_TD, each, axis=0), unique_indices=True)
    made_RD = apply(sent_RD, counts_WE[0]) if ways == 1 else _elsewhere(sent_RD, counts_WE, apply)
    return made_RD.at[place_P].get(unique_indices=True).reshape(tokens, each, -1)


def _elsewhere(sent_RD: Array, counts_WE: Array, apply: Grouped) -> Array:
    """What the devices of these experts make of the rows, in their places: each part of `sent_RD` is of one device."""
    (ways, local), width = counts_WE.shape, sent_RD.shape[1]
    rows = sent_RD.shape[0] // ways
    # A few integers beside the two all-to-alls: which of the rows that come are of which expert.
    all_WWE = jax.lax.all_gather(counts_WE, EXPERTS)
    counts_WE = all_WWE[:, jax.lax.axis_index(EXPERTS)]
    got_RD = _exchanged(sent_RD.reshape(ways, rows, width)).reshape(ways * rows, width)
    ends_RE = jnp.repeat(jnp.cumsum(counts_WE, axis=1), rows, axis=0)
    at_R = jnp.tile(jnp.arange(rows, dtype=ends_RE.dtype), ways)
    expert_R = (at_R[:, None] >= ends_RE).sum(1)  # E of a place where no row came
    order_R = jnp.argsort(expert_R, stable=True)
    is_row_R1 = (expert_R < local)[order_R][:, None]
    sorted_RD = jnp.where(is_row_R1, got_RD.at[order_R].get(unique_indices=True), 0)
    made_RD = jnp.where(is_row_R1, apply(sorted_RD, counts_WE.sum(0)), 0)
    back_RD = jnp.zeros_like(made_RD).at[order_R].set(made_RD, unique_indices=True)
    return _exchanged(back_RD.reshape(ways, rows, width)).reshape(ways * rows, width)


def places(capacity: float, length: int, each: int, experts: int) -> int:
    """How many tokens of an example an expert takes: `capacity` times an even share, at most all of them."""
    return min(length, math.ceil(capacity * length * each / experts))


def within_capacity(
    x_BLD: Array, expert_BLK: Array, real_BL: Array, experts: int, ways: int, capacity: float, apply: Stacked
) -> tuple[Array, Array]:
    """What each token's experts make of it, [B, L, K, D], zeros where one had no place; and where it had, [B, L, K].

    Earlier tokens come before later ones, and then first choices before second ones: what a token gets depends on no
    later one. Padding, where `real_BL` is 0, takes no place. Lepikhin et al. 2020 (GShard), but for the order.
    """
    batch, length, each = expert_BLK.shape
    count, width = places(capacity, length, each, experts), x_BLD.shape[-1]
    rank_BLK = _ranks(jnp.where(real_BL[..., None] > 0, expert_BLK, experts), experts + 1)
    total, has_place_BLK = experts * batch * count, (rank_BLK < count) & (real_BL[..., None] > 0)
    row_BLK = (expert_BLK * batch + jnp.arange(batch, dtype=jnp.int32)[:, None, None]) * count + rank_BLK
    outside_BLK = total + jnp.arange(expert_BLK.size, dtype=jnp.int32).reshape(expert_BLK.shape)
    place_P = jnp.where(has_place_BLK, row_BLK, outside_BLK).reshape(-1)
    rows_PD = jnp.repeat(x_BLD.reshape(-1, width), each, axis=0)
    sent_RD = jnp.zeros((total, width), x_BLD.dtype).at[place_P].set(rows_PD, mode="drop", unique_indices=True)
    made_RD = _stacked(sent_RD.reshape(experts, batch * count, width), ways, apply).reshape(total, width)
    made_PD = made_RD.at[place_P].get(mode="fill", fill_value=0, unique_indices=True)
    return made_PD.reshape(batch, length, each, width), has_place_BLK


def _stacked(sent_ERD: Array, ways: int, apply: Stacked) -> Array:
    if ways == 1:
        return apply(sent_ERD)
    experts, rows, width = sent_ERD.shape
    got_WERD = _exchanged(sent_ERD.reshape(ways, experts // ways, rows, width))
    made_ERD = apply(got_WERD.swapaxes(0, 1).reshape(experts // ways, ways * rows, width))
    made_WERD = made_ERD.reshape(experts // ways, ways, rows, width).swapaxes(0, 1)
    return _exchanged(made_WERD).reshape(experts, rows, width)


def _ranks(expert_BLK: Array, experts: int) -> Array:
    """How many pairs of the same example and expert come before each."""
    batch, length, each = expert_BLK.shape
    expert_BP = expert_BLK.reshape(batch, length * each)
    order_BP = jnp.argsort(expert_BP, axis=1, stable=True)
    starts_BE = jax.vmap(lambda expert_P: _starts(_counts(expert_P, experts)))(expert_BP)
    starts_BP = jnp.take_along_axis(starts_BE, jnp.take_along_axis(expert_BP, order_BP, 1), 1)
    sorted_BP = jnp.arange(length * each, dtype=jnp.int32)[None, :] - starts_BP
    rank_BP = jnp.take_along_axis(sorted_BP, jnp.argsort(order_BP, axis=1), 1)
    return rank_BP.reshape(batch, length, each)


def _counts(expert_P: Array, experts: int) -> Array:
    return (expert_P[:, None] == jnp.arange(experts, dtype=expert_P.dtype)[None, :]).sum(0, dtype=jnp.int32)


def _starts(counts: Array) -> Array:
    return jnp.cumsum(counts) - counts


def _exchanged(parts: Array) -> Array:
    """Part w of each device at device w, in the order of the devices they came from: [W, ...] -> [W, ...]."""
    exchanged: Array = jax.lax.all_to_all(parts, EXPERTS, split_axis=0, concat_axis=0)
    return exchanged
