"""The compiled programs of a training on a mesh: train steps, evaluation and samples."""

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
from jaxlaunch.trainer.spec import CustomModel, TrainSpec
from jaxlaunch.trainer.step.executable import Executable, step_compiler_options
from jaxlaunch.trainer.step.loss import StepLoss, Sums, check_buffers, name_user_errors
from jaxlaunch.trainer.step.state import Batch, Placement, StateBuilder, TrainState
from jaxlaunch.trainer.step.update import StepMetrics, Update
from jaxlaunch.trainer.task import Task


class Step:
    """Compiles and runs the sharded steps of a task on a mesh.

    The constructor allocates no arrays. It raises SpecError if the batch cannot be divided or a
    sharding rule does not fit.

    Attributes:
        mesh: The devices of the step.
        builder: The builder of the state, which also converts it for checkpoints and holds its
            optimizer.
        abstract: The state's shapes, dtypes and shardings.
        loss: The loss that the programs trace.
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
        self._check_experts()
        # Keyed by steps per dispatch.
        self._train_programs: dict[int, Executable] = {}
        self._eval_program: Executable | None = None
        self._samples_program: Executable | None = None

    @property
    def attention_implementation(self) -> str:
        """The implementation of attention in use, with `auto` and unavailable ones resolved."""
        return "xla" if self._spec.attention == "auto" else self._spec.attention

    def _check_experts(self) -> None:
        ep, axes = self.mesh.shape["ep"], self.builder.axes.values()
        has_experts = any("experts" in (names or ()) for names in axes)
        if ep > 1 and not has_experts and not isinstance(self._spec.model, CustomModel):
            raise SpecError(
                f"train.mesh.ep = {ep} splits experts, and train.model has none; use dp or fsdp"
            )

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
        error_context = name_user_errors(self._spec.task, self._task, abstract_batch, model)
        with self.builder.trace_context(), error_context:
            buffers = jax.eval_shape(self.loss.training_loss, *self._loss_arguments(batch))[1][1]
            with user_code.append_place(type(self._task) if model is None else model):
                check_buffers(self._spec.task, self.abstract.buffers, buffers)
            jax.eval_shape(self._evaluation_sums, self.abstract, abstract_batch)

    def compile_train(self, batch: Batch, steps: int = 1) -> None:
        """Compile `train` for dispatches of `steps` steps.

        Raises TypeError if it is already compiled for batches of other shapes or dtypes.
        """
        arguments = self.abstract, self._placement.abstract_batch(batch)
        if steps in self._train_programs:
            self._train_programs[steps].check_arguments(*arguments)
            return
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        self._train_programs[steps] = self._compile(
            "train",
            self._update.dispatch_function(steps),
            *arguments,
            donate_argnums=0,
            out_shardings=(shardings, self._placement.replicated),
        )

    def _compile(
        self, name: str, function: Callable[..., Any], *abstract_args: Any, **jit_options: Any
    ) -> Executable:
        options = step_compiler_options(self.mesh)
        with self.builder.trace_context():
            return Executable(name, function, abstract_args, options=options, **jit_options)

    def compile_eval(self, batch: Batch, compute_outputs: Callable[..., Any] | None = None) -> None:
        """Compile `evaluate`, with the outputs `compute_outputs(model, batch)` if that is given.

        Raises TypeError if it is already compiled for batches of other shapes or dtypes.
        """
        arguments = self.abstract, self._placement.abstract_batch(batch)
        if self._eval_program is not None:
            self._eval_program.check_arguments(*arguments)
            return

        def evaluate_state(state: TrainState, batch: dict[str, Array]) -> tuple[Any, Any]:
            params, buffers = state.evaluated_params(), state.evaluated_buffers()
            return self.loss.evaluation_outputs(params, buffers, batch, compute_outputs)

        self._eval_program = self._compile("eval", evaluate_state, *arguments)

    def compile_evaluator(
        self, batch: Batch, compute_outputs: Callable[[Any, Batch], Any] | None = None
    ) -> Executable:
        """Compile an evaluation that takes parameters and buffers instead of a state.

        It returns the sums, the outputs `compute_outputs(model, batch)`, and the rows' weights,
        replicated on every process. XLA computes the forward pass of sums and outputs only once.
        """
        return self._compile(
            "eval",
            partial(self.loss.evaluation_outputs, compute_outputs=compute_outputs),
            self.abstract.params,
            self.abstract.buffers,
            self._placement.abstract_batch(batch),
        )

    def compile_samples(self) -> Any:
        """Compile the task's `samples` of the evaluated model. Return its abstract result."""

        def samples(state: TrainState) -> Any:
            model = self.loss.evaluation_model(state.evaluated_params(), state.evaluated_buffers())
            key = jax.random.fold_in(self.builder.random_keys()[0], 1)
            return self._placement.replicate(self._task.samples(model, key))

        self._samples_program = self._compile("samples", samples, self.abstract)
        with self.builder.trace_context():
            return jax.eval_shape(samples, self.abstract)

    def evaluated_metrics(self, batch: Batch) -> list[str]:
        """Trace `evaluate` on batches like this one, and return the names of its metrics."""
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

        `state` is donated. The metrics are means, float32 scalars on the device, by the names of
        contract.Key and of the task.

        If the loss or the gradients of a step are not finite, `finite` is False and the state is
        returned unchanged. Under a loss scale that can still be halved, the step is `skipped`
        instead: only the step count and the scale change. A batch without a target has `weight` 0:
        only the step count changes, and the means are NaN. Raises TypeError if the batch has other
        shapes or dtypes than the step was compiled for.
        """
        return self._train_programs[steps](state, batch)  # type: ignore[no-any-return]

    def evaluate(self, state: TrainState, batch: Batch) -> tuple[Any, Any]:
        """Return sums and weights, float32 scalars, of the loss and the task's metrics.

        The second element is the outputs that `compile_eval` was given, with the rows' weights, or
        None. If the parameters have an average (a moving one, or that of schedule-free), it is
        evaluated in their place.
        """
        assert self._eval_program is not None, "compile_eval comes before evaluate"
        return self._eval_program(state, batch)  # type: ignore[no-any-return]

    def make_samples(self, state: TrainState) -> Any:
        """Return the result of the task's `samples`, replicated on every process."""
        assert self._samples_program is not None, "compile_samples comes before samples"
        return self._samples_program(state)

    # --- costs ------------------------------------------------------------------------------------

    def count_flops(self, batch: Batch) -> float | None:
        """Return the model FLOPs of a train step on such batches; None if they depend on data."""
        return flops.train_step_flops(self.forward_jaxpr(batch), trained=self.trained_count)

    @property
    def trained_count(self) -> int | None:
        """The number of leading arguments of `forward_jaxpr` that are trained; None for all."""
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
        programs = self._train_programs
        return [programs[steps].hlo_text() for steps in sorted(programs, reverse=True)]

    @property
    def compiled_steps(self) -> dict[str, Executable]:
        """The compiled programs: `train` with one step per dispatch, and `eval`."""
        programs = {"train": self._train_programs.get(1), "eval": self._eval_program}
        return {name: program for name, program in programs.items() if program is not None}

    def _loss_arguments(self, batch: Batch) -> tuple[Any, ...]:
        """Return the abstract arguments of `loss.training_loss` for batches like this one."""
        rng = jax.eval_shape(lambda: self.builder.random_keys()[1])
        trained, frozen = self.builder.split_frozen(self.abstract.params)
        return trained, frozen, self.abstract.buffers, self._placement.abstract_batch(batch), rng


def _check_batch_divides(spec: TrainSpec, mesh: jax.sharding.Mesh) -> None:
    shards = meshes.count_shards(mesh)
    if spec.batch % (shards * spec.accumulate):
        raise SpecError(
            f"train.batch = {spec.batch} cannot be split evenly over accumulate = "
            f"{spec.accumulate} micro-batches × {meshes.describe_shards(mesh)} devices; use a "
            f"multiple of {shards * spec.accumulate}"
        )
