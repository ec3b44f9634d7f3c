"""Rematerialization by name: the backward pass recomputes values to save memory.

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

# One of jax.checkpoint_policies.
Policy = Any


def remat_layer(
    body: Callable[..., Any], remat: Remat, names: Sequence[str], *, scanned: bool
) -> Callable[..., Any]:
    """Return the forward pass of a layer, `body(module, ...)`, rematerialized according to `remat`.

    Args:
        body: The forward pass.
        remat: The value of `train.remat`.
        names: The names of tensors in `body`, by `jax.ad_checkpoint.checkpoint_name`.
        scanned: Whether the layer runs inside a scan.

    Raises:
        SpecError: `remat` has a name that is not in `names`, or it offloads and the devices cannot
            access the host's memory.
    """
    if remat == "none":
        return body
    # Outside of a loop, `prevent_cse` keeps the compiler from merging the recomputation with the
    # forward pass.
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
                    "pinned_host memory; use full or dots"
                )
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=list(names),
                offload_src="device",
                offload_dst="pinned_host",
            )
    raise SpecError(f"train.remat = {remat!r} is not supported")
