"""Types of the facts about platforms and their nodes. Every fact has a source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar

from jaxlaunch.accelerators import Source

Provisioner = Literal["karpenter", "managed", "auto"]

INSTANCE = "node.kubernetes.io/instance-type"
GKE_GPU = "cloud.google.com/gke-accelerator"
GKE_TPU = "cloud.google.com/gke-tpu-accelerator"
GKE_TOPOLOGY = "cloud.google.com/gke-tpu-topology"
GPU_PRODUCT = "nvidia.com/gpu.product"
AMD_DEVICE, AMD_PRODUCT = "amd.com/gpu.device-id", "amd.com/gpu.product-name"
# Placeholders in the values of labels, for the parts of a reservation that a job names.
RESERVATION_NAME, RESERVATION_PROJECT = "NAME", "PROJECT"
RESERVATION_BLOCK, RESERVATION_SUB_BLOCK = "BLOCK", "SUB_BLOCK"


@dataclasses.dataclass(frozen=True)
class Instance:
    """A machine type of Amazon EC2.

    Attributes:
        gpus: Number of GPUs.
        memory_gb: Nominal memory of each GPU.
        efa: Number of EFA interfaces; None if it is not known.
        source: Source of these numbers.
    """

    gpus: int
    memory_gb: int
    efa: int | None = 0
    source: Source | None = None


@dataclasses.dataclass(frozen=True)
class PodSecurity:
    """The Pod Security level of a kind of job and user.

    Attributes:
        job: Kind of job: its accelerator or network.
        user: User of its pods.
        level: The strictest level that admits the pods.
        needs: Setting that the nodes need.
        source: Source of these facts.
    """

    job: str
    user: str
    level: str
    needs: str
    source: Source


_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True)
class Fact(Generic[_Value]):
    """A value with its source."""

    value: _Value
    source: Source


@dataclasses.dataclass(frozen=True)
class Nodes:
    """A kind of node.

    Attributes:
        labels: Labels of the nodes, each with its possible values.
        tolerations: Tolerations of the nodes' taints.
        source: Source of the labels; None for those that a job or the cluster defaults name.
        plugins: NCCL plugins that an installer on the nodes adds to every job.
        rdma: Number of RDMA adapters that GKE's managed DRANET assigns to a pod.
        gib_tuner: Configuration file of these machines for the tuner of NCCL's plugin gIB.
    """

    labels: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    source: Source | None = None
    plugins: Fact[str] | None = None
    rdma: Fact[int] | None = None
    gib_tuner: Fact[str] | None = None


@dataclasses.dataclass(frozen=True)
class PlatformFacts:
    """The facts about a platform.

    Attributes:
        nodes: Nodes by accelerator type. The platform does not have any other accelerator.
        capacity: Nodes by kind of capacity.
        provisioners: Nodes by provisioner and kind of capacity, if they depend on the provisioner.
        networks: Values of `network:` for fast networks that only this platform has.
        instances: Machine types by the value of a node label.
        largest: GPUs of the largest machine, by the value of a node label.
        memory_gb: Memory of each GPU, by the value of a node label.
        slice_label: Label that nodes of one TPU slice share.
        search_paths: Environment variables by which programs find the driver, by JAX's platform.
    """

    nodes: Mapping[str, Nodes]
    capacity: Mapping[str, Nodes] = dataclasses.field(default_factory=dict)
    provisioners: Mapping[Provisioner, Mapping[str, Nodes]] = dataclasses.field(
        default_factory=dict
    )
    networks: tuple[str, ...] = ()
    instances: Mapping[str, Instance] = dataclasses.field(default_factory=dict)
    largest: Mapping[str, Fact[int]] = dataclasses.field(default_factory=dict)
    memory_gb: Mapping[str, Fact[float]] = dataclasses.field(default_factory=dict)
    slice_label: Fact[str] | None = None
    search_paths: Mapping[str, Fact[Mapping[str, str]]] = dataclasses.field(default_factory=dict)


def toleration_for(key: str, effect: str = "NoSchedule") -> Mapping[str, Any]:
    """Return a toleration of a taint with this key and any value."""
    return {"key": key, "operator": "Exists", "effect": effect}


GPU_TAINT = toleration_for("nvidia.com/gpu")
TPU_TAINT = toleration_for("google.com/tpu")
ARM_TAINT = {
    "key": "kubernetes.io/arch",
    "operator": "Equal",
    "value": "arm64",
    "effect": "NoSchedule",
}
