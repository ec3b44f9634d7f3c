"""The batches of a loop: a function of the step, so that a run that resumes sees what it would have seen.

Each process makes the global batch and sends its own rows to its devices; of a dataset with `batch=` it reads its own
rows alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.data import example_rng, reader
from jaxlaunch.trainer.data.examples import first_not_finite
from jaxlaunch.trainer.data.pipeline import Pipeline
from jaxlaunch.trainer.data.prefetch import Prefetcher
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.loop import trees
from jaxlaunch.trainer.loop.options import Options
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.sources.torch import MapStyle

Tree = Any
AHEAD = 2  # batches made before they are needed
FORMS = (
    "a function of the step that returns a batch, a dataset with __len__ and __getitem__ and its batch=, or None for a "
    "step without data"
)


class Batches:
    """The batches of `data` on the mesh; `size` is their rows. The first is made at once, and judged.

    Raises SpecError for what is no data and for batches that do not divide; DataError for batches that differ.
    """

    def __init__(self, data: Any, options: Options, mesh: jax.sharding.Mesh) -> None:
        self._mesh = mesh
        self._pipeline: Pipeline | None = None
        self._first: Tree = None  # the batch of step 0, of data that is no dataset
        self.identity: dict[str, Any] = {}  # what must not change when a run resumes
        if options.batch is not None:
            self._open(data, options)
        else:
            self._made, self.name, self._is_asked_twice = _function(data)
            self._first = self._batch(0)
            self.size = self._rows_of(self._first)
            self._check_division()
            self._rows = meshes.rows(mesh, self.size)
        self._like = self.put(self._local(0))
        self.abstract: Tree = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self._like
        )

    def check_repeats(self) -> None:
        """Raises DataError where the first batch, asked for again, is another: a resumed run would see other data."""
        if self._pipeline is not None or not self._is_asked_twice:
            return
        then, now = trees.named(self._first), trees.named(self._batch(0))
        for name, leaf in then.items():
            if not np.array_equal(leaf, now[name], equal_nan=leaf.dtype.kind in "fc"):
                raise DataError(
                    f"{self.name}: asked twice for step 0 it gave two batches that differ in {name}; make a batch a "
                    "function of the step, drawing from np.random.default_rng(step), or a resumed run sees other data"
                )

    def iterate(self, spans: Sequence[range]) -> Prefetcher[Tree]:
        """The batches of these steps on the devices, made ahead; each span is of one step."""
        if self._pipeline is not None:
            return self._pipeline.iterate(spans, lambda batch: self.put(_without_weight(batch)))
        read = reader.iterate(lambda span, rows: self._local(span.start), spans, self._rows, threads=1, put=self.put)
        return Prefetcher(read, ahead=AHEAD)

    def put(self, local: Tree) -> Tree:
        """This process's rows as global arrays, split over the batch axes; numbers without rows on every device."""
        rows, everywhere = meshes.batch_sharding(self._mesh), NamedSharding(self._mesh, PartitionSpec())

        def one(leaf: np.ndarray[Any, Any]) -> jax.Array:
            """An array of the batch."""
            shape = (self.size, *leaf.shape[1:]) if leaf.ndim else ()
            placed: jax.Array = jax.make_array_from_process_local_data(rows if leaf.ndim else everywhere, leaf, shape)
            return placed

        return jax.tree.map(one, local)

    def _open(self, data: Any, options: Options) -> None:
        """A dataset, of whose examples `batch=` makes a batch."""
        missing = [name for name in ("__len__", "__getitem__") if not hasattr(data, name)]
        if missing or isinstance(data, Mapping):
            raise SpecError(
                f"jaxlaunch.run(batch={options.batch}) takes examples of a dataset, and data is {trees.kind(data)}"
                f"{f' without {trees.listed(missing)}' if missing else ''}; leave batch out for {FORMS}"
            )
        assert options.batch is not None
        source = _Items(data)
        self.size, self.name = options.batch, source.name
        self._check_division()
        self._rows = meshes.rows(self._mesh, self.size)
        self._pipeline = Pipeline(
            source,
            dict,
            batch=self.size,
            rows=self._rows,
            seed=options.seed,
            shuffle=options.shuffle,
            prefetch=AHEAD,
            threads=1,
        )
        order = {"batch": self.size, "seed": options.seed, "shuffle": options.shuffle}
        self.identity = {"data": source.fingerprint(), **order}

    def not_finite(self, step: int) -> str | None:
        """What is no finite number in the batch of a step, in a sentence; None where all are."""
        if self._pipeline is not None:
            return self._pipeline.not_finite(step)
        for name, leaf in trees.named(self._first if step == 0 else self._batch(step)).items():
            if (found := first_not_finite(leaf)) is not None:
                row = f" in row {found[0]}" if leaf.ndim else ""
                return f"{self.name}: the batch of step {step} has {name} {found[1]}{row}"
        return None

    def _local(self, step: int) -> Tree:
        """This process's rows of the batch of a step."""
        if self._pipeline is not None:
            return _without_weight(self._pipeline.batch(step))
        batch = self._first if step == 0 else self._batch(step)
        start, stop = self._rows.start, self._rows.stop
        return jax.tree.map(lambda leaf: leaf[start:stop] if leaf.ndim else leaf, batch)

    def _batch(self, step: int) -> Tree:
        """The global batch of a step, as numpy arrays. Raises what the program does, DataError where it differs."""
        made = self._made(step)
        if inspect.isgenerator(made) or isinstance(made, Iterator):
            raise SpecError(f"{self.name}: the batch of step {step} is {trees.kind(made)}; return its arrays")
        leaves = trees.named(made)
        wrong = {name: leaf for name, leaf in leaves.items() if not _is_numbers(leaf)}
        if wrong or not leaves:
            what = f"{next(iter(wrong))} is {trees.form(next(iter(wrong.values())))}" if wrong else trees.kind(made)
            raise SpecError(
                f"{self.name}: in the batch of step {step} {what}; a batch is a pytree of arrays of numbers"
            )
        batch = jax.tree.map(_narrow, made)
        if self._first is not None:
            difference = trees.differing(trees.named(self._first), trees.named(batch))
            if difference is not None:
                raise DataError(
                    f"{self.name}: the batch of step {step} has {difference}, as that of step 0; every batch has the "
                    "same arrays, shapes and dtypes: pad the last one of an epoch, or take it from the next"
                )
        return batch

    def _rows_of(self, batch: Tree) -> int:
        rows = {name: leaf.shape[0] for name, leaf in trees.named(batch).items() if leaf.ndim}
        if len(set(rows.values())) != 1 or 0 in rows.values():
            each = trees.listed(f"{name} {count}" for name, count in rows.items()) or "no array with rows"
            raise SpecError(
                f"{self.name}: the arrays of a batch have one number of rows, their first dimension, and here they "
                f"have: {each}"
            )
        count: int = next(iter(rows.values()))
        return count

    def _check_division(self) -> None:
        shards = meshes.shards(self._mesh)
        if self.size % shards:
            raise SpecError(
                f"{self.name}: a batch of {self.size} rows cannot be split evenly over "
                f"{meshes.shards_said(self._mesh)} devices; use a multiple of {shards}"
            )


