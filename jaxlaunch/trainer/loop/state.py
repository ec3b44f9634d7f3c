"""The state of a loop: any pytree of arrays (dicts, optax states, flax.nnx modules, random keys), and these by name.

Between steps it is a flat dict, name -> array, and within one the pytree that the program made first: what modules and
optimizers hold beside arrays (functions, sizes) is of that one, however often it is made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.loop import trees
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.step.executable import once

Tree = Any
Named = dict[str, Any]  # name -> array, or ShapeDtypeStruct
HINT = "a state is a pytree of arrays: dicts, lists, tuples, dataclasses and flax.nnx modules of them"


class State:
    """What `given` makes or is. `abstract` describes its arrays, each with its place on the mesh. Allocates nothing.

    Raises SpecError for what is no pytree of arrays, and for sharding rules that do not fit.
    """

    def __init__(
        self, given: Any, mesh: jax.sharding.Mesh, rules: Mapping[str, Sequence[str | None]] | None = None
    ) -> None:
        self._given, self._mesh = given, mesh
        self._make: Callable[[], Tree] | None = given if is_function(given) else None
        self.name = user_code.named(given) if self._make is not None else "jaxlaunch.run(state=…)"
        made = given if self._make is None else self._traced(self._make)
        leaves = _checked(self.name, made)
        axes = sharding.by_path(rules or {}, dict.fromkeys(leaves))
        self._structure = jax.tree.structure(made)
        self.shardings = {
            name: sharding.state_sharding(name, leaf.shape, axes[name], mesh) for name, leaf in leaves.items()
        }
        self.abstract: Named = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.shardings[name])
            for name, leaf in leaves.items()
        }

    def init(self) -> Named:
        """The arrays before the first step: made on the devices by the function, or copied there."""
        like = self.stored(self.abstract)
        if self._make is None:
            given = {name: _placed(leaf, like[name]) for name, leaf in trees.named(self._given).items()}
            made: Callable[..., Named] = lambda stored: self.of_stored(jax.tree.map(jnp.copy, stored))  # noqa: E731
        else:
            make, given = self._make, {}
            made = lambda stored: strong(trees.named(make()))  # noqa: E731
        with self.context():
            found: Named = jax.jit(made, out_shardings=self.shardings, compiler_options=once(self._mesh))(given)
        return found

    def tree(self, named: Named) -> Tree:
        """The arrays as the program's pytree."""
        return jax.tree.unflatten(self._structure, [named[name] for name in self.abstract])

    def stored(self, named: Named) -> Named:
        """The arrays as a checkpoint holds them, random keys as their numbers; abstract ones too."""
        return {name: _data(leaf) for name, leaf in named.items()}

    def of_stored(self, stored: Mapping[str, Any]) -> Named:
        """The inverse of `stored`."""
        return {name: _of_data(stored[name], leaf) for name, leaf in self.abstract.items()}

    def checked(self, who: str, tree: Tree) -> Named:
        """The arrays of what the function `who` returned. Raises SpecError when they are not those of this state."""
        found = trees.named(tree)
        if (difference := trees.differing(self.abstract, found)) is not None:
            raise SpecError(f"{who}: the state that it returns has {difference}; return the arrays that it was given")
        return strong(found)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """The mesh that the program's functions are traced under; flax places nothing by itself."""
        with jax.set_mesh(self._mesh), nnx.use_eager_sharding(False):  # type: ignore[no-untyped-call]
            yield

    def _traced(self, make: Callable[[], Tree]) -> Tree:
        """What `make` returns, its arrays abstract."""
        kept: list[Tree] = []

        def probe() -> list[Any]:
            """The arrays alone: what else there is must not leave the trace."""
            kept.append(make())
            return [leaf for leaf in jax.tree.leaves(kept[0]) if _is_array(leaf)]

        with self.context():
            jax.eval_shape(probe)
        return kept[0]


def is_function(given: Any) -> bool:
    """Whether a state is given by a function that makes it: a model is callable too, and is a state itself."""
    leaves = jax.tree.leaves(given)
    return callable(given) and len(leaves) == 1 and leaves[0] is given


def strong(named: Named) -> Named:
    """The same arrays, none of them of a weak type: a step is compiled for one type alone."""
    return {name: leaf if _is_key(leaf) else jnp.asarray(leaf, jnp.result_type(leaf)) for name, leaf in named.items()}


def _checked(who: str, tree: Tree) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each leaf by name. Raises SpecError where one is no array, or two have one name."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    if not flat:
        raise SpecError(f"{who} gives {trees.kind(tree)} without an array; {HINT}")
    found: dict[str, jax.ShapeDtypeStruct] = {}
    for path, leaf in flat:
        name = trees.name_of(path)
        if not _is_array(leaf):
            raise SpecError(f"{who}: {name} is {trees.kind(leaf)}, not an array; {HINT}")
        if name in found:
            raise SpecError(f"{who}: two arrays of the state have the name {name}; rename a key of theirs")
        found[name] = jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype if _is_key(leaf) else jnp.result_type(leaf))
    return found


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array | bool | int | float | complex):
        return True
    return isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufcV"


def _is_key(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return is_array and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _placed(leaf: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of the program's, a random key as its numbers, on the mesh: of equal ones each device takes its part."""
    data = _data(leaf)
    if isinstance(data, jax.Array) and not data.is_fully_addressable:
        return data  # global already
    whole = np.asarray(data, like.dtype)
    return jax.make_array_from_callback(whole.shape, like.sharding, lambda where: whole[where])


def _data(leaf: Any) -> Any:
    """An array, or the numbers of a random key; abstract ones too."""
    if not _is_key(leaf):
        return leaf
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    assert isinstance(leaf.sharding, NamedSharding)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=NamedSharding(leaf.sharding.mesh, leaf.sharding.spec))


def _of_data(data: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(data, impl=like.dtype._impl) if _is_key(like) else data
