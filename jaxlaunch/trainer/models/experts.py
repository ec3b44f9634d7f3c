"""An MLP of experts: a router sends each token to a few of them and sums their outputs.

Shazeer et al. 2017; Fedus et al. 2022 (Switch); Zoph et al. 2022 (the z-loss); Jiang et al. 2024
(Mixtral).

Tokens go to their experts and back on one device, or over the mesh axis `ep` by two all-to-alls.
That runs on each device by itself (inside `shard_map`), so every size is static. Without a capacity
the buffers are large enough for any routing, so that no token is left out. With one they hold a
fixed number of tokens of an example for each expert, and the others are left out. The choice does
not depend on the mesh.

B batch, L length, D model, E experts, K experts of a token, F hidden units of an expert, M layers
with experts, S parts of the batch, one on a device, T tokens of a device, P = T × K pairs, W
devices along ep, R rows of a buffer, or that one device may send to another, C places of an example
with an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxlaunch.contract import BATCH_AXES
from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.layers import (
    ACTIVATIONS,
    apply_kernel,
    gated_activation,
    init_weight,
    platform,
)
from jaxlaunch.trainer.numerics import flops, grouped
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel.sharding import constrain

MAX_LISTED_EXPERTS = 32  # experts of which each has a metric of its own; of more, only the extremes
EXPERT_AXIS = "ep"  # the mesh axis

ApplyGrouped = Callable[[Array, Array], Array]  # (rows [R, D], so many of each expert) -> [R, D]
ApplyStacked = Callable[[Array], Array]  # rows of each expert [E, R, D] -> [E, R, D]


class Mixture(NamedTuple):
    """The facts about a decoder's experts that its loss needs."""

    layers: int  # those with experts
    experts: int
    has_capacity: bool
    balance: float
    router_z: float

    @classmethod
    def from_config(cls, config: spec.Decoder) -> Mixture:
        """Return the mixture of a decoder with experts."""
        return cls(
            layers=len(config.sparse_layers),
            experts=config.experts or 0,
            has_capacity=config.capacity is not None,
            balance=config.balance,
            router_z=config.router_z,
        )

    @property
    def is_penalized(self) -> bool:
        """Return whether the loss has a penalty."""
        return bool(self.balance or self.router_z)

    def compute_penalty(self, part: Routing, whole: Routing) -> Array:
        """Return what the tokens of `part` add to the penalty of the batch `whole`, a scalar.

        The parts of a batch add up to its penalty, and their gradients to its gradient: of `whole`
        only counts are read, which have no gradient, and all else is a sum over tokens.
        """
        rows = whole.rows
        load_E = jax.lax.stop_gradient(whole.chosen_ME.sum(0) / rows)
        balance = self.experts * (load_E * part.share_E).sum() / rows
        return self.balance * balance + self.router_z * part.z / rows


class LayerCounts(NamedTuple):
    """Sums over the real tokens of a layer, for each part of the batch. Float32."""

    chosen_SE: Array  # tokens that chose an expert
    share_SE: Array  # of an expert, the router's probability
    z_S: Array  # squared log of the softmax's denominator
    left_out_S: Array  # of a token, the experts that had no place for it


class RoutingTotals(NamedTuple):
    """Sums over layers, except the chosen experts, which are counted by layer."""

    chosen_MSE: Array
    share_SE: Array
    z_S: Array
    left_out_S: Array

    @classmethod
    def zeros(cls, mixture: Mixture) -> RoutingTotals:
        """Return zeros for the state before the first layer."""
        mesh = jax.sharding.get_abstract_mesh()
        parts = 1 if mesh.empty else meshes.count_shards(mesh)
        zeros_SE = constrain(jnp.zeros((parts, mixture.experts), jnp.float32), "batch", None)
        zeros_S = constrain(jnp.zeros(parts, jnp.float32), "batch")
        chosen_MSE = jnp.zeros((mixture.layers, *zeros_SE.shape), jnp.float32)
        return cls(constrain(chosen_MSE, None, "batch", None), zeros_SE, zeros_S, zeros_S)

    def add_layer(self, counts: LayerCounts, place_M: Array) -> RoutingTotals:
        """Add the sums of one more layer, the one where `place_M` is 1."""
        chosen_MSE = self.chosen_MSE + place_M[:, None, None] * counts.chosen_SE[None]
        return RoutingTotals(chosen_MSE, *map(jnp.add, self[1:], counts[1:]))

    def sum_parts(self, tokens: Array, mixture: Mixture) -> Routing:
        """Return the sums over all parts of a batch of `tokens` real tokens."""
        left_out = jax.lax.stop_gradient(self.left_out_S.sum()) if mixture.has_capacity else None
        chosen_ME = jax.lax.stop_gradient(self.chosen_MSE.sum(1))
        return Routing(chosen_ME, self.share_SE.sum(0), self.z_S.sum(), tokens, left_out)


