"""The loss of a task, as a training step and an evaluation trace it.

Every mean is a sum with a weight until the end: micro-batches and devices add up to one global mean.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.contract import BATCH_AXES, Key
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.errors import SpecError, TrainerError, first_line
from jaxlaunch.trainer.optim import loss_scale
from jaxlaunch.trainer.optim.loss_scale import LossScale
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.spec import Decoder, TrainSpec
from jaxlaunch.trainer.step.model_arrays import Named
from jaxlaunch.trainer.step.state_builder import StateBuilder, cast_floats
from jaxlaunch.trainer.step.train_state import Placement, statistics
from jaxlaunch.trainer.task import Loss, Task, checked_loss

Sums = dict[str, tuple[Array, Array]]  # of the loss and the metrics: sum and weight


class StepLoss:
    """The loss of a task on arrays in place of a model."""

    def __init__(self, task: Task, spec: TrainSpec, placement: Placement, builder: StateBuilder) -> None:
        self._task, self._spec, self._placement, self._builder = task, spec, placement, builder

    def training(
        self,
        trained: Named,
        frozen: Named,
        rest: Named,
        batch: dict[str, Array],
        rng: Array,
        scale: LossScale | None = None,
    ) -> tuple[Array, tuple[Loss, Named]]:
        """Return the total loss of a batch, which is differentiated by `trained`; with it the loss as sums, and `rest`.

        Args:
            trained: Parameters that are trained.
            frozen: All others.
            rest: Other arrays of the model.
            batch: Rows [B, ...].
            rng: A key of this step and micro-batch.
            scale: The loss scale under float16.
        """
        params = self._cast({**trained, **frozen})

        def rows_loss(batch: dict[str, Array], rng: Array) -> tuple[Loss, Named]:
            """Return the loss of some rows, and the model's other arrays after them."""
            model_rng, loss_rng = jax.random.split(rng)
            model = self._builder.arrays.merge(params, rest, model_rng)
            if self._spec.batch_norm == "frozen":
                model.set_attributes(use_running_average=True)
            loss = self._task_loss(model, batch, loss_rng)
            if not isinstance(loss, Loss):
                weight = batch["weight"].sum()
                loss = Loss(loss * weight, weight)
            return loss, self._builder.arrays.split(model)[1]

        is_by_device = self._spec.batch_norm == "device"
        loss, rest = self._by_device(rows_loss, batch, rng) if is_by_device else rows_loss(batch, rng)
        total = loss.sum if scale is None else loss.sum * loss_scale.factor(scale, loss.weight)
        return total, (loss, rest)

    def _by_device(
        self, rows_loss: Callable[..., tuple[Loss, Named]], batch: dict[str, Array], rng: Array
    ) -> tuple[Loss, Named]:
        """Compute the loss of each device's rows, normalized by their own statistics; `rest` is their mean."""
        count = meshes.shards(self._placement.mesh)
        parts = jax.tree.map(self._placement.split_devices, batch)
        with sharding.by_device():
            losses, rests = jax.vmap(rows_loss, spmd_axis_name=BATCH_AXES)(parts, jax.random.split(rng, count))
        loss: Loss = jax.tree.map(lambda per_device: per_device.sum(0), losses)
        averaged = statistics(rests)
        return loss, {name: part.mean(0) if name in averaged else part[0] for name, part in rests.items()}

    def sums(self, params: Named, rest: Named, batch: dict[str, Array]) -> Sums:
        """Return the sums and weights of the loss, the metrics and the examples of a batch in evaluation."""

        def loss(batch: dict[str, Array]) -> Any:
            return self._task_loss(self.model(params, rest), batch, self._builder.keys()[1])

        sums, weight_B = loss(batch), batch["weight"]
        examples = weight_B.sum()
        if not isinstance(sums, Loss):
            # A mean over rows cannot leave out the rows that fill the batch up; one row at a time can. Experts are
            # split over devices by rows, so they cannot take one row.
            if isinstance(self._spec.model, Decoder) and self._spec.model.experts is not None:
                raise SpecError(
                    f"{self._spec.task}: the loss is a bare mean, which a model with experts is not evaluated by; "
                    "return jaxlaunch.trainer.task.Loss(sum, weight)"
                )
            mean_B = jax.vmap(lambda row: loss(jax.tree.map(lambda x: x[None], row)))(batch)
            sums = Loss(jnp.where(weight_B != 0, mean_B * weight_B, 0.0).sum(), examples)
        return {**sums.metrics, Key.LOSS: (sums.sum, sums.weight), Key.EXAMPLES: (examples, examples)}

    def sums_and(
        self, params: Named, rest: Named, batch: dict[str, Array], also: Callable[..., Any] | None
    ) -> tuple[Any, Any]:
        """Return the sums, and what `also` makes of model and batch with the rows' weights, whole on every device."""
        sums = self.sums(params, rest, batch)
        if also is None:
            return sums, None
        return sums, self._placement.replicate((also(self.model(params, rest), batch), batch["weight"]))

    def model(self, params: Named, rest: Named) -> Any:
        """Return the model of these arrays as it evaluates, in the compute dtype. Call it in the builder's context."""
        model = self._builder.arrays.merge(self._cast(params), rest, self._builder.keys()[1])
        model.eval()
        return model

    def _task_loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Any:
        """Return the task's loss in float32. Raises SpecError where it is none."""
        loss = checked_loss(self._spec.task, self._task.loss(model, batch, rng))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), loss)

    def _cast(self, params: Named) -> Named:
        """Return the parameters in the dtype that layers compute in, except those that adapters cast later."""
        adapters = self._builder.adapters
        late: frozenset[str] = frozenset() if adapters is None else adapters.cast_late
        return {name: param if name in late else self._cast_one(name, param) for name, param in params.items()}

    def _cast_one(self, name: str, param: Array) -> Array:
        cast = cast_floats(param, self._builder.precision.compute)
        if cast.dtype == param.dtype:
            return cast
        return sharding.held_alone(cast, self._builder.abstract.params[name].sharding)


