"""The train state, and the two compiled steps on it: train and evaluate.

Every mean is a sum with a weight until the end: micro-batches and devices add up to one global mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch.contract import BATCH_AXES, Key
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.adapters import base, reference_model
from jaxlaunch.trainer.adapters.attach import Adapters
from jaxlaunch.trainer.adapters.targets import is_adapter
from jaxlaunch.trainer.attention import availability, padding
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import load
from jaxlaunch.trainer.numerics import flops, memory, precision
from jaxlaunch.trainer.optim import groups, loss_scale, optimizers, schedule_free, schedules
from jaxlaunch.trainer.optim.loss_scale import LossScale
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.spec import GPT2, LM, CustomModel, Decoder, Published, TrainSpec
from jaxlaunch.trainer.step import checked
from jaxlaunch.trainer.step.executable import Executable
from jaxlaunch.trainer.step.loop import looped
from jaxlaunch.trainer.step.model_arrays import ModelArrays, Named
from jaxlaunch.trainer.step.options import often, once
from jaxlaunch.trainer.task import Loss, Task, check_arrays, checked_loss, checked_model

Batch = Mapping[str, Any]


class TrainState(NamedTuple):
    """What a run carries from step to step, in flat dicts by parameter name. Donated to every train step.

    `opt` and `ema` are of the parameters that are trained, not of frozen ones. With adapters `params` are both: what is
    frozen is the model.
    """

    step: Any  # int32 scalar: optimizer steps that are complete
    params: Named
    opt: Any  # optax's state
    ema: Named | None  # float32 moving average, also of what is real in `rest`
    rest: Named  # other arrays of the model: BatchNorm's statistics
    scale: LossScale | None = None  # under float16


class Step:
    """Sharded init, train and evaluation of a task on a mesh. Building one allocates nothing.

    Raises SpecError when the batch does not divide or a sharding rule does not fit.
    """

    def __init__(self, task: Task, spec: TrainSpec, mesh: jax.sharding.Mesh, total_steps: int) -> None:
        self._task, self._mesh = task, mesh
        self._spec, note = availability.with_fallback(spec, mesh.devices.flat[0])
        self._precision = precision.policy(spec.precision)
        self._rate = schedules.build(spec.optimizer, total_steps)
        self._total = total_steps
        self._check_batch()
        self._check_experts()
        # Whether no code of the user's is traced, but for an optimizer's.
        self.is_ours = type(task).__module__.startswith("jaxlaunch.trainer.") and not isinstance(
            spec.model, CustomModel
        )
        self._adapters = Adapters.of(spec, self._precision.params)
        self._has_copy = self._adapters is None and task.needs_reference
        self.base: dict[str, Any] | None = None  # what a checkpoint says of the base, once it was read from a folder
        with self.context():
            self._arrays = ModelArrays(nnx.eval_shape(self._model))
        self.axes = sharding.by_path(task.sharding, self._arrays.axes)
        self._frozen_base = frozenset(filter(self._is_of_base, self._arrays.params))
        self.frozen = self._frozen_base | groups.frozen(spec.optimizer, self.saved(self._arrays.params))
        self._optimizer = optimizers.build(spec.optimizer, total_steps, self.axes)
        self.abstract = self._abstract()
        with self.context():
            optimizers.check(spec.optimizer, self._optimizer, self.trained(self.abstract.params))
        # For the run's log and summary.
        said = optimizers.notes(spec.optimizer, self.saved(self.abstract.params), self.axes)
        self.notes = [*([note] if note else []), *said]
        if self._adapters is not None:
            state = self.abstract
            self.notes.append(self._adapters.note(state.params, state.opt, self.named(state)))
        if self._has_copy:
            copy = {name: self.abstract.params[name] for name in self._frozen_base}
            self.notes.append(f"the reference is a frozen copy of the model, {memory.total_bytes(copy):,} bytes")
        self._train: dict[int, Executable] = {}  # by the steps of one dispatch
        self._evaluate: Executable | None = None
        self._samples: Executable | None = None

    @property
    def attention(self) -> str:
        """The implementation of attention in use: what `auto` is here, or `xla` in place of one that is unavailable."""
        return "xla" if self._spec.attention == "auto" else self._spec.attention

    # --- state --------------------------------------------------------------------------------------------------------

    def trained(self, params: Named) -> Named:
        """Those of `params` that are not frozen."""
        return {name: leaf for name, leaf in params.items() if name not in self.frozen}

    def init(self) -> TrainState:
        """A new state, each device computing or reading its own part: equal numbers on every mesh.

        Raises SpecError when the folder to start from does not hold this model.
        """
        model, read = self._spec.model, self._base()
        if self._adapters is not None:
            read |= self._adapters.start(self.saved(self.abstract.params))
        elif isinstance(model, Published) and model.init_from is not None:
            read |= load.load(model, self.saved(self.abstract.params) | _real(self.abstract.rest))
        with self.context():
            fresh = jax.jit(
                self._fresh, donate_argnums=0, out_shardings=self._shardings(), compiler_options=once(self._mesh)
            )
            state: TrainState = fresh(read)
        return state

    def named(self, state: TrainState) -> dict[str, Any]:
        """The state as dicts of leaves by name, for a checkpoint: without empty parts, the base of adapters and the
        reference."""
        leaves = jax.tree_util.tree_flatten_with_path(state.opt)[0]
        opt = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
        scale = None if state.scale is None else state.scale._asdict()
        parts = {"params": self.saved(state.params), "opt": opt, "ema": state.ema, "rest": state.rest, "scale": scale}
        return {"step": state.step, **{name: dict(part) for name, part in parts.items() if part}}

    def unnamed(self, tree: Mapping[str, Any]) -> TrainState:
        """The inverse of `named`: the state of such a tree. What it leaves out is read, or drawn, again."""
        names = self.named(self.abstract).get("opt", {})
        opt = jax.tree.unflatten(jax.tree.structure(self.abstract.opt), [tree["opt"][name] for name in names])
        ema = None if self.abstract.ema is None else dict(tree["ema"])
        scale = None if self.abstract.scale is None else LossScale(**tree["scale"])
        return TrainState(tree["step"], self.with_base(tree["params"]), opt, ema, dict(tree.get("rest", {})), scale)

    def with_base(self, saved: Named) -> Named:
        """The parameters of which a checkpoint holds `saved`: with the base of adapters, or the reference, read or
        drawn again."""
        return self._base() | dict(saved)

    @contextlib.contextmanager
    def checks_base(self, recorded: Mapping[str, Any] | None, whose: str) -> Iterator[None]:
        """Within it the parameters of `whose` checkpoint are completed `with_base`, which must be what it `recorded`.

        Raises CheckpointError where the base is of another folder, or where that folder holds other weights by now.
        """
        holds, model = base.COMPARED if self._has_copy else base.ADAPTERS, self._spec.model
        if self.has_base and isinstance(model, Published):
            base.check_origin(recorded, model, whose, holds)
        yield
        if self.base is not None and recorded is not None:
            base.check(recorded, self.base, whose, holds=holds)

    def put(self, batch: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Array]:
        """This process's rows as global arrays, split over the batch axes."""
        where = meshes.batch_sharding(self._mesh)
        return {
            name: jax.make_array_from_process_local_data(where, rows, (self._spec.batch, *rows.shape[1:]))
            for name, rows in batch.items()
        }

    # --- steps --------------------------------------------------------------------------------------------------------

    def check(self, batch: Batch) -> None:
        """Traces the loss, in training and in evaluation, on global batches like this one; nothing is compiled.

        Raises SpecError, with the line in the user's files, for what a task or model does not keep of its interface.
        """
        if self.is_ours:
            return
        like, model = self._like(batch), self._spec.model
        own = user_code.load(model.kind) if isinstance(model, CustomModel) else None
        with self.context(), checked.told(self._spec.task, self._task, like, own):
            rest = jax.eval_shape(self._loss, *self._arguments(batch))[1][1]
            with user_code.placed(type(self._task) if own is None else own):
                checked.kept(self._spec.task, self.abstract.rest, rest)
            jax.eval_shape(self._sums, self.abstract, like)

    def compile_train(self, batch: Batch, steps: int = 1) -> None:
        """Compiles `train` of `steps` steps for global batches like this one.

        Raises TypeError for a second kind of batch.
        """
        if steps in self._train:
            return self._train[steps].check(self.abstract, self._like(batch))
        outputs = (self._shardings(), NamedSharding(self._mesh, PartitionSpec()))
        update = self._update if steps == 1 else self._updates
        with self.context():
            self._train[steps] = Executable(
                "train",
                update,
                (self.abstract, self._like(batch)),
                donate_argnums=0,
                out_shardings=outputs,
                options=often(self._mesh),
            )

    def compile_eval(self, batch: Batch, also: Callable[..., Any] | None = None) -> None:
        """Compiles `evaluate` for global batches like this one. Raises TypeError for a second kind of batch.

        `also` is that of `evaluator`.
        """
        if self._evaluate is not None:
            return self._evaluate.check(self.abstract, self._like(batch))
        with self.context():

            def of(state: TrainState, batch: dict[str, Array]) -> tuple[Any, Any]:
                return self._sums_and(self.evaluated(state), self._evaluated_rest(state), batch, also)

            arguments = self.abstract, self._like(batch)
            self._evaluate = Executable("eval", of, arguments, options=often(self._mesh))

    def evaluates(self, batch: Batch) -> list[str]:
        """The names of the metrics that `evaluate` gives for batches like this one; only traced."""
        with self.context():
            return list(jax.eval_shape(self._sums, self.abstract, self._like(batch)))

    def train(self, state: TrainState, batch: Batch, steps: int = 1) -> tuple[TrainState, dict[str, Array]]:
        """One optimizer step; or several, on a batch [B, steps, ...] and with metrics [steps].

        `state` is donated; the metrics are means on the device, float32 scalars by the names of contract.Key and the
        task's own, to be read later.

        A step whose loss or gradients are not finite has `finite` False and returns the state unchanged. Under a loss
        scale it is `skipped` instead, as long as the scale can be halved: it counts, and changes nothing else. Nor does
        a step of `weight` 0, of a batch without a target: its means are NaN. Raises TypeError when the batch has other
        shapes or dtypes than the step was compiled for.
        """
        new, metrics = self._train[steps](state, batch)
        return new, metrics

    def evaluate(self, state: TrainState, batch: Batch) -> dict[str, tuple[Array, Array]]:
        """Sums and weights, float32 scalars, of the loss and the task's metrics; `examples` is the sum of row weights.

        Uses the average of the parameters where there is one: the moving one, or schedule-free's.
        """
        sums: dict[str, tuple[Array, Array]] = self.examined(state, batch)[0]
        return sums

    def examined(self, state: TrainState, batch: Batch) -> tuple[Any, Any]:
        """What `evaluate` returns, and what `also` of `compile_eval` makes, with the rows' weights; else None."""
        assert self._evaluate is not None, "compile_eval comes before evaluate"
        found: tuple[Any, Any] = self._evaluate(state, batch)
        return found

    def evaluator(self, batch: Batch, also: Callable[[Any, Batch], Any] | None = None) -> Executable:
        """`evaluate` of parameters and other arrays in place of a state, compiled for batches like this one.

        Returns with the sums what `also` makes of model and batch, and the rows' weights, whole on every process; of
        the forward pass, which both begin with, XLA keeps one.
        """

        def of(params: Named, rest: Named, batch: dict[str, Array]) -> tuple[Any, Any]:
            return self._sums_and(params, rest, batch, also)

        with self.context():
            arguments = self.abstract.params, self.abstract.rest, self._like(batch)
            return Executable("eval", of, arguments, options=often(self._mesh))

    def compile_samples(self, samples: Callable[[Any, Array], Any]) -> Any:
        """Compiles a task's `samples`, of the model as it evaluates; returns its arrays, abstract."""

        def of(state: TrainState) -> Any:
            model = self._evaluating(self.evaluated(state), self._evaluated_rest(state))
            found = samples(model, jax.random.fold_in(self._keys()[0], 1))
            whole = NamedSharding(self._mesh, PartitionSpec())
            return jax.tree.map(lambda each: jax.lax.with_sharding_constraint(each, whole), found)

        with self.context():
            self._samples = Executable("samples", of, (self.abstract,), options=often(self._mesh))
            return jax.eval_shape(of, self.abstract)

    def samples(self, state: TrainState) -> Any:
        """What the task's `samples` makes now, whole on every process."""
        assert self._samples is not None, "compile_samples comes before samples"
        return self._samples(state)

    def merged(self, params: Named, rest: Named) -> nnx.Module:
        """The model of these arrays as it evaluates, in the compute dtype; called within `context`."""
        model: nnx.Module = self._evaluating(params, rest)
        return model

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices of the step."""
        return self._mesh

    @property
    def shards(self) -> int:
        """Parts of a batch."""
        return meshes.shards(self._mesh)

    def reads_tokens(self, batch: Batch) -> bool:
        """Whether a batch like this one has rows of `tokens`, of which a language model reads all but the last."""
        is_read = isinstance(self._spec.model, Decoder | GPT2) or self._spec.task == LM
        return is_read and "tokens" in batch and len(batch["tokens"].shape) > 1

    def flops(self, batch: Batch) -> float | None:
        """Model FLOPs of a train step on global batches like this one; None when they depend on the data."""
        return flops.train_step(self.forward(batch), trained=self.trained_arrays)

    @property
    def trained_arrays(self) -> int | None:
        """How many of the first arguments of `forward` are trained; None where nothing is frozen."""
        return len(self.trained(self.abstract.params)) if self.frozen else None

    def forward(self, batch: Batch) -> Jaxpr:
        """The jaxpr of the forward pass on global batches like this one, for counting FLOPs."""
        plain = self._spec.model_copy(update={"attention": "xla"})  # a kernel's FLOPs are not in its jaxpr
        step = (
            self if self._spec.attention in availability.ANYWHERE else Step(self._task, plain, self._mesh, self._total)
        )
        with step.context():
            forward: Jaxpr = jax.make_jaxpr(step._loss)(*step._arguments(batch)).jaxpr
        return forward

    def residual_bytes(self, batch: Batch) -> int:
        """Bytes that the backward pass of a micro-batch like this one keeps of its forward pass, on all devices."""
        with self.context():
            return memory.residual_bytes(self._loss, *self._arguments(batch))

    def programs(self) -> list[str]:
        """The HLO texts of the compiled train steps, that of most steps per dispatch first."""
        return [self._train[steps].text() for steps in sorted(self._train, reverse=True)]

    @property
    def compiled(self) -> dict[str, Executable]:
        """The compiled steps: `train`, of one step a dispatch, and `eval`."""
        found = {"train": self._train.get(1), "eval": self._evaluate}
        return {name: each for name, each in found.items() if each is not None}

    def _updates(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        """One step after the other: a loop over the second axis of the batch."""
        return looped(self._update, state, jax.tree.map(self._by_step, batch))

    def _by_step(self, rows: Array) -> Array:
        """[B, K, ...] -> [K, B, ...]; no row leaves its device."""
        return self._held(rows.swapaxes(0, 1))

    def _update(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        rng = jax.random.fold_in(self._keys()[1], state.step)
        loss, grads, rest = self._gradients(state, batch, rng)
        norm = optax.tree.norm(grads)
        is_empty = loss.weight == 0
        finite = jnp.isfinite(loss.sum / _divisor(loss.weight)) & jnp.isfinite(norm)
        trained = self.trained(state.params)
        updates, opt = self._optimizer.update(grads, state.opt, trained)
        trained = optax.apply_updates(trained, updates)
        ema = None
        if state.ema is not None and self._spec.optimizer.ema is not None:
            ema = optimizers.ema_update(state.ema, trained | _real(rest), self._spec.optimizer.ema)
        new = TrainState(state.step + 1, {**state.params, **trained}, opt, ema, rest, state.scale)
        kept = jax.tree.map(partial(jnp.where, finite & ~is_empty), new, state)
        counts, flags = finite, {Key.FINITE: finite, Key.WEIGHT: loss.weight}
        if self.reads_tokens(batch):
            flags[Key.TOKENS] = padding.counted(batch)
        if state.scale is not None:
            scale = loss_scale.updated(state.scale, finite)
            kept = kept._replace(scale=jax.tree.map(partial(jnp.where, is_empty & finite), state.scale, scale))
            counts = jnp.ones((), bool)
            flags |= {Key.FINITE: finite | ~loss_scale.is_exhausted(state.scale), Key.SKIPPED: ~finite}
            flags |= {Key.LOSS_SCALE: state.scale.value}
        # A step that changes nothing else still counts, in the run and in the schedule, a function of the step.
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
        """The loss, the gradient of its global mean by what is trained, and `rest` after it: a loop over the
        micro-batches."""

        def micro(carry: tuple[Named, Named], part: tuple[dict[str, Array], Array]) -> Any:
            total, rest = carry
            grads, (loss, rest) = jax.grad(self._loss, has_aux=True)(trained, frozen, rest, *part, state.scale)
            grads = jax.lax.with_sharding_constraint(grads, where)  # under fsdp: scattered as they are summed
            if (scale := state.scale) is not None:
                grads = jax.tree.map(lambda grad: grad / loss_scale.factor(scale, loss.weight), grads)
            return (jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, grads), rest), loss

        trained, frozen = self._split(state.params)
        parts = jax.tree.map(self._micro_batches, batch), jax.random.split(rng, self._spec.accumulate)
        where = {name: param.sharding for name, param in self.trained(self.abstract.params).items()}
        zeros = jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), trained)
        (grads, rest), losses = looped(micro, (zeros, state.rest), parts)
        loss = jax.tree.map(lambda per_micro_batch: per_micro_batch.sum(0), losses)
        return loss, jax.tree.map(lambda grad: grad / _divisor(loss.weight), grads), rest

    def _micro_batches(self, rows: Array) -> Array:
        """[B, ...] -> [A, B / A, ...]: row i goes to micro-batch i mod A, so that no row leaves its device."""
        count = self._spec.accumulate
        return self._held(rows.reshape(rows.shape[0] // count, count, *rows.shape[1:]).swapaxes(0, 1))

    def _held(self, parts: Array) -> Array:
        """[K, B, ...] with B split over the devices as a batch is."""
        where = NamedSharding(self._mesh, PartitionSpec(None, BATCH_AXES))
        held: Array = jax.lax.with_sharding_constraint(parts, where)
        return held

    def _split(self, params: Named) -> tuple[Named, Named]:
        """`params` as those that are trained and those that are frozen."""
        return self.trained(params), {name: leaf for name, leaf in params.items() if name in self.frozen}

    def _loss(
        self,
        trained: Named,
        frozen: Named,
        rest: Named,
        batch: dict[str, Array],
        rng: Array,
        scale: LossScale | None = None,
    ) -> tuple[Array, tuple[Loss, Named]]:
        params = self._cast({**trained, **frozen})

        def of(batch: dict[str, Array], rng: Array) -> tuple[Loss, Named]:
            """The loss of some rows, and the model's other arrays after them."""
            model_rng, loss_rng = jax.random.split(rng)
            model = self._arrays.merge(params, rest, model_rng)
            if self._spec.batch_norm == "frozen":
                model.set_attributes(use_running_average=True)
            loss = self._task_loss(model, batch, loss_rng)
            if not isinstance(loss, Loss):
                weight = batch["weight"].sum()
                loss = Loss(loss * weight, weight)
            return loss, self._arrays.split(model)[1]

        loss, rest = self._by_device(of, batch, rng) if self._spec.batch_norm == "device" else of(batch, rng)
        total = loss.sum if scale is None else loss.sum * loss_scale.factor(scale, loss.weight)
        return total, (loss, rest)

    def _by_device(
        self, of: Callable[..., tuple[Loss, Named]], batch: dict[str, Array], rng: Array
    ) -> tuple[Loss, Named]:
        """`of` each device's rows, which normalizes them by their own statistics; `rest` is the mean over devices."""
        count = meshes.shards(self._mesh)
        where = NamedSharding(self._mesh, PartitionSpec(BATCH_AXES))

        def own(rows: Array) -> Array:
            """Rows [B, ...] as [devices, B / devices, ...]."""
            parts: Array = rows.reshape(count, -1, *rows.shape[1:])
            split: Array = jax.lax.with_sharding_constraint(parts, where)
            return split

        with sharding.by_device():
            each = jax.vmap(of, spmd_axis_name=BATCH_AXES)(jax.tree.map(own, batch), jax.random.split(rng, count))
        loss: Loss = jax.tree.map(lambda parts: parts.sum(0), each[0])
        is_real = _real(each[1])
        return loss, {name: parts.mean(0) if name in is_real else parts[0] for name, parts in each[1].items()}

    def _task_loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Any:
        """The task's loss in float32. Raises SpecError where it is none."""
        loss = checked_loss(self._spec.task, self._task.loss(model, batch, rng))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), loss)

    def _sums(self, state: TrainState, batch: dict[str, Array]) -> dict[str, tuple[Array, Array]]:
        return self._sums_of(self.evaluated(state), self._evaluated_rest(state), batch)

    def _sums_and(
        self, params: Named, rest: Named, batch: dict[str, Array], also: Callable[..., Any] | None
    ) -> tuple[Any, Any]:
        """The sums, and what `also` makes of the model and the batch, whole on every process."""
        sums = self._sums_of(params, rest, batch)
        if also is None:
            return sums, None
        whole = NamedSharding(self._mesh, PartitionSpec())
        more = also(self._evaluating(params, rest), batch), batch["weight"]
        return sums, jax.tree.map(lambda each: jax.lax.with_sharding_constraint(each, whole), more)

    def _sums_of(self, params: Named, rest: Named, batch: dict[str, Array]) -> dict[str, tuple[Array, Array]]:
        def loss(batch: dict[str, Array]) -> Any:
            return self._task_loss(self._evaluating(params, rest), batch, self._keys()[1])

        sums, weight_B = loss(batch), batch["weight"]
        examples = weight_B.sum()
        if not isinstance(sums, Loss):  # a mean over rows cannot leave padded rows out: one row at a time can
            if self._experts is not None:  # which are split over devices by rows
                raise SpecError(
                    f"{self._spec.task}: the loss is a bare mean, which a model with experts is not evaluated by; "
                    "return jaxlaunch.trainer.task.Loss(sum, weight)"
                )
            mean_B = jax.vmap(lambda row: loss(jax.tree.map(lambda x: x[None], row)))(batch)
            sums = Loss(jnp.where(weight_B != 0, mean_B * weight_B, 0.0).sum(), examples)
        return {**sums.metrics, Key.LOSS: (sums.sum, sums.weight), Key.EXAMPLES: (examples, examples)}

    def _evaluating(self, params: Named, rest: Named) -> Any:
        """The model as it evaluates."""
        model = self._arrays.merge(self._cast(params), rest, self._keys()[1])
        model.eval()
        return model

    def evaluated(self, state: TrainState) -> Named:
        """The parameters that evaluation uses: an average of them where there is one."""
        if state.ema is not None:
            return {name: state.ema.get(name, param) for name, param in state.params.items()}
        averaged = schedule_free.averaged(state.opt, state.params)
        return state.params if averaged is None else averaged

    def _evaluated_rest(self, state: TrainState) -> Named:
        """The model's other arrays that evaluation uses: their average where there is one, in their own dtypes."""
        ema = state.ema or {}
        return {name: ema[name].astype(leaf.dtype) if name in ema else leaf for name, leaf in state.rest.items()}

    # --- parts of the steps -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """The mesh and the matmul precision that everything is traced under; flax places nothing by itself.

        What is ours from end to end never broadcasts by rank, which would hide a wrong shape; what users bring may.
        """
        matmul = self._precision.matmul
        ranks = jax.numpy_rank_promotion("raise") if self.is_ours else contextlib.nullcontext()
        with ranks, jax.set_mesh(self._mesh), nnx.use_eager_sharding(False):  # type: ignore[no-untyped-call]
            with jax.default_matmul_precision(matmul) if matmul else contextlib.nullcontext():
                yield

    def _keys(self) -> Array:
        """Two random keys: one of the initial weights, one of the steps."""
        high, low = divmod(self._spec.seed, 2**32)
        key = jax.random.key(low)  # JAX keeps the low 32 bits of a seed, as it is configured by default
        return jax.random.split(jax.random.fold_in(key, high) if high else key)

    def _model(self) -> nnx.Module:
        made: Any = self._task.model(self._spec, nnx.Rngs(self._keys()[0]))
        with user_code.placed(type(self._task).model):
            model = checked_model(self._spec.task, made)
        with user_code.placed(model):
            check_arrays(self._spec.task, model)
        if self._adapters is not None:
            self._adapters.attach(model, self._keys()[0])
        if self._has_copy:  # of the same key: the same weights
            reference_model.put(model, self._task.model(self._spec, nnx.Rngs(self._keys()[0])))
        return model

    @property
    def has_base(self) -> bool:
        """Whether there are parameters that are read, or drawn, at each start, and no checkpoint holds."""
        return bool(self._frozen_base)

    def _is_of_base(self, name: str) -> bool:
        return (
            name.startswith(reference_model.PREFIX)
            if self._has_copy
            else self._adapters is not None and not is_adapter(name)
        )

    def _base(self) -> Named:
        """The base of adapters, or the reference, as it is kept: read from its folder, or drawn from the seed."""
        model, like = self._spec.model, {name: self.abstract.params[name] for name in sorted(self._frozen_base)}
        if not like:
            return {}
        if isinstance(model, Published) and model.init_from is not None:
            prefix = reference_model.PREFIX if self._has_copy else ""
            params, self.base = base.read(model, {name.removeprefix(prefix): leaf for name, leaf in like.items()})
            return {prefix + name: param for name, param in params.items()}
        where = {name: leaf.sharding for name, leaf in like.items()}
        with self.context():
            draw = jax.jit(
                lambda: {name: self._fresh({}).params[name] for name in like},
                out_shardings=where,
                compiler_options=once(self._mesh),
            )
            drawn: Named = draw()
        return drawn

    def saved(self, params: Named) -> Named:
        """Those of `params` that a checkpoint holds: all but the base of adapters and the reference."""
        return {name: leaf for name, leaf in params.items() if name not in self._frozen_base}

    def _fresh(self, read: Named) -> TrainState:
        """The state before the first step, with the parameters `read`, and random ones in the place of others."""
        made, rest = self._arrays.split(self._model())
        params = {name: self._kept(name, read.get(name, param)) for name, param in made.items()}
        rest = {name: read.get(name, leaf) for name, leaf in rest.items()}
        trained = self.trained(params)
        ema = None if self._spec.optimizer.ema is None else optimizers.ema_init(trained | _real(rest))
        scale = loss_scale.init() if self._precision.is_scaled else None
        return TrainState(jnp.zeros((), jnp.int32), params, self._optimizer.init(trained), ema, rest, scale)

    def _kept(self, name: str, param: Any) -> Array:
        """A parameter in the dtype that it is kept in."""
        if self._adapters is not None and name in self._frozen_base:
            return self._adapters.stored(name, param)
        return _as(param, self._precision.compute if name in self._frozen_base else self._precision.params)

    def _cast(self, params: Named) -> Named:
        late: frozenset[str] = frozenset() if self._adapters is None else self._adapters.cast_late
        return {name: param if name in late else self._computed(name, param) for name, param in params.items()}

    def _computed(self, name: str, param: Array) -> Array:
        """A parameter in the dtype that layers compute in."""
        cast = _as(param, self._precision.compute)
        return cast if cast.dtype == param.dtype else sharding.held_alone(cast, self.abstract.params[name].sharding)

    def _abstract(self) -> TrainState:
        with self.context():
            shapes = jax.eval_shape(self._fresh, {})
        placed = {
            name: sharding.state_sharding(name, leaf.shape, self.axes[name], self._mesh)
            for name, leaf in (shapes.params | shapes.rest).items()
        }
        params = {name: placed[name] for name in shapes.params}
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        where = TrainState(
            step=everywhere,
            params=params,
            opt=optimizers.state_shardings(self._optimizer, self.trained(shapes.params), self.trained(params)),
            ema=None if shapes.ema is None else {name: placed[name] for name in shapes.ema},
            rest={name: placed[name] for name in shapes.rest},
            scale=jax.tree.map(lambda leaf: everywhere, shapes.scale),
        )
        abstract: TrainState = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, where
        )
        return abstract

    def _shardings(self) -> TrainState:
        shardings: TrainState = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        return shardings

    def _arguments(self, batch: Batch) -> tuple[Any, ...]:
        """What `_loss` is traced with."""
        rng = jax.eval_shape(lambda: self._keys()[1])
        return *self._split(self.abstract.params), self.abstract.rest, self._like(batch), rng

    def _like(self, batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
        where = meshes.batch_sharding(self._mesh)
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for name, x in batch.items()}

    @property
    def _experts(self) -> int | None:
        """How many a layer of a built-in model has; None: it has one MLP."""
        return self._spec.model.experts if isinstance(self._spec.model, Decoder) else None

    def _check_experts(self) -> None:
        ep, model = self._mesh.shape["ep"], self._spec.model
        if ep > 1 and not isinstance(model, CustomModel) and self._experts is None:
            raise SpecError(f"train.mesh.ep = {ep} splits experts, and train.model has none; use dp or fsdp")

    def _check_batch(self) -> None:
        shards = meshes.shards(self._mesh)
        if self._spec.batch % (shards * self._spec.accumulate):
            raise SpecError(
                f"train.batch = {self._spec.batch} cannot be split evenly over accumulate = {self._spec.accumulate} "
                f"micro-batches × {meshes.shards_said(self._mesh)} devices; "
                f"use a multiple of {shards * self._spec.accumulate}"
            )


def _divisor(weight: Array) -> Array:
    """What a sum of this weight is divided by: of no weight the mean is 0, so that what is not finite still shows."""
    return jnp.where(weight == 0, 1.0, weight)


def _real(rest: Named) -> Named:
    """Those of the other arrays of a model that an average makes sense of: statistics, not counts and keys."""
    return {name: leaf for name, leaf in rest.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}


def _as(array: Array, dtype: jnp.dtype) -> Array:
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array
