"""Nodes of EKS, with the labels and resources of Karpenter's reference by instance type.

Who made a node determines its capacity. EKS itself taints no node. A pool of GPUs that Karpenter
makes has the taint that AWS's examples give it (POOLS). A managed group has none, so pods without a
GPU may be scheduled there.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.cluster.node_kinds.kind import Kind, Platform, cpu_left, split_names

TYPES = "karpenter.sh/docs/reference/instance-types"  # of each: labels, memory left, GPUs, EFA
# Of types that the reference lacks: vCPUs, memory.
EC2 = "docs.aws.amazon.com/ec2/latest/instancetypes/ac.html"
EFA = "docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html"
# karpenter.sh/capacity-type, capacity-reservation-id.
KARPENTER = "karpenter.sh/docs/concepts/scheduling"
# Eks.amazonaws.com/capacityType.
MANAGED = "docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html"
BLOCKS = "docs.aws.amazon.com/eks/latest/userguide/capacity-blocks-mng.html"
POOLS = "docs.aws.amazon.com/eks/latest/userguide/ml-node-pools.html"

_TAINT = {"nvidia.com/gpu": "true"}


def _karpenter_labels(capacity: str, **labels: str) -> dict[str, str]:
    reserved = {
        f"karpenter.k8s.aws/{key.replace('_', '-')}": value for key, value in labels.items()
    }
    return {"karpenter.sh/capacity-type": capacity, "karpenter.sh/nodepool": "gpus", **reserved}


def _managed_labels(capacity: str) -> dict[str, str]:
    return {"eks.amazonaws.com/capacityType": capacity, "eks.amazonaws.com/nodegroup": "gpus"}


def _make_node(
    instance: str,
    size: tuple[int, int],  # vCPUs, MiB that are left to pods
    resources: Mapping[str, int],
    capacity: Mapping[str, str],
    takes: str,
    source: str = TYPES,
    *,
    suffix: str = "",
    arch: str = "amd64",
) -> Kind:
    vcpus, mib = size
    made_by_karpenter = "karpenter.sh/nodepool" in capacity
    labels = {
        "kubernetes.io/arch": arch,
        "kubernetes.io/os": "linux",
        "node.kubernetes.io/instance-type": instance,
        **(
            {"karpenter.k8s.aws/instance-family": instance.partition(".")[0]}
            if made_by_karpenter
            else {}
        ),
    }
    counts = {
        {"gpu": "nvidia.com/gpu", "efa": "vpc.amazonaws.com/efa"}[key]: str(n)
        for key, n in resources.items()
    }
    return Kind(
        f"eks-{instance}{suffix and '-' + suffix}".replace(".", "-"),
        source,
        labels | dict(capacity),
        _TAINT if made_by_karpenter and "gpu" in resources else {},
        {"cpu": cpu_left(vcpus), "memory": f"{mib}Mi", **counts},
        split_names(takes),
    )


_ON_DEMAND = _karpenter_labels("on-demand")
_P5 = (192, 1938410)
_P5EN = (192, 1937332)

# A job that names no capacity takes any; one for cpu takes whatever has no taint, whatever its
# architecture.
KINDS = (
    _make_node("m7i.8xlarge", (32, 118312), {}, _managed_labels("ON_DEMAND"), "cpu"),
    _make_node(
        "m7i.8xlarge",
        (32, 118312),
        {},
        _karpenter_labels("spot"),
        "cpu, cpu spot",
        KARPENTER,
        suffix="spot",
    ),
    _make_node("m7g.8xlarge", (32, 118253), {}, _managed_labels("ON_DEMAND"), "cpu", arch="arm64"),
    _make_node("g6.xlarge", (4, 14162), {"gpu": 1}, _ON_DEMAND, "l4"),
    _make_node("g6.12xlarge", (48, 178933), {"gpu": 4, "efa": 1}, _ON_DEMAND, "l4, l4 x4, l4 efa"),
    _make_node(
        "g6.48xlarge", (192, 718987), {"gpu": 8, "efa": 1}, _ON_DEMAND, "l4, l4 x4, l4 x8, l4 efa"
    ),
    _make_node(
        "g6.xlarge",
        (4, 14162),
        {"gpu": 1},
        _karpenter_labels("spot"),
        "l4, l4 spot",
        KARPENTER,
        suffix="spot",
    ),
    _make_node("g6e.48xlarge", (192, 1449132), {"gpu": 8, "efa": 4}, _ON_DEMAND, ""),
    _make_node("p3dn.24xlarge", (96, 718987), {"gpu": 8, "efa": 1}, _ON_DEMAND, ""),
    _make_node(
        "p4d.24xlarge", (96, 1082712), {"gpu": 8, "efa": 4}, _ON_DEMAND, "a100, a100 of 40 GB efa"
    ),
    _make_node(
        "p4de.24xlarge", (96, 1082712), {"gpu": 8, "efa": 4}, _ON_DEMAND, "a100, a100 of 80 GB"
    ),
    _make_node(
        "p5.4xlarge", (16, 240830), {"gpu": 1, "efa": 1}, _ON_DEMAND, "h100 x1, h100 x1 efa"
    ),
    _make_node("p5.48xlarge", _P5, {"gpu": 8, "efa": 32}, _ON_DEMAND, "h100, h100 x1, h100 efa"),
    _make_node(
        "p5.48xlarge",
        _P5,
        {"gpu": 8, "efa": 32},
        _karpenter_labels(
            "reserved",
            capacity_reservation_id="cr-0123456789abcdef0",
            capacity_reservation_type="default",
        ),
        "h100, h100 x1, h100 efa, h100 bought",
        KARPENTER,
        suffix="reserved",
    ),
    _make_node("p5e.48xlarge", _P5, {"gpu": 8, "efa": 32}, _ON_DEMAND, "h200, h200 efa of p5e"),
    _make_node("p5en.48xlarge", _P5EN, {"gpu": 8, "efa": 16}, _ON_DEMAND, "h200, h200 efa of p5en"),
    _make_node(
        "p5en.48xlarge",
        _P5EN,
        {"gpu": 8, "efa": 16},
        _karpenter_labels("spot"),
        "h200, h200 efa of p5en, h200 spot",
        KARPENTER,
        suffix="spot",
    ),
    _make_node("p6-b200.48xlarge", _P5EN, {"gpu": 8, "efa": 8}, _ON_DEMAND, "b200, b200 efa"),
    _make_node(
        "p6-b300.48xlarge", (192, 3877198), {"gpu": 8, "efa": 16}, _ON_DEMAND, "b300, b300 efa", EFA
    ),
    _make_node(
        "p6e-gb200.36xlarge", (144, 906779), {"gpu": 4}, _ON_DEMAND, "gb200", EC2, arch="arm64"
    ),
)
_CHOSEN = "node_selector: {node.kubernetes.io/instance-type: %s}"
JOBS = {
    "cpu": "accelerator: {type: cpu}",
    "cpu spot": "accelerator: {type: cpu}\ncapacity: spot",
    "l4": "accelerator: {type: l4}\nresources: {cpu: 3, memory: 12Gi}",
    "l4 x4": "accelerator: {type: l4, per_host: 4}\nresources: {cpu: 40, memory: 160Gi}",
    "l4 x8": "accelerator: {type: l4, per_host: 8}",
    "l4 efa": "accelerator: {type: l4, per_host: 4}\nnetwork: efa",
    "l4 spot": "accelerator: {type: l4}\ncapacity: spot",
    "a100": "accelerator: {type: a100}\nresources: {cpu: 90, memory: 1000Gi}",
    "a100 of 40 GB efa": "accelerator: {type: a100}\nhosts: 2\nnetwork: efa\n"
    + _CHOSEN % "p4d.24xlarge",
    "a100 of 80 GB": "accelerator: {type: a100}\nhosts: 2\n" + _CHOSEN % "p4de.24xlarge",
    "h100": "accelerator: {type: h100}\nhosts: 2\nresources: {cpu: 180, memory: 1800Gi}",
    "h100 x1": "accelerator: {type: h100, per_host: 1}",
    "h100 x1 efa": "accelerator: {type: h100, per_host: 1}\nnetwork: efa\n"
    + _CHOSEN % "p5.4xlarge",
    "h100 efa": "accelerator: {type: h100}\nhosts: 2\nnetwork: efa\nresources: {cpu: 90, "
    "memory: 1500Gi}",
    "h100 bought": "accelerator: {type: h100}\nnetwork: efa\ncapacity: {reservation: "
    "cr-0123456789abcdef0}",
    "h200": "accelerator: {type: h200}\nresources: {cpu: 180, memory: 1800Gi}",
    "h200 efa of p5e": "accelerator: {type: h200}\nhosts: 2\nnetwork: efa\n"
    + _CHOSEN % "p5e.48xlarge",
    "h200 efa of p5en": "accelerator: {type: h200}\nhosts: 2\nnetwork: efa\n"
    + _CHOSEN % "p5en.48xlarge",
    "h200 spot": "accelerator: {type: h200}\ncapacity: spot",
    "b200": "accelerator: {type: b200}",
    "b200 efa": "accelerator: {type: b200}\nhosts: 2\nnetwork: efa\nresources: {cpu: 180, "
    "memory: 1800Gi}",
    "b300": "accelerator: {type: b300}",
    "b300 efa": "accelerator: {type: b300}\nhosts: 2\nnetwork: efa\nresources: {cpu: 180, "
    "memory: 3500Gi}",
    "gb200": "accelerator: {type: gb200}\nresources: {cpu: 130, memory: 800Gi}",
}
EKS = Platform(KINDS, JOBS)

# The same of managed node groups.
_B300 = {"gpu": 8, "efa": 16}
MANAGED_GROUPS = Platform(
    (
        _make_node(
            "m7i.8xlarge",
            (32, 118312),
            {},
            _managed_labels("SPOT"),
            "cpu, cpu spot",
            MANAGED,
            suffix="spot-group",
        ),
        _make_node(
            "g6.xlarge",
            (4, 14162),
            {"gpu": 1},
            _managed_labels("ON_DEMAND"),
            "cpu, l4",
            MANAGED,
            suffix="group",
        ),
        _make_node(
            "g6.xlarge",
            (4, 14162),
            {"gpu": 1},
            _managed_labels("SPOT"),
            "cpu, cpu spot, l4, l4 spot",
            MANAGED,
            suffix="spot-group",
        ),
        _make_node(
            "p6-b300.48xlarge",
            (192, 3877198),
            _B300,
            _managed_labels("CAPACITY_BLOCK")
            | {"capacity-reservation-id": "cr-0123456789abcdef0"},  # the group's own label
            "cpu, b300",
            BLOCKS,
            suffix="block",
        ),
    ),
    {
        "cpu": JOBS["cpu"],
        "cpu spot": JOBS["cpu spot"],
        "l4": JOBS["l4"],
        "l4 spot": JOBS["l4 spot"],
        "b300": "accelerator: {type: b300}\nnetwork: efa\ncapacity: {reservation: "
        "cr-0123456789abcdef0}",
    },
    "provisioner: managed",
)