@contextlib.contextmanager
def user_errors(name: str, task: Any, batch: Mapping[str, Any], model: Any = None) -> Iterator[None]:
    """Within it what the loss of `task` raises while it is traced is a SpecError: what, where, and of which batch.

    So is a call that the loss, or `model`, the user's class of it, does not take. Any other exception that came through
    no file of the user's is our bug and stays as it is.
    """
    try:
        with user_code.placed(type(task).loss):
            yield
    except TrainerError:
        raise
    except Exception as error:
        where = user_code.raised_at(error)
        if not where and isinstance(error, TypeError) and (called := _called(error, task, model)):
            takes = "a loss is called with (model, batch, rng), a model as its task's loss calls it"
            raise SpecError(f"{name}: {first_line(error)} ({called}); {takes}") from error
        if not where:
            raise
        holds = ", ".join(f"{key} {described(value)}" for key, value in batch.items())
        raise SpecError(f"{name}: loss raised {first_line(error)} ({where}); its batch holds {holds}") from error


def _called(error: TypeError, task: Any, model: Any) -> str:
    """Where the user defines what does not take the call that `error` is about; "" where it is about neither."""
    message = str(error)
    if f"{type(task).__name__}.loss()" in message:
        return user_code.place(type(task).loss)
    has_name = isinstance(model, type) or inspect.isroutine(model)
    return user_code.place(model) if has_name and model.__name__ in message else ""


def check_rest(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raises SpecError where a step leaves a model other arrays, beside its parameters, than it had."""
    for key in sorted({*before, *after}):
        then, now = (described(arrays[key]) if key in arrays else "not there" for arrays in (before, after))
        if then != now:
            raise SpecError(
                f"{name}: the model's {key} is {then} before a step and {now} after it; make it in the model's "
                "__init__, and keep its shape and dtype"
            )


def described(array: Any) -> str:
    """`float32[8, 4]`."""
    return f"{array.dtype}{list(array.shape)}"
