"""Checks across the keys of a job. Pure: no cluster is read.

A check lists the keys that it reads and is skipped if one of them already has a fault, so that one
mistake is reported once. A check that lists no keys examines the entries of a list or a mapping,
from which invalid entries have been removed before it runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from jaxlaunch import accelerators, contract
from jaxlaunch.accelerators import ACCELERATORS, GPU_PLATFORMS
from jaxlaunch.contract import BATCH_AXES, MESH_AXES
from jaxlaunch.launcher.errors import Fault, KeyPath, keys_overlap
from jaxlaunch.launcher.job.schema import MAX_PODS, JobSpec, Network
from jaxlaunch.launcher.job.types import Bucket, Ephemeral
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER, REPLICATED_JOB, RESERVED_DOMAINS
from jaxlaunch.launcher.kubernetes.resources import parse_quantity
from jaxlaunch.launcher.platforms.names import NO_BACKEND, RESOURCE_DOMAINS
from jaxlaunch.launcher.platforms.table import PLATFORM_OF_NETWORK, RESOURCE_NAMES
from jaxlaunch.launcher.wording import format_count, format_key_path, join_choices, shorten_text
from jaxlaunch.trainer.spec import (
    TASK_DEFAULTS,
    TASKS,
    CustomModel,
    Decoder,
    PublishedModel,
    TrainSpec,
    format_axes,
)

MESH: KeyPath = ("train", "mesh")
# Sizes of a built-in model that mp splits, as in the table of trainer/parallel/sharding.
SPLIT_BY_MP = {
    "mlp": ("width",),
    "decoder": ("heads", "kv_heads", "hidden", "expert_hidden", "vocab"),
    "gpt2": ("heads", "hidden", "vocab"),
    "vit": ("heads", "hidden"),
}

_MAX_SHOWN_DIVISORS = 9
# Above this number of devices, only the mesh itself checks that the rows of a process are
# contiguous.
_MAX_SIMULATED_DEVICES = 2**14
# The length of a DNS label.
MAX_NAME_CHARS = 63
# Linux's MAX_ARG_STRLEN limits `NAME=value`, and an argument, including the terminating zero.
MAX_VARIABLE_BYTES = 128 * 1024
# The Job controller appends five random characters to the name of a pod.
_POD_NAME_SUFFIX = "-abcde"

# Variables that the launcher sets, in addition to those that begin with JAXLAUNCH_.
_CONTRACT_VARIABLES = {
    contract.INDEX,
    contract.TRAIN_SPEC,
    contract.COORDINATOR,
    contract.COORDINATOR_BIND,
    contract.NUM_PROCESSES,
    contract.PROCESS_ID,
    contract.LOCAL_DEVICE_IDS,
    contract.NUM_CPU_DEVICES,
}

_DEVICES: tuple[KeyPath, ...] = (("hosts",), ("slices",), ("accelerator",))
_LAYOUT: tuple[KeyPath, ...] = (*_DEVICES, ("train", "mesh"))
_Check = Callable[[JobSpec], Iterator[Fault]]
_CHECKS: list[tuple[tuple[KeyPath, ...], _Check]] = []


def _register_check(*keys: KeyPath) -> Callable[[_Check], _Check]:
    """Register a check of a job, which is skipped if one of these keys has a fault."""

    def register(check: _Check) -> _Check:
        _CHECKS.append((keys, check))
        return check

    return register


def find_faults(job: JobSpec, broken_paths: Collection[KeyPath]) -> Iterator[Fault]:
    """Yield the faults of all checks that read no broken key."""
    for keys, check in _CHECKS:
        if not any(keys_overlap(path, key) for path in broken_paths for key in keys):
            for fault in check(job):
                yield dataclasses.replace(fault, related_paths=keys)


def is_contract_variable(name: str) -> bool:
    """Return whether the launcher sets this environment variable in every pod."""
    return name in _CONTRACT_VARIABLES or name.startswith("JAXLAUNCH_")


# --- names, devices, processes --------------------------------------------------------------------


@_register_check(("name",), ("hosts",), ("slices",))
def _name_faults(job: JobSpec) -> Iterator[Fault]:
    pod_name = f"{job.name}-{REPLICATED_JOB}-{job.slices - 1}-{job.pods - 1}{_POD_NAME_SUFFIX}"
    if len(pod_name) > MAX_NAME_CHARS:
        message = (
            f"name has {len(job.name)} characters, a pod's name with it {len(pod_name)}; the "
            f"limit is {MAX_NAME_CHARS}."
        )
        hint = f"use at most {MAX_NAME_CHARS - len(pod_name) + len(job.name)} characters."
        yield Fault(("name",), message, hint)


@_register_check(*_DEVICES)
def _pod_count_faults(job: JobSpec) -> Iterator[Fault]:
    """Refuse more pods than an indexed Job supports. `hosts` alone is limited by its type."""
    if job.pod_count > MAX_PODS:
        shape = f"{format_count(job.slices, 'slice')} of {format_count(job.pods, 'host')}"
        message = f"{shape} are {job.pod_count} pods, and {MAX_PODS} is the most that is supported."
        yield Fault(("hosts",), message)


# Exit codes of a shell that cannot start a command.
_SHELL_CODES = {126: "the command is not executable", 127: "the command is not found"}


@_register_check(("restarts", "codes"))
def _requeue_code_faults(job: JobSpec) -> Iterator[Fault]:
    """Refuse exit codes that already have a meaning, for the agents or for a shell."""
    meanings = {code: f"`{row.cause}`: {row.meaning}" for code, row in contract.OUTCOMES.items()}
    meanings[contract.LEFT_GANG] = "`SIGTERM`: the process was told to stop"
    meanings |= _SHELL_CODES
    for code, value in job.restarts.codes.items():
        if (meaning := meanings.get(int(code))) is not None:
            message = f"restarts.codes.{code} = {value}: {code} already means {meaning}."
            free_code = "42" if "42" not in job.restarts.codes else "43"
            hint = f"let the program end with another code, such as {free_code}."
            yield Fault(("restarts", "codes", code), message, hint)


@_register_check(*_DEVICES, ("spares",), ("restarts",))
def _elastic_faults(job: JobSpec) -> Iterator[Fault]:
    """Check hosts.min and spares, which need hosts that are replaced one by one."""
    min_path: KeyPath = ("hosts", "min")
    if job.min_hosts > job.hosts:
        message = f"hosts.min = {job.min_hosts} is above hosts.max = {job.hosts}."
        yield Fault(min_path, message, "swap them.")
    settings: dict[KeyPath, int] = {min_path: job.min_hosts} if job.is_elastic else {}
    if job.spares:
        settings[("spares",)] = job.spares
    for path, number in settings.items():
        setting = f"{format_key_path(path)} = {number}"
        kind = job.accelerator.type
        if job.accelerator.platform == "tpu":
            message = f"{setting} does not apply to {kind}: a TPU slice is lost as a whole."
            yield Fault(path, message, "leave it out: the JobSet makes all pods again.")
        elif job.slices > 1:
            reason = "each is a Job whose hosts no other can replace."
            message = f"{setting} does not apply to {job.slices} slices: {reason}"
            yield Fault(path, message, "use one slice, or leave it out.")
        elif not job.replaces_hosts:
            limits = f"restarts: {{crash: {job.restarts.crash}, in_place: {job.restarts.in_place}}}"
            message = f"{setting} needs several hosts that are replaced one by one; the job has "
            hint = "set hosts to 2 or more, and both limits to 1 or more."
            yield Fault(path, f"{message}{format_count(job.hosts, 'host')} and {limits}.", hint)
    if job.is_elastic and job.train is None:
        reason = "is of train: jobs: the mesh of a program is its own."
        hint = "leave it out; spares are for any program."
        yield Fault(min_path, f"hosts.min = {job.min_hosts} {reason}", hint)


@_register_check(*_LAYOUT, ("train", "batch"), ("train", "accumulate"), ("train", "model"))
def _min_hosts_faults(job: JobSpec) -> Iterator[Fault]:
    """Check that mesh and batch also divide over the smallest number of hosts."""
    if not job.is_elastic or job.train is None or not mesh_fits(job):
        return
    try:
        job.train_on_hosts(job.min_hosts)
    except ValueError as error:
        hint = "use another batch or mesh, or one number."
        if sizes := [size for size in job.trainable_host_counts if size < job.hosts]:
            hint = f"use {join_choices(sizes)}, or another batch or mesh."
        yield Fault(("hosts", "min"), f"hosts.min = {job.min_hosts}: {error}.", hint)


@_register_check(("hosts",), ("accelerator",))
def _topology_faults(job: JobSpec) -> Iterator[Fault]:
    kind, topology = job.accelerator.type, job.accelerator.topology
    path: KeyPath = ("accelerator", "topology")
    setting = f"accelerator.topology = {shorten_text(topology or '')}"
    facts = ACCELERATORS[kind]
    if facts.platform != "tpu":
        if topology is not None:
            yield Fault(path, f"{setting} does not apply to {kind}.", "leave it out.")
        return
    choices = join_choices(facts.listed_topologies())
    if facts.dimensions == 3:
        choices += ", or multiples of 4x4x4"
    if topology is None:
        yield Fault(path, f"accelerator.topology is missing: {kind} is a TPU.", f"it is {choices}.")
    elif not facts.accepts_topology(topology):
        yield Fault(path, f"{setting} is not a slice of {kind}.", f"use {choices}.")
    else:
        yield from _tpu_slice_faults(job, kind, topology)


@_register_check(("accelerator",))
def _device_memory_faults(job: JobSpec) -> Iterator[Fault]:
    memory, kind = job.accelerator.memory, job.accelerator.type
    if memory is not None and job.accelerator.platform not in GPU_PLATFORMS:
        message = f"accelerator.memory = {memory} is of a GPU, and accelerator.type = {kind}."
        hint = "leave it out: the type says it."
        if kind == "cpu":
            hint = "use resources.memory, of a host."
        yield Fault(("accelerator", "memory"), message, hint)


@_register_check(("accelerator",))
def _device_resource_faults(job: JobSpec) -> Iterator[Fault]:
    """Refuse a resource of other devices than the accelerator's type. JAX would not find them."""
    path: KeyPath = ("accelerator", "resource")
    kind, resource = job.accelerator.type, job.accelerator.resource
    if resource is None:
        if kind == "plugin":
            message = "accelerator.resource is missing: devices of a plugin have no default."
            hint = "such as aws.amazon.com/neuroncore, as `kubectl describe node` lists it."
            yield Fault(path, message, hint)
        return
    setting = f"accelerator.resource = {shorten_text(resource)}"
    domain = resource.partition("/")[0]
    platform = RESOURCE_DOMAINS.get(domain, job.accelerator.platform)
    if platform is None:
        yield Fault(path, f"{setting} cannot be used: {NO_BACKEND}")
    elif job.accelerator.platform == "cpu":
        yield Fault(path, f"{setting} does not apply to cpu.", "leave it out, or name its type.")
    elif platform != job.accelerator.platform:
        message = f"{setting} is not a resource of accelerator.type = {kind}."
        types = {"cuda": "gpu", "rocm": "amdgpu", "plugin": "plugin"}
        hint = f"write type: {types[platform]}." if platform in types else "leave it out."
        yield Fault(path, message, hint)
    elif platform == "tpu" and resource != (tpu_resource := RESOURCE_NAMES["tpu"].value):
        yield Fault(path, f"{setting} is not that of a TPU, {tpu_resource}.", "leave it out.")
    elif "/mig-" in resource and job.accelerator.per_host > 1:
        # NVIDIA, MIG user guide, "CUDA device enumeration": a process enumerates one MIG device,
        # however many its container has.
        number = job.accelerator.per_host
        message = f"accelerator.per_host = {number}: a process can use one MIG device alone."
        hint = f"use per_host: 1, and hosts: {number} for a gang."
        yield Fault(("accelerator", "per_host"), message, hint)


