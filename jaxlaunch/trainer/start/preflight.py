"""Checks that run before the first compilation, for errors that would otherwise appear later."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from jaxlaunch import contract
from jaxlaunch.accelerators import OLDEST_DRIVER
from jaxlaunch.contract import AgentJob
from jaxlaunch.records import codec
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data.source import changed_arguments
from jaxlaunch.trainer.errors import CheckpointError, DataError, SpecError
from jaxlaunch.trainer.spec import AUTO, EVAL_PREFIX, TrainSpec

# Number of differing keys that a message lists.
MAX_SHOWN_KEYS = 3
# The value in cuda.h.
CUDA_ERROR_NO_DEVICE = 100
# The version of the node's kernel module, which every container sees.
DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")


def check_driver(environ: Mapping[str, str] = os.environ) -> None:
    """Raise SpecError if the driver is too old or has fewer GPUs than the job requests.

    Run it before the processes join: while they join, all hosts would wait for the topology of a
    host without GPUs.
    """
    job = _read_agent_job(environ)
    if job is None or job.platform != "cuda":
        return
    _check_cuda()
    # If several processes share the GPUs of this host, the driver counts all of them.
    processes = job.processes_per_host if environ.get(contract.LOCAL_DEVICE_IDS) else 1
    gpus = _count_gpus()
    if gpus is not None and gpus < job.devices_per_process * processes:
        raise SpecError(_device_mismatch(job, "GPU", gpus))


def _check_cuda() -> None:
    """Raise SpecError if JAX is installed for a newer CUDA than the driver supports."""
    installed, supported = _installed_cuda(), _supported_cuda()
    if not installed or supported is None or min(installed) <= supported[0]:
        return
    # JAX's error names neither version.
    cuda, alternative = min(installed), ""
    if usable_versions := [version for version in OLDEST_DRIVER if version <= supported[0]]:
        alternative = f"use an image with the extra cuda{max(usable_versions)} of jaxlaunch, or "
    text = DRIVER_VERSION_FILE.read_text() if DRIVER_VERSION_FILE.exists() else ""
    version = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", text)
    driver = f"driver {version[1]}" if version else "the driver"
    raise SpecError(
        f"{driver} on this machine ({socket.gethostname()}) is too old for CUDA {cuda}: it runs "
        f"CUDA {supported[0]}.{supported[1]} at most, and the extra cuda{cuda} needs driver "
        f"{OLDEST_DRIVER[cuda]} or newer; {alternative}update the driver of the nodes"
    )


def _installed_cuda() -> list[int]:
    return [cuda for cuda in OLDEST_DRIVER if importlib.util.find_spec(f"jax_cuda{cuda}_plugin")]


def _supported_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA, (major, minor), that the installed libcuda supports."""
    version = ctypes.c_int()
    driver = _load_libcuda()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def check_name(environ: Mapping[str, str] = os.environ) -> None:
    """Raise SpecError if the name of this host prevents JAX from connecting its CPU devices."""
    job = _read_agent_job(environ)
    is_gloo = getattr(jax.config, "jax_cpu_collectives_implementation", None) == "gloo"
    if job is None or job.platform != "cpu" or not is_gloo:
        return
    if (fault := contract.host_name_fault(environ.get(contract.COORDINATOR, ""))) is not None:
        raise SpecError(fault)


def check_devices(environ: Mapping[str, str] = os.environ) -> None:
    """Raise SpecError if the platform or the number of JAX's local devices is not the job's.

    JAX silently falls back to the CPU if it finds no accelerator. Without an agent there is no job,
    and nothing is checked.
    """
    job = _read_agent_job(environ)
    if job is None:
        return
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        # JAX_PLATFORMS names a platform that is not available.
        message = next(iter(str(error).splitlines()), type(error).__name__)
        raise SpecError(f"{_device_mismatch(job, job.platform, 0)}. JAX says: {message}") from None
    platform = {"gpu": "cuda"}.get(devices[0].platform, devices[0].platform)
    if platform != job.platform or len(devices) != job.devices_per_process:
        raise SpecError(_device_mismatch(job, platform, len(devices)))


def _read_agent_job(environ: Mapping[str, str]) -> AgentJob | None:
    text = environ.get(contract.JOB)
    return codec.read_record(AgentJob, codec.parse_record(text)) if text else None


