"""The checked arguments of `jaxlaunch.run`: the state, the step and the data of a program.

The state is any pytree of arrays: dicts, optax states, flax.nnx modules, random keys. Between steps
it is a flat dict, name -> array. Within a step it is a pytree with the structure of the initial
one, which also supplies everything that is not an array (functions, sizes).

A batch is a function of the step, so that a resumed run sees the same batches. Each process makes
the global batch and puts its own rows on its devices. From a dataset with `batch=` a process reads
only its own rows.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch import contract
from jaxlaunch.contract import Key
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.data import order, pipeline
from jaxlaunch.trainer.data.examples import first_not_finite
from jaxlaunch.trainer.data.pipeline import Pipeline, Prefetcher
from jaxlaunch.trainer.errors import DataError, SpecError, list_first
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.sources.torch import MapDataset
from jaxlaunch.trainer.step.executable import Executable, setup_compiler_options

Tree = Any
# Name -> array, or ShapeDtypeStruct.
NamedArrays = dict[str, Any]

# Batches that are prepared before they are needed.
PREFETCHED_BATCHES = 2
# Names of arrays that a message lists.
MAX_LISTED = 5
# The suffix of the names of metrics that must be finite.
LOSS_SUFFIX = "loss"
# Names of a run's records that a program's metrics may have, and those that they may not.
_ALLOWED_METRICS = {Key.LOSS, Key.GRAD_NORM, Key.LEARNING_RATE, Key.LOSS_SCALE}
RESERVED_METRICS = contract.RESERVED_METRICS - _ALLOWED_METRICS

STATE_HINT = (
    "a state is a pytree of arrays: dicts, lists, tuples, dataclasses and flax.nnx modules of them"
)
STEP_HINT = "return (state, metrics), the new state and a dict of scalars"
DATA_HINT = (
    "a function of the step that returns a batch, a dataset with __len__ and __getitem__ and its "
    "batch=, or None for a step without data"
)


class ProgramState:
    """A program's state, or the function that creates it.

    The constructor allocates no arrays. It raises SpecError if the state is not a pytree of arrays,
    or if the sharding rules do not fit.

    Attributes:
        name: The state or the function in messages.
        shardings: The sharding of each array by name.
        abstract: The shape, dtype and sharding of each array by name.
    """

    def __init__(
        self,
        state: Any,
        mesh: jax.sharding.Mesh,
        rules: Mapping[str, Sequence[str | None]] | None = None,
    ) -> None:
        self._state, self._mesh = state, mesh
        # Some states are callable, such as models, but only a function is its own single leaf.
        leaves = jax.tree.leaves(state)
        self._is_function = callable(state) and len(leaves) == 1 and leaves[0] is state
        self.name, tree = "jaxlaunch.run(state=…)", state
        if self._is_function:
            self.name = user_code.describe_function(state)
            tree = self._trace_function()
        arrays = self._check_leaves(tree)
        axes = sharding.axes_by_path(rules or {}, dict.fromkeys(arrays))
        self._structure = jax.tree.structure(tree)
        self.shardings = {
            name: sharding.state_sharding(name, leaf.shape, axes[name], mesh)
            for name, leaf in arrays.items()
        }
        self.abstract: NamedArrays = {
            name: leaf.update(sharding=self.shardings[name]) for name, leaf in arrays.items()
        }

    def init_arrays(self) -> NamedArrays:
        """Return the arrays before the first step, on the devices."""
        stored: NamedArrays = {}
        if not self._is_function:
            abstract_arrays = self.to_stored(self.abstract)
            stored = {
                name: _put_on_mesh(leaf, abstract_arrays[name])
                for name, leaf in name_leaves(self._state).items()
            }

        def make_arrays(stored: NamedArrays) -> NamedArrays:
            if self._is_function:
                return _without_weak_types(name_leaves(self._state()))
            return self.from_stored(jax.tree.map(jnp.copy, stored))

        with self.trace_context():
            options = setup_compiler_options(self._mesh)
            init = jax.jit(make_arrays, out_shardings=self.shardings, compiler_options=options)
            state: NamedArrays = init(stored)
        return state

    def to_tree(self, arrays: NamedArrays) -> Tree:
        """Convert the arrays to the program's pytree."""
        return jax.tree.unflatten(self._structure, [arrays[name] for name in self.abstract])

    def to_stored(self, arrays: NamedArrays) -> NamedArrays:
        """Convert arrays, abstract or not, to those of a checkpoint: random keys to numbers."""
        return {name: _unwrap_key(leaf) for name, leaf in arrays.items()}

    def from_stored(self, stored: Mapping[str, Any]) -> NamedArrays:
        """Return the inverse of `to_stored`."""
        arrays = dict(stored)
        for name, leaf in self.abstract.items():
            if _is_key(leaf):
                arrays[name] = jax.random.wrap_key_data(stored[name], impl=leaf.dtype._impl)
        return arrays

    def from_tree(self, function: str, tree: Tree) -> NamedArrays:
        """Return the arrays that `function` returned. Raises SpecError if they differ."""
        arrays = name_leaves(tree)
        if (difference := find_difference(self.abstract, arrays)) is not None:
            raise SpecError(
                f"{function}: the state that it returns has {difference}; return the arrays that "
                "it was given"
            )
        return _without_weak_types(arrays)

    @contextlib.contextmanager
    def trace_context(self) -> Iterator[None]:
        """Set the mesh for tracing the program's functions, and keep flax from placing arrays."""
        with jax.set_mesh(self._mesh), nnx.use_eager_sharding(False):  # type: ignore[no-untyped-call]
            yield

    def _trace_function(self) -> Tree:
        """Return the pytree that the function creates, with abstract arrays."""
        trees: list[Tree] = []

        def make_arrays() -> list[Any]:
            # A traced function can only return arrays. The tree has other objects, too.
            trees.append(self._state())
            return [leaf for leaf in jax.tree.leaves(trees[0]) if _is_array(leaf)]

        with self.trace_context():
            jax.eval_shape(make_arrays)
        return trees[0]

    def _check_leaves(self, tree: Tree) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of each leaf. Raises SpecError for an invalid state."""
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        if not flat:
            kind = user_code.describe_type(tree)
            raise SpecError(f"{self.name} returns {kind} without an array; {STATE_HINT}")
        leaves: dict[str, jax.ShapeDtypeStruct] = {}
        for path, leaf in flat:
            name = _leaf_name(path)
            if not _is_array(leaf):
                kind = user_code.describe_type(leaf)
                raise SpecError(f"{self.name}: {name} is {kind}, not an array; {STATE_HINT}")
            if name in leaves:
                raise SpecError(
                    f"{self.name}: two arrays of the state have the name {name}; rename one of "
                    "their keys"
                )
            dtype = leaf.dtype if _is_key(leaf) else jnp.result_type(leaf)
            leaves[name] = jax.ShapeDtypeStruct(np.shape(leaf), dtype)
        return leaves


class ProgramStep:
    """A program's `step(state, batch) -> (state, metrics)`, or `step(state)` without data.

    The constructor traces the step once. It raises SpecError, with file and line, if the step is
    not such a function, and passes on every exception of the trace.
    """

    def __init__(
        self, step: Any, state: ProgramState, batch: Tree | None, mesh: jax.sharding.Mesh
    ) -> None:
        if not callable(step):
            raise SpecError(
                f"jaxlaunch.run(step=…) is {user_code.describe_type(step)}, not a function; it is "
                "called step(state, batch)"
            )
        self.name = user_code.describe_function(step)
        self._step, self._state, self._mesh = step, state, mesh
        if batch is None:
            self._arguments: tuple[Any, ...] = (state.abstract,)
            _check_signature(step, "as step(state)", 1, "; without data= a step has no batch")
        else:
            self._arguments = (state.abstract, batch)
            _check_signature(step, "as step(state, batch)", 2)
        self._compiled: Executable | None = None
        with state.trace_context():
            _, self._outputs = jax.eval_shape(self._update, *self._arguments)

    def compile(self) -> None:
        """Compile the step ahead of time, donating its state."""
        replicated = NamedSharding(self._mesh, PartitionSpec())
        shardings = (self._state.shardings, jax.tree.map(lambda _: replicated, self._outputs))
        with self._state.trace_context():
            self._compiled = Executable(
                "program's",
                self._update,
                self._arguments,
                donate_argnums=0,
                out_shardings=shardings,
            )

    def __call__(
        self, state: NamedArrays, batch: Tree | None
    ) -> tuple[NamedArrays, dict[str, Any]]:
        """Take a step, donating the state. Return the new state and the metrics with `finite`."""
        assert self._compiled is not None, "compile comes before a step"
        arguments = (state,) if batch is None else (state, batch)
        new_state, metrics = self._compiled(*arguments)
        return new_state, metrics

    def hlo_texts(self) -> list[str]:
        """Return the HLO text of the compiled step."""
        return [] if self._compiled is None else [self._compiled.hlo_text()]

    def _update(self, arrays: NamedArrays, *batch: Tree) -> tuple[NamedArrays, dict[str, Any]]:
        outputs = self._step(self._state.to_tree(arrays), *batch)
        if not isinstance(outputs, tuple) or len(outputs) != 2:
            kind = user_code.describe_type(outputs)
            raise SpecError(f"{self.name}: it returned {kind}; {STEP_HINT}")
        new_state = self._state.from_tree(self.name, outputs[0])
        metrics = check_metrics(self.name, outputs[1])
        scalars = {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}
        finite = jnp.ones((), bool)
        for name, value in scalars.items():
            if name.endswith(LOSS_SUFFIX):
                finite &= jnp.isfinite(value)
        return new_state, {**scalars, Key.FINITE: finite}


def check_metrics(function: str, metrics: Any) -> Mapping[str, Any]:
    """Return the metrics. Raises SpecError unless they are a dict of real scalars."""
    if not isinstance(metrics, Mapping):
        kind = user_code.describe_type(metrics)
        raise SpecError(f"{function}: its metrics are {kind}, not a dict of scalars; {STEP_HINT}")
    for name, value in metrics.items():
        if not isinstance(name, str):
            kind = user_code.describe_type(name)
            raise SpecError(f"{function}: the name of metric {name!r} is {kind}, not text")
        if name in RESERVED_METRICS or name.startswith(contract.EVAL_PREFIX):
            raise SpecError(
                f"{function}: a metric cannot be named {name!r}; the records of a run use "
                f"{', '.join(sorted(RESERVED_METRICS))}, and what begins with "
                f"{contract.EVAL_PREFIX}"
            )
        is_scalar = isinstance(value, bool | int | float | _ArrayLike) and jnp.shape(value) == ()
        if not is_scalar or jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
            raise SpecError(
                f"{function}: metric {name!r} is {_describe_leaf(value)}, not a real scalar; "
                "return its mean over the batch"
            )
    return metrics
    return metrics


class ProgramBatches:
    """The batches of a program's data, on the mesh.

    The constructor makes and checks the batch of step 0. It raises SpecError if the data is invalid
    or a batch cannot be divided.

    Attributes:
        name: The data in messages.
        size: Rows of a batch.
        abstract: The shape, dtype and sharding of each array of a batch.
        identity: The facts that must not change when a run resumes.
    """

    def __init__(
        self,
        data: Any,
        mesh: jax.sharding.Mesh,
        *,
        batch: int | None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._mesh = mesh
        self._pipeline: Pipeline | None = None
        # The batch of step 0, unless the data is a dataset.
        self._first_batch: Tree = None
        self.identity: dict[str, Any] = {}
        if batch is None:
            self._make_batch, self.name, self._is_repeatable = _batch_function(data)
            self._first_batch = self._global_batch(0)
            leaves = name_leaves(self._first_batch)
            rows = {name: leaf.shape[0] for name, leaf in leaves.items() if leaf.ndim}
            if len(set(rows.values())) != 1 or 0 in rows.values():
                listed = list_first((f"{name} {count}" for name, count in rows.items()), MAX_LISTED)
                raise SpecError(
                    f"{self.name}: the arrays of a batch have one number of rows, their first "
                    f"dimension, and here they have: {listed or 'no array with rows'}"
                )
            self.size = next(iter(rows.values()))
        else:
            missing = [name for name in ("__len__", "__getitem__") if not hasattr(data, name)]
            if missing or isinstance(data, Mapping):
                lacks = f" without {', '.join(missing)}" if missing else ""
                raise SpecError(
                    f"jaxlaunch.run(batch={batch}) needs a dataset of examples, and data is "
                    f"{user_code.describe_type(data)}{lacks}; leave batch out for {DATA_HINT}"
                )
            self.size, self.name = batch, type(data).__name__
        if self.size % (shards := meshes.count_shards(mesh)):
            raise SpecError(
                f"{self.name}: a batch of {self.size} rows cannot be split evenly over "
                f"{meshes.describe_shards(mesh)} devices; use a multiple of {shards}"
            )
        self._rows = meshes.process_rows(mesh, self.size)
        if batch is not None:
            source = _ProgramDataset(data)
            self._pipeline = Pipeline(
                source,
                dict,
                batch=batch,
                seed=seed,
                shuffle=shuffle,
                rows=self._rows,
                prefetch=PREFETCHED_BATCHES,
                threads=1,
            )
            self.identity = {
                "data": source.fingerprint(),
                "batch": batch,
                "seed": seed,
                "shuffle": shuffle,
            }
        self.abstract: Tree = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            self._put_rows(self._local_rows(0)),
        )

    def check_repeats(self) -> None:
        """Raise DataError if a second call for step 0 returns another batch, as after a resume."""
        if self._pipeline is not None or not self._is_repeatable:
            return
        repeated = name_leaves(self._global_batch(0))
        for name, leaf in name_leaves(self._first_batch).items():
            if not np.array_equal(leaf, repeated[name], equal_nan=leaf.dtype.kind in "fc"):
                raise DataError(
                    f"{self.name}: asked twice for step 0 it gave two batches that differ in "
                    f"{name}; make a batch a function of the step, drawing from "
                    "np.random.default_rng(step), or a resumed run sees other data"
                )

    def iterate_batches(self, spans: Sequence[range]) -> Prefetcher[Tree]:
        """Return the prefetched batches of these spans, of one step each, on the devices."""
        if self._pipeline is not None:
            return self._pipeline.iterate(spans, self._put_batch)

        def read_rows(span: range, rows: range) -> Tree:
            return self._local_rows(span.start)

        read = pipeline.iterate_batches(read_rows, spans, self._rows, threads=1, put=self._put_rows)
        return Prefetcher(read, ahead=PREFETCHED_BATCHES)

    def describe_not_finite(self, step: int) -> str | None:
        """Describe the first number in the batch of a step that is not finite; None if all are."""
        if self._pipeline is not None:
            return self._pipeline.describe_not_finite(step)
        batch = self._first_batch if step == 0 else self._global_batch(step)
        for name, leaf in name_leaves(batch).items():
            if (fault := first_not_finite(leaf)) is not None:
                row = f" in row {fault[0]}" if leaf.ndim else ""
                return f"{self.name}: the batch of step {step} has {name} {fault[1]}{row}"
        return None

    def _put_batch(self, batch: Mapping[str, Any]) -> Tree:
        return self._put_rows(_without_weight(batch))

    def _put_rows(self, local_rows: Tree) -> Tree:
        """Put this process's rows in global arrays over the batch axes; replicate scalars."""
        row_sharding = meshes.batch_sharding(self._mesh)
        replicated = NamedSharding(self._mesh, PartitionSpec())

        def put_leaf(leaf: np.ndarray[Any, Any]) -> Any:
            shape = (self.size, *leaf.shape[1:]) if leaf.ndim else ()
            leaf_sharding = row_sharding if leaf.ndim else replicated
            return jax.make_array_from_process_local_data(leaf_sharding, leaf, shape)

        return jax.tree.map(put_leaf, local_rows)

    def _local_rows(self, step: int) -> Tree:
        """Return this process's rows of the batch of a step."""
        if self._pipeline is not None:
            return _without_weight(self._pipeline.read_batch(step))
        batch = self._first_batch if step == 0 else self._global_batch(step)
        rows = slice(self._rows.start, self._rows.stop)
        return jax.tree.map(lambda leaf: leaf[rows] if leaf.ndim else leaf, batch)

    def _global_batch(self, step: int) -> Tree:
        """Return the batch of a step. Raises DataError if it differs in structure from step 0's."""
        output = self._make_batch(step)
        if inspect.isgenerator(output) or isinstance(output, Iterator):
            kind = user_code.describe_type(output)
            raise SpecError(f"{self.name}: the batch of step {step} is {kind}; return its arrays")
        leaves = name_leaves(output)
        wrong_name = next((name for name, leaf in leaves.items() if not _is_number(leaf)), None)
        if wrong_name is not None or not leaves:
            fault = user_code.describe_type(output)
            if wrong_name is not None:
                fault = f"{wrong_name} is {_describe_leaf(leaves[wrong_name])}"
            raise SpecError(
                f"{self.name}: in the batch of step {step} {fault}; a batch is a pytree of arrays "
                "of numbers"
            )
        batch = jax.tree.map(_to_device_dtype, output)
        difference = None
        if self._first_batch is not None:
            difference = find_difference(name_leaves(self._first_batch), name_leaves(batch))
        if difference is not None:
            raise DataError(
                f"{self.name}: the batch of step {step} has {difference}, as that of step 0; every "
                "batch has the same arrays, shapes and dtypes: pad the last one of an epoch, or "
                "take it from the next"
            )
        return batch