@_register_check(("compute_domain",), ("accelerator",))
def _compute_domain_faults(job: JobSpec) -> Iterator[Fault]:
    kind = job.accelerator.type
    if job.compute_domain and not ACCELERATORS[kind].has_multi_node_nvlink:
        types = [name for name, facts in ACCELERATORS.items() if facts.has_multi_node_nvlink]
        hint = f"leave it out: NVLink joins hosts of {join_choices(types)} alone."
        yield Fault(("compute_domain",), f"compute_domain does not apply to {kind}.", hint)


def _tpu_slice_faults(job: JobSpec, kind: str, topology: str) -> Iterator[Fault]:
    chips = math.prod(accelerators.parse_topology(topology) or ())
    per_host = job.accelerator.per_host
    allowed_counts, host_count = accelerators.chips_per_host(kind, topology), chips // per_host
    if per_host not in allowed_counts:
        message = f"accelerator.per_host = {per_host} is not what a host of {kind} {topology} has."
        hint = f"use {join_choices(allowed_counts)}, or leave it out."
        yield Fault(("accelerator", "per_host"), message, hint)
    elif job.hosts != host_count:
        shape = f"{chips} chips at {per_host} per host are {format_count(host_count, 'host')}"
        message = f"hosts = {job.hosts} does not make a {topology} slice of {kind}: {shape}."
        hint = f"write {host_count}, or leave it out; slices says how many slices."
        yield Fault(("hosts",), message, hint)


