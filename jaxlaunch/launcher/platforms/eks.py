"""Nodes of Amazon's Elastic Kubernetes Service."""

from __future__ import annotations

from collections.abc import Mapping

from jaxlaunch.accelerators import Source
from jaxlaunch.launcher.platforms.facts import (
    GPU_TAINT,
    INSTANCE,
    RESERVATION_NAME,
    Fact,
    Instance,
    Nodes,
    PlatformFacts,
    Provisioner,
)

INSTANCE_TYPES = Source(
    "Amazon EC2: accelerated computing instances",
    "docs.aws.amazon.com/ec2/latest/instancetypes/ac.html",
)
EFA = Source(
    "Amazon EC2: EFA, instance types",
    "docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html",
)
KARPENTER_TYPES = Source(
    "Karpenter: instance types, with their EFA interfaces",
    "karpenter.sh/docs/reference/instance-types",
)
KARPENTER_1_0_TYPES = Source(
    "Karpenter 1.0: instance types", "karpenter.sh/v1.0/reference/instance-types"
)
EFA_PODS = Source(
    "Amazon EKS: run training with EFA", "docs.aws.amazon.com/eks/latest/userguide/node-efa.html"
)
EFA_DRA = Source(
    "Amazon EKS: manage EFA devices, the EFA DRA driver",
    "docs.aws.amazon.com/eks/latest/userguide/device-management-efa.html",
)
AUTO_MODE = Source(
    "Amazon EKS: Auto Mode, capacity reservations",
    "docs.aws.amazon.com/eks/latest/userguide/auto-odcr.html",
)
KARPENTER = Source("Karpenter: scheduling", "karpenter.sh/docs/concepts/scheduling")
MANAGED_NODE_GROUPS = Source(
    "Amazon EKS: managed node groups",
    "docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html",
)
LIBFABRIC = Source(
    "libfabric: the EFA provider's variables", "github.com/ofiwg/libfabric, man/fi_efa.7.md"
)

UNCONFIRMED = Source(
    "Amazon EC2: GPUs and EFA interfaces, not confirmed on a page", "none", "not yet"
)

INSTANCES: Mapping[str, Instance] = {
    **{f"g4dn.{size}xlarge": Instance(1, 16, source=KARPENTER_TYPES) for size in ("", 2, 4)},
    **{f"g4dn.{size}xlarge": Instance(1, 16, 1, KARPENTER_TYPES) for size in (8, 16)},
    "g4dn.12xlarge": Instance(4, 16, 1, KARPENTER_TYPES),
    "g4dn.metal": Instance(8, 16, 1, KARPENTER_TYPES),
    **{
        f"{family}.{size}xlarge": Instance(1, 24, source=INSTANCE_TYPES)
        for family in ("g5", "g6")
        for size in ("", 2, 4)
    },
    **{
        f"{family}.{size}xlarge": Instance(1, 24, 1, KARPENTER_TYPES)
        for family in ("g5", "g6")
        for size in (8, 16)
    },
    **{
        f"{family}.{size}xlarge": Instance(4, 24, 1, KARPENTER_TYPES)
        for family in ("g5", "g6")
        for size in (12, 24)
    },
    **{f"{family}.48xlarge": Instance(8, 24, 1, KARPENTER_TYPES) for family in ("g5", "g6")},
    **{f"g6e.{size}xlarge": Instance(1, 48, source=KARPENTER_TYPES) for size in ("", 2, 4)},
    **{f"g6e.{size}xlarge": Instance(1, 48, 1, KARPENTER_TYPES) for size in (8, 16)},
    "g6e.12xlarge": Instance(4, 48, 1, KARPENTER_TYPES),
    "g6e.24xlarge": Instance(4, 48, 2, KARPENTER_TYPES),
    "g6e.48xlarge": Instance(8, 48, 4, KARPENTER_TYPES),
    **{f"g7e.{size}xlarge": Instance(1, 96, source=KARPENTER_TYPES) for size in (2, 4)},
    "g7e.8xlarge": Instance(1, 96, 1, KARPENTER_TYPES),
    "g7e.12xlarge": Instance(2, 96, 1, KARPENTER_TYPES),
    "g7e.24xlarge": Instance(4, 96, 2, KARPENTER_TYPES),
    "g7e.48xlarge": Instance(8, 96, 4, KARPENTER_TYPES),
    "p3.2xlarge": Instance(1, 16, source=KARPENTER_1_0_TYPES),
    "p3.8xlarge": Instance(4, 16, source=KARPENTER_1_0_TYPES),
    "p3.16xlarge": Instance(8, 16, source=KARPENTER_1_0_TYPES),
    "p3dn.24xlarge": Instance(8, 32, 1, KARPENTER_TYPES),
    "p4d.24xlarge": Instance(8, 40, 4, EFA),
    "p4de.24xlarge": Instance(8, 80, 4, EFA),
    "p5.4xlarge": Instance(1, 80, 1, KARPENTER_TYPES),
    "p5.48xlarge": Instance(8, 80, 32, EFA),
    "p5e.48xlarge": Instance(8, 141, 32, EFA),
    "p5en.48xlarge": Instance(8, 141, 16, EFA),
    "p6-b200.48xlarge": Instance(8, 179, 8, EFA),
    "p6-b300.48xlarge": Instance(8, 268, 16, EFA),
    "p6e-gb200.36xlarge": Instance(4, 185, 8, EFA),
    "p6e-gb300.36xlarge": Instance(4, 277, None, UNCONFIRMED),
}


