"""Jobs that a platform does not support, or that the server would refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxlaunch.launcher.errors import JobFaultsError, UserError
from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.manifests.jobset import prepare, resolve
from jaxlaunch.launcher.platforms import eks, gke, table
from jaxlaunch.launcher.platforms.facts import GKE_TPU, INSTANCE
from tests.launcher.manifests import rejected_jobs

SMALL = "name: x\nimage: i\ncommand: [a]\n"
CPU = SMALL + "accelerator: {type: cpu}\n"
TRAIN = "name: x\nimage: i\naccelerator: {type: cpu}\n"
TPU = SMALL + "accelerator: {type: v5e, topology: 2x2}\n"
H100 = SMALL + "accelerator: {type: h100}\n"
H200 = SMALL + "accelerator: {type: h200}\nresources: {memory: 1Gi}\n"
EFA = "platform: eks\nnetwork: efa\n"
TCPXO = "{platform: gke, tcpxo: {image: i}}"
AT_CKPT = "volumes: [{%s, path: /ckpt}]\ntrain: {task: 'a:B', checkpoint: {path: /ckpt/x}}\n"


# The job, the message, and the cluster defaults if any.
UNSUPPORTED = [
    (CPU + "code: src\nworkdir: data\n", "workdir = data is outside of code = src"),
    (CPU.replace("image: i\n", ""), "image is missing, and the cluster defaults have none."),
    (TPU, "accelerator.type = v5e is not known on platform = generic."),
    (TPU + "platform: eks\n", "accelerator.type = v5e is not known on platform = eks."),
    (
        SMALL + "accelerator: {type: gb200, per_host: 8}\nplatform: eks\n",
        "accelerator.per_host = 8: the largest gb200 machine of platform = eks has 4.",
    ),
    (
        H100 + "platform: eks\nnode_selector: {node.kubernetes.io/instance-type: p5.4xlarge}\n",
        "node_selector: p5.4xlarge has 1 GPU, and accelerator.per_host = 8.",
    ),
    (CPU + "capacity: spot\n", "capacity = spot is not known on platform = generic."),
    (
        CPU + "capacity: flex-start\n",
        "capacity = flex-start is not known on platform = eks.",
        "platform: eks",
    ),
    (
        CPU + "capacity: {reservation: r}\n",
        "capacity = reservation is not known on platform = generic.",
    ),
    (
        CPU + "placement: {preferred: rack}\n",
        "placement is done by Kueue, and the job has no queue.",
    ),
    (H100 + "network: efa\n", "network = efa does not exist on platform = gke.", "platform: gke"),
    (
        H100 + "network: gpudirect-tcpxo\n",
        "network = gpudirect-tcpxo does not exist on platform = generic.",
    ),
    (H100 + "network: gpudirect-tcpxo\n", "needs the receive daemon's image", "platform: gke"),
    (
        CPU,
        "network = rdma does not apply to cpu.",
        "network: {cpu: {profile: rdma, resource: rdma/ib}}",
    ),
    (H200 + "network: gpudirect-tcpxo\n", "does not apply to h200 with 8 per host.", TCPXO),
    (H200.replace("h200", "gb300") + EFA, "how many interfaces nodes of gb300 have is not known."),
    (
        TPU.replace("2x2", "2x4, per_host: 8") + "slices: 2\nplatform: gke\n",
        "slices = 2: GKE connects only slices of several hosts, and v5e 2x4 is one host.",
    ),
    (
        CPU + "capacity: flex-start\ndeadline: 8d\n",
        "deadline = 8 days: nodes of capacity = flex-start last at most 7 days.",
        "platform: gke",
    ),
    (
        SMALL + "accelerator: {type: a100}\nhosts: 2\n",
        "2 hosts of a100 could be nvidia-tesla-a100 or nvidia-a100-80gb, which differ in "
        "memory or network.",
        "platform: gke",
    ),
    (
        H200 + "hosts: 2\n" + EFA,
        "2 hosts of h200 could be p5e.48xlarge or p5en.48xlarge, which differ in memory "
        "or network.",
    ),
    (
        CPU + "capacity: {reservation: cr-0, project: p}\n",
        "capacity.project is not known on platform = eks.",
        "platform: eks",
    ),
    (
        CPU + "capacity: {reservation: r, sub_block: s}\n",
        "capacity.sub_block = s is part of a block, and capacity.block is missing.",
        "platform: gke",
    ),
    (
        CPU + "volumes: [{bucket: s3://team-b, path: /b}]\n",
        "s3:// cannot be mounted on platform = gke.",
        "platform: gke",
    ),
    (
        CPU + "volumes: [{bucket: gs://team-b, path: /b}]\n",
        "gs:// cannot be mounted on platform = generic.",
    ),
    (TRAIN + "train: {task: 'a:B'}\n", "train.checkpoint.path is missing"),
    (TRAIN + "train: {task: 'a:B', checkpoint: {path: /a/b}}\n", "is on no volume"),
    (TRAIN + AT_CKPT % "ephemeral: 1Gi" + "hosts: 2\n", "which every host has for itself."),
    (TRAIN + AT_CKPT % "claim: c, read_only: true", "is on a read-only volume."),
    (
        TRAIN + "train: {task: 'a:B', checkpoint: {path: runs}}\n",
        "runs is relative to the job file",
    ),
    (
        TRAIN + "train: {task: 'a:B', data: {source: text, path: a.txt}}\n",
        "train.data.path = a.txt is relative to the job file",
        "checkpoint: {url: gs://team-b}",
    ),
    (
        TRAIN + "train: {task: 'a:B', data: {source: text, path: /a/b, tokenizer: here}}\n",
        "train.data.tokenizer = here is relative to the job file",
        "checkpoint: {url: gs://team-b}",
    ),
    (
        TRAIN + "train: {task: 'a:B', data: {source: mixture, parts: {x: {weight: 1, path: "
        "a.txt}}}}\n",
        "train.data.parts.x.path = a.txt is relative to the job file",
        "checkpoint: {url: gs://team-b}",
    ),
    (
        TRAIN + "train: {task: 'a:B', model: {kind: gpt2}, lora: {init_from: tuned}}\n",
        "train.lora.init_from = tuned is relative to the job file",
        "checkpoint: {url: gs://team-b}",
    ),
]


@pytest.mark.parametrize("case", UNSUPPORTED, ids=lambda case: case[1][:40])
def test_unsupported_job_is_refused(case: tuple[str, ...]) -> None:
    text, message, *cluster = case
    job = resolve(load.parse_job(text), defaults.parse_defaults("".join(cluster)))
    (fault,) = job.find_faults()
    assert message in fault.message
    assert fault.hint


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        (CPU, ""),
        (CPU.replace("image: i\n", ""), "image: i"),
        (TPU, "platform: gke"),
        (TPU, "nodes: {v5e: {node_selector: {kind: v5e}}}"),
        (CPU + "capacity: spot\n", "capacity: {spot: {}}"),
        (CPU + "placement: {preferred: rack}\n", "queue: q"),
        (H200 + EFA + "node_selector: {node.kubernetes.io/instance-type: p5e.48xlarge}\n", ""),
        (H200 + EFA, ""),
        (H100.replace("h100", "h100, per_host: 1") + EFA, ""),
        (
            CPU.replace("cpu}", "cpu, per_host: 4}")
            + "node_selector: {node.kubernetes.io/instance-type: g6.xlarge}\n",
            "platform: eks",
        ),
        (H100 + "network: gpudirect-tcpxo\n", TCPXO),
        (H200 + "hosts: 2\nnetwork: gpudirect-rdma\n", "platform: gke"),
        (
            H200 + "network: gpudirect-rdma\n",
            "{platform: gke, nodes: {h200: {node_selector: {pool: a}}}}",
        ),
        (
            SMALL + "accelerator: {type: mi300x}\nhosts: 2\nnetwork: {profile: rdma, "
            "resource: rdma/ib}\n",
            "",
        ),
        (SMALL + "accelerator: {type: a100, per_host: 16}\n", "platform: gke"),
        (H100 + "node_selector: {node.kubernetes.io/instance-type: p7.new}\n", "platform: eks"),
        (CPU + "capacity: {reservation: mine}\n", "{platform: eks, provisioner: managed}"),
        (TRAIN + AT_CKPT % "ephemeral: 1Gi", ""),
        (TRAIN + AT_CKPT % "claim: c" + "hosts: 2\n", ""),
        (
            TRAIN + "train: {task: 'a:B', checkpoint: {path: /n/x}}\n"
            "pod: {spec: {containers: [{name: main, volumeMounts: [{name: n, mountPath: /n}]}], "
            "volumes: [{name: n, nfs: {server: s, path: /}}]}}\n",
            "",
        ),
    ],
)
def test_supported_job_has_no_faults(text: str, cluster: str) -> None:
    assert list(resolve(load.parse_job(text), defaults.parse_defaults(cluster)).find_faults()) == []


@pytest.mark.parametrize(
    "case", rejected_jobs.TABLE, ids=lambda case: case.lines.replace("\n", ", ")[:60]
)
def test_job_that_the_server_refuses_is_refused(case: rejected_jobs.RejectedJob) -> None:
    with pytest.raises(UserError) as error:
        prepare(load.read_job_text(rejected_jobs.job_text(case.lines)), ClusterDefaults())
    assert case.ours in str(error.value)


def test_fault_names_volume_that_hides_checkpoint_claim() -> None:
    text = TRAIN + "hosts: 2\ntrain: {task: 'a:B'}\nvolumes: [{ephemeral: 1Gi, path: /c}]\n"
    (fault,) = resolve(
        load.parse_job(text), defaults.parse_defaults("checkpoint: {claim: c, path: /c}")
    ).find_faults()
    assert fault.path == ("volumes", 0) and "/c/x is on ephemeral storage" in fault.message


def test_init_container_may_not_have_name_of_network_container() -> None:
    text = H100 + "network: gpudirect-tcpxo\ninit: [{name: tcpxo-daemon}]\n"
    (fault,) = resolve(load.parse_job(text), defaults.parse_defaults(TCPXO)).find_faults()
    assert "init.0.name = tcpxo-daemon is taken." in fault.message


def test_pod_fault_has_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(CPU + "pod:\n  spec:\n    containers: [{name: exporter}]\n")
    with pytest.raises(JobFaultsError) as error:
        prepare(load.read_job(path), ClusterDefaults())
    assert str(error.value).startswith(f"{path}:7: container exporter: it has no image.")


@pytest.mark.parametrize(
    ("accelerator", "types"),
    [
        ("{type: h100}", {"p5.48xlarge"}),
        ("{type: h100, per_host: 1}", {"p5.4xlarge", "p5.48xlarge"}),
        ("{type: l4, per_host: 4}", {"g6.12xlarge", "g6.24xlarge", "g6.48xlarge"}),
        ("{type: l4, per_host: 8}", {"g6.48xlarge"}),
    ],
)
def test_instance_types_have_enough_gpus(accelerator: str, types: set[str]) -> None:
    job = resolve(
        load.parse_job(SMALL + f"accelerator: {accelerator}\nplatform: eks\n"), ClusterDefaults()
    )
    assert set(job.nodes.labels["node.kubernetes.io/instance-type"]) == types


@pytest.mark.parametrize(
    ("accelerator", "cluster", "chips"),
    [
        ("{type: v6e, topology: 2x4}", "", ("4",)),
        ("{type: v6e, topology: 2x4, per_host: 8}", "", ("8",)),
        ("{type: v6e, topology: 4x4}", "", None),
        (
            "{type: v6e, topology: 2x4}",
            f"nodes: {{v6e: {{node_selector: {{{GKE_TPU}: own}}}}}}",
            None,
        ),
    ],
)
def test_slice_requests_chips_per_host(
    accelerator: str, cluster: str, chips: tuple[str] | None
) -> None:
    """Where the platform's usual labels are not overruled."""
    spec = load.parse_job(SMALL + f"accelerator: {accelerator}\nplatform: gke\n")
    assert (
        resolve(spec, defaults.parse_defaults(cluster)).nodes.labels.get(gke.CHIPS_LABEL.value)
        == chips
    )


