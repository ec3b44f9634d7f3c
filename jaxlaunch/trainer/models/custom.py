"""User models by module:Name: flax.nnx, and flax.linen and Haiku wrapped as flax.nnx modules.

Linen and Haiku separate a model from its arrays: one function creates them for a sample of the
inputs, another applies them. Here the arrays are nnx variables under the library's own names
(`params.Dense_0.kernel`, `batch_stats.BatchNorm_0.mean`), so that the trainer shards, saves,
averages and freezes them like any others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from flax import nnx
from flax.core.meta import AxisMetadata, Partitioned
from flax.core.scope import DenyList
from jax import Array

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.spec import CustomModel, Loss, TrainSpec
from jaxlaunch.trainer.user_code import describe_kind

# Inputs of a model for a batch of one example.
Sample = Callable[[], tuple[Array, ...]]
# Linen's default collection of `sow`.
SOWN_COLLECTION = "intermediates"

# Names of a call's argument that tells whether the model trains -> its value in training. A model
# whose call takes one gets it unless the caller passes it.
MODE_VALUES: Mapping[str, bool] = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}

NO_MESH = jax.sharding.AbstractMesh((), ())


def build_model(
    spec: TrainSpec, config: CustomModel, rngs: nnx.Rngs, sample: Sample | None = None
) -> nnx.Module:
    """Return the model `Name(**other keys, rngs=rngs)`, or linen's or Haiku's for `sample`.

    Raises SpecError for keys it does not take, and for remat and loss.
    """
    name = config.kind
    if spec.loss != Loss():
        raise SpecError(
            f"train.loss: {name} is not a built-in model; add these terms in the loss of a task of "
            "your own"
        )
    if spec.remat != "none":
        raise SpecError(
            f"train.remat = {spec.remat}: {name} is not a built-in model and rematerializes by "
            "itself; leave remat out"
        )
    make, keys = user_code.load_object(name), config.model_extra or {}

    def sample_inputs() -> tuple[Array, ...]:
        if sample is None:
            raise SpecError(
                f"train.model.kind = {name} is made for a sample of its inputs, which "
                "custom.build was not given"
            )
        return sample()

    with user_code.append_place(make):
        if user_code.is_haiku(make):
            return Haiku(_transform_haiku(make, keys), *sample_inputs(), rngs=rngs)
        is_linen = user_code.is_linen(make)
        if not isinstance(make, type) and (is_linen or isinstance(make, nnx.Module)):
            subject = f"train.model: {name} is an object, {describe_kind(make)}"
            raise SpecError(f"{subject}; name its class, or a function that returns one")
        arguments = {**keys, "rngs": rngs} if not is_linen and _takes_rngs(make) else dict(keys)
        try:
            model = make(**arguments)
        except TypeError as error:
            call = f"{name}({', '.join(arguments)})"
            raise SpecError(f"train.model: {call} failed: {error}") from error
        if user_code.is_linen(model):
            return Linen(model, *sample_inputs(), rngs=rngs)
        if not isinstance(model, nnx.Module):
            raise SpecError(
                f"train.model: {name} makes a {type(model).__name__}, not a flax.nnx.Module, a "
                "flax.linen.Module or a function that Haiku transformed"
            )
        return model


def _takes_rngs(make: Any) -> bool:
    """Return whether `make` takes nnx's streams; a function that makes a linen module may not."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return True
    is_plain_function = inspect.isfunction(make) or inspect.isbuiltin(make)
    return not is_plain_function or any(
        item.name == "rngs" or item.kind is item.VAR_KEYWORD for item in parameters
    )


