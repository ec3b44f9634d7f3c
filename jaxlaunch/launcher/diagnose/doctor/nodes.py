"""Nodes and the cluster's DNS: whether the pods fit, and whether they can find each other. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal

from jaxlaunch.accelerators import OLDEST_DRIVER, PINNED_NCCL
from jaxlaunch.launcher.diagnose.doctor.finding import ASK_ADMIN, Finding, Findings, fail, fail_admin, ok, unknown, warn
from jaxlaunch.launcher.diagnose.text import Text
from jaxlaunch.launcher.jobs.status.hosts import agent_job, main_container
from jaxlaunch.launcher.kubernetes import resources
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.kubernetes.resources import parse_quantity
from jaxlaunch.launcher.platforms import gke
from jaxlaunch.launcher.platforms.facts import AMD_PRODUCT, GKE_GPU, GKE_TPU, GPU_PRODUCT, INSTANCE
from jaxlaunch.launcher.platforms.generic import DRIVER_LABEL
from jaxlaunch.launcher.platforms.runtime import (
    DEVICE_OWNERSHIP,
    PINNING_CAPABILITY,
    PINNING_LIMIT,
    TPU_DEVICES,
)
from jaxlaunch.launcher.platforms.table import RESOURCE
from jaxlaunch.launcher.wording import either

_CUDA = re.compile(r"cuda-?(\d+)")  # in an image's name or tag: those of a release end with their extra
_LOOK = f"{ASK_ADMIN} look: kubectl debug node/NODE -it --image=busybox --"
_KINDS = (
    GKE_TPU,
    GKE_GPU,
    GPU_PRODUCT,
    AMD_PRODUCT,
    INSTANCE,
)  # the label that names an accelerator, the most telling first


def place(nodes: Sequence[Obj], spec: Obj, pods: int, *, grows: bool) -> Finding:
    """Whether nodes with the labels, taints and size that the pods need exist; `grows`: an autoscaler may add more."""
    affine = [node for node in nodes if _in_affinity(spec, node)]
    found = resources.fit_nodes(spec, affine)
    if found.large:
        return _enough(affine, spec, found, pods, grows)
    what, fields = "none of {nodes:node} fits a pod of the job: {unmet}", {"nodes": len(nodes)}
    unmet = _unmet(found, nodes, affine, spec)
    if grows:
        why, fix = "pods stay Pending until the autoscaler adds such nodes.", "check that a node pool can provide them."
        return warn(what, why, fix, **fields, unmet=unmet)
    why = "pods stay Pending, and no autoscaler was found."
    fix = "check accelerator, node_selector and tolerations, or ask for such nodes."
    return fail(what, why, fix, **fields, unmet=unmet)


def _enough(nodes: Sequence[Obj], spec: Obj, found: resources.NodeFit, pods: int, grows: bool) -> Finding:
    """Whether all pods fit at once, if nothing else ran."""
    room = sum(
        _pods_that_fit(node, resources.pod_requests(spec)) for node in nodes if resources.fit_nodes(spec, [node]).large
    )
    fields = {"room": room, "pods": pods, "nodes": found.large}
    if room >= pods:
        return ok("room for the job's {pods:pod} on {nodes:node}, if nothing else ran there", **fields)
    what = "room for {room} of the job's {pods:pod} on {nodes:node}, even if nothing else ran"
    why = "a gang starts with all of its hosts or not at all."
    return (warn if grows else fail)(what, why, "use fewer hosts, or ask for more nodes.", **fields)


def drivers(nodes: Sequence[Obj], spec: Obj) -> Findings:
    """The NVIDIA drivers of the nodes that fit, where a label tells them, against the CUDA that the image's name tells.

    One that is too old is a warning alone: an image may bring CUDA's forward compatibility package.
    """
    if RESOURCE["cuda"].value not in resources.pod_requests(spec):
        return
    label = DRIVER_LABEL.value
    labelled = [node for node in nodes if label in (node["metadata"].get("labels") or {})]
    fitting = [node for node in labelled if _in_affinity(spec, node) and resources.fit_nodes(spec, [node]).large]
    counted = Counter(int(node["metadata"]["labels"][label]) for node in fitting)
    if not counted:
        return
    image = str(spec["containers"][0].get("image", "")).rpartition("/")[2]
    listed = [Text("{major} ({number:node})", major=major, number=number) for major, number in sorted(counted.items())]
    cuda = next((int(text) for text in _CUDA.findall(image)), 0)
    needed = OLDEST_DRIVER.get(cuda)
    old = [major for major in counted if needed is not None and major < needed]
    if not old:
        minimums = either([f"{oldest} for CUDA {version}" for version, oldest in OLDEST_DRIVER.items()])
        yield ok("NVIDIA drivers {listed}; an image needs at least {minimums}", listed=listed, minimums=minimums)
        return
    runs = [version for version, oldest in OLDEST_DRIVER.items() if oldest <= min(old)]
    other = "use an image with CUDA {newest} (EXTRA=cuda{newest}), or " if runs else ""
    yield warn(
        "NVIDIA drivers {listed}: {oldest} is too old for CUDA {cuda} of image {image}, which needs {needed}",
        "JAX finds no GPU there, and the job ends at its start.",
        f"{other}{ASK_ADMIN} update the driver.",
        listed=listed,
        oldest=min(old),
        cuda=cuda,
        image=image,
        needed=needed,
        newest=max(runs, default=0),
    )


def access(spec: Obj) -> Findings:
    """What a user of the pods that is not root needs of the nodes' containerd, and how to see it there."""
    main, own = main_container(spec), spec.get("securityContext") or {}
    job = agent_job(spec)
    security = main.get("securityContext") or {}
    user = security.get("runAsUser", own.get("runAsUser"))
    if job is None or security.get("privileged"):
        return
    root = "users: {{{accelerator}: root}} in the cluster defaults"
    fields = {"accelerator": job.accelerator, "user": user, "devices": TPU_DEVICES.value, "network": job.pinning}
    if job.platform == "tpu" and user == 0:
        added = (security.get("capabilities") or {}).get("add") or ["no capability"]
        yield ok("the pods run as root with {added}, so that they can open {devices}", added=list(added), **fields)
    if job.platform == "tpu" and user != 0:
        yield unknown(
            "whether user {user} of the pods may open {devices} on the nodes",
            "device files are root's unless containerd gives them to the pods' user; if that user may not open "
            "them, the job fails at its start with exit code 64.",
            _LOOK + " grep device_ownership /host/etc/containerd/config.toml (wanted: {setting}); or " + root + ".",
            **fields,
            setting=DEVICE_OWNERSHIP.value,
        )
    added = (security.get("capabilities") or {}).get("add") or ()
    if job.pinning is not None and (user != 0 or PINNING_CAPABILITY.value not in added):
        yield unknown(
            "how much memory user {user} of the pods may pin on the nodes for network {network}",
            "it is the limit of their containerd; if it is too small, the job fails at its start with exit code 64.",
            _LOOK + " sh -c 'grep locked /proc/$(pidof containerd)/limits' (wanted: unlimited, by {setting} in its "
            "unit); or " + root + ".",
            **fields,
            setting=PINNING_LIMIT.value,
        )


