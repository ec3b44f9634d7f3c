"""Programs compiled ahead of time, with the XLA options that suit their platform."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxlaunch.trainer.errors import SpecError

PyTree = Any
CompilerOptions = dict[str, Any]

# benchmarks/RESULTS.md ("Compiled, before and after") has the cost of libtpu's defaults.
_TPU_OPTIONS: CompilerOptions = {
    # The size of an operand, in MiB, from which XLA splits a product with a gathered weight into a
    # loop: the parts of the weight travel around a ring and are multiplied as they arrive. For
    # every decoder that was compared, the compiler estimates more cycles with this loop, because
    # its products are small and each one reads and writes the sum. No operand is as large as the
    # value here, which switches the loop off.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}
# These options gather weights and sum gradients while matrix products run. MaxText names them
# CF_FOR_ALL_GATHER and CF_FOR_ALL_REDUCE (benchmarks/xla_flags_library.py).
_ASYNC_COLLECTIVE_OPTIONS: CompilerOptions = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
    "xla_enable_async_all_reduce": "true",
    # All-reduces that are combined into one wait for each other, and nothing hides them, so only
    # small ones are combined.
    "xla_jf_crs_combiner_threshold_in_bytes": str(2**20),
}
_UNKNOWN_OPTION = re.compile(r"No such compile option: '(\w+)'")
# This TPU runs collectives on its SparseCores by default. The options above would move them to the
# cores that multiply.
_SPARSE_CORE_KIND = "TPU7x"


def check_jit() -> None:
    """Raise SpecError if JAX_DISABLE_JIT is set, with which JAX runs no compiled program."""
    config: Any = jax.config
    if config.jax_disable_jit:
        raise SpecError(
            "JAX_DISABLE_JIT is set, and train: and jaxlaunch.run run only compiled steps: leave "
            "it out of env: and of the environment of `launcher run`; jax.debug.print shows the "
            "values of a compiled step"
        )


class Executable:
    """A function that is compiled once, for arguments of fixed shapes, dtypes and shardings.

    A call with other arguments raises TypeError, which names each difference. XLA `options` that
    the compiler does not know are left out.

    Attributes:
        name: The name of the step in error messages.
        abstract_args: The arguments as trees of ShapeDtypeStructs with shardings.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        abstract_args: tuple[PyTree, ...],
        options: CompilerOptions | None = None,
        **jit_options: Any,
    ) -> None:
        check_jit()
        self.name, self.abstract_args = name, abstract_args
        lowered = jax.jit(function, **jit_options).lower(*abstract_args)
        self._compiled = compile_lowered(lowered, options)

    def __call__(self, *args: PyTree) -> Any:
        """Run the program. Raises TypeError for arguments that it was not compiled for."""
        try:
            return self._compiled(*args)
        except (TypeError, ValueError):
            self.check_arguments(*args)
            raise

    def check_arguments(self, *args: PyTree) -> None:
        """Raise TypeError when `args` do not have the compiled shapes, dtypes and shardings."""
        expected, actual = _describe_leaves(self.abstract_args), _describe_leaves(args)
        mismatches = [
            f"  {name}: compiled for {expected.get(name, 'nothing')}, "
            f"got {actual.get(name, 'nothing')}"
            for name in dict.fromkeys([*expected, *actual])
            if expected.get(name) != actual.get(name)
        ]
        if mismatches:
            listed = "\n".join(mismatches)
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
    """Return text such as `float32[8, 4] in parts of [2, 4]` for each leaf, by its path."""

    def describe_leaf(leaf: Any) -> str:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
            return type(leaf).__name__
        sharding = None if isinstance(leaf, np.ndarray | np.generic) else leaf.sharding
        shard_shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        split = f" in parts of {list(shard_shape)}" if shard_shape != leaf.shape else ""
        return f"{leaf.dtype}{list(leaf.shape)}{split}"

    return {
        jax.tree_util.keystr(path, simple=True, separator="."): describe_leaf(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def step_compiler_options(mesh: jax.sharding.Mesh) -> CompilerOptions | None:
    """Return the XLA options of programs that run in every step; None for the defaults.

    Options that the job sets in LIBTPU_INIT_ARGS are left out.
    """
    device = mesh.devices.flat[0]
    if device.platform != "tpu":
        return None
    options = dict(_TPU_OPTIONS)
    if device.device_kind != _SPARSE_CORE_KIND:
        options |= _ASYNC_COLLECTIVE_OPTIONS
    flags = os.environ.get("LIBTPU_INIT_ARGS", "").replace("=", " ").split()
    return {name: value for name, value in options.items() if f"--{name}" not in flags}


def setup_compiler_options(mesh: jax.sharding.Mesh) -> CompilerOptions | None:
    """Return the XLA options of programs that run once; None for the defaults.

    On CPUs, LLVM's second level of optimization takes three quarters of the compilation time and
    does not make such a program faster. Its results are bitwise equal without it (jaxlib 0.10).
    JAX_DISABLE_MOST_OPTIMIZATIONS has precedence.
    """
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    skips_optimizations = jax.config.read("jax_disable_most_optimizations")
    return {"xla_backend_optimization_level": 1} if is_cpu and not skips_optimizations else None


def compile_lowered(
    lowered: jax.stages.Lowered, options: CompilerOptions | None
) -> jax.stages.Compiled:
    """Compile with the options that this compiler supports, and note the others on stderr.

    No option changes the results, so a program is compiled without those that another version of
    libtpu has renamed or removed. libtpu 0.0.42.1 fails ("INTERNAL: RET_CHECK") with the options
    that hide collectives for a model with experts on fsdp 2 × ep 2 of a v5p.
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
