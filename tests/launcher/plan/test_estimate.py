"""The plan: memory of the accelerator, requests to the cluster, Pod Security level."""

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
from tests.launcher.invoke import Launcher

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


def make_job(*more: str) -> JobSpec:
    text = JOB
    for line in more:
        key = line.partition(":")[0]
        text = (
            "\n".join(other for other in text.splitlines() if not other.startswith(f"{key}:"))
            + f"\n{line}\n"
        )
    return jobs.parse_job(text)


def with_train(spec: JobSpec) -> tuple[JobSpec, TrainSpec]:
    assert spec.train is not None
    return spec, spec.train


def make_shapes(state_gib: float, low: float, high: float, full_gib: float = 0.0) -> dict[str, Any]:
    """Shapes as the trainer tells them."""
    activations = {
        "asked": [low * GIB, high * GIB],
        "none": [low * GIB, high * GIB],
        "full": [full_gib * GIB, full_gib * GIB],
    }
    return {
        "device": {"parameters": state_gib * GIB, "batch": 0},
        "activations": activations,
        "samples": 0,
        "checkpoint": 3 * GIB,
    }


@pytest.mark.parametrize(
    ("state", "low", "high", "full_gib", "fits", "text", "hint"),
    [
        (
            *(10, 5, 5, 1, True),
            *("fits into 36.0 GiB (90% of 40 GiB or 80 GiB: JAX's part of a100)", None),
        ),
        (
            *(10, 40, 40, 1, None, "fits the 80 GB A100 only: 72.0 GiB (90% of"),
            "nodes with the 80 GB A100 by node_selector",
        ),
        (10, 20, 65, 1, None, "may not fit into 36.0 GiB", "--compile"),
        (10, 65, 65, 1, False, "does not fit into 72.0 GiB", "train.remat: full needs 11.0 GiB."),
        (
            *(75, 1, 1, 1, False, "does not fit into 72.0 GiB"),
            "train.mesh.fsdp splits it, dp copies it",
        ),
        (10, 90, 90, 80, False, "does not fit into 72.0 GiB", "smaller batch"),
    ],
)
def test_verdict_compares_peak_with_memory(
    state: float,
    low: float,
    high: float,
    full_gib: float,
    fits: bool | None,
    text: str,
    hint: str | None,
) -> None:
    verdict = estimate.judge_memory(
        *with_train(make_job()), make_shapes(state, low, high, full_gib)
    )
    assert verdict.fits is fits and text in verdict.text
    assert verdict.hint is None if hint is None else hint in str(verdict.hint)


@pytest.mark.parametrize(("experts", "axes"), [(None, "fsdp or mp"), (4, "fsdp, ep or mp")])
def test_hint_names_axes_that_split_the_state(experts: int | None, axes: str) -> None:
    spec, train = with_train(make_job())
    model = train.model.model_copy(update={"experts": experts})
    train = train.model_copy(update={"model": model, "mesh": Mesh(dp=1, fsdp=8)})
    verdict = estimate.judge_memory(spec, train, make_shapes(75, 1, 1, 1))
    assert str(verdict.hint).endswith(f"ask for more devices under train.mesh.{axes}.")


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
def test_memory_follows_from_node_labels(
    platform: str, accelerator: str, cluster: str, usable: list[float]
) -> None:
    text = f"name: x\nimage: i\ncommand: [a]\nplatform: {platform}\naccelerator: {accelerator}\n"
    job = resolve(jobs.parse_job(text), defaults.parse_defaults(cluster))
    memory = estimate.device_memory(job.spec, job.nodes.labels)
    assert memory is not None
    assert memory.sizes_bytes == pytest.approx([size * 0.9 * GIB for size in usable])


def test_verdict_names_label_of_larger_model() -> None:
    fits = make_shapes(10, 45, 50)
    product = "nvidia.com/gpu.product"
    for value, verdict in (("NVIDIA-A100-SXM4-80GB", True), ("NVIDIA-A100-SXM4-40GB", False)):
        assert (
            estimate.judge_memory(*with_train(make_job()), fits, {product: [value]}).fits is verdict
        )
    labels = {"cloud.google.com/gke-accelerator": ["nvidia-tesla-a100", "nvidia-a100-80gb"]}
    verdict_of_both = estimate.judge_memory(*with_train(make_job()), fits, labels)
    assert verdict_of_both.fits is None
    assert "{cloud.google.com/gke-accelerator: nvidia-a100-80gb}" in str(verdict_of_both.hint)


def test_memory_share_of_jax_can_be_set() -> None:
    memory = estimate.device_memory(make_job("env: {XLA_PYTHON_CLIENT_MEM_FRACTION: 0.8}"), {})
    assert memory is not None and memory.sizes_bytes == (32 * GIB, 64 * GIB)


