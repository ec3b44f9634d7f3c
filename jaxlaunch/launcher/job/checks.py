"""Checks across the keys of a job. Pure: no cluster is read.

A check lists the keys that it relies on and is skipped if one of them already has a fault, so that one mistake is
reported once. A check without keys examines entry by entry; wrong entries are removed before it runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from jaxlaunch import accelerators, contract
from jaxlaunch.accelerators import GPUS, KNOWN
from jaxlaunch.contract import BATCH_AXES, MESH_AXES
from jaxlaunch.launcher.errors import Fault, KeyPath, overlap
from jaxlaunch.launcher.job.schema import MOST_PODS, JobSpec, Network
from jaxlaunch.launcher.job.types import Bucket
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER, REPLICATED_JOB, RESERVED_DOMAINS
from jaxlaunch.launcher.kubernetes.resources import parse_quantity
from jaxlaunch.launcher.platforms.table import HOME_OF_NETWORK
from jaxlaunch.launcher.wording import count, cut, dotted, either
from jaxlaunch.trainer.spec import TASK_DEFAULTS, TASKS, CustomModel, Decoder, Published, TrainSpec, said

MESH: KeyPath = ("train", "mesh")
# What mp splits in a built-in model, as in the table of trainer/parallel/sharding.
SPLIT_BY_MP = {
    "mlp": ("width",),
    "decoder": ("heads", "kv_heads", "hidden", "expert_hidden", "vocab"),
    "gpt2": ("heads", "hidden", "vocab"),
    "vit": ("heads", "hidden"),
}

_MOST_OFFERED = 9
# Above this number of devices, only the mesh itself checks that the rows of a process are contiguous.
_MOST_SIMULATED = 2**14


# The length of a DNS label.
LONGEST_NAME = 63
# Linux's MAX_ARG_STRLEN limits `NAME=value`, and an argument, including the terminating zero.
LONGEST_VARIABLE = 128 * 1024  # bytes
# The Job controller appends five random characters to the name of a pod.
_SUFFIX = "-abcde"

CONTRACT_ENV = {contract.INDEX, contract.TRAIN_SPEC, contract.COORDINATOR, contract.BIND, contract.NUM_PROCESSES}
CONTRACT_ENV |= {contract.PROCESS_ID, contract.LOCAL_DEVICE_IDS, contract.NUM_CPU_DEVICES}


class Check(NamedTuple):
    """A check of a job and the keys that it relies on."""

    relies_on: tuple[KeyPath, ...]
    faults: Callable[[JobSpec], Iterator[Fault]]


def run(job: JobSpec, broken: Collection[KeyPath]) -> Iterator[Fault]:
    """Yield the faults of all checks that do not rely on a broken key."""
    for check in CHECKS:
        if not any(overlap(path, key) for path in broken for key in check.relies_on):
            yield from (dataclasses.replace(fault, of=check.relies_on) for fault in check.faults(job))


def is_contract_variable(name: str) -> bool:
    """Return whether the launcher sets this environment variable in every pod."""
    return name in CONTRACT_ENV or name.startswith("JAXLAUNCH_")


# --- names, devices, processes ----------------------------------------------------------------------------------------


def _names(job: JobSpec) -> Iterator[Fault]:
    pod = f"{job.name}-{REPLICATED_JOB}-{job.slices - 1}-{job.pods - 1}{_SUFFIX}"
    if len(pod) > LONGEST_NAME:
        message = f"name has {len(job.name)} characters, a pod's name with it {len(pod)}; the limit is {LONGEST_NAME}."
        yield Fault(("name",), message, f"use at most {LONGEST_NAME - len(pod) + len(job.name)} characters.")


def _pods(job: JobSpec) -> Iterator[Fault]:
    """Refuse more pods than one indexed Job supports, which slices or a topology may request."""
    if job.pod_count > MOST_PODS:
        shape = f"{count(job.slices, 'slice')} of {count(job.pods, 'host')}"
        yield Fault(("hosts",), f"{shape} are {job.pod_count} pods, and {MOST_PODS} is the most that is supported.")


def _elastic(job: JobSpec) -> Iterator[Fault]:
    """Check hosts.min and spares, which need hosts that are replaced one by one."""
    path: KeyPath
    if job.min_hosts > job.hosts:
        yield Fault(("hosts", "min"), f"hosts.min = {job.min_hosts} is above hosts.max = {job.hosts}.", "swap them.")
    asked: dict[KeyPath, int] = {("hosts", "min"): job.min_hosts} if job.is_elastic else {}
    asked |= {("spares",): job.spares} if job.spares else {}
    for path, number in asked.items():
        setting = f"{dotted(path)} = {number}"
        if job.accelerator.platform == "tpu":
            message = f"{setting} does not apply to {job.accelerator.type}: a TPU slice is lost as a whole."
            yield Fault(path, message, "leave it out: the JobSet makes all pods again.")
        elif job.slices > 1:
            message = (
                f"{setting} does not apply to {job.slices} slices: each is a Job whose hosts no other can replace."
            )
            yield Fault(path, message, "use one slice, or leave it out.")
        elif not job.replaces_hosts:
            limits = f"restarts: {{crash: {job.restarts.crash}, in_place: {job.restarts.in_place}}}"
            message = f"{setting} needs several hosts that are replaced one by one; the job has "
            hint = "set hosts to 2 or more, and both limits to 1 or more."
            yield Fault(path, f"{message}{count(job.hosts, 'host')} and {limits}.", hint)
    if job.is_elastic and job.train is None:
        message = f"hosts.min = {job.min_hosts} is of train: jobs: the mesh of a program is its own."
        yield Fault(("hosts", "min"), message, "leave it out; spares are for any program.")


def _shrinks(job: JobSpec) -> Iterator[Fault]:
    """Check that mesh and batch also divide over the smallest number of hosts."""
    if not job.is_elastic or job.train is None or not mesh_fits(job):
        return
    try:
        job.on_hosts(job.min_hosts)
    except ValueError as error:
        sizes = [size for size in job.sizes if size < job.hosts]
        hint = "use another batch or mesh, or one number."
        hint = f"use {either(sizes)}, or another batch or mesh." if sizes else hint
        yield Fault(("hosts", "min"), f"hosts.min = {job.min_hosts}: {error}.", hint)


def _topology(job: JobSpec) -> Iterator[Fault]:
    kind, topology = job.accelerator.type, job.accelerator.topology
    path: KeyPath = ("accelerator", "topology")
    facts = KNOWN[kind]
    if facts.platform != "tpu":
        if topology is not None:
            yield Fault(path, f"accelerator.topology = {cut(topology)} does not apply to {kind}.", "leave it out.")
        return
    offered = either(facts.topologies()) + (", or multiples of 4x4x4" if facts.dimensions == 3 else "")
    if topology is None:
        yield Fault(path, f"accelerator.topology is missing: {kind} is a TPU.", f"it is {offered}.")
    elif not facts.accepts(topology):
        yield Fault(path, f"accelerator.topology = {cut(topology)} is not a slice of {kind}.", f"use {offered}.")
    else:
        yield from _slice(job, kind, topology)


def _device_memory(job: JobSpec) -> Iterator[Fault]:
    given, kind = job.accelerator.memory, job.accelerator.type
    if given is not None and job.accelerator.platform not in GPUS:
        hint = "use resources.memory, of a host." if kind == "cpu" else "leave it out: the type says it."
        path: KeyPath = ("accelerator", "memory")
        yield Fault(path, f"accelerator.memory = {given} is of a GPU, and accelerator.type = {kind}.", hint)


def _compute_domain(job: JobSpec) -> Iterator[Fault]:
    kind = job.accelerator.type
    if job.compute_domain and not KNOWN[kind].joins_hosts:
        able = either([name for name, accelerator in KNOWN.items() if accelerator.joins_hosts])
        hint = f"leave it out: NVLink joins hosts of {able} alone."
        yield Fault(("compute_domain",), f"compute_domain does not apply to {kind}.", hint)


def _slice(job: JobSpec, kind: str, topology: str) -> Iterator[Fault]:
    chips = math.prod(accelerators.sides_of(topology) or ())
    allowed = accelerators.chips_per_host(kind, topology)
    if job.accelerator.per_host not in allowed:
        message = f"accelerator.per_host = {job.accelerator.per_host} is not what a host of {kind} {topology} has."
        yield Fault(("accelerator", "per_host"), message, f"use {either(allowed)}, or leave it out.")
    elif job.hosts != chips // job.accelerator.per_host:
        hosts = chips // job.accelerator.per_host
        shape = f"{chips} chips at {job.accelerator.per_host} per host"
        message = f"hosts = {job.hosts} does not make a {topology} slice of {kind}: {shape} are {count(hosts, 'host')}."
        yield Fault(("hosts",), message, f"write {hosts}, or leave it out; slices says how many slices.")


def _processes(job: JobSpec) -> Iterator[Fault]:
    wanted, available = job.processes_per_host, job.accelerator.devices_per_host
    path: KeyPath = ("processes_per_host",)
    if job.accelerator.platform == "tpu" and wanted != 1 and (wanted != "all" or available > 1):
        message = f"processes_per_host = {wanted} does not apply to a TPU."
        yield Fault(path, message, "leave it out: one process drives a host.")
    elif isinstance(wanted, int) and available % wanted:
        whose = f"accelerator.per_host = {available}"
        hint = f"use {either(divisors(available, near=wanted))}, or all for one process per device."
        yield Fault(path, f"processes_per_host = {wanted} does not divide {whose}.", hint)


def _resources(job: JobSpec) -> Iterator[Fault]:
    shm, memory = job.resources.shm, job.resources.memory
    for key in ("memory", "ephemeral", "shm", "hugepages"):
        given = getattr(job.resources, key)
        if given is not None and given[-1] in "mun":
            hint = f"write {given[:-1]}Mi for 1024s, or {given[:-1]}M for 1000s." if given[-1] == "m" else None
            yield Fault(("resources", key), f"resources.{key} = {given} is less than a byte: m is a thousandth.", hint)
    if shm is not None and memory is not None and parse_quantity(shm) > parse_quantity(memory):
        message = f"resources.shm = {shm} is more than resources.memory = {memory}, against which it counts."
        yield Fault(("resources", "shm"), message, "raise memory, or lower shm.")


def _placement(job: JobSpec) -> Iterator[Fault]:
    if job.placement is not None and (job.placement.preferred is None) == (job.placement.required is None):
        which = "both required and preferred" if job.placement.required else "neither required nor preferred"
        yield Fault(("placement",), f"placement has {which}.", "name one: placement: {preferred: rack}")


def _network(job: JobSpec) -> Iterator[Fault]:
    if (wrong := network_fault(job.network, job.accelerator.type, job.platform)) is not None:
        yield wrong


def network_fault(network: Network, kind: str, platform: str | None) -> Fault | None:
    """Return why this network cannot connect hosts with this accelerator, or None.

    `platform` is None before the cluster defaults are applied.
    """
    name = network if isinstance(network, str) else network.profile
    if name in ("default", "hostnetwork"):
        return None
    if KNOWN[kind].platform not in GPUS:
        return Fault(
            ("network",), f"network = {name} does not apply to {kind}.", "use default: that network connects GPUs."
        )
    if platform is not None and platform != HOME_OF_NETWORK.get(name, platform):
        message = f"network = {name} does not exist on platform = {platform}."
        hint = f"it is {HOME_OF_NETWORK[name]}'s; leave it out, or describe yours as {{profile: rdma, …}}."
        return Fault(("network",), message, hint)
    return None


def _volumes(job: JobSpec) -> Iterator[Fault]:
    seen: dict[str, int] = {}
    for index, volume in enumerate(job.volumes):
        mount = volume.path.rstrip("/")
        path: KeyPath = ("volumes", index, "path")
        setting = f"volumes.{index}.path = {volume.path}"
        if mount in seen:
            yield Fault(path, f"{setting} is also volumes.{seen[mount]}'s.", "mount each elsewhere.")
        elif mount in ("/code", "/jaxlaunch", "/dev/shm"):
            yield Fault(path, f"{setting} is reserved for the launcher.", "mount it elsewhere.")
        seen.setdefault(mount, index)
        if isinstance(volume, Bucket) and "," in volume.bucket:
            message = f"volumes.{index}.bucket = {cut(volume.bucket)} has a comma, which would end its folder's name"
            hint = "mount a folder without one above it, or give the URL to the program."
            yield Fault(("volumes", index, "bucket"), f"{message} in the options of the mount.", hint)


# --- parts of a pod that the launcher owns ----------------------------------------------------------------------------


_FILE = "put it into a file: ship it with code:, or mount a ConfigMap."
# JAXLAUNCH_JOB contains the command and other fields, for which this many bytes are reserved.
_REST_OF_JOB = 4096
# The cluster defaults may add this many bytes to TRAIN_SPEC.
_REST_OF_TRAIN = 4096


def _environment(job: JobSpec) -> Iterator[Fault]:
    for block, names in (("env", job.env), ("secrets", job.secrets)):
        for name in names:
            if is_contract_variable(name):
                message = f"{block}.{name} is set by the launcher in every pod."
                yield Fault((block, name), message, "choose another name.")
    for name, value in job.env.items():
        if (size := len(f"{name}={value}".encode(errors="surrogatepass")) + 1) > LONGEST_VARIABLE:
            message = f"env.{name} takes {size} bytes, and Linux allows a program's variable {LONGEST_VARIABLE}."
            yield Fault(("env", name), message, _FILE)
    # The command is passed in JAXLAUNCH_JOB, the train block in TRAIN_SPEC.
    if (size := len(json.dumps(job.command)) + _REST_OF_JOB) > LONGEST_VARIABLE:
        yield Fault(("command",), f"command takes {size} bytes, and {LONGEST_VARIABLE} is the most that fits.", _FILE)
    train = "" if job.train is None else job.train.model_dump_json(exclude_unset=True)
    if (size := len(train.encode()) + _REST_OF_TRAIN) > LONGEST_VARIABLE:
        yield Fault(("train",), f"train takes {size} bytes, and {LONGEST_VARIABLE} is the most that fits.", _FILE)
    for name in job.secrets.keys() & job.env.keys():
        yield Fault(("env", name), f"env.{name} is also in secrets.", "keep one of them.")
    if job.notify is None:
        return
    url = job.notify.url
    if url not in job.secrets:
        hint = f"write secrets: {{{url}: {{name: my-secret, key: url}}}}; `run` takes it from its environment."
        yield Fault(("notify", "url"), f"notify.url = {url} is not one of secrets.", hint)
    if "best" in job.notify.events and (job.train is None or job.train.checkpoint.best is None):
        message = "notify.events has best, which train.checkpoint.best has to define."
        yield Fault(("notify", "events"), message, "set it.")


def _labels(job: JobSpec) -> Iterator[Fault]:
    yield from _reserved(("labels",), job.labels)
    yield from _reserved(("annotations",), job.annotations)


def _reserved(block: KeyPath, keys: Iterable[Any]) -> Iterator[Fault]:
    """Refuse labels and annotations that control the launcher, JobSet or Kueue."""
    for key in map(str, keys):
        domain = key.partition("/")[0]
        if "/" in key and any(domain == own or domain.endswith(f".{own}") for own in RESERVED_DOMAINS):
            hint = "use queue:, priority: and placement:." if "kueue" in domain else "choose another domain."
            yield Fault((*block, key), f"{dotted(block)}.{cut(key)} is set by the launcher or the cluster.", hint)


def _pod(job: JobSpec) -> Iterator[Fault]:
    for key in job.pod:
        if key not in ("metadata", "spec"):
            yield Fault(("pod", key), f"pod.{key} is not part of a pod template.", "it has metadata and spec.")
    metadata, spec = job.pod.get("metadata", {}), job.pod.get("spec", {})
    for key, block in (("metadata", metadata), ("spec", spec)):
        if not isinstance(block, dict):
            yield Fault(("pod", key), f"pod.{key} is not a block.", "it is merged into the pod template.")
    if isinstance(metadata, dict):
        if "labels" in metadata:
            message = "pod.metadata.labels would replace the launcher's labels."
            yield Fault(("pod", "metadata", "labels"), message, "use labels: instead.")
        path: KeyPath = ("pod", "metadata", "annotations")
        annotations = metadata.get("annotations", {})
        if isinstance(annotations, dict):
            yield from _reserved(path, annotations)
        else:
            yield Fault(path, "pod.metadata.annotations is not a block.", "it is merged into the pod template.")
    if isinstance(spec, dict):
        yield from _pod_spec(spec)


_OURS_IN_SPEC = {
    "restartPolicy": "the gang restarts as a whole; see restarts:.",
    "terminationGracePeriodSeconds": "use grace: instead.",
}


def _pod_spec(spec: dict[str, Any]) -> Iterator[Fault]:
    for key, hint in _OURS_IN_SPEC.items():
        if key in spec:
            yield Fault(("pod", "spec", key), f"pod.spec.{key} is set by the launcher.", hint)
    containers = spec.get("containers", [])
    if not isinstance(containers, list):
        yield Fault(("pod", "spec", "containers"), "pod.spec.containers is merged by name.", "give each a name.")
        return
    for index, container in enumerate(containers):
        path: KeyPath = ("pod", "spec", "containers", index)
        if not isinstance(container, dict) or not isinstance(container.get("name"), str):
            yield Fault(path, "pod.spec.containers is merged by name.", "give each a name.")
        elif container["name"] == MAIN_CONTAINER:
            yield from _main_container(container, path)


def _main_container(container: dict[str, Any], path: KeyPath) -> Iterator[Fault]:
    where = dotted(path)
    for key in ("command", "args"):
        if key in container:
            yield Fault((*path, key), f"{where}.{key} would replace the agent.", "use command: instead.")
    variables = container.get("env", [])
    if not isinstance(variables, list):
        yield Fault((*path, "env"), f"{where}.env is not a list of variables.", "it adds to the launcher's.")
    for index, variable in enumerate(variables if isinstance(variables, list) else []):
        name = variable.get("name") if isinstance(variable, dict) else None
        if isinstance(name, str) and is_contract_variable(name):
            message = f"{where}.env.{index}: {name} is set by the launcher in every pod."
            yield Fault((*path, "env", index), message, "leave it out.")


def _task(job: JobSpec) -> Iterator[Fault]:
    """Refuse built-in tasks that do not exist. A user's task can only be checked inside its image."""
    task = "" if job.train is None else job.train.task
    if task.startswith("jaxlaunch.") and task not in TASKS:
        hint = f"use {either(list(TASKS))}, or module:Name of your own."
        yield Fault(("train", "task"), f"train.task = {cut(task)} is not a built-in task.", hint)


