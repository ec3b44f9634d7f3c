"""What a platform does not have, and what is not built: each refused by name, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import job, profile
from launcher.errors import JobFaults, UserError
from launcher.jobset import render
from launcher.refusals import refusals
from tests.launcher import wrong

SMALL = "name: x\nimage: i\ncommand: [a]\n"
CPU = SMALL + "accelerator: {type: cpu}\n"
TRAIN = "name: x\nimage: i\naccelerator: {type: cpu}\n"
TPU = SMALL + "accelerator: {type: v5e, topology: 2x2}\n"
H100 = SMALL + "accelerator: {type: h100}\n"
H200 = SMALL + "accelerator: {type: h200}\nresources: {memory: 1Gi}\n"
EFA = "platform: eks\nnetwork: efa\n"
TCPXO = "{platform: gke, tcpxo: {image: i}}"
AT_CKPT = "volumes: [{%s, path: /ckpt}]\ntrain: {task: 'a:B', checkpoint: {path: /ckpt/x}}\n"


@pytest.mark.parametrize(
    ("text", "cluster", "said"),
    [
        (CPU + "code: src\nworkdir: data\n", "", "workdir = data lies outside of code = src"),
        (CPU.replace("image: i\n", ""), "", "image is missing, and the profile has none."),
        (TPU, "", "accelerator.type = v5e is not known on platform = generic."),
        (TPU + "platform: eks\n", "", "accelerator.type = v5e is not known on platform = eks."),
        (CPU + "capacity: spot\n", "", "capacity = spot is not known on platform = generic."),
        (CPU + "capacity: flex-start\n", "platform: eks", "capacity = flex-start is not known on platform = eks."),
        (CPU + "capacity: {reservation: r}\n", "", "capacity = reservation is not known on platform = generic."),
        (CPU + "placement: {preferred: rack}\n", "", "placement is Kueue's to keep, and the job has no queue."),
        (H100 + "network: efa\n", "platform: gke", "network = efa does not exist on platform = gke."),
        (H100 + "network: gpudirect-tcpxo\n", "", "network = gpudirect-tcpxo does not exist on platform = generic."),
        (H100 + "network: gpudirect-tcpxo\n", "platform: gke", "needs the receive daemon's image"),
        (H200 + "network: gpudirect-tcpxo\n", TCPXO, "does not apply to h200 with 8 per host."),
        (H200 + EFA, "", "nodes of h200 have 16 or 32 interfaces."),
        (H200.replace("h200", "gb200") + EFA, "", "how many interfaces nodes of gb200 have is not known."),
        (H100 + EFA, "", "takes huge pages, which Kubernetes gives only beside cpu or memory."),
        (
            CPU + "volumes: [{bucket: s3://b, path: /b}]\n",
            "platform: gke",
            "s3:// cannot be mounted on platform = gke.",
        ),
        (CPU + "volumes: [{bucket: gs://b, path: /b}]\n", "", "gs:// cannot be mounted on platform = generic."),
        (TRAIN + "train: {task: 'a:B'}\n", "", "train.checkpoint.path is missing"),
        (TRAIN + "train: {task: 'a:B', checkpoint: {path: /a/b}}\n", "", "lies on no volume"),
        (TRAIN + AT_CKPT % "ephemeral: 1Gi" + "hosts: 2\n", "", "of which every host has its own."),
        (TRAIN + AT_CKPT % "claim: c, read_only: true", "", "lies on a read-only volume."),
        (TRAIN + "train: {task: 'a:B', checkpoint: {path: runs}}\n", "", "runs is relative to the job file"),
        (
            TRAIN + "train: {task: 'a:B', data: {source: text, path: a.txt}}\n",
            "checkpoint: {url: gs://b}",
            "train.data.path = a.txt is relative to the job file",
        ),
        (CPU + "init: [{image: i}]\n", "", "init.0 has no name."),
        (CPU + "init: [{name: main}]\n", "", "init.0.name = main is taken."),
        (CPU + "init: [{name: a}, {name: a}]\n", "", "init.1.name = a is taken."),
    ],
)
def test_a_job_is_refused_by_name(text: str, cluster: str, said: str) -> None:
    found = list(refusals(job.parse(text), profile.parse(cluster)))
    assert [fault for fault in found if said in fault.message], found
    assert len(found) == 1 and found[0].hint


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
        (H100 + "network: gpudirect-tcpxo\n", TCPXO),
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
def test_what_the_platform_or_the_profile_knows_is_taken(text: str, cluster: str) -> None:
    assert list(refusals(job.parse(text), profile.parse(cluster))) == []


@pytest.mark.parametrize("one", wrong.TABLE, ids=lambda one: one.lines.replace("\n", ", ")[:60])
def test_what_the_server_would_refuse_is_refused_before_it_is_sent(one: wrong.Wrong) -> None:
    with pytest.raises(UserError) as refused:
        render(job.parse(wrong.text(one.lines)), profile.parse(""))
    assert one.ours in str(refused.value)


def test_what_is_wrong_with_the_pod_is_said_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(CPU + "pod:\n  spec:\n    containers: [{name: exporter}]\n")
    with pytest.raises(JobFaults) as refused:
        job.load(path, also=lambda spec: refusals(spec, profile.parse("")))
    assert str(refused.value).startswith(f"{path}:7: container exporter: it has no image.")
