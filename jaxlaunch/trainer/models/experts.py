"""An MLP of experts: a router sends each token to a few of them, and adds up what they make of it.

Shazeer et al. 2017; Fedus et al. 2022 (Switch); Zoph et al. 2022 (the z-loss); Jiang et al. 2024 (Mixtral).

B batch, L length, D model, E experts, K experts of a token, F hidden units of an expert, M layers with experts,
S parts of the batch, one on a device, T tokens of a part, P pairs of a token and an expert, R rows of a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from jaxlaunch.trainer.models.layers import gated, platform, product, weight
from jaxlaunch.trainer.numerics import flops, grouped
from jaxlaunch.trainer.parallel import dispatch
from jaxlaunch.trainer.parallel.sharding import constrain

LISTED = 32  # experts of which each has a metric of its own; of more, the extremes alone


class Mixture(NamedTuple):
    """What a decoder's loss has to know of its experts."""

    layers: int  # those with experts
    experts: int
    each: int  # experts of a token
    has_capacity: bool
    balance: float
    router_z: float

    @classmethod
    def of(cls, config: spec.Decoder) -> Mixture:
        """That of a decoder with experts."""
        return cls(
            layers=len(config.sparse_layers),
            experts=config.experts or 0,
            each=config.experts_per_token,
            has_capacity=config.capacity is not None,
            balance=config.balance,
            router_z=config.router_z,
        )

    @property
    def is_penalized(self) -> bool:
        """Whether it adds anything."""
        return bool(self.balance or self.router_z)

    def penalty(self, means: Mapping[str, Array]) -> Array:
        """What the loss adds to the cross-entropy."""
        return self.balance * means["balance_loss"] + self.router_z * means["router_z_loss"]


class Counts(NamedTuple):
    """Sums over the real tokens of a layer, for each part of the batch. Float32."""

    chosen_SE: Array  # tokens that chose an expert
    share_SE: Array  # of an expert, the router's probability
    z_S: Array  # squared log of the softmax's denominator
    left_out_S: Array  # of a token, the experts that had no place for it


class Routed(NamedTuple):
    """The same over layers: which experts were chosen by layer, the rest as sums."""

    chosen_MSE: Array
    share_SE: Array
    z_S: Array
    left_out_S: Array

    @classmethod
    def none(cls, of: Mixture) -> Routed:
        """Zeros, before the first layer."""
        mesh = jax.sharding.get_abstract_mesh()
        parts = 1 if mesh.empty else _parts(mesh)
        by_expert = constrain(jnp.zeros((parts, of.experts), jnp.float32), "batch", None)
        alone = constrain(jnp.zeros(parts, jnp.float32), "batch")
        chosen = constrain(jnp.zeros((of.layers, parts, of.experts), jnp.float32), None, "batch", None)
        return cls(chosen, by_expert, alone, alone)

    def plus(self, of: Counts, place_M: Array) -> Routed:
        """With those of one more layer, the one where `place_M` is 1."""
        chosen_MSE = self.chosen_MSE + place_M[:, None, None] * of.chosen_SE[None]
        return Routed(chosen_MSE, *(have + more for have, more in zip(self[1:], of[1:], strict=True)))

    def means(self, tokens: Array, of: Mixture) -> dict[str, Array]:
        """What is minimized and reported of it, by name; `tokens` are the real ones of the batch.

        `balance_loss` is transformers' load_balancing_loss_func: E times the sum over experts of the tokens that chose
        one times its probability, both as means over tokens and layers. `expert_load/3` is the share of all choices
        that number 3 had, `expert_load_max` and `expert_load_min` the most and the least that an expert of a layer had,
        in even shares, `expert_left_out` the share of choices that found no place.
        """
        layers, experts, each = of.layers, of.experts, of.each
        rows = jnp.maximum(tokens, 1.0) * layers
        chosen_ME = jax.lax.stop_gradient(self.chosen_MSE.sum(1))
        load_E = chosen_ME.sum(0) / (rows * each)
        even = rows * each / (layers * experts)
        found = {
            "balance_loss": experts * (load_E * each * self.share_SE.sum(0) / rows).sum(),
            "router_z_loss": self.z_S.sum() / rows,
            "expert_load_max": chosen_ME.max() / even,
            "expert_load_min": chosen_ME.min() / even,
        }
        if of.has_capacity:
            found["expert_left_out"] = jax.lax.stop_gradient(self.left_out_S.sum()) / (rows * each)
        listed = range(experts) if experts <= LISTED else ()
        return found | {f"expert_load/{number}": load_E[number] for number in listed}


