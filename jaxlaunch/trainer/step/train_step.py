"""The compiled programs of a training: init, train, evaluate and samples of a task on a mesh.

Every mean is kept as a sum and a weight until the end, so that micro-batches and devices add up to
one global mean.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.extend.core import Jaxpr

from jaxlaunch import reporting
from jaxlaunch.contract import BATCH_AXES, Key
from jaxlaunch.samples import check_items
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.attention import availability, padding
from jaxlaunch.trainer.errors import SpecError, TrainerError, first_line
from jaxlaunch.trainer.models.experts import Mixture, Routing
from jaxlaunch.trainer.numerics import flops, memory
from jaxlaunch.trainer.optim import loss_scale, optimizers, schedules
from jaxlaunch.trainer.optim.loss_scale import LossScale
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.spec import GPT2, LM, CustomModel, Decoder, TrainSpec
from jaxlaunch.trainer.step.executable import Executable, step_compiler_options
from jaxlaunch.trainer.step.state import (
    Batch,
    NamedArrays,
    Placement,
    StateBuilder,
    TrainState,
    cast_floats,
    float_buffers,
)
from jaxlaunch.trainer.task import Loss, Task, checked_loss

# Sum and weight of the loss and the metrics, and the Routing of a model with experts.
Sums = dict[str, Any]
StepMetrics = dict[str, Array]


class Step:
    """Compiles and runs the sharded steps of a task on a mesh. Building one allocates nothing.

    Raises SpecError when the batch does not divide or a sharding rule does not fit.

    Attributes:
        mesh: The devices of the step.
        builder: The builder of the state, which also converts it for checkpoints and holds its
            optimizer.
        abstract: The state's shapes, dtypes and shardings.
        loss: The loss as it is traced.
        notes: Remarks for the run's log and summary.
    """

    def __init__(
        self, task: Task, spec: TrainSpec, mesh: jax.sharding.Mesh, total_steps: int
    ) -> None:
        self._task, self.mesh, self._total_steps = task, mesh, total_steps
        self._spec, note = availability.resolve_attention(spec, mesh.devices.flat[0])
        _check_batch_divides(spec, mesh)
        self._placement = Placement(mesh)
        self.builder = StateBuilder(task, self._spec, self._placement, total_steps)
        self.abstract = self.builder.abstract
        self.loss = StepLoss(task, self._spec, self._placement, self.builder)
        self._update = Update(self._spec, self._placement, self.builder, self.loss, total_steps)
        self.notes = [*([note] if note else []), *self.builder.run_notes()]
        # The train programs by their steps per dispatch.
        self._train: dict[int, Executable] = {}
        self._evaluate: Executable | None = None
        self._samples: Executable | None = None

    @property
    def attention_implementation(self) -> str:
        """The implementation of attention in use, with `auto` and unavailable ones resolved."""
        return "xla" if self._spec.attention == "auto" else self._spec.attention

    def init_state(self) -> TrainState:
        """Return a new state; see StateBuilder.init_state."""
        return self.builder.init_state()

    def put_batch(self, batch: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Array]:
        """Put this process's rows of a batch in global arrays, split over the batch axes."""
        return self._placement.put_rows(batch, self._spec.batch)

    # --- before the first step --------------------------------------------------------------------

    def check_loss(self, batch: Batch) -> None:
        """Trace the loss on global batches like this one, in training and in evaluation.

        Raises:
            SpecError: A task or a model violates its interface. The message names the line in the
                user's files.
        """
        if self.builder.is_builtin:
            return
        abstract_batch, config = self._placement.abstract_batch(batch), self._spec.model
        model = user_code.load_object(config.kind) if isinstance(config, CustomModel) else None
        user_errors = _user_errors(self._spec.task, self._task, abstract_batch, model)
        with self.builder.trace_context(), user_errors:
            buffers = jax.eval_shape(self.loss.training_loss, *self._loss_arguments(batch))[1][1]
            with user_code.append_place(type(self._task) if model is None else model):
                _check_buffers(self._spec.task, self.abstract.buffers, buffers)
            jax.eval_shape(self._evaluation_sums, self.abstract, abstract_batch)

    def compile_train(self, batch: Batch, steps: int = 1) -> None:
        """Compile `train` of `steps` steps. Raises TypeError for a second kind of batch."""
        arguments = self.abstract, self._placement.abstract_batch(batch)
        if steps in self._train:
            self._train[steps].check_arguments(*arguments)
            return
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        self._train[steps] = self._compile(
            "train",
            self._update.dispatch_function(steps),
            *arguments,
            donate_argnums=0,
            out_shardings=(shardings, self._placement.replicated),
        )

    def _compile(
        self, name: str, function: Callable[..., Any], *abstract: Any, **jit: Any
    ) -> Executable:
        options = step_compiler_options(self.mesh)
        with self.builder.trace_context():
            return Executable(name, function, abstract, options=options, **jit)

    def compile_eval(self, batch: Batch, also: Callable[..., Any] | None = None) -> None:
        """Compile `evaluate`, with `also` of `compile_evaluator`. Raises TypeError as above."""
        arguments = self.abstract, self._placement.abstract_batch(batch)
        if self._evaluate is not None:
            self._evaluate.check_arguments(*arguments)
            return

        def sums_of_state(state: TrainState, batch: dict[str, Array]) -> tuple[Any, Any]:
            params, buffers = state.evaluated_params(), state.evaluated_buffers()
            return self.loss.sums_and(params, buffers, batch, also)

        self._evaluate = self._compile("eval", sums_of_state, *arguments)

    def compile_evaluator(
        self, batch: Batch, also: Callable[[Any, Batch], Any] | None = None
    ) -> Executable:
        """Compile `evaluate` of parameters and other arrays in place of a state.

        It returns the sums, the result of `also` for model and batch, and the rows' weights,
        replicated on every process. XLA computes the common forward pass once.
        """
        return self._compile(
            "eval",
            partial(self.loss.sums_and, also=also),
            self.abstract.params,
            self.abstract.buffers,
            self._placement.abstract_batch(batch),
        )

    def compile_samples(self) -> Any:
        """Compile the task's `samples` of the model in evaluation. Return its abstract arrays."""

        def samples(state: TrainState) -> Any:
            model = self.loss.evaluation_model(state.evaluated_params(), state.evaluated_buffers())
            key = jax.random.fold_in(self.builder.random_keys()[0], 1)
            return self._placement.replicate(self._task.samples(model, key))

        self._samples = self._compile("samples", samples, self.abstract)
        with self.builder.trace_context():
            return jax.eval_shape(samples, self.abstract)

    def evaluated_metrics(self, batch: Batch) -> list[str]:
        """Return the names of the metrics of `evaluate` for such batches, by tracing it."""
        abstract_batch = self._placement.abstract_batch(batch)
        with self.builder.trace_context():
            sums = jax.eval_shape(self._evaluation_sums, self.abstract, abstract_batch)
            if (routing := sums.pop(Key.ROUTING, None)) is None:
                return list(sums)
            return [*sums, *jax.eval_shape(Routing.metric_means, routing)]

    def _evaluation_sums(self, state: TrainState, batch: dict[str, Array]) -> Sums:
        return self.loss.evaluation_sums(state.evaluated_params(), state.evaluated_buffers(), batch)

    # --- the steps --------------------------------------------------------------------------------

    def train(
        self, state: TrainState, batch: Batch, steps: int = 1
    ) -> tuple[TrainState, StepMetrics]:
        """Take one optimizer step; or several, on a batch [B, steps, ...] and with metrics [steps].

        `state` is donated. The metrics are means on the device, float32 scalars by the names of
        contract.Key and of the task, to be read later.

        A step whose loss or gradients are not finite has `finite` False and returns the state
        unchanged. Under a loss scale it is `skipped` instead, as long as the scale can be halved:
        it counts, and changes nothing else. A step of `weight` 0, whose batch has no target, also
        changes nothing else, and its means are NaN. Raises TypeError when the batch has other
        shapes or dtypes than the step was compiled for.
        """
        return self._train[steps](state, batch)  # type: ignore[no-any-return]

    def evaluate(self, state: TrainState, batch: Batch) -> tuple[Any, Any]:
        """Return sums and weights, float32 scalars, of the loss and the task's metrics.

        The second element is the result of `also` of `compile_eval` with the rows' weights, or None
        without it. Both are computed with the average of the parameters if there is one: the moving
        one, or schedule-free's.
        """
        assert self._evaluate is not None, "compile_eval comes before evaluate"
        return self._evaluate(state, batch)  # type: ignore[no-any-return]

    def make_samples(self, state: TrainState) -> Any:
        """Return the result of the task's `samples`, replicated on every process."""
        assert self._samples is not None, "compile_samples comes before samples"
        return self._samples(state)

    # --- costs ------------------------------------------------------------------------------------

    def count_flops(self, batch: Batch) -> float | None:
        """Return the model FLOPs of a train step on such batches; None if they depend on data."""
        return flops.train_step_flops(self.forward_jaxpr(batch), trained=self.trained_arrays)

    @property
    def trained_arrays(self) -> int | None:
        """Number of leading arguments of `forward_jaxpr` to train; None if none is frozen."""
        if not self.builder.frozen:
            return None
        return len(self.builder.trained_params(self.abstract.params))

    def forward_jaxpr(self, batch: Batch) -> Jaxpr:
        """Return the jaxpr of the forward pass on such batches, for counting FLOPs."""
        step = self
        if self._spec.attention not in availability.PORTABLE:
            # The FLOPs of a kernel are not in its jaxpr.
            plain_spec = self._spec.model_copy(update={"attention": "xla"})
            step = Step(self._task, plain_spec, self.mesh, self._total_steps)
        with step.builder.trace_context():
            arguments = step._loss_arguments(batch)
            result: Jaxpr = jax.make_jaxpr(step.loss.training_loss)(*arguments).jaxpr
            return result

    def residual_bytes(self, batch: Batch) -> int:
        """Return the bytes kept for the backward pass of a micro-batch, on all devices."""
        with self.builder.trace_context():
            return memory.residual_bytes(self.loss.training_loss, *self._loss_arguments(batch))

    def hlo_texts(self) -> list[str]:
        """Return the HLO texts of the compiled train steps, most steps per dispatch first."""
        return [self._train[steps].hlo_text() for steps in sorted(self._train, reverse=True)]

    @property
    def compiled_steps(self) -> dict[str, Executable]:
        """The compiled steps: `train`, of one step per dispatch, and `eval`."""
        executables = {"train": self._train.get(1), "eval": self._evaluate}
        return {name: step for name, step in executables.items() if step is not None}

    def _loss_arguments(self, batch: Batch) -> tuple[Any, ...]:
        """Return the abstract arguments of `loss.training_loss` for batches like this one."""
        rng = jax.eval_shape(lambda: self.builder.random_keys()[1])
        split = self.builder.split_frozen(self.abstract.params)
        return *split, self.abstract.buffers, self._placement.abstract_batch(batch), rng


