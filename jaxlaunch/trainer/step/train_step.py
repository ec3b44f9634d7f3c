"""The compiled programs of a training: init, train, evaluate and samples of a task on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.attention import availability
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.numerics import flops, memory
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.spec import CustomModel, Decoder, TrainSpec
from jaxlaunch.trainer.step.executable import Executable, often
from jaxlaunch.trainer.step.loss import StepLoss, check_rest, user_errors
from jaxlaunch.trainer.step.model_arrays import Named
from jaxlaunch.trainer.step.state_builder import StateBuilder
from jaxlaunch.trainer.step.train_state import Batch, Placement, TrainState
from jaxlaunch.trainer.step.update import Update
from jaxlaunch.trainer.task import Task

Evaluated = dict[str, tuple[Array, Array]]


class Step:
    """Compiles and runs the sharded steps of a task on a mesh. Building one allocates nothing.

    Raises SpecError when the batch does not divide or a sharding rule does not fit.

    Attributes:
        mesh: The devices of the step.
        builder: What makes the state, names it for a checkpoint, and holds its optimizer.
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
        self._train: dict[int, Executable] = {}  # by the steps of one dispatch
        self._evaluate: Executable | None = None
        self._samples: Executable | None = None

    @property
    def attention(self) -> str:
        """The implementation of attention in use: what `auto` is here, or `xla` in place of one that is unavailable."""
        return "xla" if self._spec.attention == "auto" else self._spec.attention

    def init(self) -> TrainState:
        """Return a new state; see StateBuilder.init."""
        return self.builder.init()

    def put(self, batch: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Array]:
        """Return this process's rows of a batch as global arrays, split over the batch axes."""
        return self._placement.put(batch, self._spec.batch)

    # --- before the first step ------------------------------------------------------------------------------------

    def check(self, batch: Batch) -> None:
        """Trace the loss, in training and in evaluation, on global batches like this one; nothing is compiled.

        Raises:
            SpecError: A task or a model does not keep to its interface; the message names the line in the user's files.
        """
        if self.builder.is_ours:
            return
        abstract_batch, model = self._placement.abstract_batch(batch), self._spec.model
        own = user_code.load(model.kind) if isinstance(model, CustomModel) else None
        with self.builder.context(), user_errors(self._spec.task, self._task, abstract_batch, own):
            rest = jax.eval_shape(self.loss.training, *self._loss_arguments(batch))[1][1]
            with user_code.placed(type(self._task) if own is None else own):
                check_rest(self._spec.task, self.abstract.rest, rest)
            jax.eval_shape(self._sums, self.abstract, abstract_batch)

    def compile_train(self, batch: Batch, steps: int = 1) -> None:
        """Compile `train` of `steps` steps for global batches like this one.

        Raises TypeError for a second kind of batch.
        """
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
        """Compile `evaluate` for global batches like this one. Raises TypeError for a second kind of batch.

        `also` is that of `evaluator`.
        """
        abstract_batch = self._placement.abstract_batch(batch)
        if self._evaluate is not None:
            return self._evaluate.check(self.abstract, abstract_batch)

        def of(state: TrainState, batch: dict[str, Array]) -> tuple[Any, Any]:
            return self.loss.sums_and(state.evaluated_params(), state.evaluated_rest(), batch, also)

        with self.builder.context():
            self._evaluate = Executable("eval", of, (self.abstract, abstract_batch), options=often(self.mesh))

    def evaluator(self, batch: Batch, also: Callable[[Any, Batch], Any] | None = None) -> Executable:
        """Return `evaluate` of parameters and other arrays in place of a state, compiled for batches like this one.

        It returns with the sums what `also` makes of model and batch, and the rows' weights, whole on every process; of
        the forward pass, which both begin with, XLA keeps one.
        """

        def of(params: Named, rest: Named, batch: dict[str, Array]) -> tuple[Any, Any]:
            return self.loss.sums_and(params, rest, batch, also)

        arguments = self.abstract.params, self.abstract.rest, self._placement.abstract_batch(batch)
        with self.builder.context():
            return Executable("eval", of, arguments, options=often(self.mesh))

    def compile_samples(self, samples: Callable[[Any, Array], Any]) -> Any:
        """Compile a task's `samples`, of the model as it evaluates; return its arrays, abstract."""

        def of(state: TrainState) -> Any:
            model = self.loss.model(state.evaluated_params(), state.evaluated_rest())
            return self._placement.replicate(samples(model, jax.random.fold_in(self.builder.keys()[0], 1)))

        with self.builder.context():
            self._samples = Executable("samples", of, (self.abstract,), options=often(self.mesh))
            return jax.eval_shape(of, self.abstract)

    def evaluated_metrics(self, batch: Batch) -> list[str]:
        """Return the names of the metrics that `evaluate` gives for batches like this one; only traced."""
        with self.builder.context():
            return list(jax.eval_shape(self._sums, self.abstract, self._placement.abstract_batch(batch)))

    def _sums(self, state: TrainState, batch: dict[str, Array]) -> Evaluated:
        return self.loss.sums(state.evaluated_params(), state.evaluated_rest(), batch)

    # --- the steps ------------------------------------------------------------------------------------------------

    def train(self, state: TrainState, batch: Batch, steps: int = 1) -> tuple[TrainState, dict[str, Array]]:
        """Take one optimizer step; or several, on a batch [B, steps, ...] and with metrics [steps].

        `state` is donated; the metrics are means on the device, float32 scalars by the names of contract.Key and the
        task's own, to be read later.

        A step whose loss or gradients are not finite has `finite` False and returns the state unchanged. Under a loss
        scale it is `skipped` instead, as long as the scale can be halved: it counts, and changes nothing else. Nor does
        a step of `weight` 0, of a batch without a target: its means are NaN. Raises TypeError when the batch has other
        shapes or dtypes than the step was compiled for.
        """
        new, metrics = self._train[steps](state, batch)
        return new, metrics

    def evaluate(self, state: TrainState, batch: Batch) -> Evaluated:
        """Return sums and weights, float32 scalars, of the loss and the task's metrics, and the sum of row weights.

        Uses the average of the parameters where there is one: the moving one, or schedule-free's.
        """
        sums: Evaluated = self.evaluate_and(state, batch)[0]
        return sums

    def evaluate_and(self, state: TrainState, batch: Batch) -> tuple[Any, Any]:
        """Return what `evaluate` does, and what `also` of `compile_eval` makes, with the rows' weights; else None."""
        assert self._evaluate is not None, "compile_eval comes before evaluate"
        found: tuple[Any, Any] = self._evaluate(state, batch)
        return found

    def samples(self, state: TrainState) -> Any:
        """Return what the task's `samples` makes now, whole on every process."""
        assert self._samples is not None, "compile_samples comes before samples"
        return self._samples(state)

    # --- costs ----------------------------------------------------------------------------------------------------

    def flops(self, batch: Batch) -> float | None:
        """Return the model FLOPs of a train step on global batches like this one; None when they depend on the data."""
        return flops.train_step(self.forward(batch), trained=self.trained_arrays)

    @property
    def trained_arrays(self) -> int | None:
        """How many of the first arguments of `forward` are trained; None where nothing is frozen."""
        return len(self.builder.trained(self.abstract.params)) if self.builder.frozen else None

    def forward(self, batch: Batch) -> Jaxpr:
        """Return the jaxpr of the forward pass on global batches like this one, for counting FLOPs."""
        step = self
        if self._spec.attention not in availability.ANYWHERE:
            # The FLOPs of a kernel are not in its jaxpr.
            plain = self._spec.model_copy(update={"attention": "xla"})
            step = Step(self._task, plain, self.mesh, self._total_steps)
        with step.builder.context():
            forward: Jaxpr = jax.make_jaxpr(step.loss.training)(*step._loss_arguments(batch)).jaxpr
        return forward

    def residual_bytes(self, batch: Batch) -> int:
        """Return the bytes that the backward pass of a micro-batch keeps of its forward pass, on all devices."""
        with self.builder.context():
            return memory.residual_bytes(self.loss.training, *self._loss_arguments(batch))

    def programs(self) -> list[str]:
        """Return the HLO texts of the compiled train steps, that of most steps per dispatch first."""
        return [self._train[steps].text() for steps in sorted(self._train, reverse=True)]

    @property
    def compiled(self) -> dict[str, Executable]:
        """The compiled steps: `train`, of one step a dispatch, and `eval`."""
        executables = {"train": self._train.get(1), "eval": self._evaluate}
        return {name: executable for name, executable in executables.items() if executable is not None}

    def _loss_arguments(self, batch: Batch) -> tuple[Any, ...]:
        """Return the abstract arguments of `loss.training` for batches like this one."""
        rng = jax.eval_shape(lambda: self.builder.keys()[1])
        split = self.builder.split_frozen(self.abstract.params)
        return *split, self.abstract.rest, self._placement.abstract_batch(batch), rng


def _check_divides(spec: TrainSpec, mesh: jax.sharding.Mesh) -> None:
    shards, ep = meshes.shards(mesh), mesh.shape["ep"]
    if spec.batch % (shards * spec.accumulate):
        raise SpecError(
            f"train.batch = {spec.batch} cannot be split evenly over accumulate = {spec.accumulate} "
            f"micro-batches × {meshes.shards_said(mesh)} devices; use a multiple of {shards * spec.accumulate}"
        )
    has_experts = isinstance(spec.model, Decoder) and spec.model.experts is not None
    if ep > 1 and not has_experts and not isinstance(spec.model, CustomModel):
        raise SpecError(f"train.mesh.ep = {ep} splits experts, and train.model has none; use dp or fsdp")
