"""The traced train step: gradients over micro-batches, the optimizer's update, and the metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlaunch.contract import Key
from jaxlaunch.trainer.attention import padding
from jaxlaunch.trainer.optim import loss_scale, optimizers, schedules
from jaxlaunch.trainer.spec import GPT2, LM, Decoder, TrainSpec, TransformersModel
from jaxlaunch.trainer.step.loss import BatchSums, StepLoss, mean_divisor
from jaxlaunch.trainer.step.state import (
    Batch,
    NamedArrays,
    Placement,
    StateBuilder,
    TrainState,
    float_buffers,
)
from jaxlaunch.trainer.task import Loss

StepMetrics = dict[str, Array]


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
        return self._take_step if steps == 1 else self._take_steps

    def _take_steps(
        self, state: TrainState, batch: dict[str, Array]
    ) -> tuple[TrainState, StepMetrics]:
        """Take several steps in a loop over the second axis of the batch."""
        return scan_parts(self._take_step, state, jax.tree.map(self._placement.split_steps, batch))

    def _take_step(
        self, state: TrainState, batch: dict[str, Array]
    ) -> tuple[TrainState, StepMetrics]:
        """Take one step. A step that is empty, skipped or not finite keeps the old arrays."""
        rng = jax.random.fold_in(self._builder.random_keys()[1], state.step)
        loss, grads, buffers = self._compute_gradients(state, batch, rng)
        norm = optax.tree.norm(grads)
        penalty = jnp.zeros((), jnp.float32)
        if self._step_loss.mixture is not None and loss.routing is not None:
            penalty = self._step_loss.mixture.compute_penalty(loss.routing, loss.routing)
        mean_loss = loss.sum / mean_divisor(loss.weight) + penalty
        is_empty, is_finite = loss.weight == 0, jnp.isfinite(mean_loss) & jnp.isfinite(norm)
        trained = self._builder.trained_params(state.params)
        updates, opt = self._builder.optimizer.update(grads, state.opt, trained)
        trained = optax.apply_updates(trained, updates)
        ema = None
        if state.ema is not None and self._spec.optimizer.ema is not None:
            averaged = trained | float_buffers(buffers)
            ema = optimizers.update_ema(state.ema, averaged, self._spec.optimizer.ema)
        params = {**state.params, **trained}
        new_state = TrainState(state.step + 1, params, opt, ema, buffers, state.scale)
        next_state = jax.tree.map(partial(jnp.where, is_finite & ~is_empty), new_state, state)
        flags = {Key.FINITE: is_finite, Key.WEIGHT: loss.weight}
        if reads_tokens(self._spec, batch):
            flags[Key.TOKENS] = padding.count_input_tokens(batch)
        is_counted = is_finite
        if state.scale is not None:
            # Gradients that are not finite only skip the step, as long as the scale can be halved.
            scale = loss_scale.update_loss_scale(state.scale, is_finite)
            scale = jax.tree.map(partial(jnp.where, is_empty & is_finite), state.scale, scale)
            next_state = next_state._replace(scale=scale)
            is_counted = jnp.ones((), bool)
            flags[Key.FINITE] = is_finite | ~loss_scale.is_exhausted(state.scale)
            flags |= {Key.SKIPPED: ~is_finite, Key.LOSS_SCALE: state.scale.value}
        # A step that changes no other array still counts in the run, and therefore in the
        # schedules, which depend on the step.
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
        """Return the loss, the gradients of its global mean, and the new buffers."""

        def add_micro_batch(carry: tuple[NamedArrays, NamedArrays], part: Any) -> Any:
            total, buffers = carry
            gradient = jax.grad(self._step_loss.training_loss, has_aux=True)
            grads, (loss, buffers) = gradient(
                trained, frozen, buffers, *part, state.scale, batch_sums
            )
            # Under fsdp this constraint makes the sum of the gradients a reduce-scatter.
            grads = jax.lax.with_sharding_constraint(grads, shardings)
            if state.scale is not None:
                factor = loss_scale.loss_factor(state.scale, loss.weight)
                grads = jax.tree.map(lambda grad: grad / factor, grads)
            total = jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), total, grads)
            return (total, buffers), loss

        trained, frozen = self._builder.split_frozen(state.params)
        count = self._spec.accumulate
        split = partial(self._placement.split_micro_batches, count=count)
        parts = jax.tree.map(split, batch), jax.random.split(rng, count)
        abstract = self._builder.trained_params(self._builder.abstract.params)
        shardings = {name: param.sharding for name, param in abstract.items()}
        zeros = jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), trained)
        batch_sums = None
        if count > 1:
            batch_sums = self._sum_batch(trained, frozen, state.buffers, parts)
        (grads, buffers), losses = scan_parts(add_micro_batch, (zeros, state.buffers), parts)
        loss = jax.tree.map(lambda per_micro_batch: per_micro_batch.sum(0), losses)
        return loss, jax.tree.map(lambda grad: grad / mean_divisor(loss.weight), grads), buffers

    def _sum_batch(
        self, trained: NamedArrays, frozen: NamedArrays, buffers: NamedArrays, parts: Any
    ) -> BatchSums | None:
        """Return sums over all micro-batches before their backward passes; None without experts.

        The balance loss multiplies each expert's load by its probability, both over the whole
        batch, so the gradient of a micro-batch needs the loads of all of them. An additional
        forward pass up to the last router computes these loads; it keeps no residuals. Megatron
        avoids this pass with running sums over the micro-batches so far, which are not exact.
        """
        mixture = self._step_loss.mixture
        if mixture is None:
            return None

        def sum_micro_batch(buffers: NamedArrays, part: Any) -> tuple[NamedArrays, BatchSums]:
            _, (loss, buffers) = self._step_loss.training_loss(trained, frozen, buffers, *part)
            routing = loss.routing
            assert routing is not None, "a mixture of experts routes"
            if not mixture.balance:
                # The compiler then removes the forward pass, whose loads nothing reads.
                routing = routing._replace(chosen_ME=jnp.zeros_like(routing.chosen_ME))
            return buffers, BatchSums(loss.weight, routing)

        _, sums = scan_parts(sum_micro_batch, buffers, parts)
        total: BatchSums = jax.tree.map(lambda per_micro_batch: per_micro_batch.sum(0), sums)
        return total


def scan_parts(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, parts: Any
) -> tuple[Any, Any]:
    """Return `jax.lax.scan(body, carry, parts)`, without a loop if there is only one part.

    XLA's CPU compiler does not use its fast kernels for gradients of convolutions inside a loop
    (jaxlib 0.10), where those of a small ResNet took 20 times as long.
    """
    if len(jax.tree.leaves(parts)[0]) > 1:
        return jax.lax.scan(body, carry, parts)
    carry, output = body(carry, jax.tree.map(lambda part: part[0], parts))
    return carry, jax.tree.map(lambda leaf: leaf[None], output)


def reads_tokens(spec: TrainSpec, batch: Batch) -> bool:
    """Return whether the batch is rows of `tokens` [B, L] for a language model."""
    is_language_model = (
        isinstance(spec.model, Decoder | GPT2 | TransformersModel) or spec.task == LM
    )
    return is_language_model and "tokens" in batch and len(batch["tokens"].shape) > 1