class Routing(NamedTuple):
    """Sums over the real tokens of a batch. Those of several batches add up to those of all.

    A loss and metrics of products or extremes of sums must be computed from the sums of the whole
    batch: a mean over micro-batches would depend on how many there are.
    """

    chosen_ME: Array  # tokens that chose an expert of a layer
    share_E: Array  # of an expert, the router's probability, over layers
    z: Array  # squared log of the softmax's denominator, over layers
    tokens: Array
    left_out: Array | None  # choices that found no place; None without a capacity

    @property
    def rows(self) -> Array:
        """The tokens of all layers, 1 of an empty batch."""
        return _nonzero(self.tokens) * self.chosen_ME.shape[0]

    def metric_means(self) -> dict[str, Array]:
        """Return the terms of the loss and the metrics by name, of arrays of JAX or NumPy.

        `balance_loss` is transformers' load_balancing_loss_func: E times the sum over experts of
        the tokens that chose one times its probability, both as means over tokens and layers.
        `expert_load/3` is the share of all choices that number 3 had, `expert_load_max` and
        `expert_load_min` the most and the least that an expert of a layer had, in even shares,
        `expert_left_out` the share of choices that found no place.
        """
        chosen_ME, rows, choices = self.chosen_ME, self.rows, _nonzero(self.chosen_ME.sum())
        (layers, experts), chosen_E = chosen_ME.shape, chosen_ME.sum(0)
        even = choices / (layers * experts)
        means = {
            "balance_loss": experts * (chosen_E / rows * (self.share_E / rows)).sum(),
            "router_z_loss": self.z / rows,
            "expert_load_max": chosen_ME.max() / even,
            "expert_load_min": chosen_ME.min() / even,
        }
        if self.left_out is not None:
            means["expert_left_out"] = self.left_out / choices
        listed = range(experts) if experts <= MAX_LISTED_EXPERTS else ()
        return means | {f"expert_load/{number}": chosen_E[number] / choices for number in listed}


def _nonzero(count: Array) -> Array:
    """Return a count as a divisor: 1 where it is 0."""
    is_zero: Array = count == 0
    return count + is_zero.astype(count.dtype)


