"""Names of accelerators in other clouds and tools, and the accelerator of job.yaml for each.

Users write names that they know: of a machine type, a TPU slice, a node label or a product.
`translate` returns the accelerator of job.yaml for such a name, and `suggest` a hint with the text
to write instead. Machine types are matched by patterns, because their names contain their size;
those of Amazon are the rows of `eks.INSTANCES`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence

from jaxlaunch.accelerators import ACCELERATORS, Source, parse_topology
from jaxlaunch.launcher.platforms import eks
from jaxlaunch.launcher.platforms.facts import INSTANCE

GOOGLE = Source(
    "Compute Engine: accelerator-optimized machines; Cloud TPU: machine types and versions",
    "cloud.google.com/compute/docs/accelerator-optimized-machines; "
    "cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus",
)
SLICES = Source(
    "Cloud TPU: names of slices, by cores for v4, v5p and TPU7x, by chips for v5e and v6e",
    "cloud.google.com/tpu/docs/supported-tpu-configurations; github.com/AI-Hypercomputer/xpk, "
    "system_characteristics.py",
)
AZURE = Source(
    "Azure: sizes of virtual machines, GPU-accelerated",
    "learn.microsoft.com/azure/virtual-machines/sizes/overview",
)
ORACLE = Source(
    "Oracle Cloud: GPU shapes", "docs.oracle.com/iaas/Content/Compute/References/computeshapes.htm"
)
COREWEAVE = Source(
    "CoreWeave: GPU instances, and labels of nodes",
    "docs.coreweave.com/docs/platform/instances; github.com/skypilot-org/skypilot, "
    "sky/provision/kubernetes/utils.py",
)
NEURON = Source(
    "AWS Neuron: JAX NeuronX plugin, beta; resources aws.amazon.com/neuron and neuroncore",
    "awsdocs-neuron.readthedocs-hosted.com, setup/jax and containers/kubernetes-getting-started",
)
INTEL = Source(
    "Intel: extension for OpenXLA, whose newest release 0.6.0 is for JAX 0.4.38",
    "github.com/intel/intel-extension-for-openxla",
)
GAUDI = Source(
    "Intel Gaudi: supported frameworks, PyTorch alone",
    "docs.habana.ai/en/latest/Support_Matrix/Support_Matrix.html",
)
NODE_LABELS = Source(
    "Kubernetes: well-known labels; labels of node pools of GKE, EKS and AKS",
    "kubernetes.io/docs/reference/labels-annotations-taints; "
    "cloud.google.com/kubernetes-engine/docs/concepts/node-pools; "
    "docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html; "
    "learn.microsoft.com/azure/aks/use-labels",
)

# Labels whose values each identify one kind of machine or GPU (NODE_LABELS, COREWEAVE). A job that
# selects a value has hosts of one kind.
KIND_LABELS = frozenset(
    {
        INSTANCE,
        "beta.kubernetes.io/instance-type",
        "nvidia.com/gpu.product",
        "nvidia.com/gpu.machine",
        "gpu.nvidia.com/model",
        "gpu.nvidia.com/class",
        "amd.com/gpu.device-id",
        "amd.com/gpu.product-name",
        "cloud.google.com/gke-accelerator",
        "cloud.google.com/gke-nodepool",
        "eks.amazonaws.com/nodegroup",
        "kubernetes.azure.com/agentpool",
        "skypilot.co/accelerator",
    }
)
# Those whose values are names of machines or products, and not chosen by an administrator.
_NAMING_LABELS = KIND_LABELS - {
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "kubernetes.azure.com/agentpool",
}

# The domain of a device plugin's resources → JAX's platform of the devices, or None if JAX has none
# (NEURON, INTEL, GAUDI). Other domains may belong to plugins that share GPUs.
RESOURCE_DOMAINS: Mapping[str, str | None] = {
    "nvidia.com": "cuda",
    "amd.com": "rocm",
    "google.com": "tpu",
    "aws.amazon.com": "plugin",
    "gpu.intel.com": "plugin",
    "habana.ai": None,
}
NO_BACKEND = "JAX has no backend for Gaudi, whose software supports PyTorch alone."


@dataclasses.dataclass(frozen=True)
class Match:
    """The accelerator that a name stands for.

    Attributes:
        kind: The accelerator's type in job.yaml.
        per_host: Accelerators of such a machine, or None if the name does not say it.
        topology: Topology of such a slice, or None.
        resource: Resource of the device plugin, if it is not the usual one.
    """

    kind: str
    per_host: int | None = None
    topology: str | None = None
    resource: str | None = None

    def __str__(self) -> str:
        fields = {
            "type": self.kind,
            "topology": self.topology,
            "resource": self.resource,
            "per_host": self.per_host,
        }
        parts = [f"{key}: {value}" for key, value in fields.items() if value is not None]
        return f"{{{', '.join(parts)}}}"


# --- TPUs -----------------------------------------------------------------------------------------

# The usual topology of each number of chips (SLICES).
_TOPOLOGIES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_TOPOLOGIES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
# Names of TPUs without dashes and other separators.
_TPU_NAMES = {
    **dict.fromkeys(("v4", "tpuv4", "tpuv4podslice"), "v4"),
    **dict.fromkeys(("v5e", "tpuv5e", "v5litepod", "v5lite", "tpuv5lite"), "v5e"),
    **dict.fromkeys(("tpuv5litepodslice", "tpuv5litedevice"), "v5e"),
    **dict.fromkeys(("v5p", "tpuv5p", "tpuv5", "tpuv5pslice"), "v5p"),
    **dict.fromkeys(("v6e", "tpuv6e", "tpuv6", "tpuv6lite", "trillium"), "v6e"),
    **dict.fromkeys(("tpuv6eslice", "tpuv6edevice"), "v6e"),
    **dict.fromkeys(("7x", "v7x", "tpu7x", "tpuv7x", "tpuv7", "ironwood"), "7x"),
}
# TPUs whose slice names contain the number of cores. Other names contain that of chips.
_NAMED_BY_CORES = ("v4", "v5p", "7x")
_TPU_MACHINES = {
    **dict.fromkeys(("ct5l-hightpu", "ct5lp-hightpu"), "v5e"),
    "ct4p-hightpu": "v4",
    "ct5p-hightpu": "v5p",
    "ct6e-standard": "v6e",
    "tpu7x-standard": "7x",
}
_OLD_TPU_NAME = re.compile(r"(tpu-?)?v[23](-\d+)?|ct3p?-hightpu-\d+t|tpu-v3-(slice|device)")


def _match_tpu(name: str) -> Match | None:
    """Match a TPU: `v5litepod-16`, `ct6e-standard-4t`, `tpu-v5-lite-podslice`, `trillium`."""
    if machine := re.fullmatch(r"([a-z0-9]+-[a-z]+)-(\d+)t", name):
        if (kind := _TPU_MACHINES.get(machine[1])) is None:
            return None
        chips = int(machine[2])
        topology = _topologies(kind).get(chips)
        return Match(kind, chips if chips > 4 else None, topology)
    if (kind := _TPU_NAMES.get(re.sub(r"[^a-z0-9]", "", name))) is not None:
        return Match(kind)
    if slice_name := re.fullmatch(r"(?:tpu[-_ ]?)?(\w+)-(\d+)", name):
        base = slice_name[1]
        if (kind := _TPU_NAMES.get(base) or _TPU_NAMES.get(f"tpu{base}")) is not None:
            chips = int(slice_name[2]) // (2 if kind in _NAMED_BY_CORES else 1)
            return Match(kind, topology=_topologies(kind).get(chips))
    return None


def _topologies(kind: str) -> dict[int, str]:
    topologies = _TOPOLOGIES_2D if ACCELERATORS[kind].dimensions == 2 else _TOPOLOGIES_3D
    return {math.prod(parse_topology(topology) or ()): topology for topology in topologies}


# --- machine types --------------------------------------------------------------------------------

# Pattern of a machine type, its accelerator, and the number of accelerators. This is an integer, or
# depends on the number in the pattern's group by a table, or is that number if it is None.
_Count = int | Mapping[int, int] | None
_MACHINES: Sequence[tuple[str, str, _Count]] = (
    # GOOGLE. The number in the names of g2 and g4 is that of CPUs.
    (r"a2-(?:high|mega|ultra)gpu-(\d+)g", "a100", None),
    (r"a3-(?:high|mega|edge)gpu-(\d+)g(?:-nolssd)?", "h100", None),
    (r"a3-ultragpu-(\d+)g(?:-nolssd)?", "h200", None),
    (r"a4-highgpu-(\d+)g(?:-nolssd)?", "b200", None),
    (r"a4x-highgpu-(\d+)g(?:-nolssd)?", "gb200", None),
    (r"a4x-maxgpu-(\d+)g(?:-metal)?", "gb300", None),
    (r"g2-standard-(\d+)", "l4", {4: 1, 8: 1, 12: 1, 16: 1, 32: 1, 24: 2, 48: 4, 96: 8}),
    (r"g4-standard-(\d+)", "rtxpro6000", {48: 1, 96: 2, 192: 4, 384: 8}),
    # AZURE. The number in the names is that of CPUs.
    (r"standard_nd(96)am?sr(?:_a100)?_v4", "a100", 8),
    (r"standard_nc(\d+)ads_a100_v4", "a100", {24: 1, 48: 2, 96: 4}),
    (r"standard_nd(96)isr?_h100_v5", "h100", 8),
    (r"standard_ncc?(\d+)adi?s_h100_v5", "h100", {40: 1, 80: 2}),
    (r"standard_nd(96)isr?_h200_v5", "h200", 8),
    (r"standard_nd(128)isr(?:_ndr)?_gb200_v6", "gb200", 4),
    (r"standard_nd(128)isr(?:_ndr)?_gb300_v6", "gb300", 4),
    (r"standard_nd(96)isr?_mi300x_v5", "mi300x", 8),
    (r"standard_nc(\d+)as_t4_v3", "t4", {4: 1, 8: 1, 16: 1, 64: 4}),
    (r"standard_nc(\d+)r?s_v3", "v100", {6: 1, 12: 2, 24: 4}),
    (r"standard_nd(40)rs_v2", "v100", 8),
    (r"standard_nv(\d+)adm?s_a10_v5", "a10", {36: 1, 72: 2}),
    # ORACLE.
    (r"(?:bm|vm)\.gpu3\.(\d+)", "v100", None),
    (r"bm\.gpu4\.(\d+)", "a100", None),
    (r"bm\.gpu\.(?:a100-v2|gm4|b4)\.(\d+)", "a100", None),
    (r"(?:bm|vm)\.gpu\.a10\.(\d+)", "a10", None),
    (r"bm\.gpu\.l40s(?:-nc)?\.(\d+)", "l40s", None),
    (r"bm\.gpu\.h100(?:-nc)?\.(\d+)", "h100", None),
    (r"bm\.gpu\.h200(?:-nc)?\.(\d+)", "h200", None),
    (r"bm\.gpu\.b200\.(\d+)", "b200", None),
    (r"bm\.gpu\.b300\.(\d+)", "b300", None),
    (r"bm\.gpu\.gb200(?:-v\d)?\.(\d+)", "gb200", None),
    (r"bm\.gpu\.gb300(?:-v\d)?\.(\d+)", "gb300", None),
    (r"bm\.gpu\.mi300x\.(\d+)", "mi300x", None),
    (r"bm\.gpu\.mi355x(?:-v\d)?\.(\d+)", "mi355x", None),
    # COREWEAVE.
    (r"gd-(\d+)xa100-i\d+", "a100", None),
    (r"gd-(\d+)xh100(?:ib)?-i\d+", "h100", None),
    (r"gd-(\d+)xh200(?:ib)?-i\d+", "h200", None),
    (r"gd-(\d+)xl40-i\d+", "l40", None),
    (r"gd-(\d+)xl40s-i\d+", "l40s", None),
    (r"gd-(\d+)xgh200-i\d+", "gh200", None),
    (r"b200-(\d+)x", "b200", None),
    (r"b300-(\d+)x", "b300", None),
    (r"gb200-(\d+)x", "gb200", None),
    (r"gb300-(\d+)x", "gb300", None),
    (r"rtxp6000-(\d+)x", "rtxpro6000", None),
)
_MACHINE_PATTERNS = tuple((re.compile(pattern), kind, count) for pattern, kind, count in _MACHINES)
# Amazon's families of machine types, such as p5.
_FAMILIES: Mapping[str, str] = {
    instance.partition(".")[0]: kind
    for kind, nodes in eks.NODES.items()
    for instance in nodes.labels.get(INSTANCE, ())
}


def match_machine(name: str) -> Match | None:
    """Return the accelerators of a machine type of a cloud, or None for any other name."""
    # Amazon SageMaker writes ml. before the type.
    name = name.strip().lower().removeprefix("ml.")
    if (instance := eks.INSTANCES.get(name)) is not None:
        return Match(_FAMILIES[name.partition(".")[0]], instance.gpus)
    if name in _FAMILIES:
        return Match(_FAMILIES[name])
    for pattern, kind, count in _MACHINE_PATTERNS:
        if size := pattern.fullmatch(name):
            number = int(size[1])
            return Match(kind, count.get(number) if isinstance(count, Mapping) else count or number)
    return _match_tpu(name) if re.fullmatch(r"[a-z0-9]+-[a-z]+-\d+t", name) else None


def find_other_kind(labels: Mapping[str, str], kind: str) -> tuple[str, str] | None:
    """Return a selected label that belongs to another accelerator, and that accelerator's type.

    Args:
        labels: The labels that the job selects.
        kind: The type of the job's accelerator.
    """
    for key in sorted(_NAMING_LABELS & labels.keys()):
        match = translate(labels[key])
        if match is None or not (ACCELERATORS[match.kind].models and ACCELERATORS[kind].models):
            continue
        # Aliases of a TPU share one row.
        if ACCELERATORS[match.kind] is not ACCELERATORS[kind]:
            return key, match.kind
    return None


# --- products -------------------------------------------------------------------------------------

_PRODUCTS = {
    **{name: name for name, row in ACCELERATORS.items() if row.models and row.platform != "tpu"},
    **dict.fromkeys(("rtxp6000", "pro6000", "rtx6000pro"), "rtxpro6000"),
    **{f"rtx{name}": name for name in ("a4000", "a5000", "a6000")},
    **{name: f"rtx{name}" for name in ("3090", "4090", "5090", "6000ada")},
    "gracehopper": "gh200",
    "graceblackwell": "gb200",
    # The T4G of Arm machines is not a T4.
    "t4g": "gpu",
}
_VENDORS = {
    **dict.fromkeys(("cuda", "nvidia"), "gpu"),
    **dict.fromkeys(("rocm", "hip", "amd", "instinct", "radeon"), "amdgpu"),
}
_PRODUCTS_LONGEST_FIRST = sorted(_PRODUCTS, key=len, reverse=True)
_MIG_PROFILE = re.compile(r"\b(\d+g\.\d+gb)\b")
_AMD_NAME = re.compile(r"\bmi\d{2,3}[a-z]?\b|gfx9")
_NVIDIA_NAME = re.compile(
    r"nvidia|geforce|quadro|tesla|titan|[gr]tx|"
    r"\b[abhklptv]\d{1,4}[a-z]{0,3}\b|\bg[bh]\d+\b|\bdgx\b"
)
_NEURON_NAME = re.compile(r"\b(trn|inf)\d|trainium|inferentia|neuron")
_GAUDI_NAME = re.compile(r"gaudi|habana|\bhpu|\bhl-?\d|\bdl1\b")
_INTEL_NAME = re.compile(r"intel|\bxpu\b|\bi915\b|\bxe\b|ponte|\bmax-?1[15]\d0\b|\barc\b|\bflex\b")


_ANY_GPU = {
    "gpu": "any NVIDIA GPU is {type: gpu}, on nodes that node_selector chooses.",
    "amdgpu": "any AMD GPU is {type: amdgpu}, on nodes that node_selector chooses.",
}


def translate(name: str) -> Match | None:
    """Return the accelerator for a name of another tool or cloud, or None."""
    name = name.strip().lower()
    match = match_machine(name) or _match_tpu(name)
    if match is not None:
        return match
    if profile := _MIG_PROFILE.search(name):
        product = _match_product(name.replace(profile[0], ""))
        kind = "gpu" if product is None else product.kind
        return Match(kind, resource=f"nvidia.com/mig-{profile[1]}")
    return _match_product(name)


def _match_product(name: str) -> Match | None:
    """Match a product among the words of a name: `NVIDIA-H100-80GB`, `gpu_8x_h100_sxm5`, `H100:8`.

    If only the vendor is recognized, the result is any GPU of that vendor.
    """
    count = re.search(r"\b(\d+)x(?![0-9])|:(\d+)$", name.replace("_", "-"))
    number = None if count is None else int(count[1] or count[2])
    words = re.findall(r"[a-z0-9]+", name)
    texts = [re.sub(r"^\d+x(?=.)", "", word) for word in words]
    texts += map("".join, itertools.pairwise(words))
    texts += map("".join, zip(words, words[1:], words[2:], strict=False))
    for product in _PRODUCTS_LONGEST_FIRST:
        # With another digit it is a different product: h1000 is not h100.
        if any(re.match(rf"{product}(?!\d)", text) for text in texts):
            return Match(_PRODUCTS[product], number)
    if _AMD_NAME.search(name):
        return Match("amdgpu", number)
    vendors = (_VENDORS[word] for word in words if word in _VENDORS)
    return next((Match(vendor, number) for vendor in vendors), None)


def suggest(text: str) -> str:
    """Return a hint for an unknown accelerator type: what to write in job.yaml instead."""
    name = text.strip().lower()
    if _NEURON_NAME.search(name):
        return (
            "write {type: plugin, resource: aws.amazon.com/neuroncore, per_host: N}: JAX runs on "
            "AWS's chips by the plugin jax-neuronx (beta), in an image of your own."
        )
    if _GAUDI_NAME.search(name):
        return NO_BACKEND
    if _OLD_TPU_NAME.fullmatch(name):
        return "TPU v2 and v3 are not supported; v5e and v6e have the smallest slices."
    if (match := translate(name)) is not None:
        if match.kind in _ANY_GPU and match.resource is None:
            return _ANY_GPU[match.kind]
        details = (match.per_host, match.topology, match.resource)
        accelerator = match.kind if details == (None,) * 3 else str(match)
        if match_machine(name) is not None and name not in _FAMILIES and not match.topology:
            selector = f"node_selector: {{{INSTANCE}: {text.strip()}}}"
            return f"write {accelerator}, and {selector} for this machine."
        return f"write {accelerator}."
    if _INTEL_NAME.search(name):
        return (
            "write {type: plugin, resource: gpu.intel.com/xe}; Intel's plugin, "
            "intel-extension-for-openxla, ends with JAX 0.4.38."
        )
    if "tpu" in name:
        kinds = [kind for kind, row in ACCELERATORS.items() if row.platform == "tpu"]
        return f"a TPU is one of {', '.join(kinds)}."
    if _NVIDIA_NAME.search(name):
        return _ANY_GPU["gpu"]
    return (
        "it is cpu, gpu (any NVIDIA GPU), amdgpu (any AMD GPU), plugin (a device of any other "
        "vendor), or a name in docs/platforms.md."
    )
