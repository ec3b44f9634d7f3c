"""Programs compiled ahead of time, with the XLA options that suit their platform."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

PyTree = Any
CompilerOptions = dict[str, Any]

# benchmarks/RESULTS.md ("Compiled, before and after") has the cost of libtpu's defaults.
_TPU_OPTIONS: CompilerOptions = {
    # If an operand is larger than this, in MiB, the weight that a product gathers is sent around a
    # ring, and each part is multiplied as it arrives. The compiler estimates more cycles for that
    # with every decoder that was compared: the products are small, and each part reads and writes
    # the sum. No operand reaches this size.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}
# Weights are gathered and gradients summed while products run: MaxText's names for them are
# CF_FOR_ALL_GATHER and CF_FOR_ALL_REDUCE (benchmarks/xla_flags_library.py).
_ASYNC_COLLECTIVE_OPTIONS: CompilerOptions = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
    "xla_enable_async_all_reduce": "true",
    # Sums that are combined into one wait for each other, and nothing hides them. Only small ones
    # are combined.
    "xla_jf_crs_combiner_threshold_in_bytes": str(2**20),
}
_UNKNOWN_OPTION = re.compile(r"No such compile option: '(\w+)'")
# It runs collectives on its sparse cores by default, so the cores that multiply cannot run them.
_SPARSE_CORE_KIND = "TPU7x"


class Executable:
    """`function` compiled once for arguments like `abstract`, ShapeDtypeStructs with shardings.

    Call it with arrays of exactly these shapes, dtypes and shardings. Raises TypeError, naming each
    that differs. XLA `options` that the compiler does not know are left out.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        abstract: tuple[PyTree, ...],
        options: CompilerOptions | None = None,
        **jit_options: Any,
    ) -> None:
        self.name, self.abstract = name, abstract
        self._compiled = compile_lowered(jax.jit(function, **jit_options).lower(*abstract), options)

    def __call__(self, *args: PyTree) -> Any:
        """Run the program."""
        try:
            return self._compiled(*args)
        except (TypeError, ValueError):
            self.check_arguments(*args)
            raise

    def check_arguments(self, *args: PyTree) -> None:
        """Raise TypeError when `args` do not have the compiled shapes, dtypes and shardings."""
        expected, actual = _describe_leaves(self.abstract), _describe_leaves(args)
        changed = [
            f"  {name}: compiled for {expected.get(name, 'nothing')}, "
            f"got {actual.get(name, 'nothing')}"
            for name in dict.fromkeys([*expected, *actual])
            if expected.get(name) != actual.get(name)
        ]
        if changed:
            listed = "\n".join(changed)
            raise TypeError(
                f"the {self.name} step was compiled once and is not traced again:\n{listed}"
            )

    def hlo_text(self) -> str:
        """Return the compiled program as HLO text, with the scope of each operation."""
        return self._compiled.as_text() or ""

    def memory_analysis(self) -> Any:
        """Return XLA's memory analysis of a device: bytes by purpose, and the peak."""
        return self._compiled.memory_analysis()

    def cost_analysis(self) -> dict[str, float]:
        """Return XLA's FLOPs and bytes of a device, by XLA's names. A loop's body counts once."""
        return self._compiled.cost_analysis() or {}


def _describe_leaves(tree: PyTree) -> dict[str, str]:
    """Return the dtype, shape and split of each leaf, as text, by its path."""

    def describe_leaf(leaf: Any) -> str:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
            return type(leaf).__name__
        sharding = None if isinstance(leaf, np.ndarray | np.generic) else leaf.sharding
        part = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        split = f" in parts of {list(part)}" if part != leaf.shape else ""
        return f"{leaf.dtype}{list(leaf.shape)}{split}"

    return {
        jax.tree_util.keystr(path, simple=True, separator="."): describe_leaf(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def step_compiler_options(mesh: jax.sharding.Mesh) -> CompilerOptions | None:
    """Return the options of a program of every step. A job's LIBTPU_INIT_ARGS have precedence."""
    device = mesh.devices.flat[0]
    if device.platform != "tpu":
        return None
    options = dict(_TPU_OPTIONS)
    if device.device_kind != _SPARSE_CORE_KIND:
        options |= _ASYNC_COLLECTIVE_OPTIONS
    flags = os.environ.get("LIBTPU_INIT_ARGS", "").replace("=", " ").split()
    return {name: value for name, value in options.items() if f"--{name}" not in flags}


def setup_compiler_options(mesh: jax.sharding.Mesh) -> CompilerOptions | None:
    """Return the options of a program that runs once.

    On CPU devices LLVM's second level of optimization takes three quarters of the compilation and
    gains nothing. The results are the same bits (jaxlib 0.10). JAX_DISABLE_MOST_OPTIMIZATIONS
    applies here, too.
    """
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    skips_optimizations = jax.config.read("jax_disable_most_optimizations")
    return {"xla_backend_optimization_level": 1} if is_cpu and not skips_optimizations else None


def compile_lowered(
    lowered: jax.stages.Lowered, options: CompilerOptions | None
) -> jax.stages.Compiled:
    """Compile with the options that this compiler knows, and name each unknown one on stderr.

    The options only make a program faster, and another version of libtpu may have renamed or
    dropped one. libtpu 0.0.42.1 fails ("INTERNAL: RET_CHECK") with those that hide collectives, for
    experts over fsdp 2 × ep 2 of a v5p.
    """
    options = dict(options or {})
    while True:
        try:
            return lowered.compile(compiler_options=dict(options) or None)
        except jax.errors.JaxRuntimeError as error:
            match = _UNKNOWN_OPTION.search(str(error))
            if match is not None and options.pop(match[1], None) is not None:
                note = f"this version of the compiler does not know the option {match[1]}: left out"
            elif str(error).startswith("INTERNAL") and options.keys() & _ASYNC_COLLECTIVE_OPTIONS:
                for name in _ASYNC_COLLECTIVE_OPTIONS:
                    options.pop(name, None)
                note = "the compiler fails with the options that hide collectives: left out"
            else:
                raise
            print(note, file=sys.stderr)