def _device_mismatch(job: AgentJob, platform: str, device_count: int) -> str:
    requested, owner = _format_count(job.devices_per_process, job.platform), "this machine"
    if job.processes_per_host > 1:
        requested, owner = f"{requested} in each process", "this process"
    comparison = (
        f"the job asks for {requested}, {owner} ({socket.gethostname()}) has "
        f"{_format_count(device_count, platform)}"
    )
    if platform == job.platform and device_count > job.devices_per_process:
        return (
            f"{comparison}: set accelerator.per_host, or show JAX fewer (CUDA_VISIBLE_DEVICES, "
            "TPU_VISIBLE_DEVICES)"
        )
    if job.platform == "cpu":
        return (
            f"{comparison}: leave {contract.NUM_CPU_DEVICES}, JAX_PLATFORMS and XLA_FLAGS to "
            "the launcher"
        )
    extra = {"cuda": "cuda13", "tpu": "tpu"}[job.platform]
    return (
        f"{comparison}: run it where they are, with driver and the extra {extra} of jaxlaunch, or "
        "with accelerator.per_host as here; `launcher run --simulate` uses CPU devices in their "
        "place"
    )


def _format_count(number: int, platform: str) -> str:
    names = {"cuda": "GPU", "GPU": "GPU", "tpu": "TPU device", "cpu": "CPU device"}
    name = names.get(platform, f"{platform} device")
    return f"{number} {name}{'' if number == 1 else 's'}"


def _count_gpus() -> int | None:
    """Return the number of visible GPUs, without starting JAX's backends; None if unknown."""
    driver = _load_libcuda()
    if driver is None:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) == CUDA_ERROR_NO_DEVICE:
        return 0
    return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else None


def _load_libcuda() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def check_mesh(spec: TrainSpec) -> None:
    """Raise SpecError if the mesh of the spec does not match the devices of the run."""
    try:
        spec.mesh.resolve(jax.device_count())
    except ValueError as error:
        raise SpecError(f"train.mesh: {error}") from None


def check_cache(spec: TrainSpec) -> None:
    """Raise SpecError if the folder of the compilation cache is a file; JAX would only warn."""
    path = spec.compile_cache
    if path in (None, AUTO):
        return
    if remote.is_remote(path):
        # JAX continues without a cache that it cannot reach, so only the URL is checked.
        remote.check_url("train.compile_cache", path)
        return
    folder = epath.Path(path)
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"train.compile_cache = {path} is a file, not a folder")


def check_resumed(saved_meta: Mapping[str, Any], conditions: Mapping[str, Any], path: str) -> None:
    """Raise DataError or CheckpointError if a resumed run would repeat or skip examples.

    `conditions` are the values of this run that must be equal in the checkpoint's meta.
    """
    for key, value in conditions.items():
        saved_value = saved_meta.get(key)
        if saved_value == value or saved_value is None:
            continue
        text = (
            f"{key} is {_format_value(value)}, but the checkpoints in {path} were made with "
            f"{_format_value(saved_value)}"
        )
        if key == "data":
            arguments = changed_arguments(saved_value, value)
            keys = ", ".join(f"train.data.args.{name}" for name in arguments)
            raise DataError(
                f"the training data changed{f' ({keys})' if keys else ''}: {text}; restore the "
                "data, or start in another checkpoint.path"
            )
        raise CheckpointError(
            f"{text}: resuming would not see each example once; keep it, or use another "
            "checkpoint.path"
        )


def check_watched_metrics(spec: TrainSpec, metrics: Collection[str] | None) -> None:
    """Raise SpecError if `checkpoint.best` or `stop_early` names a metric that does not exist.

    `metrics` are the metrics of an evaluation, or None if there is no evaluation.
    """
    watches = ("checkpoint.best", spec.checkpoint.best), ("stop_early", spec.stop_early)
    for key, watched in watches:
        if watched is None:
            continue
        setting = f"train.{key}.metric = {watched.metric}"
        if metrics is None:
            raise SpecError(
                f"{setting}, but the training has no held-out data to evaluate; leave "
                f"train.{key} out"
            )
        if watched.metric.removeprefix(EVAL_PREFIX) not in metrics:
            available = ", ".join(f"{EVAL_PREFIX}{name}" for name in sorted(metrics))
            raise SpecError(f"{setting} is not evaluated by {spec.task}; use {available}")


