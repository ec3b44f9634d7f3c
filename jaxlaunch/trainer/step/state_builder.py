"""The model of a task and the state of its training: built, sharded, and converted to and from a checkpoint's tree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.adapters import base
from jaxlaunch.trainer.adapters.lora import REFERENCE_PREFIX, Adapters, attach_reference
from jaxlaunch.trainer.adapters.peft import is_adapter
from jaxlaunch.trainer.huggingface import load
from jaxlaunch.trainer.numerics import memory, precision
from jaxlaunch.trainer.optim import groups, loss_scale, optimizers
from jaxlaunch.trainer.optim.loss_scale import LossScale
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.spec import CustomModel, Published, TrainSpec
from jaxlaunch.trainer.step.executable import once
from jaxlaunch.trainer.step.model_arrays import ModelArrays, Named
from jaxlaunch.trainer.step.train_state import Placement, TrainState, statistics
from jaxlaunch.trainer.task import Task, check_arrays, checked_model


class StateBuilder:
    """Builds the state of a task's training on a mesh. Building one allocates nothing.

    Parameters of the *base* are read or drawn again at each start, and no checkpoint holds them: the model below its
    adapters, or the reference of a preference loss.

    Attributes:
        is_ours: Whether no code of the user's is traced, except for an optimizer's.
        arrays: The arrays of the model by name.
        axes: Their named axes.
        frozen: Names of the parameters that are not trained, those of the base included.
        optimizer: Of the parameters that are trained.
        abstract: The state's shapes, dtypes and shardings.
        base: What a checkpoint records of the base, once it was read from a folder.
    """

    def __init__(self, task: Task, spec: TrainSpec, placement: Placement, total_steps: int) -> None:
        self._task, self._spec, self._placement = task, spec, placement
        self.precision = precision.policy(spec.precision)
        is_our_task = type(task).__module__.startswith("jaxlaunch.trainer.")
        self.is_ours = is_our_task and not isinstance(spec.model, CustomModel)
        self.adapters = None if spec.lora is None else Adapters(spec, self.precision.params)
        self._has_reference = self.adapters is None and task.needs_reference
        self.base: dict[str, Any] | None = None
        with self.context():
            self.arrays = ModelArrays(nnx.eval_shape(self._model))
        self.axes = sharding.by_path(task.sharding, self.arrays.axes)
        self._base_names = frozenset(filter(self._is_of_base, self.arrays.params))
        self.frozen = self._base_names | groups.frozen(spec.optimizer, self.saved(self.arrays.params))
        self.optimizer = optimizers.build(spec.optimizer, total_steps, self.axes)
        with self.context():
            shapes = jax.eval_shape(self._fresh, {})
        self.abstract = placement.abstract_state(shapes, self.axes, self.optimizer, self.frozen)
        with self.context():
            optimizers.check(spec.optimizer, self.optimizer, self.trained(self.abstract.params))

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Set the mesh and the matmul precision that everything is traced under; flax places nothing by itself.

        What is ours from end to end never broadcasts by rank, which would hide a wrong shape; what users bring may.
        """
        matmul = self.precision.matmul
        ranks = jax.numpy_rank_promotion("raise") if self.is_ours else contextlib.nullcontext()
        with ranks, jax.set_mesh(self._placement.mesh), nnx.use_eager_sharding(False):  # type: ignore[no-untyped-call]
            with jax.default_matmul_precision(matmul) if matmul else contextlib.nullcontext():
                yield

    def keys(self) -> Array:
        """Return two random keys: one of the initial weights, one of the steps."""
        high, low = divmod(self._spec.seed, 2**32)
        key = jax.random.key(low)  # JAX keeps the low 32 bits of a seed, as it is configured by default
        return jax.random.split(jax.random.fold_in(key, high) if high else key)

    def notes(self) -> list[str]:
        """Return what a run's log and summary say of its optimizer, adapters and reference."""
        state = self.abstract
        notes = list(optimizers.notes(self._spec.optimizer, self.saved(state.params), self.axes))
        if self.adapters is not None:
            notes.append(self.adapters.note(state.params, state.opt, self.to_tree(state)))
        if self._has_reference:
            copy = {name: state.params[name] for name in self._base_names}
            notes.append(f"the reference is a frozen copy of the model, {memory.total_bytes(copy):,} bytes")
        return notes

    # --- which parameters -----------------------------------------------------------------------------------------

    def trained(self, params: Named) -> Named:
        """Return those of `params` that are not frozen."""
        return {name: leaf for name, leaf in params.items() if name not in self.frozen}

    def split_frozen(self, params: Named) -> tuple[Named, Named]:
        """Return `params` as those that are trained and those that are frozen."""
        return self.trained(params), {name: leaf for name, leaf in params.items() if name in self.frozen}

    def saved(self, params: Named) -> Named:
        """Return those of `params` that a checkpoint holds: all but the base."""
        return {name: leaf for name, leaf in params.items() if name not in self._base_names}

    def _is_of_base(self, name: str) -> bool:
        if self._has_reference:
            return name.startswith(REFERENCE_PREFIX)
        return self.adapters is not None and not is_adapter(name)

    # --- a new state ----------------------------------------------------------------------------------------------

    def init(self) -> TrainState:
        """Return a new state, each device computing or reading its own part: equal numbers on every mesh.

        Raises:
            SpecError: The folder to start from does not hold this model.
        """
        model, read = self._spec.model, self._read_base()
        if self.adapters is not None:
            read |= self.adapters.read_start(self.saved(self.abstract.params))
        elif isinstance(model, Published) and model.init_from is not None:
            read |= load.load(model, self.saved(self.abstract.params) | statistics(self.abstract.rest))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        options = once(self._placement.mesh)
        with self.context():
            fresh = jax.jit(self._fresh, donate_argnums=0, out_shardings=shardings, compiler_options=options)
            state: TrainState = fresh(read)
        return state

    def _model(self) -> nnx.Module:
        made: Any = self._task.model(self._spec, nnx.Rngs(self.keys()[0]))
        with user_code.placed(type(self._task).model):
            model = checked_model(self._spec.task, made)
        with user_code.placed(model):
            check_arrays(self._spec.task, model)
        if self.adapters is not None:
            self.adapters.attach(model, self.keys()[0])
        if self._has_reference:
            # The same key gives the same weights.
            attach_reference(model, self._task.model(self._spec, nnx.Rngs(self.keys()[0])))
        return model

    def _fresh(self, read: Named) -> TrainState:
        """Return the state before the first step, with the parameters `read`, and random ones in place of others."""
        made, rest = self.arrays.split(self._model())
        params = {name: self._stored(name, read.get(name, param)) for name, param in made.items()}
        rest = {name: read.get(name, leaf) for name, leaf in rest.items()}
        trained = self.trained(params)
        ema = None if self._spec.optimizer.ema is None else optimizers.ema_init(trained | statistics(rest))
        scale = loss_scale.init() if self.precision.is_scaled else None
        return TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(trained), ema, rest, scale)

    def _stored(self, name: str, param: Any) -> Array:
        """Return a parameter in the dtype that the state stores it in."""
        is_of_base = name in self._base_names
        if self.adapters is not None and is_of_base:
            return self.adapters.cast_frozen(name, param)
        return cast_floats(param, self.precision.compute if is_of_base else self.precision.params)

    def _read_base(self) -> Named:
        """Return the base as the state stores it: read from its folder, or drawn from the seed."""
        model, like = self._spec.model, {name: self.abstract.params[name] for name in sorted(self._base_names)}
        if not like:
            return {}
        if isinstance(model, Published) and model.init_from is not None:
            prefix = REFERENCE_PREFIX if self._has_reference else ""
            params, self.base = base.read_base(model, {name.removeprefix(prefix): leaf for name, leaf in like.items()})
            return {prefix + name: param for name, param in params.items()}
        with self.context():
            draw = jax.jit(
                lambda: {name: self._fresh({}).params[name] for name in like},
                out_shardings={name: leaf.sharding for name, leaf in like.items()},
                compiler_options=once(self._placement.mesh),
            )
            drawn: Named = draw()
        return drawn

    # --- the state in a checkpoint --------------------------------------------------------------------------------

    def to_tree(self, state: TrainState) -> dict[str, Any]:
        """Return the state as dicts of leaves by name, for a checkpoint: without empty parts and without the base."""
        leaves = jax.tree_util.tree_flatten_with_path(state.opt)[0]
        opt = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
        scale = None if state.scale is None else state.scale._asdict()
        parts = {"params": self.saved(state.params), "opt": opt, "ema": state.ema, "rest": state.rest, "scale": scale}
        return {"step": state.step, **{name: dict(part) for name, part in parts.items() if part}}

    def from_tree(self, tree: Mapping[str, Any]) -> TrainState:
        """Return the state of a tree that `to_tree` made. The base is read, or drawn, again."""
        names = self.to_tree(self.abstract).get("opt", {})
        opt = jax.tree.unflatten(jax.tree.structure(self.abstract.opt), [tree["opt"][name] for name in names])
        ema = None if self.abstract.ema is None else dict(tree["ema"])
        scale = None if self.abstract.scale is None else LossScale(**tree["scale"])
        return TrainState(tree["step"], self.with_base(tree["params"]), opt, ema, dict(tree.get("rest", {})), scale)

    def with_base(self, saved: Named) -> Named:
        """Return the parameters of which a checkpoint holds `saved`."""
        return self._read_base() | dict(saved)

    @contextlib.contextmanager
    def checks_base(self, recorded: Mapping[str, Any] | None, owner: str) -> Iterator[None]:
        """Check that the base which completes a checkpoint inside this context is the one that it was trained with.

        Args:
            recorded: What the checkpoint records of its base.
            owner: Name of the checkpoint in messages.

        Raises:
            CheckpointError: The base is of another folder, or that folder holds other weights by now.
        """
        holds, model = base.COMPARED if self._has_reference else base.ADAPTERS, self._spec.model
        if self._base_names and isinstance(model, Published):
            base.check_origin(recorded, model, owner, holds)
        yield
        if self.base is not None and recorded is not None:
            base.check_digest(recorded, self.base, owner, holds=holds)


def cast_floats(array: Array, dtype: jnp.dtype) -> Array:
    """Return an array in `dtype` if it is of floats, else as it is."""
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array
