"""What a job claims by dynamic resource allocation, against the forms of resource.k8s.io/v1 and of NVIDIA's API."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxlaunch.launcher.diagnose.doctor import checks
from jaxlaunch.launcher.diagnose.doctor.finding import Target
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.manifests.jobset import prepare

P5 = "node_selector: {node.kubernetes.io/instance-type: p5.48xlarge}\n"
P5EN = "node_selector: {node.kubernetes.io/instance-type: p5en.48xlarge}\n"


def made(kind: str, more: str, cluster: str) -> dict[str, Any]:
    """The manifests of a job by their kind."""
    text = f"name: x\nimage: i\ncommand: [a]\nhosts: 2\naccelerator: {{type: {kind}}}\n{more}"
    return {
        one["kind"]: one
        for one in prepare(load.read_job_text(text), defaults.parse_defaults(cluster)).manifests
    }


@pytest.mark.parametrize(
    ("kind", "more", "cluster", "device_class", "number"),
    [
        (
            "h100",
            f"network: efa-dra\n{P5}",
            "{platform: eks, provisioner: managed}",
            "efa.networking.k8s.aws",
            32,
        ),
        ("h200", f"network: efa-dra\n{P5EN}", "platform: eks", "efa.networking.k8s.aws", 16),
        ("gb200", "network: efa-dra\n", "platform: eks", "efa.networking.k8s.aws", 8),
        ("gb300", "network: efa-dra\n", "platform: eks", "efa.networking.k8s.aws", None),
        ("h200", "network: gpudirect-rdma-dra\n", "platform: gke", "mrdma.google.com", 8),
        ("gb200", "network: gpudirect-rdma-dra\n", "platform: gke", "mrdma.google.com", 4),
        ("gb300", "network: gpudirect-rdma-dra\n", "platform: gke", "mrdma.google.com", 8),
    ],
)
def test_a_pod_claims_the_adapters_of_its_network(
    kind: str, more: str, cluster: str, device_class: str, number: int | None
) -> None:
    found = made(kind, more, cluster)
    claimed = found["ResourceClaimTemplate"]
    assert (
        claimed["apiVersion"] == "resource.k8s.io/v1"
        and claimed["metadata"]["name"] == "x-adapters"
    )
    (request,) = claimed["spec"]["spec"]["devices"]["requests"]
    many = (
        {"allocationMode": "All"}
        if number is None
        else {"allocationMode": "ExactCount", "count": number}
    )
    assert request["exactly"] == {"deviceClassName": device_class, **many}
    pod = pod_template(found["JobSet"])["spec"]
    assert pod["resourceClaims"] == [
        {"name": "adapters", "resourceClaimTemplateName": "x-adapters"}
    ]
    resources = pod["containers"][0]["resources"]
    assert resources["claims"] == [{"name": "adapters"}] and list(resources["limits"]) == [
        "nvidia.com/gpu"
    ]
    assert "networking.gke.io/interfaces" not in str(found["JobSet"])


def test_hosts_that_nvlink_joins_share_a_compute_domain() -> None:
    found = made("gb200", "compute_domain: true\nnetwork: gpudirect-rdma-dra\n", "platform: gke")
    domain = found["ComputeDomain"]
    assert (
        domain["apiVersion"] == "resource.nvidia.com/v1beta1" and domain["metadata"]["name"] == "x"
    )
    assert domain["spec"] == {
        "numNodes": 2,
        "channel": {"resourceClaimTemplate": {"name": "x-nvlink"}},
    }
    pod = pod_template(found["JobSet"])["spec"]
    assert [one["resourceClaimTemplateName"] for one in pod["resourceClaims"]] == [
        "x-adapters",
        "x-nvlink",
    ]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "adapters"}, {"name": "nvlink"}]
    environment = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert environment["NCCL_NET"] == "gIB" and environment["NCCL_TUNER_PLUGIN"] == "none"


@pytest.mark.parametrize(
    ("kind", "more", "cluster", "says"),
    [
        (
            "h100",
            "compute_domain: true\n",
            "platform: generic",
            "NVLink joins hosts of gb200 or gb300 alone.",
        ),
        (
            "h100",
            "network: efa-dra\n",
            "platform: gke",
            "efa-dra does not exist on platform = gke.",
        ),
        (
            "b200",
            "network: gpudirect-rdma-dra\n",
            "platform: eks",
            "does not exist on platform = eks.",
        ),
        (
            "gb300",
            "network: gpudirect-rdma\n",
            "platform: gke",
            "does not apply to gb300 with 4 per host.",
        ),
    ],
)
def test_a_claim_that_nothing_serves_is_refused(
    kind: str, more: str, cluster: str, says: str
) -> None:
    with pytest.raises(UserError) as refused:
        made(kind, more, cluster)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("cluster", "labels"),
    [
        ("{platform: eks, provisioner: managed}", {"capacity-reservation-id": "cr-1"}),
        ("{platform: eks, provisioner: managed, reservation_label: a/b}", {"a/b": "cr-1"}),
        (
            "{platform: eks, provisioner: auto}",
            {
                "karpenter.sh/capacity-type": "reserved",
                "eks.amazonaws.com/capacity-reservation-id": "cr-1",
            },
        ),
    ],
)
def test_a_reservation_on_eks_keeps_its_id_whoever_adds_the_nodes(
    cluster: str, labels: dict[str, str]
) -> None:
    """An on-demand reservation and a Capacity Block alike: `capacityType: CAPACITY_BLOCK` is of the latter alone."""
    found = made("b200", "capacity: {reservation: cr-1}\n", cluster)["JobSet"]
    selector = pod_template(found)["spec"]["nodeSelector"]
    assert selector == labels | {"node.kubernetes.io/instance-type": "p6-b200.48xlarge"}


@pytest.mark.parametrize(
    ("found", "levels", "words"),
    [
        ({"resource.k8s.io": ["v1"], "resource.nvidia.com": ["v1beta1"]}, ["ok", "ok"], ""),
        ({"resource.k8s.io": ["v1beta1"]}, ["fail", "fail"], "is served as v1beta1, not as v1"),
        ({"resource.k8s.io": ["v1"]}, ["ok", "fail"], "NVIDIA's DRA driver is not installed"),
    ],
)
def test_a_cluster_that_does_not_serve_what_is_claimed_is_told_before_submit(
    found: dict[str, list[str]], levels: list[str], words: str
) -> None:
    manifests = list(
        made(
            "gb200", "compute_domain: true\nnetwork: gpudirect-rdma-dra\n", "platform: gke"
        ).values()
    )
    cluster = SimpleNamespace(served_versions=lambda group: found.get(group, []))
    said = list(checks.check_allocation(Target(cast(Cluster, cluster), "team", manifests)))
    assert [one.level for one in said] == levels and words in " ".join(
        one.summary_text for one in said
    )
