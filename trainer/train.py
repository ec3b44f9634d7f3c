"""Assembles a run and drives the training loop, to be read from top to bottom.

The order within a step is fixed: evaluate, save, draw, step, read. A step's metrics are read after the next step was
dispatched, so the host never holds up the device; before a save or an evaluation they are read first, so that nothing
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
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxlaunch import contract
from jaxlaunch.contract import Key
from jaxlaunch.trainer import preflight, user_code
from jaxlaunch.trainer.checkpoint import saved_tokenizer
from jaxlaunch.trainer.checkpoint.attempt import Attempt
from jaxlaunch.trainer.checkpoint.consensus import check_alike, on_primary
from jaxlaunch.trainer.checkpoint.reader import BEST
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.data.example_log import Trace
from jaxlaunch.trainer.data.examples import Check
from jaxlaunch.trainer.data.pipeline import Evaluation, Pipeline
from jaxlaunch.trainer.data.prefetch import Prefetcher
from jaxlaunch.trainer.data.source import Ordered, Source
from jaxlaunch.trainer.data.sources.open import baselines, tokenizer_files
from jaxlaunch.trainer.distributed import Stop
from jaxlaunch.trainer.errors import NotFiniteError, SpecError
from jaxlaunch.trainer.generate.samples import Samples
from jaxlaunch.trainer.metrics.means import Means
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import FLAGS, Metrics
from jaxlaunch.trainer.metrics.watch import BestSteps, Patience, value_of
from jaxlaunch.trainer.numerics import flops
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.profiling.profiler import Profiler
from jaxlaunch.trainer.spec import GPT2, LM, Decoder, TrainSpec, task_name
from jaxlaunch.trainer.step import dispatch, resume
from jaxlaunch.trainer.step.train_step import Step, TrainState
from jaxlaunch.trainer.task import Split, Task, checked_source

Batch = dict[str, jax.Array]
SPLITS: tuple[Split, Split] = ("train", "eval")
COLLECT_EVERY = 1000  # steps between collections where neither an evaluation nor a save brings one
READY_S = 0.02  # the wait for a batch that is later than this is reported as the phase `data`


@dataclasses.dataclass(frozen=True)
class Place:
    """The places of a run that the agent sets in the environment: folder, socket, and request file for profiles."""

    run_dir: str | None = None
    uid: str = "local"
    socket: str | None = None
    profile: str | None = None
    take_over: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Place:
        """The place that the environment variables of the contract describe."""
        return cls(
            run_dir=environ.get(contract.RUN_DIR),
            uid=environ.get(contract.UID) or f"local-{os.getpid()}",
            socket=environ.get(contract.METRICS),
            profile=environ.get(contract.PROFILE),
            take_over=environ.get(contract.TAKE_OVER) == "1",
        )

    def checkpoints(self, spec: TrainSpec) -> str:
        """Path or URL of the checkpoint folder. Raises SpecError when the spec has none and there is no run folder."""
        if spec.checkpoint.path is not None:
            return spec.checkpoint.path
        if self.run_dir is None:
            raise SpecError("train.checkpoint.path is not given and there is no run folder to keep checkpoints in")
        return os.path.join(self.run_dir, "checkpoints")


class Run(Attempt[TrainState]):
    """One attempt at a run: set up and checked before the first step, then the loop over the steps."""

    def __init__(self, spec: TrainSpec, task: Task, place: Place, stop: Stop, report: Progress) -> None:
        super().__init__(stop, report)
        preflight.check_mesh(spec)
        self.spec, self.place = spec, place
        self.folder = place.checkpoints(spec)
        preflight.check_folder(self.folder)
        preflight.check_cache(spec)
        opened = {split: task.source(spec, split) for split in SPLITS}
        with user_code.placed(type(task).source):
            train_set, eval_set = (checked_source(spec, opened[split]) for split in SPLITS)
        if train_set is None:
            raise SpecError(f"{spec.task} has no training data")
        check_alike(_fingerprints(train=train_set, eval=eval_set))
        self.mesh = mesh.build(spec.mesh, note=self._note)
        rows = mesh.rows(self.mesh, spec.batch)
        self.pipeline = self._pipeline(task, train_set, rows)
        self.evaluation = self._evaluation(task, eval_set, rows)
        if self.evaluation is None:
            preflight.check_watched(spec, None)
        self.best = None if spec.checkpoint.best is None else BestSteps(spec.checkpoint.best)
        self.patience = None if spec.stop_early is None else Patience(spec.stop_early)
        self.total = spec.total_steps(len(train_set))
        preflight.check_profile(spec, self.total)
        self.step = Step(task, spec, self.mesh, self.total)
        self.step.check(self.pipeline.like())
        for note in (*self.step.notes, self.pipeline.note if spec.data.threads > 1 else None):
            if note is not None:
                self._note(note)
        self.samples = None if spec.eval.samples is None else Samples(spec, spec.eval.samples, self.mesh)
        self.store = Store(
            self.folder, keep=spec.checkpoint.keep, uid=place.uid, take_over=place.take_over, note=self._note
        )
        self.metrics = self._metrics(train_set)
        self.profiler = self._profiler()
        self.conditions = conditions(spec, train_set)
        self.record = resume.record(spec, self.step.attention, self.total, eval_set)
        self.baselines = baselines(spec, train_set, eval_set) if jax.process_index() == 0 else {}
        self.derived = getattr(task, "derived", None)  # metrics that follow from the means of an evaluation
        self.evaluated = -1  # the last step that was evaluated
        self._pending: tuple[range, Batch] | None = None  # steps that were dispatched, and their metrics to be read
        self._logged = 0  # the last step whose time is in the metrics
        self.done = 0  # steps that were dispatched; the metrics of the last may still be unread
        self.is_stepping = False  # whether this attempt has dispatched a step

    def run(self) -> None:
        """Trains to the last step. Raises a TrainerError, such as Stopped or NotFiniteError, when it ends early."""
        start, state = self._restore()
        self._leave_if_stopped(start, state)
        if self._is_over():
            return self._finish()
        flops_per_step = self._compile(start)
        self._leave_if_stopped(start, state)
        spans = self._spans(start)
        batches, trace = self.pipeline.iterate(spans, self.step.put), self._trace(start)
        timer = self.metrics.timer
        gc.collect()  # garbage that is frozen would stay
        gc.freeze()
        gc.disable()  # a collection in one rank's step delays every rank: it runs beside evaluations and saves
        self._logged = start
        self.metrics.start(start, flops_per_step=flops_per_step, peak_flops=flops.peak(jax.devices()))
        for span in itertools.chain(spans, [range(self.total, self.total)]):
            self.done = done = span.start  # steps that are complete
            if self._is_due(self.spec.eval.every, done) and (done > self.evaluated or done == self.total):
                self._read()
                self._evaluate(done, state)
                self._sample(done, state)
            if self._is_saved_at(done) and done > self.saved:
                self._read()
                self._save(done, state)
            if done == self.total or self._is_over():
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

    def _pipeline(self, task: Task, train_set: Source, rows: range) -> Pipeline:
        """The batches of the training set, this process's `rows` of each."""
        data = self.spec.data
        return Pipeline(
            train_set,
            task.example,
            batch=self.spec.batch,
            rows=rows,
            seed=self.spec.seed,
            shuffle=data.shuffle,
            prefetch=data.prefetch,
            threads=data.threads,
            deterministic=data.deterministic,
            check=batch_check(task, self.spec),
        )

    def _evaluation(self, task: Task, eval_set: Source | None, rows: range) -> Evaluation | None:
        """The batches of the held-out set; None where there is none."""
        if eval_set is None or len(eval_set) == 0:
            return None
        return Evaluation(
            eval_set,
            task.example,
            batch=self.spec.batch,
            rows=rows,
            batches=self.spec.eval.batches,
            threads=self.spec.data.threads,
            seed=self.spec.seed,
            deterministic=self.spec.data.deterministic,
            check=batch_check(task, self.spec),
        )

    def _metrics(self, train_set: Source) -> Metrics:
        batch, tokens, has_targets = self.spec.batch, None, True
        if isinstance(self.spec.model, Decoder | GPT2) or self.spec.task == LM:
            if (form := self.pipeline.forms.get("tokens")) is not None and form.shape:
                tokens = batch * math.prod(form.shape[:-1]) * (form.shape[-1] - 1)
                has_targets = len(form.shape) == 1  # of several rows an example the loss is no sum over targets
        return Metrics(
            rank=jax.process_index(),
            run_dir=self.place.run_dir,
            socket=self.place.socket,
            report=self.report,
            total_steps=self.total,
            examples_per_step=batch,
            tokens_per_step=tokens,
            has_targets=has_targets,
            dataset_examples=len(train_set),
            epochs=train_set.epochs if isinstance(train_set, Ordered) else None,
        )

    def _profiler(self) -> Profiler:
        return Profiler(
            self.spec.profile,
            rank=jax.process_index(),
            run_dir=self.place.run_dir,
            request=self.place.profile,
            report=self.report,
            settle=self._read,
            programs=self.step.programs,
        )

    def _restore(self) -> tuple[int, TrainState]:
        """The step and state of the newest usable checkpoint; 0 and a new state without one."""
        self.report.phase("restore", 0)
        self.store.claim()
        found = self.store.restore(
            self.step.named(self.step.abstract), lambda meta: preflight.changes(self._completed(meta), self._meta())
        )
        first = 0 if found is None else found[0] + 1
        self.store.check_free(lambda step: step >= first and self._is_due(self.spec.checkpoint.every, step))
        if found is None:
            self._carry()
            self.report.phase("compile", 0)
            return 0, self.step.init()
        start, tree, meta = found
        self.done = start
        self._resume_watching(meta)
        preflight.check_resumed(meta, self.conditions, self.folder)
        preflight.check_length(self.spec, self.total, start, self.folder)
        self.saved, self.evaluated = start, meta.get("evaluated", -1)
        self._committed = start  # by an earlier attempt: no progress of this one
        self.report.restored(start)
        self._note(f"resumed at step {start} of {self.total}")
        trained = self._completed(meta)
        if start == self.total or self._is_over():
            preflight.check_finished(self.spec, resume.retrained(trained, self.record), start)
            self._note(f"nothing to do: the run finished at step {start}")
        if (changed := resume.changes(trained, self.record, start)) is not None:
            self._note(changed)
        with self.step.checks_base(meta.get("base"), f"step {start} of {self.folder}"):
            state = self.step.unnamed(tree)
        self._carry()
        return start, state

    def _carry(self) -> None:
        """Puts the tokenizer's files beside the checkpoints, once this run is not refused."""
        if files := tokenizer_files(self.spec.data):
            on_primary(partial(saved_tokenizer.keep, self.folder, files))

    def _compile(self, start: int) -> float | None:
        """Compiles every step ahead of time, for batches like the first; returns the FLOPs of a train step."""
        self.report.phase("data", start)
        train_batch = self.step.put(self.pipeline.batch(start))
        held_out = None
        if self.evaluation is not None:
            with contextlib.closing(self.evaluation.iterate(self.step.put)) as batches:
                held_out = next(batches)
            if self.best is not None or self.patience is not None:
                given = set(self.step.evaluates(held_out)) - {Key.EXAMPLES}
                parts = {part for part in self.evaluation.parts if part is not None}
                preflight.check_watched(self.spec, given | {f"{name}/{part}" for name in given for part in parts})
        self.report.phase("compile", start)
        self.step.compile_train(train_batch)
        if (count := self.spec.steps_per_dispatch) > 1:
            self.step.compile_train(self.step.put(self.pipeline.batch(start, count)), count)
        if held_out is not None:
            self.step.compile_eval(held_out)
        return self.step.flops(train_batch)

    def _spans(self, start: int) -> dispatch.Spans:
        """The remaining steps, cut into dispatches."""
        every = self.spec.eval.every, self.spec.checkpoint.every
        return dispatch.spans(start, self.total, self.spec.steps_per_dispatch, every)

    def _trace(self, start: int) -> Trace | None:
        if not self.spec.data.trace or self.place.run_dir is None:
            return None
        return Trace(self.place.run_dir, jax.process_index(), start, processes=jax.process_count())

    # --- in the loop --------------------------------------------------------------------------------------------------

    def _is_due(self, every: int | None, done: int) -> bool:
        return done == self.total or (every is not None and done > 0 and done % every == 0)

    def _is_saved_at(self, done: int) -> bool:
        """Whether the state of this step is to be saved: as often as the job says, the best, and the last."""
        is_best = self.best is not None and done in self.best.steps
        return self._is_due(self.spec.checkpoint.every, done) or is_best or self._is_over()

    def _is_over(self) -> bool:
        """Whether the run gets no better, on every rank alike."""
        return self.patience is not None and self.patience.is_over

    def _watch(self, done: int, means: Mapping[str, float]) -> None:
        """Judges an evaluation by what process 0 has of it, so that no rank decides otherwise."""
        for watch, watched in ((self.best, self.spec.checkpoint.best), (self.patience, self.spec.stop_early)):
            if watch is not None and watched is not None:
                watch.see(done, on_primary(partial(value_of, watched, means)))

    def _resume_watching(self, meta: Mapping[str, Any]) -> None:
        if self.best is not None:
            self.best.resume(meta.get(BEST), on_primary(self.store.steps))
        if self.patience is not None:
            self.patience.resume(meta.get("stop_early"))

    def _draw(self, batches: Prefetcher[Batch], done: int) -> Batch:
        """The next batch; the wait for it is a phase of its own, so that a verdict can name the rank that waits."""
        batch = batches.get(READY_S)
        while batch is None:  # in slices: a signal handler of Python's runs only between them
            self.report.phase("data", done)
            batch = batches.get(1.0)
        return batch

    def _read(self) -> None:
        """Waits for the steps dispatched last and records their metrics. Raises NotFiniteError, StorageError."""
        if self._pending is None:
            return
        (span, metrics), self._pending = self._pending, None
        said = jax.device_get({name: metrics[name] for name in FLAGS if name in metrics})
        is_finite_K, weight_K = np.atleast_1d(said[Key.FINITE]), np.atleast_1d(said[Key.WEIGHT])
        is_skipped_K = np.atleast_1d(said.get(Key.SKIPPED, np.zeros(len(span), bool)))
        for at, step in enumerate(range(span.start + 1, span.stop + 1)):
            if not is_finite_K[at]:
                raise _not_finite(step, _of(metrics, at))
            self.metrics.trained(step, float(weight_K[at]))
            if is_skipped_K[at]:
                self.metrics.skipped(step, _of(metrics, at)[Key.LOSS_SCALE])
            if step % self.spec.log_every == 0 or step == self.total:
                share = (step - self._logged) / (span.stop - self._logged)  # the time since is of as many steps
                self.metrics.interval(step, _of(metrics, at), share)
                self._logged = step
            if step % COLLECT_EVERY == 0:
                gc.collect()
        self._report_commits()

    def _evaluate(self, done: int, state: TrainState) -> None:
        """Records the means over the held-out set, each example counted once."""
        if self.evaluation is None:
            return
        self.report.phase("eval", done)
        means = Means(self.derived)
        with self.profiler.pause(), self.metrics.timer.part("eval"):
            for part, batch in zip(self.evaluation.parts, self.evaluation.iterate(self.step.put), strict=True):
                self._leave_if_stopped(done, state)
                means.add(part, jax.device_get(self.step.evaluate(state, batch)))
            gc.collect()
        self.evaluated = done
        found = means.all()
        self.metrics.evaluated(done, found | self.baselines)
        self._watch(done, found)

    def _sample(self, done: int, state: TrainState) -> None:
        """Records what the model goes on with after the prompts of the job."""
        if self.samples is None:
            return
        self.report.phase("eval", done)
        with self.profiler.pause(), self.metrics.timer.part("eval"):
            self.metrics.sampled(done, self.samples.taken(self.step.evaluated(state)))

    def _save(self, done: int, state: TrainState) -> None:
        """Starts a save of the state, which the store writes while the loop goes on."""
        self.report.phase("save", done)
        with self.profiler.pause(), self.metrics.timer.part("save"):
            began = time.perf_counter()
            besides = [] if self.best is None else self.best.steps
            self.store.save(done, self.step.named(state), self._meta(), besides)
            self.metrics.saved(done, time.perf_counter() - began)
            gc.collect()
        self.saved = done

    def _meta(self) -> dict[str, Any]:
        """The meta saved beside the state: what must not change when a run resumes, what may and is then said, and what
        gives the state its arrays."""
        arrays = self.spec.model_dump(mode="json", include={"model", "optimizer", "precision", "lora"})
        watched = {} if self.best is None else {BEST: self.best.to_meta()}
        watched |= {} if self.patience is None else {"stop_early": self.patience.to_meta()}
        arrays |= {} if self.step.base is None else {"base": self.step.base}
        return self.conditions | self.record | {"evaluated": self.evaluated} | arrays | watched

    def _completed(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """The meta of a checkpoint, with the defaults of keys that its version had not."""
        now, blocks = self._meta(), {"train": self.spec, "model": self.spec.model, "optimizer": self.spec.optimizer}
        filled = {key: resume.completed(meta[key], now[key], block) for key, block in blocks.items() if key in meta}
        if "train" in filled:  # version 0.1 named the built-in tasks by their paths
            filled["train"] = {**filled["train"], "task": task_name(filled["train"].get("task"))}
        return {**meta, **filled}

    # --- the ends -----------------------------------------------------------------------------------------------------

    def wait_for_saves(self) -> None:
        """Waits for a save that began before an error: it is valid, and the last of this attempt."""
        self.report.phase("save", self.done)
        super().wait_for_saves()
        self.report.phase("step", self.done)  # the phase of the error

    def _finish(self) -> None:
        if self.patience is not None and self.patience.is_over:
            self._note(f"stopped early at step {self.done} of {self.total}: {self.patience.sentence()}")
        self.profiler.finish(self.done)
        self._settle(self.done)
        self.report.phase("done", self.done)


def _fingerprints(**sets: Source | None) -> dict[str, str]:
    """The identity of each set; a user's own source may tell of itself what differs between hosts."""
    ours = {name: each for name, each in sets.items() if type(each).__module__.startswith("jaxlaunch.trainer.")}
    return {name: each.fingerprint() for name, each in ours.items() if each is not None}


def batch_check(task: Task, spec: TrainSpec) -> Check | None:
    """How `task` judges the batches of a run; None where it does not."""
    judge = getattr(task, "check_batch", None)
    return None if judge is None else partial(judge, spec)


def _of(metrics: Batch, at: int) -> dict[str, float]:
    """The metrics of one step of a dispatch."""
    return {name: float(np.atleast_1d(value)[at]) for name, value in jax.device_get(metrics).items()}


def _not_finite(step: int, metrics: Mapping[str, float]) -> NotFiniteError:
    loss, norm = metrics[Key.LOSS], metrics[Key.GRAD_NORM]
    return NotFiniteError(
        f"step {step}: loss {loss:.6g} with gradient norm {norm:.6g}; the update was not applied, and nothing after "
        f"step {step - 1} is saved. Try a lower train.optimizer.lr, a longer warmup or train.optimizer.clip"
    )


def conditions(spec: TrainSpec, train_set: Source) -> dict[str, Any]:
    """What must not change when a run resumes, because it determines the examples of each step."""
    order = {"train.batch": spec.batch, "train.seed": spec.seed, "train.data.shuffle": spec.data.shuffle}
    return {"data": train_set.fingerprint()} | order
