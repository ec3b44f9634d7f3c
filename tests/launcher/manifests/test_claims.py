"""Claims of dynamic resource allocation (resource.k8s.io/v1), and ComputeDomains."""

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


def make_manifests(kind: str, more: str, cluster: str) -> dict[str, Any]:
    """The manifests of a job by their kind."""
    text = f"name: x\nimage: i\ncommand: [a]\nhosts: 2\naccelerator: {{type: {kind}}}\n{more}"
    return {
        manifest["kind"]: manifest
        for manifest in prepare(
            load.read_job_text(text), defaults.parse_defaults(cluster)
        ).manifests
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
def test_pod_claims_adapters_of_network(
    kind: str, more: str, cluster: str, device_class: str, number: int | None
) -> None:
    manifests = make_manifests(kind, more, cluster)
    claimed = manifests["ResourceClaimTemplate"]
    assert claimed["apiVersion"] == "resource.k8s.io/v1"
    assert claimed["metadata"]["name"] == "x-adapters"
    (request,) = claimed["spec"]["spec"]["devices"]["requests"]
    amount = (
        {"allocationMode": "All"}
        if number is None
        else {"allocationMode": "ExactCount", "count": number}
    )
    assert request["exactly"] == {"deviceClassName": device_class, **amount}
    pod = pod_template(manifests["JobSet"])["spec"]
    expected = [{"name": "adapters", "resourceClaimTemplateName": "x-adapters"}]
    assert pod["resourceClaims"] == expected
    resources = pod["containers"][0]["resources"]
    assert resources["claims"] == [{"name": "adapters"}]
    assert list(resources["limits"]) == ["nvidia.com/gpu"]
    assert "networking.gke.io/interfaces" not in str(manifests["JobSet"])


def test_compute_domain_joins_hosts() -> None:
    manifests = make_manifests(
        "gb200", "compute_domain: true\nnetwork: gpudirect-rdma-dra\n", "platform: gke"
    )
    domain = manifests["ComputeDomain"]
    assert domain["apiVersion"] == "resource.nvidia.com/v1beta1"
    assert domain["metadata"]["name"] == "x"
    assert domain["spec"] == {
        "numNodes": 2,
        "channel": {"resourceClaimTemplate": {"name": "x-nvlink"}},
    }
    pod = pod_template(manifests["JobSet"])["spec"]
    assert [claim["resourceClaimTemplateName"] for claim in pod["resourceClaims"]] == [
        "x-adapters",
        "x-nvlink",
    ]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "adapters"}, {"name": "nvlink"}]
    environment = {
        variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]
    }
    assert environment["NCCL_NET"] == "gIB" and environment["NCCL_TUNER_PLUGIN"] == "none"


@pytest.mark.parametrize(
    ("kind", "more", "cluster", "message"),
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
def test_impossible_claim_is_refused(kind: str, more: str, cluster: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        make_manifests(kind, more, cluster)
    assert message in str(error.value)


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
def test_reservation_labels_on_eks(cluster: str, labels: dict[str, str]) -> None:
    # `capacityType: CAPACITY_BLOCK` is only of a Capacity Block, not of an on-demand reservation.
    jobset = make_manifests("b200", "capacity: {reservation: cr-1}\n", cluster)["JobSet"]
    selector = pod_template(jobset)["spec"]["nodeSelector"]
    assert selector == labels | {"node.kubernetes.io/instance-type": "p6-b200.48xlarge"}


@pytest.mark.parametrize(
    ("versions", "levels", "words"),
    [
        ({"resource.k8s.io": ["v1"], "resource.nvidia.com": ["v1beta1"]}, ["ok", "ok"], ""),
        ({"resource.k8s.io": ["v1beta1"]}, ["fail", "fail"], "is served as v1beta1, not as v1"),
        ({"resource.k8s.io": ["v1"]}, ["ok", "fail"], "NVIDIA's DRA driver is not installed"),
    ],
)
def test_unserved_claim_apis_are_found(
    versions: dict[str, list[str]], levels: list[str], words: str
) -> None:
    manifests = list(
        make_manifests(
            "gb200", "compute_domain: true\nnetwork: gpudirect-rdma-dra\n", "platform: gke"
        ).values()
    )
    cluster = SimpleNamespace(served_versions=lambda group: versions.get(group, []))
    findings = list(checks.check_allocation(Target(cast(Cluster, cluster), "team", manifests)))
    assert [finding.level for finding in findings] == levels
    assert words in " ".join(finding.summary_text for finding in findings)
