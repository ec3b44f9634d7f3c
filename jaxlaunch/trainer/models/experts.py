"""A mixture of experts: a router sends each token to a few MLPs and sums their outputs.

The router scores all experts for each token and chooses the best K. If the experts are split over
the mesh axis `ep`, one all-to-all sends each token to the devices of its experts, and a second one
returns the outputs. The layer runs on each device by itself (inside `shard_map`), so every size is
static. Without a capacity the buffers are large enough for any routing, and every token reaches its
experts. With a capacity they hold a fixed number of tokens per example and expert, and tokens
beyond that are left out. The set of these tokens does not depend on the mesh.

Shazeer et al. 2017; Fedus et al. 2022 (Switch); Zoph et al. 2022 (the z-loss); Jiang et al. 2024
(Mixtral).

B batch, L length, D model, E experts, K experts per token, F hidden units of an expert, M layers
with experts, S shards of the batch, T tokens on a device, P = T × K pairs of a token and an expert,
W devices along ep, R rows of a buffer.
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

# With more experts than this, only the largest and the smallest load are metrics.
MAX_LISTED_EXPERTS = 32
# The mesh axis over which experts are split.
EXPERT_AXIS = "ep"

# (rows_RD sorted by expert, counts_E of rows per expert) -> outputs_RD.
ApplyGrouped = Callable[[Array, Array], Array]
# rows_ERD -> outputs_ERD.
ApplyStacked = Callable[[Array], Array]


class Mixture(NamedTuple):
    """The properties of a decoder's experts that its loss needs.

    Attributes:
        layers: Number of layers with experts.
        experts: Number of experts in each of them.
        has_capacity: Whether an expert has a limited number of places.
        balance: Weight of the load-balancing loss.
        router_z: Weight of the router's z-loss.
    """

    layers: int
    experts: int
    has_capacity: bool
    balance: float
    router_z: float

    @classmethod
    def from_config(cls, config: spec.Decoder) -> Mixture:
        """Return the properties of the experts of a decoder that has some."""
        return cls(
            layers=len(config.sparse_layers),
            experts=config.experts or 0,
            has_capacity=config.capacity is not None,
            balance=config.balance,
            router_z=config.router_z,
        )

    @property
    def is_penalized(self) -> bool:
        """Whether the loss has a penalty on the routing."""
        return bool(self.balance or self.router_z)

    def compute_penalty(self, part: Routing, whole: Routing) -> Array:
        """Return the contribution of the tokens in `part` to the penalty of the batch `whole`.

        The contributions of the parts of a batch add up to its penalty, and their gradients add up
        to its gradient, because only counts, which have no gradient, are taken from `whole`.
        """
        rows = whole.rows
        load_E = jax.lax.stop_gradient(whole.chosen_ME.sum(0) / rows)
        balance = self.experts * (load_E * part.share_E).sum() / rows
        return self.balance * balance + self.router_z * part.z / rows


class LayerCounts(NamedTuple):
    """Sums over the tokens of a layer that are not padding, by shard of the batch, in float32.

    Attributes:
        chosen_SE: Number of tokens that chose each expert.
        share_SE: Sum of the router's probability of each expert.
        z_S: Sum of the squared log of the softmax's denominator.
        left_out_S: Number of choices for which the expert had no place.
    """

    chosen_SE: Array
    share_SE: Array
    z_S: Array
    left_out_S: Array


class RoutingTotals(NamedTuple):
    """LayerCounts summed over layers, except for `chosen`, which is counted by layer."""

    chosen_MSE: Array
    share_SE: Array
    z_S: Array
    left_out_S: Array

    @classmethod
    def zeros(cls, mixture: Mixture) -> RoutingTotals:
        """Return the totals before the first layer."""
        mesh = jax.sharding.get_abstract_mesh()
        shards = 1 if mesh.empty else meshes.count_shards(mesh)
        zeros_SE = constrain(jnp.zeros((shards, mixture.experts), jnp.float32), "batch", None)
        zeros_S = constrain(jnp.zeros(shards, jnp.float32), "batch")
        chosen_MSE = jnp.zeros((mixture.layers, *zeros_SE.shape), jnp.float32)
        return cls(constrain(chosen_MSE, None, "batch", None), zeros_SE, zeros_S, zeros_S)

    def add_layer(self, counts: LayerCounts, layer_M: Array) -> RoutingTotals:
        """Return the totals with the counts of the layer whose index is one-hot in `layer_M`."""
        chosen_MSE = self.chosen_MSE + layer_M[:, None, None] * counts.chosen_SE[None]
        return RoutingTotals(chosen_MSE, *map(jnp.add, self[1:], counts[1:]))

    def sum_parts(self, tokens: Array, mixture: Mixture) -> Routing:
        """Return the sums over all shards of a batch with `tokens` tokens that are not padding."""
        left_out = jax.lax.stop_gradient(self.left_out_S.sum()) if mixture.has_capacity else None
        chosen_ME = jax.lax.stop_gradient(self.chosen_MSE.sum(1))
        return Routing(chosen_ME, self.share_SE.sum(0), self.z_S.sum(), tokens, left_out)


class Routing(NamedTuple):
    """Sums over the tokens of a batch that are not padding.

    The sums of micro-batches can be added. The balance loss and the load metrics are products and
    extremes of these sums, so they must be computed from the sums of the whole batch: their mean
    over micro-batches would depend on the number of micro-batches.

    Attributes:
        chosen_ME: Number of tokens that chose each expert of each layer.
        share_E: Sum of the router's probability of each expert, over layers.
        z: Sum of the squared log of the softmax's denominator, over layers.
        tokens: Number of tokens.
        left_out: Number of choices for which the expert had no place; None without a capacity.
    """

    chosen_ME: Array
    share_E: Array
    z: Array
    tokens: Array
    left_out: Array | None

    @property
    def rows(self) -> Array:
        """Number of tokens times layers, the divisor of means. An empty batch counts as a token."""
        return _nonzero(self.tokens) * self.chosen_ME.shape[0]

    def metric_means(self) -> dict[str, Array]:
        """Return the terms of the loss and the metrics by name. Works for JAX and NumPy arrays.

        - `balance_loss` is load_balancing_loss_func of transformers: E times the sum over experts
          of the fraction of tokens that chose the expert times its mean probability.
        - `expert_load/3` is the share of all choices that fell on expert 3.
        - `expert_load_max` and `expert_load_min` are the largest and the smallest load of an expert
          in any layer, relative to an even load.
        - `expert_left_out` is the share of choices for which the expert had no place.
        """
        chosen_ME, rows, choices = self.chosen_ME, self.rows, _nonzero(self.chosen_ME.sum())
        (layers, experts), chosen_E = chosen_ME.shape, chosen_ME.sum(0)
        even_load = choices / (layers * experts)
        means = {
            "balance_loss": experts * (chosen_E / rows * (self.share_E / rows)).sum(),
            "router_z_loss": self.z / rows,
            "expert_load_max": chosen_ME.max() / even_load,
            "expert_load_min": chosen_ME.min() / even_load,
        }
        if self.left_out is not None:
            means["expert_left_out"] = self.left_out / choices
        listed = range(experts) if experts <= MAX_LISTED_EXPERTS else ()
        return means | {f"expert_load/{expert}": chosen_E[expert] / choices for expert in listed}


def _nonzero(count: Array) -> Array:
    """Return the count, or 1 where it is 0, for use as a divisor."""
    is_zero: Array = count == 0
    return count + is_zero.astype(count.dtype)


class Experts(nnx.Module):
    """The sum over a token's K experts of share × (activation(x · gate) * (x · up)) · down."""

    def __init__(self, config: spec.Decoder, rngs: nnx.Rngs) -> None:
        width, hidden, experts = config.width, config.expert_units, config.experts or 0
        axes = ("experts", "embed", "hidden")
        self.router = init_weight(rngs, (width, experts), ("embed", None), width**-0.5)
        self.gate = init_weight(rngs, (experts, width, hidden), axes, width**-0.5)
        self.up = init_weight(rngs, (experts, width, hidden), axes, width**-0.5)
        std = (2 * config.layers * hidden) ** -0.5
        self.down = init_weight(rngs, (experts, hidden, width), ("experts", "hidden", "embed"), std)
        self.activation, self.capacity = ACTIVATIONS[config.activation], config.capacity
        self.per_token = config.experts_per_token
        self.normalizes_shares = config.experts_normalized

    def __call__(self, x_BLD: Array, real_BL: Array) -> tuple[Array, LayerCounts]:
        """Return the output [B, L, D], with all positions on a device, and the routing's counts."""
        # The router needs full float32 precision, even on devices that multiply float32 in fewer
        # bits by default: rounding would send tokens to other experts.
        router_DE = self.router[...].astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            logits_BLE = apply_kernel(x_BLD.astype(jnp.float32), router_DE)
        logits_BLE = constrain(logits_BLE, "batch", "length", None)
        arrays = x_BLD, logits_BLE, real_BL, self.gate[...], self.up[...], self.down[...]
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return self._apply_shard(*arrays, devices=1, hidden_axis=None)
        hidden_axis = "mp" if mesh.shape["mp"] > 1 else None
        apply = partial(self._apply_shard, devices=mesh.shape["ep"], hidden_axis=hidden_axis)
        batch_spec = PartitionSpec(BATCH_AXES)
        up_spec = PartitionSpec("ep", None, hidden_axis)
        down_spec = PartitionSpec("ep", hidden_axis, None)
        in_specs = batch_spec, batch_spec, batch_spec, up_spec, up_spec, down_spec
        sharded: Any = jax.shard_map(apply, in_specs=in_specs, out_specs=(batch_spec, batch_spec))
        result: tuple[Array, LayerCounts] = sharded(*arrays)
        return result

    def _apply_shard(
        self,
        x_BLD: Array,
        logits_BLE: Array,
        real_BL: Array,
        gate_EDF: Array,
        up_EDF: Array,
        down_EFD: Array,
        *,
        devices: int,
        hidden_axis: str | None,
    ) -> tuple[Array, LayerCounts]:
        """Apply the layer to the examples of one device.

        The device has its part of the experts, which are split over `devices` devices, and of their
        hidden units, which are split over the mesh axis `hidden_axis`.
        """
        shape, experts = x_BLD.shape, logits_BLE.shape[-1]
        shares_BLE = jax.nn.softmax(logits_BLE)
        share_BLK, expert_BLK = jax.lax.top_k(shares_BLE, self.per_token)
        if self.normalizes_shares:
            share_BLK = share_BLK / share_BLK.sum(-1, keepdims=True)
        has_place_BLK = None
        weights = gate_EDF, up_EDF, down_EFD
        if self.capacity is None:
            x_TD, expert_TK = x_BLD.reshape(-1, shape[-1]), expert_BLK.reshape(-1, self.per_token)
            apply = partial(self._apply_grouped, expert_BLK.size, *weights)
            output_TKD = dispatch_sorted(x_TD, expert_TK, experts, devices, apply)
            output_BLKD = output_TKD.reshape(*expert_BLK.shape, shape[-1])
        else:
            apply = partial(self._apply_equal_rows, expert_BLK.size, *weights)
            output_BLKD, has_place_BLK = dispatch_within_capacity(
                x_BLD, expert_BLK, real_BL, experts, devices, self.capacity, apply
            )
        output_BLD = (share_BLK.astype(output_BLKD.dtype)[..., None] * output_BLKD).sum(2)
        if hidden_axis is not None:
            output_BLD = jax.lax.psum(output_BLD, hidden_axis)
        return output_BLD, _count_tokens(logits_BLE, shares_BLE, expert_BLK, has_place_BLK, real_BL)

    def _apply_grouped(
        self, pairs: int, gate: Array, up: Array, down: Array, x_RD: Array, counts_E: Array
    ) -> Array:
        """Apply each expert to its group of `counts_E` rows; at most `pairs` rows are in use."""
        uses_loop = platform() == "gpu" and grouped.is_loop_faster(pairs, len(x_RD), gate.shape)
        multiply = partial(grouped.grouped_product, rows=pairs) if uses_loop else jax.lax.ragged_dot
        with jax.named_scope(flops.share_scope(pairs, len(x_RD))):
            gate_RF = checkpoint_name(multiply(x_RD, gate, counts_E), "gate")
            up_RF = checkpoint_name(multiply(x_RD, up, counts_E), "up")
            return multiply(gated_activation(self.activation, gate_RF, up_RF), down, counts_E)

    def _apply_equal_rows(
        self, pairs: int, gate: Array, up: Array, down: Array, x_ERD: Array
    ) -> Array:
        """Apply each expert to its R rows; at most `pairs` rows are in use."""
        rows = x_ERD.shape[0] * x_ERD.shape[1]
        with jax.named_scope(flops.share_scope(min(pairs, rows), rows)):
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