class Experts(nnx.Module):
    """The sum over a token's K experts of its share × (activation(x · gate) * (x · up)) · down."""

    def __init__(
        self, config: spec.Decoder, rngs: nnx.Rngs, activations: Mapping[str, Callable[[Array], Array]]
    ) -> None:
        width, hidden, experts = config.width, config.expert_units, config.experts or 0
        axes = ("experts", "embed", "hidden")
        self.router = weight(rngs, (width, experts), ("embed", None), width**-0.5)
        self.gate = weight(rngs, (experts, width, hidden), axes, width**-0.5)
        self.up = weight(rngs, (experts, width, hidden), axes, width**-0.5)
        std = (2 * config.layers * hidden) ** -0.5
        self.down = weight(rngs, (experts, hidden, width), ("experts", "hidden", "embed"), std)
        self.activation = activations[config.activation]
        self.each, self.is_normal, self.capacity = config.experts_per_token, config.experts_normalized, config.capacity

    def __call__(self, x_BLD: Array, real_BL: Array) -> tuple[Array, Counts]:
        """The stream's share of this layer, whole, and where its tokens went."""
        # As wide as the stream allows, also where a device multiplies float32 in fewer bits: a router that rounds sends
        # tokens elsewhere.
        with jax.default_matmul_precision("highest"):
            logits_BLE = product(x_BLD.astype(jnp.float32), self.router[...].astype(jnp.float32))
        logits_BLE = constrain(logits_BLE, "batch", "length", None)
        arrays = x_BLD, logits_BLE, real_BL, self.gate[...], self.up[...], self.down[...]
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return self._of_part(*arrays, ways=1, over=None)
        over = "mp" if mesh.shape["mp"] > 1 else None
        rows, into, out = PartitionSpec(BATCH_AXES), PartitionSpec("ep", None, over), PartitionSpec("ep", over, None)
        on_each: Any = jax.shard_map(
            partial(self._of_part, ways=mesh.shape["ep"], over=over),
            in_specs=(rows, rows, rows, into, into, out),
            out_specs=(rows, rows),
        )
        found: tuple[Array, Counts] = on_each(*arrays)
        return found

    def _of_part(
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
    ) -> tuple[Array, Counts]:
        """The same for the examples of one device, with the experts and the hidden units that it holds."""
        shape, experts = x_BLD.shape, logits_BLE.shape[-1]
        shares_BLE = jax.nn.softmax(logits_BLE)
        share_BLK, expert_BLK = jax.lax.top_k(shares_BLE, self.each)
        if self.is_normal:
            share_BLK = share_BLK / share_BLK.sum(-1, keepdims=True)
        has_place_BLK = None
        if self.capacity is None:
            x_TD, expert_TK = x_BLD.reshape(-1, shape[-1]), expert_BLK.reshape(-1, self.each)
            grouped = partial(self._grouped, expert_BLK.size, gate_EDF, up_EDF, down_EFD)
            made_TKD = dispatch.sorted_by_expert(x_TD, expert_TK, experts, ways, grouped)
            made_BLKD = made_TKD.reshape(*expert_BLK.shape, shape[-1])
        else:
            stacked = partial(self._stacked, expert_BLK.size, gate_EDF, up_EDF, down_EFD)
            made_BLKD, has_place_BLK = dispatch.within_capacity(
                x_BLD, expert_BLK, real_BL, experts, ways, self.capacity, stacked
            )
        made_BLD = (share_BLK.astype(made_BLKD.dtype)[..., None] * made_BLKD).sum(2)
        if over is not None:  # each device has its share of the hidden units
            made_BLD = jax.lax.psum(made_BLD, over)
        return made_BLD, _counts(logits_BLE, shares_BLE, expert_BLK, has_place_BLK, real_BL)

    def _grouped(
        self, pairs: int, gate_EDF: Array, up_EDF: Array, down_EFD: Array, x_RD: Array, counts_E: Array
    ) -> Array:
        """The rows of each expert one after the other, so many of each; `pairs` of them count as work."""
        is_loop = platform() == "gpu" and grouped.is_worth_it(pairs, len(x_RD), gate_EDF.shape)
        multiplied = partial(grouped.product, rows=pairs) if is_loop else jax.lax.ragged_dot
        with jax.named_scope(flops.share_scope(pairs, len(x_RD))):
            gate_RF = checkpoint_name(multiplied(x_RD, gate_EDF, counts_E), "gate")
            up_RF = checkpoint_name(multiplied(x_RD, up_EDF, counts_E), "up")
            return multiplied(gated(self.activation, gate_RF, up_RF), down_EFD, counts_E)

    def _stacked(self, pairs: int, gate_EDF: Array, up_EDF: Array, down_EFD: Array, x_ERD: Array) -> Array:
        """As many rows of each expert."""
        room = x_ERD.shape[0] * x_ERD.shape[1]
        with jax.named_scope(flops.share_scope(min(pairs, room), room)):
            gate_ERF = checkpoint_name(jnp.einsum("erd,edf->erf", x_ERD, gate_EDF), "gate")
            up_ERF = checkpoint_name(jnp.einsum("erd,edf->erf", x_ERD, up_EDF), "up")
            return jnp.einsum("erf,efd->erd", gated(self.activation, gate_ERF, up_ERF), down_EFD)


def _counts(
    logits_BLE: Array, shares_BLE: Array, expert_BLK: Array, has_place_BLK: Array | None, real_BL: Array
) -> Counts:
    """Of one part of the batch."""
    index_E = jnp.arange(logits_BLE.shape[-1], dtype=expert_BLK.dtype)
    is_chosen_BLE = (expert_BLK[..., None] == index_E[None, None, None, :]).any(2)
    real_BL1 = real_BL[..., None]
    z_BL = jnp.square(jax.nn.logsumexp(logits_BLE, axis=-1))
    left_out_S = jnp.zeros_like(real_BL, shape=(1,))
    if has_place_BLK is not None:
        left_out_S = jnp.where(has_place_BLK, 0.0, real_BL1).sum()[None]
    return Counts(
        chosen_SE=jnp.where(is_chosen_BLE, real_BL1, 0.0).sum((0, 1))[None],
        share_SE=(shares_BLE * real_BL1).sum((0, 1))[None],
        z_S=(z_BL * real_BL).sum()[None],
        left_out_S=left_out_S,
    )


def _parts(mesh: jax.sharding.AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