@_register_check(("processes_per_host",), ("accelerator",))
def _process_faults(job: JobSpec) -> Iterator[Fault]:
    processes, devices = job.processes_per_host, job.accelerator.devices_per_host
    path: KeyPath = ("processes_per_host",)
    setting = f"processes_per_host = {processes}"
    if job.accelerator.platform == "tpu":
        if job.process_count_per_host != 1:
            message = f"{setting} does not apply to a TPU."
            yield Fault(path, message, "leave it out: one process drives a host.")
    elif isinstance(processes, int) and devices % processes:
        choices = join_choices(nearest_divisors(devices, target=processes))
        message = f"{setting} does not divide accelerator.per_host = {devices}."
        yield Fault(path, message, f"use {choices}, or all for one process per device.")


# Suffixes of a quantity that make it smaller. `m` is for cores, and in sizes it is a mistake for M.
_FRACTIONS = {"m": "a thousandth", "u": "a millionth", "n": "a billionth"}
_MIN_FRACTION_BYTES = 1024**2


def _byte_quantities(job: JobSpec) -> Iterator[tuple[KeyPath, str]]:
    """Yield the quantities of a job that are sizes in bytes, by their paths."""
    quantities: dict[KeyPath, str | None] = {
        ("resources", key): getattr(job.resources, key)
        for key in ("memory", "ephemeral", "shm", "hugepages")
    }
    quantities[("accelerator", "memory")] = job.accelerator.memory
    quantities[("logs", "kept")] = job.logs.kept
    for index, volume in enumerate(job.volumes):
        if isinstance(volume, Ephemeral):
            quantities[("volumes", index, "ephemeral")] = volume.ephemeral
    for path, quantity in quantities.items():
        if quantity is not None:
            yield path, quantity