def _check_batch_divides(spec: TrainSpec, mesh: jax.sharding.Mesh) -> None:
    shards, ep = meshes.count_shards(mesh), mesh.shape["ep"]
    if spec.batch % (shards * spec.accumulate):
        raise SpecError(
            f"train.batch = {spec.batch} cannot be split evenly over accumulate = "
            f"{spec.accumulate} micro-batches × {meshes.describe_shards(mesh)} devices; use a "
            f"multiple of {shards * spec.accumulate}"
        )
    has_experts = isinstance(spec.model, Decoder) and spec.model.experts is not None
    if ep > 1 and not has_experts and not isinstance(spec.model, CustomModel):
        raise SpecError(
            f"train.mesh.ep = {ep} splits experts, and train.model has none; use dp or fsdp"
        )


class BatchSums(NamedTuple):
    """Sums over all micro-batches of a step, which the penalty of each of them needs."""

    weight: Array
    routing: Routing


class StepLoss:
    """The loss of a task as a function of arrays in place of a model.

    Attributes:
        mixture: The experts of the model whose routing the loss penalizes, if it does.
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
        whole: BatchSums | None = None,
    ) -> tuple[Array, tuple[Loss, NamedArrays]]:
        """Return the total loss of a batch [B, ...], and the loss as sums and `buffers`.

        The total is to be differentiated by `trained`; `frozen` are all other parameters. `rng` is
        a key of this step and micro-batch, `scale` the loss scale under float16, and `whole` the
        sums of the batch that this one is a part of.
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
            whole = whole or BatchSums(loss.weight, loss.routing)
            total = total + whole.weight * self.mixture.compute_penalty(loss.routing, whole.routing)
        if scale is not None:
            total = total * loss_scale.loss_factor(scale, loss.weight)
        return total, (loss, buffers)

    def _loss_by_device(
        self,
        rows_loss: Callable[..., tuple[Loss, NamedArrays]],
        batch: dict[str, Array],
        rng: Array,
    ) -> tuple[Loss, NamedArrays]:
        """Compute the loss of each device's rows, normalized alone; `buffers` are their mean."""
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
            # A mean over rows includes the rows that only fill up the batch, so the loss is
            # computed row by row. Experts are split over devices by rows, so they cannot take one
            # row.
            if isinstance(self._spec.model, Decoder) and self._spec.model.experts is not None:
                raise SpecError(
                    f"{self._spec.task}: the loss is a bare mean, by which a model with experts "
                    "cannot be evaluated; return jaxlaunch.trainer.task.Loss(sum, weight)"
                )
            mean_B = jax.vmap(lambda row: compute_loss(jax.tree.map(lambda x: x[None], row)))(batch)
            sums = Loss(jnp.where(weight_B != 0, mean_B * weight_B, 0.0).sum(), examples)
        means = {Key.LOSS: (sums.sum, sums.weight), Key.EXAMPLES: (examples, examples)}
        routing = {} if sums.routing is None else {Key.ROUTING: sums.routing}
        return {**sums.metrics, **means, **routing}

    def sums_and(
        self,
        params: NamedArrays,
        buffers: NamedArrays,
        batch: dict[str, Array],
        also: Callable[..., Any] | None,
    ) -> tuple[Any, Any]:
        """Return the sums, and the result of `also` with the rows' weights, replicated."""
        sums = self.evaluation_sums(params, buffers, batch)
        if also is None:
            return sums, None
        outputs = also(self.evaluation_model(params, buffers), batch)
        return sums, self._placement.replicate((outputs, batch["weight"]))

    def evaluation_model(self, params: NamedArrays, buffers: NamedArrays) -> Any:
        """Return the model in evaluation mode and the compute dtype, in the builder's context."""
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
            cast = param if name in late_names else cast_floats(param, dtype)
            if cast.dtype == param.dtype:
                return cast
            return sharding.constrain_value(cast, self._builder.abstract.params[name].sharding)

        return {name: cast_param(name, param) for name, param in params.items()}


