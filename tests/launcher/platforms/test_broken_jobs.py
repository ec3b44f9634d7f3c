"""Jobs that GKE or EKS would leave pending or break silently are reported before."""

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
    Broken("validate", V5E % "3x4", "accelerator.topology = 3x4 is not a slice of v5e."),
    Broken("validate", V5E % "4x4" + "hosts: 2\n", "hosts = 2 does not make a 4x4 slice of v5e"),
    Broken(
        "validate", "accelerator: {type: v5p, topology: 8x4x4}\n", "8x4x4 is not a slice of v5p."
    ),
    Broken(
        "plan", L40S + "hosts: 2\nnetwork: efa\n", "nodes of l40s have 1, 2 or 4 interfaces", EKS
    ),
    Broken(
        "plan",
        H100 + "capacity: {reservation: bought}\n",
        "is not an id, by which Karpenter labels",
        EKS,
    ),
    Broken("validate", V5E % "4x4" + "network: gpudirect-rdma\n", "does not apply to v5e."),
    Broken(
        "plan",
        H100 + "hosts: 2\nnetwork: gpudirect-tcpxo\n" + HIGH,
        "GPUDirect-TCPX is not supported.",
        TCPXO,
    ),
    Broken("plan", H100 + "network: gpudirect-rdma\n", "does not apply to h100 with 8 per host."),
    Broken(
        "plan",
        "accelerator: {type: h200, per_host: 4}\nnetwork: gpudirect-rdma\n",
        "to h200 with 4 per host.",
    ),
    Broken(
        "plan",
        GB200 + "network: gpudirect-rdma\n",
        "{network: gpudirect-rdma-dra, compute_domain: true} is RDMA",
    ),
    Broken(
        "plan",
        GB200 + "network: efa-dra\n",
        "network: efa-dra is supported on managed node groups",
        EKS,
    ),
    Broken(
        "plan",
        H200 + "capacity: {reservation: cr-1}\n",
        "label the group that has it capacity-res",
        MANAGED,
    ),
    Broken(
        "plan",
        H200 + "network: gpudirect-rdma\n",
        "gpudirect-rdma does not exist on platform = eks.",
        EKS,
    ),
    Broken(
        "plan",
        "accelerator: {type: h100, per_host: 16}\n",
        "the largest h100 machine of platform = gke has 8.",
    ),
    Broken("plan", A100 + MEGA, "= nvidia-h100-mega-80gb is h100, and accelerator.type = a100."),
    Broken(
        "plan",
        H200 + "capacity: {reservation: cr-1, block: b}\n",
        "capacity.block is not known",
        EKS,
    ),
    Broken("doctor", H100, "550 is too old for CUDA 13"),
    Broken("validate", "accelerator: {type: mi300x}\n", "train does not run on mi300x"),
    Broken("validate", "accelerator: {type: rtx5080}\n", "any NVIDIA GPU is {type: gpu}"),
    Broken("validate", "accelerator: {type: NVIDIA-H100-80GB}\n", "write h100."),
    Broken(
        "validate", "accelerator: {type: cpu, memory: 4Gi}\n", "use resources.memory, of a host."
    ),
    Broken(
        "validate", "accelerator: {type: p5.48xlarge}\n", "write {type: h100, per_host: 8}, and"
    ),
    Broken("validate", "accelerator: {type: trn2}\n", "resource: aws.amazon.com/neuroncore"),
    Broken("validate", "accelerator: {type: plugin}\n", "accelerator.resource is missing"),
    Broken(
        "validate",
        "accelerator: {type: plugin, resource: habana.ai/gaudi}\n",
        "JAX has no backend for Gaudi",
    ),
    Broken("validate", "accelerator: {type: gpu, resource: amd.com/gpu}\n", "write type: amdgpu."),
    Broken("validate", "accelerator: {type: cpu, resource: a.b/c}\n", "does not apply to cpu."),
    Broken(
        "validate",
        "accelerator: {type: v5e, topology: 2x2, resource: google.com/chip}\n",
        "is not that of a TPU, google.com/tpu.",
    ),
    Broken(
        "validate",
        "accelerator: {type: h100, resource: nvidia.com/mig-1g.10gb, per_host: 2}\n",
        "a process can use one MIG device alone",
    ),
    Broken(
        "plan",
        H100 + "node_selector: {node.kubernetes.io/instance-type: p4d.24xlarge}\n",
        "= p4d.24xlarge is a100, and accelerator.type = h100.",
        "platform: generic",
    ),
    Broken(
        "plan",
        H100 + "node_selector: {gpu.nvidia.com/model: A100_NVLINK_80GB}\n",
        "= A100_NVLINK_80GB is a100, and accelerator.type = h100.",
        "platform: generic",
    ),
    Broken("plan", GPU + "hosts: 2\n", "the 2 hosts may have different GPUs"),
    Broken("plan", V100, "CUDA 13 does not compile for", "platform: generic"),
    Broken("plan", "accelerator: {type: gh200}\n", "nodes of gh200 are arm64", "platform: generic"),
]
TRAIN = "train: {task: 'a:B', mesh: {dp: -1}, batch: 512, checkpoint: {path: gs://team-b/x}}\n"


def first_message(broken: Broken) -> tuple[str, str]:
    """Who says something of the job first, and what."""
    program = TRAIN if "train does not run" in broken.says else "command: [a]\n"
    text = f"name: x\nimage: registry.example/train:1-cuda13\n{program}{broken.job}"
    try:
        file = load.read_job_text(text)
    except UserError as error:
        return "validate", str(error)
    try:
        ready = prepare(file, defaults.parse_defaults(broken.cluster))
    except UserError as error:
        return "plan", str(error)
    notes = "\n".join(list_notes(ready.job))
    return ("plan", notes) if notes else ("doctor", doctor_message(ready))


def doctor_message(ready: PreparedJob) -> str:
    """What doctor says of the drivers of the nodes that the job asks for."""
    spec = pod_template(ready.manifests[0])["spec"]
    labels = spec.get("nodeSelector", {}) | {"nvidia.com/cuda.driver.major": "550"}
    for term in nodes._affinity_terms(spec):
        labels[term["key"]] = term["values"][0]
    node_of_it = node(
        labels=labels, taints=("nvidia.com/gpu=present:NoSchedule",), nvidia_com__gpu="8"
    )
    return "\n".join(finding.summary_text for finding in nodes.judge_drivers([node_of_it], spec))


@pytest.mark.parametrize("broken", TABLE, ids=lambda case: case.says[:40])
def test_broken_job_is_reported_before_submission(broken: Broken) -> None:
    command, text = first_message(broken)
    assert broken.says in text and command == broken.by