@_register_check()
def _resource_faults(job: JobSpec) -> Iterator[Fault]:
    shm, memory = job.resources.shm, job.resources.memory
    small_paths = set[KeyPath]()
    for path, quantity in _byte_quantities(job):
        size_bytes, unit = parse_quantity(quantity), quantity[-1]
        # An autoscaler of Kubernetes may write a size of many bytes in thousandths.
        if unit not in _FRACTIONS or size_bytes >= _MIN_FRACTION_BYTES:
            continue
        size = "less than a byte" if size_bytes < 1 else f"{size_bytes.normalize():f} bytes"
        small_paths.add(path)
        setting = f"{format_key_path(path)} = {quantity}"
        message = f"{setting} is {size}: {unit} is {_FRACTIONS[unit]}."
        number = quantity[:-1]
        hint = f"write {number}Mi for 1024s, or {number}M for 1000s."
        yield Fault(path, message, hint if unit == "m" else None)
    if ("resources", "memory") in small_paths or shm is None or memory is None:
        return
    if parse_quantity(shm) > parse_quantity(memory):
        message = f"resources.shm = {shm} is more than resources.memory = {memory}"
        hint = "raise memory, or lower shm."
        yield Fault(("resources", "shm"), f"{message}, against which it counts.", hint)


@_register_check(("placement",))
def _placement_faults(job: JobSpec) -> Iterator[Fault]:
    if (placement := job.placement) is None:
        return
    if (placement.preferred is None) == (placement.required is None):
        problem = "neither required nor preferred"
        if placement.required:
            problem = "both required and preferred"
        message = f"placement has {problem}."
        yield Fault(("placement",), message, "name one: placement: {preferred: rack}")


@_register_check(("network",), ("accelerator",), ("platform",))
def _network_faults(job: JobSpec) -> Iterator[Fault]:
    if (fault := network_fault(job.network, job.accelerator.type, job.platform)) is not None:
        yield fault


def network_fault(network: Network, kind: str, platform: str | None) -> Fault | None:
    """Return the fault of a network that cannot connect hosts with this accelerator, or None.

    Args:
        network: Network of the job or of the cluster defaults.
        kind: Type of the accelerator.
        platform: Platform of the cluster; None before the cluster defaults are applied.
    """
    name = network if isinstance(network, str) else network.profile
    if name in ("default", "hostnetwork"):
        return None
    if ACCELERATORS[kind].platform not in GPU_PLATFORMS:
        message = f"network = {name} does not apply to {kind}."
        return Fault(("network",), message, "use default: that network connects GPUs.")
    owner = PLATFORM_OF_NETWORK.get(name)
    if owner is None or platform in (None, owner):
        return None
    message = f"network = {name} does not exist on platform = {platform}."
    hint = f"it is {owner}'s; leave it out, or describe yours as {{profile: rdma, …}}."
    return Fault(("network",), message, hint)


