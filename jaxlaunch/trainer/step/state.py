"""The state of a training: built for a task, sharded over the mesh, converted for checkpoints.

An nnx model is split into its arrays once and merged again inside each trace. Between steps the
arrays are in flat dicts by dotted name ("blocks.mlp.up"), because a flat dict is the cheapest tree
to pass to a compiled step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch.contract import BATCH_AXES
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.adapters import base_weights, frozen_base
from jaxlaunch.trainer.adapters.lora import (
    KERNEL_ATTRIBUTE,
    REFERENCE_PREFIX,
    Adapters,
    attach_reference,
)
from jaxlaunch.trainer.adapters.module_adapters import ModuleAdapters
from jaxlaunch.trainer.adapters.peft import is_adapter
from jaxlaunch.trainer.numerics import memory, precision
from jaxlaunch.trainer.optim import loss_scale, optimizers, transforms
from jaxlaunch.trainer.optim.loss_scale import LossScale
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.parallel.sharding import Axes
from jaxlaunch.trainer.spec import (
    CustomModel,
    PublishedModel,
    TrainSpec,
    TransformersModel,
)
from jaxlaunch.trainer.step.executable import setup_compiler_options
from jaxlaunch.trainer.task import Task, check_arrays, checked_model
from jaxlaunch.trainer.torch_models.network import TorchModel

Batch = Mapping[str, Any]
# Name -> array, or ShapeDtypeStruct.
NamedArrays = dict[str, Any]


class TrainState(NamedTuple):
    """The state between steps, in flat dicts by parameter name. It is donated to every train step.

    Attributes:
        step: Completed optimizer steps, an int32 scalar.
        params: The parameters, including those that are frozen.
        opt: The state of optax for the trained parameters.
        ema: A float32 moving average of the trained parameters and of the statistics in `buffers`,
            or None.
        buffers: The other arrays of the model, such as BatchNorm's statistics.
        scale: The loss scale under float16.
    """

    step: Any
    params: NamedArrays
    opt: Any
    ema: NamedArrays | None
    buffers: NamedArrays
    scale: LossScale | None = None

    def evaluated_params(self) -> NamedArrays:
        """Return the parameters that evaluation uses: their average if there is one."""
        if self.ema is not None:
            return {name: self.ema.get(name, param) for name, param in self.params.items()}
        averaged = transforms.averaged_params(self.opt, self.params)
        return self.params if averaged is None else averaged

    def evaluated_buffers(self) -> NamedArrays:
        """Return the other arrays that evaluation uses, averaged if possible, in their dtypes."""
        ema = self.ema or {}
        return {
            name: ema[name].astype(leaf.dtype) if name in ema else leaf
            for name, leaf in self.buffers.items()
        }


def _with_sharding(leaf: Any, leaf_sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf_sharding)


class Placement:
    """The sharding of everything that a step reads and writes on a mesh.

    Attributes:
        mesh: The devices.
        replicated: The sharding of replicated arrays.
        rows: The sharding of a batch [B, ...].
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self.mesh = mesh
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.rows = meshes.batch_sharding(mesh)

    def put_rows(self, batch: Mapping[str, np.ndarray[Any, Any]], size: int) -> dict[str, Array]:
        """Put the rows of this process in global arrays of `size` rows."""
        return {
            name: jax.make_array_from_process_local_data(self.rows, rows, (size, *rows.shape[1:]))
            for name, rows in batch.items()
        }

    def abstract_batch(self, batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of a global batch, with their shardings."""
        return {name: _with_sharding(rows, self.rows) for name, rows in batch.items()}

    def abstract_state(
        self,
        shapes: TrainState,
        axes: Mapping[str, Axes | None],
        optimizer: optax.GradientTransformation,
        frozen: Collection[str],
    ) -> TrainState:
        """Return `shapes` with a sharding for each array, by the array's named axes."""
        sharding_by_name = {
            name: sharding.state_sharding(name, leaf.shape, axes[name], self.mesh)
            for name, leaf in (shapes.params | shapes.buffers).items()
        }
        trained = {name: leaf for name, leaf in shapes.params.items() if name not in frozen}
        trained_shardings = {name: sharding_by_name[name] for name in trained}
        shardings = TrainState(
            step=self.replicated,
            params={name: sharding_by_name[name] for name in shapes.params},
            opt=optimizers.state_shardings(optimizer, trained, trained_shardings),
            ema=None
            if shapes.ema is None
            else {name: sharding_by_name[name] for name in shapes.ema},
            buffers={name: sharding_by_name[name] for name in shapes.buffers},
            scale=jax.tree.map(lambda leaf: self.replicated, shapes.scale),
        )
        result: TrainState = jax.tree.map(_with_sharding, shapes, shardings)
        return result

    def replicate(self, tree: Any) -> Any:
        """Constrain the arrays of a tree to be replicated on every device."""
        return jax.lax.with_sharding_constraint(tree, self.replicated)

    def split_steps(self, rows: Array) -> Any:
        """Turn [B, K, ...] into [K, B, ...] without moving rows between devices."""
        return self._constrain_parts(rows.swapaxes(0, 1))

    def split_micro_batches(self, rows: Array, count: int) -> Any:
        """Turn [B, ...] into [count, B / count, ...]: row i goes to micro-batch i mod count.

        No row leaves its device.
        """
        parts = rows.reshape(rows.shape[0] // count, count, *rows.shape[1:])
        return self._constrain_parts(parts.swapaxes(0, 1))

    def split_devices(self, rows: Array) -> Any:
        """Turn [B, ...] into [devices, B / devices, ...]: the rows of each device."""
        parts = rows.reshape(meshes.count_shards(self.mesh), -1, *rows.shape[1:])
        return jax.lax.with_sharding_constraint(parts, self.rows)

    def _constrain_parts(self, parts: Array) -> Any:
        """Constrain [K, B, ...] to have B split over the devices as a batch is."""
        split = NamedSharding(self.mesh, PartitionSpec(None, BATCH_AXES))
        return jax.lax.with_sharding_constraint(parts, split)


class ModelArrays:
    """The arrays of a model by name, and the structure to rebuild the model from them.

    Attributes:
        params: The parameters by name, as ShapeDtypeStructs if the model is abstract.
        buffers: The other arrays except random streams: BatchNorm's statistics, counters.
        axes: The named axes of all arrays, from the metadata `axes` of our models or from flax's
            `nnx.with_partitioning`.
    """

    def __init__(self, model: nnx.Module) -> None:
        self._graph, params, self._rngs, buffers = _split_model(model)
        self.params, self.buffers = _name_arrays(params), _name_arrays(buffers)
        self.axes: dict[str, Axes | None] = {}
        for path, variable in (*nnx.to_flat_state(params), *nnx.to_flat_state(buffers)):
            metadata = variable.get_metadata()
            axes = metadata.get("axes") or metadata.get("out_sharding")
            self.axes[_array_name(map(str, path))] = tuple(axes) if axes else None
        self._params_tree = jax.tree.structure(params)
        self._buffers_tree = jax.tree.structure(buffers)

    def split_model(self, model: nnx.Module) -> tuple[NamedArrays, NamedArrays]:
        """Return `params` and `buffers` of a model of this structure."""
        _, params, _, buffers = _split_model(model)
        return _name_arrays(params), _name_arrays(buffers)

    def merge_model(self, params: NamedArrays, buffers: NamedArrays, rng: Array) -> Any:
        """Return the model with these arrays. Its random streams start from `rng`."""

        def make_stream(key: Array, leaf: Any) -> Array:
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.zeros(leaf.shape, leaf.dtype)
            return key if leaf.shape == () else jax.random.split(key, leaf.shape)

        leaves, tree = jax.tree.flatten(self._rngs)
        keys = jax.random.split(rng, max(len(leaves), 1))
        return nnx.merge(
            self._graph,
            jax.tree.unflatten(self._params_tree, [params[name] for name in self.params]),
            jax.tree.unflatten(tree, list(map(make_stream, keys, leaves))),
            jax.tree.unflatten(self._buffers_tree, [buffers[name] for name in self.buffers]),
        )


def _split_model(model: nnx.Module) -> tuple[Any, Any, Any, Any]:
    graph, *states = nnx.split(model, nnx.Param, nnx.RngState, nnx.Intermediate, ...)
    params, rngs, _, buffers = states
    return graph, params, rngs, buffers


def _name_arrays(state: Any) -> NamedArrays:
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {_array_name(str(key.key) for key in path[:-1]): leaf for path, leaf in leaves}


def _array_name(path: Iterable[str]) -> str:
    """Return the dotted name of an array, which stays the same if an adapter wraps the array."""
    *parents, last = path
    return ".".join(parents if last == KERNEL_ATTRIBUTE else [*parents, last])


def float_buffers(buffers: NamedArrays) -> NamedArrays:
    """Select the arrays that can be averaged: statistics, but not counts and keys."""
    floating = jnp.floating
    return {name: leaf for name, leaf in buffers.items() if jnp.issubdtype(leaf.dtype, floating)}


def cast_floats(array: Array, dtype: jnp.dtype) -> Array:
    """Cast an array of floats to `dtype`; return any other unchanged."""
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


class StateBuilder:
    """Builds the state of a task's training on a mesh. The constructor allocates no arrays.

    The *base* is the frozen model below the adapters, or the frozen reference of a preference loss.
    Its parameters are read or initialized again at each start and are not part of checkpoints.

    Attributes:
        precision: The dtypes of parameters and arithmetic.
        is_builtin: Whether task and model are ours. An optimizer may still be the user's.
        adapters: The adapters of the model; None without LoRA.
        arrays: The arrays of the model by name, abstract.
        axes: The named axes of each array.
        frozen: Names of the parameters that are not trained, including those of the base.
        optimizer: The optimizer of the trained parameters.
        abstract: The state's shapes, dtypes and shardings.
        base: The record of the base for checkpoints; None unless it was read from a folder.
    """

    def __init__(self, task: Task, spec: TrainSpec, placement: Placement, total_steps: int) -> None:
        self._task, self._spec, self._placement = task, spec, placement
        self.precision = precision.resolve_precision(spec.precision)
        is_our_task = type(task).__module__.startswith("jaxlaunch.trainer.")
        self.is_builtin = is_our_task and not isinstance(
            spec.model, CustomModel | TransformersModel
        )
        self.adapters: Adapters | None = None
        if spec.lora is not None:
            is_module = isinstance(spec.model, TransformersModel)
            self.adapters = (ModuleAdapters if is_module else Adapters)(spec, self.precision.params)
        self.base: dict[str, Any] | None = None
        with self.trace_context():
            model = nnx.eval_shape(self._build_model)
        self.arrays = ModelArrays(model)
        # A classifier has only the logits of its classes.
        self._has_whole_logits = type(model) is TorchModel and model.head_name is None
        self.axes = sharding.axes_by_path(task.sharding, self.arrays.axes)
        self._base_names = frozenset(filter(self._is_base_name, self.arrays.params))
        saved = self.saved_params(self.arrays.params)
        self.frozen = self._base_names | optimizers.find_frozen(spec.optimizer, saved)
        self.optimizer = optimizers.build_optimizer(spec.optimizer, total_steps, self.axes)
        with self.trace_context():
            shapes = jax.eval_shape(self._initial_state, {})
            self.abstract = placement.abstract_state(shapes, self.axes, self.optimizer, self.frozen)
            trained = self.trained_params(self.abstract.params)
            optimizers.check_optimizer(spec.optimizer, self.optimizer, trained)

    @property
    def _has_reference(self) -> bool:
        """Whether the model has a frozen copy, which a task knows once it has built the model."""
        return self.adapters is None and self._task.needs_reference

    @contextlib.contextmanager
    def trace_context(self) -> Iterator[None]:
        """Set the mesh and the matmul precision for tracing, and keep flax from placing arrays.

        In built-in tasks and models, implicit broadcasting between different ranks is an error,
        because it would hide a wrong shape. User code may broadcast.
        """
        matmul, no_context = self.precision.matmul, contextlib.nullcontext()
        rank_promotion = jax.numpy_rank_promotion("raise") if self.is_builtin else no_context
        matmul_precision = jax.default_matmul_precision(matmul) if matmul else no_context
        eager_sharding = nnx.use_eager_sharding(False)  # type: ignore[no-untyped-call]
        with rank_promotion, jax.set_mesh(self._placement.mesh), eager_sharding, matmul_precision:
            yield

    def random_keys(self) -> Array:
        """Return two random keys: one for the initial weights, one for the steps."""
        high, low = divmod(self._spec.seed, 2**32)
        # In its default configuration JAX keeps only the low 32 bits of a seed.
        key = jax.random.key(low)
        return jax.random.split(jax.random.fold_in(key, high) if high else key)

    def run_notes(self) -> list[str]:
        """Return the notes on optimizer, adapters and reference for a run's log and summary."""
        state, saved = self.abstract, self.saved_params(self.abstract.params)
        notes = optimizers.describe_optimizer(self._spec.optimizer, saved, self.axes)
        if self.adapters is not None:
            tree = self.to_tree(state)
            notes.append(self.adapters.describe_training(state.params, state.opt, tree))
        if self._has_reference:
            size = memory.total_bytes({name: state.params[name] for name in self._base_names})
            notes.append(f"the reference is a frozen copy of the model, {size:,} bytes")
        if self._has_whole_logits:
            notes.append(
                "the logits of a batch are in memory at once: loss.chunks needs a model whose "
                "features a single matrix maps to logits"
            )
        return notes

    # --- selection of parameters ------------------------------------------------------------------

    def trained_params(self, params: NamedArrays) -> NamedArrays:
        """Select the parameters that are not frozen."""
        return {name: leaf for name, leaf in params.items() if name not in self.frozen}

    def split_frozen(self, params: NamedArrays) -> tuple[NamedArrays, NamedArrays]:
        """Split `params` into trained and frozen ones."""
        frozen = {name: leaf for name, leaf in params.items() if name in self.frozen}
        return self.trained_params(params), frozen

    def saved_params(self, params: NamedArrays) -> NamedArrays:
        """Select the parameters that a checkpoint holds: all except the base."""
        return {name: leaf for name, leaf in params.items() if name not in self._base_names}

    def _is_base_name(self, name: str) -> bool:
        if self._has_reference:
            return name.startswith(REFERENCE_PREFIX)
        return self.adapters is not None and not is_adapter(name)

    # --- a new state ------------------------------------------------------------------------------

    def init_state(self, *, draws_head: bool = True) -> TrainState:
        """Return the initial state, the same on every mesh.

        Raises SpecError if the weights to start from do not fit the model, and without `draws_head`
        if they lack its head.
        """
        model, loaded = self._spec.model, self._read_base()
        saved = self.saved_params(self.abstract.params)
        buffers = float_buffers(self.abstract.buffers)
        if self.adapters is not None:
            loaded |= self.adapters.read_initial_adapters(saved, loaded)
            # A base of transformers may have buffers, such as the bias of a router.
            if buffers and isinstance(model, TransformersModel):
                loaded |= base_weights.iterate_parameters(model, buffers, self._spec.seed)
        elif isinstance(model, PublishedModel) and model.init_from is not None:
            targets = {
                name: leaf
                for name, leaf in (saved | buffers).items()
                if not name.startswith(REFERENCE_PREFIX)
            }
            loaded |= base_weights.iterate_parameters(
                model, targets, self._spec.seed, draws_head=draws_head
            )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        state: TrainState = self._compute_once(self._initial_state, shardings, loaded)
        return state

    def _compute_once(self, function: Any, shardings: Any, *donated: Any) -> Any:
        """Run `function` on the mesh, compiled as a program that runs once."""
        options = setup_compiler_options(self._placement.mesh)
        with self.trace_context():
            return jax.jit(
                function,
                donate_argnums=tuple(range(len(donated))),
                out_shardings=shardings,
                compiler_options=options,
            )(*donated)

    def _build_model(self) -> nnx.Module:
        candidate: Any = self._task.model(self._spec, nnx.Rngs(self.random_keys()[0]))
        with user_code.append_place(type(self._task).model):
            model = checked_model(self._spec.task, candidate)
        with user_code.append_place(model):
            check_arrays(self._spec.task, model)
        if self.adapters is not None:
            self.adapters.attach_to_model(model, self.random_keys()[0])
        if self._has_reference:
            # The reference gets the same weights from the same key.
            attach_reference(model, self._task.model(self._spec, nnx.Rngs(self.random_keys()[0])))
        return model

    def _initial_state(self, loaded: NamedArrays) -> TrainState:
        """Return the state before the first step; arrays not in `loaded` are initialized."""
        initial_params, buffers = self.arrays.split_model(self._build_model())
        params: NamedArrays = {}
        for name, param in initial_params.items():
            params[name] = self._cast_stored(name, loaded.get(name, param))
        buffers = {
            # The reference has the statistics of the model that it is a copy of.
            name: loaded.get(name.removeprefix(REFERENCE_PREFIX), leaf)
            for name, leaf in buffers.items()
        }
        trained, ema = self.trained_params(params), None
        if self._spec.optimizer.ema is not None:
            ema = optimizers.init_ema(trained | float_buffers(buffers))
        scale = loss_scale.init_loss_scale() if self.precision.is_scaled else None
        opt = self.optimizer.init(trained)
        return TrainState(jnp.zeros((), jnp.int32), params, opt, ema, buffers, scale)

    def _cast_stored(self, name: str, param: Any) -> Array:
        """Cast a parameter to the dtype in which the state stores it."""
        is_base = name in self._base_names
        if self.adapters is not None and is_base:
            return self.adapters.cast_frozen(name, param)
        return cast_floats(param, self.precision.compute if is_base else self.precision.params)

    def _read_base(self) -> NamedArrays:
        """Return the base's parameters, read from their folder or initialized from the seed."""
        model = self._spec.model
        abstract_params = {name: self.abstract.params[name] for name in sorted(self._base_names)}
        if not abstract_params:
            return {}
        if isinstance(model, PublishedModel) and model.init_from is not None:
            prefix = REFERENCE_PREFIX if self._has_reference else ""
            abstract_base = {
                name.removeprefix(prefix): leaf for name, leaf in abstract_params.items()
            }
            params, self.base = frozen_base.read_base(model, abstract_base, self._spec.seed)
            return {prefix + name: param for name, param in params.items()}
        shardings = {name: leaf.sharding for name, leaf in abstract_params.items()}
        base: NamedArrays = self._compute_once(
            lambda: {name: self._initial_state({}).params[name] for name in shardings}, shardings
        )
        return base

    # --- the state in a checkpoint ----------------------------------------------------------------

    def to_tree(self, state: TrainState) -> dict[str, Any]:
        """Convert the state to dicts of leaves by name for a checkpoint, without the base."""
        parts = {
            "params": self.saved_params(state.params),
            "opt": {
                jax.tree_util.keystr(path, simple=True, separator="."): leaf
                for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt)
            },
            "ema": state.ema,
            "rest": state.buffers,
            "scale": None if state.scale is None else state.scale._asdict(),
        }
        return {"step": state.step, **{name: dict(part) for name, part in parts.items() if part}}

    def from_tree(self, tree: Mapping[str, Any]) -> TrainState:
        """Convert a tree from `to_tree` to a state, and add the base."""
        names = self.to_tree(self.abstract).get("opt", {})
        structure = jax.tree.structure(self.abstract.opt)
        return TrainState(
            tree["step"],
            self.add_base(tree["params"]),
            jax.tree.unflatten(structure, [tree["opt"][name] for name in names]),
            None if self.abstract.ema is None else dict(tree["ema"]),
            dict(tree.get("rest", {})),
            None if self.abstract.scale is None else LossScale(**tree["scale"]),
        )

    def add_base(self, saved: NamedArrays) -> NamedArrays:
        """Return all parameters: those that a checkpoint holds, and those of the base."""
        return self._read_base() | dict(saved)

    @contextlib.contextmanager
    def check_base(self, recorded: Mapping[str, Any] | None, owner: str) -> Iterator[None]:
        """Check that the base that is read inside this context is the one of a checkpoint.

        `recorded` is the checkpoint's record of its base, and `owner` names the checkpoint in
        messages. Raises CheckpointError if the base was from another folder, or if that folder now
        holds other weights.
        """
        model = self._spec.model
        holds = frozen_base.REFERENCE_OF if self._has_reference else frozen_base.ADAPTERS_OF
        if self._base_names and isinstance(model, PublishedModel):
            frozen_base.check_origin(recorded, model, owner, holds)
        yield
        if self.base is not None and recorded is not None:
            frozen_base.check_digest(recorded, self.base, owner, contents=holds)
