"""Rematerialization by name: recomputing values saves memory at the cost of arithmetic.

| name | kept from the forward pass |
|---|---|
| none | everything the backward pass reads |
| full | the layer's input |
| dots | results of matrix products |
| dots_no_batch | results of products of activations with weights; not those of attention |
| [names] | the tensors that the model calls by these names |
| offload | every tensor the model names, in the host's memory |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.spec import Remat

Policy = Any  # one of jax.checkpoint_policies


def remat_layer(
    body: Callable[..., Any], remat: Remat, names: Sequence[str], *, scanned: bool
) -> Callable[..., Any]:
    """Rematerialize a layer's forward pass `body(module, ...)` according to `remat`.

    `names` are those that `body` gives to tensors with `jax.ad_checkpoint.checkpoint_name`;
    `scanned` says whether the layer runs inside a scan. Raises SpecError if `remat` has another
    name, or asks to offload although devices cannot reach the host's memory.
    """
    if remat == "none":
        return body
    # Outside of a loop the compiler would merge the recomputation with the forward pass, unless
    # this is prevented.
    return nnx.remat(body, policy=_checkpoint_policy(remat, names), prevent_cse=not scanned)


def _checkpoint_policy(remat: Remat, names: Sequence[str]) -> Policy:
    policies = jax.checkpoint_policies
    if isinstance(remat, list):
        if unknown := [name for name in remat if name not in names]:
            model_names = ", ".join(names) or "none"
            raise SpecError(
                f"train.remat: unknown tensor {', '.join(unknown)}; this model names {model_names}"
            )
        return policies.save_only_these_names(*remat)
    match remat:
        case "full":
            return None
        case "dots":
            return policies.dots_saveable
        case "dots_no_batch":
            return policies.dots_with_no_batch_dims_saveable
        case "offload":
            if not names:
                raise SpecError(
                    "train.remat = offload: this model names no tensors to keep on the host; use "
                    "full or dots"
                )
            memories = jax.local_devices()[0].addressable_memories()
            if all(memory.kind != "pinned_host" for memory in memories):
                raise SpecError(
                    f"train.remat = offload: {jax.devices()[0].platform} devices have no "
                    "pinned_host memory"
                )
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=list(names),
                offload_src="device",
                offload_dst="pinned_host",
            )
    raise SpecError(f"train.remat = {remat!r} is not supported")