# --- dispatch of tokens to experts ----------------------------------------------------------------


def dispatch_sorted(
    x_TD: Array, expert_TK: Array, experts: int, devices: int, apply: ApplyGrouped
) -> Array:
    """Return each token's outputs [T, K, D]; `apply` receives the rows sorted by expert.

    The buffer to each of `devices` devices has as many rows as it could need for any routing.
    """
    (tokens, per_token), local_experts = expert_TK.shape, experts // devices
    pairs = tokens * per_token
    rows = pairs if devices == 1 else tokens * min(per_token, local_experts)
    expert_P, index_P = expert_TK.reshape(pairs), jnp.arange(pairs, dtype=jnp.int32)
    order_P = jnp.argsort(expert_P, stable=True)
    counts_WE = _count_pairs(expert_P, experts).reshape(devices, local_experts)
    starts_W = _exclusive_cumsum(counts_WE.sum(1))
    device_P = expert_P[order_P] // local_experts
    sorted_row_P = device_P * rows + index_P - starts_W[device_P]
    row_P = jnp.zeros_like(index_P).at[order_P].set(sorted_row_P, unique_indices=True)
    sent_RD = jnp.zeros((devices * rows, x_TD.shape[1]), x_TD.dtype)
    sent_RD = sent_RD.at[row_P].set(jnp.repeat(x_TD, per_token, axis=0), unique_indices=True)
    if devices == 1:
        output_RD = apply(sent_RD, counts_WE[0])
    else:
        output_RD = _apply_remotely(sent_RD, counts_WE, apply)
    return output_RD.at[row_P].get(unique_indices=True).reshape(tokens, per_token, -1)


