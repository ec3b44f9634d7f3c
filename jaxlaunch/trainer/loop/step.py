"""The program's step, checked by tracing it once, then compiled ahead of time with its state donated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch import contract
from jaxlaunch.contract import Key
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.loop import trees
from jaxlaunch.trainer.loop.state import Named, State
from jaxlaunch.trainer.step.executable import Executable

Tree = Any
LOSS = "loss"  # how the names of metrics end that must be finite
# Records hold these beside a program's metrics; a program may give the others that a training has.
RESERVED = contract.RESERVED_METRICS - {Key.LOSS, Key.GRAD_NORM, Key.LEARNING_RATE, Key.LOSS_SCALE}
RETURNS = "return (state, metrics), the new state and a dict of scalars"


class LoopStep:
    """`step(state, batch) -> (state, metrics)`, or `step(state)` without data. Compiled by `compile`.

    Raises SpecError for what is no such function, naming its file and line; whatever tracing it raises.
    """

    def __init__(self, step: Any, state: State, batch: Tree | None, mesh: jax.sharding.Mesh) -> None:
        if not callable(step):
            raise SpecError(
                f"jaxlaunch.run(step=…) is {trees.kind(step)}, not a function; it is called step(state, batch)"
            )
        self.name = user_code.named(step)
        self._step, self._state, self._mesh = step, state, mesh
        self._arguments = (state.abstract,) if batch is None else (state.abstract, batch)
        _check_signature(
            self.name, step, "step(state)" if batch is None else "step(state, batch)", len(self._arguments)
        )
        self._compiled: Executable | None = None
        with state.context():
            _, self._outputs = jax.eval_shape(self._update, *self._arguments)

    def compile(self) -> None:
        """Compiles the step for the state and batches of its making."""
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        outputs = (self._state.shardings, jax.tree.map(lambda _: everywhere, self._outputs))
        with self._state.context():
            self._compiled = Executable(
                "program's", self._update, self._arguments, donate_argnums=0, out_shardings=outputs
            )

    def __call__(self, state: Named, batch: Tree | None) -> tuple[Named, dict[str, Any]]:
        """The new state, the old one being donated; the metrics, and whether all losses are `finite`, on the device."""
        assert self._compiled is not None, "compile comes before a step"
        new, metrics = self._compiled(state) if batch is None else self._compiled(state, batch)
        return new, metrics

    def programs(self) -> list[str]:
        """The HLO text of the compiled step."""
        return [] if self._compiled is None else [self._compiled.text()]

    def _update(self, named: Named, *batch: Tree) -> tuple[Named, dict[str, Any]]:
        found = self._step(self._state.tree(named), *batch)
        if not isinstance(found, tuple) or len(found) != 2:
            raise SpecError(f"{self.name}: it returned {trees.kind(found)}; {RETURNS}")
        new, metrics = self._state.checked(self.name, found[0]), found[1]
        checked_metrics(self.name, metrics)
        scalars = {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}
        losses = [jnp.isfinite(value) for name, value in scalars.items() if name.endswith(LOSS)]
        finite = jnp.all(jnp.stack(losses)) if losses else jnp.ones((), bool)
        return new, {**scalars, Key.FINITE: finite}


def _check_signature(name: str, step: Callable[..., Any], called: str, count: int) -> None:
    try:
        inspect.signature(step).bind(*range(count))
    except TypeError as error:
        why = "; without data= a step has no batch" if count == 1 else ""
        raise SpecError(f"{name} is called {called}, and that fails: {error}{why}") from None
    except ValueError:
        return  # C's functions may have no signature


def checked_metrics(who: str, metrics: Any) -> Mapping[str, Any]:
    """`metrics`, which the program's function `who` returned. Raises SpecError where it is no dict of real scalars."""
    if not isinstance(metrics, Mapping):
        raise SpecError(f"{who}: its metrics are {trees.kind(metrics)}, not a dict of scalars; {RETURNS}")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise SpecError(f"{who}: the name of metric {name!r} is {trees.kind(name)}, not text")
        if name in RESERVED or name.startswith(contract.HELD_OUT):
            taken = f"{', '.join(sorted(RESERVED))}, and what begins with {contract.HELD_OUT}"
            raise SpecError(f"{who}: a metric cannot be named {name!r}; the records of a run use {taken}")
        is_number = isinstance(value, bool | int | float | trees.ArrayLike)
        if not is_number or jnp.shape(value) != () or jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
            raise SpecError(
                f"{who}: metric {name!r} is {trees.form(value)}, not a real scalar; return its mean over the batch"
            )
    return metrics