def check_profile(spec: TrainSpec, total_steps: int) -> None:
    """Raise SpecError if the run ends before its profile begins.

    The schema cannot check this, because the steps of an epoch depend on the data.
    """
    if spec.profile.at is not None and spec.profile.at >= total_steps:
        raise SpecError(
            f"train.profile.at = {spec.profile.at} is not below the {total_steps} steps of the run"
        )


def check_length(spec: TrainSpec, total_steps: int, start: int, path: str) -> None:
    """Raise SpecError if the run has fewer steps than the checkpoint in `path`, `start`."""
    if start <= total_steps:
        return
    setting, key = f"train.steps = {total_steps}", "steps"
    if spec.epochs is not None:
        setting, key = f"train.epochs = {spec.epochs} is {total_steps} steps", "epochs"
    raise SpecError(
        f"{setting}; step {start} is already saved in {path}. Raise train.{key}, or set "
        "checkpoint.path to a new folder"
    )


def check_finished(spec: TrainSpec, differing: Sequence[tuple[str, str, str]], step: int) -> None:
    """Raise SpecError if a run that finished at `step` was another training.

    `differing` are the keys of the job that differ: (key, saved value, current value).
    """
    if not differing:
        return
    shown = differing[:MAX_SHOWN_KEYS]
    saved_keys = ", ".join(f"{key} = {saved}" for key, saved, _ in shown)
    current_keys = ", ".join(current for _, _, current in shown)
    more = len(differing) - MAX_SHOWN_KEYS
    more_note = f" ({more} more keys differ)" if more > 0 else ""
    length_key = "steps" if spec.epochs is None else "epochs"
    raise SpecError(
        f"finished at step {step} with {saved_keys}; this job says {current_keys}{more_note}: use "
        f"another name, or raise train.{length_key} to continue"
    )


def describe_changes(saved_meta: Mapping[str, Any], current_meta: Mapping[str, Any]) -> str:
    """Name the keys of a job by which its state has other arrays than that of a checkpoint.

    The result is "" if there are none. `saved_meta` has defaults for keys that did not exist when
    the checkpoint was saved.
    """
    saved, current = saved_meta.get("optimizer") or {}, current_meta["optimizer"]
    if saved and saved["name"] != current["name"]:
        return f"was trained with {saved['name']}, the job says {current['name']}"
    differences = _optimizer_changes(saved, current) if saved else []
    differences += _adapter_changes(saved_meta.get("lora"), current_meta.get("lora"))
    saved, current = saved_meta.get("model") or {}, current_meta["model"]
    if saved:
        # With another kind of model, the other keys differ anyway.
        is_same_kind = saved.get("kind") == current["kind"]
        keys = [key for key in current if key != "init_from"] if is_same_kind else ["kind"]
        for key in keys:
            if saved.get(key, current[key]) != current[key]:
                differences.append(_describe_change(f"model.{key}", saved.get(key), current[key]))
    saved, current = saved_meta.get("precision"), current_meta["precision"]
    if "precision" in saved_meta and saved != current:
        differences.append(_describe_change("precision", saved, current))
    return ", ".join(differences[:3])


def _describe_change(key: str, saved: Any, current: Any) -> str:
    return f"train.{key} was {_format_value(saved)}, the job says {_format_value(current)}"


def _optimizer_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    differences = []
    for key in ("ema", "clip", "momentum", "chain", "groups"):
        old, new = saved.get(key), current[key]
        if key in ("chain", "groups"):
            old = old or []
            is_changed = old != new
        else:
            is_changed = bool(old) != bool(new)
        if is_changed:
            differences.append(_describe_change(f"optimizer.{key}", old, new))
    return differences


def _adapter_changes(
    saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None
) -> list[str]:
    if saved is None or current is None:
        if saved is current:
            return []
        forms = ["null" if adapters is None else "given" for adapters in (saved, current)]
        return [_describe_change("lora", *forms)]
    return [
        _describe_change(f"lora.{key}", saved[key], current[key])
        for key in ("rank", "targets", "dora", "rank_pattern", "modules_to_save")
        if saved.get(key, current[key]) != current[key]
    ]


def _format_value(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
