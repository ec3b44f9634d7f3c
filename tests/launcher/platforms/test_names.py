"""Names that people carry over from other clouds and tools, and what job.yaml calls them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jaxlaunch.accelerators import ACCELERATORS
from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.manifests.jobset import prepare
from jaxlaunch.launcher.plan import estimate
from jaxlaunch.launcher.platforms import eks, names, table
from jaxlaunch.launcher.platforms.facts import INSTANCE
from jaxlaunch.launcher.platforms.table import PlatformName

MACHINE = ", and node_selector: {node.kubernetes.io/instance-type: %s} for this machine."
NAMES = {
    # Slices and machines of Google.
    "v5litepod-16": "write {type: v5e, topology: 4x4}.",
    "v4-8": "write {type: v4, topology: 2x2x1}.",
    "v5p-256": "write {type: v5p, topology: 4x4x8}.",
    "v6e-8": "write {type: v6e, topology: 2x4}.",
    "tpu7x-128": "write {type: 7x, topology: 4x4x4}.",
    "v5p-24": "write v5p.",
    "tpu-v5-lite-podslice": "write v5e.",
    "tpu-v6e-slice": "write v6e.",
    "tpu-v5p-slice": "write v5p.",
    "TPU v5 lite": "write v5e.",
    "trillium": "write v6e.",
    "ironwood": "write 7x.",
    "ct6e-standard-4t": "write {type: v6e, topology: 2x2}.",
    "ct6e-standard-8t": "write {type: v6e, topology: 2x4, per_host: 8}.",
    "ct5p-hightpu-4t": "write {type: v5p, topology: 2x2x1}.",
    "v3-8": "TPU v2 and v3 are not supported; v5e and v6e have the smallest slices.",
    "a3-highgpu-8g": "write {type: h100, per_host: 8}" + MACHINE % "a3-highgpu-8g",
    "a3-ultragpu-8g": "write {type: h200, per_host: 8}" + MACHINE % "a3-ultragpu-8g",
    "a4-highgpu-8g": "write {type: b200, per_host: 8}" + MACHINE % "a4-highgpu-8g",
    "a4x-highgpu-4g": "write {type: gb200, per_host: 4}" + MACHINE % "a4x-highgpu-4g",
    "g2-standard-24": "write {type: l4, per_host: 2}" + MACHINE % "g2-standard-24",
    "g4-standard-384": "write {type: rtxpro6000, per_host: 8}" + MACHINE % "g4-standard-384",
    "nvidia-h100-mega-80gb": "write h100.",
    # Of Amazon, Azure, Oracle and CoreWeave.
    "p5": "write h100.",
    "p5.48xlarge": "write {type: h100, per_host: 8}" + MACHINE % "p5.48xlarge",
    "ml.p4d.24xlarge": "write {type: a100, per_host: 8}" + MACHINE % "ml.p4d.24xlarge",
    "p6-b200": "write b200.",
    "Standard_ND96isr_H100_v5": "write {type: h100, per_host: 8}"
    + MACHINE % "Standard_ND96isr_H100_v5",
    "Standard_ND96asr_v4": "write {type: a100, per_host: 8}" + MACHINE % "Standard_ND96asr_v4",
    "Standard_NC80adis_H100_v5": "write {type: h100, per_host: 2}"
    + MACHINE % "Standard_NC80adis_H100_v5",
    "BM.GPU.MI355X.8": "write {type: mi355x, per_host: 8}" + MACHINE % "BM.GPU.MI355X.8",
    "gd-8xh100ib-i128": "write {type: h100, per_host: 8}" + MACHINE % "gd-8xh100ib-i128",
    "gpu_8x_h100_sxm5": "write {type: h100, per_host: 8}.",
    "H100:8": "write {type: h100, per_host: 8}.",
    # Products, resources and parts.
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "write rtxpro6000.",
    "RTX-6000-Ada": "write rtx6000ada.",
    "AMD Instinct MI300X": "write mi300x.",
    "1g.10gb": "write {type: gpu, resource: nvidia.com/mig-1g.10gb}.",
    "a100-mig-3g.20gb": "write {type: a100, resource: nvidia.com/mig-3g.20gb}.",
}
FAMILIES = {
    "any NVIDIA GPU": ["rtx5080", "h1000", "k80", "p100", "b100", "gb10", "cuda", "nvidia.com/gpu"],
    "any AMD GPU": ["mi250x", "mi300a", "mi210", "rocm", "amd.com/gpu", "gfx950"],
    "aws.amazon.com/neuroncore": ["trn2", "trn1.32xlarge", "inf2", "trainium2", "neuron"],
    "gpu.intel.com/xe": ["intel-max-1550", "xpu", "gpu.intel.com/i915"],
    "no backend for Gaudi": ["gaudi3", "habana.ai/gaudi", "hpu", "dl1.24xlarge"],
    "a TPU is one of": ["tpu", "tpu-v9"],
    "it is cpu, gpu": ["m4-max", "npu", "what"],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_answered_with_what_to_write(name: str) -> None:
    assert names.suggest(name) == NAMES[name]


@pytest.mark.parametrize(
    ("name", "family"), [(name, family) for family, row in FAMILIES.items() for name in row]
)
def test_a_name_without_a_row_is_answered_with_its_family(name: str, family: str) -> None:
    answer = names.suggest(name)
    assert family in answer
    others = {"any NVIDIA GPU is", "any AMD GPU is"} - {f"{family} is"}
    assert not any(other in answer for other in others)


def test_every_suggested_accelerator_is_one() -> None:
    for name in [*NAMES, *eks.INSTANCES, *itertools.chain(*FAMILIES.values())]:
        match = names.translate(name)
        if match is None:
            continue
        # The topology of a TPU may not be in its name.
        if match.topology or ACCELERATORS[match.kind].platform != "tpu":
            load.parse_job(f"name: x\nimage: a/b:1\ncommand: [a]\naccelerator: {match}\n")


def test_instances_and_labels_agree_with_the_platforms() -> None:
    for kind, nodes in eks.NODES.items():
        for instance in nodes.labels.get(INSTANCE, ()):
            assert names.match_machine(instance) == names.Match(kind, eks.INSTANCES[instance].gpus)
    for platform, kinds in table.NODES.items():
        for kind, nodes in kinds.items():
            for key, values in nodes.labels.items():
                for value in values:
                    assert names.find_other_kind({key: value}, kind) is None, (
                        platform,
                        kind,
                        value,
                    )


COREWEAVE = "node_selector: {node.kubernetes.io/instance-type: gd-8xh100ib-i128}\n"
SELECTED = {
    "generic": [
        COREWEAVE,
        "node_selector: {gpu.nvidia.com/model: H100_NVLINK_80GB}\n",
        "node_selector: {gpu.nvidia.com/class: H100}\n",
        "node_selector: {kubernetes.azure.com/agentpool: nd96}\n",
        "node_selector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}\n",
    ],
    "gke": [
        "node_selector: {node.kubernetes.io/instance-type: a3-megagpu-8g}\n",
        "node_selector: {cloud.google.com/gke-nodepool: a3}\n",
    ],
    "eks": [
        "node_selector: {eks.amazonaws.com/nodegroup: p5}\n",
        "node_selector: {gpu.nvidia.com/class: H100}\n",
    ],
}


@pytest.mark.parametrize(
    ("platform", "selector"),
    [(platform, selector) for platform, row in SELECTED.items() for selector in row],
)
def test_a_selector_of_one_kind_of_machine_is_enough(platform: PlatformName, selector: str) -> None:
    text = f"name: x\nimage: a/b:1\ncommand: [a]\nhosts: 2\naccelerator: {{type: h100}}\n{selector}"
    spec = pod_spec(text, platform)
    key, _, value = selector.partition("{")[2].rstrip("}\n").partition(": ")
    assert spec["nodeSelector"][key] == value
    # CoreWeave's nodes and those without the GPU operator have no such label.
    if platform == "generic" and key != "nvidia.com/gpu.product":
        assert "nvidia.com/gpu.product" not in str(spec)


def pod_spec(text: str, platform: str = "generic") -> dict[str, Any]:
    """Return the spec of a job's pods."""
    ready = prepare(load.read_job_text(text), defaults.parse_defaults(f"platform: {platform}"))
    spec: dict[str, Any] = pod_template(ready.manifests[0])["spec"]
    return spec


