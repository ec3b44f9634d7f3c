"""Assembles a run and drives THE loop, read from top to bottom.

The order within a step is fixed: evaluate, save, draw, step, read. A step's metrics are read after the next step was
dispatched, so the host never holds the device up; before a save or an evaluation they are read first, so that nothing
that is not finite is ever committed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import os
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from trainer import contract, dispatch, flops, mesh, preflight
from trainer.checkpoint.store import Store
from trainer.data import sources
from trainer.data.pipeline import Evaluation, Pipeline
from trainer.data.prefetch import Prefetcher
from trainer.data.source import Source
from trainer.data.trace import Trace
from trainer.distributed import Stop
from trainer.errors import NotFiniteError, SpecError, Stopped, TrainerError
from trainer.metrics import Metrics
from trainer.profiling.profiler import Profiler
from trainer.progress import Progress
from trainer.spec import GPT2, Decoder, TrainSpec
from trainer.step import Step, TrainState
from trainer.task import Task

Batch = dict[str, jax.Array]
COLLECT_EVERY = 1000  # steps between collections where neither an evaluation nor a save brings one
READY_S = 0.02  # a batch that is later than this is waited for in the phase `data`


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run lives: what the agent set in the environment."""

    run_dir: str | None = None
    uid: str = "local"
    socket: str | None = None
    profile: str | None = None
    take_over: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Place:
        return cls(
            run_dir=environ.get(contract.RUN_DIR),
            uid=environ.get(contract.UID) or f"local-{os.getpid()}",
            socket=environ.get(contract.METRICS),
            profile=environ.get(contract.PROFILE),
            take_over=environ.get(contract.TAKE_OVER) == "1",
        )

    def checkpoints(self, spec: TrainSpec) -> str:
        """The checkpoint folder. Raises SpecError when neither the spec nor a run folder says where."""
        if spec.checkpoint.path is not None:
            return spec.checkpoint.path
        if self.run_dir is None:
            raise SpecError("train.checkpoint.path is not given and there is no run folder to keep checkpoints in")
        return os.path.join(self.run_dir, "checkpoints")