class Linen(nnx.Module):
    """A model of flax.linen as a `flax.nnx` module, for a task that makes its model itself.

    It is called as the linen module is. Collections other than `params` are state: what a call in
    training makes of them is kept. Random streams of any name are seeded. An axis that is named
    (`linen.with_partitioning`) is split as a rule of `sharding` says.

    **Arguments:**

    - `module`: of `flax.linen.Module`.
    - `sample`: what it is called with, arrays of the shapes of a batch of one.
    - `rngs`: those that the task's `model` gets.
    - `keywords`: further arguments of the call.

    **Raises:**

    [`TrainerError`](#trainererror) where the module cannot be called with the sample.

    **Example:**

    ```python
    import jax.numpy as jnp
    import jaxlaunch
    from flax import linen, nnx

    model = jaxlaunch.Linen(linen.Dense(4), jnp.zeros((1, 8)), rngs=nnx.Rngs(0))
    assert model(jnp.ones((2, 8))).shape == (2, 4)
    ```
    """

    last_sown: Any = None  # of the last call; a variable once there was one

    def __init__(self, module: Any, *sample: Any, rngs: nnx.Rngs, **keywords: Any) -> None:
        self.module = module
        self.deterministic = False  # which nnx's train() and eval() set
        self.modes = _mode_arguments(type(module).__call__)
        self.streams = nnx.Rngs(dropout=rngs.dropout())
        keys = {"params": rngs.params(), "dropout": self.streams.dropout()}
        arguments = _mode_flags(self.modes, False) | keywords
        collections = _initialize_arrays(module, partial(module.init, keys), sample, arguments)
        self.collections = tuple(
            name for name, tree in collections.items() if not _is_sown(name, tree)
        )
        variables = {"params": nnx.Param, "batch_stats": nnx.BatchStat}
        for name in self.collections:
            tree = _to_variables(collections[name], variables.get(name, nnx.Variable))
            setattr(self, name, nnx.data(tree))

    def __call__(
        self, *args: Any, method: str | Callable[..., Any] | None = None, **keywords: Any
    ) -> Any:
        """Return what the module returns, or another `method` of it."""
        stored = {name: _variable_values(getattr(self, name)) for name in self.collections}
        fixed = self.collections if self.deterministic else ("params",)
        flags = {} if method is not None else _mode_flags(self.modes, not self.deterministic)
        key = self.streams.dropout()  # a stream without a key of its own takes that of params
        keys = {"params": key, "dropout": key}
        outputs, updates = self.module.apply(
            stored, *args, rngs=keys, method=method, mutable=DenyList(fixed), **(flags | keywords)
        )
        updated = [name for name in self.collections if name not in fixed]
        for name in updated:
            subject = f"{describe_kind(self.module)}: {name}"
            _store_values(subject, getattr(self, name), updates[name])
        sown = {name: tree for name, tree in updates.items() if name not in updated}
        self.last_sown = nnx.Intermediate(sown)
        return outputs

    def sown(self, collection: str = SOWN_COLLECTION) -> Any:
        """Return the tuples that the last call sowed into a collection, or `{}`."""
        return {} if self.last_sown is None else self.last_sown.get_value().get(collection, {})