@_register_check()
def _volume_faults(job: JobSpec) -> Iterator[Fault]:
    index_by_mount: dict[str, int] = {}
    for index, volume in enumerate(job.volumes):
        mount, path = volume.path.rstrip("/"), ("volumes", index, "path")
        setting = f"volumes.{index}.path = {volume.path}"
        if mount in index_by_mount:
            message = f"{setting} is also the path of volumes.{index_by_mount[mount]}."
            yield Fault(path, message, "mount each elsewhere.")
        elif mount in ("/code", "/jaxlaunch", "/dev/shm"):
            yield Fault(path, f"{setting} is reserved for the launcher.", "mount it elsewhere.")
        index_by_mount.setdefault(mount, index)
        if isinstance(volume, Bucket) and "," in volume.bucket:
            setting = f"volumes.{index}.bucket = {shorten_text(volume.bucket)}"
            reason = "which would end its folder's name in the options of the mount."
            hint = "mount a folder without one above it, or give the URL to the program."
            yield Fault(("volumes", index, "bucket"), f"{setting} has a comma, {reason}", hint)


# --- parts of a pod that the launcher owns --------------------------------------------------------


_USE_FILE_HINT = "put it into a file: ship it with code:, or mount a ConfigMap."
# JAXLAUNCH_JOB contains the command and other fields, for which this many bytes are reserved.
_JOB_RESERVE_BYTES = 4096
# The cluster defaults may add this many bytes to TRAIN_SPEC.
_TRAIN_RESERVE_BYTES = 4096


@_register_check()
def _environment_faults(job: JobSpec) -> Iterator[Fault]:
    for block, names in (("env", job.env), ("secrets", job.secrets)):
        for name in filter(is_contract_variable, names):
            message = f"{block}.{name} is set by the launcher in every pod."
            yield Fault((block, name), message, "choose another name.")
    for name in job.secrets.keys() & job.env.keys():
        yield Fault(("env", name), f"env.{name} is also in secrets.", "keep one of them.")


@_register_check(("train",))
def _jit_faults(job: JobSpec) -> Iterator[Fault]:
    """Refuse a variable with which the trainer would end, on a cluster after it was scheduled."""
    value = job.env.get("JAX_DISABLE_JIT", "")
    # The values that JAX reads as true.
    if job.train is not None and value.lower() in ("y", "yes", "t", "true", "on", "1"):
        message = f"env.JAX_DISABLE_JIT is {value}, and train: runs only compiled steps."
        hint = "leave it out; jax.debug.print shows the values of a compiled step."
        yield Fault(("env", "JAX_DISABLE_JIT"), message, hint)


@_register_check()
def _size_faults(job: JobSpec) -> Iterator[Fault]:
    for name, value in job.env.items():
        if (size := len(f"{name}={value}".encode(errors="surrogatepass")) + 1) > MAX_VARIABLE_BYTES:
            message = f"env.{name} takes {size} bytes, and Linux allows a program's variable "
            yield Fault(("env", name), f"{message}{MAX_VARIABLE_BYTES}.", _USE_FILE_HINT)
    train = "" if job.train is None else job.train.model_dump_json(exclude_unset=True)
    # The command is passed in JAXLAUNCH_JOB, the train block in TRAIN_SPEC.
    for key, size in (
        ("command", len(json.dumps(job.command)) + _JOB_RESERVE_BYTES),
        ("train", len(train.encode()) + _TRAIN_RESERVE_BYTES),
    ):
        if size > MAX_VARIABLE_BYTES:
            message = f"{key} takes {size} bytes, and {MAX_VARIABLE_BYTES} is the most that fits."
            yield Fault((key,), message, _USE_FILE_HINT)


@_register_check()
def _notify_faults(job: JobSpec) -> Iterator[Fault]:
    if job.notify is None:
        return
    url = job.notify.url
    if url not in job.secrets:
        hint = f"write secrets: {{{url}: {{name: my-secret, key: url}}}}; "
        hint += "`run` takes it from its environment."
        yield Fault(("notify", "url"), f"notify.url = {url} is not one of secrets.", hint)
    if "best" in job.notify.events and (job.train is None or job.train.checkpoint.best is None):
        message = "notify.events has best, which train.checkpoint.best has to define."
        yield Fault(("notify", "events"), message, "set it.")


@_register_check()
def _label_faults(job: JobSpec) -> Iterator[Fault]:
    yield from _reserved_domain_faults(("labels",), job.labels)
    yield from _reserved_domain_faults(("annotations",), job.annotations)


