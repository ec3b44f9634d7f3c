"""Findings about the nodes and how pods fit them, and about the cluster's DNS. Pure functions."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from decimal import Decimal

from jaxlaunch.accelerators import OLDEST_DRIVER, PINNED_NCCL
from jaxlaunch.launcher.diagnose.doctor.finding import (
    ASK_ADMIN,
    Finding,
    Findings,
    admin_failure,
    ok_finding,
    unknown_finding,
    user_failure,
    warning_finding,
)
from jaxlaunch.launcher.diagnose.text import Text
from jaxlaunch.launcher.jobs.status.hosts import agent_job, main_container
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.kubernetes.resources import (
    NodeFit,
    allocatable_quantity,
    fit_nodes,
    pod_requests,
)
from jaxlaunch.launcher.platforms import gke
from jaxlaunch.launcher.platforms.facts import AMD_PRODUCT, GKE_GPU, GKE_TPU, GPU_PRODUCT, INSTANCE
from jaxlaunch.launcher.platforms.generic import DRIVER_LABEL
from jaxlaunch.launcher.platforms.names import RESOURCE_DOMAINS
from jaxlaunch.launcher.platforms.runtime import (
    DEVICE_OWNERSHIP,
    PINNING_CAPABILITY,
    PINNING_LIMIT,
    TPU_DEVICES,
)
from jaxlaunch.launcher.wording import join_choices

# CUDA version in the name or the tag of an image. Tags of jaxlaunch's images end in `cuda12`.
_CUDA_VERSION = re.compile(r"cuda-?(\d+)")
_INSPECT_NODE = f"{ASK_ADMIN} look: kubectl debug node/NODE -it --image=busybox --"
# Labels with the type of the accelerator, most specific first.
_TYPE_LABELS = (GKE_TPU, GKE_GPU, GPU_PRODUCT, AMD_PRODUCT, INSTANCE)


def judge_room(nodes: Sequence[Obj], spec: Obj, pods: int, *, has_autoscaler: bool) -> Finding:
    """Judge whether nodes fit the pods, and have room for all of them at once.

    Args:
        nodes: Nodes of the cluster.
        spec: Pod spec of the job.
        pods: Number of pods.
        has_autoscaler: Whether an autoscaler may add nodes.
    """
    affine_nodes = [node for node in nodes if _matches_affinity(spec, node)]
    fit = fit_nodes(spec, affine_nodes)
    if not fit.large:
        summary = "none of {nodes:node} fits a pod of the job: {unmet}"
        fields = {"nodes": len(nodes), "unmet": _describe_unmet(fit, nodes, affine_nodes, spec)}
        if has_autoscaler:
            reason = "pods stay Pending until the autoscaler adds such nodes."
            remedy = "check that a node pool can provide them."
            return warning_finding(summary, reason, remedy, **fields)
        reason = "pods stay Pending, and no autoscaler was found."
        remedy = "check accelerator, node_selector and tolerations, or ask for such nodes."
        return user_failure(summary, reason, remedy, **fields)
    requests = {name: quantity for name, quantity in pod_requests(spec).items() if quantity}
    fitting_nodes = [node for node in affine_nodes if fit_nodes(spec, [node]).large]
    room = 0
    for node in fitting_nodes:
        pods_by_resource = [
            allocatable_quantity(node, name) // quantity for name, quantity in requests.items()
        ]
        room += int(min(allocatable_quantity(node, "pods", "110"), *pods_by_resource))
    fields = {"room": room, "pods": pods, "nodes": fit.large}
    if room >= pods:
        summary = "room for the job's {pods:pod} on {nodes:node}, if nothing else ran there"
        return ok_finding(summary, **fields)
    summary = "room for {room} of the job's {pods:pod} on {nodes:node}, even if nothing else ran"
    reason = "a gang starts with all of its hosts or not at all."
    remedy = "use fewer hosts, or ask for more nodes."
    return (warning_finding if has_autoscaler else user_failure)(summary, reason, remedy, **fields)


def _describe_unmet(
    fit: NodeFit, nodes: Sequence[Obj], affine_nodes: Sequence[Obj], spec: Obj
) -> Text:
    """Return the first requirement that no node meets."""
    if nodes and not affine_nodes:
        terms = [
            Text("{key} in {values}", key=term["key"], values=term.get("values") or [])
            for term in _affinity_terms(spec)
        ]
        return Text("no node has {terms: or }", terms=terms)
    if not fit.selected:
        missing_labels = [f"{key}={value}" for key, value in fit.missing_labels.items()]
        missing = Text(
            "no node has {absent: and }", absent=missing_labels or Text("all of its labels")
        )
        offered = [
            Text("nodes have {key}={values}", key=key, values=join_choices(values))
            for key, values in fit.offered_values.items()
            if values
        ]
        return Text("{parts:; }", parts=[missing, *offered])
    if not fit.tolerated:
        return Text("untolerated taints: {taints}", taints=list(fit.untolerated_taints))
    template = "a pod requests {name} {requested}, the largest node has {most}"
    shortages = [
        Text(template, name=name, requested=requested, most=most)
        for name, (requested, most) in fit.shortages.items()
    ]
    return Text("{short}", short=shortages)


def _affinity_terms(spec: Obj) -> Sequence[Obj]:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return [
        term
        for block in required.get("nodeSelectorTerms") or []
        for term in block.get("matchExpressions") or []
    ]


def _matches_affinity(spec: Obj, node: Obj) -> bool:
    """Return whether a node matches the required node affinity. Only operator In is checked."""
    labels = node["metadata"].get("labels") or {}
    terms = [term for term in _affinity_terms(spec) if term["operator"] == "In"]
    return all(labels.get(term["key"]) in term["values"] for term in terms)


def judge_missing_requests(names: Sequence[str], *, are_limit_ranges_known: bool) -> Finding:
    """Judge pods that request no cpu or no memory, such as those of a job without `resources:`.

    Args:
        names: Resources that they do not request.
        are_limit_ranges_known: Whether the LimitRanges of the namespace, which may set defaults,
            could be read.
    """
    choices = join_choices(names)
    if not are_limit_ranges_known:
        reason = (
            "the job requests no {names}, and you have no permission to list LimitRanges, which "
            "may set it."
        )
        return unknown_finding("whether the pods request {names}", reason, names=choices)
    reason = (
        "the scheduler reserves none for them and may place them on full nodes, where they are "
        "slow; under memory pressure they are the first to be evicted."
    )
    remedy = "resources: {{cpu: …, memory: …}}, of one host."
    return warning_finding("the pods request no {names}", reason, remedy, names=choices)


def count_accelerators(nodes: Sequence[Obj]) -> Finding:
    """Count the accelerators of the nodes by type."""
    counts: dict[str, Decimal] = defaultdict(Decimal)
    for node in nodes:
        labels = node["metadata"].get("labels") or {}
        type_labels = (labels[key] for key in _TYPE_LABELS if key in labels)
        accelerator_type = next(type_labels, "of an unknown type")
        for name in (node.get("status") or {}).get("allocatable") or {}:
            if name.partition("/")[0] in RESOURCE_DOMAINS and (
                quantity := allocatable_quantity(node, name)
            ):
                counts[f"{name} {accelerator_type}"] += quantity
    descriptions = [
        f"{quantity:f} {accelerator}" for accelerator, quantity in sorted(counts.items())
    ]
    return ok_finding(
        "{nodes:node} with {listed}",
        nodes=len(nodes),
        listed=descriptions or Text("no accelerators"),
    )


def judge_drivers(nodes: Sequence[Obj], spec: Obj) -> Findings:
    """Compare the NVIDIA drivers of the nodes that fit with the CUDA version in the image's name.

    A driver that is too old is only a warning, because the image may have CUDA's forward
    compatibility package.
    """
    if not any(
        RESOURCE_DOMAINS.get(name.partition("/")[0]) == "cuda" for name in pod_requests(spec)
    ):
        return
    counts = Counter(
        int(version)
        for node in nodes
        if (version := (node["metadata"].get("labels") or {}).get(DRIVER_LABEL.value))
        and _matches_affinity(spec, node)
        and fit_nodes(spec, [node]).large
    )
    if not counts:
        return
    image = str(spec["containers"][0].get("image", "")).rpartition("/")[2]
    template = "{major} ({number:node})"
    descriptions = [
        Text(template, major=major, number=number) for major, number in sorted(counts.items())
    ]
    cuda = next((int(text) for text in _CUDA_VERSION.findall(image)), 0)
    required_driver, oldest_driver = OLDEST_DRIVER.get(cuda), min(counts)
    if required_driver is None or oldest_driver >= required_driver:
        minimums = [f"{driver} for CUDA {cuda}" for cuda, driver in OLDEST_DRIVER.items()]
        summary = "NVIDIA drivers {listed}; an image needs at least {minimums}"
        yield ok_finding(summary, listed=descriptions, minimums=join_choices(minimums))
        return
    supported_versions = [
        version for version, driver in OLDEST_DRIVER.items() if driver <= oldest_driver
    ]
    image_fix = (
        "use an image with CUDA {newest} (EXTRA=cuda{newest}), or " if supported_versions else ""
    )
    yield warning_finding(
        "NVIDIA drivers {listed}: {oldest} is too old for CUDA {cuda} of image {image}, which "
        "needs {needed}",
        "JAX finds no GPU there, and the job ends at its start.",
        f"{image_fix}{ASK_ADMIN} update the driver.",
        listed=descriptions,
        oldest=oldest_driver,
        cuda=cuda,
        image=image,
        needed=required_driver,
        newest=max(supported_versions, default=0),
    )


def judge_device_access(spec: Obj) -> Findings:
    """Report the containerd settings without which the pods' user cannot use the devices."""
    job, security = agent_job(spec), main_container(spec).get("securityContext") or {}
    user = security.get("runAsUser", (spec.get("securityContext") or {}).get("runAsUser"))
    if job is None or security.get("privileged"):
        return
    added_capabilities = (security.get("capabilities") or {}).get("add") or []
    fields = {"accelerator": job.accelerator, "user": user, "network": job.pinning}
    fields |= {"devices": TPU_DEVICES.value, "added": list(added_capabilities) or ["no capability"]}
    root_fix = "users: {{{accelerator}: root}} in the cluster defaults."
    if job.platform == "tpu" and user == 0:
        summary = "the pods run as root with {added}, so that they can open {devices}"
        yield ok_finding(summary, **fields)
    if job.platform == "tpu" and user != 0:
        summary = "whether user {user} of the pods may open {devices} on the nodes"
        reason = (
            "device files are root's unless containerd gives them to the pods' user; if that user "
            "may not open them, the job fails at its start with exit code 64."
        )
        remedy = " grep device_ownership /host/etc/containerd/config.toml (wanted: {setting}); or "
        remedy = _INSPECT_NODE + remedy + root_fix
        yield unknown_finding(summary, reason, remedy, **fields, setting=DEVICE_OWNERSHIP.value)
    if job.pinning is not None and (
        user != 0 or PINNING_CAPABILITY.value not in added_capabilities
    ):
        summary = (
            "how much memory user {user} of the pods may pin on the nodes for network {network}"
        )
        reason = (
            "it is the limit of their containerd; if it is too small, the job fails at its start "
            "with exit code 64."
        )
        remedy = (
            " sh -c 'grep locked /proc/$(pidof containerd)/limits' (wanted: unlimited, by "
            "{setting} in its unit); or "
        )
        remedy = _INSPECT_NODE + remedy + root_fix
        yield unknown_finding(summary, reason, remedy, **fields, setting=PINNING_LIMIT.value)