class Haiku(nnx.Module):
    """A model of Haiku as a `flax.nnx` module, for a task that makes its model itself.

    It is called as the function that was transformed. Haiku is the extra `[haiku]`.

    **Arguments:**

    - `transformed`: what `hk.transform_with_state` or `hk.transform` returned.
    - `sample`: what the function is called with, arrays of the shapes of a batch of one.
    - `rngs`: those that the task's `model` gets.
    - `keywords`: further arguments of the call.

    **Raises:**

    [`TrainerError`](#trainererror) where the function cannot be called with the sample.

    **Example:**

    ```python
    import haiku as hk
    import jax.numpy as jnp
    import jaxlaunch
    from flax import nnx

    net = hk.transform_with_state(lambda x: hk.Linear(4)(x))
    model = jaxlaunch.Haiku(net, jnp.zeros((1, 8)), rngs=nnx.Rngs(0))
    assert model(jnp.ones((2, 8))).shape == (2, 4)
    ```
    """

    def __init__(self, transformed: Any, *sample: Any, rngs: nnx.Rngs, **keywords: Any) -> None:
        self.transformed = transformed
        self.deterministic = False
        self.has_state = type(transformed).__name__ == "TransformedWithState"
        # Haiku keeps the function that was transformed in an attribute of the one that it returns.
        self.modes = _mode_arguments(getattr(transformed.apply, "_original_fn", transformed.apply))
        self.streams = nnx.Rngs(dropout=rngs.dropout())
        init = partial(transformed.init, rngs.params())
        arguments = _mode_flags(self.modes, True) | keywords
        arrays = _initialize_arrays(transformed, init, sample, arguments)
        params, state = arrays if self.has_state else (arrays, {})
        self.params = nnx.data(_to_variables(_dotted_names(params), nnx.Param))
        self.state = nnx.data(_to_variables(_dotted_names(state), nnx.BatchStat))

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Return what the function returns."""
        params, state = (
            {name.replace(".", "/"): value for name, value in _variable_values(tree).items()}
            for tree in (self.params, self.state)
        )
        arguments = (self.streams.dropout(), *args)
        flags = _mode_flags(self.modes, not self.deterministic) | keywords
        if not self.has_state:
            return self.transformed.apply(params, *arguments, **flags)
        outputs, new = self.transformed.apply(params, state, *arguments, **flags)
        if not self.deterministic:
            _store_values("the state of the Haiku model", self.state, _dotted_names(new))
        return outputs


def _transform_haiku(make: Any, keys: Mapping[str, Any]) -> Any:
    """Return the transformed function of an hk.Module class called with `keys`."""
    import haiku  # of an extra: only for models that use it

    if not isinstance(make, type):
        if keys:
            raise SpecError(
                f"a transformed function of Haiku takes no arguments; leave out {', '.join(keys)}"
            )
        return make
    modes = _mode_arguments(make.__call__)

    def forward(*args: Any, **flags: Any) -> Any:
        return make(**keys)(*args, **flags)

    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in modes]
    )
    return haiku.transform_with_state(forward)


def _mode_arguments(call: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameters of `call` that say whether it trains."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return ()
    return tuple(name for name in MODE_VALUES if name in parameters)


def _mode_flags(modes: tuple[str, ...], is_training: bool) -> dict[str, bool]:
    return {name: MODE_VALUES[name] is is_training for name in modes}


def _initialize_arrays(
    model: Any, init: Callable[..., Any], sample: tuple[Any, ...], arguments: Mapping[str, Any]
) -> Any:
    """Call `init`. Raises SpecError if the model does not accept the sample."""
    try:
        # With a mesh, linen would place annotated arrays by the mesh's own names.
        with jax.sharding.use_abstract_mesh(NO_MESH):
            return init(*sample, **arguments)
    except (TypeError, ValueError) as error:
        inputs = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(sample))
        raise SpecError(
            f"{describe_kind(model)} cannot be called with {inputs}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _is_sown(name: str, tree: Any) -> bool:
    """Return whether a collection holds the tuples of `sow` rather than state."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda value: isinstance(value, tuple))
    return name == SOWN_COLLECTION or any(isinstance(leaf, tuple) for leaf in leaves)


def _to_variables(tree: Mapping[str, Any], variable: type[nnx.Variable[Any]]) -> dict[str, Any]:
    """Return the arrays of a tree as variables, with the axes that linen names."""

    def convert_value(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _to_variables(value, variable)
        if not isinstance(value, AxisMetadata):
            return variable(value)
        axes = tuple(value.names) if isinstance(value, Partitioned) else ()
        return variable(_unbox(value), axes=axes)

    return {name: convert_value(value) for name, value in tree.items()}


def _variable_values(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.get_value() if isinstance(value, nnx.Variable) else _variable_values(value)
        for name, value in tree.items()
    }


def _store_values(subject: str, tree: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Replace the arrays of `tree` by `new`. Raises SpecError for other variables."""
    if tree.keys() != new.keys():
        raise SpecError(
            f"{subject}: a call in training has {', '.join(new)}, init had {', '.join(tree)}; make "
            "every variable in init"
        )
    for name, value in new.items():
        if isinstance(value, Mapping):
            _store_values(f"{subject}.{name}", tree[name], value)
        else:
            tree[name].set_value(_unbox(value) if isinstance(value, AxisMetadata) else value)


def _unbox(value: AxisMetadata[Any]) -> Any:
    """Return the array of a variable with named axes, which the trainer places itself."""
    return value.unbox(apply_constraint=False) if isinstance(value, Partitioned) else value.unbox()


def _dotted_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    # Haiku's `mlp/~/linear_0` as `mlp.~.linear_0`: a slash would be a folder where names are paths.
    return {name.replace("/", "."): value for name, value in tree.items()}