def _reserved_domain_faults(block: KeyPath, keys: Iterable[Any]) -> Iterator[Fault]:
    """Refuse labels and annotations that control the launcher, JobSet or Kueue."""
    for key in map(str, keys):
        domain, slash, _ = key.partition("/")
        if slash and any(f".{domain}".endswith(f".{reserved}") for reserved in RESERVED_DOMAINS):
            setting = f"{format_key_path(block)}.{shorten_text(key)}"
            hint = "choose another domain."
            if "kueue" in domain:
                hint = "use queue:, priority: and placement:."
            message = f"{setting} is set by the launcher or the cluster."
            yield Fault((*block, key), message, hint)


@_register_check()
def _pod_faults(job: JobSpec) -> Iterator[Fault]:
    for key in job.pod:
        if key not in ("metadata", "spec"):
            message = f"pod.{key} is not part of a pod template."
            yield Fault(("pod", key), message, "it has metadata and spec.")
    metadata, spec = job.pod.get("metadata", {}), job.pod.get("spec", {})
    annotations = metadata.get("annotations", {}) if isinstance(metadata, dict) else {}
    path: KeyPath
    for path, block in (
        (("pod", "metadata"), metadata),
        (("pod", "metadata", "annotations"), annotations),
        (("pod", "spec"), spec),
    ):
        if not isinstance(block, dict):
            message = f"{format_key_path(path)} is not a block."
            yield Fault(path, message, "it is merged into the pod template.")
    if isinstance(metadata, dict) and "labels" in metadata:
        message = "pod.metadata.labels would replace the launcher's labels."
        yield Fault(("pod", "metadata", "labels"), message, "use labels: instead.")
    if isinstance(annotations, dict):
        yield from _reserved_domain_faults(("pod", "metadata", "annotations"), annotations)
    if isinstance(spec, dict):
        yield from _pod_spec_faults(spec)


_LAUNCHER_SPEC_KEYS = {
    "restartPolicy": "the gang restarts as a whole; see restarts:.",
    "terminationGracePeriodSeconds": "use grace: instead.",
}


def _pod_spec_faults(spec: dict[str, Any]) -> Iterator[Fault]:
    for key, hint in _LAUNCHER_SPEC_KEYS.items():
        if key in spec:
            yield Fault(("pod", "spec", key), f"pod.spec.{key} is set by the launcher.", hint)
    path: KeyPath = ("pod", "spec", "containers")
    message, hint = "pod.spec.containers is merged by name.", "give each a name."
    containers = spec.get("containers", [])
    if not isinstance(containers, list):
        yield Fault(path, message, hint)
        return
    for index, container in enumerate(containers):
        if not isinstance(container, dict) or not isinstance(container.get("name"), str):
            yield Fault((*path, index), message, hint)
        elif container["name"] == MAIN_CONTAINER:
            yield from _main_container_faults(container, (*path, index))


def _main_container_faults(container: dict[str, Any], path: KeyPath) -> Iterator[Fault]:
    prefix = format_key_path(path)
    for key in ("command", "args"):
        if key in container:
            message = f"{prefix}.{key} would replace the agent."
            yield Fault((*path, key), message, "use command: instead.")
    variables = container.get("env", [])
    if not isinstance(variables, list):
        message = f"{prefix}.env is not a list of variables."
        yield Fault((*path, "env"), message, "it adds to the launcher's.")
        return
    for index, variable in enumerate(variables):
        name = variable.get("name") if isinstance(variable, dict) else None
        if isinstance(name, str) and is_contract_variable(name):
            message = f"{prefix}.env.{index}: {name} is set by the launcher in every pod."
            yield Fault((*path, "env", index), message, "leave it out.")


@_register_check(("train", "task"))
def _task_faults(job: JobSpec) -> Iterator[Fault]:
    """Refuse unknown built-in tasks; a user's task can only be checked in its image."""
    task = "" if job.train is None else job.train.task
    if task.startswith("jaxlaunch.") and task not in TASKS:
        message = f"train.task = {shorten_text(task)} is not a built-in task."
        hint = f"use {join_choices(list(TASKS))}, or module:Name of your own."
        yield Fault(("train", "task"), message, hint)


@_register_check(("accelerator",))
def _trainer_faults(job: JobSpec) -> Iterator[Fault]:
    """Refuse the built-in trainer on platforms where it is untested and its image has no JAX."""
    unsupported = {"rocm": "ROCm", "plugin": "plugins of JAX"}
    if job.train is not None and (name := unsupported.get(job.accelerator.platform)) is not None:
        reason = f"the built-in trainer does not support {name}."
        hint = f"use command: with a program and an image of your own, with JAX for {name}."
        if job.accelerator.platform == "plugin":
            hint = "use command: with a program and an image of your own, with JAX and the plugin."
        yield Fault(("train",), f"train does not run on {job.accelerator.type}: {reason}", hint)


