"""What a plan answers: bytes against the accelerator's memory, what the cluster is asked, the level that results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.accelerators import ACCELERATORS, PEAK_FLOPS
from jaxlaunch.launcher import wording
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.kubernetes import resources
from jaxlaunch.launcher.manifests import jobset
from jaxlaunch.launcher.manifests.jobset import resolve
from jaxlaunch.launcher.plan import estimate
from jaxlaunch.trainer.spec import Mesh, TrainSpec
from tests.launcher.invoke import launcher

JOB = """
name: lm
image: registry.example/train:1.4
hosts: 2
accelerator: {type: a100, per_host: 4}
node_selector: {nvidia.com/gpu.product: NVIDIA-A100-SXM4-40GB}
resources: {cpu: 1500m, memory: 32Gi}
volumes: [{claim: ckpt, path: /ckpt}]
train:
  task: lm
  model: {kind: decoder, layers: 2, width: 64, heads: 4, length: 32}
  mesh: {dp: 4, fsdp: 2}
  batch: 64
  checkpoint: {path: /ckpt/lm, keep: 2}
"""
GIB = 1024**3


def job(*more: str) -> JobSpec:
    text = JOB
    for line in more:
        key = line.partition(":")[0]
        text = (
            "\n".join(kept for kept in text.splitlines() if not kept.startswith(f"{key}:"))
            + f"\n{line}\n"
        )
    return jobs.parse_job(text)


def trained(spec: JobSpec) -> tuple[JobSpec, TrainSpec]:
    assert spec.train is not None
    return spec, spec.train


def of(state_gib: float, low: float, high: float, full: float = 0.0) -> dict[str, Any]:
    """Shapes as the trainer tells them."""
    kept = {
        "asked": [low * GIB, high * GIB],
        "none": [low * GIB, high * GIB],
        "full": [full * GIB, full * GIB],
    }
    return {
        "device": {"parameters": state_gib * GIB, "batch": 0},
        "activations": kept,
        "samples": 0,
        "checkpoint": 3 * GIB,
    }


@pytest.mark.parametrize(
    ("state", "low", "high", "full", "fits", "says", "hint"),
    [
        (
            10,
            5,
            5,
            1,
            True,
            "fits into 36.0 GiB (90% of 40 GiB or 80 GiB: JAX's part of a100)",
            None,
        ),
        (
            10,
            40,
            40,
            1,
            None,
            "fits the 80 GB A100 only: 72.0 GiB (90% of",
            "nodes with the 80 GB A100 by node_selector",
        ),
        (10, 20, 65, 1, None, "may not fit into 36.0 GiB", "--compile"),
        (10, 65, 65, 1, False, "does not fit into 72.0 GiB", "train.remat: full needs 11.0 GiB."),
        (
            75,
            1,
            1,
            1,
            False,
            "does not fit into 72.0 GiB",
            "train.mesh.fsdp splits it, dp copies it",
        ),
        (10, 90, 90, 80, False, "does not fit into 72.0 GiB", "smaller batch"),
    ],
)
def test_the_verdict_compares_the_step_with_the_accelerators_memory(
    state: float,
    low: float,
    high: float,
    full: float,
    fits: bool | None,
    says: str,
    hint: str | None,
) -> None:
    found = estimate.judge_memory(*trained(job()), of(state, low, high, full))
    assert found.fits is fits and says in found.text
    assert found.hint is None if hint is None else hint in str(found.hint)


@pytest.mark.parametrize(("experts", "axes"), [(None, "fsdp or mp"), (4, "fsdp, ep or mp")])
def test_a_state_that_nothing_copies_is_split_further_and_experts_over_ep_too(
    experts: int | None, axes: str
) -> None:
    spec, train = trained(job())
    model = train.model.model_copy(update={"experts": experts})
    train = train.model_copy(update={"model": model, "mesh": Mesh(dp=1, fsdp=8)})
    found = estimate.judge_memory(spec, train, of(75, 1, 1, 1))
    assert str(found.hint).endswith(f"ask for more devices under train.mesh.{axes}.")


@pytest.mark.parametrize(
    ("platform", "accelerator", "cluster", "usable"),
    [
        (
            "generic",
            "{type: a100}",
            "node_selector: {nvidia.com/gpu.product: NVIDIA-A100-80GB-PCIe}",
            [80],
        ),
        (
            "generic",
            "{type: h100}",
            "node_selector: {nvidia.com/gpu.product: NVIDIA-H100-NVL}",
            [93.6],
        ),
        ("generic", "{type: h100}", "node_selector: {pool: a}", [79.6, 93.6]),
        ("gke", "{type: a100}", "", [40, 80]),
        (
            "gke",
            "{type: a100}",
            "nodes: {a100: {node_selector: {cloud.google.com/gke-accelerator: nvidia-a100-80gb}}}",
            [80],
        ),
        ("gke", "{type: h100}", "", [79.6]),
        (
            "eks",
            "{type: a100}",
            "node_selector: {node.kubernetes.io/instance-type: p4d.24xlarge}",
            [40],
        ),
        ("generic", "{type: a100}", "nodes: {a100: {node_selector: {pool: a}}}", [40, 80]),
    ],
)
def test_the_memory_is_that_of_the_nodes_that_job_or_cluster_defaults_choose(
    platform: str, accelerator: str, cluster: str, usable: list[float]
) -> None:
    text = f"name: x\nimage: i\ncommand: [a]\nplatform: {platform}\naccelerator: {accelerator}\n"
    given = resolve(jobs.parse_job(text), defaults.parse_defaults(cluster))
    found = estimate.device_memory(given.spec, given.nodes.labels)
    assert found is not None and found.usable == pytest.approx(
        [size * 0.9 * GIB for size in usable]
    )


def test_the_verdict_is_of_the_make_that_is_chosen_and_names_a_label_of_the_larger() -> None:
    fits = of(10, 45, 50)
    product = "nvidia.com/gpu.product"
    for value, verdict in (("NVIDIA-A100-SXM4-80GB", True), ("NVIDIA-A100-SXM4-40GB", False)):
        assert estimate.judge_memory(*trained(job()), fits, {product: [value]}).fits is verdict
    both = {"cloud.google.com/gke-accelerator": ["nvidia-tesla-a100", "nvidia-a100-80gb"]}
    found = estimate.judge_memory(*trained(job()), fits, both)
    assert found.fits is None and "{cloud.google.com/gke-accelerator: nvidia-a100-80gb}" in str(
        found.hint
    )


def test_jaxs_part_of_a_gpu_is_the_one_that_the_job_sets() -> None:
    whole = estimate.device_memory(job("env: {XLA_PYTHON_CLIENT_MEM_FRACTION: 0.8}"), {})
    assert whole is not None and whole.usable == (32 * GIB, 64 * GIB)


def test_devices_of_a_cpu_host_share_what_the_job_asks_for() -> None:
    some = estimate.device_memory(job("accelerator: {type: cpu, per_host: 4}"), {})
    assert some is not None and some.usable == (8 * GIB,)
    nothing = job("accelerator: {type: cpu, per_host: 4}", "resources: {cpu: 1}")
    assert estimate.judge_memory(*trained(nothing), of(1, 1, 1)).fits is None


@pytest.mark.parametrize(
    ("accelerator", "usable"),
    [
        ("{type: v4, topology: 2x2x1}", 30.5),
        ("{type: v5e, topology: 2x4}", 15.75),
        ("{type: v5p, topology: 2x2x1}", 95.73),
        ("{type: v6e, topology: 2x4}", 31.24),
        ("{type: tpu7x, topology: 2x2x1}", 94.74),
        ("{type: gpu, memory: 24Gi}", 24 * 0.9),
        ("{type: a100, memory: 10Gi}", 10 * 0.9),  # a part of one
    ],
)
def test_the_memory_is_what_the_compiler_grants_or_what_the_job_says(
    accelerator: str, usable: float
) -> None:
    found = estimate.device_memory(
        jobs.parse_job(f"name: x\ncommand: [a]\naccelerator: {accelerator}\n"), {}
    )
    assert found is not None and found.usable == pytest.approx([usable * GIB])


def test_what_a_gpu_of_any_name_has_is_asked_for() -> None:
    found = estimate.judge_memory(
        *trained(job("accelerator: {type: gpu, per_host: 4}")), of(1, 1, 1)
    )
    assert found.fits is None and "accelerator.memory, such as 24Gi" in str(found.hint)


def test_the_peak_of_a_device_is_that_of_the_chip_s_part() -> None:
    assert PEAK_FLOPS["TPU7x"] * 2 == 2307e12
    assert {"NVIDIA B300 SXM6 AC", "NVIDIA H200 NVL", "NVIDIA GB300"} < set(PEAK_FLOPS)
    assert not ACCELERATORS["tpu7"].accepts_topology("8x8x8") and ACCELERATORS[
        "tpu7x"
    ].accepts_topology("8x8x8")


def test_every_accelerator_says_its_memory() -> None:
    assert {name for name, known in ACCELERATORS.items() if not known.memory_gib} == {"cpu", "gpu"}


def test_the_cluster_is_asked_for_the_sum_of_what_is_rendered() -> None:
    given = resolve(job("slices: 2", "hosts: 1"), defaults.parse_defaults("queue: research"))
    assert estimate.cluster_requests(given, jobset.render(given)[0]) == {
        "platform": "generic",
        "queue": "research",
        "pods": 2,
        "per_pod": {"memory": "32Gi", "nvidia.com/gpu": "4", "cpu": "1500m"},
        "together": {"memory": "64Gi", "nvidia.com/gpu": "8", "cpu": "3"},
    }


def test_a_checkpoint_counts_once_more_than_it_is_kept() -> None:
    told = estimate.checkpoint_sizes(trained(job())[1], "/ckpt/lm", of(1, 1, 1))
    assert told == {"folder": "/ckpt/lm", "bytes": 3 * GIB, "kept": 2, "most": 9 * GIB}


def test_a_level_below_restricted_says_why() -> None:
    manifest = jobset.render(resolve(job("network: hostnetwork"), ClusterDefaults()))[0]
    secured = estimate.security_level(manifest)
    assert (
        secured["level"] == "privileged"
        and secured["because"][0] == "host namespaces (hostNetwork=true)"
    )


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [
        ("memory", "34359738368", "32Gi"),
        ("memory", "1000", "1000"),
        ("memory", "1536", "1536"),
        ("cpu", "1.5", "1500m"),
        ("cpu", "3.0", "3"),
        ("hugepages-2Mi", "5368709120", "5Gi"),
        ("nvidia.com/gpu", "1024", "1024"),
    ],
)
def test_a_quantity_is_written_as_people_write_it(name: str, number: str, text: str) -> None:
    assert resources.format_quantity(name, Decimal(number)) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(999, "999 B"), (1000, "1.0 KiB"), (3 * 1024**2, "3.0 MiB"), (2 * 1024**4, "2048.0 GiB")],
)
def test_a_size_has_the_unit_that_keeps_it_short(number: int, text: str) -> None:
    assert wording.format_size(number) == text


def test_one_of_the_copies_that_dp_makes_says_what_all_would(tmp_path: Path) -> None:
    whole = job("accelerator: {type: cpu, per_host: 4}")
    assert whole.train is not None
    environ = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "TRAIN_SPEC": whole.train.model_dump_json(),
    }
    asked = subprocess.run(
        [sys.executable, "-m", "jaxlaunch.trainer.plan"],
        env=os.environ | environ,
        capture_output=True,
    )
    assert estimate.trace_shapes(*trained(whole), tmp_path) == json.loads(asked.stdout)


@pytest.mark.parametrize(
    ("accelerator", "flags"),
    [
        ("{type: a100}", ["--platform", "cuda", "--capability", "8.0"]),
        ("{type: b200}", ["--platform", "cuda", "--capability", "10.0"]),
        ("{type: v5e, topology: 2x4, per_host: 8}", ["--platform", "tpu"]),
        ("{type: cpu, per_host: 8}", ["--platform", "cpu"]),
    ],
)
def test_the_trainer_is_told_on_which_devices_the_job_will_run(
    accelerator: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(module: str, *arguments: str, **_: Any) -> dict[str, Any]:
        asked.extend(arguments)
        return {"flops_per_step": None, "causal_flops_per_step": None}

    monkeypatch.setattr(estimate.trainer_process, "run_program", run)  # type: ignore[attr-defined]
    estimate.trace_shapes(*trained(job("hosts: 1", f"accelerator: {accelerator}")), tmp_path)
    assert asked == flags


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("network: hostnetwork", "anyone who reaches the nodes; ports 2"),
        (
            "network_policy: false",
            "anyone whom the namespace's other NetworkPolicies admit; ports 9401 (agents) and 9400",
        ),
        ("hosts: 2", "its own hosts, and Prometheus in namespace monitoring"),
    ],
)
def test_a_plan_tells_what_protects_a_job_s_ports_and_what_does_not(line: str, told: str) -> None:
    resolved = resolve(job(line), defaults.parse_defaults("prometheus: {namespace: monitoring}"))
    assert estimate.describe_ingress(resolved).startswith(told)
    policies = [one for one in jobset.render(resolved) if one["kind"] == "NetworkPolicy"]
    assert bool(policies) == told.startswith("its own hosts")
    assert ("no NetworkPolicy protects" in estimate.describe_ingress(resolved)) == (
        "hostnetwork" in line
    )


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


def test_a_plan_tells_devices_bytes_cluster_and_level(
    file: str, capsys: Any, monkeypatch: Any
) -> None:
    left = launcher(capsys, monkeypatch, "plan", file, "--sharding")
    assert left.code == 0
    for told in (
        "lm: 8 devices (2 hosts × 4) of type a100, 2 processes of 4 devices",
        "mesh: dp 4 × fsdp 2 × mp 1",
        "batch: 64 examples a step, 8 per device",
        "fits into 36.0 GiB",
        "with 2 kept and one being written, in /ckpt/lm",
        "blocks.mlp.gate",
        "cluster: 2 pods on generic",
        "pod security: restricted",
        "ingress: its own hosts, and Prometheus in any namespace",
    ):
        assert told in left.out


def test_a_training_that_cannot_fit_leaves_with_2(file: str, capsys: Any, monkeypatch: Any) -> None:
    sets = ["train.model.width=16384", "accelerator.type=l4", "node_selector={}"]
    left = launcher(capsys, monkeypatch, "plan", file, *sets, "-o", "json")
    answer = json.loads(left.out)
    assert left.code == 2
    assert answer["memory"]["fits"] is False and answer["memory"]["says"].startswith(
        "does not fit into 20.2 GiB"
    )


def test_checkpoints_that_do_not_fit_into_their_folder_are_told_before_the_first_save(
    file: str, capsys: Any, monkeypatch: Any
) -> None:
    sets = ["volumes=[{ephemeral: 1Mi, path: /ckpt}]", "hosts=1", "train.mesh.dp=2"]
    left = launcher(capsys, monkeypatch, "plan", file, *sets)
    assert left.code == 0
    assert "2 kept and one being written, in /ckpt/lm: 1.0 MiB of the volume's 1Mi\n" in left.out
    assert (
        "hint: they do not fit, and a save would fail and end the run: make " in left.out
        and "train.checkpoint.keep" in left.out
    )


def test_offline_faults_come_first(file: str, capsys: Any, monkeypatch: Any) -> None:
    left = launcher(capsys, monkeypatch, "plan", file, "placement.preferred=rack", "--cluster")
    assert left.code == 2 and "the job has no queue" in left.err and left.out == ""


def test_what_the_trainer_refuses_is_told_in_its_words(
    file: str, capsys: Any, monkeypatch: Any
) -> None:
    left = launcher(capsys, monkeypatch, "plan", file, "train.task=nowhere:Task")
    assert (
        left.code == 2
        and "nowhere:Task: importing nowhere failed" in left.err
        and "Traceback" not in left.err
    )


def test_a_program_of_ones_own_is_planned_without_bytes(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: a\nimage: i:1\naccelerator: {type: cpu}\ncommand: [python, -V]\n"
    )
    left = launcher(capsys, monkeypatch, "plan", str(tmp_path / "job.yaml"))
    assert left.code == 0 and "bytes" not in left.out and "cluster: 1 pod" in left.out
    asked = launcher(capsys, monkeypatch, "plan", str(tmp_path / "job.yaml"), "--compile")
    assert asked.code == 2 and "a command's arrays are its own" in asked.err
