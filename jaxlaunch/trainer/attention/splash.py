"""JAX's splash attention for TPU, with block sizes and a split over the devices.

B batch, L length, H query heads, G key and value heads, K head size.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

from jaxlaunch.trainer.attention.implementations import Scores
from jaxlaunch.trainer.parallel.sharding import RULES

# The sides of every block are multiples of this.
LANES = 128
# The largest side that divides the length is used.
BLOCKS = (512, 256, LANES)
Ids = tuple[Array, Array]  # segments of queries and of keys, [B, L] each


def splash_attention(
    query_BLHK: Array,
    key_BLGK: Array,
    value_BLGK: Array,
    ids: Ids | None,
    scores: Scores,
    *,
    name: str | None = None,
    interpret: bool = False,
) -> Array:
    """Return out_BLHK. Each device computes its own rows and heads.

    A policy of remat knows the result, and the log-sums of its backward pass, by `name`.
    `interpret` runs on any device, slowly. Raises ValueError if no block size divides the length.
    """

    def attend_locally(query: Array, key: Array, value: Array, ids: Ids | None) -> Array:
        kernel = _make_kernel(query.shape[1], query.shape[2], scores, name, interpret)
        scale = query.shape[3] ** -0.5 if scores.scale is None else scores.scale
        scaled_query = (query.astype(jnp.float32) * scale).astype(query.dtype)
        heads_first = (operand.swapaxes(1, 2) for operand in (scaled_query, key, value))
        segments = None if ids is None else kernels.SegmentIds(*ids)
        mixed_BHLK = jax.vmap(kernel)(*heads_first, segments)
        assert isinstance(mixed_BHLK, Array), "the kernel was made without residuals"
        return mixed_BHLK.swapaxes(1, 2)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return attend_locally(query_BLHK, key_BLGK, value_BLGK, ids)
    axes_of = dict(RULES)
    if query_BLHK.shape[0] % math.prod(mesh.shape[axis] for axis in axes_of["batch"]):
        # A bare loss is evaluated one row at a time.
        axes_of["batch"] = ()
    rows, query, key = (PartitionSpec(*(axes_of[axis] or None for axis in axes)) for axes in AXES)
    split = jax.shard_map(
        attend_locally,
        mesh=mesh,
        in_specs=(query, key, key, None if ids is None else (rows, rows)),
        out_specs=query,
        # The kernel does not declare the axes over which it varies.
        check_vma=False,
    )
    return split(query_BLHK, key_BLGK, value_BLGK, ids)


AXES = (
    ("batch", "length"),
    ("batch", "length", "heads", "head"),
    ("batch", "length", "kv_heads", "head"),
)


def _make_kernel(
    length: int, heads: int, scores: Scores, name: str | None, interpret: bool
) -> kernels.SplashAttentionKernel:
    side = next((side for side in BLOCKS if length % side == 0), None)
    if side is None:
        raise ValueError(f"its blocks are of {LANES} positions, which do not divide {length}")
    shape = (length, length)
    mask: masks.Mask = masks.FullMask(shape)
    if scores.is_causal and scores.window is not None and scores.window < length:
        mask = masks.LocalMask(shape, (scores.window - 1, 0), offset=0)
    elif scores.is_causal:
        mask = masks.CausalMask(shape)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sides: dict[str, Any] = dict.fromkeys(names, side)
    sizes = kernels.BlockSizes(**sides)
    result: kernels.SplashAttentionKernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=name,
        attn_logits_soft_cap=scores.cap,
        interpret=interpret,
    )
    return result