def test_cpu_devices_share_memory_of_host() -> None:
    memory = estimate.device_memory(make_job("accelerator: {type: cpu, per_host: 4}"), {})
    assert memory is not None and memory.sizes_bytes == (8 * GIB,)
    job_without_memory = make_job("accelerator: {type: cpu, per_host: 4}", "resources: {cpu: 1}")
    assert estimate.judge_memory(*with_train(job_without_memory), make_shapes(1, 1, 1)).fits is None


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
def test_memory_of_accelerator_or_job(accelerator: str, usable: float) -> None:
    memory = estimate.device_memory(
        jobs.parse_job(f"name: x\ncommand: [a]\naccelerator: {accelerator}\n"), {}
    )
    assert memory is not None and memory.sizes_bytes == pytest.approx([usable * GIB])


def test_unknown_gpu_memory_is_requested() -> None:
    verdict = estimate.judge_memory(
        *with_train(make_job("accelerator: {type: gpu, per_host: 4}")), make_shapes(1, 1, 1)
    )
    assert verdict.fits is None and "accelerator.memory, such as 24Gi" in str(verdict.hint)


def test_peak_flops_are_per_device() -> None:
    assert PEAK_FLOPS["TPU7x"] * 2 == 2307e12
    assert {"NVIDIA B300 SXM6 AC", "NVIDIA H200 NVL", "NVIDIA GB300"} < set(PEAK_FLOPS)
    assert not ACCELERATORS["tpu7"].accepts_topology("8x8x8")
    assert ACCELERATORS["tpu7x"].accepts_topology("8x8x8")


def test_every_accelerator_has_memory() -> None:
    without = {name for name, facts in ACCELERATORS.items() if not facts.memory_gib}
    assert without == {"cpu", "gpu", "amdgpu", "plugin"}


def test_cluster_requests_are_summed() -> None:
    job = resolve(make_job("slices: 2", "hosts: 1"), defaults.parse_defaults("queue: research"))
    assert estimate.cluster_requests(job, jobset.render(job)[0]) == {
        "platform": "generic",
        "queue": "research",
        "pods": 2,
        "per_pod": {"memory": "32Gi", "nvidia.com/gpu": "4", "cpu": "1500m"},
        "together": {"memory": "64Gi", "nvidia.com/gpu": "8", "cpu": "3"},
    }


def test_checkpoint_sizes_include_the_one_being_written() -> None:
    sizes = estimate.checkpoint_sizes(with_train(make_job())[1], "/ckpt/lm", make_shapes(1, 1, 1))
    assert sizes == {"folder": "/ckpt/lm", "bytes": 3 * GIB, "kept": 2, "most": 9 * GIB}


def test_security_level_has_reasons() -> None:
    manifest = jobset.render(resolve(make_job("network: hostnetwork"), ClusterDefaults()))[0]
    security = estimate.security_level(manifest)
    assert security["level"] == "privileged"
    assert security["because"][0] == "host namespaces (hostNetwork=true)"


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
def test_quantity_is_formatted(name: str, number: str, text: str) -> None:
    assert resources.format_quantity(name, Decimal(number)) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(999, "999 B"), (1000, "1.0 KiB"), (3 * 1024**2, "3.0 MiB"), (2 * 1024**4, "2048.0 GiB")],
)
def test_size_is_formatted(number: int, text: str) -> None:
    assert wording.format_size(number) == text


def test_traced_copy_equals_full_trace(tmp_path: Path) -> None:
    job = make_job("accelerator: {type: cpu, per_host: 4}")
    assert job.train is not None
    environ = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "TRAIN_SPEC": job.train.model_dump_json(),
    }
    process = subprocess.run(
        [sys.executable, "-m", "jaxlaunch.trainer.plan"],
        env=os.environ | environ,
        capture_output=True,
    )
    assert estimate.trace_shapes(*with_train(job), tmp_path) == json.loads(process.stdout)