class Experts(nnx.Module):
    """The sum over a token's K experts of its share × (activation(x · gate) * (x · up)) · down."""

    def __init__(self, config: spec.Decoder, rngs: nnx.Rngs) -> None:
        width, hidden, experts = config.width, config.expert_units, config.experts or 0
        axes = ("experts", "embed", "hidden")
        self.router = init_weight(rngs, (width, experts), ("embed", None), width**-0.5)
        self.gate = init_weight(rngs, (experts, width, hidden), axes, width**-0.5)
        self.up = init_weight(rngs, (experts, width, hidden), axes, width**-0.5)
        std = (2 * config.layers * hidden) ** -0.5
        self.down = init_weight(rngs, (experts, hidden, width), ("experts", "hidden", "embed"), std)
        self.activation, self.capacity = ACTIVATIONS[config.activation], config.capacity
        self.per_token, self.is_normal = config.experts_per_token, config.experts_normalized

    def __call__(self, x_BLD: Array, real_BL: Array) -> tuple[Array, LayerCounts]:
        """Return the output of this layer, with all positions, and the counts of its routing."""
        # The router needs full float32 precision, even where a device multiplies float32 in fewer
        # bits: rounding would send tokens to other experts.
        router_DE = self.router[...].astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            logits_BLE = apply_kernel(x_BLD.astype(jnp.float32), router_DE)
        logits_BLE = constrain(logits_BLE, "batch", "length", None)
        arrays = x_BLD, logits_BLE, real_BL, self.gate[...], self.up[...], self.down[...]
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return self._apply_part(*arrays, ways=1, over=None)
        over = "mp" if mesh.shape["mp"] > 1 else None
        apply = partial(self._apply_part, ways=mesh.shape["ep"], over=over)
        rows, into = PartitionSpec(BATCH_AXES), PartitionSpec("ep", None, over)
        in_specs = rows, rows, rows, into, into, PartitionSpec("ep", over, None)
        sharded: Any = jax.shard_map(apply, in_specs=in_specs, out_specs=(rows, rows))
        result: tuple[Array, LayerCounts] = sharded(*arrays)
        return result

    def _apply_part(
        self,
        x_BLD: Array,
        logits_BLE: Array,
        real_BL: Array,
        gate_EDF: Array,
        up_EDF: Array,
        down_EFD: Array,
        *,
        ways: int,
        over: str | None,
    ) -> tuple[Array, LayerCounts]:
        """Apply the layer to the examples of one device, with its experts and hidden units."""
        shape, experts = x_BLD.shape, logits_BLE.shape[-1]
        shares_BLE = jax.nn.softmax(logits_BLE)
        share_BLK, expert_BLK = jax.lax.top_k(shares_BLE, self.per_token)
        if self.is_normal:
            share_BLK = share_BLK / share_BLK.sum(-1, keepdims=True)
        has_place_BLK = None
        weights = gate_EDF, up_EDF, down_EFD
        if self.capacity is None:
            x_TD, expert_TK = x_BLD.reshape(-1, shape[-1]), expert_BLK.reshape(-1, self.per_token)
            apply = partial(self._apply_grouped, expert_BLK.size, *weights)
            made_TKD = dispatch_sorted(x_TD, expert_TK, experts, ways, apply)
            made_BLKD = made_TKD.reshape(*expert_BLK.shape, shape[-1])
        else:
            apply = partial(self._apply_equal_rows, expert_BLK.size, *weights)
            made_BLKD, has_place_BLK = dispatch_within_capacity(
                x_BLD, expert_BLK, real_BL, experts, ways, self.capacity, apply
            )
        made_BLD = (share_BLK.astype(made_BLKD.dtype)[..., None] * made_BLKD).sum(2)
        if over is not None:  # each device has its share of the hidden units
            made_BLD = jax.lax.psum(made_BLD, over)
        return made_BLD, _count_tokens(logits_BLE, shares_BLE, expert_BLK, has_place_BLK, real_BL)

    def _apply_grouped(
        self, pairs: int, gate: Array, up: Array, down: Array, x_RD: Array, counts_E: Array
    ) -> Array:
        """Apply the experts to groups of rows of sizes `counts_E`; `pairs` rows count."""
        is_loop = platform() == "gpu" and grouped.is_loop_faster(pairs, len(x_RD), gate.shape)
        multiply = partial(grouped.grouped_product, rows=pairs) if is_loop else jax.lax.ragged_dot
        with jax.named_scope(flops.share_scope(pairs, len(x_RD))):
            gate_RF = checkpoint_name(multiply(x_RD, gate, counts_E), "gate")
            up_RF = checkpoint_name(multiply(x_RD, up, counts_E), "up")
            return multiply(gated_activation(self.activation, gate_RF, up_RF), down, counts_E)

    def _apply_equal_rows(
        self, pairs: int, gate: Array, up: Array, down: Array, x_ERD: Array
    ) -> Array:
        """Apply the experts to equally many rows of each."""
        room = x_ERD.shape[0] * x_ERD.shape[1]
        with jax.named_scope(flops.share_scope(min(pairs, room), room)):
            gate_ERF = checkpoint_name(jnp.einsum("erd,edf->erf", x_ERD, gate), "gate")
            up_ERF = checkpoint_name(jnp.einsum("erd,edf->erf", x_ERD, up), "up")
            hidden_ERF = gated_activation(self.activation, gate_ERF, up_ERF)
            return jnp.einsum("erf,efd->erd", hidden_ERF, down)


