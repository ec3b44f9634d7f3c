"""A loop of steps or micro-batches inside the compiled step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def looped(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, parts: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` of `body` over the first axis of `parts`; a single turn is written out.

    Inside a loop XLA's compiler for CPUs does not bring the convolutions of gradients into the form of its fast kernels
    (jaxlib 0.10): those of a small ResNet took 20 times as long.
    """
    if len(jax.tree.leaves(parts)[0]) > 1:
        return jax.lax.scan(body, carry, parts)
    carry, made = body(carry, jax.tree.map(lambda part: part[0], parts))
    return carry, jax.tree.map(lambda one: one[None], made)