@runtime_checkable
class _Indexed(Protocol):
    """A program's object whose items have numbers."""

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class _Batched(Protocol):
    """A program's object that makes the batch of a step."""

    def batch(self, step: int, /) -> Any: ...


class _Items(MapStyle):
    """A dataset that the program has made."""

    def __init__(self, dataset: Any) -> None:
        self.name, self._args, self._dataset = type(dataset).__name__, {}, dataset
        self.takes_rng = example_rng.takes_rng(dataset.__getitem__)


def _function(data: Any) -> tuple[Callable[[int], Tree], str, bool]:
    """What makes the batch of a step, its name, and whether it is to repeat itself. Raises SpecError."""
    if isinstance(data, Iterator) or inspect.isgeneratorfunction(data):
        raise SpecError(
            f"jaxlaunch.run(data=…) is {trees.kind(data)}, which cannot go back to the batch of a step when the run "
            f"resumes; give {FORMS}"
        )
    is_plain = not isinstance(data, type | _Indexed)
    if is_plain and isinstance(data, _Batched) and callable(data.batch):
        return data.batch, f"{type(data).__name__}.batch", True
    if inspect.isroutine(data) or (is_plain and callable(data)):
        _check_signature(data)
        return data, user_code.named(data), True
    if isinstance(data, _Indexed) and isinstance(data, Sized) and not isinstance(data, Mapping | str | bytes):
        if not len(data):
            raise DataError(f"jaxlaunch.run(data=…) is {trees.kind(data)} without an item")
        return lambda step: data[step % len(data)], f"{type(data).__name__}[step]", False
    raise SpecError(f"jaxlaunch.run(data=…) is {trees.kind(data)}; give {FORMS}")


def _check_signature(data: Callable[..., Any]) -> None:
    try:
        inspect.signature(data).bind(0)
    except TypeError as error:
        raise SpecError(
            f"{user_code.named(data)} is called with the step, data(step), and that fails: {error}"
        ) from None
    except ValueError:
        return  # C's functions may have no signature


def _is_numbers(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return isinstance(leaf, bool | int | float) or (
        isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc"
    )


def _narrow(leaf: Any) -> np.ndarray[Any, Any]:
    """As a device keeps it: in 32 bits, but where JAX is told otherwise."""
    whole = np.asarray(leaf)
    return whole.astype(jax.dtypes.canonicalize_dtype(whole.dtype), copy=False)


def _without_weight(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: leaf for name, leaf in batch.items() if name != "weight"}
