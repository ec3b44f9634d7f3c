"""The loss of a task as sums over rows, for training and for evaluation.

A mean is kept as a sum and a weight until the end, so that those of micro-batches and devices add
up to one global mean.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.contract import BATCH_AXES, Key
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.errors import SpecError, TrainerError, first_line
from jaxlaunch.trainer.models.experts import Mixture, Routing
from jaxlaunch.trainer.optim import loss_scale
from jaxlaunch.trainer.optim.loss_scale import LossScale
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.spec import Decoder, TrainSpec
from jaxlaunch.trainer.step.state import (
    NamedArrays,
    Placement,
    StateBuilder,
    cast_floats,
    float_buffers,
)
from jaxlaunch.trainer.task import Loss, Task, checked_loss

# Sum and weight of the loss and the metrics, and the Routing of a model with experts.
Sums = dict[str, Any]


class BatchSums(NamedTuple):
    """Sums over all micro-batches of a step, which the penalty of each of them needs."""

    weight: Array
    routing: Routing


class StepLoss:
    """The loss of a task as a function of a model's arrays, for `jax.grad` and `jax.jit`.

    Attributes:
        mixture: The experts of the model; None if the loss does not penalize their routing.
    """

    def __init__(
        self, task: Task, spec: TrainSpec, placement: Placement, builder: StateBuilder
    ) -> None:
        self._task, self._spec, self._placement, self._builder = task, spec, placement, builder
        self.mixture: Mixture | None = None
        if isinstance(spec.model, Decoder) and spec.model.experts is not None:
            mixture = Mixture.from_config(spec.model)
            self.mixture = mixture if mixture.is_penalized else None

    def training_loss(
        self,
        trained: NamedArrays,
        frozen: NamedArrays,
        buffers: NamedArrays,
        batch: dict[str, Array],
        rng: Array,
        scale: LossScale | None = None,
        batch_sums: BatchSums | None = None,
    ) -> tuple[Array, tuple[Loss, NamedArrays]]:
        """Return the scalar to differentiate, and the loss as sums and the new buffers.

        Args:
            trained: Parameters by which the scalar is differentiated.
            frozen: All other parameters.
            buffers: The other arrays of the model.
            batch: A batch or micro-batch [B, ...].
            rng: A key for this step and micro-batch.
            scale: The loss scale, under float16.
            batch_sums: Sums over all micro-batches of the step; None for a batch without them.
        """
        params = self._cast_params({**trained, **frozen})

        def rows_loss(batch: dict[str, Array], rng: Array) -> tuple[Loss, NamedArrays]:
            model_rng, loss_rng = jax.random.split(rng)
            model = self._builder.arrays.merge_model(params, buffers, model_rng)
            if self._spec.batch_norm == "frozen":
                model.set_attributes(use_running_average=True)
            loss = self._task_loss(model, batch, loss_rng)
            if not isinstance(loss, Loss):
                weight = batch["weight"].sum()
                loss = Loss(loss * weight, weight)
            return loss, self._builder.arrays.split_model(model)[1]

        if self._spec.batch_norm == "device":
            loss, buffers = self._loss_by_device(rows_loss, batch, rng)
        else:
            loss, buffers = rows_loss(batch, rng)
        total = loss.sum
        if self.mixture is not None:
            if loss.routing is None:
                raise SpecError(
                    f"{self._spec.task}: the loss leaves out train.model.balance and router_z; "
                    "return Loss(…, routing=model.read(tokens).routing), as NextToken does, or set "
                    "both to 0"
                )
            batch_sums = batch_sums or BatchSums(loss.weight, loss.routing)
            penalty = self.mixture.compute_penalty(loss.routing, batch_sums.routing)
            total = total + batch_sums.weight * penalty
        if scale is not None:
            total = total * loss_scale.loss_factor(scale, loss.weight)
        return total, (loss, buffers)

    def _loss_by_device(
        self,
        rows_loss: Callable[..., tuple[Loss, NamedArrays]],
        batch: dict[str, Array],
        rng: Array,
    ) -> tuple[Loss, NamedArrays]:
        """Compute the loss with batch statistics of each device's own rows, and average buffers."""
        parts = jax.tree.map(self._placement.split_devices, batch)
        keys = jax.random.split(rng, meshes.count_shards(self._placement.mesh))
        with sharding.map_by_device():
            losses, buffers = jax.vmap(rows_loss, spmd_axis_name=BATCH_AXES)(parts, keys)
        means = {name: part.mean(0) for name, part in float_buffers(buffers).items()}
        first_values = {name: part[0] for name, part in buffers.items()}
        return jax.tree.map(lambda per_device: per_device.sum(0), losses), first_values | means

    def evaluation_sums(
        self, params: NamedArrays, buffers: NamedArrays, batch: dict[str, Array]
    ) -> Sums:
        """Return the sums and weights of the loss, the metrics and the examples in evaluation."""

        def compute_loss(batch: dict[str, Array]) -> Any:
            model = self.evaluation_model(params, buffers)
            return self._task_loss(model, batch, self._builder.random_keys()[1])

        sums, weight_B = compute_loss(batch), batch["weight"]
        examples = weight_B.sum()
        if not isinstance(sums, Loss):
            # A mean includes the rows that only fill up the batch, so the loss is computed for each
            # row. A model with experts cannot take a single row, because it splits rows over
            # devices.
            if isinstance(self._spec.model, Decoder) and self._spec.model.experts is not None:
                raise SpecError(
                    f"{self._spec.task}: the loss is a bare mean, with which a model with "
                    "experts cannot be evaluated; return jaxlaunch.Loss(sum, weight)"
                )
            mean_B = jax.vmap(lambda row: compute_loss(jax.tree.map(lambda leaf: leaf[None], row)))(
                batch
            )
            sums = Loss(jnp.where(weight_B != 0, mean_B * weight_B, 0.0).sum(), examples)
        means = {Key.LOSS: (sums.sum, sums.weight), Key.EXAMPLES: (examples, examples)}
        routing = {} if sums.routing is None else {Key.ROUTING: sums.routing}
        return {**sums.metrics, **means, **routing}

    def evaluation_outputs(
        self,
        params: NamedArrays,
        buffers: NamedArrays,
        batch: dict[str, Array],
        compute_outputs: Callable[..., Any] | None,
    ) -> tuple[Any, Any]:
        """Return the evaluation sums, and replicated outputs with the rows' weights.

        The outputs are `compute_outputs(model, batch)`; without it the second element is None.
        """
        sums = self.evaluation_sums(params, buffers, batch)
        if compute_outputs is None:
            return sums, None
        outputs = compute_outputs(self.evaluation_model(params, buffers), batch)
        return sums, self._placement.replicate((outputs, batch["weight"]))

    def evaluation_model(self, params: NamedArrays, buffers: NamedArrays) -> Any:
        """Return the model in evaluation mode and compute dtype. Call it in `trace_context`."""
        key = self._builder.random_keys()[1]
        model = self._builder.arrays.merge_model(self._cast_params(params), buffers, key)
        model.eval()
        return model

    def _task_loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Any:
        """Return the task's loss in float32. Raises SpecError if it is not a loss."""
        loss = checked_loss(self._spec.task, self._task.loss(model, batch, rng))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), loss)

    def _cast_params(self, params: NamedArrays) -> NamedArrays:
        """Cast the parameters to the compute dtype, except those that adapters cast later."""
        adapters, dtype = self._builder.adapters, self._builder.precision.compute
        late_names: frozenset[str] = frozenset() if adapters is None else adapters.late_cast_names

        def cast_param(name: str, param: Array) -> Array:
            compute_param = param if name in late_names else cast_floats(param, dtype)
            if compute_param.dtype == param.dtype:
                return compute_param
            param_sharding = self._builder.abstract.params[name].sharding
            return sharding.constrain_value(compute_param, param_sharding)

        return {name: cast_param(name, param) for name, param in params.items()}


