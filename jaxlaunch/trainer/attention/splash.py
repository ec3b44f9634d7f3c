"""JAX's splash attention for TPU, with a choice of block sizes and sharded by `shard_map`.

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

# The block sizes are multiples of this.
LANES = 128
# Block sizes, of which the largest that divides the length is used.
BLOCKS = (512, 256, LANES)
# Logical axes of the operands, which the rules of sharding map to the mesh.
SEGMENTS_AXES = ("batch", "length")
QUERY_AXES = ("batch", "length", "heads", "head")
KEY_AXES = ("batch", "length", "kv_heads", "head")
# Segments of the queries and of the keys, each [B, L].
SegmentIds = tuple[Array, Array]


def splash_attention(
    query_BLHK: Array,
    key_BLGK: Array,
    value_BLGK: Array,
    segment_ids: SegmentIds | None,
    scores: Scores,
    *,
    name: str | None = None,
    interpret: bool = False,
) -> Array:
    """Return the output [B, L, H, K]. Each device computes its own rows and heads.

    Args:
        query_BLHK: Queries.
        key_BLGK: Keys.
        value_BLGK: Values.
        segment_ids: Segments; a query sees only the keys of its own segment.
        scores: Options of the scores.
        name: Name by which a policy of rematerialization keeps the output and its log-sums.
        interpret: Whether to run the kernel in Pallas' interpreter, slowly, on any device.

    Raises:
        ValueError: No block size divides the length.
    """

    def attend_locally(
        query: Array, key: Array, value: Array, segment_ids: SegmentIds | None
    ) -> Array:
        kernel = _make_kernel(query.shape[1], query.shape[2], scores, name, interpret)
        scale = query.shape[3] ** -0.5 if scores.scale is None else scores.scale
        scaled_query = (query.astype(jnp.float32) * scale).astype(query.dtype)
        heads_first = (operand.swapaxes(1, 2) for operand in (scaled_query, key, value))
        segments = None if segment_ids is None else kernels.SegmentIds(*segment_ids)
        mixed_BHLK = jax.vmap(kernel)(*heads_first, segments)
        assert isinstance(mixed_BHLK, Array), "the kernel was made without residuals"
        return mixed_BHLK.swapaxes(1, 2)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return attend_locally(query_BLHK, key_BLGK, value_BLGK, segment_ids)
    mesh_axes = dict(RULES)
    if query_BLHK.shape[0] % math.prod(mesh.shape[axis] for axis in mesh_axes["batch"]):
        # A task whose loss is a plain mean is evaluated one row at a time, which cannot be split.
        mesh_axes["batch"] = ()
    segments_spec, query_spec, key_spec = (
        PartitionSpec(*(mesh_axes[axis] or None for axis in axes))
        for axes in (SEGMENTS_AXES, QUERY_AXES, KEY_AXES)
    )
    sharded = jax.shard_map(
        attend_locally,
        mesh=mesh,
        in_specs=(
            query_spec,
            key_spec,
            key_spec,
            None if segment_ids is None else (segments_spec, segments_spec),
        ),
        out_specs=query_spec,
        # The kernel does not declare the axes over which it varies.
        check_vma=False,
    )
    return sharded(query_BLHK, key_BLGK, value_BLGK, segment_ids)


def _make_kernel(
    length: int, heads: int, scores: Scores, name: str | None, interpret: bool
) -> kernels.SplashAttentionKernel:
    block_size = next((size for size in BLOCKS if length % size == 0), None)
    if block_size is None:
        raise ValueError(f"its blocks are of {LANES} positions, which do not divide {length}")
    shape = (length, length)
    mask: masks.Mask = masks.FullMask(shape)
    if scores.is_causal and scores.window is not None and scores.window < length:
        mask = masks.LocalMask(shape, (scores.window - 1, 0), offset=0)
    elif scores.is_causal:
        mask = masks.CausalMask(shape)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes: dict[str, Any] = dict.fromkeys(names, block_size)
    result: kernels.SplashAttentionKernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=name,
        attn_logits_soft_cap=scores.cap,
        interpret=interpret,
    )
    return result
