"""The form of what is known of a platform's nodes. Every fact names the source that it was read from."""

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
# Parts of a reservation that a job names, where a label's value holds them.
NAME, PROJECT, BLOCK, SUB_BLOCK = "NAME", "PROJECT", "BLOCK", "SUB_BLOCK"


@dataclasses.dataclass(frozen=True)
class Instance:
    """A machine type: GPUs, GiB of memory of each as its maker names it, and interfaces for the fast network."""

    gpus: int
    memory_gb: int
    efa: int | None = 0  # None: not known
    source: Source | None = None


@dataclasses.dataclass(frozen=True)
class Access:
    """What a user of the pods means for a kind of job: the Pod Security level, and what the nodes must give."""

    job: str
    user: str
    level: str
    needs: str
    source: Source


_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True)
class Fact(Generic[_Value]):
    """Any other value, and its source."""

    value: _Value
    source: Source


@dataclasses.dataclass(frozen=True)
class Nodes:
    """A kind of node: its labels, one of several values for a key, and the taints to tolerate."""

    labels: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    source: Source | None = None  # None: a job's or a cluster's own words
    plugins: Fact[str] | None = None  # of NCCL, that an installer puts where the NCCL of every job finds them
    rdma: Fact[int] | None = None  # adapters for RDMA that GKE's managed DRANET gives a pod
    gib_tuner: Fact[str] | None = None  # the configuration of these machines for the tuner of NCCL's plugin gIB


@dataclasses.dataclass(frozen=True)
class PlatformFacts:
    """A platform's row in the table: what jobs are made from and judged by. An accelerator that is not in `nodes` does
    not exist there."""

    nodes: Mapping[str, Nodes]  # by accelerator type
    capacity: Mapping[str, Nodes] = dataclasses.field(default_factory=dict)  # by kind of capacity
    # The same, where it depends on who adds the nodes.
    provisioners: Mapping[Provisioner, Mapping[str, Nodes]] = dataclasses.field(default_factory=dict)
    networks: tuple[str, ...] = ()  # fast networks that exist there alone, as `network:` names them
    instances: Mapping[str, Instance] = dataclasses.field(default_factory=dict)  # by the value of a label
    largest: Mapping[str, Fact[int]] = dataclasses.field(default_factory=dict)  # GPUs of the largest machine, likewise
    memory_gb: Mapping[str, Fact[float]] = dataclasses.field(default_factory=dict)  # of each GPU, likewise
    slice_label: Fact[str] | None = None  # that nodes of one TPU slice share
    # Search paths that a program needs there to find its driver, by JAX's platform.
    search_paths: Mapping[str, Fact[Mapping[str, str]]] = dataclasses.field(default_factory=dict)


def tolerate(key: str) -> Mapping[str, Any]:
    """The toleration of a taint, whatever its value."""
    return {"key": key, "operator": "Exists", "effect": "NoSchedule"}


GPU_TAINT = tolerate("nvidia.com/gpu")
TPU_TAINT = tolerate("google.com/tpu")
ARM_TAINT = {"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"}