@runtime_checkable
class _Indexable(Protocol):
    """A program's object with `data[index]`."""

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class _BatchMaker(Protocol):
    """A program's object with `data.batch(step)`."""

    def batch(self, step: int, /) -> Any: ...


class _ProgramDataset(MapDataset):
    """A source of examples over a dataset object of the program."""

    def __init__(self, dataset: Any) -> None:
        self.name, self._args, self._dataset = type(dataset).__name__, {}, dataset
        self.takes_rng = order.takes_rng(dataset.__getitem__)


def _batch_function(data: Any) -> tuple[Callable[[int], Tree], str, bool]:
    """Return the function step -> batch, its name, and whether to check that it is repeatable."""
    kind = user_code.describe_type(data)
    if isinstance(data, Iterator) or inspect.isgeneratorfunction(data):
        raise SpecError(
            f"jaxlaunch.run(data=…) is {kind}, which cannot go back to the batch of a step when "
            f"the run resumes; give {DATA_HINT}"
        )
    is_plain = not isinstance(data, type | _Indexable)
    if is_plain and isinstance(data, _BatchMaker) and callable(data.batch):
        return data.batch, f"{type(data).__name__}.batch", True
    if inspect.isroutine(data) or (is_plain and callable(data)):
        _check_signature(data, "with the step, as data(step)", 1)
        return data, user_code.describe_function(data), True
    is_list = isinstance(data, Sized) and isinstance(data, _Indexable)
    if is_list and not isinstance(data, Mapping | str | bytes):
        if not len(data):
            raise DataError(f"jaxlaunch.run(data=…) is {kind} without an item")
        return lambda step: data[step % len(data)], f"{type(data).__name__}[step]", False
    raise SpecError(f"jaxlaunch.run(data=…) is {kind}; give {DATA_HINT}")


