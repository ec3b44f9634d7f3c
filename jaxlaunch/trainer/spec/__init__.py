"""The train block of job.yaml: its keys, their types and defaults. Never imports jax."""

# ruff: noqa: F401  # re-exports

from jaxlaunch.trainer.spec.block import (
    Block,
    Few,
    Natural,
    Place,
    Positive,
    at_most,
    check_bucket_url,
)
from jaxlaunch.trainer.spec.data import (
    SOURCES,
    ArrayRecord,
    Data,
    ImageData,
    Images,
    Mixture,
    Part,
    Source,
    Synthetic,
    Table,
    Text,
    Tfds,
    Torch,
)
from jaxlaunch.trainer.spec.model import (
    GPT2,
    MLP,
    ConvNeXt,
    CustomModel,
    Decoder,
    ImageModel,
    Model,
    ResNet,
    RopeScaling,
    ViT,
    model_sizes,
)
from jaxlaunch.trainer.spec.optimizer import OPTIMIZERS, Optimizer, Schedule
from jaxlaunch.trainer.spec.presets import PublishedModel
from jaxlaunch.trainer.spec.train import (
    AUTO,
    CLASSIFY,
    DEFAULT_STEPS,
    DPO,
    EVAL_PREFIX,
    LM,
    TASK_DEFAULTS,
    TASKS,
    Best,
    Checkpoint,
    Dpo,
    Eval,
    Lora,
    Loss,
    Mesh,
    OnNonfinite,
    Policy,
    Precision,
    Profile,
    Remat,
    Samples,
    StopEarly,
    TrainSpec,
    WatchedMetric,
    format_axes,
    merge_defaults,
    merge_task_defaults,
    shrink_mesh,
    shrink_to_devices,
)
