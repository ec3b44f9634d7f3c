"""One optimizer step, or several in one dispatch, as it is traced."""

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
from jaxlaunch.trainer.spec import GPT2, LM, Decoder, TrainSpec
from jaxlaunch.trainer.step.loss import StepLoss
from jaxlaunch.trainer.step.model_arrays import Named
from jaxlaunch.trainer.step.state_builder import StateBuilder
from jaxlaunch.trainer.step.train_state import Batch, Placement, TrainState, statistics
from jaxlaunch.trainer.task import Loss


class Update:
    """Gradients over micro-batches, the optimizer's update, the average, and the metrics of a step."""

    def __init__(
        self, spec: TrainSpec, placement: Placement, builder: StateBuilder, loss: StepLoss, total_steps: int
    ) -> None:
        self._spec, self._placement, self._builder, self._step_loss = spec, placement, builder, loss
        self._rate = schedules.build(spec.optimizer, total_steps)

    def function(self, steps: int) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
        """Return the function of a dispatch of this many steps."""
        return self._update if steps == 1 else self._updates

    def _updates(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        """Take one step after the other: a loop over the second axis of the batch."""
        return scan(self._update, state, jax.tree.map(self._placement.split_steps, batch))

    def _update(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        optimizer = self._builder.optimizer
        rng = jax.random.fold_in(self._builder.keys()[1], state.step)
        loss, grads, rest = self._gradients(state, batch, rng)
        norm = optax.tree.norm(grads)
        is_empty = loss.weight == 0
        finite = jnp.isfinite(loss.sum / _divisor(loss.weight)) & jnp.isfinite(norm)
        trained = self._builder.trained(state.params)
        updates, opt = optimizer.update(grads, state.opt, trained)
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
        """Return the loss, the gradient of its global mean by what is trained, and `rest` after all micro-batches."""

        def micro(carry: tuple[Named, Named], part: tuple[dict[str, Array], Array]) -> Any:
            total, rest = carry
            gradient = jax.grad(self._step_loss.training, has_aux=True)
            grads, (loss, rest) = gradient(trained, frozen, rest, *part, state.scale)
            # Under fsdp gradients are scattered as they are summed.
            grads = jax.lax.with_sharding_constraint(grads, where)
            if (scale := state.scale) is not None:
                grads = jax.tree.map(lambda grad: grad / loss_scale.factor(scale, loss.weight), grads)
            return (jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, grads), rest), loss

        trained, frozen = self._builder.split_frozen(state.params)
        count = self._spec.accumulate
        split = partial(self._placement.split_micro_batches, count=count)
        parts = jax.tree.map(split, batch), jax.random.split(rng, count)
        where = {name: param.sharding for name, param in self._builder.trained(self._builder.abstract.params).items()}
        zeros = jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), trained)
        (grads, rest), losses = scan(micro, (zeros, state.rest), parts)
        loss = jax.tree.map(lambda per_micro_batch: per_micro_batch.sum(0), losses)
        return loss, jax.tree.map(lambda grad: grad / _divisor(loss.weight), grads), rest


def reads_tokens(spec: TrainSpec, batch: Batch) -> bool:
    """Return whether a batch has rows of `tokens`, of which a language model reads all but the last."""
    is_language_model = isinstance(spec.model, Decoder | GPT2) or spec.task == LM
    return is_language_model and "tokens" in batch and len(batch["tokens"].shape) > 1


def scan(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, parts: Any) -> tuple[Any, Any]:
    """Run `jax.lax.scan` of `body` over the first axis of `parts`, without a loop if there is one part only.

    Inside a loop XLA's compiler for CPUs does not bring the convolutions of gradients into the form of its fast kernels
    (jaxlib 0.10): those of a small ResNet took 20 times as long.
    """
    if len(jax.tree.leaves(parts)[0]) > 1:
        return jax.lax.scan(body, carry, parts)
    carry, output = body(carry, jax.tree.map(lambda part: part[0], parts))
    return carry, jax.tree.map(lambda leaf: leaf[None], output)


def _divisor(weight: Array) -> Array:
    """Return the divisor of a weighted mean, 1 where the weight is 0."""
    # A zero weight must give 0 and not NaN, so that a sum that is not finite is still visible.
    return jnp.where(weight == 0, 1.0, weight)
