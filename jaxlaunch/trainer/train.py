"""The built-in training, which connects the `train` block and its task to the training loop."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxlaunch import atomic_file, contract
from jaxlaunch.contract import Key
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.checkpoint import saved_files, storage
from jaxlaunch.trainer.checkpoint.consensus import check_same_data, run_on_primary
from jaxlaunch.trainer.data.pipeline import Evaluation, ExampleLog, Pipeline, Prefetcher
from jaxlaunch.trainer.data.source import SPLITS, DataSource
from jaxlaunch.trainer.errors import NotFiniteError, SpecError
from jaxlaunch.trainer.generate.text_model import TrainingSamples
from jaxlaunch.trainer.huggingface import config_json
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.training import RunContext, Settings, Training, describe_saved
from jaxlaunch.trainer.metrics.means import EvaluationMeans
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.sources.open import tokenizer_files
from jaxlaunch.trainer.spec import AUTO, PublishedModel, TrainSpec, TransformersModel
from jaxlaunch.trainer.start import compile_cache, preflight
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.step import resume
from jaxlaunch.trainer.step.samples import TaskSamples
from jaxlaunch.trainer.step.state import TrainState
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.task import Task, checked_source
from jaxlaunch.trainer.tasks.classify import Classify

Batch = dict[str, jax.Array]
# A global batch, or only its shapes and dtypes.
BatchLike = Mapping[str, Any]


def build_loop(
    spec: TrainSpec, task: Task, context: RunContext, stop: Stop, progress: Progress
) -> Loop[TrainState]:
    """Return the loop that trains as `spec` specifies. Raises a TrainerError if a check fails."""
    return Loop(BuiltInTraining(spec, task, context, progress), context, stop, progress)


class Evaluator:
    """The evaluations of a training: held-out set, samples, and pictures of the task.

    Attributes:
        batches: The batches of the held-out set, or None.
        inputs: The preprocessing of a classification, which is saved for users of the model; None
            for other tasks.
    """

    def __init__(
        self,
        spec: TrainSpec,
        task: Task,
        step: Step,
        batches: Evaluation | None,
        context: RunContext,
        baselines: Mapping[str, float],
    ) -> None:
        self._spec, self._task, self._step, self._run_dir = spec, task, step, context.run_dir
        self.batches, self._baselines = batches, baselines
        prompts = spec.eval.samples
        self._samples = None if prompts is None else TrainingSamples(spec, prompts, step.mesh)
        self._pictures = TaskSamples.for_task(spec, task, step)
        self.inputs = task.describe_inputs(spec) if isinstance(task, Classify) else None
        self._classify = task if isinstance(task, Classify) and task.reports_classes(spec) else None

    @property
    def has_work(self) -> bool:
        """True if there is a held-out set, a prompt to sample from, or a picture to draw."""
        return any(part is not None for part in (self.batches, self._samples, self._pictures))

    def first_batch(self) -> BatchLike | None:
        """Return the first batch on the devices. Raises SpecError if it lacks a watched metric."""
        if self.batches is None:
            return None
        with contextlib.closing(self.batches.iterate(self._step.put_batch)) as batches:
            batch = next(batches)
        if self._spec.checkpoint.best is not None or self._spec.stop_early is not None:
            metrics = set(self._step.evaluated_metrics(batch)) - {Key.EXAMPLES}
            parts = {part for part in self.batches.batch_parts if part is not None}
            metrics |= {f"{name}/{part}" for name in metrics for part in parts}
            preflight.check_watched_metrics(self._spec, metrics)
        return batch

    def compile(self, batch: BatchLike) -> None:
        """Compile the evaluation of batches like this one."""
        outputs = None if self._classify is None else self._classify.score_batch
        self._step.compile_eval(batch, outputs)

    def compile_pictures(self) -> None:
        """Compile the pictures of the task. Raises SpecError if they cannot be shown."""
        if self._pictures is not None:
            self._pictures.compile()

    def evaluate(
        self, state: TrainState, between: Callable[[], None], note: Callable[[str], None]
    ) -> dict[str, float]:
        """Return the means over the held-out set, each example counted once, and the baselines.

        The results by class are written to the run folder, for the web page of the run. `between`
        is called before each batch.
        """
        if self.batches is None:
            return {}
        means, classes = EvaluationMeans(self._task.derived), None
        if self._classify is not None and self._run_dir is not None and jax.process_index() == 0:
            classes = self._classify.start_classification()
        iterator = self.batches.iterate(self._step.put_batch)
        batches = zip(self.batches.batch_parts, iterator, strict=True)
        for number, (part, batch) in enumerate(batches):
            between()
            sums, outputs_and_weights = self._step.evaluate(state, batch)
            means.add(part, jax.device_get(sums))
            if classes is not None:
                outputs, weight_B = jax.device_get(outputs_and_weights)
                classes.add_batch(outputs, weight_B, self.batches.example_indices(number))
        if classes is not None and self._run_dir is not None:
            names = (self.inputs or {}).get("classes", ())
            record = classes.to_record(names, self.batches.source.locate_example)
            weights = {"step": int(state.step), "ema": self._spec.optimizer.ema is not None}
            path = Path(self._run_dir) / contract.CLASSIFICATION
            try:
                with atomic_file.open_draft(path) as draft:
                    draft.write_text(json.dumps(weights | record))
            except OSError as error:
                note(f"{path} cannot be written: {error.strerror or error}")
        return {**means.compute_means(), **self._baselines}

    def sample(self, state: TrainState) -> Sequence[Mapping[str, Any]]:
        """Return a sample of each prompt of train.eval.samples, and report the task's pictures."""
        if self._pictures is not None:
            self._pictures.report(state)
        if self._samples is None:
            return ()
        return self._samples.take_samples({**state.evaluated_buffers(), **state.evaluated_params()})


