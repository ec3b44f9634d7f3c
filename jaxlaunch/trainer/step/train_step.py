"""The compiled programs of a training: init, train, evaluate and samples of a task on a mesh.

Every mean is kept as a sum and a weight until the end, so that micro-batches and devices add up to one global mean.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.extend.core import Jaxpr

from jaxlaunch import reporting
from jaxlaunch.contract import BATCH_AXES, Key
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.attention import availability, padding
from jaxlaunch.trainer.errors import SpecError, TrainerError, first_line
from jaxlaunch.trainer.numerics import flops, memory
from jaxlaunch.trainer.optim import loss_scale, optimizers, schedules
from jaxlaunch.trainer.optim.loss_scale import LossScale
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.spec import GPT2, LM, CustomModel, Decoder, TrainSpec
from jaxlaunch.trainer.step.executable import Executable, often
from jaxlaunch.trainer.step.state import Batch, Named, Placement, StateBuilder, TrainState, cast_floats, statistics
from jaxlaunch.trainer.task import Loss, Task, checked_loss

# Sum and weight of the loss and the metrics.
Sums = dict[str, tuple[Array, Array]]
Metrics = dict[str, Array]


class Step:
    """Compiles and runs the sharded steps of a task on a mesh. Building one allocates nothing.

    Raises SpecError when the batch does not divide or a sharding rule does not fit.

    Attributes:
        mesh: The devices of the step.
        builder: The builder of the state, which also converts it for checkpoints and holds its optimizer.
        abstract: The state's shapes, dtypes and shardings.
        loss: The loss as it is traced.
        notes: Remarks for the run's log and summary.
    """

    def __init__(self, task: Task, spec: TrainSpec, mesh: jax.sharding.Mesh, total_steps: int) -> None:
        self._task, self.mesh, self._total_steps = task, mesh, total_steps
        self._spec, note = availability.with_fallback(spec, mesh.devices.flat[0])
        _check_divides(spec, mesh)
        self._placement = Placement(mesh)
        self.builder = StateBuilder(task, self._spec, self._placement, total_steps)
        self.abstract = self.builder.abstract
        self.loss = StepLoss(task, self._spec, self._placement, self.builder)
        self._update = Update(self._spec, self._placement, self.builder, self.loss, total_steps)
        self.notes = [*([note] if note else []), *self.builder.notes()]
        # The train programs by their steps per dispatch.
        self._train: dict[int, Executable] = {}
        self._evaluate: Executable | None = None
        self._samples: Executable | None = None

    @property
    def attention(self) -> str:
        """The implementation of attention in use, with `auto` resolved and `xla` in place of an unavailable one."""
        return "xla" if self._spec.attention == "auto" else self._spec.attention

    def init(self) -> TrainState:
        """Return a new state; see StateBuilder.init_state."""
        return self.builder.init()

    def put(self, batch: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Array]:
        """Put this process's rows of a batch in global arrays, split over the batch axes."""
        return self._placement.put(batch, self._spec.batch)

    # --- before the first step ------------------------------------------------------------------------------------

    def check(self, batch: Batch) -> None:
        """Trace the loss, in training and in evaluation, on global batches like this one, without compiling.

        Raises:
            SpecError: A task or a model violates its interface. The message names the line in the user's files.
        """
        if self.builder.is_ours:
            return
        abstract_batch, config = self._placement.abstract_batch(batch), self._spec.model
        model = user_code.load(config.kind) if isinstance(config, CustomModel) else None
        with self.builder.context(), _user_errors(self._spec.task, self._task, abstract_batch, model):
            rest = jax.eval_shape(self.loss.training, *self._loss_arguments(batch))[1][1]
            with user_code.placed(type(self._task) if model is None else model):
                _check_rest(self._spec.task, self.abstract.rest, rest)
            jax.eval_shape(self._sums, self.abstract, abstract_batch)

    def compile_train(self, batch: Batch, steps: int = 1) -> None:
        """Compile `train` of `steps` steps for batches like this one. Raises TypeError for a second kind of batch."""
        abstract_batch = self._placement.abstract_batch(batch)
        if steps in self._train:
            return self._train[steps].check(self.abstract, abstract_batch)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        with self.builder.context():
            self._train[steps] = Executable(
                "train",
                self._update.function(steps),
                (self.abstract, abstract_batch),
                donate_argnums=0,
                out_shardings=(shardings, self._placement.everywhere),
                options=often(self.mesh),
            )

    def compile_eval(self, batch: Batch, also: Callable[..., Any] | None = None) -> None:
        """Compile `evaluate`, with `also` as in `compile_evaluator`. Raises TypeError for a second kind of batch."""
        abstract_batch = self._placement.abstract_batch(batch)
        if self._evaluate is not None:
            return self._evaluate.check(self.abstract, abstract_batch)

        def sums_of_state(state: TrainState, batch: dict[str, Array]) -> tuple[Any, Any]:
            return self.loss.sums_and(state.evaluated_params(), state.evaluated_rest(), batch, also)

        with self.builder.context():
            self._evaluate = Executable(
                "eval", sums_of_state, (self.abstract, abstract_batch), options=often(self.mesh)
            )

    def evaluator(self, batch: Batch, also: Callable[[Any, Batch], Any] | None = None) -> Executable:
        """Compile `evaluate` of parameters and other arrays in place of a state, for batches like this one.

        It returns the sums, the result of `also` for model and batch, and the rows' weights, replicated on every
        process. XLA computes the common forward pass once.
        """
        arguments = self.abstract.params, self.abstract.rest, self._placement.abstract_batch(batch)
        with self.builder.context():
            return Executable("eval", partial(self.loss.sums_and, also=also), arguments, options=often(self.mesh))

    def compile_samples(self) -> Any:
        """Compile the task's `samples` of the model in evaluation. Return its abstract arrays."""

        def samples(state: TrainState) -> Any:
            model = self.loss.model(state.evaluated_params(), state.evaluated_rest())
            return self._placement.replicate(self._task.samples(model, jax.random.fold_in(self.builder.keys()[0], 1)))

        with self.builder.context():
            self._samples = Executable("samples", samples, (self.abstract,), options=often(self.mesh))
            return jax.eval_shape(samples, self.abstract)

    def evaluated_metrics(self, batch: Batch) -> list[str]:
        """Return the names of the metrics of `evaluate` for batches like this one, by tracing it."""
        with self.builder.context():
            return list(jax.eval_shape(self._sums, self.abstract, self._placement.abstract_batch(batch)))

    def _sums(self, state: TrainState, batch: dict[str, Array]) -> Sums:
        return self.loss.sums(state.evaluated_params(), state.evaluated_rest(), batch)

    # --- the steps ------------------------------------------------------------------------------------------------

    def train(self, state: TrainState, batch: Batch, steps: int = 1) -> tuple[TrainState, Metrics]:
        """Take one optimizer step; or several, on a batch [B, steps, ...] and with metrics [steps].

        `state` is donated. The metrics are means on the device, float32 scalars by the names of contract.Key and of the
        task, to be read later.

        A step whose loss or gradients are not finite has `finite` False and returns the state unchanged. Under a loss
        scale it is `skipped` instead, as long as the scale can be halved: it counts, and changes nothing else. A step
        of `weight` 0, whose batch has no target, also changes nothing else, and its means are NaN. Raises TypeError
        when the batch has other shapes or dtypes than the step was compiled for.
        """
        new, metrics = self._train[steps](state, batch)
        return new, metrics

    def evaluate(self, state: TrainState, batch: Batch) -> tuple[Any, Any]:
        """Return sums and weights, float32 scalars, of the loss and the task's metrics, and the sum of row weights.

        The second element is the result of `also` of `compile_eval` with the rows' weights, or None without it. Both
        are computed with the average of the parameters if there is one: the moving one, or schedule-free's.
        """
        assert self._evaluate is not None, "compile_eval comes before evaluate"
        return self._evaluate(state, batch)

    def samples(self, state: TrainState) -> Any:
        """Return the result of the task's `samples`, replicated on every process."""
        assert self._samples is not None, "compile_samples comes before samples"
        return self._samples(state)

    # --- costs ----------------------------------------------------------------------------------------------------

    def flops(self, batch: Batch) -> float | None:
        """Return the model FLOPs of a train step on global batches like this one; None when they depend on the data."""
        return flops.train_step(self.forward(batch), trained=self.trained_arrays)

    @property
    def trained_arrays(self) -> int | None:
        """The number of leading arguments of `forward_jaxpr` that are trained; None if nothing is frozen."""
        return len(self.builder.trained(self.abstract.params)) if self.builder.frozen else None

    def forward(self, batch: Batch) -> Jaxpr:
        """Return the jaxpr of the forward pass on global batches like this one, for counting FLOPs."""
        step = self
        if self._spec.attention not in availability.ANYWHERE:
            # The FLOPs of a kernel are not in its jaxpr.
            plain = self._spec.model_copy(update={"attention": "xla"})
            step = Step(self._task, plain, self.mesh, self._total_steps)
        with step.builder.context():
            return jax.make_jaxpr(step.loss.training)(*step._loss_arguments(batch)).jaxpr

    def residual_bytes(self, batch: Batch) -> int:
        """Return the bytes that the forward pass of a micro-batch keeps for its backward pass, on all devices."""
        with self.builder.context():
            return memory.residual_bytes(self.loss.training, *self._loss_arguments(batch))

    def programs(self) -> list[str]:
        """Return the HLO texts of the compiled train steps, the one with most steps per dispatch first."""
        return [self._train[steps].text() for steps in sorted(self._train, reverse=True)]

    @property
    def compiled(self) -> dict[str, Executable]:
        """The compiled steps: `train`, of one step per dispatch, and `eval`."""
        executables = {"train": self._train.get(1), "eval": self._evaluate}
        return {name: executable for name, executable in executables.items() if executable is not None}

    def _loss_arguments(self, batch: Batch) -> tuple[Any, ...]:
        """Return the abstract arguments of `loss.training_loss` for batches like this one."""
        rng = jax.eval_shape(lambda: self.builder.keys()[1])
        split = self.builder.split_frozen(self.abstract.params)
        return *split, self.abstract.rest, self._placement.abstract_batch(batch), rng


