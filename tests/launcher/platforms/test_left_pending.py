"""Jobs that GKE or EKS would leave pending, or break in silence: each is said before it is sent.

`row` is that of the readings of the platforms: 4 TPU slices and placement, 5 flex-start and Spot, 6
EKS, 7 fast networks of GKE, 8 one gang on one kind of node, 9 reservations, 10 driver and CUDA, 11
other accelerators.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import pytest

from jaxlaunch.launcher.diagnose.doctor import nodes
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.manifests.jobset import PreparedJob, prepare
from jaxlaunch.launcher.plan.notes import list_notes
from tests.launcher.objects import node


class Broken(NamedTuple):
    row: int
    by: Literal[
        "validate", "plan", "doctor"
    ]  # plan refuses what submit would; the first of them that says it
    job: str
    says: str
    cluster: str = "platform: gke"


GKE, EKS, MANAGED = "platform: gke", "platform: eks", "{platform: eks, provisioner: managed}"
A100, H100, H200, GB200, GB300, L40S, GPU, V100 = (
    f"accelerator: {{type: {kind}}}\n"
    for kind in ("a100", "h100", "h200", "gb200", "gb300", "l40s", "gpu", "v100")
)
V5E = "accelerator: {type: v5e, topology: %s}\n"
MEGA = "node_selector: {cloud.google.com/gke-accelerator: nvidia-h100-mega-80gb}\n"
HIGH = "node_selector: {cloud.google.com/gke-accelerator: nvidia-h100-80gb}\n"
P5 = "node_selector: {node.kubernetes.io/instance-type: p5.48xlarge}\n"
TCPXO = "{platform: gke, tcpxo: {image: i}}"

TABLE = [
    Broken(4, "validate", V5E % "3x4", "accelerator.topology = 3x4 is not a slice of v5e."),
    Broken(4, "validate", V5E % "4x4" + "hosts: 2\n", "hosts = 2 does not make a 4x4 slice of v5e"),
    Broken(
        4, "validate", "accelerator: {type: v5p, topology: 8x4x4}\n", "8x4x4 is not a slice of v5p."
    ),
    Broken(
        4,
        "plan",
        V5E % "2x2" + "slices: 2\n",
        "slices = 2: GKE connects only slices of several hosts",
    ),
    Broken(
        4,
        "plan",
        V5E % "2x4, per_host: 8" + "slices: 4\n",
        "slices = 4: GKE connects only slices of several hosts",
    ),
    Broken(4, "plan", V5E % "4x4" + "placement: {required: rack}\n", "placement is done by Kueue"),
    Broken(
        5, "plan", H100 + "capacity: flex-start\ndeadline: 8d\n", "flex-start last at most 7 days."
    ),
    Broken(5, "plan", H100 + "capacity: flex-start\n", "capacity = flex-start is not known", EKS),
    Broken(5, "plan", H100 + "capacity: spot\n", "GKE ends the pods of a Spot node after 15 s"),
    Broken(
        6,
        "plan",
        H100 + "node_selector: {node.kubernetes.io/instance-type: p5.4xlarge}\n",
        "has 1 GPU",
        EKS,
    ),
    Broken(
        6, "plan", "accelerator: {type: gb200, per_host: 8}\n", "the largest gb200 machine", EKS
    ),
    Broken(
        6,
        "plan",
        GB300 + "network: efa\n",
        "how many interfaces nodes of gb300 have is not known.",
        EKS,
    ),
    Broken(
        6, "plan", L40S + "hosts: 2\nnetwork: efa\n", "nodes of l40s have 1, 2 or 4 interfaces", EKS
    ),
    Broken(
        6,
        "plan",
        H100 + "resources: {memory: 1Ti, hugepages: 5Gi}\n",
        "Karpenter adds no node",
        EKS,
    ),
    Broken(
        6,
        "plan",
        H100 + "network: efa\nresources: {hugepages: 5Gi}\n",
        "only together with cpu or memory.",
        EKS,
    ),
    Broken(6, "plan", H100 + "hosts: 2\n" + P5, "those of p5.48xlarge for its GPUs have 32 ×", EKS),
    Broken(
        6,
        "plan",
        H100 + "capacity: {reservation: bought}\n",
        "is not an id, by which Karpenter labels",
        EKS,
    ),
    Broken(7, "validate", V5E % "4x4" + "network: gpudirect-rdma\n", "does not apply to v5e."),
    Broken(7, "plan", H100 + "network: gpudirect-tcpxo\n", "needs the receive daemon's image"),
    Broken(
        7,
        "plan",
        H100 + "hosts: 2\nnetwork: gpudirect-tcpxo\n" + HIGH,
        "GPUDirect-TCPX is not supported.",
        TCPXO,
    ),
    Broken(
        7,
        "plan",
        H200 + "network: gpudirect-tcpxo\n",
        "does not apply to h200 with 8 per host.",
        TCPXO,
    ),
    Broken(
        7, "plan", H100 + "network: gpudirect-rdma\n", "does not apply to h100 with 8 per host."
    ),
    Broken(
        7,
        "plan",
        "accelerator: {type: h200, per_host: 4}\nnetwork: gpudirect-rdma\n",
        "to h200 with 4 per host.",
    ),
    Broken(
        7,
        "plan",
        GB200 + "network: gpudirect-rdma\n",
        "{network: gpudirect-rdma-dra, compute_domain: true} is RDMA",
    ),
    Broken(
        6,
        "plan",
        GB200 + "network: efa-dra\n",
        "network: efa-dra is supported on managed node groups",
        EKS,
    ),
    Broken(
        9,
        "plan",
        H200 + "capacity: {reservation: cr-1}\n",
        "label the group that has it capacity-res",
        MANAGED,
    ),
    Broken(
        7,
        "plan",
        H200 + "network: gpudirect-rdma\n",
        "gpudirect-rdma does not exist on platform = eks.",
        EKS,
    ),
    Broken(
        7,
        "plan",
        H100 + "hosts: 2\n" + MEGA,
        "those of nvidia-h100-mega-80gb for its GPUs have 8 ×",
    ),
    Broken(
        7, "plan", H100 + "hosts: 2\n" + HIGH, "those of nvidia-h100-80gb for its GPUs have 4 ×"
    ),
    Broken(7, "plan", H200 + "hosts: 2\n", "those of nvidia-h200-141gb for its GPUs have 16 ×"),
    Broken(7, "plan", GB200, "nodes of gb200 are arm64"),
    Broken(
        8,
        "plan",
        A100 + "hosts: 2\n",
        "2 hosts of a100 could be nvidia-tesla-a100 or nvidia-a100-80gb",
    ),
    Broken(
        8,
        "plan",
        H200 + "hosts: 2\n",
        "2 hosts of h200 could be p5e.48xlarge or p5en.48xlarge",
        EKS,
    ),
    Broken(
        8,
        "plan",
        "accelerator: {type: h100, per_host: 16}\n",
        "the largest h100 machine of platform = gke has 8.",
    ),
    Broken(8, "plan", A100 + MEGA, "= nvidia-h100-mega-80gb is h100, and accelerator.type = a100."),
    Broken(
        9,
        "plan",
        H200 + "capacity: {reservation: cr-1, block: b}\n",
        "capacity.block is not known",
        EKS,
    ),
    Broken(
        9, "plan", H200 + "capacity: {reservation: r, sub_block: s}\n", "capacity.block is missing."
    ),
    Broken(10, "doctor", H100, "550 is too old for CUDA 13"),
    Broken(11, "validate", "accelerator: {type: mi300x}\n", "train does not run on mi300x"),
    Broken(
        11,
        "plan",
        "accelerator: {type: mi300x}\n",
        "accelerator.type = mi300x is not known on platform = gke.",
    ),
    Broken(
        11,
        "plan",
        "accelerator: {type: mi325x}\n",
        "/dev/kfd and /dev/dri belong to",
        "platform: generic",
    ),
    Broken(11, "validate", "accelerator: {type: rtx5080}\n", "any NVIDIA GPU is {type: gpu}"),
    Broken(11, "validate", "accelerator: {type: NVIDIA-H100-80GB}\n", "write h100."),
    Broken(
        11,
        "validate",
        "accelerator: {type: cpu, memory: 4Gi}\n",
        "use resources.memory, of a host.",
    ),
    Broken(11, "plan", GPU + "hosts: 2\n", "the 2 hosts may have different GPUs"),
    Broken(11, "plan", V100, "CUDA 13 does not compile for", "platform: generic"),
    Broken(
        11, "plan", "accelerator: {type: gh200}\n", "nodes of gh200 are arm64", "platform: generic"
    ),
    Broken(
        11,
        "plan",
        "accelerator: {type: tpu7, topology: 2x2x1}\n",
        "tpu7 is not known on platform = eks.",
        EKS,
    ),
]
TRAIN = "train: {task: 'a:B', mesh: {dp: -1}, batch: 512, checkpoint: {path: gs://team-b/x}}\n"


def said(broken: Broken) -> tuple[str, str]:
    """Who says something of the job first, and what."""
    program = TRAIN if "train does not run" in broken.says else "command: [a]\n"
    text = f"name: x\nimage: registry.example/train:1-cuda13\n{program}{broken.job}"
    try:
        file = load.read_job_text(text)
    except UserError as refused:
        return "validate", str(refused)
    try:
        ready = prepare(file, defaults.parse_defaults(broken.cluster))
    except UserError as refused:
        return "plan", str(refused)
    found = "\n".join(list_notes(ready.job))
    return ("plan", found) if found else ("doctor", of_doctor(ready))


def of_doctor(ready: PreparedJob) -> str:
    """What doctor says of the drivers of the nodes that the job asks for."""
    spec = pod_template(ready.manifests[0])["spec"]
    labels = spec.get("nodeSelector", {}) | {"nvidia.com/cuda.driver.major": "550"}
    for term in nodes._affinity_terms(spec):
        labels[term["key"]] = term["values"][0]
    node_of_it = node(
        labels=labels, taints=("nvidia.com/gpu=present:NoSchedule",), nvidia_com__gpu="8"
    )
    return "\n".join(finding.summary_text for finding in nodes.judge_drivers([node_of_it], spec))


@pytest.mark.parametrize("broken", TABLE, ids=lambda one: f"{one.row}-{one.says[:40]}")
def test_what_would_pend_or_break_in_silence_is_said_before_it_is_sent(broken: Broken) -> None:
    by, text = said(broken)
    assert broken.says in text and by == broken.by


def test_there_are_thirty_of_them_and_every_row_of_the_platforms_has_some() -> None:
    assert len(TABLE) >= 30 and {one.row for one in TABLE} >= {4, 5, 6, 7, 8, 9, 10, 11}