@contextlib.contextmanager
def name_user_errors(name: str, task: Any, batch: Mapping[str, Any], model: Any) -> Iterator[None]:
    """Turn an exception in user code, while a loss is traced, into a SpecError with its place.

    This includes calls with arguments that the loss or `model`, the user's class, does not accept.
    An exception that no user code raised or caused is our bug and is raised unchanged.
    """
    try:
        with user_code.append_place(type(task).loss):
            yield
    except TrainerError:
        raise
    except Exception as error:
        location = user_code.error_place(error)
        if location:
            arrays = ", ".join(f"{key} {_describe_array(value)}" for key, value in batch.items())
            raise SpecError(
                f"{name}: loss raised {first_line(error)} ({location}); its batch holds {arrays}"
            ) from error
        if isinstance(error, TypeError) and (definition := _find_callee(error, task, model)):
            hint = "a loss is called with (model, batch, rng), a model as its task's loss calls it"
            raise SpecError(f"{name}: {first_line(error)} ({definition}); {hint}") from error
        raise


def _find_callee(error: TypeError, task: Any, model: Any) -> str:
    """Return the place of the loss or model whose call failed with `error`; "" if neither."""
    message = str(error)
    if f"{type(task).__name__}.loss()" in message:
        return user_code.find_place(type(task).loss)
    has_name = isinstance(model, type) or inspect.isroutine(model)
    return user_code.find_place(model) if has_name and model.__name__ in message else ""


def check_buffers(name: str, initial: Mapping[str, Any], updated: Mapping[str, Any]) -> None:
    """Raise SpecError if a step changes the names, shapes or dtypes of a model's buffers."""
    for key in sorted({*initial, *updated}):
        initial_text, updated_text = (
            _describe_array(arrays[key]) if key in arrays else "not there"
            for arrays in (initial, updated)
        )
        if initial_text != updated_text:
            raise SpecError(
                f"{name}: the model's {key} is {initial_text} before a step and {updated_text} "
                "after it; make it in the model's __init__, and keep its shape and dtype"
            )


def _describe_array(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def mean_divisor(weight: Array) -> Array:
    """Return the divisor of a weighted mean, 1 where the weight is 0."""
    # A zero weight must give 0 and not NaN, so that a sum that is not finite is still visible.
    return jnp.where(weight == 0, 1.0, weight)