def _count_tokens(
    logits_BLE: Array,
    shares_BLE: Array,
    expert_BLK: Array,
    has_place_BLK: Array | None,
    real_BL: Array,
) -> LayerCounts:
    index_E = jnp.arange(logits_BLE.shape[-1], dtype=expert_BLK.dtype)
    is_chosen_BLE = (expert_BLK[..., None] == index_E[None, None, None, :]).any(2)
    real_BL1 = real_BL[..., None]
    z_BL = jnp.square(jax.nn.logsumexp(logits_BLE, axis=-1))
    left_out_S = jnp.zeros_like(real_BL, shape=(1,))
    if has_place_BLK is not None:
        left_out_S = jnp.where(has_place_BLK, 0.0, real_BL1).sum()[None]
    return LayerCounts(
        chosen_SE=jnp.where(is_chosen_BLE, real_BL1, 0.0).sum((0, 1))[None],
        share_SE=(shares_BLE * real_BL1).sum((0, 1))[None],
        z_S=(z_BL * real_BL).sum()[None],
        left_out_S=left_out_S,
    )


# --- the way to the experts and back --------------------------------------------------------------


def dispatch_sorted(
    x_TD: Array, expert_TK: Array, experts: int, ways: int, apply: ApplyGrouped
) -> Array:
    """Return each token's outputs [T, K, D]; `apply` gets the rows sorted by expert.

    Each of `ways` devices sends to every other one the largest number of rows that it may need.
    """
    (tokens, per_token), local = expert_TK.shape, experts // ways
    pairs = tokens * per_token
    rows = tokens * per_token if ways == 1 else tokens * min(per_token, local)
    expert_P, index_P = expert_TK.reshape(pairs), jnp.arange(pairs, dtype=jnp.int32)
    order_P = jnp.argsort(expert_P, stable=True)
    counts_WE = _count_pairs(expert_P, experts).reshape(ways, local)
    starts_W = _exclusive_cumsum(counts_WE.sum(1))
    way_P = expert_P[order_P] // local
    sorted_P = way_P * rows + index_P - starts_W[way_P]
    place_P = jnp.zeros_like(index_P).at[order_P].set(sorted_P, unique_indices=True)
    sent_RD = jnp.zeros((ways * rows, x_TD.shape[1]), x_TD.dtype)
    sent_RD = sent_RD.at[place_P].set(jnp.repeat(x_TD, per_token, axis=0), unique_indices=True)
    if ways == 1:
        made_RD = apply(sent_RD, counts_WE[0])
    else:
        made_RD = _apply_remotely(sent_RD, counts_WE, apply)
    return made_RD.at[place_P].get(unique_indices=True).reshape(tokens, per_token, -1)


def _apply_remotely(sent_RD: Array, counts_WE: Array, apply: ApplyGrouped) -> Array:
    """Return the outputs of remote experts; each part of `sent_RD` is for one device."""
    (ways, local), width = counts_WE.shape, sent_RD.shape[1]
    rows = sent_RD.shape[0] // ways
    # Besides the two all-to-alls a few integers are exchanged, which assign the received rows to
    # experts.
    all_WWE = jax.lax.all_gather(counts_WE, EXPERT_AXIS)
    counts_WE = all_WWE[:, jax.lax.axis_index(EXPERT_AXIS)]
    got_RD = _exchange_parts(sent_RD.reshape(ways, rows, width)).reshape(ways * rows, width)
    ends_RE = jnp.repeat(jnp.cumsum(counts_WE, axis=1), rows, axis=0)
    at_R = jnp.tile(jnp.arange(rows, dtype=ends_RE.dtype), ways)
    expert_R = (at_R[:, None] >= ends_RE).sum(1)  # E of a place where no row came
    order_R = jnp.argsort(expert_R, stable=True)
    is_row_R1 = (expert_R < local)[order_R][:, None]
    sorted_RD = jnp.where(is_row_R1, got_RD.at[order_R].get(unique_indices=True), 0)
    made_RD = jnp.where(is_row_R1, apply(sorted_RD, counts_WE.sum(0)), 0)
    back_RD = jnp.zeros_like(made_RD).at[order_R].set(made_RD, unique_indices=True)
    return _exchange_parts(back_RD.reshape(ways, rows, width)).reshape(ways * rows, width)


