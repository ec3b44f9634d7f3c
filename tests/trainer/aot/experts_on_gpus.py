"""Compile a layer of experts and its gradients for absent GPUs; print its products' FLOPs.

B batch, L length, D model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.aot.step_time import operation_flops
from jaxlaunch.trainer.models.experts import Experts
from jaxlaunch.trainer.numerics.hlo import Program
from jaxlaunch.trainer.parallel import mesh

LENGTH, WIDTH, HIDDEN = 2048, 1024, 16384
CONFIG = spec.Decoder(
    layers=2, width=WIDTH, heads=8, vocab=512, length=LENGTH, experts=4, expert_hidden=HIDDEN
)


def flops() -> float:
    """Of one row of tokens a device, and two experts."""
    on = mesh.build_mesh(spec.Mesh(ep=2), Chips("h100", 1, 2).make_devices())
    with jax.set_mesh(on):
        graph, state = nnx.split(nnx.eval_shape(lambda: Experts(CONFIG, nnx.Rngs(0))))

        def loss(state: nnx.State, x_BLD: Array, real_BL: Array) -> Array:
            made_BLD, _ = nnx.merge(graph, state)(x_BLD, real_BL)
            return jnp.square(made_BLD.astype(jnp.float32)).sum()

        by_expert, rows = (
            NamedSharding(on, PartitionSpec(axis)) for axis in ("ep", ("dp", "fsdp", "ep"))
        )
        whole = NamedSharding(on, PartitionSpec())
        inputs = jax.tree.map(
            lambda like: jax.ShapeDtypeStruct(
                like.shape, jnp.bfloat16, sharding=by_expert if like.ndim == 3 else whole
            ),
            state,
        )
        x_BLD = jax.ShapeDtypeStruct((2, LENGTH, WIDTH), jnp.bfloat16, sharding=rows)
        real_BL = jax.ShapeDtypeStruct((2, LENGTH), jnp.float32, sharding=rows)
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(inputs, x_BLD, real_BL).compile()
    program = Program.from_text(compiled.as_text() or "")
    return sum(
        operation_flops(program, operation, program.computations[name]) * times
        for name, times in program.executions.items()
        for operation in program.computations[name]
    )


if __name__ == "__main__":
    print(flops())
