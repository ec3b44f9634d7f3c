"""The train block, its smaller blocks, and the checks across its keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from jaxlaunch.contract import BATCH_AXES, MESH_AXES, PAUSE_STEPS, PROFILE_STEPS
from jaxlaunch.trainer.spec import model as models
from jaxlaunch.trainer.spec.block import (
    MAX_INT32,
    USER_OBJECT,
    Block,
    Fraction,
    Ids,
    Location,
    Many,
    Natural,
    Place,
    Positive,
    PredicateError,
    Rate,
    Seed,
    Steps,
    Unset,
    Weight,
    Wide,
)
from jaxlaunch.trainer.spec.data import LABEL_FORMAT, Data, Text, Tfds, Torch
from jaxlaunch.trainer.spec.model import (
    GPT2,
    MLP,
    CustomModel,
    Decoder,
    Model,
    ResNet,
    Sizes,
    TransformersModel,
    model_sizes,
)
from jaxlaunch.trainer.spec.optimizer import Optimizer
from jaxlaunch.trainer.spec.presets import PublishedModel

LM, CLASSIFY, DPO, REWARD = "lm", "classify", "dpo", "reward"

# The built-in tasks by the names that `task` accepts.
TASKS: Mapping[str, str] = {
    CLASSIFY: "jaxlaunch.trainer.tasks.classify:Classify",
    LM: "jaxlaunch.trainer.tasks.lm:NextToken",
    DPO: "jaxlaunch.trainer.tasks.dpo:Preference",
    REWARD: "jaxlaunch.trainer.tasks.reward:Reward",
}

# Defaults of the built-in tasks. Those of a user's task are its class attribute `defaults`.
TASK_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    CLASSIFY: {"model": {"kind": "mlp"}, "data": {"source": "tfds", "name": "digits"}},
    LM: {"model": {"kind": "decoder"}, "data": {"source": "synthetic"}},
    DPO: {"model": {"kind": "decoder"}, "data": {"source": "synthetic"}},
    REWARD: {"data": {"source": "synthetic"}},
}


# What a model of transformers computes in a task, if it is not the logits of the next tokens.
TASK_HEADS: Mapping[str, models.Head] = {
    CLASSIFY: models.SEQUENCE_CLASSIFICATION,
    REWARD: models.SEQUENCE_CLASSIFICATION,
}


def merge_task_defaults(block: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the train block over the defaults of its task.

    With `init_from`, the folder defines the model, and few of the model's defaults apply.
    """
    if "model" in block:
        block = {**block, "model": models.fill_preset_kind(block["model"])}
    model: Any = block.get("model")
    default_model: Any = models.fill_preset_kind(defaults.get("model"))
    has_folder = isinstance(model, Mapping) and model.get("init_from") is not None
    if has_folder and isinstance(default_model, Mapping):
        defaults = {**defaults, "model": _model_defaults_with_init_from(model, default_model)}
    return merge_defaults(block, defaults)