class Run:
    """One attempt: what is decided before the first step, and the loop over the steps."""

    def __init__(self, spec: TrainSpec, task: Task, place: Place, stop: Stop, report: Progress) -> None:
        preflight.check_devices(spec)
        self.spec, self.place, self.stop, self.report = spec, place, stop, report
        self.folder = place.checkpoints(spec)
        preflight.check_folder(self.folder)
        train_set = task.source(spec, "train")
        eval_set = task.source(spec, "eval")
        if train_set is None:
            raise SpecError(f"{spec.task} has no training data")
        self.mesh = mesh.build(spec.mesh)
        rows = mesh.rows(self.mesh, spec.batch)
        self.pipeline = Pipeline(
            train_set,
            task.example,
            batch=spec.batch,
            rows=rows,
            seed=spec.seed,
            shuffle=spec.data.shuffle,
            prefetch=spec.data.prefetch,
            threads=spec.data.threads,
        )
        self.evaluation = None
        if eval_set is not None and len(eval_set) > 0:
            self.evaluation = Evaluation(
                eval_set,
                task.example,
                batch=spec.batch,
                rows=rows,
                batches=spec.eval.batches,
                threads=spec.data.threads,
            )
        self.total = spec.total_steps(len(train_set))
        preflight.check_profile(spec, self.total)
        self.step = Step(task, spec, self.mesh, self.total)
        if self.step.note is not None:
            self._note(self.step.note)
        self.store = Store(
            self.folder, keep=spec.checkpoint.keep, uid=place.uid, take_over=place.take_over, note=self._note
        )
        self.metrics = Metrics(
            rank=jax.process_index(),
            run_dir=place.run_dir,
            socket=place.socket,
            report=report,
            total_steps=self.total,
            examples_per_step=spec.batch,
            tokens_per_step=spec.batch * spec.model.length if isinstance(spec.model, Decoder | GPT2) else None,
            dataset_examples=len(train_set),
        )
        self.profiler = Profiler(
            spec.profile,
            rank=jax.process_index(),
            run_dir=place.run_dir,
            request=place.profile,
            report=report,
            settle=self._read,
            programs=self.step.programs,
        )
        self.conditions = conditions(spec, train_set)
        self.baselines = sources.baselines(spec, train_set, eval_set) if jax.process_index() == 0 else {}
        self.evaluated = -1  # the last step that was evaluated
        self.saved = -1  # the last step that was handed to the store
        self._committed: int | None = None
        self._pending: tuple[range, Batch] | None = None  # steps that were dispatched, and their metrics to be read
        self.done = 0  # steps that are complete, or nearly: the last is still to be read
        self.is_stepping = False  # whether this attempt has dispatched a step

    def run(self) -> None:
        """Trains to the last step. Raises Stopped, NotFiniteError and what else ends a run early."""
        start, state = self._restore()
        self._leave_if_told(start, state)
        flops_per_step = self._compile(start)
        self._leave_if_told(start, state)
        spans = self._spans(start)
        batches, trace = self.pipeline.iterate(spans, self.step.put), self._trace(start)
        timer = self.metrics.timer
        gc.freeze()
        gc.disable()  # a collection in one rank's step is a wait in everyone's: it runs beside evaluations and saves
        self.metrics.start(start, flops_per_step=flops_per_step, peak_flops=flops.peak(jax.devices()))
        for span in itertools.chain(spans, [range(self.total, self.total)]):
            self.done = done = span.start  # steps that are complete
            if self._is_due(self.spec.eval.every, done) and (done > self.evaluated or done == self.total):
                self._read()
                self._evaluate(done, state)
            if self._is_due(self.spec.checkpoint.every, done) and done > self.saved:
                self._read()
                self._save(done, state)
            if done == self.total:
                break
            if self.stop.poll():
                self._read()
                self._leave(done, state)
            self.profiler.between(done)
            with timer.part("data"):
                batch = self._draw(batches, done)
            self.report.phase("step", done)
            if trace is not None:
                for step in span:
                    trace.write(step, self.pipeline.ids(step))
            state, metrics = self.step.train(state, batch, len(span))
            self.is_stepping = True
            with timer.part("device"):
                self._read()
            self._pending = (span, metrics)
            timer.step_done(len(span))
        self._finish()

    # --- before the loop ----------------------------------------------------------------------------------------------

    def _restore(self) -> tuple[int, TrainState]:
        """The newest good checkpoint and its step, or a new state and 0."""
        self.report.phase("restore", 0)
        self.store.claim()
        found = self.store.restore(self.step.named(self.step.abstract))
        if found is None:
            self.report.phase("compile", 0)
            return 0, self.step.init()
        start, tree, meta = found
        preflight.check_resumed(meta, self.conditions, self.folder)
        if start > self.total:
            raise SpecError(
                f"{self.folder} holds step {start}, but train.steps is {self.total}; nothing can be resumed"
            )
        self.saved, self.evaluated = start, meta.get("evaluated", -1)
        self._note(f"resumed at step {start} of {self.total}")
        return start, self.step.unnamed(tree)

    def _compile(self, start: int) -> float | None:
        """Compiles every step ahead of time, for the very batches that will come; returns the FLOPs of a step."""
        self.report.phase("data", start)
        train_batch = self.step.put(self.pipeline.batch(start))
        self.report.phase("compile", start)
        self.step.compile_train(train_batch)
        if (count := self.spec.steps_per_dispatch) > 1:
            self.step.compile_train(self.step.put(self.pipeline.batch(start, count)), count)
        if self.evaluation is not None:
            with contextlib.closing(self.evaluation.iterate(self.step.put)) as batches:
                self.step.compile_eval(next(batches))
        return self.step.flops(train_batch)

    def _spans(self, start: int) -> dispatch.Spans:
        """The steps that are left, as they are sent to the device."""
        every = self.spec.eval.every, self.spec.checkpoint.every
        return dispatch.spans(start, self.total, self.spec.steps_per_dispatch, every)

    def _trace(self, start: int) -> Trace | None:
        if not self.spec.data.trace or self.place.run_dir is None:
            return None
        return Trace(self.place.run_dir, jax.process_index(), start, processes=jax.process_count())

    # --- in the loop --------------------------------------------------------------------------------------------------

    def _is_due(self, every: int | None, done: int) -> bool:
        return done == self.total or (every is not None and done > 0 and done % every == 0)

    def _draw(self, batches: Prefetcher[Batch], done: int) -> Batch:
        """The next batch; a wait for it is a phase of its own, so that a verdict can say who waits."""
        batch = batches.get(READY_S)
        while batch is None:  # in slices: a signal handler of Python's runs only between them
            self.report.phase("data", done)
            batch = batches.get(1.0)
        return batch

    def _read(self) -> None:
        """Waits for the steps dispatched last, if they were not read yet. Raises NotFiniteError, StorageError."""
        if self._pending is None:
            return
        (span, metrics), self._pending = self._pending, None
        is_finite_K = np.atleast_1d(metrics["finite"])
        is_skipped_K = np.atleast_1d(metrics["skipped"]) if "skipped" in metrics else np.zeros(len(span), bool)
        for at, step in enumerate(range(span.start + 1, span.stop + 1)):
            if not is_finite_K[at]:
                raise _not_finite(step, _of(metrics, at))
            if is_skipped_K[at]:
                self.metrics.skipped(step, _of(metrics, at)["loss_scale"])
            if step % self.spec.log_every == 0 or step == self.total:
                self.metrics.interval(step, _of(metrics, at))
            if step % COLLECT_EVERY == 0:
                gc.collect()
        self._hear_commits()

    def _evaluate(self, done: int, state: TrainState) -> None:
        """The means over the held-out set, each example counted once."""
        if self.evaluation is None:
            return
        self.report.phase("eval", done)
        sums: dict[str, tuple[float, float]] = {}
        with self.profiler.pause(), self.metrics.timer.part("eval"):
            for batch in self.evaluation.iterate(self.step.put):
                self._leave_if_told(done, state)
                for name, pair in jax.device_get(self.step.evaluate(state, batch)).items():
                    total, weight = sums.get(name, (0.0, 0.0))
                    sums[name] = (total + float(pair[0]), weight + float(pair[1]))
            gc.collect()
        self.evaluated = done
        examples = sums.pop("examples")[0]
        means = {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}
        self.metrics.evaluated(done, means | self.baselines | {"examples": examples})

    def _save(self, done: int, state: TrainState) -> None:
        """Hands the state to the store, which writes while the loop goes on."""
        self.report.phase("save", done)
        with self.profiler.pause(), self.metrics.timer.part("save"):
            began = time.perf_counter()
            self.store.save(done, self.step.named(state), self._meta())
            self.metrics.saved(done, time.perf_counter() - began)
            gc.collect()
        self.saved = done

    def _meta(self) -> dict[str, Any]:
        """What lies beside the state: what a resume must not change, and what a reader must know."""
        model = self.spec.model.model_dump(mode="json")
        return self.conditions | {"evaluated": self.evaluated, "model": model}

    def _hear_commits(self) -> None:
        """Tells everyone of a step that came to rest on storage. Raises StorageError of the writing behind the loop."""
        step = self.store.committed()
        if step is not None and step != self._committed:
            self._committed = step
            self.metrics.committed(step)
            self.report.committed(step)

    # --- the ends -----------------------------------------------------------------------------------------------------

    def _leave_if_told(self, done: int, state: TrainState) -> None:
        if self.stop.poll():
            self._leave(done, state)

    def _leave(self, done: int, state: TrainState) -> NoReturn:
        """Saves what is new and raises Stopped. Every rank is at the same step."""
        self.report.phase("save", done)
        is_new = done > max(self.saved, 0)
        if is_new:
            self._save(done, state)
        self._settle(done)
        note = f"saved step {done}" if is_new else f"nothing new to save after step {max(self.saved, 0)}"
        self.report.stopped(done, is_new, note)
        raise Stopped(f"stopped from outside: {note}")

    def let_go(self) -> None:
        """Waits for a save that was begun before an error: it is sound, and the last that this attempt makes."""
        self.report.phase("save", self.done)
        with contextlib.suppress(TrainerError):  # what the run ends by is the first error
            self.store.wait()
            self._hear_commits()
        self.report.phase("step", self.done)  # where it went wrong

    def _finish(self) -> None:
        self.profiler.finish(self.total)
        self._settle(self.total)
        self.report.phase("done", self.total)

    def _settle(self, done: int) -> None:
        """Waits until every save is committed or failed, and gives everything back."""
        self.report.phase("save", done)
        self.store.wait()
        self._hear_commits()
        self.store.close()
        self.metrics.close()

    def _note(self, text: str) -> None:
        """What a reader of the output and of the summary should know."""
        if jax.process_index() == 0:
            print(text, flush=True)
            self.report.note(text)


def _of(metrics: Batch, at: int) -> dict[str, float]:
    """The metrics of one step of a dispatch."""
    return {name: float(np.atleast_1d(value)[at]) for name, value in jax.device_get(metrics).items()}


def _not_finite(step: int, metrics: Mapping[str, float]) -> NotFiniteError:
    return NotFiniteError(
        f"step {step}: loss {metrics['loss']:.6g} with gradient norm {metrics['grad_norm']:.6g}; the update was not "
        f"applied, and nothing after step {step - 1} is saved. Try a lower train.optimizer.lr, a longer warmup or "
        "train.optimizer.clip"
    )


def conditions(spec: TrainSpec, train_set: Source) -> dict[str, Any]:
    """What must not change under a run that resumes: what the steps' examples are made of."""
    order = {"train.batch": spec.batch, "train.seed": spec.seed, "train.data.shuffle": spec.data.shuffle}
    return {"data": train_set.fingerprint()} | order