def describe_devices(job: JobSpec) -> str:
    """Return a phrase such as `16 devices (4 hosts × 4)`."""
    per_chip = ACCELERATORS[job.accelerator.type].devices_per_chip
    factors = [format_count(job.hosts, "host"), str(job.accelerator.per_host)]
    if job.slices > 1:
        factors.insert(0, format_count(job.slices, "slice"))
    if per_chip > 1:
        factors[-1:] = [format_count(job.accelerator.per_host, "chip"), str(per_chip)]
    return f"{format_count(job.devices, 'device')} ({' × '.join(factors)})"


def nearest_divisors(number: int, target: int = 1) -> list[int]:
    """Return the divisors of a number in order; if there are many, those closest to `target`."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    divisors.sort(key=lambda divisor: abs(math.log(divisor / max(1, target))))
    return sorted(divisors[:_MAX_SHOWN_DIVISORS])


@_register_check(*_LAYOUT)
def mesh_faults(job: JobSpec) -> Iterator[Fault]:
    """Yield faults for mesh axes that do not divide the devices or do not multiply to them."""
    if job.train is None:
        return
    mesh_sizes = {axis: getattr(job.train.mesh, axis) for axis in MESH_AXES}
    is_open = -1 in mesh_sizes.values()
    sizes = {axis: size for axis, size in mesh_sizes.items() if size > 0}
    wrong_axes = [axis for axis, size in sizes.items() if job.devices % size]
    for axis in wrong_axes:
        message = f"train.mesh.{axis} = {sizes[axis]} does not divide {describe_devices(job)}."
        options = join_choices(nearest_divisors(job.devices, target=sizes[axis]))
        yield Fault((*MESH, axis), message, f"use {options}, or -1 to take what remains.")
    fixed_product = math.prod(sizes.values())
    if wrong_axes or (
        job.devices % fixed_product == 0 and (is_open or fixed_product == job.devices)
    ):
        return
    hint = f"make the axes smaller, or ask for {fixed_product} devices or a multiple of that."
    # It suffices to change one of these axes.
    axis_sizes = [
        f"{axis}: {job.devices * size // fixed_product}"
        for axis, size in sizes.items()
        if job.devices * size % fixed_product == 0 and (axis != "ep" or size != 1)
    ]
    if axis_sizes and not is_open:
        hint = f"write {join_choices(axis_sizes)}; -1 on one axis takes what remains."
    needs = f"{'alone needs' if is_open else 'needs'} {format_count(fixed_product, 'device')}"
    message = f"train.mesh: {format_axes(sizes)} {needs}, the job has {describe_devices(job)}."
    yield Fault(MESH, message, hint)


@_register_check(*_LAYOUT)
def slice_faults(job: JobSpec) -> Iterator[Fault]:
    """Yield faults for dcn axes that do not span the slices, if the mesh fits the devices."""
    if job.train is None or not mesh_fits(job):
        return
    sizes = dict(zip(MESH_AXES, job.train.mesh.resolve(job.devices), strict=True))
    dcn = job.train.mesh.dcn
    dcn_slices = math.prod(dcn.values())
    if dcn and dcn_slices != job.slices:
        shape = " × ".join(f"{axis} {factor}" for axis, factor in dcn.items())
        spans = f"spans {format_count(dcn_slices, 'slice')}, the job has {job.slices}."
        hint = "leave it out, or set slices."
        if job.slices > 1:
            hint = f"its product must be {job.slices}."
        yield Fault((*MESH, "dcn"), f"train.mesh.dcn: {shape} {spans}", hint)
    for axis, factor in dcn.items():
        if sizes[axis] % factor:
            message = f"train.mesh.dcn.{axis} = {factor} does not divide {axis} = {sizes[axis]}."
            hint = f"use {join_choices(nearest_divisors(sizes[axis], target=factor))}."
            yield Fault((*MESH, "dcn", axis), message, hint)


@_register_check(*_LAYOUT, ("train", "batch"), ("train", "accumulate"))
def batch_faults(job: JobSpec) -> Iterator[Fault]:
    """Yield faults for a batch without equal shards and micro-batches."""
    train = job.train
    if train is None or not mesh_fits(job) or not _is_final(train, "batch"):
        return
    sizes = dict(zip(BATCH_AXES, train.mesh.resolve(job.devices), strict=False))
    divisor = math.prod(sizes.values()) * train.accumulate
    lower_batch = train.batch // divisor * divisor
    if lower_batch != train.batch:
        shape = format_axes(sizes)
        if train.accumulate > 1:
            shape += f" × accumulate {train.accumulate}"
        message = f"train.batch = {train.batch} is not divisible by {shape} = {divisor}."
        choices = join_choices([size for size in (lower_batch, lower_batch + divisor) if size])
        yield Fault(("train", "batch"), message, f"use {choices}.")


@_register_check(*_LAYOUT, ("train", "model"), ("train", "task"))
def model_faults(job: JobSpec) -> Iterator[Fault]:
    """Yield faults for model sizes that do not split over mp or ep."""
    if job.train is None or not mesh_fits(job) or not _is_final(job.train, "model"):
        return
    model, (_, _, ep, mp) = job.train.model, job.train.mesh.resolve(job.devices)
    yield from _expert_faults(job.train, ep)
    # The folder of init_from defines the sizes that the job does not set.
    is_partial = isinstance(model, PublishedModel) and model.is_partial
    for key in SPLIT_BY_MP.get(model.kind, ()):
        size = getattr(model, key)
        is_known = size is not None and not (is_partial and key not in model.model_fields_set)
        if is_known and size % mp:
            message = f"train.model.{key} = {size} does not split over train.mesh.mp = {mp}."
            yield Fault(("train", "model", key), message, f"use a multiple of {mp}, or another mp.")


def _expert_faults(train: TrainSpec, ep: int) -> Iterator[Fault]:
    model = train.model
    experts = model.experts if isinstance(model, Decoder) else None
    is_partial = isinstance(model, PublishedModel) and model.is_partial
    if ep == 1 or isinstance(model, CustomModel) or (is_partial and experts is None):
        return
    if experts is None:
        message = f"train.mesh.ep = {ep} splits experts, and train.model has none."
        yield Fault((*MESH, "ep"), message, "give train.model.experts, or use dp or fsdp.")
    elif experts % ep:
        message = f"train.model.experts = {experts} does not split over train.mesh.ep = {ep}."
        path = ("train", "model", "experts")
        yield Fault(path, message, f"use a multiple of {ep}, or another ep.")


def _is_final(train: TrainSpec, key: str) -> bool:
    """Return whether the value of a key is final. A user's task may have another default for it."""
    return train.task in TASK_DEFAULTS or key in train.model_fields_set


