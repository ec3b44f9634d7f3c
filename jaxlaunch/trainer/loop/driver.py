"""The loop, whoever's step it drives, to be read from top to bottom.

The order within a step is fixed: evaluate, save, draw, step, read. A step's metrics are read after the next step was
dispatched, so that the host never holds up the device; before a save or an evaluation they are read first, so that
nothing that is not finite is ever committed.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import jax
import numpy as np

from jaxlaunch.contract import Key
from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.checkpoint.consensus import on_primary
from jaxlaunch.trainer.checkpoint.reader import BEST
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.data.prefetch import Prefetcher
from jaxlaunch.trainer.errors import Stopped
from jaxlaunch.trainer.loop.place import Place
from jaxlaunch.trainer.loop.training import Training
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import FLAGS
from jaxlaunch.trainer.metrics.watch import BestSteps, Patience, value_of
from jaxlaunch.trainer.numerics import flops
from jaxlaunch.trainer.profiling.profiler import Profiler
from jaxlaunch.trainer.start.distributed import Stop, meet
from jaxlaunch.trainer.step import dispatch
from jaxlaunch.trainer.tracking import feeding

S = TypeVar("S")  # the state of a training

COLLECT_EVERY = 1000  # steps between collections where neither an evaluation nor a save brings one
READY_S = 0.02  # the wait for a batch that is later than this is reported as the phase `data`


class Loop(Generic[S]):
    """One attempt at a run of `training`: it begins at the newest checkpoint and ends with every save committed."""

    def __init__(self, training: Training[S], place: Place, stop: Stop, report: Progress) -> None:
        self.training, self.settings, self.metrics = training, training.settings, training.metrics
        self._saved_before = place.saved
        self.stop, self.report = stop, report
        self.store = Store(
            training.folder,
            keep=self.settings.keep,
            uid=place.uid,
            take_over=place.take_over,
            note=training.note,
        )
        self.profiler = Profiler(
            self.settings.profile,
            rank=jax.process_index(),
            run_dir=place.run_dir,
            request=place.profile,
            report=report,
            settle=self._read,
            programs=training.programs,
        )
        self.best = None if self.settings.best is None else BestSteps(self.settings.best)
        self.patience = None if self.settings.stop_early is None else Patience(self.settings.stop_early)
        self.done = 0  # steps that were dispatched; the metrics of the last may still be unread
        self.is_stepping = False  # whether this attempt has dispatched a step
        self.saved = -1  # the last step that was handed to the store
        self.evaluated = -1  # the last step that was evaluated
        self._committed: int | None = None  # the last step that was reported as committed
        self._pending: tuple[range, dict[str, jax.Array]] | None = None  # steps that were dispatched, not read yet
        self._logged = 0  # the last step whose time is in the metrics

    def run(self) -> S:
        """The state after the last step. Raises a TrainerError, such as Stopped or NotFiniteError, when the run ends
        early, and what the training raises."""
        start, state = self._restore()
        # Ranks agree to stop by the count of their polls: each must poll equally often, and so before and after
        # everything that can last. A restore may take minutes, and a compile, too.
        self._leave_if_stopped(start, state)
        if self._is_over():  # an earlier attempt found that the run gets no better
            self.metrics.start(start)  # of which the tracker may not have every line
        else:
            self.report.phase("compile", start)
            flops_per_step = self.training.compile(start)
            self._leave_if_stopped(start, state)
            with faults.training():
                state = self._train(start, state, flops_per_step)
        return self._finish(state)

    def _train(self, start: int, state: S, flops_per_step: float | None) -> S:
        """The state after the last step, or after the one that patience ends with."""
        settings, timer = self.settings, self.metrics.timer
        # Evaluations and saves come between dispatches, so steps that are dispatched together end where one is due.
        pauses = settings.eval_every, settings.save_every
        spans = dispatch.spans(start, settings.steps, settings.steps_per_dispatch, pauses)
        batches = self.training.iterate(spans)
        # A collection in one rank's step delays every rank, so it runs beside evaluations and saves. What is alive now
        # stays until the end, and need not be looked at again; garbage that is frozen would stay, too.
        gc.collect()
        gc.freeze()
        gc.disable()
        self._logged = start
        self.metrics.start(start, flops_per_step=flops_per_step, peak_flops=flops.peak(jax.devices()))
        for span in itertools.chain(spans, [range(settings.steps, settings.steps)]):  # the last is empty: the end
            self.done = done = span.start
            # Metrics are read before an evaluation and a save: what is not finite ends the run before it is kept. The
            # evaluation comes before the save: what it finds may make this step one of the best.
            if self.training.evaluates and self._is_due(settings.eval_every, done) and done > self.evaluated:
                self._read()
                self._evaluate(done, state)
            if self._is_saved_at(done) and done > self.saved:
                self._read()
                self._save(done, state)
            if done == settings.steps or self._is_over():
                break
            # A stop comes after what is due at this step, so that a run that goes on from here has nothing to repeat.
            if self.stop.poll():
                self._read()
                self._leave(done, state)
            self.profiler.between(done)
            self.report.phase("step", done)
            with timer.part("data"):
                batch = self._draw(batches, done)
            # Returns once the steps are dispatched. The state is donated: from here on the new one alone is valid.
            state, metrics = self.training.train(state, batch, span)
            self.is_stepping = True
            # While the device is busy with these steps, the host waits for those before: it is one dispatch ahead,
            # never more, and the device never waits for what the host does with metrics.
            with timer.part("device"):
                self._read()
            self._pending = (span, metrics)
            timer.step_done(len(span))
        return state

    # --- before the first step ----------------------------------------------------------------------------------------

    def _restore(self) -> tuple[int, S]:
        """The step and state of the newest usable checkpoint; 0 and a new state without one."""
        training, settings = self.training, self.settings
        self.report.phase("restore", 0)
        self.store.claim()  # a folder that another run trains in is refused here
        if self._saved_before:  # a state is restored, which keeps storage busy and the processor hardly
            self.training.compile_ahead()
        found = self.store.restore(training.to_tree(training.abstract), training.difference)
        # A place that another's files take is found now, and not at a save after hours.
        first = 0 if found is None else found[0] + 1
        if (reached := max(first - 1, 0)) < self._saved_before:
            training.note(
                f"step {self._saved_before}, which this run saved, is gone from {training.folder}; training starts "
                f"again from step {reached}"
            )
        self.store.check_free(lambda step: step >= first and self._is_due(settings.save_every, step))
        if found is None:
            self.report.phase("compile", 0)  # what makes a new state is compiled, too
            return 0, training.init()
        start, tree, meta = found
        self.report.found(start)
        if self.best is not None:
            self.best.resume(meta.get(BEST), on_primary(self.store.steps))
        if self.patience is not None:
            self.patience.resume(meta.get("stop_early"))
        is_finished = start == settings.steps or self._is_over()
        changed = training.check_resumed(meta, start, is_finished)  # before anything is said of this attempt
        self.done = self.saved = start
        self._committed = start  # by an earlier attempt: no progress of this one
        self.evaluated = meta.get("evaluated", -1)
        if training.repeats_last_evaluation:
            self.evaluated = min(self.evaluated, settings.steps - 1)
        self.report.restored(start)
        training.note(f"resumed at step {start} of {settings.steps}")
        if is_finished:
            training.note(f"nothing to do: the run finished at step {start}")
        if changed is not None:
            training.note(changed)
        return start, training.from_tree(tree, meta, start)

    # --- within a step ------------------------------------------------------------------------------------------------

    def _is_due(self, every: int | None, done: int) -> bool:
        return done == self.settings.steps or (every is not None and done > 0 and done % every == 0)

    def _is_saved_at(self, done: int) -> bool:
        """Whether the state of this step is to be saved: as often as the settings say, the best, and the last."""
        is_best = self.best is not None and done in self.best.steps
        return self._is_due(self.settings.save_every, done) or is_best or self._is_over()

    def _is_over(self) -> bool:
        """Whether the run gets no better, on every rank alike."""
        return self.patience is not None and self.patience.is_over

    def _evaluate(self, done: int, state: S) -> None:
        """Records the means over the held-out set, and what the model goes on with after some prompts."""
        self.report.phase("eval", done)
        with self.profiler.pause(), self.metrics.timer.part("eval"):
            # An evaluation may last longer than a stop may take, so a stop is heeded between its batches as well.
            means = self.training.evaluate(state, partial(self._leave_if_stopped, done, state))
            gc.collect()
        self.evaluated = done
        if means:
            self.metrics.evaluated(done, means)
            for watch, watched in ((self.best, self.settings.best), (self.patience, self.settings.stop_early)):
                if watch is not None and watched is not None:
                    # By what process 0 has of it, so that no rank decides otherwise.
                    watch.see(done, on_primary(partial(value_of, watched, means)))
            if self.best is not None and self.best.steps[:1] == [done]:
                self.metrics.found_best(done)
        with self.profiler.pause(), self.metrics.timer.part("eval"):
            samples = self.training.sample(state)
        if samples:
            self.metrics.sampled(done, samples)

    def _save(self, done: int, state: S) -> None:
        """Starts a save of the state, which the store writes while the loop goes on."""
        self.report.phase("save", done)
        meta = self.training.meta() | {"evaluated": self.evaluated}
        meta |= {} if self.best is None else {BEST: self.best.to_meta()}
        meta |= {} if self.patience is None else {"stop_early": self.patience.to_meta()}
        with self.profiler.pause(), self.metrics.timer.part("save"):
            began = time.perf_counter()
            besides = [] if self.best is None else self.best.steps  # kept, however old they are
            self.store.save(done, self.training.to_tree(state), meta, besides)
            self.metrics.saved(done, time.perf_counter() - began)
            gc.collect()
        self.saved = done

    def _draw(self, batches: Prefetcher[Any] | None, done: int) -> Any:
        """The next batch; the wait for it is a phase of its own, so that a verdict can name the rank that waits."""
        if batches is None:
            return None
        batch = batches.get(READY_S)
        if batch is None:
            self.report.phase("data", done)
            while batch is None:  # in slices: a signal handler of Python's runs only between them
                batch = batches.get(1.0)
            self.report.phase("step", done)
        return batch

    def _read(self) -> None:
        """Waits for the steps dispatched last and records their metrics. Raises NotFiniteError, StorageError."""
        if self._pending is None:
            return
        (span, metrics), self._pending = self._pending, None
        try:
            found = jax.device_get({name: metrics[name] for name in FLAGS if name in metrics})
        except Exception:
            self.report.phase("step", span.start)  # what a callback raised is of these steps, not of those since
            raise
        flags = {name: np.atleast_1d(value) for name, value in found.items()}
        for at, step in enumerate(range(span.start + 1, span.stop + 1)):
            if not flags[Key.FINITE][at]:
                raise self.training.not_finite(step, _of(metrics, at), self.saved)
            if Key.WEIGHT in flags:
                tokens = flags.get(Key.TOKENS)
                self.metrics.trained(step, float(flags[Key.WEIGHT][at]), 0.0 if tokens is None else float(tokens[at]))
            if Key.SKIPPED in flags and flags[Key.SKIPPED][at]:
                wrong = self.training.wrong_batch(step) if jax.process_index() == 0 else None
                self.metrics.skipped(step, _of(metrics, at)[Key.LOSS_SCALE], wrong)
            if step % self.settings.log_every == 0 or step == self.settings.steps:
                share = (step - self._logged) / (span.stop - self._logged)  # the time since is of as many steps
                self.metrics.interval(step, _of(metrics, at), share)
                self._logged = step
            if step % COLLECT_EVERY == 0:
                gc.collect()
        self._report_commits()

    def _report_commits(self) -> None:
        """Reports a newly committed step to agent and metrics. Raises StorageError when a save failed."""
        step = self.store.committed()
        if step is not None and step != self._committed:
            self._committed = step
            self.metrics.committed(step)
            self.report.committed(step)

    # --- the ends -----------------------------------------------------------------------------------------------------

    def _leave_if_stopped(self, done: int, state: S) -> None:
        if self.stop.poll():
            self._leave(done, state)

    def _leave(self, done: int, state: S) -> NoReturn:
        """Saves the state if it is new, and raises Stopped. Every rank is at the same step."""
        self.report.phase("save", done)
        self._forget_if_lost(done)
        saved = max(self.saved, 0)
        is_new, note = done > saved, f"nothing new to save after step {saved}"
        # Where another's files are in the way of this step, the run can go on from an older one: no reason to fail.
        if is_new and (taken := self.store.taken(done)):
            is_new = False
            note = f"nothing new saved after step {saved}: {taken} in {self.training.folder} is another's"
        if is_new:
            note = f"saved step {done}"
            self._save(done, state)
        self._settle(done)
        self.report.stopped(done, is_new, note)
        self._end_tracking(stops=True)
        raise Stopped(f"stopped from outside: {note}")

    def _finish(self, state: S) -> S:
        """The state after the last step, once all that this run writes is written."""
        if self.patience is not None and self.patience.is_over:
            why = self.patience.sentence()
            self.training.note(f"stopped early at step {self.done} of {self.settings.steps}: {why}")
        self.profiler.finish(self.done)
        if self._forget_if_lost(self.done):
            self._save(self.done, state)
        self._settle(self.done)
        self.report.phase("done", self.done)
        self._end_tracking(stops=False)
        return state

    def _forget_if_lost(self, done: int) -> bool:
        """Whether the step `done` was saved and somebody deleted it since: it is to be saved anew."""
        if done != self.saved or not self.store.lost(done):
            return False
        self.training.note(
            f"step {done} is gone from {self.training.folder}, which somebody else deleted: saving it again"
        )
        self.saved = -1
        return True

    def _settle(self, done: int) -> None:
        """Waits until every save is committed or failed, and closes store and metrics."""
        self.report.phase("save", done)
        self.store.wait()
        self._report_commits()
        self.store.close()
        self.metrics.close()

    def _end_tracking(self, *, stops: bool) -> None:
        """Waits for the tracker, once the run has said how it ended: whatever happens here changes nothing of that.

        All ranks wait with rank 0, since JAX aborts those that come to its shutdown long before it.
        """
        if feeding.is_asked():
            self.metrics.end_tracking(stops=stops)
            meet("tracker", feeding.longest_s())

    def end_saves(self, *, releases: bool = False) -> None:
        """Ends the saves of a run that ends by an error, which is what it reports, whatever the store raises here.

        A run that has trained keeps the folder, for its next attempt, while the process ends. One whose process lives
        on `releases` it: else a thread would renew the claim of a run that is over.
        """
        if self.is_stepping:
            # A save that began before the error is valid, and the last of this attempt.
            with contextlib.suppress(Exception), self.report.within("save", self.done):
                self.store.wait()
                self._report_commits()
        if releases or not self.is_stepping:  # a run that is refused leaves the folder as it was
            with contextlib.suppress(Exception):
                self.store.close()


def _of(metrics: Mapping[str, jax.Array], at: int) -> dict[str, float]:
    """The metrics of one step of a dispatch."""
    return {name: float(np.atleast_1d(value)[at]) for name, value in jax.device_get(dict(metrics)).items()}