@contextlib.contextmanager
def _user_errors(name: str, task: Any, batch: Mapping[str, Any], model: Any) -> Iterator[None]:
    """Turn an exception of the traced loss of `task` into a SpecError with its place.

    This includes calls that the loss or `model`, the user's class, does not accept. Any other
    exception that passed through no file of the user is our bug and is raised unchanged.
    """
    try:
        with user_code.append_place(type(task).loss):
            yield
    except TrainerError:
        raise
    except Exception as error:
        location = user_code.raised_at(error)
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
    """Return where the user's loss or model that `error` is about is defined; "" if neither."""
    message = str(error)
    if f"{type(task).__name__}.loss()" in message:
        return user_code.find_place(type(task).loss)
    has_name = isinstance(model, type) or inspect.isroutine(model)
    return user_code.find_place(model) if has_name and model.__name__ in message else ""


def _check_buffers(name: str, initial: Mapping[str, Any], updated: Mapping[str, Any]) -> None:
    """Raise SpecError if a step changes the names, shapes or dtypes of a model's other arrays."""
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


class Update:
    """The traced train step: gradients, the optimizer's update, the average, and the metrics."""

    def __init__(
        self,
        spec: TrainSpec,
        placement: Placement,
        builder: StateBuilder,
        loss: StepLoss,
        total_steps: int,
    ) -> None:
        self._spec, self._placement, self._builder, self._step_loss = spec, placement, builder, loss
        self._rate = schedules.build_schedule(spec.optimizer, total_steps)

    def dispatch_function(self, steps: int) -> Callable[..., tuple[TrainState, StepMetrics]]:
        """Return the function to compile for a dispatch of this many steps."""
        return self._update if steps == 1 else self._updates

    def _updates(
        self, state: TrainState, batch: dict[str, Array]
    ) -> tuple[TrainState, StepMetrics]:
        """Take several steps in a loop over the second axis of the batch."""
        return scan_parts(self._update, state, jax.tree.map(self._placement.split_steps, batch))

    def _update(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, StepMetrics]:
        rng = jax.random.fold_in(self._builder.random_keys()[1], state.step)
        loss, grads, buffers = self._compute_gradients(state, batch, rng)
        norm = optax.tree.norm(grads)
        is_empty, penalty = loss.weight == 0, jnp.zeros((), jnp.float32)
        if self._step_loss.mixture is not None and loss.routing is not None:
            penalty = self._step_loss.mixture.compute_penalty(loss.routing, loss.routing)
        mean = loss.sum / _mean_divisor(loss.weight) + penalty
        finite = jnp.isfinite(mean) & jnp.isfinite(norm)
        trained = self._builder.trained_params(state.params)
        updates, opt = self._builder.optimizer.update(grads, state.opt, trained)
        trained = optax.apply_updates(trained, updates)
        ema = None
        if state.ema is not None and self._spec.optimizer.ema is not None:
            averaged = trained | float_buffers(buffers)
            ema = optimizers.update_ema(state.ema, averaged, self._spec.optimizer.ema)
        params = {**state.params, **trained}
        new_state = TrainState(state.step + 1, params, opt, ema, buffers, state.scale)
        next_state = jax.tree.map(partial(jnp.where, finite & ~is_empty), new_state, state)
        is_counted, flags = finite, {Key.FINITE: finite, Key.WEIGHT: loss.weight}
        if reads_tokens(self._spec, batch):
            flags[Key.TOKENS] = padding.count_input_tokens(batch)
        if state.scale is not None:
            scale = loss_scale.update_loss_scale(state.scale, finite)
            scale = jax.tree.map(partial(jnp.where, is_empty & finite), state.scale, scale)
            next_state = next_state._replace(scale=scale)
            is_counted = jnp.ones((), bool)
            flags[Key.FINITE] = finite | ~loss_scale.is_exhausted(state.scale)
            flags |= {Key.SKIPPED: ~finite, Key.LOSS_SCALE: state.scale.value}
        # A step that changes nothing else still counts in the run and in the schedule, which
        # depends on the step.
        opt = optimizers.with_schedule_counts(next_state.opt, new_state.opt, is_counted)
        step = jnp.where(is_counted, new_state.step, state.step)
        next_state = next_state._replace(step=step, opt=opt)
        return next_state, {
            **{name: total / weight for name, (total, weight) in loss.metrics.items()},
            **({} if loss.routing is None else loss.routing.metric_means()),
            Key.LOSS: loss.sum / loss.weight + penalty,
            Key.GRAD_NORM: norm,
            Key.LEARNING_RATE: jnp.asarray(self._rate(state.step), jnp.float32),
            **flags,
        }

    def _compute_gradients(
        self, state: TrainState, batch: dict[str, Array], rng: Array
    ) -> tuple[Loss, NamedArrays, NamedArrays]:
        """Return the loss, the gradient of its global mean, and the `buffers` after it."""

        def add_micro_batch(carry: tuple[NamedArrays, NamedArrays], part: Any) -> Any:
            total, buffers = carry
            gradient = jax.grad(self._step_loss.training_loss, has_aux=True)
            grads, (loss, buffers) = gradient(trained, frozen, buffers, *part, state.scale, whole)
            # Under fsdp this makes the sum of the gradients a reduce-scatter.
            grads = jax.lax.with_sharding_constraint(grads, shardings)
            if state.scale is not None:
                factor = loss_scale.loss_factor(state.scale, loss.weight)
                grads = jax.tree.map(lambda grad: grad / factor, grads)
            total = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, grads)
            return (total, buffers), loss

        trained, frozen = self._builder.split_frozen(state.params)
        count = self._spec.accumulate
        split = partial(self._placement.split_micro_batches, count=count)
        parts = jax.tree.map(split, batch), jax.random.split(rng, count)
        abstract = self._builder.trained_params(self._builder.abstract.params)
        shardings = {name: param.sharding for name, param in abstract.items()}
        zeros = jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), trained)
        whole = self._sum_batch(trained, frozen, state.buffers, parts) if count > 1 else None
        (grads, buffers), losses = scan_parts(add_micro_batch, (zeros, state.buffers), parts)
        loss = jax.tree.map(lambda per_micro_batch: per_micro_batch.sum(0), losses)
        return loss, jax.tree.map(lambda grad: grad / _mean_divisor(loss.weight), grads), buffers

    def _sum_batch(
        self, trained: NamedArrays, frozen: NamedArrays, buffers: NamedArrays, parts: Any
    ) -> BatchSums | None:
        """Return the sums over all micro-batches before their backward passes; None if not needed.

        The balance loss multiplies an expert's load by its probability, both of the whole batch. So
        the gradient of a micro-batch needs the loads of all, which only a forward pass of its own
        tells: one more than without micro-batches, up to the last router, without residuals.
        Megatron's running sums over the micro-batches so far would need none and are not exact.
        """
        mixture = self._step_loss.mixture
        if mixture is None:
            return None

        def sum_micro_batch(buffers: NamedArrays, part: Any) -> tuple[NamedArrays, BatchSums]:
            _, (loss, buffers) = self._step_loss.training_loss(trained, frozen, buffers, *part)
            # Without a balance loss nothing of the model is read, and the compiler removes it.
            routing = loss.routing
            assert routing is not None, "a mixture of experts routes"
            if not mixture.balance:
                routing = routing._replace(chosen_ME=jnp.zeros_like(routing.chosen_ME))
            return buffers, BatchSums(loss.weight, routing)

        _, sums = scan_parts(sum_micro_batch, buffers, parts)
        total: BatchSums = jax.tree.map(lambda per_micro_batch: per_micro_batch.sum(0), sums)
        return total


