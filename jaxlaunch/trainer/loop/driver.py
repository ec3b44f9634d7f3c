"""The training loop, for the built-in training and for a program's own step.

The order within a step is fixed: evaluate, save, get the batch, dispatch the step, read metrics. The metrics of a step
are read after the next step was dispatched, so that the device never waits for the host. Before a save or an evaluation
they are read first, so that a state that is not finite is never committed.
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
from jaxlaunch.trainer.checkpoint.consensus import on_primary
from jaxlaunch.trainer.checkpoint.reader import BEST
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.data.pipeline import Prefetcher
from jaxlaunch.trainer.errors import Stopped
from jaxlaunch.trainer.loop.training import Place, Training, cut_spans
from jaxlaunch.trainer.metrics.means import BestSteps, Patience, value_of
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import FLAGS
from jaxlaunch.trainer.numerics import flops
from jaxlaunch.trainer.profiling.profiler import Profiler
from jaxlaunch.trainer.start.distributed import Stop, meet
from jaxlaunch.trainer.tracking import feeding

# The state of a training.
S = TypeVar("S")

# Evaluations and saves collect garbage, too. This is the interval without them.
COLLECT_EVERY = 1000  # steps
# A longer wait for a batch is reported as the phase `data`.
READY_S = 0.02


class Loop(Generic[S]):
    """One attempt at a run of `training`, from the newest checkpoint until every save is committed."""

    def __init__(self, training: Training[S], place: Place, stop: Stop, report: Progress) -> None:
        self.training, self.settings, self.metrics = training, training.settings, training.metrics
        self._saved_before = place.saved
        self.stop, self.report = stop, report
        self.store = Store(
            training.folder, keep=self.settings.keep, uid=place.uid, take_over=place.take_over, note=training.note
        )
        self.profiler = Profiler(
            self.settings.profile,
            rank=jax.process_index(),
            run_dir=place.run_dir,
            request=place.profile,
            report=report,
            settle=self._read_metrics,
            programs=training.programs,
        )
        self.best = None if self.settings.best is None else BestSteps(self.settings.best)
        self.patience = None if self.settings.stop_early is None else Patience(self.settings.stop_early)
        # The last step that was dispatched. Its metrics may still be unread.
        self.done = 0
        # Whether this attempt has dispatched a step.
        self.is_stepping = False
        # The last step that was handed to the store.
        self.saved = -1
        self.evaluated = -1
        # The last step that was reported as committed.
        self._committed: int | None = None
        # The steps whose metrics are not read yet.
        self._pending: tuple[range, dict[str, jax.Array]] | None = None
        # The last step whose time is in the metrics.
        self._logged = 0

    def run(self) -> S:
        """Run to the last step and return its state. Raises Stopped or another TrainerError when the run ends early."""
        start, state = self._restore()
        # Ranks agree to stop by the count of their polls, so each must poll equally often: before and after everything
        # that can take long, such as restoring and compiling.
        self._stop_if_asked(start, state)
        if self._is_over():
            # An earlier attempt ended the run. The tracker may not have every line of it.
            self.metrics.start(start)
        else:
            self.report.phase("compile", start)
            flops_per_step = self.training.compile(start)
            self._stop_if_asked(start, state)
            with faults.training():
                state = self._train(start, state, flops_per_step)
        return self._finish(state)

    def _train(self, start: int, state: S, flops_per_step: float | None) -> S:
        """Train to the last step, or to the one at which patience ends, and return the state."""
        settings, timer = self.settings, self.metrics.timer
        # Evaluations and saves come between dispatches, so steps that are dispatched together end where one is due.
        pauses = settings.eval_every, settings.save_every
        spans = cut_spans(start, settings.steps, settings.steps_per_dispatch, pauses)
        batches = self.training.iterate(spans)
        # A collection in one rank's step delays every rank, so it runs during evaluations and saves. The objects that
        # are alive now stay until the end, so they are frozen and not scanned again. The collection before the freeze
        # removes garbage, which would otherwise be frozen, too.
        gc.collect()
        gc.freeze()
        gc.disable()
        self._logged = start
        self.metrics.start(start, flops_per_step=flops_per_step, peak_flops=flops.peak(jax.devices()))
        # The last span is empty. It stands for the end of the run.
        for span in itertools.chain(spans, [range(settings.steps, settings.steps)]):
            self.done = done = span.start
            # The evaluation comes before the save: it may make this step one of the best.
            if self.training.evaluates and settings.is_due(settings.eval_every, done) and done > self.evaluated:
                self._evaluate(done, state)
            if self._should_save(done) and done > self.saved:
                self._save(done, state)
            if done == settings.steps or self._is_over():
                break
            # A stop comes after what is due at this step, so that a resumed run has nothing to repeat.
            self._stop_if_asked(done, state)
            self.profiler.between(done)
            self.report.phase("step", done)
            with timer.part("data"):
                batch = self._next_batch(batches, done)
            # This returns once the steps are dispatched. The state is donated: only the new one is valid from here on.
            state, metrics = self.training.train(state, batch, span)
            self.is_stepping = True
            # While the device runs these steps, the host waits for the previous ones. It is at most one dispatch ahead,
            # and the device never waits while the host handles metrics.
            with timer.part("device"):
                self._read_metrics()
            self._pending = (span, metrics)
            timer.step_done(len(span))
        return state

    def _restore(self) -> tuple[int, S]:
        """Return the step and state of the newest usable checkpoint, or 0 and a new state."""
        training, settings = self.training, self.settings
        self.report.phase("restore", 0)
        # This refuses a folder in which another run trains.
        self.store.claim()
        if self._saved_before:
            # Restoring a state keeps storage busy and leaves the processor free to compile.
            training.compile_ahead()
        restored = self.store.restore(training.to_tree(training.abstract), training.difference)
        start, tree, meta = (0, {}, {}) if restored is None else restored
        if start < self._saved_before:
            training.note(
                f"step {self._saved_before}, which this run saved, is gone from {training.folder}; training starts "
                f"again from step {start}"
            )
        # Foreign files in the place of a checkpoint are reported now, not at a save hours later.
        first = 0 if restored is None else start + 1
        self.store.check_free(lambda step: step >= first and settings.is_due(settings.save_every, step))
        if restored is None:
            # The program that creates a new state is compiled, too.
            self.report.phase("compile", 0)
            return 0, training.init()
        self.report.found(start)
        if self.best is not None:
            self.best.resume(meta.get(BEST), on_primary(self.store.steps))
        if self.patience is not None:
            self.patience.resume(meta.get("stop_early"))
        is_finished = start == settings.steps or self._is_over()
        changes = training.check_resumed(meta, start, is_finished)
        self.done = self.saved = self._committed = start
        self.evaluated = meta.get("evaluated", -1)
        if training.repeats_last_evaluation:
            self.evaluated = min(self.evaluated, settings.steps - 1)
        self.report.restored(start)
        training.note(f"resumed at step {start} of {settings.steps}")
        if is_finished:
            training.note(f"nothing to do: the run finished at step {start}")
        if changes is not None:
            training.note(changes)
        return start, training.from_tree(tree, meta, start)

    # --- within a step ------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        """Return whether patience ends the run. Every rank gets the same answer."""
        return self.patience is not None and self.patience.is_over

    def _should_save(self, done: int) -> bool:
        is_best = self.best is not None and done in self.best.steps
        return self.settings.is_due(self.settings.save_every, done) or is_best or self._is_over()

    def _evaluate(self, done: int, state: S) -> None:
        """Record the means over the held-out set and the samples for the prompts."""
        self._read_metrics()
        self.report.phase("eval", done)
        with self.profiler.pause(), self.metrics.timer.part("eval"):
            # An evaluation may last longer than the grace period, so the loop polls for a stop between batches, too.
            means = self.training.evaluate(state, partial(self._stop_if_asked, done, state))
            gc.collect()
        self.evaluated = done
        if means:
            self.metrics.evaluated(done, means)
            for watch, rule in ((self.best, self.settings.best), (self.patience, self.settings.stop_early)):
                if watch is not None and rule is not None:
                    # All ranks take the value of process 0, so that they decide alike.
                    watch.see(done, on_primary(partial(value_of, rule, means)))
            if self.best is not None and self.best.steps[:1] == [done]:
                self.metrics.found_best(done)
        with self.profiler.pause(), self.metrics.timer.part("eval"):
            samples = self.training.sample(state)
        if samples:
            self.metrics.sampled(done, samples)

    def _save(self, done: int, state: S) -> None:
        """Start to save the state. The store writes it while the loop continues."""
        self._read_metrics()
        self.report.phase("save", done)
        meta = self.training.meta() | {"evaluated": self.evaluated}
        meta |= {} if self.best is None else {BEST: self.best.to_meta()}
        meta |= {} if self.patience is None else {"stop_early": self.patience.to_meta()}
        with self.profiler.pause(), self.metrics.timer.part("save"):
            started = time.perf_counter()
            best_steps = [] if self.best is None else self.best.steps
            self.store.save(done, self.training.to_tree(state), meta, best_steps)
            self.metrics.saved(done, time.perf_counter() - started)
            gc.collect()
        self.saved = done

    def _next_batch(self, batches: Prefetcher[Any] | None, done: int) -> Any:
        """Return the next batch. A long wait is reported as a phase, so that a verdict can name the rank that waits."""
        if batches is None:
            return None
        batch = batches.get(READY_S)
        if batch is None:
            self.report.phase("data", done)
            while batch is None:
                # Python runs its signal handlers only between two slices of a wait.
                batch = batches.get(1.0)
            self.report.phase("step", done)
        return batch

    def _read_metrics(self) -> None:
        """Wait for the steps dispatched last and record their metrics. Raises NotFiniteError, StorageError."""
        if self._pending is None:
            return
        (span, metrics), self._pending = self._pending, None
        try:
            values = jax.device_get({name: metrics[name] for name in FLAGS if name in metrics})
        except Exception:
            # A callback's exception belongs to these steps, not to those dispatched since.
            self.report.phase("step", span.start)
            raise
        flags = {name: np.atleast_1d(value) for name, value in values.items()}
        for index, step in enumerate(range(span.start + 1, span.stop + 1)):
            if not flags[Key.FINITE][index]:
                raise self.training.not_finite(step, _metrics_of_step(metrics, index), self.saved)
            if Key.WEIGHT in flags:
                tokens = float(flags[Key.TOKENS][index]) if Key.TOKENS in flags else 0.0
                self.metrics.trained(step, float(flags[Key.WEIGHT][index]), tokens)
            if Key.SKIPPED in flags and flags[Key.SKIPPED][index]:
                wrong = self.training.wrong_batch(step) if jax.process_index() == 0 else None
                self.metrics.skipped(step, _metrics_of_step(metrics, index)[Key.LOSS_SCALE], wrong)
            if step % self.settings.log_every == 0 or step == self.settings.steps:
                # The time since the last line is divided evenly among the steps since.
                share = (step - self._logged) / (span.stop - self._logged)
                self.metrics.interval(step, _metrics_of_step(metrics, index), share)
                self._logged = step
            if step % COLLECT_EVERY == 0:
                gc.collect()
        self._report_commits()

    def _report_commits(self) -> None:
        """Report a newly committed step to agent and metrics. Raises StorageError when a save failed."""
        step = self.store.committed()
        if step is not None and step != self._committed:
            self._committed = step
            self.metrics.committed(step)
            self.report.committed(step)

    # --- the ends -----------------------------------------------------------------------------------------------------

    def _stop_if_asked(self, done: int, state: S) -> None:
        """Save the state and raise Stopped if the run is asked to stop. Every rank is at the same step."""
        if not self.stop.poll():
            return
        self._read_metrics()
        self.report.phase("save", done)
        self._forget_if_lost(done)
        saved = max(self.saved, 0)
        is_new, note = done > saved, f"nothing new to save after step {saved}"
        # Foreign files may occupy the place of this step. The run can continue from an older one, so this is no error.
        if is_new and (names := self.store.taken(done)):
            is_new = False
            note = f"nothing new saved after step {saved}: {names} in {self.training.folder} is another's"
        if is_new:
            note = f"saved step {done}"
            self._save(done, state)
        self._settle(done)
        self.report.stopped(done, is_new, note)
        self._end_tracking(stops=True)
        raise Stopped(f"stopped from outside: {note}")

    def _finish(self, state: S) -> S:
        """Write everything that is left to write, and return the state after the last step."""
        if self.patience is not None and self.patience.is_over:
            reason = self.patience.sentence()
            self.training.note(f"stopped early at step {self.done} of {self.settings.steps}: {reason}")
        self.profiler.finish(self.done)
        if self._forget_if_lost(self.done):
            self._save(self.done, state)
        self._settle(self.done)
        self.report.phase("done", self.done)
        self._end_tracking(stops=False)
        return state

    def _forget_if_lost(self, done: int) -> bool:
        """Return whether somebody deleted the saved step `done`, in which case it must be saved again."""
        if done != self.saved or not self.store.lost(done):
            return False
        self.training.note(
            f"step {done} is gone from {self.training.folder}, which somebody else deleted: saving it again"
        )
        self.saved = -1
        return True

    def _settle(self, done: int) -> None:
        """Wait until every save is committed or failed, and close store and metrics."""
        self.report.phase("save", done)
        self.store.wait()
        self._report_commits()
        self.store.close()
        self.metrics.close()

    def _end_tracking(self, *, stops: bool) -> None:
        """Wait for the tracker. The run has reported its end, which a failure here does not change.

        All ranks wait with rank 0, because JAX aborts ranks that reach its shutdown long before rank 0 does.
        """
        if feeding.is_asked():
            self.metrics.end_tracking(stops=stops)
            meet("tracker", feeding.longest_s())

    def end_saves(self, *, releases: bool = False) -> None:
        """End the saves of a run that ends with an error. Exceptions of the store are suppressed: the error matters.

        A run that has trained keeps its claim on the folder for its next attempt. If the process lives on, `releases`
        must be set: otherwise a thread would renew the claim of a run that is over.
        """
        if self.is_stepping:
            # A save that began before the error is valid. It is the last one of this attempt.
            with contextlib.suppress(Exception), self.report.within("save", self.done):
                self.store.wait()
                self._report_commits()
        if releases or not self.is_stepping:
            # A run that is refused leaves the folder unchanged.
            with contextlib.suppress(Exception):
                self.store.close()


def _metrics_of_step(metrics: Mapping[str, jax.Array], index: int) -> dict[str, float]:
    return {name: float(np.atleast_1d(value)[index]) for name, value in jax.device_get(dict(metrics)).items()}
