"""What can be known to be wrong before the first compile, said before it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from trainer.errors import CheckpointError, DataError, SpecError
from trainer.spec import TrainSpec


def check_devices(spec: TrainSpec) -> None:
    """Raises SpecError when the mesh of the spec is not made of the devices that are here."""
    try:
        spec.mesh.resolve(jax.device_count())
    except ValueError as error:
        raise SpecError(f"train.mesh: {error} ({_devices_here()})") from None


def _devices_here() -> str:
    return f"{jax.process_count()} processes × {jax.local_device_count()} {jax.devices()[0].platform} devices"


def check_folder(path: str) -> None:
    """Raises SpecError when nothing can be written under `path`: hours later it would cost the run."""
    probe = epath.Path(path) / f".probe-{jax.process_index()}-{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise SpecError(f"train.checkpoint.path = {path} cannot be written: {error}") from None


def check_resumed(meta: Mapping[str, Any], now: Mapping[str, Any], path: str) -> None:
    """Raises when a checkpoint was made under other conditions than `now`: the steps would name other examples."""
    for key, value in now.items():
        then = meta.get(key)
        if then == value or then is None:
            continue
        text = f"{key} is {value}, but the checkpoints in {path} were made with {then}"
        if key == "data":
            raise DataError(f"the training data changed: {text}; restore the data, or start in another checkpoint.path")
        raise CheckpointError(
            f"{text}: resuming would not see each example once; keep it, or use another checkpoint.path"
        )


def check_profile(spec: TrainSpec, total_steps: int) -> None:
    """Raises SpecError when the run ends before its profile begins; with epochs only the data tell how long it is."""
    if spec.profile.at is not None and spec.profile.at >= total_steps:
        raise SpecError(f"train.profile.at = {spec.profile.at} is not below the {total_steps} steps of the run")