def _apply_remotely(sent_RD: Array, counts_WE: Array, apply: ApplyGrouped) -> Array:
    """Return the outputs of the experts for `sent_RD`, which has an equal part for each device.

    Each device sorts the rows that it receives by expert, applies its experts, restores the order
    and sends the outputs back.
    """
    (devices, local_experts), width = counts_WE.shape, sent_RD.shape[1]
    rows = sent_RD.shape[0] // devices
    # The counts tell the receiver which rows are for which of its experts.
    all_counts_WWE = jax.lax.all_gather(counts_WE, EXPERT_AXIS)
    counts_WE = all_counts_WWE[:, jax.lax.axis_index(EXPERT_AXIS)]
    received_WRD = _exchange_parts(sent_RD.reshape(devices, rows, width))
    received_RD = received_WRD.reshape(devices * rows, width)
    ends_RE = jnp.repeat(jnp.cumsum(counts_WE, axis=1), rows, axis=0)
    index_R = jnp.tile(jnp.arange(rows, dtype=ends_RE.dtype), devices)
    # An unused row has the number after that of the last expert.
    expert_R = (index_R[:, None] >= ends_RE).sum(1)
    order_R = jnp.argsort(expert_R, stable=True)
    is_used_R1 = (expert_R < local_experts)[order_R][:, None]
    sorted_RD = jnp.where(is_used_R1, received_RD.at[order_R].get(unique_indices=True), 0)
    output_RD = jnp.where(is_used_R1, apply(sorted_RD, counts_WE.sum(0)), 0)
    returned_RD = jnp.zeros_like(output_RD).at[order_R].set(output_RD, unique_indices=True)
    returned_WRD = _exchange_parts(returned_RD.reshape(devices, rows, width))
    return returned_WRD.reshape(devices * rows, width)


