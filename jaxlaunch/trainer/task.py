"""The interface of a task, which user code implements, and the checks of what it returns."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxlaunch import contract
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.data.source import DataSource, Source, Split, as_data_source, is_source
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.custom import Linen
from jaxlaunch.trainer.models.experts import Routing
from jaxlaunch.trainer.spec import TrainSpec

Batch = dict[str, Array]
"""The argument of a task's `loss`: arrays `[B, …]` by the names of an example's arrays, and
`weight` float32 `[B]`, which is 0 for rows that only fill up the batch. B is the size of the global
batch, or of a micro-batch with `train.accumulate`."""


class Loss(NamedTuple):
    """The result of a task's `loss`: sums, so that micro-batches and devices add up to one mean.

    - `sum`: the loss summed over the batch, a float32 scalar.
    - `weight`: the divisor of `sum`, such as the number of examples or of targets, a float32
      scalar.
    - `metrics`: pairs (sum, weight) of such scalars by name; the quotient of each pair is logged.
    - `routing`: the `routing` of `model.read(tokens)`, for a decoder with experts. Training adds
      `train.model.balance` and `router_z` to the mean, from the routing of the whole batch.

    **Example:**

    ```python
    import jax.numpy as jnp
    import jaxlaunch

    error_B, weight_B = jnp.array([1.0, 4.0, 9.0]), jnp.array([1.0, 1.0, 0.0])  # the last row fills
    weight = weight_B.sum()
    metrics = {"large": ((error_B > 2) @ weight_B, weight)}
    loss = jaxlaunch.Loss((error_B * weight_B).sum(), weight, metrics)
    assert loss.sum / loss.weight == 2.5
    ```
    """

    sum: Array
    weight: Array
    metrics: dict[str, tuple[Array, Array]] = {}
    routing: Routing | None = None


class Task:
    """The interface of a task: a model, its loss and its examples.

    A task of your own inherits from this class, or from one of the tasks [`Classify`](#classify)
    and [`NextToken`](#nexttoken); `train.task: module:Name` names it. It must define `model`,
    `loss`, `source` and `example`, and its class is called without arguments. A class that has
    these methods without inheriting them also works.

    It may set these attributes:

    - `defaults`, a dict of keys of `train`, which the job's own keys override,
    - `sharding`, rules for a model that does not name its axes, `{r".*kernel": ("embed",
      "hidden")}`: a pattern for the whole name of a parameter, and a logical or mesh axis, or
      `None`, for each of its last dimensions.

    **Example:**

    ```python
    import jax
    import jax.numpy as jnp
    import jaxlaunch
    from flax import nnx


    class Curve(jaxlaunch.Task):  # y = f(x), learned from examples {"x": [], "y": []}
        def model(self, spec: jaxlaunch.TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
            hidden, output = nnx.Linear(1, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
            return nnx.Sequential(hidden, jnp.tanh, output)

        def loss(self, model: nnx.Module, batch: jaxlaunch.Batch, rng: jax.Array) -> jaxlaunch.Loss:
            error_B = (model(batch["x"][:, None])[:, 0] - batch["y"]) ** 2
            return jaxlaunch.Loss((error_B * batch["weight"]).sum(), batch["weight"].sum())

        def source(self, spec, split: jaxlaunch.Split) -> jaxlaunch.Source | None:
            return jaxlaunch.open_source(spec, split)

        def example(self, raw):
            return {"x": raw["x"], "y": raw["y"]}
    ```
    """

    defaults: Mapping[str, Any] = {}
    sharding: Mapping[str, Sequence[str | None]] = {}
    # Whether the loss reads `reference_model.of(model)`, the frozen model that the training began
    # with.
    needs_reference: bool = False

    def model(self, spec: TrainSpec, rngs: nnx.Rngs, /) -> nnx.Module:
        """Makes the model. It is called under `jax.jit`, so that no host ever holds all weights.

        **Arguments:**

        - `spec`: the job's `train` block.
        - `rngs`: random keys, drawn from `train.seed`.
        """
        raise NotImplementedError

    def loss(self, model: Any, batch: Batch, rng: Array, /) -> Loss | Array:
        """Computes the loss of a batch, in training and in evaluation.

        **Arguments:**

        - `model`: the model, with its parameters in the compute dtype of `train.precision`.
        - `batch`: a [`Batch`](#batch), which contains the stacked arrays of `example`.
        - `rng`: a key that is a function of the seed and the step.

        **Returns:**

        A [`Loss`](#loss), or a scalar, which is interpreted as the mean over the rows of the batch.
        """
        raise NotImplementedError

    def source(self, spec: TrainSpec, split: Split, /) -> Source | None:
        """Opens the examples of a split; returns `None` if there is no such split.

        **Arguments:**

        - `spec`: the job's `train` block.
        - `split`: `"train"` or `"eval"`.
        """
        raise NotImplementedError

    def example(self, raw: dict[str, Any], /) -> dict[str, np.ndarray[Any, Any]]:
        """Turns an item of the source into a dict of numpy arrays, of shapes that all items share.

        If it has a second parameter `rng`, it gets a `numpy.random.Generator`, and is called each
        time the example is read.
        """
        raise NotImplementedError

    def predict(self, model: Any, batch: Batch, /) -> Any:
        """Optional: computes what [`TaskModel.predict`](#taskmodelpredict) returns.

        By default the model is called with the arrays of the batch as keywords, or with `image` if
        the batch contains nothing else.
        """
        return model(batch["image"]) if batch.keys() == {"image"} else model(**batch)

    def check_batch(
        self, spec: TrainSpec, batch: dict[str, np.ndarray[Any, Any]], /
    ) -> tuple[int, str] | None:
        """Optional: checks a batch on the host.

        Returns the number of an invalid row and a sentence that says what is wrong, or `None`.
        """
        return None

    def derived(self, means: dict[str, float], /) -> Mapping[str, float]:
        """Optional: computes more metrics from the means of an evaluation, such as a perplexity."""
        return {}

    def samples(self, model: Any, rng: Array, /) -> Any:
        """Optional: returns pictures by name for the [page of the run](seeing-runs.md).

        They are arrays that [`report`](#report) accepts. After each evaluation it is called with
        the evaluated weights, under `jax.jit` on all processes, and with the same key each time, so
        that the pictures of two steps can be compared.
        """
        return {}

    def shown(self, samples: Any, /) -> Any:
        """Optional: turns the numpy arrays of `samples` into pictures and texts by name.

        It is called on the host. Before the first step it is called once with zeros.
        """
        return samples


REQUIRED_METHODS = (Task.model, Task.loss, Task.source, Task.example)
REQUIRED_NAMES = tuple(method.__name__ for method in REQUIRED_METHODS)


def task_class(name: str, candidate: object) -> type[Task]:
    """Return `candidate`, the object named by `train.task: name`, as a subclass of Task.

    A class that has the required methods without inheriting from Task gets the optional methods.

    Raises:
        SpecError: The object is not a class of tasks.
    """
    if not isinstance(candidate, type):
        raise SpecError(
            f"train.task = {name} is {user_code.describe_kind(candidate)}, not a class with "
            f"{', '.join(REQUIRED_NAMES)}"
        )
    if issubclass(candidate, nnx.Module) or user_code.is_linen(candidate):
        hint = "a task's `model` makes one; with a task of ours name it as train.model.kind"
        raise SpecError(f"train.task = {name} is a model, not a task: {hint}")
    task_type = candidate if issubclass(candidate, Task) else _with_optional_methods(candidate)
    if not isinstance(task_type.defaults, Mapping):
        kind = user_code.describe_kind(task_type.defaults)
        raise SpecError(
            f"train.task = {name}: its defaults are {kind}, not a dict of keys of train"
        )
    methods = task_type.model, task_type.loss, task_type.source, task_type.example
    pairs = zip(REQUIRED_NAMES, REQUIRED_METHODS, methods, strict=True)
    if missing := [name for name, base, method in pairs if method is base or not callable(method)]:
        raise SpecError(
            f"train.task = {name} has no {', '.join(missing)}; a task has the methods "
            f"{', '.join(REQUIRED_NAMES)}"
        )
    return task_type


def _with_optional_methods(task_like: type) -> type[Task]:
    # Errors name the file of the class, which `inspect` finds by these attributes. Python 3.13
    # added __firstlineno__.
    names = ("__module__", "__qualname__", "__doc__", "__firstlineno__")
    attributes = {name: getattr(task_like, name) for name in names if hasattr(task_like, name)}

    def copy_attributes(namespace: dict[str, Any]) -> None:
        namespace.update(attributes)

    return types.new_class(task_like.__name__, (task_like, Task), exec_body=copy_attributes)


def make_task(name: str, task_type: type[Task]) -> Task:
    """Create the task `train.task: name`. Raises SpecError if its class requires arguments."""
    try:
        inspect.signature(task_type).bind()
    except TypeError as error:
        raise SpecError(
            f"train.task = {name} cannot be made: a task is called without arguments ({error})"
        ) from None
    return task_type()


def checked_model(name: str, model: Any) -> nnx.Module:
    """Return `model` of the task `name`. Raises SpecError if it is not a flax.nnx.Module."""
    if isinstance(model, nnx.Module):
        return model
    hint = (
        "; return jaxlaunch.Linen(module, inputs, rngs=rngs)" if user_code.is_linen(model) else ""
    )
    kind = user_code.describe_kind(model)
    raise SpecError(f"{name}: model returned {kind}, not a flax.nnx.Module{hint}")


def check_arrays(name: str, model: nnx.Module) -> None:
    """Raise SpecError unless a model has parameters of floats, and only arrays in nnx.Variables."""
    leaves = jax.tree_util.tree_leaves_with_path(
        nnx.state(model), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    for path, leaf in leaves:
        array_path = jax.tree_util.keystr(path, simple=True, separator=".")
        value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        if not isinstance(leaf, nnx.Variable) or isinstance(value, str):
            kind = user_code.describe_kind(value)
            raise SpecError(
                f"{name}: the model's {array_path} is {kind}; make it nnx.Param(array), or "
                "nnx.Variable(array)"
            )
        if isinstance(leaf, nnx.Param) and not jnp.issubdtype(value.dtype, jnp.inexact):
            raise SpecError(
                f"{name}: the model's {array_path} is {value.dtype}{list(value.shape)} in an "
                "nnx.Param; only floats are trained, so make it nnx.Variable"
            )
    if not any(isinstance(leaf, nnx.Param) for _, leaf in leaves):
        raise SpecError(
            f"{name}: the model, {user_code.describe_kind(model)}, has no parameters; make them "
            "nnx.Param in __init__"
        )


def checked_source(spec: TrainSpec, source: Any) -> DataSource | None:
    """Return `source` of the task of `spec` as a DataSource.

    Raises SpecError if it is neither None nor a Source, or if the worker processes of
    `data.workers` cannot read it.
    """
    if source is None:
        return None
    if not is_source(source):
        needed = "a source has __len__, __getitem__ and fingerprint (jaxlaunch.Source)"
        raise SpecError(f"{spec.task}: source returned {user_code.describe_kind(source)}; {needed}")
    workers = spec.data.reader_processes
    data_source = as_data_source(source)
    if workers and data_source.workers != workers:
        raise SpecError(
            f"{spec.task}: source returned {user_code.describe_kind(source)}, which the {workers} "
            "processes of train.data.workers do not read; they read what data.source: torch opens. "
            "Remove data.workers, or return jaxlaunch.open_source(spec, split)"
        )
    return data_source


def checked_loss(name: str, loss: Any) -> Loss | Array:
    """Return `loss` of the task `name`. Raises SpecError unless it is a scalar or a valid Loss."""
    if not isinstance(loss, Loss):
        if isinstance(loss, tuple):
            hint = "metrics go into jaxlaunch.Loss(sum, weight, {name: (sum, weight)})"
            raise SpecError(
                f"{name}: loss returned a tuple of {len(loss)}, not a scalar or a Loss; {hint}"
            )
        hint = "a bare loss is the mean over the batch; else return a Loss"
        _check_scalar(name, "loss returned", loss, hint)
        _check_real(name, "loss returned", loss)
        return loss  # type: ignore[no-any-return]
    hint = "it is the sum over the batch"
    for part in ("sum", "weight"):
        _check_scalar(name, f"Loss.{part} is", getattr(loss, part), hint)
    _check_real(name, "Loss.sum is", loss.sum)
    if not isinstance(loss.metrics, Mapping):
        kind = user_code.describe_kind(loss.metrics)
        raise SpecError(f"{name}: Loss.metrics is {kind}, not a dict {{name: (sum, weight)}}")
    for metric, pair in loss.metrics.items():
        _check_metric_name(name, metric)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            description = _describe_value(pair)
            raise SpecError(f"{name}: metric {metric!r} is {description}, not a pair (sum, weight)")
        for part, value in zip(("sum", "weight"), pair, strict=True):
            _check_scalar(name, f"the {part} of metric {metric!r} is", value, hint)
    if loss.routing is not None and not isinstance(loss.routing, Routing):
        kind = user_code.describe_kind(loss.routing)
        raise SpecError(
            f"{name}: Loss.routing is {kind}; give it the routing of model.read(tokens), or None"
        )
    return loss


def checked_logits(model: Any, logits: Any, label: Array) -> Array:
    """Return the `logits` [..., V] of a user's model for `label` [...].

    Raises SpecError for other shapes and types.
    """
    user_model = model.module if isinstance(model, Linen) else model
    is_array = _is_number(logits) and not isinstance(logits, int | float)
    is_float = is_array and jnp.issubdtype(logits.dtype, jnp.floating)
    if is_float and jnp.shape(logits)[:-1] == label.shape:
        result: Array = logits
        return result
    description = user_code.describe_type(logits)
    if is_array:
        description = f"{logits.dtype}{list(logits.shape)}"
    expected_shape = f"[{', '.join(map(str, label.shape))}, classes]"
    with user_code.append_place(user_model):
        raise SpecError(
            f"the model, {user_code.describe_kind(user_model)}, returned {description}; return "
            f"real logits {expected_shape}, an array"
        )


def _check_metric_name(name: str, metric: Any) -> None:
    """Raise SpecError for a name that is not text or that the trainer's own records use."""
    if not isinstance(metric, str):
        kind = user_code.describe_kind(metric)
        raise SpecError(f"{name}: the name of metric {metric!r} is {kind}, not text")
    if not metric.strip() or not metric.isprintable():
        raise SpecError(
            f"{name}: a metric is named {metric!r}; name it in one line of text, as 'accuracy'"
        )
    if metric in contract.RESERVED_METRICS or metric.startswith(contract.EVAL_PREFIX):
        raise SpecError(
            f"{name}: a metric cannot be named {metric!r}; the trainer's own records use "
            f"{', '.join(sorted(contract.RESERVED_METRICS))}, and what begins with "
            f"{contract.EVAL_PREFIX}"
        )


def _check_scalar(name: str, subject: str, value: Any, hint: str) -> None:
    if not _is_number(value) or np.shape(value) != ():
        raise SpecError(f"{name}: {subject} {_describe_value(value)}, not a scalar; {hint}")


def _check_real(name: str, subject: str, value: Any) -> None:
    if not jnp.issubdtype(dtype := jnp.result_type(value), jnp.floating):
        raise SpecError(
            f"{name}: {subject} a number of {dtype}, which has no gradient; return a float"
        )


def _is_number(value: Any) -> bool:
    is_array = isinstance(value, int | float | np.ndarray | np.generic | Array)
    return is_array and not jnp.issubdtype(jnp.result_type(value), jnp.complexfloating)


def _describe_value(value: Any) -> str:
    if not _is_number(value):
        return user_code.describe_type(value)
    shape = list(np.shape(value))
    return f"an array of shape {shape}" if shape else f"the number {value}"