RESOURCES = {
    "{type: gpu, resource: nvidia.com/mig-1g.10gb}": ("nvidia.com/mig-1g.10gb", "1"),
    "{type: h100, resource: nvidia.com/mig-3g.40gb}": ("nvidia.com/mig-3g.40gb", "1"),
    "{type: gpu, resource: nvidia.com/gpu.shared}": ("nvidia.com/gpu.shared", "1"),
    "{type: l4, resource: aliyun.com/gpu-mem, per_host: 8}": ("aliyun.com/gpu-mem", "8"),
    "{type: mi300x, resource: amd.com/cpx_nps4, per_host: 8}": ("amd.com/cpx_nps4", "8"),
    "{type: amdgpu, per_host: 4}": ("amd.com/gpu", "4"),
    "{type: plugin, resource: aws.amazon.com/neuroncore, per_host: 32}": (
        "aws.amazon.com/neuroncore",
        "32",
    ),
    "{type: plugin, resource: gpu.intel.com/xe}": ("gpu.intel.com/xe", "1"),
}


@pytest.mark.parametrize("accelerator", RESOURCES)
def test_a_resource_of_a_device_plugin_is_requested(accelerator: str) -> None:
    name, number = RESOURCES[accelerator]
    text = f"name: x\nimage: a/b:1\ncommand: [a]\naccelerator: {accelerator}\n"
    spec = pod_spec(text)
    main = spec["containers"][0]
    assert main["resources"]["requests"][name] == main["resources"]["limits"][name] == number
    assert not {"nvidia.com/gpu", "amd.com/gpu"} - {name} & main["resources"]["requests"].keys()
    assert name in [toleration["key"] for toleration in spec["tolerations"]]
    variables = {entry["name"]: entry.get("value") for entry in main["env"]}
    # The image's plugin says the name of its platform.
    assert ("JAX_PLATFORMS" in variables) == ("plugin" not in accelerator)


def test_the_memory_of_a_part_is_that_of_its_name() -> None:
    def memory(accelerator: str) -> estimate.UsableMemory | None:
        text = f"name: x\nimage: a/b:1\ncommand: [a]\naccelerator: {accelerator}\n"
        return estimate.device_memory(load.parse_job(text), {})

    part = memory("{type: h100, resource: nvidia.com/mig-1g.10gb}")
    assert part is not None
    # 90% of it is JAX's.
    assert part.sizes_bytes == (9e9,)
    assert memory("{type: h100, resource: nvidia.com/gpu.shared}") is None
    assert memory("{type: h100, resource: nvidia.com/gpu.shared, memory: 20Gi}") is not None