def nccl(spec: Obj) -> Findings:
    """Whether the NCCL that the program loads is one that the plugins of its network work with."""
    job, env = agent_job(spec), {one["name"]: one.get("value") or "" for one in main_container(spec).get("env") or ()}
    library = gke.TCPXO_VARIABLES.value["LD_PRELOAD"]
    if job is None or not str(job.pinning).startswith("gpudirect"):
        return
    if job.pinning != "gpudirect-tcpxo":
        what = "gIB works with NCCL {oldest} or newer, and an image of jaxlaunch has {pinned}"
        yield ok(what, oldest=gke.GIB_OLDEST_NCCL.value, pinned=PINNED_NCCL)
    elif library in env.get("LD_PRELOAD", ""):
        what = "NCCL {nccl} of the nodes' GPUDirect-TCPXO is loaded instead of the image's"
        yield ok(what, nccl=gke.TCPXO_NCCL.value)
    else:
        yield warn(
            "GPUDirect-TCPXO is qualified with NCCL {nccl}, and the program loads its image's: {pinned} in one of "
            "jaxlaunch",
            "hosts may fail to connect, or communicate slowly.",
            "env: {{LD_PRELOAD: {library}}}, under tcpxo.env where the cluster defaults have it.",
            nccl=gke.TCPXO_NCCL.value,
            pinned=PINNED_NCCL,
            library=library,
        )