def _check_divides(spec: TrainSpec, mesh: jax.sharding.Mesh) -> None:
    shards, ep = meshes.shards(mesh), mesh.shape["ep"]
    if spec.batch % (shards * spec.accumulate):
        raise SpecError(
            f"train.batch = {spec.batch} cannot be split evenly over accumulate = {spec.accumulate} "
            f"micro-batches × {meshes.describe_shards(mesh)} devices; use a multiple of {shards * spec.accumulate}"
        )
    has_experts = isinstance(spec.model, Decoder) and spec.model.experts is not None
    if ep > 1 and not has_experts and not isinstance(spec.model, CustomModel):
        raise SpecError(f"train.mesh.ep = {ep} splits experts, and train.model has none; use dp or fsdp")


class StepLoss:
    """The loss of a task as a function of arrays in place of a model."""

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
        """Return the total loss of a batch, to be differentiated by `trained`, and the loss as sums and `buffers`.

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
        """Compute the loss of each device's rows, normalized by their own statistics; `buffers` are their mean."""
        count = meshes.shards(self._placement.mesh)
        parts = jax.tree.map(self._placement.split_devices, batch)
        with sharding.by_device():
            losses, rests = jax.vmap(rows_loss, spmd_axis_name=BATCH_AXES)(parts, jax.random.split(rng, count))
        loss = jax.tree.map(lambda per_device: per_device.sum(0), losses)
        averaged = statistics(rests)
        return loss, {name: part.mean(0) if name in averaged else part[0] for name, part in rests.items()}

    def sums(self, params: Named, rest: Named, batch: dict[str, Array]) -> Sums:
        """Return the sums and weights of the loss, the metrics and the examples of a batch in evaluation."""

        def loss(batch: dict[str, Array]) -> Any:
            return self._task_loss(self.model(params, rest), batch, self._builder.keys()[1])

        sums, weight_B = loss(batch), batch["weight"]
        examples = weight_B.sum()
        if not isinstance(sums, Loss):
            # A mean over rows includes the rows that only fill up the batch, so the loss is computed row by row.
            # Experts are split over devices by rows, so they cannot take one row.
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
        """Return the sums, and the result of `also` with the rows' weights, replicated on every device."""
        sums = self.sums(params, rest, batch)
        if also is None:
            return sums, None
        return sums, self._placement.replicate((also(self.model(params, rest), batch), batch["weight"]))

    def model(self, params: Named, rest: Named) -> Any:
        """Return the model in evaluation mode, in the compute dtype. Call it in the builder's context."""
        model = self._builder.arrays.merge(self._cast(params), rest, self._builder.keys()[1])
        model.eval()
        return model

    def _task_loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Any:
        """Return the task's loss in float32. Raises SpecError if it is not a loss."""
        loss = checked_loss(self._spec.task, self._task.loss(model, batch, rng))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), loss)

    def _cast(self, params: Named) -> Named:
        """Cast the parameters to the compute dtype, except those that adapters cast later."""
        adapters = self._builder.adapters
        late: frozenset[str] = frozenset() if adapters is None else adapters.cast_late

        def cast(name: str, param: Array) -> Array:
            narrow = param if name in late else cast_floats(param, self._builder.precision.compute)
            if narrow.dtype == param.dtype:
                return narrow
            return sharding.constrain_value(narrow, self._builder.abstract.params[name].sharding)

        return {name: cast(name, param) for name, param in params.items()}


