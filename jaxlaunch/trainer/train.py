"""The built-in training: what the `train` block of a job and its task bring to the loop (trainer/loop/driver)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxlaunch import contract
from jaxlaunch.contract import Key
from jaxlaunch.runs import atomic_file
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.checkpoint import saved_files, writable
from jaxlaunch.trainer.checkpoint.consensus import check_alike, on_primary
from jaxlaunch.trainer.data.example_log import Trace
from jaxlaunch.trainer.data.pipeline import Evaluation, Pipeline
from jaxlaunch.trainer.data.prefetch import Prefetcher
from jaxlaunch.trainer.data.source import Ordered, Source
from jaxlaunch.trainer.errors import NotFiniteError, SpecError
from jaxlaunch.trainer.generate.samples import Samples
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.place import Place
from jaxlaunch.trainer.loop.training import Settings, Training
from jaxlaunch.trainer.metrics.means import Means
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import Metrics
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.sources.open import baselines, tokenizer_files
from jaxlaunch.trainer.spec import AUTO, TrainSpec
from jaxlaunch.trainer.start import compile_cache, preflight
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.step import resume
from jaxlaunch.trainer.step.pictures import Pictures
from jaxlaunch.trainer.step.train_state import TrainState
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.step.update import reads_tokens
from jaxlaunch.trainer.task import Split, Task, checked_source
from jaxlaunch.trainer.tasks.classify import Classify

Batch = dict[str, jax.Array]
Like = Mapping[str, Any]  # a global batch, or its shapes and dtypes alone
SPLITS: tuple[Split, Split] = ("train", "eval")


def loop_of(spec: TrainSpec, task: Task, place: Place, stop: Stop, report: Progress) -> Loop[TrainState]:
    """The loop that trains as `spec` says, checked and ready to run. Raises a TrainerError for what cannot be."""
    return Loop(BuiltInTraining(spec, task, place, report), place, stop, report)


class BuiltInTraining(Training[TrainState]):
    """A task's model and data, trained as the spec says."""

    repeats_last_evaluation = True

    def __init__(self, spec: TrainSpec, task: Task, place: Place, report: Progress) -> None:
        super().__init__(report)
        # The cheapest checks come first: a wrong key is said before data are opened, and both before a model is built.
        preflight.check_mesh(spec)
        self.spec, self.place = spec, place
        self.folder = place.checkpoints(spec)
        writable.check(self.folder)
        preflight.check_cache(spec)
        if spec.compile_cache == AUTO:
            compile_cache.install(place.run_folder, self.note)
        opened = {split: task.source(spec, split) for split in SPLITS}
        with user_code.placed(type(task).source):
            train_set, eval_set = (checked_source(spec, opened[split]) for split in SPLITS)
        if train_set is None:
            raise SpecError(f"{spec.task} has no training data")
        check_alike(_fingerprints(train=train_set, eval=eval_set))  # hosts that read different files would not notice
        self.mesh = mesh.build(spec.mesh, note=self.note)
        rows = mesh.rows(self.mesh, spec.batch)  # of each batch this process reads its own rows
        self.pipeline = self._pipeline(task, train_set, rows)
        self.evaluation = self._evaluation(task, eval_set, rows)
        if self.evaluation is None:
            preflight.check_watched(spec, None)
        self.total = spec.total_steps(len(train_set))
        preflight.check_profile(spec, self.total)
        self.step = Step(task, spec, self.mesh, self.total)
        self.step.check(self.pipeline.like())
        for note in (*self.step.notes, self.pipeline.note if spec.data.threads > 1 else None):
            if note is not None:
                self.note(note)
        self.samples = None if spec.eval.samples is None else Samples(spec, spec.eval.samples, self.mesh)
        self.pictures = Pictures.of(spec, task, self.step)
        self.evaluates = any(each is not None for each in (self.evaluation, self.samples, self.pictures))
        self.settings = self._settings()
        self.metrics = self._metrics(train_set)
        self.conditions = conditions(spec, train_set)
        self.record = resume.record(spec, self.step.attention, self.total, eval_set)
        self.baselines = baselines(spec, train_set, eval_set) if jax.process_index() == 0 else {}
        self.task = task
        self.inputs = task.describe_inputs(spec) if isinstance(task, Classify) else None
        self.classify = task if isinstance(task, Classify) and task.tells_classes(spec) else None
        self.trace: Trace | None = None  # of the examples that each step sees, where the job asks for it
        self._ahead: Future[float | None] | None = None  # the FLOPs of a step, once the steps are compiled

    def _settings(self) -> Settings:
        spec = self.spec
        return Settings(
            steps=self.total,
            log_every=spec.log_every,
            eval_every=spec.eval.every,
            save_every=spec.checkpoint.every,
            keep=spec.checkpoint.keep,
            steps_per_dispatch=spec.steps_per_dispatch,
            best=spec.checkpoint.best,
            stop_early=spec.stop_early,
            profile=spec.profile,
        )

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
            check=partial(task.check_batch, self.spec),
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
            check=partial(task.check_batch, self.spec),
        )

    def _metrics(self, train_set: Source) -> Metrics:
        has_tokens = reads_tokens(self.spec, self.pipeline.like())
        is_row = has_tokens and len(self.pipeline.forms["tokens"].shape) == 1  # else the loss is no sum over targets
        return Metrics(
            rank=jax.process_index(),
            run_dir=self.place.run_dir,
            socket=self.place.socket,
            report=self.report,
            total_steps=self.total,
            examples_per_step=self.spec.batch,
            has_tokens=has_tokens,
            has_targets=is_row,
            dataset_examples=len(train_set),
            epochs=train_set.epochs if isinstance(train_set, Ordered) else None,
        )

    # --- the state ----------------------------------------------------------------------------------------------------

    @property
    def abstract(self) -> TrainState:
        """Parameters, the optimizer's state and what else is trained, abstract."""
        return self.step.abstract

    def init(self) -> TrainState:
        """The state before the first step: new parameters, or those of train.model.init_from."""
        self._carry()
        return self.step.init()

    def to_tree(self, state: TrainState) -> dict[str, Any]:
        """The arrays by part and name. Of a model with adapters the base is left out: it never changes."""
        return self.step.builder.to_tree(state)

    def from_tree(self, tree: Mapping[str, Any], meta: Mapping[str, Any], step: int) -> TrainState:
        """The state of a checkpoint. The base of adapters is read again, and must be the one they were trained on."""
        with self.step.builder.checks_base(meta.get("base"), f"step {step} of {self.folder}"):
            state = self.step.builder.from_tree(tree)
        self._carry()
        return state

    def _carry(self) -> None:
        """Puts what a use of the model needs beside the checkpoints, once this run is not refused."""
        on_primary(partial(saved_files.save_inputs, self.folder, self.inputs))
        if files := tokenizer_files(self.spec.data):
            on_primary(partial(saved_files.save_tokenizer, self.folder, files))

    def meta(self) -> dict[str, Any]:
        """What must not change when a run resumes, what may and is then said, and what gives the state its arrays."""
        arrays = self.spec.model_dump(mode="json", include={"model", "optimizer", "precision", "lora"})
        arrays |= {} if self.step.builder.base is None else {"base": self.step.builder.base}
        return self.conditions | self.record | arrays

    def difference(self, meta: Mapping[str, Any]) -> str:
        """The keys of the job that give the state other arrays than the checkpoint has."""
        return preflight.changes(self._completed(meta), self.meta())

    def check_resumed(self, meta: Mapping[str, Any], step: int, is_finished: bool) -> str | None:
        """What is otherwise than in the job that saved `step`. Raises where examples would repeat, or none are left."""
        preflight.check_resumed(meta, self.conditions, self.folder)
        preflight.check_length(self.spec, self.total, step, self.folder)
        trained = self._completed(meta)
        if is_finished:  # what it was trained with cannot be changed any more
            preflight.check_finished(self.spec, resume.retrained(trained, self.record), step)
        return resume.changes(trained, self.record, step)

    def _completed(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """The meta of a checkpoint, with the defaults of keys that its version had not."""
        now, blocks = self.meta(), {"train": self.spec, "model": self.spec.model, "optimizer": self.spec.optimizer}
        filled = {key: resume.completed(meta[key], now[key], block) for key, block in blocks.items() if key in meta}
        return {**meta, **filled}

    # --- the steps ----------------------------------------------------------------------------------------------------

    def compile_ahead(self) -> None:
        """Compiles the steps in a thread of their own, unless a user's code is in them, which may expect the main one.

        What fails there is tried again by `compile`, which says how it fails.
        """
        if self.step.builder.is_ours:
            train = {count: self.pipeline.like(count) for count in self._dispatched}
            held_out = None if self.evaluation is None else self.evaluation.like()
            self._ahead = ThreadPoolExecutor(1, "compile").submit(self._compile, train, held_out)

    def compile(self, start: int) -> float | None:
        """Compiles every step ahead of time, for batches like the first; returns the FLOPs of a train step."""
        self.report.phase("data", start)
        train = {count: self.step.put(self.pipeline.batch(start, count)) for count in self._dispatched}
        held_out = None
        if self.evaluation is not None:
            with contextlib.closing(self.evaluation.iterate(self.step.put)) as batches:
                held_out = next(batches)
            if self.spec.checkpoint.best is not None or self.spec.stop_early is not None:
                given = set(self.step.evaluated_metrics(held_out)) - {Key.EXAMPLES}
                parts = {part for part in self.evaluation.parts if part is not None}
                preflight.check_watched(self.spec, given | {f"{name}/{part}" for name in given for part in parts})
        self.report.phase("compile", start)
        if self._ahead is None or self._ahead.exception() is not None:  # once the thread has ended
            flops = self._compile(train, held_out)
        else:
            flops = self._ahead.result()
        if self.pictures is not None:
            self.pictures.compile()
        return flops

    @property
    def _dispatched(self) -> set[int]:
        """How many steps one dispatch has: one before a pause, and as many as the job says."""
        return {1, self.spec.steps_per_dispatch}

    def _compile(self, train: Mapping[int, Like], held_out: Like | None) -> float | None:
        """Compiles the steps for batches like these, of `train` by the steps of a dispatch; returns a step's FLOPs."""
        for count, batch in sorted(train.items()):
            self.step.compile_train(batch, count)
        if held_out is not None:
            self.step.compile_eval(held_out, None if self.classify is None else self.classify.seen)
        return self.step.flops(train[1])

    def iterate(self, spans: Sequence[range]) -> Prefetcher[Batch]:
        """The batches of these steps, on the devices."""
        if self.spec.data.trace and self.place.run_dir is not None:
            start = spans[0].start if spans else self.total
            self.trace = Trace(self.place.run_dir, jax.process_index(), start, processes=jax.process_count())
        return self.pipeline.iterate(spans, self.step.put)

    def train(self, state: TrainState, batch: Batch, span: range) -> tuple[TrainState, Batch]:
        """Dispatches the steps, whose examples are written down first where the job asks for it."""
        if self.trace is not None:
            for step in span:
                self.trace.write(step, self.pipeline.ids(step))
        return self.step.train(state, batch, len(span))

    def not_finite(self, step: int, metrics: Mapping[str, float], saved: int) -> NotFiniteError:
        """What the loss was, and what may help. The compiled step has kept the state as it was before."""
        loss, norm, wrong = metrics[Key.LOSS], metrics[Key.GRAD_NORM], self.wrong_batch(step)
        move = "Try a lower train.optimizer.lr, a longer warmup or train.optimizer.clip"
        if wrong is not None:
            move = f"Its batch is not finite: {wrong}. Fix that example, or leave it out"
        return NotFiniteError(
            f"step {step}: loss {loss:.6g} with gradient norm {norm:.6g}; the update was not applied, and nothing "
            f"after step {step - 1} is saved. {move}"
        )

    def _wrong_batch(self, number: int) -> str | None:
        return self.pipeline.not_finite(number)

    def programs(self) -> list[str]:
        """The HLO texts of the compiled steps."""
        return self.step.programs()

    # --- the evaluations ----------------------------------------------------------------------------------------------

    def evaluate(self, state: TrainState, between: Callable[[], None]) -> dict[str, float]:
        """The means over the held-out set, each example counted once, beside those of simpler models."""
        if self.evaluation is None:
            return {}
        means, told = Means(self.task.derived), None
        if self.classify is not None and self.place.run_dir is not None and jax.process_index() == 0:
            told = self.classify.classification()
        batches = zip(self.evaluation.parts, self.evaluation.iterate(self.step.put), strict=True)
        for number, (part, batch) in enumerate(batches):
            between()
            sums, found = self.step.evaluate_and(state, batch)
            means.add(part, jax.device_get(sums))
            if told is not None:
                seen, weight_B = jax.device_get(found)
                told.add(seen, weight_B, self.evaluation.indexes(number))
        if told is not None:
            self._tell(told, int(state.step))
        return means.all() | self.baselines

    def _tell(self, told: Any, step: int) -> None:
        """Keeps in the run folder what this evaluation knows of the classes, for the page of the run."""
        assert self.evaluation is not None and self.place.run_dir is not None, "it was evaluated"
        names = (self.inputs or {}).get("classes", ())
        record = told.record(names, getattr(self.evaluation.source, "where", None))
        about = {"step": step, "ema": self.spec.optimizer.ema is not None}
        path = Path(self.place.run_dir) / contract.CLASSIFICATION
        try:
            with atomic_file.draft(path) as draft:
                draft.write_text(json.dumps(about | record))
        except OSError as error:
            self.note(f"{path} cannot be written: {error.strerror or error}")

    def sample(self, state: TrainState) -> Sequence[Mapping[str, Any]]:
        """A sample of each prompt of train.eval.samples; what the task shows is reported."""
        if self.pictures is not None:
            self.pictures.report(state)
        return () if self.samples is None else self.samples.taken(state.evaluated_params())


def _fingerprints(**sets: Source | None) -> dict[str, str]:
    """The identity of each set; a user's own source may tell of itself what differs between hosts."""
    ours = {name: each for name, each in sets.items() if type(each).__module__.startswith("jaxlaunch.trainer.")}
    return {name: each.fingerprint() for name, each in ours.items() if each is not None}


def conditions(spec: TrainSpec, train_set: Source) -> dict[str, Any]:
    """What must not change when a run resumes, because it determines the examples of each step."""
    order = {"train.batch": spec.batch, "train.seed": spec.seed, "train.data.shuffle": spec.data.shuffle}
    return {"data": train_set.fingerprint()} | order
