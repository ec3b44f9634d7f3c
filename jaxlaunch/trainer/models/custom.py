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

# Arguments by which a model's call selects training or evaluation, with their values in training.
# A call that takes one of them gets it, unless the caller passes it.
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
    """Build the model that `config.kind` names, with the other keys of its block as arguments.

    A flax.nnx model is built as `Name(**keys, rngs=rngs)`. A model of flax.linen or Haiku is also
    initialized, with the inputs that `sample` returns.

    Raises:
        SpecError: The model does not accept the keys, or the job sets remat or loss, which are
            options of built-in models.
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
    factory, keys = user_code.load_object(name), config.model_extra or {}

    def sample_inputs() -> tuple[Array, ...]:
        if sample is None:
            raise SpecError(
                f"train.model.kind = {name} is made for a sample of its inputs, which "
                "custom.build was not given"
            )
        return sample()

    with user_code.append_place(factory):
        if user_code.is_haiku(factory):
            return Haiku(_transform_haiku(factory, keys), *sample_inputs(), rngs=rngs)
        is_linen = user_code.is_linen(factory)
        if not isinstance(factory, type) and (is_linen or isinstance(factory, nnx.Module)):
            subject = f"train.model: {name} is an object, {describe_kind(factory)}"
            raise SpecError(f"{subject}; name its class, or a function that returns one")
        arguments = {**keys, "rngs": rngs} if not is_linen and _takes_rngs(factory) else dict(keys)
        try:
            model = factory(**arguments)
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


def _takes_rngs(factory: Any) -> bool:
    """Return whether to pass `rngs`, which a function that returns a linen module may not take."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return True
    is_plain_function = inspect.isfunction(factory) or inspect.isbuiltin(factory)
    return not is_plain_function or any(
        parameter.name == "rngs" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters
    )