def reads_tokens(spec: TrainSpec, batch: Batch) -> bool:
    """Return whether a batch has rows of `tokens` for a language model."""
    is_language_model = isinstance(spec.model, Decoder | GPT2) or spec.task == LM
    return is_language_model and "tokens" in batch and len(batch["tokens"].shape) > 1


def scan_parts(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, parts: Any
) -> tuple[Any, Any]:
    """Run `jax.lax.scan` of `body` over the first axis of `parts`, without a loop for one part.

    Inside a loop XLA's CPU compiler does not use its fast kernels for the gradients of convolutions
    (jaxlib 0.10): those of a small ResNet took 20 times as long.
    """
    if len(jax.tree.leaves(parts)[0]) > 1:
        return jax.lax.scan(body, carry, parts)
    carry, output = body(carry, jax.tree.map(lambda part: part[0], parts))
    return carry, jax.tree.map(lambda leaf: leaf[None], output)


def _mean_divisor(weight: Array) -> Array:
    """Return the divisor of a weighted mean, 1 where the weight is 0."""
    # A zero weight must give 0 and not NaN, so that a sum that is not finite is still visible.
    return jnp.where(weight == 0, 1.0, weight)


class TaskSamples:
    """The pictures and texts that a task shows after an evaluation: `shown` of its `samples`."""

    def __init__(self, name: str, step: Step, task: Task) -> None:
        self._name, self._step, self._task = name, step, task

    @classmethod
    def for_task(cls, spec: TrainSpec, task: Task, step: Step) -> TaskSamples | None:
        """Return the samples of a task; None if it has no method `samples`."""
        has_samples = task.samples is not None and task.samples != MethodType(Task.samples, task)
        return cls(str(spec.task), step, task) if has_samples else None

    def compile(self) -> None:
        """Compile the samples and check their shapes. Raises SpecError if they cannot be shown."""
        abstract = self._step.compile_samples()
        self._shown_items(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract))

    def report(self, state: TrainState) -> None:
        """Report the samples of a state from process 0. Every process takes part."""
        samples = jax.device_get(self._step.make_samples(state))
        if jax.process_index() == 0:
            images, texts = self._shown_items(samples)
            reporting.report(image=images, text=texts)

    def _shown_items(self, samples: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the pictures and the texts of a report. Raises SpecError for invalid ones."""
        items = self._task.shown(samples)
        if not isinstance(items, Mapping):
            is_default = self._task.shown == MethodType(Task.shown, self._task)
            method = "samples" if is_default else "shown"
            raise SpecError(
                f"{self._name}: {method} returned {user_code.describe_kind(items)}, not a dict of "
                "pictures by name"
            )
        texts = {name: item for name, item in items.items() if isinstance(item, str)}
        images = {name: item for name, item in items.items() if name not in texts}
        try:
            check_items(images, texts, is_kept=False)
        except (TypeError, ValueError) as error:
            raise SpecError(f"{self._name}: its samples cannot be shown: {error}") from None
        return images, texts
