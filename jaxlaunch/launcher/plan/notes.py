"""Notes of `plan` on valid choices that cost time or progress on a platform."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from jaxlaunch import contract
from jaxlaunch.accelerators import ACCELERATORS, OLDEST_CAPABILITY
from jaxlaunch.launcher.job.schema import Reservation
from jaxlaunch.launcher.manifests.jobset import ResolvedJob
from jaxlaunch.launcher.platforms import eks, gke, runtime
from jaxlaunch.launcher.platforms.facts import GKE_GPU, INSTANCE
from jaxlaunch.launcher.wording import format_count

_Check = Callable[[ResolvedJob], Iterator[str]]
_CHECKS: list[_Check] = []


def _register(check: _Check) -> _Check:
    _CHECKS.append(check)
    return check


def list_notes(job: ResolvedJob) -> Iterator[str]:
    """Yield the notes on a job."""
    for check in _CHECKS:
        yield from check(job)


@_register
def _note_spot(job: ResolvedJob) -> Iterator[str]:
    # A reclaimed node may disappear before the job's grace period is over.
    usual_s, most_s = gke.SPOT_GRACE_S.value, gke.LARGEST_SPOT_GRACE_S.value
    is_spot = job.nodes.platform == "gke" and job.spec.capacity == "spot"
    if is_spot and job.spec.grace > usual_s:
        yield (
            f"grace: {job.spec.grace:g} s, but GKE ends the pods of a Spot node after {usual_s} s, "
            f"or at most {most_s} s where its node pool says so: a save that takes longer is lost "
            "with it. Save often enough by train.checkpoint.every."
        )


@_register
def _note_hugepages(job: ResolvedJob) -> Iterator[str]:
    adds_nodes = job.nodes.platform == "eks" and job.nodes.provisioner == "karpenter"
    if job.spec.resources.hugepages is not None and adds_nodes:
        yield (
            f"resources.hugepages: {job.spec.resources.hugepages}, but Karpenter adds no node for "
            "pods that request huge pages: they wait until there is a node that has them."
        )


@_register
def _note_eks(job: ResolvedJob) -> Iterator[str]:
    capacity, nodes = job.spec.capacity, job.nodes
    if nodes.platform != "eks":
        return
    if (
        isinstance(capacity, Reservation)
        and nodes.provisioner == "managed"
        and nodes.capacity is not None
    ):
        (label,) = nodes.capacity.labels
        yield (
            "capacity: nodes of managed node groups do not say their reservation: label the group "
            f"that has it {label}={capacity.reservation}, or name its label in the cluster "
            "defaults: reservation_label."
        )
    if job.network.choice == "efa-dra" and nodes.provisioner != "managed":
        yield (
            "network: efa-dra is supported on managed node groups; Karpenter adds nodes for it "
            "only with settings.enableDRA, an alpha feature of 1.15, and Auto Mode does not: "
            "elsewhere network: efa."
        )


@_register
def _note_slice(job: ResolvedJob) -> Iterator[str]:
    if job.spec.accelerator.platform == "tpu" and job.spec.host_count > 1:
        other_slices = f", of all {job.spec.slices} slices" if job.spec.slices > 1 else ""
        yield (
            "restarts: a TPU slice is lost as a whole, so a lost host costs all "
            f"pods{other_slices}: they are created again together, while those of a GPU job would "
            "wait for the one that is lost."
        )


_GPU_NETWORKS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "gke": (GKE_GPU, {gpu: factor.value for gpu, factor in gke.GPU_NETWORK_FACTOR.items()}),
    # Each EFA interface is on its own network card, and TCP uses only the first card.
    "eks": (INSTANCE, {name: instance.efa or 0 for name, instance in eks.INSTANCES.items()}),
}


@_register
def _note_tcp(job: ResolvedJob) -> Iterator[str]:
    # These hosts have a separate fast network for their GPUs, which the job does not use.
    platform_networks = _GPU_NETWORKS.get(job.nodes.platform)
    if platform_networks is None or job.network.choice != "default" or job.spec.host_count == 1:
        return
    label, factors = platform_networks
    values = job.nodes.labels.get(label, ())
    if len(values) == 1 and (factor := factors.get(values[0], 1)) > 1:
        yield (
            f"network: the {format_count(job.spec.host_count, 'host')} communicate over TCP on one "
            f"interface; those of {values[0]} for its GPUs have {factor} × its bandwidth: "
            f"{_suggest_network(values[0])}."
        )


def _suggest_network(node_type: str) -> str:
    if node_type in eks.INSTANCES:
        return "network: efa"
    if node_type == gke.TCPXO_GPU.value:
        slow, fast = gke.NCCL_GB_PER_S.value
        return (
            f"network: gpudirect-tcpxo, with which NVIDIA measured NCCL at {fast} GB/s in "
            f"place of {slow}"
        )
    if node_type == gke.TCPX_GPU.value:
        return (
            f"jaxlaunch does not support their GPUDirect-TCPX, and {gke.TCPXO_GPU.value} has "
            "network: gpudirect-tcpxo"
        )
    if node_type in gke.COMPUTE_DOMAIN_GPUS.value:
        return "network: gpudirect-rdma-dra, and compute_domain: true for their NVLink"
    return "network: gpudirect-rdma"


@_register
def _note_render_group(job: ResolvedJob) -> Iterator[str]:
    # A user other than root can open AMD's devices only through their group.
    user = job.security.user
    if (
        job.spec.accelerator.platform == "rocm"
        and user
        and "supplementalGroups" not in str(job.spec.pod)
    ):
        yield (
            f"devices: /dev/kfd and /dev/dri belong to the node's group render, and user {user} of "
            "the pods opens them by its number alone: pod: {spec: {securityContext: "
            "{supplementalGroups: [NUMBER]}}}, from `getent group render` on a node."
        )


@_register
def _note_arm(job: ResolvedJob) -> Iterator[str]:
    if ACCELERATORS[job.spec.accelerator.type].is_arm:
        yield (
            f"image: nodes of {job.spec.accelerator.type} are arm64; an image for amd64 alone ends "
            "there with `exec format error`."
        )


@_register
def _note_numa(job: ResolvedJob) -> Iterator[str]:
    # One process drives the chips of several NUMA nodes. In pods of Google and xpk, each NUMA node
    # has its own container.
    hardware, accelerator = ACCELERATORS[job.spec.accelerator.type], job.spec.accelerator
    if hardware.numa_nodes > 1 and accelerator.per_host > 1:
        yield (
            f"host: the {accelerator.per_host} chips of a {accelerator.type} host are on "
            f"{hardware.numa_nodes} NUMA nodes, and one process drives them all; Google's pods and "
            "xpk's have a bound container for each node, which jaxlaunch does not: what crosses "
            "the nodes is slower."
        )


@_register
def _note_any_gpu(job: ResolvedJob) -> Iterator[str]:
    kind = job.spec.accelerator.type
    if kind in ("gpu", "amdgpu") and not job.nodes.labels:
        hosts = job.spec.host_count
        if hosts == 1:
            subject = "the host may have any GPU"
        else:
            subject = f"the {format_count(hosts, 'host')} may have different GPUs"
        yield f"accelerator: {kind} names none, and {subject}: choose their nodes by node_selector."


@_register
def _note_cuda(job: ResolvedJob) -> Iterator[str]:
    # The GPU may be too old for a version of CUDA, unless the image's name says that its CUDA is
    # older.
    accelerator_type = job.spec.accelerator.type
    capability, image = ACCELERATORS[accelerator_type].capability, job.code.image or ""
    for cuda, oldest in OLDEST_CAPABILITY.items():
        if capability is not None and float(capability) < oldest and f"cuda{cuda - 1}" not in image:
            yield (
                f"image: {accelerator_type} has compute capability {capability}, and CUDA {cuda} "
                f"does not compile for less than {oldest}: an image needs CUDA "
                f"{cuda - 1} (EXTRA=cuda{cuda - 1})."
            )


@_register
def _note_proxy(job: ResolvedJob) -> Iterator[str]:
    proxies = contract.find_proxies(job.spec.env)
    if proxies and job.spec.processes > 1:
        yield (
            f"env: {', '.join(proxies)} {'name' if len(proxies) > 1 else 'names'} a proxy; the "
            "processes connect to each other without it: their names and addresses are added to "
            "no_proxy, NO_PROXY and no_grpc_proxy."
        )


@_register
def _note_user(job: ResolvedJob) -> Iterator[str]:
    accelerator_type, pinning = job.spec.accelerator.type, job.network.pinning
    root = f"users: {{{accelerator_type}: root}} in the cluster defaults"
    if job.security.user == 0 and not job.security.is_user_set:
        yield (
            "user: the pods run as root without capabilities (Pod Security level baseline): no "
            f"source says that another user may open {runtime.TPU_DEVICES.value} on the nodes; "
            f"where their containerd has {runtime.DEVICE_OWNERSHIP.value}, "
            f"users: {{{accelerator_type}: 1000}} in the cluster defaults."
        )
        return
    if job.security.user == 0:
        privilege = ", in a privileged container" if job.security.is_privileged else ""
        key = f"users.{accelerator_type}"
        yield f"user: the pods run as root{privilege}, by {key} of the cluster defaults."
        return
    if job.spec.accelerator.platform == "tpu":
        yield (
            f"user: {job.security.user}, who can open {runtime.TPU_DEVICES.value} only where the "
            f"nodes' containerd has {runtime.DEVICE_OWNERSHIP.value}; elsewhere {root}."
        )
    if pinning is not None:
        yield (
            f"user: {job.security.user}, who can pin memory for network {pinning} only where the "
            f"nodes' containerd has {runtime.PINNING_LIMIT.value}; elsewhere {root}."
        )
