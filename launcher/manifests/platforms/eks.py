"""Nodes of Amazon's Elastic Kubernetes Service. Karpenter and managed node groups label capacity differently."""

from __future__ import annotations

from collections.abc import Mapping

from jaxlaunch.accelerators import Source
from jaxlaunch.launcher.manifests.platforms.facts import (
    GPU_TAINT,
    INSTANCE,
    NAME,
    Fact,
    Instance,
    Nodes,
    PlatformFacts,
    Provisioner,
)

TYPES = Source("Amazon EC2: accelerated computing instances", "docs.aws.amazon.com/ec2/latest/instancetypes/ac.html")
EFA = Source("Amazon EC2: EFA, instance types", "docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html")
REFERENCE = Source("Karpenter: instance types, with their EFA interfaces", "karpenter.sh/docs/reference/instance-types")
EFA_PODS = Source("Amazon EKS: run training with EFA", "docs.aws.amazon.com/eks/latest/userguide/node-efa.html")
KARPENTER = Source("Karpenter: scheduling", "karpenter.sh/docs/concepts/scheduling")
MANAGED = Source("Amazon EKS: managed node groups", "docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html")
LIBFABRIC = Source("libfabric: the EFA provider's variables", "github.com/ofiwg/libfabric, man/fi_efa.7.md")

INSTANCES: Mapping[str, Instance] = {
    **{f"g6.{size}xlarge": Instance(1, 24, source=TYPES) for size in ("", 2, 4)},
    **{f"g6.{size}xlarge": Instance(1, 24, 1, REFERENCE) for size in (8, 16)},
    **{f"g6.{size}xlarge": Instance(4, 24, 1, REFERENCE) for size in (12, 24)},
    "g6.48xlarge": Instance(8, 24, 1, REFERENCE),
    "p4d.24xlarge": Instance(8, 40, 4, EFA),
    "p4de.24xlarge": Instance(8, 80, 4, EFA),
    "p5.4xlarge": Instance(1, 80, 1, REFERENCE),
    "p5.48xlarge": Instance(8, 80, 32, EFA),
    "p5e.48xlarge": Instance(8, 141, 32, EFA),
    "p5en.48xlarge": Instance(8, 141, 16, EFA),
    "p6-b200.48xlarge": Instance(8, 179, 8, EFA),
    "p6-b300.48xlarge": Instance(8, 268, 16, EFA),
    "p6e-gb200.36xlarge": Instance(4, 185, source=TYPES),
}


def _types(*types: str) -> Nodes:
    return Nodes({INSTANCE: types}, (GPU_TAINT,), TYPES)


NODES: Mapping[str, Nodes] = {
    "cpu": Nodes(source=TYPES),
    "l4": _types(*(f"g6.{size}xlarge" for size in ("", 2, 4, 8, 16, 12, 24, 48))),
    "a100": _types("p4d.24xlarge", "p4de.24xlarge"),
    "h100": _types("p5.48xlarge", "p5.4xlarge"),
    "h200": _types("p5e.48xlarge", "p5en.48xlarge"),
    "b200": _types("p6-b200.48xlarge"),
    "b300": _types("p6-b300.48xlarge"),
    "gb200": _types("p6e-gb200.36xlarge"),
}

CAPACITY: Mapping[Provisioner, Mapping[str, Nodes]] = {
    "karpenter": {
        "spot": Nodes({"karpenter.sh/capacity-type": ("spot",)}, (), KARPENTER),
        "reservation": Nodes(
            {"karpenter.sh/capacity-type": ("reserved",), "karpenter.k8s.aws/capacity-reservation-id": (NAME,)},
            (),
            KARPENTER,
        ),
    },
    "managed": {
        "spot": Nodes({"eks.amazonaws.com/capacityType": ("SPOT",)}, (), MANAGED),
        "reservation": Nodes({"eks.amazonaws.com/capacityType": ("CAPACITY_BLOCK",)}, (), MANAGED),
    },
}

RESERVATION_ID = Fact("cr-", KARPENTER)  # how a reservation's id begins

EFA_RESOURCE = Fact("vpc.amazonaws.com/efa", EFA_PODS)
# Karpenter starts no node for a pod that requests huge pages (karpenter-provider-aws, issue 3315): only a job that asks
# for them has them, and libfabric is told to do without otherwise.
WITHOUT_HUGEPAGES: Fact[Mapping[str, str]] = Fact({"FI_EFA_USE_HUGE_PAGE": "0"}, LIBFABRIC)

PLATFORM = PlatformFacts(NODES, provisioners=CAPACITY, networks=("efa",), instances=INSTANCES)