def dispatch_within_capacity(
    x_BLD: Array,
    expert_BLK: Array,
    real_BL: Array,
    experts: int,
    devices: int,
    capacity: float,
    apply: ApplyStacked,
) -> tuple[Array, Array]:
    """Return each token's outputs [B, L, K, D] and which of them had a place [B, L, K].

    An expert has places for `capacity` times an even share of the tokens of an example. They are
    taken by earlier tokens first, and by first choices before second ones, so that no token depends
    on a later one. Padding, where `real_BL` is 0, takes no place. The output of a choice without a
    place is 0. Except for the order, this is Lepikhin et al. 2020 (GShard).
    """
    batch, length, per_token = expert_BLK.shape
    places = min(length, math.ceil(capacity * length * per_token / experts))
    rows, width, is_real_BL1 = experts * batch * places, x_BLD.shape[-1], real_BL[..., None] > 0
    rank_BLK = _rank_within_expert(jnp.where(is_real_BL1, expert_BLK, experts), experts + 1)
    has_place_BLK = (rank_BLK < places) & is_real_BL1
    example_B11 = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    row_BLK = (expert_BLK * batch + example_B11) * places + rank_BLK
    # Choices without a place get distinct indices past the end of the buffer.
    outside_BLK = rows + jnp.arange(expert_BLK.size, dtype=jnp.int32).reshape(expert_BLK.shape)
    row_P = jnp.where(has_place_BLK, row_BLK, outside_BLK).reshape(-1)
    x_PD = jnp.repeat(x_BLD.reshape(-1, width), per_token, axis=0)
    sent_RD = jnp.zeros((rows, width), x_BLD.dtype)
    sent_RD = sent_RD.at[row_P].set(x_PD, mode="drop", unique_indices=True)
    output_ERD = _apply_stacked(sent_RD.reshape(experts, batch * places, width), devices, apply)
    output_RD = output_ERD.reshape(rows, width)
    output_PD = output_RD.at[row_P].get(mode="fill", fill_value=0, unique_indices=True)
    return output_PD.reshape(batch, length, per_token, width), has_place_BLK


def _apply_stacked(sent_ERD: Array, devices: int, apply: ApplyStacked) -> Array:
    if devices == 1:
        return apply(sent_ERD)
    experts, rows, width = sent_ERD.shape
    local_experts = experts // devices
    received_WERD = _exchange_parts(sent_ERD.reshape(devices, local_experts, rows, width))
    received_ERD = received_WERD.swapaxes(0, 1).reshape(local_experts, devices * rows, width)
    output_ERD = apply(received_ERD)
    output_WERD = output_ERD.reshape(local_experts, devices, rows, width).swapaxes(0, 1)
    return _exchange_parts(output_WERD).reshape(experts, rows, width)


def _rank_within_expert(expert_BLK: Array, experts: int) -> Array:
    """Return, for each choice, the number of earlier choices of the same expert in the example."""
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
    """Send part w to device w of the expert axis; return the received parts by sender."""
    result: Array = jax.lax.all_to_all(parts, EXPERT_AXIS, split_axis=0, concat_axis=0)
    return result
