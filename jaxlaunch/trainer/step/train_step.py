"""The compiled programs of a training: init, train, evaluate and samples of a task on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr

from jaxlaunch.contract import Key
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.attention import availability
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.experts import Routing
from jaxlaunch.trainer.numerics import flops, memory
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.spec import CustomModel, Decoder, TrainSpec
from jaxlaunch.trainer.step.executable import Executable, step_compiler_options
from jaxlaunch.trainer.step.loss import StepLoss, Sums, check_buffers, name_user_errors
from jaxlaunch.trainer.step.state import Batch, Placement, StateBuilder, TrainState
from jaxlaunch.trainer.step.update import StepMetrics, Update
from jaxlaunch.trainer.task import Task


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
        translated = name_user_errors(self._spec.task, self._task, abstract_batch, model)
        with self.builder.trace_context(), translated:
            buffers = jax.eval_shape(self.loss.training_loss, *self._loss_arguments(batch))[1][1]
            with user_code.append_place(type(self._task) if model is None else model):
                check_buffers(self._spec.task, self.abstract.buffers, buffers)
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
