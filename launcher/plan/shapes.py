"""Asks the trainer what a job's arrays would be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from launcher import ask
from launcher.job import JobSpec
from trainer import contract
from trainer.spec import TASK_DEFAULTS, Mesh, TrainSpec


def of(job: JobSpec, base: Path, *, sharding: bool = False, compiled: bool = False) -> dict[str, Any]:
    """What `python -m trainer.plan` finds of a job's train block; its code and data are relative to `base`.

    Raises UserError with the trainer's own words where the training would not start.
    """
    assert job.train is not None, "a command's arrays are its own"
    flags = [flag for flag, is_asked in (("--sharding", sharding), ("--compile", compiled)) if is_asked]
    copies = 1 if compiled else _copies(job)
    hint = "the trainer says so of the train block, here."
    found = ask.the_trainer("trainer.plan", *flags, environ=_environment(job, base, copies), hint=hint)
    for name in ("flops_per_step", "causal_flops_per_step"):
        if found[name] is not None:
            found[name] *= copies
    return found


def _copies(job: JobSpec) -> int:
    """How many equal parts dp makes: one says it all, and ten thousand virtual devices would take minutes.

    One, where the user's task may bring a mesh or a batch of its own.
    """
    train = job.train
    if train is None or not (train.task in TASK_DEFAULTS or {"mesh", "batch"} <= train.model_fields_set):
        return 1
    return train.mesh.resolve(job.devices)[0]


def _one_copy(train: TrainSpec, devices: int, copies: int) -> TrainSpec:
    """The train block of one of the copies, on its part of the devices."""
    if copies == 1:
        return train
    _, fsdp, mp = train.mesh.resolve(devices)
    return train.model_copy(update={"mesh": Mesh(fsdp=fsdp, mp=mp), "batch": train.batch // copies})


def _environment(job: JobSpec, base: Path, copies: int) -> dict[str, str]:
    """The job's own variables, its code, and as many virtual devices as one copy has."""
    code = [str(base / job.code)] if job.code else []
    path = os.pathsep.join(filter(None, (*code, os.environ.get("PYTHONPATH"))))
    assert job.train is not None
    return {
        **os.environ,
        **job.env,
        **({"PYTHONPATH": path} if path else {}),
        "JAX_PLATFORMS": "cpu",
        contract.NUM_CPU_DEVICES: str(job.devices // copies),
        contract.TRAIN_SPEC: _one_copy(job.train, job.devices, copies).model_dump_json(exclude_unset=True),
    }
