"""A step compiled ahead of time. It never traces again: other shapes or dtypes are an error that names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxlaunch.trainer.step.options import Options, compile_with

PyTree = Any


class Executable:
    """`function` compiled for arguments like `abstract` (ShapeDtypeStructs with shardings).

    Call it with arrays of just these shapes, dtypes and shardings. Raises TypeError, naming each that differs.
    `options` are XLA's, of which a compiler that does not know one goes without it.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        abstract: tuple[PyTree, ...],
        options: Options | None = None,
        **jit: Any,
    ) -> None:
        self.name, self.abstract = name, abstract
        self._compiled = compile_with(jax.jit(function, **jit).lower(*abstract), options)

    def __call__(self, *args: PyTree) -> Any:
        try:
            return self._compiled(*args)
        except (TypeError, ValueError):
            self.check(*args)
            raise

    def check(self, *args: PyTree) -> None:
        """Raises TypeError when `args` are not what this was compiled for."""
        then, now = _described(self.abstract), _described(args)
        changed = [
            f"  {name}: compiled for {then.get(name, 'nothing')}, got {now.get(name, 'nothing')}"
            for name in dict.fromkeys([*then, *now])
            if then.get(name) != now.get(name)
        ]
        if changed:
            raise TypeError(f"the {self.name} step was compiled once and is not traced again:\n" + "\n".join(changed))

    def text(self) -> str:
        """The compiled program as HLO text, each operation with the scope that it comes from."""
        return self._compiled.as_text() or ""

    def memory(self) -> Any:
        """XLA's account of a device's memory: bytes of arguments, outputs, temporaries, and the peak."""
        return self._compiled.memory_analysis()

    def costs(self) -> dict[str, float]:
        """XLA's FLOPs and bytes accessed of a device, by its names for them. The body of a loop counts once."""
        return self._compiled.cost_analysis() or {}


def _described(tree: PyTree) -> dict[str, str]:
    """Each leaf's dtype, shape and how it is split, as text, by its path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): _kind(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _kind(leaf: Any) -> str:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        part = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    elif isinstance(leaf, np.ndarray | np.generic):
        part = leaf.shape
    else:
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}" + (f" in parts of {list(part)}" if part != leaf.shape else "")