def _trainer(job: JobSpec) -> Iterator[Fault]:
    """Refuse the built-in trainer on ROCm, where it is untested and its image has no JAX."""
    kind = job.accelerator.type
    if job.train is not None and job.accelerator.platform == "rocm":
        hint = "use command: with a program and an image of your own, with JAX for ROCm."
        yield Fault(("train",), f"train does not run on {kind}: the built-in trainer does not support ROCm.", hint)


def describe_devices(job: JobSpec) -> str:
    """Return a phrase such as `16 devices (4 hosts × 4)`."""
    per_chip = KNOWN[job.accelerator.type].devices_per_chip
    factors = [count(job.hosts, "host"), str(job.accelerator.per_host)]
    if job.slices > 1:
        factors.insert(0, count(job.slices, "slice"))
    if per_chip > 1:
        factors[-1:] = [count(job.accelerator.per_host, "chip"), str(per_chip)]
    return f"{count(job.devices, 'device')} ({' × '.join(factors)})"


def divisors(number: int, near: int = 1) -> list[int]:
    """Return the divisors of a number; if there are many, those closest to `near`."""
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    found = sorted({*low, *(number // divisor for divisor in low)})
    nearest = sorted(found, key=lambda divisor: abs(math.log(divisor / max(1, near))))[:_MOST_OFFERED]
    return sorted(nearest)


def mesh_faults(job: JobSpec) -> Iterator[Fault]:
    """Yield faults for mesh axes that do not divide the devices or do not multiply to them."""
    if job.train is None:
        return
    sizes = {axis: getattr(job.train.mesh, axis) for axis in MESH_AXES}
    wrong = [axis for axis, size in sizes.items() if size > 0 and job.devices % size]
    for axis in wrong:
        message = f"train.mesh.{axis} = {sizes[axis]} does not divide {describe_devices(job)}."
        options = either(divisors(job.devices, near=sizes[axis]))
        yield Fault((*MESH, axis), message, f"use {options}, or -1 to take what remains.")
    is_open = -1 in sizes.values()
    fixed = math.prod(size for size in sizes.values() if size > 0)
    if wrong or not (job.devices % fixed or (not is_open and fixed != job.devices)):
        return
    # The hint names the one axis to change, or the number of devices to request.
    hint = f"make the axes smaller, or ask for {fixed} devices or a multiple of that."
    cures = [
        f"{axis}: {job.devices * size // fixed}"
        for axis, size in sizes.items()
        if size > 0 and job.devices * size % fixed == 0 and (axis != "ep" or size != 1)
    ]
    if cures and not is_open:
        hint = f"write {either(cures)}; -1 on one axis takes what remains."
    shape = said({axis: size for axis, size in sizes.items() if size > 0})
    makes = "alone needs" if is_open else "needs"
    yield Fault(
        MESH, f"train.mesh: {shape} {makes} {count(fixed, 'device')}, the job has {describe_devices(job)}.", hint
    )


def slice_faults(job: JobSpec) -> Iterator[Fault]:
    """Yield faults for dcn axes that do not span the slices, if the mesh fits the devices."""
    if job.train is None or not mesh_fits(job):
        return
    sizes, dcn = dict(zip(MESH_AXES, job.train.mesh.resolve(job.devices), strict=True)), job.train.mesh.dcn
    spanned = math.prod(dcn.values())
    if dcn and spanned != job.slices:
        shape = " × ".join(f"{axis} {times}" for axis, times in dcn.items())
        message = f"train.mesh.dcn: {shape} spans {count(spanned, 'slice')}, the job has {job.slices}."
        hint = f"its product must be {job.slices}." if job.slices > 1 else "leave it out, or set slices."
        yield Fault((*MESH, "dcn"), message, hint)
    for axis, times in dcn.items():
        if sizes[axis] % times:
            message = f"train.mesh.dcn.{axis} = {times} does not divide {axis} = {sizes[axis]}."
            yield Fault((*MESH, "dcn", axis), message, f"use {either(divisors(sizes[axis], near=times))}.")


def batch_faults(job: JobSpec) -> Iterator[Fault]:
    """Yield faults for a batch without equal shards and micro-batches, if the mesh fits the devices."""
    if job.train is None or not mesh_fits(job):
        return
    train = job.train
    if not _is_known(train, "batch"):
        return
    sizes = dict(zip(BATCH_AXES, train.mesh.resolve(job.devices), strict=False))
    parts = math.prod(sizes.values()) * train.accumulate
    if train.batch % parts:
        below, above = train.batch // parts * parts, -(-train.batch // parts) * parts
        shape = said(sizes) + (f" × accumulate {train.accumulate}" if train.accumulate > 1 else "")
        message = f"train.batch = {train.batch} is not divisible by {shape} = {parts}."
        yield Fault(("train", "batch"), message, f"use {either([size for size in (below, above) if size])}.")


def model_faults(job: JobSpec) -> Iterator[Fault]:
    """Yield faults for model sizes that do not split over mp or ep, if the mesh fits the devices."""
    if job.train is None or not mesh_fits(job) or not _is_known(job.train, "model"):
        return
    model, (_, _, ep, mp) = job.train.model, job.train.mesh.resolve(job.devices)
    yield from _expert_faults(job.train, ep)
    for key in SPLIT_BY_MP.get(model.kind, ()):
        size = getattr(model, key)
        if isinstance(model, Published) and model.is_partial and key not in model.model_fields_set:
            # The folder of init_from sets this size.
            continue
        if size is not None and size % mp:
            message = f"train.model.{key} = {size} does not split over train.mesh.mp = {mp}."
            yield Fault(("train", "model", key), message, f"use a multiple of {mp}, or another mp.")


def _expert_faults(train: TrainSpec, ep: int) -> Iterator[Fault]:
    model = train.model
    experts = model.experts if isinstance(model, Decoder) else None
    is_partial = isinstance(model, Published) and model.is_partial
    if ep == 1 or isinstance(model, CustomModel) or (is_partial and experts is None):
        return
    if experts is None:
        message = f"train.mesh.ep = {ep} splits experts, and train.model has none."
        yield Fault((*MESH, "ep"), message, "give train.model.experts, or use dp or fsdp.")
    elif experts % ep:
        message = f"train.model.experts = {experts} does not split over train.mesh.ep = {ep}."
        yield Fault(("train", "model", "experts"), message, f"use a multiple of {ep}, or another ep.")


def _is_known(train: TrainSpec, key: str) -> bool:
    """Return whether the spec determines `key`. A user's task may have another default for it."""
    return train.task in TASK_DEFAULTS or key in train.model_fields_set


def row_faults(job: JobSpec) -> Iterator[Fault]:
    """Yield a fault if processes hold parts of the batch that overlap without being equal and contiguous.

    The rule is that of `rows` in trainer/parallel/mesh.py. On TPUs the torus determines the order of devices, so only
    the mesh itself can check it.
    """
    if KNOWN[job.accelerator.type].platform == "tpu":
        return
    if job.train is None or not mesh_fits(job) or job.devices > _MOST_SIMULATED or job.devices % job.processes:
        return
    sizes, dcn = job.train.mesh.resolve(job.devices), job.train.mesh.dcn
    across = [dcn.get(axis, 1) for axis in ("dp", "fsdp", "ep", "mp")]
    if math.prod(across) != job.slices or any(size % times for size, times in zip(sizes, across, strict=True)):
        return
    inside = [size // times for size, times in zip(sizes, across, strict=True)]
    # The shard of the batch that each device holds, in the order of processes.
    shards: list[int] = []
    for place in itertools.product(*(range(size) for size in (*across, *inside))):
        part = 0
        for axis in range(len(BATCH_AXES)):
            part = part * sizes[axis] + place[axis] * inside[axis] + place[len(sizes) + axis]
        shards.append(part)
    size = job.devices_per_process
    held = [tuple(sorted(set(shards[start : start + size]))) for start in range(0, len(shards), size)]
    torn = [process for process, parts in enumerate(held) if parts[-1] - parts[0] + 1 != len(parts)]
    if torn and sum(map(len, set(held))) != math.prod(sizes[: len(BATCH_AXES)]):
        message = f"train.mesh: process {torn[0]} holds rows of the batch that are not contiguous and overlap others'."
        yield Fault(MESH, message, "let dp, not fsdp, span slices, or give each process fewer devices.")


def mesh_fits(job: JobSpec) -> bool:
    """Return whether the mesh fits the devices of the job."""
    try:
        return job.train is not None and job.host_count <= MOST_PODS and bool(job.train.mesh.resolve(job.devices))
    except ValueError:
        return False


_DEVICES: tuple[KeyPath, ...] = (("hosts",), ("slices",), ("accelerator",))
_LAYOUT: tuple[KeyPath, ...] = (*_DEVICES, ("train", "mesh"))

CHECKS: tuple[Check, ...] = (
    Check((("name",), ("hosts",), ("slices",)), _names),
    Check((("hosts",), ("slices",), ("accelerator",)), _pods),
    Check((*_DEVICES, ("spares",), ("restarts",)), _elastic),
    Check((*_LAYOUT, ("train", "batch"), ("train", "accumulate"), ("train", "model")), _shrinks),
    Check((("hosts",), ("accelerator",)), _topology),
    Check((("accelerator",),), _device_memory),
    Check((("compute_domain",), ("accelerator",)), _compute_domain),
    Check((("processes_per_host",), ("accelerator",)), _processes),
    Check((), _resources),
    Check((("placement",),), _placement),
    Check((("network",), ("accelerator",), ("platform",)), _network),
    Check((), _volumes),
    Check((), _environment),
    Check((), _labels),
    Check((), _pod),
    Check((("train", "task"),), _task),
    Check((("accelerator",),), _trainer),
    Check(_LAYOUT, mesh_faults),
    Check(_LAYOUT, slice_faults),
    Check((*_LAYOUT, ("train", "batch"), ("train", "accumulate")), batch_faults),
    Check((*_LAYOUT, ("train", "model"), ("train", "task")), model_faults),
    Check((*_LAYOUT, ("processes_per_host",)), row_faults),
)