@_register_check(*_LAYOUT, ("processes_per_host",))
def row_faults(job: JobSpec) -> Iterator[Fault]:
    """Yield a fault if processes hold overlapping rows of the batch that are not contiguous.

    The rule is that of `rows` in trainer/parallel/mesh.py. This check simulates the assignment of
    devices to processes. On TPUs the torus determines it, so only the mesh itself can check them.
    """
    if job.accelerator.platform == "tpu" or job.train is None or not mesh_fits(job):
        return
    if job.devices > _MAX_SIMULATED_DEVICES or job.devices % job.processes:
        return
    sizes = job.train.mesh.resolve(job.devices)
    dcn = {str(axis): factor for axis, factor in job.train.mesh.dcn.items()}
    dcn_sizes = [dcn.get(axis, 1) for axis in MESH_AXES]
    pairs = list(zip(sizes, dcn_sizes, strict=True))
    if math.prod(dcn_sizes) != job.slices or any(size % factor for size, factor in pairs):
        return
    sizes_in_slice = [size // factor for size, factor in pairs]
    # The shard of the batch that each device holds, in the order of processes.
    shards: list[int] = []
    for coordinates in itertools.product(*map(range, (*dcn_sizes, *sizes_in_slice))):
        shard = 0
        for axis in range(len(BATCH_AXES)):
            axis_shard = coordinates[axis] * sizes_in_slice[axis] + coordinates[len(sizes) + axis]
            shard = shard * sizes[axis] + axis_shard
        shards.append(shard)
    size = job.devices_per_process
    process_shards = [
        tuple(sorted(set(shards[start : start + size]))) for start in range(0, len(shards), size)
    ]
    shard_count = math.prod(sizes[: len(BATCH_AXES)])
    if sum(map(len, set(process_shards))) == shard_count:
        return
    for process, shard_indices in enumerate(process_shards):
        if shard_indices[-1] - shard_indices[0] + 1 != len(shard_indices):
            rows = "rows of the batch that are not contiguous and overlap others'"
            hint = "let dp, not fsdp, span slices, or give each process fewer devices."
            yield Fault(MESH, f"train.mesh: process {process} holds {rows}.", hint)
            return


def mesh_fits(job: JobSpec) -> bool:
    """Return whether the mesh fits the devices of the job."""
    if job.train is None or job.host_count > MAX_PODS:
        return False
    try:
        return bool(job.train.mesh.resolve(job.devices))
    except ValueError:
        return False