def judge_nccl(spec: Obj) -> Findings:
    """Judge whether the program's NCCL version works with the GPUDirect plugin of its network."""
    job = agent_job(spec)
    env = {
        variable["name"]: variable.get("value") or ""
        for variable in main_container(spec).get("env") or ()
    }
    library = gke.TCPXO_VARIABLES.value["LD_PRELOAD"]
    if job is None or not str(job.pinning).startswith("gpudirect"):
        return
    if job.pinning != "gpudirect-tcpxo":
        summary = "gIB works with NCCL {oldest} or newer, and an image of jaxlaunch has {pinned}"
        yield ok_finding(summary, oldest=gke.GIB_OLDEST_NCCL.value, pinned=PINNED_NCCL)
    elif library in env.get("LD_PRELOAD", ""):
        summary = "NCCL {nccl} of the nodes' GPUDirect-TCPXO is loaded instead of the image's"
        yield ok_finding(summary, nccl=gke.TCPXO_NCCL.value)
    else:
        yield warning_finding(
            "GPUDirect-TCPXO is qualified with NCCL {nccl}, and the program loads its image's: "
            "{pinned} in one of jaxlaunch",
            "hosts may fail to connect, or communicate slowly.",
            "env: {{LD_PRELOAD: {library}}}, under tcpxo.env where the cluster defaults have it.",
            nccl=gke.TCPXO_NCCL.value,
            pinned=PINNED_NCCL,
            library=library,
        )


def judge_dns(dns_services: Sequence[Obj], ready_endpoints: int) -> Findings:
    """Judge the cluster's DNS, which hosts need to find host 0."""
    if not dns_services:
        reason = (
            "no Service labelled k8s-app=kube-dns is in namespace kube-system; it may have "
            "another name."
        )
        yield unknown_finding("whether the cluster's DNS works is not known", reason)
    elif not ready_endpoints:
        name = dns_services[0]["metadata"]["name"]
        reason = "no host can resolve host 0, and the rendezvous never ends."
        summary = "the cluster's DNS {name} has no ready endpoint"
        yield admin_failure(summary, reason, "kubectl -n kube-system get pods", name=name)
    else:
        summary = (
            "the cluster's DNS has {ready:ready endpoint}; whether pods reach it, only a "
            "pod can show"
        )
        yield ok_finding(summary, ready=ready_endpoints)