@pytest.mark.parametrize(
    ("accelerator", "flags"),
    [
        ("{type: a100}", ["--platform", "cuda", "--capability", "8.0"]),
        ("{type: b200}", ["--platform", "cuda", "--capability", "10.0"]),
        ("{type: v5e, topology: 2x4, per_host: 8}", ["--platform", "tpu"]),
        ("{type: cpu, per_host: 8}", ["--platform", "cpu"]),
    ],
)
def test_trainer_gets_platform_and_capability(
    accelerator: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments_of_trainer: list[str] = []

    def run(module: str, *arguments: str, **_: Any) -> dict[str, Any]:
        arguments_of_trainer.extend(arguments)
        return {"flops_per_step": None, "causal_flops_per_step": None}

    monkeypatch.setattr(estimate.trainer_process, "run_program", run)  # type: ignore[attr-defined]
    estimate.trace_shapes(
        *with_train(make_job("hosts: 1", f"accelerator: {accelerator}")), tmp_path
    )
    assert arguments_of_trainer == flags


@pytest.mark.parametrize("compiled", [False, True])
def test_fault_of_the_trace_has_a_hint_that_says_where_it_ran(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the compilation, such as a GPU that XLA does not know, says what to do itself."""
    hints: list[str | None] = []

    def run(module: str, *arguments: str, hint: str | None, **_: Any) -> dict[str, Any]:
        hints.append(hint)
        return {"flops_per_step": None, "causal_flops_per_step": None}

    monkeypatch.setattr(estimate.trainer_process, "run_program", run)  # type: ignore[attr-defined]
    estimate.trace_shapes(*with_train(make_job()), tmp_path, compiled=compiled)
    (hint,) = hints
    assert hint is None if compiled else hint is not None and "on this machine" in hint


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("network: hostnetwork", "anyone who reaches the nodes; ports 2"),
        (
            "network_policy: false",
            "anyone whom the namespace's other NetworkPolicies admit; ports 9401 (agents) and 9400",
        ),
        ("hosts: 2", "its own hosts, and Prometheus in namespace monitoring"),
    ],
)
def test_ingress_describes_network_policy(line: str, text: str) -> None:
    resolved = resolve(
        make_job(line), defaults.parse_defaults("prometheus: {namespace: monitoring}")
    )
    assert estimate.describe_ingress(resolved).startswith(text)
    policies = [
        manifest for manifest in jobset.render(resolved) if manifest["kind"] == "NetworkPolicy"
    ]
    assert bool(policies) == text.startswith("its own hosts")
    expected = "hostnetwork" in line
    assert ("no NetworkPolicy protects" in estimate.describe_ingress(resolved)) == expected


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


def test_plan_prints_devices_bytes_cluster_and_level(run_launcher: Launcher, file: str) -> None:
    result = run_launcher("plan", file, "--sharding")
    assert result.code == 0
    for text in (
        "lm: 8 devices (2 hosts × 4) of type a100, 2 processes of 4 devices",
        *("mesh: dp 4 × fsdp 2 × mp 1", "batch: 64 examples a step, 8 per device"),
        *("fits into 36.0 GiB", "with 2 kept and one being written, in /ckpt/lm"),
        *("blocks.mlp.gate", "cluster: 2 pods on generic", "pod security: restricted"),
        "ingress: its own hosts, and Prometheus in any namespace",
    ):
        assert text in result.out


def test_plan_exits_with_2_if_training_cannot_fit(
    run_launcher: Launcher, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The trainer takes seconds to start and to trace.
    shapes = make_shapes(100.0, 1.0, 2.0, 0.5)
    monkeypatch.setattr(estimate, "trace_shapes", lambda *_, **__: shapes)
    sets = ["accelerator.type=l4", "node_selector={}"]
    result = run_launcher("plan", file, *sets, "-o", "json")
    plan = json.loads(result.out)
    assert result.code == 2
    assert plan["memory"]["fits"] is False
    assert plan["memory"]["says"].startswith("does not fit into 20.2 GiB")


def test_plan_warns_of_too_little_room_for_checkpoints(run_launcher: Launcher, file: str) -> None:
    sets = ["volumes=[{ephemeral: 1Mi, path: /ckpt}]", "hosts=1", "train.mesh.dp=2"]
    result = run_launcher("plan", file, *sets)
    assert result.code == 0
    assert "2 kept and one being written, in /ckpt/lm: 1.0 MiB of the volume's 1Mi\n" in result.out
    assert "hint: they do not fit, and a save would fail and end the run: make " in result.out
    assert "train.checkpoint.keep" in result.out


def test_plan_with_cluster_option_reports_faults(run_launcher: Launcher, file: str) -> None:
    result = run_launcher("plan", file, "placement.preferred=rack", "--cluster")
    assert result.code == 2 and "the job has no queue" in result.err and result.out == ""


def test_plan_shows_refusal_of_trainer(run_launcher: Launcher, file: str) -> None:
    result = run_launcher("plan", file, "train.task=nowhere:Task")
    assert result.code == 2
    assert "nowhere:Task: importing nowhere failed" in result.err
    assert "Traceback" not in result.err


def test_command_is_planned_without_bytes(run_launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: a\nimage: i:1\naccelerator: {type: cpu}\ncommand: [python, -V]\n"
    )
    result = run_launcher("plan", str(tmp_path / "job.yaml"))
    assert result.code == 0 and "bytes" not in result.out and "cluster: 1 pod" in result.out
    compiled = run_launcher("plan", str(tmp_path / "job.yaml"), "--compile")
    assert compiled.code == 2 and "a command's arrays are its own" in compiled.err
