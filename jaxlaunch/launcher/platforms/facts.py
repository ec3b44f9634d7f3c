"""Types of the facts about a platform's nodes. Every fact names its source."""

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
# Placeholders in values of labels for the parts of a reservation that a job names.
NAME, PROJECT, BLOCK, SUB_BLOCK = "NAME", "PROJECT", "BLOCK", "SUB_BLOCK"


@dataclasses.dataclass(frozen=True)
class Instance:
    """A machine type: GPUs, nominal memory of each GPU, and interfaces of the fast network."""

    gpus: int
    memory_gb: int
    # None if not known.
    efa: int | None = 0
    source: Source | None = None


@dataclasses.dataclass(frozen=True)
class Access:
    """The Pod Security level and the requirements on nodes of a kind of job and user."""

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
    """A kind of node: its labels, with alternative values, and the taints to tolerate."""

    labels: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    # None for labels that a job or the cluster defaults name.
    source: Source | None = None
    # Plugins of NCCL that an installer puts where the NCCL of every job finds them.
    plugins: Fact[str] | None = None
    # RDMA adapters that GKE's managed DRANET gives a pod.
    rdma: Fact[int] | None = None
    # The configuration of these machines for the tuner of NCCL's plugin gIB.
    gib_tuner: Fact[str] | None = None


@dataclasses.dataclass(frozen=True)
class PlatformFacts:
    """The facts about a platform. An accelerator that is not in `nodes` does not exist there."""

    nodes: Mapping[str, Nodes]  # by accelerator type
    capacity: Mapping[str, Nodes] = dataclasses.field(default_factory=dict)  # by kind of capacity
    # The same, where it depends on who adds the nodes.
    provisioners: Mapping[Provisioner, Mapping[str, Nodes]] = dataclasses.field(
        default_factory=dict
    )
    networks: tuple[str, ...] = ()  # fast networks that exist there alone, as `network:` names them
    instances: Mapping[str, Instance] = dataclasses.field(
        default_factory=dict
    )  # by the value of a label
    largest: Mapping[str, Fact[int]] = dataclasses.field(
        default_factory=dict
    )  # GPUs of the largest machine, likewise
    memory_gb: Mapping[str, Fact[float]] = dataclasses.field(
        default_factory=dict
    )  # of each GPU, likewise
    slice_label: Fact[str] | None = None  # that nodes of one TPU slice share
    # Search paths that a program needs there to find its driver, by JAX's platform.
    search_paths: Mapping[str, Fact[Mapping[str, str]]] = dataclasses.field(default_factory=dict)


def toleration_for(key: str, effect: str = "NoSchedule") -> Mapping[str, Any]:
    """Return the toleration of a taint with any value."""
    return {"key": key, "operator": "Exists", "effect": effect}


GPU_TAINT = toleration_for("nvidia.com/gpu")
TPU_TAINT = toleration_for("google.com/tpu")
ARM_TAINT = {
    "key": "kubernetes.io/arch",
    "operator": "Equal",
    "value": "arm64",
    "effect": "NoSchedule",
}
