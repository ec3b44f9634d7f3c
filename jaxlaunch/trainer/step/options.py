"""XLA's options for the programs of a step, by the platform of their mesh."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import jax

Options = dict[str, Any]

# What libtpu's own choices cost is in benchmarks/RESULTS.md ("Compiled, before and after").
_TPU: Options = {
    # Above this size of an operand, in MiB, a weight that a product gathers is sent around a ring, and each part
    # multiplied as it comes. For every decoder that was compared the compiler estimates more cycles then, by products
    # of small parts and a sum that each part reads and writes: the size is one that no operand has.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}
# Weights are gathered and gradients summed while products run: MaxText's names for them are CF_FOR_ALL_GATHER and
# CF_FOR_ALL_REDUCE (benchmarks/xla_flags_library.py).
_MEANWHILE: Options = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
    "xla_enable_async_all_reduce": "true",
    # Several sums that were combined into one wait for each other, and nothing hides them: only small ones are.
    "xla_jf_crs_combiner_threshold_in_bytes": str(2**20),
}
_BY_SPARSE_CORES = "TPU7x"  # collectives run there by default, which excludes that the products' cores run them


def often(mesh: jax.sharding.Mesh) -> Options | None:
    """The options of a program that runs often. What a job's LIBTPU_INIT_ARGS sets has precedence."""
    device = mesh.devices.flat[0]
    if device.platform != "tpu":
        return None
    options = _TPU if device.device_kind == _BY_SPARSE_CORES else _TPU | _MEANWHILE
    given = os.environ.get("LIBTPU_INIT_ARGS", "").replace("=", " ").split()
    return {name: value for name, value in options.items() if f"--{name}" not in given}


def once(mesh: jax.sharding.Mesh) -> Options | None:
    """The options of a program that runs once. On CPU devices LLVM's second level of optimization takes three quarters
    of the compilation and gains nothing; the bits are the same (jaxlib 0.10). Where the user has turned off most
    optimizations (JAX_DISABLE_MOST_OPTIMIZATIONS) that holds here too."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    is_quick = jax.config.read("jax_disable_most_optimizations")
    return {"xla_backend_optimization_level": 1} if is_cpu and not is_quick else None


def compile_with(lowered: jax.stages.Lowered, options: Options | None) -> jax.stages.Compiled:
    """`lowered` compiled with those of `options` that this compiler knows; one line on stderr names each other one.

    They only make a program faster, and another version of libtpu may have renamed or dropped one. libtpu 0.0.42.1 also
    fails by itself ("INTERNAL: RET_CHECK") with those that hide collectives, for experts over fsdp 2 × ep 2 of a v5p.
    """
    left = dict(options or {})
    while True:
        try:
            return lowered.compile(compiler_options=left or None)
        except jax.errors.JaxRuntimeError as error:
            unknown = _UNKNOWN.search(str(error))
            if unknown is not None and left.pop(unknown[1], None) is not None:
                print(f"this version of the compiler does not know the option {unknown[1]}: left out", file=sys.stderr)
            elif str(error).startswith("INTERNAL") and left.keys() & _MEANWHILE.keys():
                left = {name: value for name, value in left.items() if name not in _MEANWHILE}
                print("the compiler fails with the options that hide collectives: left out", file=sys.stderr)
            else:
                raise


_UNKNOWN = re.compile(r"No such compile option: '(\w+)'")
