"""A trained model of any task and its evaluation, for `jaxlaunch.load` and `launcher eval`.

An evaluation reproduces the numbers that the training logged, because it uses the same step, task,
held-out data, batches and weights. Only the mesh may differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
import pydantic
from etils import epath
from flax import nnx
from jax import Array

from jaxlaunch import contract
from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.checkpoint import reader, saved_files
from jaxlaunch.trainer.data.pipeline import Evaluation
from jaxlaunch.trainer.errors import SpecError, pydantic_message
from jaxlaunch.trainer.huggingface import folder as folders
from jaxlaunch.trainer.huggingface import save
from jaxlaunch.trainer.metrics.means import EvaluationMeans
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.spec.data import LABEL_FORMAT
from jaxlaunch.trainer.spec.model import SEQUENCE_CLASSIFICATION
from jaxlaunch.trainer.start.process import read_spec
from jaxlaunch.trainer.step.state import NamedArrays
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.task import Task, checked_source
from jaxlaunch.trainer.tasks.classification import Classification
from jaxlaunch.trainer.tasks.classify import Classify


class TaskModel:
    """A loaded model of a task, with its parameters on the devices and its held-out data.

    - `spec`: the `train` block of its job, a [`TrainSpec`](#trainspec).
    - `step`: the step of the checkpoint; `None` for an exported folder.
    - `params`, `rest`: its parameters and its other arrays, such as batch statistics, by name.

    **Example:**

    ```python
    import jaxlaunch
    import numpy as np

    digits = jaxlaunch.load("runs/digits")
    assert isinstance(digits, jaxlaunch.TaskModel)
    images = np.zeros((3, 8, 8, 1), np.uint8)
    assert digits.predict(images).shape == (3, 10)
    ```
    """

    def __init__(
        self,
        spec: TrainSpec,
        task: Task,
        compiled: Step,
        step: int | None,
        params: NamedArrays,
        other_arrays: NamedArrays,
        *,
        held_out_fingerprint: str | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        # The fingerprint of the data that the training held out, if it is known.
        self._held_out_fingerprint, self._note = held_out_fingerprint, note
        self.spec, self.step, self.params, self.rest = spec, step, params, other_arrays
        self._task, self._step = task, compiled
        self._predict: Any = None

    @property
    def model(self) -> nnx.Module:
        """The `flax.nnx` module with these parameters, in evaluation mode: without dropout."""
        with self._step.builder.trace_context():
            model: nnx.Module = self._step.loss.evaluation_model(self.params, self.rest)
            return model

    def predict(self, inputs: Any) -> Any:
        """Calls the model on new examples.

        **Arguments:**

        - `inputs`: an array `[N, …]` of the `image` of examples, or a dict of arrays `[N, …]` with
          the keys of the task's examples.

        **Returns:**

        The result of the task's `predict`, or of the model if the task has no such method, as numpy
        arrays `[N, …]`. For a classification these are logits `[N, V]`.

        **Raises:**

        [`TrainerError`](#trainererror) if the arrays have different numbers of rows.
        """
        inputs_by_name = inputs if isinstance(inputs, Mapping) else {"image": inputs}
        arrays = {name: np.asarray(array) for name, array in inputs_by_name.items()}
        counts = {len(array) if array.ndim else 0 for array in arrays.values()}
        if len(counts) != 1 or 0 in counts:
            shapes = [f"{name} of shape {list(array.shape)}" for name, array in arrays.items()]
            raise SpecError(
                "predict takes arrays of one number of rows, [N, ...], not "
                f"{', '.join(shapes) or 'none'}"
            )

        @jax.jit
        def predict_batch(params: NamedArrays, rest: NamedArrays, batch: Any) -> Any:
            return self._task.predict(self._step.loss.evaluation_model(params, rest), batch)

        self._predict = self._predict or predict_batch
        count = counts.pop()
        shards = meshes.count_shards(self._step.mesh)
        split = meshes.batch_sharding(self._step.mesh)
        size = min(self.spec.batch, -(-count // shards) * shards)
        batches = []
        for start in range(0, count, size):
            # The last batch is filled up with the first rows, whose outputs are then dropped.
            rows = np.arange(start, start + size) % count
            batch = {name: jax.device_put(array[rows], split) for name, array in arrays.items()}
            with self._step.builder.trace_context():
                batches.append(jax.device_get(self._predict(self.params, self.rest, batch)))
        return jax.tree.map(lambda *outputs: np.concatenate(outputs)[:count], *batches)

    def held_out(
        self, data: Mapping[str, Any] | None = None
    ) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        """Yields the batches of the evaluation in order, with the rows of this process.

        **Arguments:**

        - `data`: keys of `train.data` to replace, such as `{"eval_split": "test[:10]"}`.

        **Returns:**

        For each batch a dict of numpy arrays `[B, …]`, including `weight` `[B]`, which is 0 for
        rows that only fill up the batch.

        **Raises:**

        [`TrainerError`](#trainererror) where no data is held out.
        """
        for batch in self._open_evaluation(data):
            yield dict(batch)

    def evaluate(self, data: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Evaluates the held-out data, each example once.

        **Arguments:**

        - `data`: the same as for `held_out`.

        **Returns:**

        The means of the loss and the metrics by name, and the number of `examples`, as the training
        logs them at this step.
        """
        return self._evaluate_means(self._open_evaluation(data))

    def report(self) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Evaluates the held-out data, and reports on the classes of a classification.

        **Returns:**

        The result of `evaluate`, and the report that `launcher eval -o json` prints as
        `classification`, or `None` for other tasks.

        **Raises:**

        [`TrainerError`](#trainererror) where no data is held out.
        """
        evaluation, task = self._open_evaluation(None), self._task
        if not isinstance(task, Classify) or not task.reports_classes(self.spec):
            return self._evaluate_means(evaluation), None
        reports: list[Classification] = []

        def add_batch(number: int, outputs: Any) -> None:
            # The number of classes is only known after the loss has been traced.
            if not reports:
                reports.append(task.start_classification())
            predictions, weight_B = jax.device_get(outputs)
            reports[0].add_batch(predictions, weight_B, evaluation.example_indices(number))

        means = self._evaluate_means(evaluation, task.score_batch, add_batch)
        return means, reports[0].to_record(task.class_names, evaluation.source.locate_example)

    def _evaluate_means(
        self,
        evaluation: Evaluation,
        extra_outputs: Callable[..., Any] | None = None,
        on_batch: Callable[[int, Any], None] | None = None,
    ) -> dict[str, float]:
        """Return the means over the held-out data.

        Args:
            evaluation: The held-out data.
            extra_outputs: Function of model and batch that is compiled with the loss.
            on_batch: Function that receives the number of each batch and its `extra_outputs`.
        """
        means, compiled = EvaluationMeans(self._task.derived), None
        for number, batch in enumerate(evaluation.iterate(self._step.put_batch)):
            compiled = compiled or self._step.compile_evaluator(batch, extra_outputs)
            sums, outputs = compiled(self.params, self.rest, batch)
            means.add(evaluation.batch_parts[number], jax.device_get(sums))
            if on_batch is not None:
                on_batch(number, outputs)
        return means.compute_means()

    def _open_evaluation(self, data: Mapping[str, Any] | None) -> Evaluation:
        spec = self.spec
        if self.step is None:
            raise SpecError(
                "an exported folder holds no data: evaluate the run that it was exported from"
            )
        if data is not None:
            keys = spec.data.model_dump(exclude_unset=True) | dict(data)
            try:
                spec = spec.model_copy(update={"data": type(spec.data).model_validate(keys)})
            except pydantic.ValidationError as error:
                fault = error.errors()[0]
                key = ".".join(("train.data", *map(str, fault["loc"])))
                raise SpecError(f"{key}: {pydantic_message(fault)}") from None
        source = checked_source(spec, self._task.source(spec, "eval"))
        if source is None or len(source) == 0:
            raise SpecError(
                "train.data has no held-out examples; name some, as eval_split or eval_path"
            )
        current = source.fingerprint()
        if data is None and self._held_out_fingerprint not in (None, current):
            self._note(
                f"these are not the held-out data of the training: {current}, and those were "
                f"{self._held_out_fingerprint}; examples that the model was trained on would make "
                "the metrics too good"
            )
        return Evaluation(
            source,
            self._task.example,
            batch=spec.batch,
            rows=meshes.process_rows(self._step.mesh, spec.batch),
            batches=spec.eval.batches,
            threads=spec.data.threads,
            seed=spec.seed,
            deterministic=spec.data.deterministic,
            check=partial(self._task.check_batch, spec),
        )


def load_task_model(
    folder: str,
    train: str,
    *,
    step: int | Literal["best"] | None = None,
    ema: bool = False,
    mesh: Mapping[str, int] | specs.Mesh | jax.sharding.Mesh | None = None,
    note: Callable[[str], None] = print,
) -> TaskModel:
    """Load the model and the task of a training from its checkpoints.

    Args:
        folder: Folder or URL of the checkpoints.
        train: The train block of the job, as JSON.
        step: Step to load, by default the newest undamaged one.
        ema: Whether to use the moving average of the parameters.
        mesh: Mesh to use, by default that of the training if it fits the devices.
        note: Function that receives sentences for the user.

    Raises:
        TrainerError: No step is usable, or the job does not describe the model in the checkpoint.
    """
    if remote.is_remote(folder):
        remote.check_url("the folder of checkpoints", folder)
    spec, task = read_spec({contract.TRAIN_SPEC: train})
    stored = reader.find_step(folder, step, note)
    if "loop" in stored.meta:
        raise SpecError(
            f"step {stored.step} of {folder} was saved by a program with its own step; "
            "jaxlaunch.run returns its state"
        )
    inputs = saved_files.read_inputs(folder)
    if inputs is not None and isinstance(task, Classify):
        task.use_inputs(inputs)
    job_model = spec.model if isinstance(spec.model, specs.PublishedModel) else None
    reads_folder = spec.lora is not None or isinstance(job_model, specs.TransformersModel)
    if not reads_folder and job_model is not None and job_model.init_from is not None:
        # The checkpoint records the sizes of the model, because the folder that it started from may
        # be gone.
        model: Any = reader.recorded_model(stored).model_copy(update={"init_from": None})
        spec = spec.model_copy(update={"model": model})
    else:
        spec = folders.resolve_spec(spec)
    spec = peft.resolve_lora(spec).model_copy(update={"accumulate": 1, "attention": "xla"})
    compiled = Step(task, spec, choose_mesh(spec, mesh), int(stored.meta.get("total_steps", 1)))
    name = f"step {stored.step}"
    if not ema and stored.part_arrays("ema"):
        note(f"{name} has a moving average, which its training evaluates: take it with ema")
    other_arrays = _read_arrays(reader.evaluated_buffers(stored, ema), compiled.abstract.buffers)
    saved: Mapping[str, Any] = reader.evaluated_parameters(stored, ema)
    abstract_params = compiled.builder.to_tree(compiled.abstract)["params"]
    if mismatched := ", ".join(sorted(saved.keys() ^ abstract_params.keys())[:5]):
        raise SpecError(f"{name} holds other parameters than the model of the job: {mismatched}")
    with compiled.builder.check_base(stored.meta.get("base"), name):
        params = compiled.builder.add_base(_read_arrays(saved, abstract_params))
    eval_data = stored.meta.get("eval_data")
    return TaskModel(
        *(spec, task, compiled, stored.step, params, other_arrays),
        held_out_fingerprint=eval_data if isinstance(eval_data, str) else None,
        note=note,
    )


def _read_arrays(stored: Mapping[str, Any], abstract: NamedArrays) -> NamedArrays:
    """Put stored arrays on the devices one at a time, with the dtypes and shardings of `abstract`.

    Raises SpecError, StorageError.
    """
    arrays: dict[str, Array] = {}
    for name, target in abstract.items():
        if name not in stored:
            raise SpecError(f"the checkpoint does not contain {name} of the model")
        stored_shape, shape = list(stored[name].shape), list(target.shape)
        if stored_shape != shape:
            shapes = f"{stored_shape} in the checkpoint and {shape} in the model"
            raise SpecError(f"{name} is {shapes}")
        array = np.asarray(stored[name][...]).astype(target.dtype)
        arrays[name] = jax.make_array_from_callback(
            target.shape, target.sharding, array.__getitem__
        )
    return arrays


def choose_mesh(
    spec: TrainSpec, requested: Mapping[str, int] | specs.Mesh | jax.sharding.Mesh | None
) -> jax.sharding.Mesh:
    """Return the requested mesh, or the first that fits: the training's, all devices, or one."""
    if requested is not None:
        return meshes.resolve_mesh(requested)
    count = jax.device_count()
    with contextlib.suppress(ValueError, SpecError):
        spec.mesh.resolve(count)
        return meshes.build_mesh(spec.mesh)
    devices = jax.devices() if spec.batch % count == 0 else jax.devices()[:1]
    return meshes.build_mesh(specs.Mesh(dp=-1), devices)


# --- models without a job -------------------------------------------------------------------------

# The largest number of examples in a batch for predictions.
MAX_BATCH = 256


def read_described_inputs(folder: str) -> dict[str, Any] | None:
    """Return the description of the inputs that the model in a folder reads.

    Checkpoints and exports contain such a description. For a published image model it is derived
    from config.json. Returns None for a language model, and if there is no description. Raises
    SpecError, StorageError.
    """
    storage: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if remote.is_remote(folder):
        remote.check_url("the folder of weights", folder)
        storage = remote.convert_errors(f"reading {folder}", SpecError)
    with storage:
        if (inputs := saved_files.read_inputs(folder)) is not None:
            return inputs
        if not (epath.Path(folder) / "config.json").exists():
            return None
    if save.read_mlp_model(folder) is not None:
        raise SpecError(
            f"{folder} has no {saved_files.INPUTS_FILE}, which says what its model reads: "
            "copy it from the export"
        )
    if (texts := folders.describe_text_classifier(folder)) is not None:
        return texts
    model = folders.read_model(folder)
    if not isinstance(model, specs.ImageModel):
        return None
    # Convolutional networks read images of any size.
    size = model.image if isinstance(model, specs.ViT) else [MAX_BATCH, MAX_BATCH]
    return {"kind": "images", "target": "class", "shape": [*size, model.channels]}


def load_without_job(
    folder: str,
    inputs: Mapping[str, Any],
    *,
    step: int | Literal["best"] | None = None,
    ema: bool = False,
    mesh: Mapping[str, int] | specs.Mesh | jax.sharding.Mesh | None = None,
    note: Callable[[str], None] = print,
) -> TaskModel:
    """Load a model of the built-in classification task from checkpoints or an export.

    `inputs` is the description of its inputs, which replaces the data of a job. The other arguments
    are those of `load_task_model`. Raises a TrainerError.
    """
    if not (epath.Path(folder) / "config.json").exists():
        stored = reader.find_step(folder, step, note)
        model, precision = reader.recorded_model(stored), stored.meta.get("precision", "fp32")
        train = _built_in_spec(inputs, model, precision).model_dump_json(exclude_unset=True)
        return load_task_model(folder, train, step=stored.step, ema=ema, mesh=mesh)
    if step is not None or ema:
        raise SpecError(f"{folder} is an export, which holds neither steps nor a moving average")
    mlp = save.read_mlp_model(folder)
    config = mlp or _read_model(folder, inputs)
    spec, task = _built_in_spec(inputs, config, "fp32"), Classify()
    task.use_inputs(inputs)
    compiled = Step(task, spec, choose_mesh(spec, mesh), 1)
    state = compiled.builder.init_state(draws_head=False)
    params = state.params
    if mlp is not None:
        params = save.load_mlp(folder, compiled.builder.to_tree(compiled.abstract)["params"])
    return TaskModel(spec, task, compiled, None, params, state.buffers)


def _read_model(folder: str, inputs: Mapping[str, Any]) -> specs.PublishedModel:
    """Return the model of an export, or of a published folder, that starts from its weights."""
    update: dict[str, Any] = {"init_from": folder}
    if inputs["kind"] != "text":
        return folders.read_model(folder).model_copy(update=update)
    model = folders.read_model(folder, folders.TRANSFORMERS)
    update |= {"head": SEQUENCE_CLASSIFICATION, "length": inputs["shape"][0]}
    return model.model_copy(update=update)


def _built_in_spec(
    inputs: Mapping[str, Any], model: specs.Model | specs.PublishedModel, precision: Any
) -> TrainSpec:
    """Return a spec of the built-in classification task that is sufficient for predictions."""
    keys = {"task": specs.CLASSIFY, "model": model.model_dump(), "precision": precision}
    keys |= {"loss": {"target": inputs["target"]}, "batch": MAX_BATCH}
    if inputs["kind"] == "text":
        # The loss of a training of texts has no target; that of a published model is its own.
        keys |= {"data": {"source": "text", "path": ".", "format": LABEL_FORMAT}, "loss": {}}
    # SGD has no state, so no memory is wasted on an optimizer.
    return TrainSpec.model_validate(keys | {"optimizer": {"name": "sgd"}})
