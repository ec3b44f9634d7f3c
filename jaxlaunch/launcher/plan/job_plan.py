"""The plan of a job: its request, the memory of its devices, and what it asks of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from jaxlaunch.accelerators import ACCELERATORS
from jaxlaunch.launcher.errors import JobFaultsError, UserError
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.job.load import JobFile, JobSpec
from jaxlaunch.launcher.job.request import JobRequest, summarize_job
from jaxlaunch.launcher.local import trainer_process
from jaxlaunch.launcher.manifests.jobset import ResolvedJob, prepare, resolve
from jaxlaunch.launcher.plan import estimate
from jaxlaunch.launcher.plan.estimate import ClusterRequests, PodSecurity
from jaxlaunch.launcher.plan.notes import list_notes
from jaxlaunch.launcher.wording import format_count
from jaxlaunch.trainer.spec import GPT2, Decoder, TrainSpec

HOUR_S = 3600.0


class ClusterPlan(TypedDict):
    """Requests of a job to a cluster. All but the notes is null if no cluster could run it."""

    cluster: ClusterRequests | None
    pod_security: PodSecurity | None
    # Who can connect to the pods.
    ingress: str | None
    notes: list[str]


class JobPlan(JobRequest, ClusterPlan):
    """The plan of a job."""

    # Null for a `command`, and if the trainer is not installed.
    memory: Mapping[str, Any] | None


def plan_job(
    file: JobFile,
    cluster_defaults: ClusterDefaults,
    *,
    requires_cluster: bool = False,
    lists_sharding: bool = False,
    is_compiled: bool = False,
    price: float | None = None,
    show: Callable[[str], None],
) -> JobPlan:
    """Return the plan of a job. No cluster is contacted.

    Args:
        file: The job.
        cluster_defaults: The defaults of the cluster.
        requires_cluster: Whether a fault that only a cluster has is an error, and not a note.
        lists_sharding: Whether each parameter is listed.
        is_compiled: Whether the compiler of the job's devices compiles the steps.
        price: The price of one chip or GPU per hour, for compiled steps.
        show: Called with the messages of the compilation.
    """
    job = resolve(file.spec, cluster_defaults)
    cluster_plan = _plan_cluster(job, file, cluster_defaults, requires_cluster)
    shapes = _trace_shapes(
        job.spec, file.folder, lists_sharding=lists_sharding, is_compiled=is_compiled, show=show
    )
    memory = None
    if shapes is not None and job.spec.train is not None:
        memory = _plan_memory(job, job.spec.train, shapes, file.folder)
        if is_compiled:
            _add_rates(job.spec, job.spec.train, shapes["compiled"], price)
    return {**summarize_job(job.spec), "memory": memory, **cluster_plan}


def fits_devices(plan: JobPlan) -> bool:
    """Return whether the training fits its devices, as far as that is known."""
    memory = plan["memory"]
    if memory is None:
        return True
    return bool(memory["compiled"]["fits"] if "compiled" in memory else memory["fits"] is not False)


def _plan_cluster(
    job: ResolvedJob, file: JobFile, cluster_defaults: ClusterDefaults, is_required: bool
) -> ClusterPlan:
    """Return the job's requests to a cluster, or notes on why a cluster could not run it."""
    try:
        jobset = prepare(file, cluster_defaults).manifests[0]
    except UserError as error:
        if is_required:
            raise
        faults = error.faults if isinstance(error, JobFaultsError) else (error,)
        notes = [f"on a cluster: {' '.join(str(fault).split())}" for fault in faults]
        return {"cluster": None, "pod_security": None, "ingress": None, "notes": notes}
    return {
        "cluster": estimate.cluster_requests(job, jobset),
        "pod_security": estimate.security_level(jobset),
        "ingress": estimate.describe_ingress(job),
        "notes": list(list_notes(job)),
    }


def _trace_shapes(
    job: JobSpec,
    job_folder: Path,
    *,
    lists_sharding: bool,
    is_compiled: bool,
    show: Callable[[str], None],
) -> dict[str, Any] | None:
    """Return the traced shapes, or None for a command or if the trainer is not installed."""
    if job.train is None or not trainer_process.is_installed():
        if lists_sharding or is_compiled:
            if job.train is None:
                raise UserError("--sharding and --compile: a command's arrays are its own.")
            trainer_process.require_trainer("--sharding and --compile")
        return None
    if is_compiled:
        devices = format_count(job.devices, "device")
        show(f"compiling for {devices} of {job.accelerator.type}")
    return estimate.trace_shapes(
        job,
        job.train,
        job_folder,
        sharding=lists_sharding,
        compiled=is_compiled,
        show=show if is_compiled else None,
    )


def _plan_memory(
    job: ResolvedJob, train: TrainSpec, shapes: Mapping[str, Any], job_folder: Path
) -> dict[str, Any]:
    verdict = estimate.judge_memory(job.spec, train, shapes, job.nodes.labels)
    room = estimate.checkpoint_room(job, job_folder)
    checkpoints = estimate.checkpoint_sizes(train, room.folder, shapes)
    return {
        **shapes,
        "together": list(estimate.peak_bytes(shapes)),
        "fits": verdict.fits,
        "says": verdict.text,
        "hint": verdict.hint,
        "checkpoints": checkpoints | {"room": room.bytes, "room_says": room.text},
    }


def _add_rates(
    job: JobSpec, train: TrainSpec, compiled: dict[str, Any], price: float | None
) -> None:
    """Add throughput, MFU, time to the end and cost, computed from the modelled step time.

    `price` is the price of one chip or GPU per hour.
    """
    if (modelled := compiled.get("modelled")) is None:
        return
    low, high = modelled["seconds"]
    modelled["examples_per_second"] = [train.batch / high, train.batch / low]
    if isinstance(train.model, Decoder | GPT2):
        tokens = train.batch * train.model.length
        modelled["tokens_per_second"] = [tokens / high, tokens / low]
    peak = ACCELERATORS[job.accelerator.type].peak_flops
    if peak is not None and compiled["model_flops"]:
        ideal_s = compiled["model_flops"] / job.devices / peak
        modelled["mfu"] = [ideal_s / high, ideal_s / low]
    if train.epochs is None:
        times_s = modelled["seconds_to_end"] = [low * train.steps, high * train.steps]
        if price is not None:
            hourly_price = price * job.host_count * job.accelerator.per_host
            modelled["price"] = [time_s / HOUR_S * hourly_price for time_s in times_s]