def _check_signature(function: Callable[..., Any], call: str, count: int, hint: str = "") -> None:
    """Raise SpecError unless the function can be called with `count` positional arguments."""
    # Functions written in C may have no signature.
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(function).bind(*range(count))
        except TypeError as error:
            name = user_code.describe_function(function)
            raise SpecError(f"{name} cannot be called {call}: {error}{hint}") from None


# --- the leaves of a pytree -----------------------------------------------------------------------


@runtime_checkable
class _ArrayLike(Protocol):
    """An array of any library."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


def name_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by dotted name: `generator.layers.0.kernel`."""
    return {_leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _leaf_name(path: Iterable[Any]) -> str:
    # An nnx variable holds its array in `value`, which is not part of the name.
    name = jax.tree_util.keystr(tuple(path), simple=True, separator=".")
    return name.removesuffix(".value") or "state"


def find_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Describe the first leaf whose presence, shape or dtype differs; None if there is none."""
    for name in dict.fromkeys([*old, *new]):
        if name not in new:
            return f"no {name} ({_describe_leaf(old[name])})"
        if name not in old:
            return f"{name} ({_describe_leaf(new[name])}), which is new"
        if (old_text := _describe_leaf(old[name])) != (new_text := _describe_leaf(new[name])):
            return f"{name} as {new_text}, not {old_text}"
    return None


def _describe_leaf(leaf: Any) -> str:
    """Return `float32[4, 8]` for an array, and the type of anything else."""
    is_array = isinstance(leaf, _ArrayLike)
    return f"{leaf.dtype}{list(leaf.shape)}" if is_array else user_code.describe_type(leaf)


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array | bool | int | float | complex):
        return True
    return isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufcV"


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    is_host_array = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc"
    return isinstance(leaf, bool | int | float) or is_host_array


def _is_key(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return is_array and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _without_weak_types(arrays: NamedArrays) -> NamedArrays:
    """Convert weak types to strong ones, because a step is compiled for one type only."""
    return {
        name: leaf if _is_key(leaf) else jnp.asarray(leaf, jnp.result_type(leaf))
        for name, leaf in arrays.items()
    }


def _unwrap_key(leaf: Any) -> Any:
    """Return an array unchanged and a random key as its numbers. Either may be abstract."""
    if not _is_key(leaf):
        return leaf
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.random.key_data(leaf)
    assert isinstance(leaf.sharding, NamedSharding)
    # The numbers have one more dimension than the key, which is replicated.
    data_sharding = NamedSharding(leaf.sharding.mesh, leaf.sharding.spec)
    return jax.eval_shape(jax.random.key_data, leaf).update(sharding=data_sharding)


def _put_on_mesh(leaf: Any, abstract_array: jax.ShapeDtypeStruct) -> jax.Array:
    """Put a program's array on the mesh, split as `abstract_array` is."""
    data = _unwrap_key(leaf)
    if isinstance(data, jax.Array) and not data.is_fully_addressable:
        # It is a global array already.
        return data
    array = np.asarray(data, abstract_array.dtype)
    return jax.make_array_from_callback(array.shape, abstract_array.sharding, array.__getitem__)


def _to_device_dtype(leaf: Any) -> np.ndarray[Any, Any]:
    """Convert an array to the dtype that it has on a device, by default one of 32 bits."""
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _without_weight(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: leaf for name, leaf in batch.items() if name != "weight"}
