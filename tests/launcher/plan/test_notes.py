"""Notes of `plan` on a job that is accepted."""

from __future__ import annotations

import pytest

from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.job.defaults import ClusterDefaults, Defaults, User
from jaxlaunch.launcher.job.schema import AcceleratorType
from jaxlaunch.launcher.manifests.jobset import resolve
from jaxlaunch.launcher.plan.notes import list_notes

H100 = "name: x\nimage: i\ncommand: [a]\naccelerator: {type: h100}\nplatform: gke\n"
H200, GB200 = H100.replace("h100", "h200"), H100.replace("h100", "gb200")
EKS = (
    H100.replace("gke", "eks") + "node_selector: {node.kubernetes.io/instance-type: p5.48xlarge}\n"
)
AMD = "name: x\nimage: i\ncommand: [a]\naccelerator: {type: mi300x}\n"
HIGH = "node_selector: {cloud.google.com/gke-accelerator: nvidia-h100-80gb}\n"
SLICE = (
    "restarts: a TPU slice is lost as a whole, so a lost host costs all pods: they are created "
    "again together"
)
V5E = "name: x\nimage: i\ncommand: [a]\naccelerator: {type: v5e, topology: 2x4}\nplatform: gke\n"
MEGA = "node_selector: {cloud.google.com/gke-accelerator: nvidia-h100-mega-80gb}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            H100 + "capacity: spot\ngrace: 25s\n",
            ["grace: 25 s, but GKE ends the pods of a Spot node after 15 s"],
        ),
        (H100 + "capacity: spot\ngrace: 15s\n", []),
        (H100 + "grace: 60s\n", []),
        (
            H100 + "hosts: 2\n" + MEGA,
            ["network: the 2 hosts communicate over TCP on one interface"],
        ),
        (H100 + MEGA, []),
        (
            H100 + "hosts: 2\n" + HIGH,
            [
                "network: the 2 hosts communicate over TCP on one interface; those of "
                "nvidia-h100-80gb"
            ],
        ),
        (H200 + "hosts: 2\n", ["network: the 2 hosts communicate over TCP"]),
        (
            H200 + "hosts: 2\nnetwork: gpudirect-rdma\n",
            ["user: 1000, who can pin memory for network gpudirect-rdma"],
        ),
        (
            GB200 + "hosts: 2\n",
            ["network: the 2 hosts communicate over TCP", "image: nodes of gb200 are arm64"],
        ),
        (EKS + "hosts: 2\n", ["network: the 2 hosts communicate over TCP"]),
        (EKS + "hosts: 2\nnetwork: efa\n", ["user: 1000, who can pin memory for network efa"]),
        (
            EKS + "resources: {memory: 1Ti, hugepages: 5Gi}\n",
            ["resources.hugepages: 5Gi, but Karpenter"],
        ),
        (
            V5E.replace("v5e", "tpu7x").replace("2x4", "2x2x1"),
            [
                "host: the 4 chips of a tpu7x host are on 2 NUMA nodes",
                "user: the pods run as root without",
            ],
        ),
        (AMD, ["devices: /dev/kfd and /dev/dri belong to the node's group render, and user 1000"]),
        (AMD + "pod: {spec: {securityContext: {supplementalGroups: [109]}}}\n", []),
        (
            H100 + "hosts: 2\nnetwork: gpudirect-tcpxo\n",
            ["user: 1000, who can pin memory for network gpudirect-tcpxo"],
        ),
    ],
)
def test_notes_on_costly_choices(text: str, expected: list[str]) -> None:
    check_notes(text, expected, {})


@pytest.mark.parametrize(
    ("text", "users", "expected"),
    [
        (
            V5E,
            {},
            [
                SLICE,
                "user: the pods run as root without capabilities (Pod Security level "
                "baseline): no source",
            ],
        ),
        (
            V5E,
            {"v5e": 1000},
            [
                SLICE,
                "user: 1000, who can open /dev/vfio/0 only where the nodes' containerd has device_",
            ],
        ),
        (V5E, {"v5e": 2000}, [SLICE, "user: 2000, who can open"]),
        (
            V5E,
            {"v5e": "root"},
            [SLICE, "user: the pods run as root, by users.v5e of the cluster defaults."],
        ),
        (
            V5E,
            {"v5e": "privileged"},
            [SLICE, "user: the pods run as root, in a privileged container, by users.v5e"],
        ),
        (H100, {"v5e": "privileged"}, []),
    ],
)
def test_notes_on_the_user_of_the_pods(
    text: str, users: dict[AcceleratorType, User], expected: list[str]
) -> None:
    check_notes(text, expected, users)


def check_notes(text: str, expected: list[str], users: dict[AcceleratorType, User]) -> None:
    notes = list(list_notes(resolve(load.parse_job(text), ClusterDefaults(Defaults(users=users)))))
    assert len(notes) == len(expected)
    for note, start in zip(notes, expected, strict=True):
        assert note.startswith(start)


@pytest.mark.parametrize(
    ("text", "factor", "advice"),
    [
        (
            H100 + MEGA,
            8,
            "network: gpudirect-tcpxo, with which NVIDIA measured NCCL at 340 GB/s in place of 4.",
        ),
        (
            H100 + HIGH,
            4,
            "jaxlaunch does not support their GPUDirect-TCPX, and nvidia-h100-mega-80gb has "
            "network: gpudirect-tcpxo.",
        ),
        (H200, 16, "network: gpudirect-rdma."),
        (GB200, 8, "network: gpudirect-rdma-dra, and compute_domain: true for their NVLink."),
        (EKS, 32, "network: efa."),
    ],
)
def test_note_on_plain_tcp(text: str, factor: int, advice: str) -> None:
    note = next(list_notes(resolve(load.parse_job(text + "hosts: 2\n"), ClusterDefaults())))
    assert f"have {factor} × its bandwidth: " in note and note.endswith(advice)


@pytest.mark.parametrize(
    ("env", "start"),
    [
        ("{HTTPS_PROXY: 'http://p:1', no_proxy: a.org}", "env: HTTPS_PROXY names a proxy; "),
        ("{http_proxy: 'http://p:1', ALL_PROXY: 'http://p:1'}", "env: http_proxy, ALL_PROXY name "),
        ("{no_proxy: a.org}", None),
    ],
)
def test_note_on_proxies_of_a_gang(env: str, start: str | None) -> None:
    text = f"name: t\nimage: r.example/x:1\naccelerator: {{type: cpu}}\ncommand: [x]\nenv: {env}\n"
    check_notes(text + "hosts: 2\n", [] if start is None else [start], {})
    check_notes(text, [], {})