@contextlib.contextmanager
def _user_errors(name: str, task: Any, batch: Mapping[str, Any], model: Any) -> Iterator[None]:
    """Turn an exception of the loss of `task` while it is traced into a SpecError with its place and the batch.

    This includes calls that the loss or `model`, the user's class, does not accept. Any other exception that passed
    through no file of the user is our bug and is raised unchanged.
    """
    try:
        with user_code.placed(type(task).loss):
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
    """Return where the user defines the callee that `error` is about; "" if it is neither loss nor model."""
    message = str(error)
    if f"{type(task).__name__}.loss()" in message:
        return user_code.place(type(task).loss)
    has_name = isinstance(model, type) or inspect.isroutine(model)
    return user_code.place(model) if has_name and model.__name__ in message else ""


def _check_rest(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise SpecError if a step changes the names, shapes or dtypes of a model's other arrays."""
    for key in sorted({*before, *after}):
        then, now = (_describe_array(arrays[key]) if key in arrays else "not there" for arrays in (before, after))
        if then != now:
            raise SpecError(
                f"{name}: the model's {key} is {then} before a step and {now} after it; make it in the model's "
                "__init__, and keep its shape and dtype"
            )


def _describe_array(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


class Update:
    """The traced train step: gradients over micro-batches, the optimizer's update, the average, and the metrics."""

    def __init__(
        self, spec: TrainSpec, placement: Placement, builder: StateBuilder, loss: StepLoss, total_steps: int
    ) -> None:
        self._spec, self._placement, self._builder, self._step_loss = spec, placement, builder, loss
        self._rate = schedules.build_schedule(spec.optimizer, total_steps)

    def function(self, steps: int) -> Callable[..., tuple[TrainState, Metrics]]:
        """Return the function to compile for a dispatch of this many steps."""
        return self._update if steps == 1 else self._updates

    def _updates(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Metrics]:
        """Take several steps in a loop over the second axis of the batch."""
        return scan(self._update, state, jax.tree.map(self._placement.split_steps, batch))

    def _update(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(self._builder.keys()[1], state.step)
        loss, grads, rest = self._gradients(state, batch, rng)
        norm = optax.tree.norm(grads)
        is_empty = loss.weight == 0
        finite = jnp.isfinite(loss.sum / _divisor(loss.weight)) & jnp.isfinite(norm)
        trained = self._builder.trained(state.params)
        updates, opt = self._builder.optimizer.update(grads, state.opt, trained)
        trained = optax.apply_updates(trained, updates)
        ema = None
        if state.ema is not None and self._spec.optimizer.ema is not None:
            ema = optimizers.ema_update(state.ema, trained | statistics(rest), self._spec.optimizer.ema)
        new = TrainState(state.step + 1, {**state.params, **trained}, opt, ema, rest, state.scale)
        kept = jax.tree.map(partial(jnp.where, finite & ~is_empty), new, state)
        counts, flags = finite, {Key.FINITE: finite, Key.WEIGHT: loss.weight}
        if reads_tokens(self._spec, batch):
            flags[Key.TOKENS] = padding.counted(batch)
        if state.scale is not None:
            scale = loss_scale.updated(state.scale, finite)
            kept = kept._replace(scale=jax.tree.map(partial(jnp.where, is_empty & finite), state.scale, scale))
            counts = jnp.ones((), bool)
            flags |= {Key.FINITE: finite | ~loss_scale.is_exhausted(state.scale), Key.SKIPPED: ~finite}
            flags |= {Key.LOSS_SCALE: state.scale.value}
        # A step that changes nothing else still counts in the run and in the schedule, which depends on the step.
        opt = optimizers.with_schedule_counts(kept.opt, new.opt, counts)
        kept = kept._replace(step=jnp.where(counts, new.step, state.step), opt=opt)
        return kept, {
            **{name: total / weight for name, (total, weight) in loss.metrics.items()},
            Key.LOSS: loss.sum / loss.weight,
            Key.GRAD_NORM: norm,
            Key.LEARNING_RATE: jnp.asarray(self._rate(state.step), jnp.float32),
            **flags,
        }

    def _gradients(self, state: TrainState, batch: dict[str, Array], rng: Array) -> tuple[Loss, Named, Named]:
        """Return the loss, the gradient of its global mean, and `buffers` after all micro-batches."""

        def micro(carry: tuple[Named, Named], part: tuple[dict[str, Array], Array]) -> Any:
            total, rest = carry
            gradient = jax.grad(self._step_loss.training, has_aux=True)
            grads, (loss, rest) = gradient(trained, frozen, rest, *part, state.scale)
            # Under fsdp this makes the sum of the gradients a reduce-scatter.
            grads = jax.lax.with_sharding_constraint(grads, shardings)
            if (scale := state.scale) is not None:
                grads = jax.tree.map(lambda grad: grad / loss_scale.factor(scale, loss.weight), grads)
            return (jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, grads), rest), loss

        trained, frozen = self._builder.split_frozen(state.params)
        count = self._spec.accumulate
        split = partial(self._placement.split_micro_batches, count=count)
        parts = jax.tree.map(split, batch), jax.random.split(rng, count)
        abstract = self._builder.trained(self._builder.abstract.params)
        shardings = {name: param.sharding for name, param in abstract.items()}
        zeros = jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), trained)
        (grads, rest), losses = scan(micro, (zeros, state.rest), parts)
        loss = jax.tree.map(lambda per_micro_batch: per_micro_batch.sum(0), losses)
        return loss, jax.tree.map(lambda grad: grad / _divisor(loss.weight), grads), rest