class Linen(nnx.Module):
    """A model of flax.linen as a `flax.nnx` module, for a task that makes its model itself.

    It is called like the linen module. Collections other than `params` are state, which each call
    in training updates. Random streams of any name are seeded. A named axis
    (`linen.with_partitioning`) is split by the rules of `sharding`.

    **Arguments:**

    - `module`: a `flax.linen.Module`.
    - `sample`: inputs for a batch of one example, which initialize the arrays.
    - `rngs`: the random streams that the task's `model` receives.
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

    # The collections that the last call sowed, as a variable; None before the first call.
    last_sown: Any = None

    def __init__(self, module: Any, *sample: Any, rngs: nnx.Rngs, **keywords: Any) -> None:
        self.module = module
        # nnx's train() and eval() set the attribute of this name.
        self.deterministic = False
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
        """Call the module, or its method `method`, and return the result."""
        stored = {name: _variable_values(getattr(self, name)) for name in self.collections}
        immutable = self.collections if self.deterministic else ("params",)
        flags = {} if method is not None else _mode_flags(self.modes, not self.deterministic)
        # linen seeds streams that have no key of their own with that of params.
        key = self.streams.dropout()
        keys = {"params": key, "dropout": key}
        outputs, updates = self.module.apply(
            stored,
            *args,
            rngs=keys,
            method=method,
            mutable=DenyList(immutable),
            **(flags | keywords),
        )
        updated = [name for name in self.collections if name not in immutable]
        for name in updated:
            subject = f"{describe_kind(self.module)}: {name}"
            _store_values(subject, getattr(self, name), updates[name])
        sown = {name: tree for name, tree in updates.items() if name not in updated}
        self.last_sown = nnx.Intermediate(sown)
        return outputs

    def sown(self, collection: str = SOWN_COLLECTION) -> Any:
        """Return the values that the last call stored with `sow` in a collection, or `{}`."""
        return {} if self.last_sown is None else self.last_sown.get_value().get(collection, {})


class Haiku(nnx.Module):
    """A model of Haiku as a `flax.nnx` module, for a task that makes its model itself.

    It is called like the function that was transformed. Haiku needs the extra `[haiku]`.

    **Arguments:**

    - `transformed`: the result of `hk.transform_with_state` or `hk.transform`.
    - `sample`: inputs for a batch of one example, which initialize the arrays.
    - `rngs`: the random streams that the task's `model` receives.
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
        # Haiku stores the transformed function in an attribute of the function that it returns.
        self.modes = _mode_arguments(getattr(transformed.apply, "_original_fn", transformed.apply))
        self.streams = nnx.Rngs(dropout=rngs.dropout())
        init = partial(transformed.init, rngs.params())
        arguments = _mode_flags(self.modes, True) | keywords
        arrays = _initialize_arrays(transformed, init, sample, arguments)
        params, state = arrays if self.has_state else (arrays, {})
        self.params = nnx.data(_to_variables(_dotted_names(params), nnx.Param))
        self.state = nnx.data(_to_variables(_dotted_names(state), nnx.BatchStat))

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the transformed function and return its result."""
        params, state = (
            {name.replace(".", "/"): value for name, value in _variable_values(tree).items()}
            for tree in (self.params, self.state)
        )
        arguments = (self.streams.dropout(), *args)
        flags = _mode_flags(self.modes, not self.deterministic) | keywords
        if not self.has_state:
            return self.transformed.apply(params, *arguments, **flags)
        outputs, new_state = self.transformed.apply(params, state, *arguments, **flags)
        if not self.deterministic:
            _store_values("the state of the Haiku model", self.state, _dotted_names(new_state))
        return outputs


def _transform_haiku(factory: Any, keys: Mapping[str, Any]) -> Any:
    """Return a transformed function as it is, and transform an hk.Module class with `keys`."""
    # Haiku is an optional dependency, so it is imported only for models that use it.
    import haiku

    if not isinstance(factory, type):
        if keys:
            raise SpecError(
                f"a transformed function of Haiku takes no arguments; leave out {', '.join(keys)}"
            )
        return factory
    modes = _mode_arguments(factory.__call__)

    def forward(*args: Any, **flags: Any) -> Any:
        return factory(**keys)(*args, **flags)

    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in modes]
    )
    return haiku.transform_with_state(forward)


def _mode_arguments(call: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameters of `call` that select training or evaluation."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        # Some callables have no signature.
        return ()
    return tuple(name for name in MODE_VALUES if name in parameters)


def _mode_flags(modes: tuple[str, ...], is_training: bool) -> dict[str, bool]:
    return {name: MODE_VALUES[name] is is_training for name in modes}


def _initialize_arrays(
    model: Any, init: Callable[..., Any], sample: tuple[Any, ...], arguments: Mapping[str, Any]
) -> Any:
    """Call `init`. Raises SpecError if the model does not accept the sample."""
    try:
        # With a mesh, linen would interpret the names of annotated axes as axes of the mesh.
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


def _to_variables(
    tree: Mapping[str, Any], variable_type: type[nnx.Variable[Any]]
) -> dict[str, Any]:
    """Return the arrays of a tree as variables, with the axis names that linen stores."""

    def convert_value(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _to_variables(value, variable_type)
        if not isinstance(value, AxisMetadata):
            return variable_type(value)
        axes = tuple(value.names) if isinstance(value, Partitioned) else ()
        return variable_type(_unbox(value), axes=axes)

    return {name: convert_value(value) for name, value in tree.items()}


def _variable_values(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.get_value() if isinstance(value, nnx.Variable) else _variable_values(value)
        for name, value in tree.items()
    }


def _store_values(subject: str, tree: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Store `values` in the variables of `tree`. Raises SpecError if their names differ."""
    if tree.keys() != values.keys():
        raise SpecError(
            f"{subject}: a call in training has {', '.join(values)}, init had {', '.join(tree)}; "
            "make every variable in init"
        )
    for name, value in values.items():
        if isinstance(value, Mapping):
            _store_values(f"{subject}.{name}", tree[name], value)
        else:
            tree[name].set_value(_unbox(value) if isinstance(value, AxisMetadata) else value)


def _unbox(value: AxisMetadata[Any]) -> Any:
    """Return the array of a variable with named axes, which the trainer places itself."""
    return value.unbox(apply_constraint=False) if isinstance(value, Partitioned) else value.unbox()


def _dotted_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    # `mlp/~/linear_0` becomes `mlp.~.linear_0`, because names are also paths in a checkpoint.
    return {name.replace("/", "."): value for name, value in tree.items()}
