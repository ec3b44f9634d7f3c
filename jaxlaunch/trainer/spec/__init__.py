"""The train block of job.yaml: its keys, their types and defaults, a file for each block. Never imports jax."""

from jaxlaunch.trainer.spec.block import Block, Few, Natural, Place, Positive, at_most, in_bucket
from jaxlaunch.trainer.spec.checkpoint import Best, Checkpoint
from jaxlaunch.trainer.spec.data import (
    ArrayRecord,
    Data,
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
from jaxlaunch.trainer.spec.evaluation import EVAL, Eval, Samples, StopEarly, Watched
from jaxlaunch.trainer.spec.lora import Lora
from jaxlaunch.trainer.spec.loss import Dpo, Loss
from jaxlaunch.trainer.spec.mesh import Mesh, said
from jaxlaunch.trainer.spec.model import GPT2, MLP, CustomModel, Decoder, Model, RopeScaling, model_sizes
from jaxlaunch.trainer.spec.optimizer import OPTIMIZERS, Optimizer, Schedule
from jaxlaunch.trainer.spec.precision import Policy, Precision, Remat
from jaxlaunch.trainer.spec.presets import Published
from jaxlaunch.trainer.spec.tasks import CLASSIFY, DPO, LM, TASK_DEFAULTS, TASKS, over_task, with_defaults
from jaxlaunch.trainer.spec.train import AUTO, DEFAULT_STEPS, OnNonfinite, Profile, TrainSpec, mesh_on, on_devices
from jaxlaunch.trainer.spec.vision.models import ConvNeXt, OfImages, ResNet, ViT

__all__ = [
    "AUTO",
    "ArrayRecord",
    "Best",
    "Block",
    "CLASSIFY",
    "Checkpoint",
    "ConvNeXt",
    "CustomModel",
    "DEFAULT_STEPS",
    "DPO",
    "Data",
    "Decoder",
    "Dpo",
    "EVAL",
    "Eval",
    "Few",
    "GPT2",
    "Images",
    "LM",
    "Lora",
    "Loss",
    "MLP",
    "Mesh",
    "Mixture",
    "Model",
    "Natural",
    "OPTIMIZERS",
    "OfImages",
    "OnNonfinite",
    "Optimizer",
    "Part",
    "Place",
    "Policy",
    "Positive",
    "Precision",
    "Profile",
    "Published",
    "Remat",
    "ResNet",
    "RopeScaling",
    "Samples",
    "Schedule",
    "Source",
    "StopEarly",
    "Synthetic",
    "TASKS",
    "TASK_DEFAULTS",
    "Table",
    "Text",
    "Tfds",
    "Torch",
    "TrainSpec",
    "ViT",
    "Watched",
    "at_most",
    "in_bucket",
    "over_task",
    "said",
    "with_defaults",
    "mesh_on",
    "model_sizes",
    "on_devices",
]
