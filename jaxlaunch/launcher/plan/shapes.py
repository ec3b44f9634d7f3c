"""The shapes of a job's arrays, traced by the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlaunch import contract
from jaxlaunch.accelerators import KNOWN
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.local import trainer_process
from jaxlaunch.trainer.spec import TASK_DEFAULTS, Mesh, TrainSpec


def of(
    job: JobSpec,
    train: TrainSpec,
    base: Path,
    *,
    sharding: bool = False,
    compiled: bool = False,
    show: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """What `python -m jaxlaunch.trainer.plan` finds of a job's train block; its code and data are relative to `base`.

    `show` gets the progress of a compilation, line by line.

    Raises UserError with the trainer's own message where the training would not start.
    """
    flags = ["--sharding"] if sharding else []
    flags += ["--compile", chips(job)] if compiled else []
    known = KNOWN[job.accelerator.type]
    flags += ["--platform", known.platform, *(["--capability", known.capability] if known.capability else [])]
    copies = 1 if compiled else _copies(train, job.devices)
    hint = "the trainer says so of the train block, here."
    found = trainer_process.run(
        "jaxlaunch.trainer.plan",
        *flags,
        environ=environment(job, train, base, copies),
        hint=hint,
        show=None if show is None else _progress(show),
    )
    for name in ("flops_per_step", "causal_flops_per_step"):
        if found[name] is not None:
            found[name] *= copies
    return found


def _progress(show: Callable[[str], None]) -> Callable[[str], None]:
    """Shows the lines that say how far a compilation is, and leaves out what compilers log."""
    return lambda line: show(line) if line.startswith(contract.COMPILING) else None


def chips(job: JobSpec) -> str:
    """The job's devices, as trainer/aot/chips reads them."""
    kind = job.accelerator
    return json.dumps(
        {
            "type": kind.type,
            "hosts": job.host_count,
            "per_host": kind.per_host,
            "slices": job.slices,
            "topology": kind.topology,
        }
    )


def _copies(train: TrainSpec, devices: int) -> int:
    """How many equal parts dp makes: one is traced, because ten thousand virtual devices would take minutes.

    One, where the user's task may bring a mesh or a batch of its own.
    """
    if not (train.task in TASK_DEFAULTS or {"mesh", "batch"} <= train.model_fields_set):
        return 1
    return train.mesh.resolve(devices)[0]


def _one_copy(train: TrainSpec, devices: int, copies: int) -> TrainSpec:
    """The train block of one of the copies, on its part of the devices."""
    if copies == 1:
        return train
    _, fsdp, ep, mp = train.mesh.resolve(devices)
    return train.model_copy(update={"mesh": Mesh(fsdp=fsdp, ep=ep, mp=mp), "batch": train.batch // copies})


def environment(job: JobSpec, train: TrainSpec, base: Path, copies: int = 1) -> dict[str, str]:
    """That of the job, with as many virtual devices as one copy has."""
    one = _one_copy(train, job.devices, copies)
    return {**trainer_process.environ(job, one, base), contract.NUM_CPU_DEVICES: str(job.devices // copies)}