def reads_tokens(spec: TrainSpec, batch: Batch) -> bool:
    """Return whether a batch has rows of `tokens` for a language model, which reads all but the last."""
    is_language_model = isinstance(spec.model, Decoder | GPT2) or spec.task == LM
    return is_language_model and "tokens" in batch and len(batch["tokens"].shape) > 1


def scan(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, parts: Any) -> tuple[Any, Any]:
    """Run `jax.lax.scan` of `body` over the first axis of `parts`, without a loop if there is only one part.

    Inside a loop XLA's CPU compiler does not use its fast kernels for the gradients of convolutions (jaxlib 0.10):
    those of a small ResNet took 20 times as long.
    """
    if len(jax.tree.leaves(parts)[0]) > 1:
        return jax.lax.scan(body, carry, parts)
    carry, output = body(carry, jax.tree.map(lambda part: part[0], parts))
    return carry, jax.tree.map(lambda leaf: leaf[None], output)


def _divisor(weight: Array) -> Array:
    """Return the divisor of a weighted mean, 1 where the weight is 0."""
    # A zero weight must give 0 and not NaN, so that a sum that is not finite is still visible.
    return jnp.where(weight == 0, 1.0, weight)


class Pictures:
    """The pictures and texts that a task shows after an evaluation: `shown` of its `samples`."""

    def __init__(self, name: str, step: Step, task: Task) -> None:
        self._name, self._step, self._task = name, step, task

    @classmethod
    def of(cls, spec: TrainSpec, task: Task, step: Step) -> Pictures | None:
        """Return the samples of a task; None if it has no method `samples`."""
        has_samples = task.samples is not None and task.samples != MethodType(Task.samples, task)
        return cls(str(spec.task), step, task) if has_samples else None

    def compile(self) -> None:
        """Compile the samples and check their shapes. Raises SpecError if they cannot be shown."""
        abstract = self._step.compile_samples()
        self._show(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract))

    def report(self, state: TrainState) -> None:
        """Report the samples of a state from process 0. Every process takes part."""
        samples = jax.device_get(self._step.samples(state))
        if jax.process_index() == 0:
            images, texts = self._show(samples)
            reporting.report(image=images, text=texts)

    def _show(self, samples: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the pictures and the texts of a report. Raises SpecError if a report does not accept them."""
        items = self._task.shown(samples)
        if not isinstance(items, Mapping):
            method = "samples" if self._task.shown == MethodType(Task.shown, self._task) else "shown"
            raise SpecError(f"{self._name}: {method} returned {user_code.kind(items)}, not a dict of pictures by name")
        texts = {name: item for name, item in items.items() if isinstance(item, str)}
        images = {name: item for name, item in items.items() if name not in texts}
        try:
            reporting.check_items(images, texts, is_kept=False)
        except (TypeError, ValueError) as error:
            raise SpecError(f"{self._name}: what it shows after an evaluation cannot be: {error}") from None
        return images, texts