def _instance_nodes(*families: str) -> Nodes:
    instance_types = tuple(
        name for family in families for name in INSTANCES if name.startswith(f"{family}.")
    )
    return Nodes({INSTANCE: instance_types}, (GPU_TAINT,), INSTANCE_TYPES)


NODES: Mapping[str, Nodes] = {
    "cpu": Nodes(source=INSTANCE_TYPES),
    "gpu": Nodes({}, (GPU_TAINT,), INSTANCE_TYPES),
    "plugin": Nodes(source=INSTANCE_TYPES),
    "t4": _instance_nodes("g4dn"),
    "v100": _instance_nodes("p3", "p3dn"),
    "a10g": _instance_nodes("g5"),
    "l4": _instance_nodes("g6"),
    "l40s": _instance_nodes("g6e"),
    "rtxpro6000": _instance_nodes("g7e"),
    "a100": _instance_nodes("p4d", "p4de"),
    "h100": Nodes({INSTANCE: ("p5.48xlarge", "p5.4xlarge")}, (GPU_TAINT,), INSTANCE_TYPES),
    "h200": _instance_nodes("p5e", "p5en"),
    "b200": _instance_nodes("p6-b200"),
    "b300": _instance_nodes("p6-b300"),
    "gb200": _instance_nodes("p6e-gb200"),
    "gb300": _instance_nodes("p6e-gb300"),
}

CAPACITY: Mapping[Provisioner, Mapping[str, Nodes]] = {
    "karpenter": {
        "spot": Nodes({"karpenter.sh/capacity-type": ("spot",)}, (), KARPENTER),
        "reservation": Nodes(
            {
                "karpenter.sh/capacity-type": ("reserved",),
                "karpenter.k8s.aws/capacity-reservation-id": (RESERVATION_NAME,),
            },
            (),
            KARPENTER,
        ),
    },
    "managed": {
        "spot": Nodes({"eks.amazonaws.com/capacityType": ("SPOT",)}, (), MANAGED_NODE_GROUPS),
        # Managed nodes have no label with the id of a reservation, and CAPACITY_BLOCK does not mark
        # an on-demand one. The group needs its own label, which `reservation_label` of the cluster
        # defaults names.
        "reservation": Nodes(
            {"capacity-reservation-id": (RESERVATION_NAME,)}, (), MANAGED_NODE_GROUPS
        ),
    },
    "auto": {
        "spot": Nodes({"karpenter.sh/capacity-type": ("spot",)}, (), AUTO_MODE),
        "reservation": Nodes(
            {
                "karpenter.sh/capacity-type": ("reserved",),
                "eks.amazonaws.com/capacity-reservation-id": (RESERVATION_NAME,),
            },
            (),
            AUTO_MODE,
        ),
    },
}

# The prefix of the id of a reservation.
RESERVATION_ID = Fact("cr-", KARPENTER)

# Amazon's DRA driver (aws-dranet) supports managed node groups; in Karpenter it is alpha, in Auto
# Mode missing.
EFA_CLASS = Fact("efa.networking.k8s.aws", EFA_DRA)
EFA_RESOURCE = Fact("vpc.amazonaws.com/efa", EFA_PODS)
# Karpenter starts no node for a pod that requests huge pages (karpenter-provider-aws, issue 3315),
# so libfabric uses them only if the job requests them.
WITHOUT_HUGEPAGES: Fact[Mapping[str, str]] = Fact({"FI_EFA_USE_HUGE_PAGE": "0"}, LIBFABRIC)

PLATFORM = PlatformFacts(
    NODES, provisioners=CAPACITY, networks=("efa", "efa-dra"), instances=INSTANCES
)
