"""The table of platforms, with one row from each module.

The cluster defaults name the labels of nodes that differ from these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from jaxlaunch.accelerators import Source
from jaxlaunch.launcher.platforms import eks, generic, gke
from jaxlaunch.launcher.platforms.facts import Fact, Nodes, PlatformFacts, Provisioner

PLATFORMS: Mapping[str, PlatformFacts] = {
    "gke": gke.PLATFORM,
    "eks": eks.PLATFORM,
    "generic": generic.PLATFORM,
}
if TYPE_CHECKING:
    PlatformName = str
else:
    PlatformName = Literal[tuple(PLATFORMS)]

DEVICE_PLUGINS = Source(
    "Kubernetes: device plugins", "kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus"
)

RESOURCE_NAMES: Mapping[str, Fact[str]] = {
    "cuda": Fact("nvidia.com/gpu", DEVICE_PLUGINS),
    "rocm": generic.AMD_RESOURCE,
    "tpu": Fact("google.com/tpu", gke.TPUS),
}

NODES: Mapping[PlatformName, Mapping[str, Nodes]] = {
    name: platform.nodes for name, platform in PLATFORMS.items()
}

# The platform of each fast network that only one platform has.
PLATFORM_OF_NETWORK: Mapping[str, PlatformName] = {
    network: name for name, platform in PLATFORMS.items() for network in platform.networks
}

# GPUs of the largest machine, and GB of each GPU, by the value of a label.
MAX_GPUS_BY_LABEL: dict[str, int] = {}
MEMORY_GB_BY_LABEL: dict[str, float] = {}
for _platform in PLATFORMS.values():
    MAX_GPUS_BY_LABEL |= {name: instance.gpus for name, instance in _platform.instances.items()}
    MAX_GPUS_BY_LABEL |= {name: fact.value for name, fact in _platform.largest.items()}
    MEMORY_GB_BY_LABEL |= {
        name: instance.memory_gb for name, instance in _platform.instances.items()
    }
    MEMORY_GB_BY_LABEL |= {name: fact.value for name, fact in _platform.memory_gb.items()}


def capacity_nodes(platform: PlatformName, provisioner: Provisioner) -> Mapping[str, Nodes]:
    """Return the nodes by kind of capacity."""
    facts = PLATFORMS[platform]
    return facts.provisioners.get(provisioner, facts.capacity)