def _pods_that_fit(node: Obj, requested: Mapping[str, Decimal]) -> int:
    """Pods that an empty node has room for."""
    has = node.get("status", {}).get("allocatable") or {}
    rooms = [parse_quantity(str(has.get("pods", "110")))]
    rooms += [parse_quantity(str(has.get(name, "0"))) // much for name, much in requested.items() if much]
    return int(min(rooms))


def _unmet(found: resources.NodeFit, nodes: Sequence[Obj], affine: Sequence[Obj], spec: Obj) -> Text:
    """Return the first requirement that no node meets."""
    if nodes and not affine:
        return Text("no node has {terms: or }", terms=[_requirement(term) for term in _terms(spec)])
    if not found.selected:
        absent = [f"{key}={value}" for key, value in found.absent.items()]
        missing = Text("no node has {absent: and }", absent=absent or Text("all of its labels"))
        offered = [
            Text("nodes have {key}={values}", key=key, values=either(values))
            for key, values in found.offered.items()
            if values
        ]
        return Text("{parts:; }", parts=[missing, *offered])
    if not found.tolerated:
        return Text("untolerated taints: {taints}", taints=list(found.taints))
    template = "a pod requests {name} {requested}, the largest node has {most}"
    short = [Text(template, name=name, requested=needs, most=most) for name, (needs, most) in found.short.items()]
    return Text("{short}", short=short)


def _terms(spec: Obj) -> Sequence[Obj]:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return [term for each in required.get("nodeSelectorTerms") or [] for term in each.get("matchExpressions") or []]


def _in_affinity(spec: Obj, node: Obj) -> bool:
    """Whether a node has one of the label values of the job's accelerator; other operators than In are not judged."""
    labels = node["metadata"].get("labels") or {}
    return all(labels.get(term["key"]) in term["values"] for term in _terms(spec) if term["operator"] == "In")


def _requirement(term: Obj) -> Text:
    return Text("{key} in {values}", key=term["key"], values=term.get("values") or [])


def unrequested(names: Sequence[str], *, is_known: bool) -> Finding:
    """Pods that request no cpu or no memory, such as those of a job without `resources:`.

    `is_known`: the namespace's LimitRanges, which may set what a pod does not request, were read.
    """
    if not is_known:
        why = "the job requests no {names}, and you have no permission to list LimitRanges, which may set it."
        return unknown("whether the pods request {names}", why, names=either(names))
    why = (
        "the scheduler counts none for them and may choose nodes that are full, where they are slow; under memory "
        "pressure they are the first to be evicted."
    )
    fix = "resources: {{cpu: …, memory: …}}, of one host."
    return warn("the pods request no {names}", why, fix, names=either(names))


def accelerators(nodes: Sequence[Obj]) -> Finding:
    """The accelerators of the nodes, by the label that names their type."""
    counted: dict[str, Decimal] = {}
    for node in nodes:
        labels, has = node["metadata"].get("labels") or {}, node.get("status", {}).get("allocatable") or {}
        for resource in (known.value for known in RESOURCE.values()):
            if much := parse_quantity(str(has.get(resource, "0"))):
                kind = next((labels[key] for key in _KINDS if key in labels), "of a type that no label names")
                counted[f"{resource} {kind}"] = counted.get(f"{resource} {kind}", Decimal(0)) + much
    listed = [f"{much:f} {kind}" for kind, much in sorted(counted.items())] or Text("no accelerators")
    return ok("{nodes:node} with {listed}", nodes=len(nodes), listed=listed)


def dns(services: Sequence[Obj], ready: int) -> Findings:
    """The cluster's DNS, by which hosts find host 0."""
    if not services:
        why = "no Service labelled k8s-app=kube-dns is in namespace kube-system; it may have another name."
        yield unknown("whether the cluster's DNS works is not known", why)
    elif not ready:
        name = services[0]["metadata"]["name"]
        why = "no host can resolve host 0, and the rendezvous never ends."
        what = "the cluster's DNS {name} has no ready endpoint"
        yield fail_admin(what, why, "kubectl -n kube-system get pods", name=name)
    else:
        what = "the cluster's DNS has {ready:ready endpoint}; whether pods reach it, only a pod can show"
        yield ok(what, ready=ready)
