"""The training loop, for the built-in training and for a program's own step.

The order of an iteration is fixed: evaluate, save, get the batch, dispatch the step, read metrics.
The metrics of a step are read after the next step is dispatched, so that the device never waits for
the host. A save or an evaluation reads them first, so that a state that is not finite is never
saved.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from jaxlaunch.contract import Key
from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.checkpoint.consensus import run_on_primary
from jaxlaunch.trainer.checkpoint.reader import BEST
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.data.pipeline import Prefetcher
from jaxlaunch.trainer.errors import Stopped
from jaxlaunch.trainer.loop.training import RunContext, Training, cut_spans
from jaxlaunch.trainer.metrics.means import BestSteps, Patience, watched_value
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import LOOP_KEYS
from jaxlaunch.trainer.numerics import flops
from jaxlaunch.trainer.profiling.profiler import Profiler
from jaxlaunch.trainer.start.distributed import Stop

# The state of a training.
S = TypeVar("S")

# Steps between garbage collections, in addition to those of evaluations and saves.
COLLECTION_INTERVAL_STEPS = 1000
# A longer wait for a batch is reported as the phase `data`.
READY_BATCH_S = 0.02


class Loop(Generic[S]):
    """One attempt at a training, from the newest checkpoint to the last step."""

    def __init__(
        self, training: Training[S], context: RunContext, stop: Stop, progress: Progress
    ) -> None:
        self.training, self.settings, self.metrics = training, training.settings, training.metrics
        self._earlier_saved_step = context.saved_step
        self.stop, self.progress = stop, progress
        self.store = Store(
            training.folder,
            keep=self.settings.keep,
            uid=context.uid,
            take_over=context.take_over,
            note=training.note,
        )
        self.profiler = Profiler(
            self.settings.profile,
            rank=jax.process_index(),
            run_dir=context.run_dir,
            request=context.profile,
            progress=progress,
            wait_for_steps=self._read_metrics,
            read_programs=training.hlo_texts,
        )
        best, stop_early = self.settings.best, self.settings.stop_early
        self.best = None if best is None else BestSteps(best)
        self.patience = None if stop_early is None else Patience(stop_early)
        # The last step that was dispatched. Its metrics may still be unread.
        self.done_step = 0
        # Whether this attempt has dispatched a step.
        self.has_stepped = False
        # The last step that was handed to the store.
        self.saved_step = -1
        self.evaluated_step = -1
        # The last step that was reported as committed.
        self._committed_step: int | None = None
        # The steps whose metrics are not read yet.
        self._pending_metrics: tuple[range, dict[str, jax.Array]] | None = None
        # The last step whose time is in the metrics.
        self._logged_step = 0

    def run(self) -> S:
        """Run to the last step and return its state. Raises a TrainerError if it ends early."""
        start, state = self._restore_newest()
        # The loop polls after everything that takes long, such as restoring and compiling. The
        # ranks agree on the number of the poll at which they stop, so all must poll equally often.
        self._stop_if_requested(start, state)
        if self._is_out_of_patience():
            # An earlier attempt ended the run, but the tracker may not have all of its lines.
            self.metrics.start(start)
        else:
            self.progress.report_phase("compile", start)
            flops_per_step = self.training.compile(start)
            self._stop_if_requested(start, state)
            with faults.mark_training():
                state = self._train_steps(start, state, flops_per_step)
        return self._finish(state)

    def _train_steps(self, start: int, state: S, flops_per_step: float | None) -> S:
        """Train to the last step, or until patience ends the run, and return the state."""
        settings, timer = self.settings, self.metrics.timer
        # Evaluations and saves come between dispatches, so steps that are dispatched together end
        # where one is due.
        pauses = settings.eval_every, settings.save_every
        spans = cut_spans(start, settings.steps, settings.steps_per_dispatch, pauses)
        batches = self.training.iterate_batches(spans)
        # A collection in one rank's step delays every rank, so it runs during evaluations and
        # saves. The objects that are alive now stay until the end, so they are frozen and not
        # scanned again. The collection before the freeze removes garbage, which would otherwise be
        # frozen, too.
        gc.collect()
        gc.freeze()
        gc.disable()
        self._logged_step = start
        self.metrics.start(
            start, flops_per_step=flops_per_step, peak_flops=flops.peak_flops(jax.devices())
        )
        # The empty span at the end is for the evaluation and the save after the last step.
        for span in itertools.chain(spans, [range(settings.steps, settings.steps)]):
            self.done_step = step = span.start
            # The evaluation comes before the save: it may make this step one of the best.
            is_eval_due = settings.is_due(settings.eval_every, step) and step > self.evaluated_step
            if self.training.has_evaluation and is_eval_due:
                self._evaluate(step, state)
            if self._should_save(step) and step > self.saved_step:
                self._save(step, state)
            if step == settings.steps or self._is_out_of_patience():
                break
            # The loop polls for a stop after the evaluation and the save of this step, so that a
            # resumed run does not repeat them.
            self._stop_if_requested(step, state)
            self.profiler.before_step(step)
            self.progress.report_phase("step", step)
            with timer.get_part("data"):
                batch = self._next_batch(batches, step)
            # This returns as soon as the steps are dispatched. The old state is donated and must
            # not be used any more.
            state, metrics = self.training.train_steps(state, batch, span)
            self.has_stepped = True
            # While the device runs these steps, the host waits for the previous ones. It is at most
            # one dispatch ahead, and the device never waits while the host handles metrics.
            with timer.get_part("device"):
                self._read_metrics()
            self._pending_metrics = (span, metrics)
            timer.end_step(len(span))
        return state

    def _restore_newest(self) -> tuple[int, S]:
        """Return the step and state of the newest usable checkpoint, or 0 and a new state."""
        training, settings = self.training, self.settings
        self.progress.report_phase("restore", 0)
        # This raises CheckpointError if another run trains in the folder.
        self.store.claim()
        if self._earlier_saved_step:
            # Restoring a state keeps storage busy and leaves the processor free to compile.
            training.compile_ahead()
        restored = self.store.restore(
            training.to_tree(training.abstract_state), training.describe_difference
        )
        start, tree, meta = (0, {}, {}) if restored is None else restored
        if start < self._earlier_saved_step:
            training.note(
                f"step {self._earlier_saved_step}, which this run saved, is gone from "
                f"{training.folder}; training starts again from step {start}"
            )
        # Foreign files that would block a save are reported now and not hours later.
        first_new_step = 0 if restored is None else start + 1
        self.store.check_free(
            lambda step: step >= first_new_step and settings.is_due(settings.save_every, step)
        )
        if restored is None:
            # Creating a new state compiles a program.
            self.progress.report_phase("compile", 0)
            return 0, training.init_state()
        self.progress.report_found(start)
        if self.best is not None:
            self.best.resume(meta.get(BEST), run_on_primary(self.store.committed_steps))
        if self.patience is not None:
            self.patience.resume(meta.get("stop_early"))
        is_finished = start == settings.steps or self._is_out_of_patience()
        changes = training.check_resumed(meta, start, is_finished)
        self.done_step = self.saved_step = self._committed_step = start
        self.evaluated_step = meta.get("evaluated", -1)
        if training.repeats_last_evaluation:
            self.evaluated_step = min(self.evaluated_step, settings.steps - 1)
        self.progress.report_restored(start)
        training.note(f"resumed at step {start} of {settings.steps}")
        if is_finished:
            training.note(f"nothing to do: the run finished at step {start}")
        if changes is not None:
            training.note(changes)
        return start, training.from_tree(tree, meta, start)

    # --- within a step ----------------------------------------------------------------------------

    def _is_out_of_patience(self) -> bool:
        """Return whether `train.stop_early` ends the run. The result is the same on every rank."""
        return self.patience is not None and self.patience.is_over

    def _should_save(self, step: int) -> bool:
        is_best = self.best is not None and step in self.best.steps
        is_due = self.settings.is_due(self.settings.save_every, step)
        return is_due or is_best or self._is_out_of_patience()

    def _evaluate(self, step: int, state: S) -> None:
        """Record the means over the held-out set and the samples for the prompts."""
        self._read_metrics()
        self.progress.report_phase("eval", step)
        with self.profiler.pause_context(), self.metrics.timer.get_part("eval"):
            # An evaluation may last longer than the grace period, so the loop polls for a stop
            # between batches, too.
            means = self.training.evaluate(state, partial(self._stop_if_requested, step, state))
            gc.collect()
        self.evaluated_step = step
        if means:
            self.metrics.record_evaluated(step, means)
            for watch in (self.best, self.patience):
                if watch is not None:
                    # All ranks use the value of process 0, so that their decisions agree.
                    watch.add_value(step, run_on_primary(partial(watched_value, watch.rule, means)))
            if self.best is not None and self.best.steps[:1] == [step]:
                self.metrics.record_best(step)
        with self.profiler.pause_context(), self.metrics.timer.get_part("eval"):
            samples = self.training.sample_prompts(state)
        if samples:
            self.metrics.record_samples(step, samples)

    def _save(self, step: int, state: S) -> None:
        """Start to save the state. The store writes it while the loop continues."""
        self._read_metrics()
        self.progress.report_phase("save", step)
        meta = self.training.checkpoint_meta() | {"evaluated": self.evaluated_step}
        meta |= {} if self.best is None else {BEST: self.best.to_meta()}
        meta |= {} if self.patience is None else {"stop_early": self.patience.to_meta()}
        with self.profiler.pause_context(), self.metrics.timer.get_part("save"):
            start_s = time.perf_counter()
            best_steps = [] if self.best is None else self.best.steps
            self.store.save(step, self.training.to_tree(state), meta, best_steps)
            self.metrics.record_saved(step, time.perf_counter() - start_s)
            gc.collect()
        self.saved_step = step

    def _next_batch(self, batches: Prefetcher[Any] | None, step: int) -> Any:
        """Return the next batch, and report a long wait for it as the phase `data`."""
        if batches is None:
            return None
        batch = batches.get(READY_BATCH_S)
        if batch is None:
            self.progress.report_phase("data", step)
            while batch is None:
                # Python runs signal handlers only between waits, so each wait is short.
                batch = batches.get(1.0)
            self.progress.report_phase("step", step)
        return batch

    def _read_metrics(self) -> None:
        """Record the metrics of the last dispatch. Raises NotFiniteError, StorageError."""
        if self._pending_metrics is None:
            return
        (span, metrics), self._pending_metrics = self._pending_metrics, None
        try:
            values = jax.device_get({name: metrics[name] for name in LOOP_KEYS if name in metrics})
        except Exception:
            # A callback in these steps may have raised. Later steps are already dispatched.
            self.progress.report_phase("step", span.start)
            raise
        flags = {name: np.atleast_1d(value) for name, value in values.items()}
        for index, step in enumerate(range(span.start + 1, span.stop + 1)):
            if not flags[Key.FINITE][index]:
                step_metrics = _read_step_metrics(metrics, index)
                raise self.training.not_finite_error(step, step_metrics, self.saved_step)
            if Key.WEIGHT in flags:
                tokens = float(flags[Key.TOKENS][index]) if Key.TOKENS in flags else None
                self.metrics.record_trained(step, float(flags[Key.WEIGHT][index]), tokens)
            if Key.SKIPPED in flags and flags[Key.SKIPPED][index]:
                is_primary = jax.process_index() == 0
                fault = self.training.describe_wrong_batch(step) if is_primary else None
                scale = _read_step_metrics(metrics, index)[Key.LOSS_SCALE]
                self.metrics.record_skipped(step, scale, fault)
            if step % self.settings.log_every == 0 or step == self.settings.steps:
                # The time since the last line is divided evenly among the steps since.
                share = (step - self._logged_step) / (span.stop - self._logged_step)
                self.metrics.record_interval(step, _read_step_metrics(metrics, index), share)
                self._logged_step = step
            if step % COLLECTION_INTERVAL_STEPS == 0:
                gc.collect()
        self._report_commits()

    def _report_commits(self) -> None:
        """Report a newly committed step. Raises StorageError if a save failed."""
        step = self.store.newest_committed_step()
        if step is not None and step != self._committed_step:
            self._committed_step = step
            self.metrics.record_committed(step)
            self.progress.report_committed(step)

    # --- the end of a run -------------------------------------------------------------------------

    def _stop_if_requested(self, step: int, state: S) -> None:
        """If a stop is requested, save the state and raise Stopped, on all ranks together."""
        if not self.stop.poll():
            return
        self._read_metrics()
        self.progress.report_phase("save", step)
        self._forget_if_deleted(step)
        saved_step = max(self.saved_step, 0)
        note = f"nothing new to save after step {saved_step}"
        is_new = step > saved_step
        if is_new and (names := self.store.blocking_names(step)):
            # Foreign files are not an error here, because the run can resume from an older step.
            is_new = False
            note = (
                f"nothing new saved after step {saved_step}: {names} in {self.training.folder} "
                "is another's"
            )
        if is_new:
            note = f"saved step {step}"
            self._save(step, state)
        self._close_store(step)
        self.progress.report_stopped(step, is_new, note)
        self.metrics.end_tracking(stops=True)
        raise Stopped(f"stopped: {note}")

    def _finish(self, state: S) -> S:
        """Finish saves, profile and metrics of a complete run, and return the state."""
        if self.patience is not None and self.patience.is_over:
            self.training.note(
                f"stopped early at step {self.done_step} of {self.settings.steps}: "
                f"{self.patience.describe_end()}"
            )
        self.profiler.finish_trace(self.done_step)
        if self._forget_if_deleted(self.done_step):
            self._save(self.done_step, state)
        self._close_store(self.done_step)
        self.progress.report_phase("done", self.done_step)
        # The end is already reported, so that a failure of the tracker does not change it. Only
        # rank 0 has a tracker; the other ranks wait for it in JAX's shutdown.
        self.metrics.end_tracking(stops=False)
        return state

    def _forget_if_deleted(self, step: int) -> bool:
        """Return whether the saved `step` was deleted from storage and must be saved again."""
        if step != self.saved_step or not self.store.forget_if_deleted(step):
            return False
        self.training.note(
            f"step {step} is gone from {self.training.folder}; somebody else deleted it; "
            "saving it again"
        )
        self.saved_step = -1
        return True

    def _close_store(self, step: int) -> None:
        """Wait until the last save is committed, and close store and metrics."""
        self.progress.report_phase("save", step)
        self.store.wait()
        self._report_commits()
        self.store.close()
        self.metrics.close()

    def end_saves(self, *, process_continues: bool = False) -> None:
        """End the saves of a run that ends with an error. Later errors are suppressed.

        A run that has trained keeps its claim on the folder for its next attempt, unless the
        process continues after the run: its thread would renew the claim, and its files of metrics
        would stay open.
        """
        if self.has_stepped:
            # A save that began before the error is valid.
            suppress = contextlib.suppress(Exception)
            with suppress, self.progress.temporary_phase("save", self.done_step):
                self.store.wait()
                self._report_commits()
        if process_continues or not self.has_stepped:
            # A run that ends before its first step releases the folder.
            with contextlib.suppress(Exception):
                self.store.close()
        if process_continues:
            self.metrics.close()


def _read_step_metrics(metrics: Mapping[str, jax.Array], index: int) -> dict[str, float]:
    values = jax.device_get(dict(metrics))
    return {name: float(np.atleast_1d(value)[index]) for name, value in values.items()}
