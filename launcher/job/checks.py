"""What the keys of a job must satisfy together, beside the mesh (launcher.layout). Pure; asks no cluster.

Each check names the keys it must trust, and is left out where one of them is already wrong: no fault follows from
another. A check that names none judges entry by entry, and wrong entries are gone before it sees them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

from launcher import accelerators, layout
from launcher.accelerators import KNOWN
from launcher.errors import Fault, KeyPath
from launcher.layout import divisors
from launcher.quantity import amount
from launcher.schema import JobSpec
from launcher.wording import count, cut, dotted, either
from trainer import contract

LONGEST_NAME = 63  # a DNS label
REPLICATED_JOB = "w"
MOST_PODS = 100_000  # of one Indexed Job
_INT32 = 2**31 - 1
_SUFFIX = "-abcde"  # that the Job controller gives a pod

CONTRACT_ENV = frozenset(
    (
        contract.INDEX,
        contract.TRAIN_SPEC,
        contract.COORDINATOR,
        contract.NUM_PROCESSES,
        contract.PROCESS_ID,
        contract.LOCAL_DEVICE_IDS,
        contract.NUM_CPU_DEVICES,
    )
)
CONTRACT_PREFIX = "JAXLAUNCH_"
MAIN_CONTAINER = "main"
_OWN_DOMAINS = ("jobset.sigs.k8s.io", "batch.kubernetes.io", "kueue.x-k8s.io", "jaxlaunch.io")


@dataclasses.dataclass(frozen=True)
class Check:
    """One question to a job, and the keys its answer rests on."""

    trusts: tuple[KeyPath, ...]
    faults: Callable[[JobSpec], Iterator[Fault]]


def run(job: JobSpec, broken: Collection[KeyPath]) -> Iterator[Fault]:
    """The faults of every check that rests on no broken key."""
    for check in CHECKS:
        if not any(_overlap(path, key) for path in broken for key in check.trusts):
            yield from check.faults(job)


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def is_contract_variable(name: str) -> bool:
    return name in CONTRACT_ENV or name.startswith(CONTRACT_PREFIX)


# --- names, devices, processes ----------------------------------------------------------------------------------------


def _names(job: JobSpec) -> Iterator[Fault]:
    pod = f"{job.name}-{REPLICATED_JOB}-{job.slices - 1}-{job.hosts - 1}{_SUFFIX}"
    if len(pod) > LONGEST_NAME:
        most = LONGEST_NAME - (len(pod) - len(job.name))
        yield Fault(
            ("name",),
            f"name has {len(job.name)} characters, a pod's name with it {len(pod)}; the limit is {LONGEST_NAME}.",
            f"use at most {most} characters.",
        )


def _counts(job: JobSpec) -> Iterator[Fault]:
    for path, value, most, whose in (
        (("hosts",), job.hosts, MOST_PODS, "a Job has at most {} pods"),
        (("slices",), job.slices, _INT32, "a JobSet counts its Jobs to {}"),
        (("restarts", "crash"), job.restarts.crash, _INT32, "a JobSet counts its restarts to {}"),
    ):
        if value > most:
            yield Fault(path, f"{dotted(path)} = {value}: {whose.format(most)}.", f"use at most {most}.")


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
        yield Fault(path, f"accelerator.topology = {cut(topology)} is no slice of {kind}.", f"use {offered}.")
    else:
        yield from _slice(job, kind, topology)


def _slice(job: JobSpec, kind: str, topology: str) -> Iterator[Fault]:
    """Chips and hosts of a TPU slice, which the topology decides."""
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
    if job.accelerator.platform == "tpu" and wanted not in (1, "all"):
        yield Fault(
            path, f"processes_per_host = {wanted} does not apply to a TPU.", "leave it out: one process drives a host."
        )
    elif job.accelerator.platform == "tpu" and wanted == "all" and available > 1:
        yield Fault(
            path, "processes_per_host = all does not apply to a TPU.", "leave it out: one process drives a host."
        )
    elif isinstance(wanted, int) and available % wanted:
        whose = f"accelerator.per_host = {available}"
        hint = f"use {either(divisors(available, near=wanted))}, or all for one process per device."
        yield Fault(path, f"processes_per_host = {wanted} does not divide {whose}.", hint)


def _resources(job: JobSpec) -> Iterator[Fault]:
    shm, memory = job.resources.shm, job.resources.memory
    if shm is not None and memory is not None and amount(shm) > amount(memory):
        message = f"resources.shm = {shm} is more than resources.memory = {memory}, against which it counts."
        yield Fault(("resources", "shm"), message, "raise memory, or lower shm.")


_FABRICS = {"efa": "eks", "gpudirect-tcpxo": "gke"}


def _network(job: JobSpec) -> Iterator[Fault]:
    name = job.network if isinstance(job.network, str) else job.network.profile
    if name in ("default", "hostnetwork"):
        return
    if job.accelerator.platform != "cuda":
        yield Fault(
            ("network",), f"network = {name} does not apply to {job.accelerator.type}.", "use default: it joins GPUs."
        )
    elif job.platform is not None and job.platform != _FABRICS.get(name, job.platform):
        message = f"network = {name} does not exist on platform = {job.platform}."
        yield Fault(
            ("network",), message, f"it is {_FABRICS[name]}'s; leave it out, or describe yours as {{profile: rdma, …}}."
        )


def _volumes(job: JobSpec) -> Iterator[Fault]:
    seen: dict[str, int] = {}
    for index, volume in enumerate(job.volumes):
        mount = volume.path.rstrip("/")
        path: KeyPath = ("volumes", index, "path")
        if mount in seen:
            yield Fault(
                path, f"volumes.{index}.path = {volume.path} is also volumes.{seen[mount]}'s.", "mount each elsewhere."
            )
        elif mount in ("/code", "/jaxlaunch", "/dev/shm"):
            yield Fault(path, f"volumes.{index}.path = {volume.path} is a path of our own.", "mount it elsewhere.")
        seen.setdefault(mount, index)


def _tolerations(job: JobSpec) -> Iterator[Fault]:
    for index, one in enumerate(job.tolerations):
        path: KeyPath = ("tolerations", index)
        where = f"tolerations.{index}"
        if one.operator == "Exists" and one.value:
            message = f"{where}.value = {one.value} is compared with nothing where operator = Exists."
            yield Fault((*path, "value"), message, "leave it out, or use operator: Equal.")
        if one.operator == "Equal" and one.key is None:
            yield Fault(
                path, f"{where} has no key to compare.", "key: …; every taint is operator: Exists without a key."
            )
        if one.seconds is not None and one.effect != "NoExecute":
            message = f"{where}.tolerationSeconds = {one.seconds} applies to effect = NoExecute alone."
            yield Fault((*path, "tolerationSeconds"), message, "leave it out, or use effect: NoExecute.")


# --- what is ours in a pod --------------------------------------------------------------------------------------------


def _environment(job: JobSpec) -> Iterator[Fault]:
    for block, names in (("env", job.env), ("secrets", job.secrets)):
        for name in names:
            if is_contract_variable(name):
                message = f"{block}.{name} is set by the launcher in every pod."
                yield Fault((block, name), message, "choose another name.")
    for name in job.secrets.keys() & job.env.keys():
        yield Fault(("env", name), f"env.{name} is also in secrets.", "keep one of them.")


def _labels(job: JobSpec) -> Iterator[Fault]:
    for block in ("labels", "annotations"):
        for key in getattr(job, block):
            domain = key.partition("/")[0]
            if "/" in key and any(domain == own or domain.endswith(f".{own}") for own in _OWN_DOMAINS):
                hint = "use queue: and priority:." if "kueue" in domain else "choose another domain."
                yield Fault((block, key), f"{block}.{key} is set by the launcher or the cluster.", hint)


def _pod(job: JobSpec) -> Iterator[Fault]:
    for key in job.pod:
        if key not in ("metadata", "spec"):
            yield Fault(("pod", key), f"pod.{key} is no part of a pod template.", "it has metadata and spec.")
    metadata, spec = job.pod.get("metadata", {}), job.pod.get("spec", {})
    for key, block in (("metadata", metadata), ("spec", spec)):
        if not isinstance(block, dict):
            yield Fault(("pod", key), f"pod.{key} is not a block.", "it is merged into the pod template.")
    if isinstance(metadata, dict) and "labels" in metadata:
        yield Fault(
            ("pod", "metadata", "labels"), "pod.metadata.labels would change our labels.", "use labels: instead."
        )
    if isinstance(spec, dict):
        yield from _pod_spec(spec)


_OURS_IN_SPEC = {
    "restartPolicy": "the gang restarts as a whole; see restarts:.",
    "terminationGracePeriodSeconds": "use grace: instead.",
}


def _pod_spec(spec: dict[str, Any]) -> Iterator[Fault]:
    for key, hint in _OURS_IN_SPEC.items():
        if key in spec:
            yield Fault(("pod", "spec", key), f"pod.spec.{key} is the launcher's to set.", hint)
    containers = spec.get("containers", [])
    for index, container in enumerate(containers if isinstance(containers, list) else [None]):
        path: KeyPath = ("pod", "spec", "containers", index)
        if not isinstance(container, dict) or not isinstance(container.get("name"), str):
            yield Fault(
                path[: 3 + isinstance(containers, list)], "pod.spec.containers is merged by name.", "give each a name."
            )
        elif container["name"] == MAIN_CONTAINER:
            yield from _main_container(container, path)


def _main_container(container: dict[str, Any], path: KeyPath) -> Iterator[Fault]:
    where = ".".join(map(str, path))
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


_DEVICES: tuple[KeyPath, ...] = (("hosts",), ("slices",), ("accelerator",))
_LAYOUT: tuple[KeyPath, ...] = (*_DEVICES, ("train", "mesh"))

CHECKS: tuple[Check, ...] = (
    Check((("name",), ("hosts",), ("slices",)), _names),
    Check((), _counts),
    Check((("hosts",), ("accelerator",)), _topology),
    Check((("processes_per_host",), ("accelerator",)), _processes),
    Check((), _resources),
    Check((("network",), ("accelerator",), ("platform",)), _network),
    Check((), _volumes),
    Check((), _tolerations),
    Check((), _environment),
    Check((), _labels),
    Check((), _pod),
    Check(_LAYOUT, layout.mesh_faults),
    Check(_LAYOUT, layout.slice_faults),
    Check((*_LAYOUT, ("train", "batch"), ("train", "accumulate")), layout.batch_faults),
    Check((*_LAYOUT, ("train", "model"), ("train", "task")), layout.model_faults),
    Check((*_LAYOUT, ("processes_per_host",)), layout.row_faults),
)