@pytest.mark.parametrize(
    ("nodes", "tolerated"),
    [
        ("{node_selector: {pool: a}}", {"nvidia.com/gpu"}),
        ("{tolerations: []}", set()),
        ("{tolerations: [{key: team}]}", {"team"}),
    ],
)
def test_cluster_nodes_keep_usual_tolerations(nodes: str, tolerated: set[str]) -> None:
    job = resolve(load.parse_job(H200), defaults.parse_defaults(f"nodes: {{h200: {nodes}}}"))
    keys = {toleration["key"] for toleration in job.nodes.tolerations}
    assert {key for key in keys if not key.startswith("node.kubernetes.io/")} == tolerated


def test_every_instance_type_is_used() -> None:
    labels = [nodes.labels.get(INSTANCE, ()) for nodes in table.NODES["eks"].values()]
    assert {name for types in labels for name in types} == set(eks.INSTANCES)


@pytest.mark.parametrize(
    ("key", "size", "is_refused"),
    [
        ("env", 131_069, False),
        ("env", 131_070, True),
        ("env", 200_000, True),
        ("command", 200_000, True),
    ]
    + [("train", 100_000, False), ("train", 200_000, True)],
)
def test_oversized_values_are_refused(key: str, size: int, is_refused: bool) -> None:
    """A variable is `A=` and its value and an end, of 131072 bytes together."""
    text = "x" * size
    jobs = {
        "env": CPU + f"env: {{A: {text}}}\n",
        "command": CPU.replace("[a]", f"[a, {text}]"),
        "train": TRAIN + "train: {task: 'a:B', data: {source: torch, dataset: 'a:B', args: {text: "
        f"{text}}}}}}}\n",
    }
    job = jobs[key]
    if not is_refused:
        load.parse_job(job)
        return
    with pytest.raises(JobFaultsError, match=r"takes \d+ bytes, and"):
        load.parse_job(job)