def _model_defaults_with_init_from(
    model: Mapping[str, Any], default: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the model's default keys that apply with init_from."""
    kind = default.get("kind")
    # For a user's model, init_from is one of its arguments.
    if ":" in str(kind):
        return default
    common_keys = {key: default[key] for key in ("length", "scan") if key in default}
    if "kind" in model:
        return {**common_keys, "kind": kind}
    return {**common_keys, "kind": "vit"} if kind in ("mlp", "vit") else common_keys


def merge_defaults(block: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a block over its defaults. A nested block of another kind replaces its default."""
    merged = dict(defaults)
    for key, value in block.items():
        default: Any = merged.get(key)
        if isinstance(value, Mapping) and _is_same_kind(value, default):
            value = merge_defaults(value, default)
        merged[key] = value
    return merged


def _is_same_kind(block: Mapping[str, Any], default: Any) -> bool:
    if not isinstance(default, Mapping) or "chain" in block:
        return False
    keys = ["kind", "source"]
    # The name of an optimizer or schedule determines which keys apply; that of a dataset does not.
    if "name" in default and "source" not in default:
        keys.append("name")
    return all(block.get(key, default.get(key)) == default.get(key) for key in keys)


class Mesh(Block):
    """Devices per axis, 1 if it is left out. One axis may be -1 and takes the remaining devices.

    ```yaml
    slices: 2
    accelerator: {type: v5e, topology: 4x4}
    train:
      task: lm
      # -1 is 32 / (2 × 4) = 4; dp spans the two slices
      mesh: {dp: 2, fsdp: -1, mp: 4, dcn: {dp: 2}}
    ```
    """

    dp: int = Field(1, description="data parallel: the batch is split, the state is copied")
    fsdp: int = Field(1, description="the batch and the state are split")
    ep: int = Field(1, description="the batch and the experts of a mixture are split")
    mp: int = Field(1, description="model parallel: weights and activations are split")
    dcn: dict[Literal["dp", "fsdp", "ep", "mp"], Positive] = Field(
        {},
        description="the factor of an axis that spans slices",
        json_schema_extra=Unset("the outermost axes, as far as they divide", "left out:"),
    )

    @model_validator(mode="after")
    def _check_axes(self) -> Mesh:
        sizes = [getattr(self, axis) for axis in MESH_AXES]
        if any(size == 0 or size < -1 for size in sizes):
            raise ValueError(
                "an axis is a positive number of devices, or -1 for the remaining ones"
            )
        if sizes.count(-1) > 1:
            raise ValueError("only one axis may be -1")
        return self

    def resolve(self, devices: int) -> tuple[int, int, int, int]:
        """Return the sizes of dp, fsdp, ep, mp. Raises ValueError if they do not fit."""
        sizes = [getattr(self, axis) for axis in MESH_AXES]
        fixed = math.prod(size for size in sizes if size > 0)
        if devices % fixed or (-1 not in sizes and fixed != devices):
            shape = format_axes(dict(zip(MESH_AXES, sizes, strict=True)))
            request = f"asks for a multiple of {fixed}" if -1 in sizes else f"asks for {fixed}"
            verb = "is" if devices == 1 else "are"
            raise ValueError(f"{shape} {request} devices, there {verb} {devices}")
        dp, fsdp, ep, mp = (size if size > 0 else devices // fixed for size in sizes)
        return dp, fsdp, ep, mp


def format_axes(sizes: Mapping[str, int]) -> str:
    """Format sizes of axes as `dp 4 × fsdp 1 × mp 2`, with ep only if it is not 1."""
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != "ep" or size != 1)


class Policy(Block):
    """Precision in full: dtypes of parameters, compute and outputs, and matmul precision.

    ```yaml
    train:
      task: lm
      precision: {params: bfloat16, compute: bfloat16}  # less memory than the usual precision: bf16
    ```
    """

    params: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype the parameters are kept in"
    )
    compute: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="dtype of layers and activations"
    )
    output: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of the model's output"
    )
    matmul: Literal["default", "tensorfloat32", "highest"] = Field(
        "default", description="XLA's matmul precision"
    )


Precision = Literal["fp32", "tf32", "bf16", "fp16"] | Policy
Remat = Literal["none", "full", "dots", "dots_no_batch", "offload"] | list[str]


# The prefix of the names of evaluation metrics.
EVAL_PREFIX = "eval/"
# A metric with one of these suffixes is better if it is smaller.
LOSS_SUFFIXES = ("loss", "bits_per_byte")


class Samples(Block):
    """Samples generated from prompts at each evaluation.

    ```yaml
    train:
      task: lm
      eval:
        every: 500
        # 0: the likeliest token
        samples: {prompts: ["def ", "import "], max_tokens: 32, temperature: 0.8}
    ```
    """

    prompts: Annotated[list[str | list[Natural]], Field(min_length=1)] = Field(
        description="texts, or token ids if the data has no tokenizer"
    )
    max_tokens: Wide = Field(64, description="tokens of a sample")
    temperature: Weight = Field(0.0, description="0: greedy")


class Eval(Block):
    """Evaluation on the held-out set, every example once.

    ```yaml
    train:
      task: lm
      eval: {every: 500, batches: 20}  # 20 batches of the held-out set, and at the end
    ```
    """

    every: Positive | None = Field(
        PAUSE_STEPS, description="steps between evaluations; null: only at the end"
    )
    batches: Positive | None = Field(
        None,
        description="batches per evaluation, at least one per part of a mixture",
        json_schema_extra=Unset("all", "null:"),
    )
    samples: Samples | None = Field(
        None,
        description="prompts to generate from, into samples.jsonl of the run folder",
        json_schema_extra=Unset("none", "null:"),
    )


def _check_eval_metric(metric: str) -> str:
    if not metric.startswith(EVAL_PREFIX) or metric == EVAL_PREFIX:
        hint = f"write {EVAL_PREFIX}loss, or another metric that the evaluation gives"
        raise PredicateError(f"is not a metric of an evaluation; {hint}")
    return metric


class WatchedMetric(Block):
    """A metric of the evaluations, and whether smaller or larger values are better."""

    metric: Annotated[str, AfterValidator(_check_eval_metric)] = Field(
        "eval/loss", description="eval/loss, or eval/ and another metric of the task's evaluation"
    )
    mode: Literal["min", "max"] = Field(
        "min", description="which values are better; required unless the metric is a loss"
    )

    @model_validator(mode="after")
    def _check_mode(self) -> WatchedMetric:
        if "mode" not in self.model_fields_set and not self.metric.endswith(LOSS_SUFFIXES):
            choices = "min or max, whichever values are better"
            raise PredicateError(f"needs mode for metric = {self.metric}: {choices}")
        return self


class StopEarly(WatchedMetric):
    """Ends a run that no longer improves; the run then counts as successful.

    ```yaml
    train:
      task: lm
      eval: {every: 100}
      # five in a row without a better one
      stop_early: {metric: eval/loss, patience: 5, min_delta: 0.001}
    ```
    """

    patience: Positive = Field(description="evaluations in a row without a better value")
    min_delta: Weight = Field(0.0, description="how much better a value must be to count")


class Best(WatchedMetric):
    """Steps that are kept because they evaluated best, in addition to the newest.

    ```yaml
    train:
      task: classify
      eval: {every: 100}
      checkpoint: {best: {metric: eval/accuracy, mode: max, keep: 2}}  # besides the newest
    ```
    """

    keep: Positive = Field(1, description="number of best steps that are kept")


class Checkpoint(Block):
    """Checkpoints: contents, place and frequency. A run resumes from its newest verified step.

    ```yaml
    train:
      task: lm
      # without path: the run folder, or the claim
      checkpoint: {path: gs://team-runs/lm, every: 500, keep: 3}
    ```
    """

    path: Place | None = Field(
        None,
        description="a folder or gs://, s3:// URL",
        json_schema_extra=Unset("the run folder, or the volume of the cluster defaults"),
    )
    every: Positive | None = Field(
        PAUSE_STEPS, description="steps between saves; null: only at the end"
    )
    keep: Positive = Field(3, description="number of newest verified steps that are kept")
    best: Best | None = Field(
        None,
        description="the best steps by a metric, which are also saved and kept",
        json_schema_extra=Unset("none", "null:"),
    )

    def max_kept_steps(self) -> int:
        """Return the largest number of steps that are kept at a time."""
        return self.keep + (self.best.keep if self.best is not None else 0)


class Lora(Block):
    """Adapters that are trained instead of the model, which does not change. Hu et al. 2021.

    ```yaml
    train:
      task: lm
      model: {init_from: weights/qwen3-8b, length: 2048}
      # the model itself is frozen, in int8
      lora: {rank: 16, alpha: 32, targets: [q, v], base: int8}
    ```
    """

    init_from: Place | None = Field(
        None,
        description="a peft folder or URL to start from: it sets rank, alpha, targets and rslora",
        json_schema_extra=Unset("new adapters"),
    )
    rank: Many = Field(16, description="columns of an adapter's first matrix, rows of its second")
    alpha: Rate = Field(32.0, description="the adapter's output is multiplied by alpha / rank")
    targets: Annotated[list[str], Field(min_length=1)] = Field(
        ["q", "v"],
        description="linear layers with an adapter: q, k, v, o, gate, up, down, peft's names "
        "(q_proj), or all-linear",
    )
    dropout: Fraction = Field(0.0, description="dropout probability on an adapter's input")
    rslora: bool = Field(
        False,
        description="multiply by alpha / √rank instead (rank-stabilized LoRA). Kalajdzievski 2023",
    )
    base: Literal["bf16", "int8"] | None = Field(
        None,
        description="precision of the frozen model: bf16, or int8 matrices",
        json_schema_extra=Unset("that of train.precision", "null:"),
    )
    dora: bool = Field(
        False,
        description="kind: transformers: train the norms of the rows too (DoRA). Liu et al. 2024",
    )
    rank_pattern: dict[str, Many] = Field(
        {}, description="kind: transformers: rank of the modules that a pattern of peft matches"
    )
    alpha_pattern: dict[str, Rate] = Field(
        {}, description="kind: transformers: alpha of the modules that a pattern of peft matches"
    )
    modules_to_save: list[str] = Field(
        [], description="kind: transformers: modules that are trained whole, such as lm_head"
    )
    exclude_modules: list[str] = Field(
        [], description="kind: transformers: targets that have no adapter after all"
    )
    layers_to_transform: list[Natural] = Field(
        [],
        description="kind: transformers: numbers of the layers with adapters",
        json_schema_extra=Unset("all layers", "[]:"),
    )

    @property
    def module_keys(self) -> list[str]:
        """The changed keys that only adapters of peft's modules have."""
        keys = (
            *("dora", "rank_pattern", "alpha_pattern"),
            *("modules_to_save", "exclude_modules", "layers_to_transform"),
        )
        return [*filter(self.is_changed, keys)]

    @property
    def scaling(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


_Beta = Annotated[float, Field(gt=0)]
_LabelSmoothing = Annotated[float, Field(ge=0, lt=0.5)]


class Dpo(Block):
    """Direct preference optimization, for the task dpo.

    ```yaml
    train:
      task: dpo
      model: {init_from: weights/qwen3-0.6b, length: 1024}
      data: {source: text, path: "pairs/*.jsonl", format: preference, tokenizer: weights/qwen3-0.6b}
      loss: {dpo: {beta: 0.1}}  # larger: stays nearer to the model that it starts from
    ```
    """

    kind: Literal["sigmoid", "ipo"] = Field(
        "sigmoid", description="loss of a pair: DPO's (sigmoid) or IPO's"
    )
    beta: _Beta = Field(
        0.1, description="strength of the penalty for diverging from the reference model"
    )
    label_smoothing: _LabelSmoothing = Field(
        0.0, description="assumed share of pairs whose labels are swapped"
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Dpo:
        if self.kind == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing applies only to kind sigmoid; leave it out with ipo")
        return self


class Kto(Block):
    """Kahneman-Tversky optimization, for the task dpo and rows with a label.

    ```yaml
    train:
      task: dpo
      model: {init_from: weights/qwen3-0.6b, length: 1024}
      data: {source: text, path: "rated/*.jsonl", format: kto, tokenizer: weights/qwen3-0.6b}
      loss: {kto: {beta: 0.1}}  # the model that it starts from is the reference
    ```
    """

    beta: _Beta = Field(
        0.1, description="strength of the penalty for diverging from the reference model"
    )
    desirable_weight: Weight = Field(1.0, description="weight of the loss of a desirable text")
    undesirable_weight: Weight = Field(1.0, description="weight of the loss of an undesirable text")


class Orpo(Block):
    """Odds ratio preference optimization, for the task dpo. It has no reference model.

    ```yaml
    train:
      task: dpo
      model: {init_from: weights/qwen3-0.6b, length: 1024}
      data: {source: text, path: "pairs/*.jsonl", format: preference, tokenizer: weights/qwen3-0.6b}
      loss: {orpo: {beta: 0.1}}  # larger: prefers the chosen texts more strongly
    ```
    """

    beta: _Beta = Field(
        0.1,
        description="weight of the odds ratio, in addition to the cross-entropy of the chosen text",
    )


class Simpo(Block):
    """Simple preference optimization, for the task dpo. It has no reference model.

    ```yaml
    train:
      task: dpo
      model: {init_from: weights/qwen3-0.6b, length: 1024}
      data: {source: text, path: "pairs/*.jsonl", format: preference, tokenizer: weights/qwen3-0.6b}
      loss: {simpo: {beta: 2.0, gamma: 1.0}}  # no reference
    ```
    """

    beta: _Beta = Field(
        2.0, description="reward of a nat of mean log-probability of the tokens of a text"
    )
    gamma: Weight = Field(
        1.0, description="margin by which the reward of the chosen text must be larger"
    )
    label_smoothing: _LabelSmoothing = Field(
        0.0, description="assumed share of pairs whose labels are swapped"
    )


# The blocks of the task dpo.
PreferenceLoss = Dpo | Kto | Orpo | Simpo


class Loss(Block):
    """The terms of the training loss; an evaluation reports the cross-entropy alone.

    ```yaml
    train:
      task: lm
      loss: {chunks: 8, z: 1e-4}  # logits of an eighth of a sequence at a time: less memory
    ```
    """

    chunks: Literal["auto"] | Many = Field(
        "auto", description="tokens: sequence chunks for chunked cross-entropy; must divide length"
    )
    z: Weight = Field(
        0.0,
        description="weight of the z-loss (squared log of the softmax normalizer), such as 1e-4",
    )
    smoothing: Fraction = Field(
        0.0, description="label smoothing: share of a label's weight spread over all classes"
    )
    dpo: Dpo = Field(Dpo(), description="preferences: the loss of a pair of texts")
    kto: Kto | None = Field(
        None,
        description="preferences: the loss of a text with a label, instead of dpo",
        json_schema_extra=Unset("none"),
    )
    orpo: Orpo | None = Field(
        None,
        description="preferences: a loss without a reference model, instead of dpo",
        json_schema_extra=Unset("none"),
    )
    simpo: Simpo | None = Field(
        None,
        description="preferences: a loss without a reference model, instead of dpo",
        json_schema_extra=Unset("none"),
    )
    target: Literal["class", "multi_label", "regression"] = Field(
        "class",
        description="images and tables: one class; multi_label: 0 or 1 for each class, by "
        "sigmoids; regression: numbers, by squared error",
    )
    class_weights: Annotated[list[Rate], Field(min_length=2)] | None = Field(
        None,
        description="images and tables: weight of each class; multi_label: of its positive rows",
        json_schema_extra=Unset("1 for each"),
    )
    focal: Weight = Field(
        0.0, description="images and tables: gamma of the focal loss, such as 2; 0: none"
    )
    mixup: Weight = Field(
        0.0, description="images: alpha of the Beta distribution that blends pairs; 0: none"
    )
    cutmix: Weight = Field(
        0.0,
        description="images: alpha of the Beta distribution of the area that is pasted from "
        "another image; 0: none. With mixup, a step draws one of both",
    )

    @property
    def preference(self) -> PreferenceLoss:
        """The block of the task dpo that is given, by default `dpo`."""
        return self.kto or self.orpo or self.simpo or self.dpo

    @property
    def preference_keys(self) -> list[str]:
        """The changed keys that only apply to preferences."""
        return [*filter(self.is_changed, ("dpo", "kto", "orpo", "simpo"))]

    @property
    def label_keys(self) -> list[str]:
        """The changed keys that only apply to images and tables."""
        return [*filter(self.is_changed, ("target", "class_weights", "focal", "mixup", "cutmix"))]

    @model_validator(mode="after")
    def _check_target(self) -> Loss:
        if len(self.preference_keys) > 1:
            raise ValueError(f"{' and '.join(self.preference_keys)} are both given; keep one")
        if self.focal and self.smoothing and self.target == "class":
            settings = f"focal = {self.focal:g} and smoothing = {self.smoothing:g}"
            raise ValueError(f"{settings} are both set; keep one")
        if self.target == "multi_label" and self.z:
            raise ValueError("z applies to a softmax, and target: multi_label has none")
        for key in ("z", "smoothing", "class_weights", "focal", "mixup", "cutmix"):
            if self.target == "regression" and self.is_changed(key):
                raise ValueError(f"{key} applies to classes, and target is regression")
        return self


DEFAULT_STEPS = 1000
# The value of compile_cache that lets the trainer choose the folder.
AUTO = "auto"


class Profile(Block):
    """Steps whose time is traced and split: products, attention, collectives, host.

    ```yaml
    train:
      task: lm
      profile: {at: 100, steps: 5}  # steps 101 to 105; at any time: launcher profile RUN
    ```
    """

    at: Natural | None = Field(
        None,
        description="steps that are complete when it begins",
        json_schema_extra=Unset("on demand alone", "null:"),
    )
    steps: Annotated[int, Field(ge=1, le=PROFILE_STEPS)] = Field(
        5, description="how many are traced"
    )


class OnNonfinite(Block):
    """The response to a loss or gradients that are not finite. Such a step changes nothing.

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

    # Built at once: a block that is built as part of a job has no serializer of its own.
    model_config = ConfigDict(defer_build=False)

    task: (
        Literal["classify", "lm", "dpo", "reward"] | Annotated[str, Field(pattern=USER_OBJECT)]
    ) = Field(description="a built-in task, or module:Class of your own task")
    model: Model = Field(
        MLP(), description="the model, by kind", json_schema_extra=Unset("the task's own")
    )
    data: Data = Field(
        Tfds(), description="the data, by source", json_schema_extra=Unset("the task's own")
    )
    mesh: Mesh = Field(Mesh(dp=-1), description="devices per mesh axis; default: all on dp")
    precision: Precision = Field("fp32", description="a named policy, or the dtype of each part")
    batch_norm: Literal["global", "device", "frozen"] = Field(
        "global",
        description="batch norm in resnet and in your own models. global: statistics of the whole "
        "micro-batch; device: of each device's part, with running statistics averaged over "
        "devices; frozen: the running statistics, which do not change",
    )
    remat: Remat = Field(
        "none", description="activation checkpointing; a list names the activations to save"
    )
    batch: Ids = Field(
        128, description="global batch: examples per step, over all devices and micro-batches"
    )
    accumulate: Wide = Field(1, description="gradient accumulation: micro-batches per step")
    steps: Steps | None = Field(
        None,
        description="optimizer steps; alternatively epochs",
        json_schema_extra=Unset(f"{DEFAULT_STEPS} steps"),
    )
    epochs: Positive | None = Field(
        None,
        description="passes over the training set, instead of steps",
        json_schema_extra=Unset("none: steps count"),
    )
    seed: Seed = Field(
        0,
        description="seed of the initial weights, the order of examples and a task's "
        "random numbers",
    )
    optimizer: Optimizer = Field(
        Optimizer(), description="the optimizer, by name, and its schedule"
    )
    lora: Lora | None = Field(
        None,
        description="adapters that are trained instead of the model",
        json_schema_extra=Unset("none", "null:"),
    )
    loss: Loss = Field(
        Loss(), description="terms added to the loss in training, and label smoothing"
    )
    eval: Eval = Field(Eval(), description="evaluation on the held-out set")
    checkpoint: Checkpoint = Field(Checkpoint(), description="where and how often to save")
    stop_early: StopEarly | None = Field(
        None,
        description="early stopping: end when evaluations no longer improve",
        json_schema_extra=Unset("never", "null:"),
    )
    attention: Literal["auto", "xla", "cudnn", "splash"] = Field(
        "auto",
        description="implementation; auto: cudnn or splash if devices, precision and sizes allow, "
        "else xla; the log says which",
    )
    compile_cache: Annotated[Place, Location(AUTO)] | None = Field(
        AUTO,
        description="XLA's compilation cache: folder or URL; auto: on the host, seeded from the "
        "run folder; null: none",
    )
    on_nonfinite: OnNonfinite = Field(
        OnNonfinite(), description="what to do when the loss or the gradients are not finite"
    )
    steps_per_dispatch: Many = Field(
        1, description="steps per dispatch to the device; more for tiny models"
    )
    profile: Profile = Field(Profile(), description="which steps are traced")
    log_every: Positive = Field(10, description="steps between two lines of metrics")

    @model_validator(mode="before")
    @classmethod
    def _fill_task_defaults(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        return merge_task_defaults(raw, TASK_DEFAULTS.get(str(raw.get("task")), {}))

    @field_validator("model")
    @classmethod
    def _fill_head(cls, model: Model, info: ValidationInfo) -> Model:
        head = TASK_HEADS.get(str(info.data.get("task")))
        if head is None or not isinstance(model, TransformersModel):
            return model
        if "head" in model.model_fields_set and model.head != head:
            raise ValueError(f"head = {model.head}, and the task needs {head}; leave it out")
        if info.data["task"] != REWARD:
            return model.model_copy(update={"head": head})
        if model.classes not in (None, 1):
            raise ValueError(f"classes = {model.classes}, and a reward is one number; leave it out")
        return model.model_copy(update={"head": head, "classes": 1})

    @field_validator("data")
    @classmethod
    def _check_data(cls, data: Data, info: ValidationInfo) -> Data:
        task = info.data.get("task")
        if task in (DPO, REWARD) and data.has_pairs is False:
            hint = "give source: text, format: preference"
            raise ValueError(f"has no pairs of texts, which {task} trains on; {hint}")
        if task == REWARD and isinstance(data, Text) and data.format != "preference":
            raise ValueError(f"format: {data.format} has no pairs; give format: preference")
        if task == LM and isinstance(data, Text) and data.has_pairs:
            rows = "texts with a label" if data.format == "kto" else "pairs of texts"
            raise ValueError(f"format: {data.format} has {rows}, which the task {DPO} trains on")
        has_labels = isinstance(data, Text) and data.format == LABEL_FORMAT
        if task in (LM, DPO) and has_labels:
            raise ValueError(f"format: {LABEL_FORMAT} has classes, which {CLASSIFY} trains on")
        if task == CLASSIFY and data.texts() and not has_labels:
            raise ValueError(f"has texts without a label; give format: {LABEL_FORMAT}")
        model = info.data.get("model")
        reads_texts = task == CLASSIFY and isinstance(model, TransformersModel)
        if reads_texts and not has_labels and not isinstance(data, Torch):
            hint = f"give source: text, format: {LABEL_FORMAT}"
            raise ValueError(f"has no labeled texts, which train.model reads; {hint}")
        return data

    @field_validator("batch")
    @classmethod
    def _check_batch(cls, batch: int, info: ValidationInfo) -> int:
        length = (model_sizes(info.data["model"]).length if "model" in info.data else None) or 1
        if batch * length > MAX_INT32:
            tokens = f"{batch * length} tokens a step at model.length = {length}"
            raise PredicateError(f"is {tokens}, and a device counts to {MAX_INT32}")
        return batch

    @field_validator("loss")
    @classmethod
    def _check_loss(cls, loss: Loss, info: ValidationInfo) -> Loss:
        task = info.data.get("task")
        _check_task_keys(str(task), loss, info.data.get("data"))
        batch, accumulate = info.data.get("batch"), info.data.get("accumulate")
        if loss.kto is not None and batch and accumulate and batch < 2 * accumulate:
            raise ValueError(
                f"kto needs the answers of other rows of a micro-batch, and batch = {batch} with "
                f"accumulate = {accumulate} leaves no other row; make batch at least "
                f"{2 * accumulate}, or accumulate smaller"
            )
        if isinstance(info.data.get("data"), Text) and task == CLASSIFY:
            for key in filter(loss.is_changed, ("mixup", "cutmix", "target")):
                raise ValueError(f"{key} does not apply to texts; leave it out")
        if task == CLASSIFY and loss.chunks != "auto":
            raise ValueError("chunks apply to tokens, not to images; leave it out")
        model = info.data.get("model")
        sizes = Sizes() if model is None else model_sizes(model)
        classes, length = sizes.classes, sizes.length
        if isinstance(model, CustomModel):
            classes = None
        fields = set() if model is None else model.model_fields_set
        if isinstance(model, PublishedModel) and model.is_partial and "length" not in fields:
            length = None
        count = len(loss.class_weights or ())
        if count and classes and count != classes:
            raise ValueError(f"class_weights has {count} numbers for model.classes = {classes}")
        if length is not None and loss.chunks != "auto" and length % loss.chunks:
            raise ValueError(f"chunks = {loss.chunks} does not divide model.length = {length}")
        return loss

    @field_validator("batch_norm")
    @classmethod
    def _check_batch_norm(cls, batch_norm: str, info: ValidationInfo) -> str:
        model = info.data.get("model")
        if batch_norm != "global" and not isinstance(model, CustomModel | ResNet | None):
            problem = f"train.model.kind = {model.kind} has no batch norm"
            raise ValueError(f"applies to resnet and your own models; {problem}")
        return batch_norm

    @field_validator("lora")
    @classmethod
    def _check_lora(cls, lora: Lora | None, info: ValidationInfo) -> Lora | None:
        model = info.data.get("model")
        if lora is None or model is None:
            return lora
        if isinstance(model, TransformersModel):
            if lora.base == "int8":
                raise ValueError("base: int8 applies to built-in models; use bf16")
            if model.weights == "random":
                raise ValueError("trains adapters of a folder's weights, and model.weights: random")
            if model.head != models.CAUSAL_LM:
                problem = f"and the head of train.model is {model.head}"
                raise ValueError(f"applies to causal_lm, {problem}; leave it out")
        elif not isinstance(model, Decoder | GPT2):
            kinds = "a decoder, gpt2 or transformers"
            raise ValueError(f"applies to {kinds}, and train.model.kind = {model.kind}")
        elif lora.module_keys and not model.is_partial:
            key, kind = lora.module_keys[0], model.kind
            raise ValueError(f"{key} needs train.model.kind = transformers, which is {kind}")
        return lora

    @field_validator("epochs")
    @classmethod
    def _check_epochs(cls, epochs: int | None, info: Any) -> int | None:
        if epochs is not None and info.data.get("steps") is not None:
            raise ValueError("steps and epochs are both set; keep one")
        return epochs

    @field_validator("optimizer")
    @classmethod
    def _check_optimizer(cls, optimizer: Optimizer, info: ValidationInfo) -> Optimizer:
        # With epochs, the number of steps is known only after the data has been read, and
        # trainer/optim/schedules checks the schedule.
        if "steps" in info.data and info.data.get("epochs") is None:
            optimizer.schedule.decay_steps(info.data["steps"] or DEFAULT_STEPS)
        return optimizer

    @field_validator("stop_early")
    @classmethod
    def _check_stop_early(cls, stop: StopEarly | None, info: ValidationInfo) -> StopEarly | None:
        if stop is not None and "eval" in info.data and info.data["eval"].every is None:
            raise PredicateError("needs evaluations during the run; set eval.every")
        return stop

    @field_validator("profile")
    @classmethod
    def _check_profile(cls, profile: Profile, info: ValidationInfo) -> Profile:
        steps = info.data.get("steps") or DEFAULT_STEPS
        counts_steps = info.data.get("epochs") is None
        if profile.at is not None and counts_steps and profile.at >= steps:
            raise ValueError(f"at = {profile.at} is not below the {steps} steps of the run")
        return profile

    def total_steps(self, examples: int) -> int:
        """Return the optimizer steps of the run for a training set of `examples`."""
        if self.epochs is not None:
            return -(-self.epochs * examples // self.batch)
        return self.steps or DEFAULT_STEPS


def _check_task_keys(task: str, loss: Loss, data: Data | None) -> None:
    """Raise ValueError for keys of the loss that do not apply to the task or the data."""
    if task == REWARD and (keys := [*filter(loss.is_changed, type(loss).model_fields)]):
        raise ValueError(f"{keys[0]} does not apply to the task {REWARD}; leave it out")
    if task in (LM, DPO) and loss.label_keys:
        raise ValueError(f"{loss.label_keys[0]} applies to images and tables, not to tokens")
    if task == DPO and (loss.z or loss.smoothing):
        hint = "preferences have label_smoothing in dpo and simpo"
        raise ValueError(f"z and smoothing apply to a cross-entropy; {hint}")
    if task in (LM, CLASSIFY) and loss.preference_keys:
        key = loss.preference_keys[0]
        raise ValueError(f"{key} applies to preferences, which the task {DPO} trains on")
    if task == DPO and isinstance(data, Text) and data.has_pairs:
        is_rated = data.format == "kto"
        if is_rated != (loss.kto is not None):
            if is_rated:
                hint = "set loss: {kto: {}}"
                raise ValueError(f"compares pairs, and data.format = kto has none; {hint}")
            hint = "give source: text, format: kto"
            raise ValueError(f"kto trains on texts with a label; {hint}")


# --- on fewer devices -----------------------------------------------------------------------------


def shrink_mesh(mesh: Mesh, devices: int, full_devices: int) -> Mesh:
    """Shrink a mesh of `full_devices` devices along dp, or else along fsdp. Raises ValueError."""
    sizes = dict(zip(MESH_AXES, mesh.resolve(full_devices), strict=True))
    for axis in ("dp", "fsdp"):
        other_devices = math.prod(size for name, size in sizes.items() if name != axis)
        if devices % other_devices == 0 and 0 < devices // other_devices <= sizes[axis]:
            return mesh.model_copy(update=sizes | {axis: devices // other_devices})
    problem = f"{format_axes(sizes)} does not shrink to {devices} devices"
    raise ValueError(f"{problem}: neither dp nor fsdp alone can")


def shrink_to_devices(spec: TrainSpec, devices: int, full_devices: int) -> TrainSpec:
    """Return the spec for fewer than `full_devices` devices, with the same global batch.

    The number of micro-batches grows, so that a device has no more rows at a time than before.
    Raises ValueError if the mesh or the batch cannot be divided.
    """
    if devices == full_devices:
        return spec
    mesh = shrink_mesh(spec.mesh, devices, full_devices)
    full_shards, shards = _batch_shards(spec.mesh, full_devices), _batch_shards(mesh, devices)
    problem = f"batch {spec.batch} cannot be divided evenly over {shards} devices"
    if spec.batch % shards:
        raise ValueError(f"{problem} instead of {full_shards}")
    rows_per_shard = spec.batch // shards
    max_count = rows_per_shard if spec.loss.kto is None else min(rows_per_shard, spec.batch // 2)
    counts = range(-(-spec.accumulate * full_shards // shards), max_count + 1)
    # Batch norm depends on the size of a micro-batch, which must not change.
    if isinstance(spec.model, CustomModel | ResNet):
        if spec.batch_norm == "device":
            problem = "batch_norm: device sees each device's part of the batch, which grows"
            raise ValueError(f"{problem}; use global or frozen")
        counts = range(spec.accumulate, spec.accumulate + 1)
    accumulate = next((count for count in counts if rows_per_shard % count == 0), None)
    if accumulate is None:
        hint = "" if spec.loss.kto is None else "; kto needs 2 rows in a micro-batch"
        raise ValueError(f"{problem} × accumulate {spec.accumulate}{hint}")
    return spec.model_copy(update={"mesh": mesh, "accumulate": accumulate})


def _batch_shards(mesh: Mesh, devices: int) -> int:
    return math.prod(mesh.resolve(devices)[: len(BATCH_AXES)])