class BuiltInTraining(Training[TrainState]):
    """The training of a task's model on its data, as the spec specifies."""

    repeats_last_evaluation = True

    def __init__(
        self, spec: TrainSpec, task: Task, context: RunContext, progress: Progress
    ) -> None:
        super().__init__(progress)
        # The cheapest checks come first: keys before the data is opened, and both before a model is
        # built.
        preflight.check_mesh(spec)
        self.spec, self.context = spec, context
        self.folder = context.checkpoint_path(spec)
        storage.check_writable(self.folder)
        preflight.check_cache(spec)
        if spec.compile_cache == AUTO:
            compile_cache.install_cache(context.run_folder, self.note)
        train_set, eval_set = _open_sources(spec, task)
        for source in filter(None, (train_set, eval_set)):
            for source_note in source.notes:
                self.note(f"train.data: {source_note}")
        devices = mesh.build_mesh(spec.mesh, note=self.note)
        # This process reads only these rows of each batch.
        rows = mesh.process_rows(devices, spec.batch)
        reader_options: dict[str, Any] = {
            "batch": spec.batch,
            "rows": rows,
            "seed": spec.seed,
            "threads": spec.data.threads,
            "deterministic": spec.data.deterministic,
            "check": partial(task.check_batch, spec),
        }
        shuffle, prefetch = spec.data.shuffle, spec.data.prefetch
        self.pipeline = Pipeline(
            train_set, task.example, shuffle=shuffle, prefetch=prefetch, **reader_options
        )
        evaluation = None
        if eval_set is not None and len(eval_set):
            evaluation = Evaluation(
                eval_set, task.example, batches=spec.eval.batches, **reader_options
            )
        if evaluation is None:
            preflight.check_watched_metrics(spec, None)
        total_steps = spec.total_steps(len(train_set))
        preflight.check_profile(spec, total_steps)
        self.step = Step(task, spec, devices, total_steps)
        self.step.check_loss(self.pipeline.batch_specs())
        notes = [*self.step.notes, self.pipeline.note if spec.data.threads > 1 else None]
        if isinstance(spec.model, TransformersModel):
            notes.append("the model is PyTorch code of transformers, run as a JAX function")
        elif isinstance(spec.model, PublishedModel):
            notes.append(config_json.describe_refusal(spec.model))
        for note in filter(None, notes):
            self.note(note)
        baselines = train_set.baseline_metrics(eval_set) if jax.process_index() == 0 else {}
        self.evaluator = Evaluator(spec, task, self.step, evaluation, context, baselines)
        self.has_evaluation = self.evaluator.has_work
        self.settings = Settings(
            steps=total_steps,
            log_every=spec.log_every,
            eval_every=spec.eval.every,
            save_every=spec.checkpoint.every,
            keep=spec.checkpoint.keep,
            steps_per_dispatch=spec.steps_per_dispatch,
            best=spec.checkpoint.best,
            stop_early=spec.stop_early,
            profile=spec.profile,
        )
        tokens = self.pipeline.array_specs.get("tokens")
        self.metrics = self.open_metrics(
            context,
            spec.batch,
            # Only rows of tokens have a loss that is summed over targets.
            has_targets=tokens is not None and len(tokens.shape) == 1,
            dataset_examples=len(train_set),
            epochs=train_set.epochs_by_part,
        )
        attention = self.step.attention_implementation
        self._record = resume.training_record(spec, attention, total_steps, eval_set)
        # Values that must not change when a run resumes.
        self._conditions = resume_conditions(spec, train_set)
        # The log of the examples of each step, if the job requests it.
        self._example_log: ExampleLog | None = None
        # Compilation in a thread, which returns the FLOPs of a step.
        self._compilation: Future[float | None] | None = None

    # --- the state --------------------------------------------------------------------------------

    @property
    def abstract_state(self) -> TrainState:
        """The shapes, dtypes and shardings of the state."""
        return self.step.abstract

    def init_state(self) -> TrainState:
        """Return the state before the first step: new, or with the weights of init_from."""
        self._save_model_files()
        return self.step.init_state()

    def to_tree(self, state: TrainState) -> dict[str, Any]:
        """Return the arrays by part and name, without the frozen base model."""
        return self.step.builder.to_tree(state)

    def from_tree(self, tree: Mapping[str, Any], meta: Mapping[str, Any], step: int) -> TrainState:
        """Return the state of a checkpoint. The base model is read again and must be unchanged."""
        with self.step.builder.check_base(meta.get("base"), f"step {step} of {self.folder}"):
            state = self.step.builder.from_tree(tree)
        self._save_model_files()
        return state

    def _save_model_files(self) -> None:
        """Save the tokenizer and the preprocessing next to the checkpoints."""
        run_on_primary(partial(saved_files.save_inputs, self.folder, self.evaluator.inputs))
        if files := tokenizer_files(self.spec.data):
            run_on_primary(partial(saved_files.save_tokenizer, self.folder, files))

    def checkpoint_meta(self) -> dict[str, Any]:
        """Return the resume conditions, the other settings, and the keys that define the state."""
        state_keys = {"model", "optimizer", "precision", "lora"}
        state_settings = self.spec.model_dump(mode="json", include=state_keys)
        meta = self._conditions | self._record | state_settings
        base = self.step.builder.base
        return meta if base is None else meta | {"base": base}

    def _complete_meta(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Return the meta of a checkpoint with defaults for keys that its version did not have."""
        current, completed = self.checkpoint_meta(), dict(meta)
        blocks = {"train": self.spec, "model": self.spec.model, "optimizer": self.spec.optimizer}
        for key in blocks.keys() & meta.keys():
            completed[key] = resume.fill_defaults(meta[key], current[key], blocks[key])
        return completed

    def describe_difference(self, meta: Mapping[str, Any]) -> str:
        """Describe the keys of the job that give its state other arrays than the checkpoint has."""
        return preflight.describe_changes(self._complete_meta(meta), self.checkpoint_meta())

    def check_resumed(self, meta: Mapping[str, Any], step: int, is_finished: bool) -> str | None:
        """Describe the settings that changed since the checkpoint, or return None.

        Raises SpecError, DataError or CheckpointError if the change would repeat or skip examples,
        or would retrain a finished run.
        """
        preflight.check_resumed(meta, self._conditions, self.folder)
        preflight.check_length(self.spec, self.settings.steps, step, self.folder)
        trained_meta = self._complete_meta(meta)
        if is_finished:
            # A finished run can no longer be trained with other settings.
            changes = resume.find_training_changes(trained_meta, self._record)
            preflight.check_finished(self.spec, changes, step)
        return resume.describe_changes(trained_meta, self._record, step)

    # --- the steps --------------------------------------------------------------------------------

    def compile_ahead(self) -> None:
        """Compile the steps in a thread, unless user code may need the main thread.

        If that fails, `compile` tries again and raises the error.
        """
        if self.step.builder.is_builtin:
            train = {count: self.pipeline.batch_specs(count) for count in self._dispatch_sizes}
            batches = self.evaluator.batches
            held_out = None if batches is None else batches.batch_specs()
            threads = ThreadPoolExecutor(1, "compile")
            self._compilation = threads.submit(self._compile_steps, train, held_out)

    def compile(self, start: int) -> float | None:
        """Compile all steps, which reads the first batches, and return the FLOPs of one step."""
        self.progress.report_phase("data", start)
        train = {
            count: self.step.put_batch(self.pipeline.read_batch(start, count))
            for count in self._dispatch_sizes
        }
        held_out = self.evaluator.first_batch()
        self.progress.report_phase("compile", start)
        # `exception` waits until the thread has ended.
        if self._compilation is None or self._compilation.exception() is not None:
            flops = self._compile_steps(train, held_out)
        else:
            flops = self._compilation.result()
        self.evaluator.compile_pictures()
        return flops

    @property
    def _dispatch_sizes(self) -> set[int]:
        """The numbers of steps that are dispatched together."""
        return {1, self.spec.steps_per_dispatch}

    def _compile_steps(
        self, train: Mapping[int, BatchLike], held_out: BatchLike | None
    ) -> float | None:
        """Compile the steps and return the FLOPs of one. `train` has a batch by number of steps."""
        for count, batch in sorted(train.items()):
            self.step.compile_train(batch, count)
        if held_out is not None:
            self.evaluator.compile(held_out)
        return self.step.count_flops(train[1])

    def iterate_batches(self, spans: Sequence[range]) -> Prefetcher[Batch]:
        """Prefetch the batches of these spans of steps to the devices."""
        if self.spec.data.trace and self.context.run_dir is not None:
            start, rank = spans[0].start if spans else self.settings.steps, jax.process_index()
            self._example_log = ExampleLog(
                self.context.run_dir, rank, start, processes=jax.process_count()
            )
        return self.pipeline.iterate(spans, self.step.put_batch)

    def train_steps(self, state: TrainState, batch: Batch, span: range) -> tuple[TrainState, Batch]:
        """Dispatch the steps of a span. Their examples are logged first if the job requests it."""
        if self._example_log is not None:
            for step in span:
                self._example_log.write_step(step, self.pipeline.example_ids(step))
        return self.step.train(state, batch, len(span))

    def not_finite_error(
        self, step: int, metrics: Mapping[str, float], saved: int
    ) -> NotFiniteError:
        """Return the error of a step that is not finite. Such a step leaves the state unchanged."""
        loss, norm = metrics[Key.LOSS], metrics[Key.GRAD_NORM]
        wrong_batch = self.describe_wrong_batch(step)
        advice = "Try a lower train.optimizer.lr, a longer warmup or train.optimizer.clip"
        if wrong_batch is not None:
            advice = f"Its batch is not finite: {wrong_batch}. Fix that example, or leave it out"
        return NotFiniteError(
            f"loss {loss:.6g} with gradient norm {norm:.6g} in step {step}; the update was not "
            f"applied, and {describe_saved(saved)}. {advice}"
        )

    def _find_wrong_batch(self, number: int) -> str | None:
        return self.pipeline.describe_not_finite(number)

    def hlo_texts(self) -> list[str]:
        """Return the HLO texts of the compiled steps."""
        return self.step.hlo_texts()

    # --- the evaluations --------------------------------------------------------------------------

    def evaluate(self, state: TrainState, between: Callable[[], None]) -> dict[str, float]:
        """Return the means over the held-out set, as Evaluator.evaluate does."""
        return self.evaluator.evaluate(state, between, self.note)

    def sample_prompts(self, state: TrainState) -> Sequence[Mapping[str, Any]]:
        """Return a sample of each prompt of train.eval.samples, and report the task's pictures."""
        return self.evaluator.sample(state)


def _open_sources(spec: TrainSpec, task: Task) -> tuple[DataSource, DataSource | None]:
    """Open the training set and the held-out set, which is None if the task has none.

    Raises SpecError if there is no training data, and DataError if hosts read different files.
    """
    task_sources = [task.source(spec, split) for split in SPLITS]
    with user_code.append_place(type(task).source):
        train_set, eval_set = (checked_source(spec, source) for source in task_sources)
    if train_set is None:
        raise SpecError(f"{spec.task}: source returned None for the split train; return its data")
    sources = {"train": train_set} | ({} if eval_set is None else {"eval": eval_set})
    # The fingerprint of a user's own source may differ between hosts.
    built_in = {split: source for split, source in sources.items() if not source.is_user_defined}
    check_same_data({split: source.fingerprint() for split, source in built_in.items()})
    return train_set, eval_set


def resume_conditions(spec: TrainSpec, train_set: DataSource) -> dict[str, Any]:
    """Return the values that determine the examples of each step."""
    return {
        "data": train_set.fingerprint(),
        "train.batch": spec.batch,
        "train.seed": spec.seed,
        "train.data.shuffle": spec.data.shuffle,
    }