def dispatch_within_capacity(
    x_BLD: Array,
    expert_BLK: Array,
    real_BL: Array,
    experts: int,
    ways: int,
    capacity: float,
    apply: ApplyStacked,
) -> tuple[Array, Array]:
    """Return each token's outputs [B, L, K, D], zero without a place, and the places.

    An expert takes up to `capacity` times an even share of the tokens of an example.
    Earlier tokens come before later ones, and then first choices before second ones, so that no
    token depends on a later one. Padding, where `real_BL` is 0, takes no place. Lepikhin et al.
    2020 (GShard), but for the order.
    """
    batch, length, per_token = expert_BLK.shape
    count = min(length, math.ceil(capacity * length * per_token / experts))
    total, width, is_real_BL1 = experts * batch * count, x_BLD.shape[-1], real_BL[..., None] > 0
    rank_BLK = _rank_within_expert(jnp.where(is_real_BL1, expert_BLK, experts), experts + 1)
    has_place_BLK = (rank_BLK < count) & is_real_BL1
    example_B11 = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    row_BLK = (expert_BLK * batch + example_B11) * count + rank_BLK
    outside_BLK = total + jnp.arange(expert_BLK.size, dtype=jnp.int32).reshape(expert_BLK.shape)
    place_P = jnp.where(has_place_BLK, row_BLK, outside_BLK).reshape(-1)
    rows_PD = jnp.repeat(x_BLD.reshape(-1, width), per_token, axis=0)
    sent_RD = jnp.zeros((total, width), x_BLD.dtype)
    sent_RD = sent_RD.at[place_P].set(rows_PD, mode="drop", unique_indices=True)
    made_ERD = _apply_stacked(sent_RD.reshape(experts, batch * count, width), ways, apply)
    made_RD = made_ERD.reshape(total, width)
    made_PD = made_RD.at[place_P].get(mode="fill", fill_value=0, unique_indices=True)
    return made_PD.reshape(batch, length, per_token, width), has_place_BLK


def _apply_stacked(sent_ERD: Array, ways: int, apply: ApplyStacked) -> Array:
    if ways == 1:
        return apply(sent_ERD)
    experts, rows, width = sent_ERD.shape
    got_WERD = _exchange_parts(sent_ERD.reshape(ways, experts // ways, rows, width))
    made_ERD = apply(got_WERD.swapaxes(0, 1).reshape(experts // ways, ways * rows, width))
    made_WERD = made_ERD.reshape(experts // ways, ways, rows, width).swapaxes(0, 1)
    return _exchange_parts(made_WERD).reshape(experts, rows, width)


def _rank_within_expert(expert_BLK: Array, experts: int) -> Array:
    """Count the pairs of the same example and expert before each pair."""
    batch, length, per_token = expert_BLK.shape
    expert_BP = expert_BLK.reshape(batch, length * per_token)
    order_BP = jnp.argsort(expert_BP, axis=1, stable=True)

    def count_starts(expert_P: Array) -> Array:
        return _exclusive_cumsum(_count_pairs(expert_P, experts))

    starts_BE = jax.vmap(count_starts)(expert_BP)
    starts_BP = jnp.take_along_axis(starts_BE, jnp.take_along_axis(expert_BP, order_BP, 1), 1)
    sorted_BP = jnp.arange(length * per_token, dtype=jnp.int32)[None, :] - starts_BP
    rank_BP = jnp.take_along_axis(sorted_BP, jnp.argsort(order_BP, axis=1), 1)
    return rank_BP.reshape(batch, length, per_token)


def _count_pairs(expert_P: Array, experts: int) -> Array:
    expert_E = jnp.arange(experts, dtype=expert_P.dtype)
    return (expert_P[:, None] == expert_E[None, :]).sum(0, dtype=jnp.int32)


def _exclusive_cumsum(counts: Array) -> Array:
    return jnp.cumsum(counts) - counts


def _exchange_parts(parts: Array) -> Array:
    """Send part w of each device to device w: [W, ...] -> [W, ...], by sender."""
    result: Array = jax.lax.all_to_all(parts, EXPERT_AXIS, split_axis=0, concat_axis=0)
    return result
