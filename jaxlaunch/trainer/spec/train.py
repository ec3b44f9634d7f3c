"""The train block as a whole, and the rules across its keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from jaxlaunch.contract import BATCH_AXES, MESH_AXES, PROFILE_STEPS
from jaxlaunch.trainer.spec.block import COUNTED, Block, Ids, Many, Natural, Place, Positive, Seed, Steps, Wide
from jaxlaunch.trainer.spec.checkpoint import Checkpoint
from jaxlaunch.trainer.spec.data import Data, Mixture, Text, Tfds
from jaxlaunch.trainer.spec.evaluation import Eval, StopEarly
from jaxlaunch.trainer.spec.lora import Lora
from jaxlaunch.trainer.spec.loss import Dpo, Loss
from jaxlaunch.trainer.spec.mesh import Mesh, said
from jaxlaunch.trainer.spec.model import GPT2, MLP, CustomModel, Decoder, Model, Sizes, model_sizes
from jaxlaunch.trainer.spec.optimizer import Optimizer
from jaxlaunch.trainer.spec.precision import Precision, Remat
from jaxlaunch.trainer.spec.presets import Published
from jaxlaunch.trainer.spec.tasks import CLASSIFY, DPO, LM, TASK_DEFAULTS, over_task
from jaxlaunch.trainer.spec.vision.models import ResNet

DEFAULT_STEPS = 1000
AUTO = "auto"  # of compile_cache


class Profile(Block):
    """Steps whose time is traced and split: matrix products, attention, element-wise work, collectives, host.

    ```yaml
    train:
      task: lm
      profile: {at: 100, steps: 5}  # steps 101 to 105; at any time: launcher profile RUN
    ```
    """

    at: Natural | None = Field(None, description="steps that are complete when it begins; null: on demand alone")
    steps: Annotated[int, Field(ge=1, le=PROFILE_STEPS)] = Field(5, description="how many are traced")


class OnNonfinite(Block):
    """What to do when the loss or the gradients are not finite. Such a step changes nothing.

    ```yaml
    train:
      task: lm
      on_nonfinite: {action: stop}  # exit code 76; the checkpoint before it stays
    ```
    """

    action: Literal["stop"] = Field("stop", description="end the run with exit code 76")


class TrainSpec(Block):
    """The configuration of the trainer.

    ```yaml
    train:
      task: lm                  # or classify, or your own
      model: {kind: decoder, layers: 12, width: 768, heads: 12, vocab: 256, length: 1024}
      data: {source: text, path: "corpus/*.txt"}
      mesh: {fsdp: -1}                                  # all devices split batch and state
      precision: bf16
      batch: 64                                         # over all devices
      steps: 10000
      optimizer: {lr: 3e-4, schedule: {warmup: 200}}
      checkpoint: {every: 500}
    ```

    Raises pydantic's ValidationError, with all errors at once.
    """

    # Built with its own serializer at once, which a job's would not give it; a job then builds on it.
    model_config = ConfigDict(defer_build=False)

    task: Literal["classify", "lm", "dpo"] | Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] = Field(
        description="a built-in task, or module:Class of your own task"
    )
    model: Model = Field(MLP(), description="the model, by kind; default the task's own")
    data: Data = Field(Tfds(), description="the data, by source; default the task's own")
    mesh: Mesh = Field(Mesh(dp=-1), description="devices per mesh axis; default: all on dp")
    precision: Precision = Field("fp32", description="a named policy, or the dtype of each part")
    batch_norm: Literal["global", "device", "frozen"] = Field(
        "global",
        description="batch norm in resnet and in your own models. global: statistics of the whole micro-batch; device: "
        "of each device's part, with running statistics averaged over devices; frozen: the running "
        "statistics, which do not change",
    )
    remat: Remat = Field("none", description="activation checkpointing; a list names the activations to save")
    batch: Ids = Field(128, description="global batch: examples per step, over all devices and micro-batches")
    accumulate: Wide = Field(1, description="gradient accumulation: micro-batches per step")
    steps: Steps | None = Field(
        None, description=f"optimizer steps; alternatively epochs; default {DEFAULT_STEPS} steps"
    )
    epochs: Positive | None = Field(
        None, description="passes over the training set, instead of steps; default none: steps count"
    )
    seed: Seed = Field(0, description="seed of the initial weights, the order of examples and a task's random numbers")
    optimizer: Optimizer = Field(Optimizer(), description="the optimizer, by name, and its schedule")
    lora: Lora | None = Field(None, description="adapters that are trained instead of the model; null: none")
    loss: Loss = Field(Loss(), description="terms added to the loss in training, and label smoothing")
    eval: Eval = Field(Eval(), description="evaluation on the held-out set")
    checkpoint: Checkpoint = Field(Checkpoint(), description="where and how often to save")
    stop_early: StopEarly | None = Field(
        None, description="early stopping: end when evaluations no longer improve; null: never"
    )
    attention: Literal["auto", "xla", "cudnn", "splash"] = Field(
        "auto",
        description="implementation; auto: cudnn or splash if devices, precision and sizes allow, else xla; the log "
        "says which",
    )
    compile_cache: Place | None = Field(
        AUTO,
        description="XLA's compilation cache: folder or URL; auto: on the host, seeded from the run folder; null: none",
    )
    on_nonfinite: OnNonfinite = Field(
        OnNonfinite(), description="what to do when the loss or the gradients are not finite"
    )
    steps_per_dispatch: Many = Field(1, description="steps per dispatch to the device; more for tiny models")
    profile: Profile = Field(Profile(), description="which steps are traced")
    log_every: Positive = Field(10, description="steps between two lines of metrics")

    @model_validator(mode="before")
    @classmethod
    def _task_defaults(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        return over_task(raw, TASK_DEFAULTS.get(str(raw.get("task")), {}))

    @field_validator("data")
    @classmethod
    def _is_read_by_the_task(cls, data: Data, info: ValidationInfo) -> Data:
        task, form = info.data.get("task"), data.format if isinstance(data, Text) else None
        if task == DPO and (isinstance(data, Mixture) or form not in (None, "preference")):
            raise ValueError(f"has no pairs of texts, which {DPO} trains on; give source: text, format: preference")
        if task == LM and form == "preference":
            raise ValueError(f"format: preference has pairs of texts, which the task {DPO} trains on")
        return data

    @field_validator("batch")
    @classmethod
    def _is_counted(cls, batch: int, info: ValidationInfo) -> int:
        length = (model_sizes(info.data["model"]).length if "model" in info.data else None) or 1
        if batch * length > COUNTED:
            tokens = f"{batch * length} tokens a step at model.length = {length}"
            raise ValueError(f"is {tokens}, and a device counts to {COUNTED}")
        return batch

    @field_validator("loss")
    @classmethod
    def _is_of_the_task(cls, loss: Loss, info: ValidationInfo) -> Loss:
        task = info.data.get("task")
        if task in (LM, DPO) and loss.of_labels:
            raise ValueError(f"{loss.of_labels[0]} applies to images and tables, not to tokens")
        if task == DPO and (loss.z or loss.smoothing):
            raise ValueError("z and smoothing apply to a cross-entropy; preferences have dpo.label_smoothing")
        if task in (LM, CLASSIFY) and loss.dpo != Dpo():
            raise ValueError(f"dpo applies to preferences, which the task {DPO} trains on")
        if task == CLASSIFY and loss.chunks != "auto":
            raise ValueError("chunks apply to tokens, not to images")
        model = info.data.get("model")
        sizes = Sizes() if model is None else model_sizes(model)
        classes = None if isinstance(model, CustomModel) else sizes.classes
        if loss.class_weights and classes and len(loss.class_weights) != classes:
            raise ValueError(f"class_weights has {len(loss.class_weights)} numbers for model.classes = {classes}")
        is_of_folder = isinstance(model, Published) and model.is_partial and "length" not in model.model_fields_set
        length = None if is_of_folder else sizes.length
        if length is not None and loss.chunks != "auto" and length % loss.chunks:
            raise ValueError(f"chunks = {loss.chunks} does not divide model.length = {length}")
        return loss

    @field_validator("batch_norm")
    @classmethod
    def _is_of_a_model_with_norms(cls, batch_norm: str, info: ValidationInfo) -> str:
        model = info.data.get("model")
        if batch_norm != "global" and model is not None and not isinstance(model, CustomModel | ResNet):
            raise ValueError(
                f"applies to resnet and your own models; train.model.kind = {model.kind} has no batch norm"
            )
        return batch_norm

    @field_validator("lora")
    @classmethod
    def _has_products(cls, lora: Lora | None, info: ValidationInfo) -> Lora | None:
        model = info.data.get("model")
        if lora is not None and model is not None and not isinstance(model, Decoder | GPT2):
            raise ValueError(f"applies to a decoder or gpt2, and train.model.kind = {model.kind}")
        return lora

    @field_validator("epochs")
    @classmethod
    def _one_length(cls, epochs: int | None, info: Any) -> int | None:
        if epochs is not None and info.data.get("steps") is not None:
            raise ValueError("steps and epochs are both given; keep one")
        return epochs

    @field_validator("optimizer")
    @classmethod
    def _schedule_fits(cls, optimizer: Optimizer, info: ValidationInfo) -> Optimizer:
        if (
            "steps" in info.data and info.data.get("epochs") is None
        ):  # with epochs trainer/optim/schedules checks it, once the data is read
            optimizer.schedule.decay_steps(info.data["steps"] or DEFAULT_STEPS)
        return optimizer

    @field_validator("stop_early")
    @classmethod
    def _is_evaluated(cls, stop_early: StopEarly | None, info: ValidationInfo) -> StopEarly | None:
        if stop_early is not None and "eval" in info.data and info.data["eval"].every is None:
            raise ValueError("needs evaluations during the run; set eval.every")
        return stop_early

    @field_validator("profile")
    @classmethod
    def _is_reached(cls, profile: Profile, info: ValidationInfo) -> Profile:
        steps = None if info.data.get("epochs") is not None else info.data.get("steps") or DEFAULT_STEPS
        if profile.at is not None and steps is not None and profile.at >= steps:
            raise ValueError(f"at = {profile.at} is not below the {steps} steps of the run")
        return profile

    def total_steps(self, examples: int) -> int:
        """Optimizer steps of the whole run over a set of `examples`; batches run across epoch ends."""
        if self.epochs is not None:
            return -(-self.epochs * examples // self.batch)
        return self.steps or DEFAULT_STEPS


# --- on fewer devices than the job has at most ------------------------------------------------------------------------


def mesh_on(mesh: Mesh, devices: int, full: int) -> Mesh:
    """The mesh of `full` devices on fewer: dp is smaller, or else fsdp. Raises ValueError where neither can be."""
    sizes = dict(zip(MESH_AXES, mesh.resolve(full), strict=True))
    for axis in ("dp", "fsdp"):
        others = math.prod(size for other, size in sizes.items() if other != axis)
        if devices % others == 0 and 0 < devices // others <= sizes[axis]:
            return mesh.model_copy(update=sizes | {axis: devices // others})
    raise ValueError(f"{said(sizes)} does not shrink to {devices} devices: neither dp nor fsdp alone can")


def on_devices(spec: TrainSpec, devices: int, full: int) -> TrainSpec:
    """The training of a job with `full` devices on fewer of them, of the same batches: more micro-batches keep each
    device's part as small as it was. Raises ValueError where the mesh or the batch cannot be divided so."""
    if devices == full:
        return spec
    mesh = mesh_on(spec.mesh, devices, full)
    before, after = _shards(spec.mesh, full), _shards(mesh, devices)
    if spec.batch % after:
        raise ValueError(f"batch {spec.batch} cannot be divided evenly over {after} devices instead of {before}")
    part, least = spec.batch // after, -(-spec.accumulate * before // after)
    fitting = (count for count in range(least, part + 1) if part % count == 0)
    if isinstance(spec.model, CustomModel | ResNet):  # batch norm sees a micro-batch: another size is another training
        if spec.batch_norm == "device":
            raise ValueError(
                "batch_norm: device sees each device's part of the batch, which grows; use global or frozen"
            )
        fitting = (count for count in (spec.accumulate,) if part % count == 0)
    accumulate = next(fitting, None)
    if accumulate is None:
        raise ValueError(
            f"batch {spec.batch} cannot be divided evenly over {after} devices × accumulate {spec.accumulate}"
        )
    return spec.model_copy(update={"mesh": mesh, "accumulate": accumulate})


def _shards(mesh: Mesh, devices: int) -> int:
    return math.prod(mesh.resolve(devices)[: len(BATCH_AXES)])
