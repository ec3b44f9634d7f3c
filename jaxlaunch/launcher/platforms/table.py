"""What is known of nodes: platform → its row, each made in the file of its name. A cluster whose nodes are labelled
otherwise lists them in its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from jaxlaunch.accelerators import Source
from jaxlaunch.launcher.platforms import eks, generic, gke
from jaxlaunch.launcher.platforms.facts import Fact, Nodes, PlatformFacts, Provisioner

PLATFORMS: Mapping[str, PlatformFacts] = {"gke": gke.PLATFORM, "eks": eks.PLATFORM, "generic": generic.PLATFORM}
if TYPE_CHECKING:
    Where = str
else:
    Where = Literal[tuple(PLATFORMS)]  # as job.yaml and the cluster defaults name it

PLUGINS = Source("Kubernetes: device plugins", "kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus")

RESOURCE: Mapping[str, Fact[str]] = {
    "cuda": Fact("nvidia.com/gpu", PLUGINS),
    "rocm": generic.AMD_RESOURCE,
    "tpu": Fact("google.com/tpu", gke.TPUS),
}

NODES: Mapping[Where, Mapping[str, Nodes]] = {where: one.nodes for where, one in PLATFORMS.items()}

# Fast networks of one platform alone.
HOME_OF_NETWORK: Mapping[str, Where] = {name: where for where, one in PLATFORMS.items() for name in one.networks}

# GPUs of the largest machine, and GB of each GPU, by the value of a label.
LARGEST: dict[str, int] = {}
MEMORY_GB: dict[str, float] = {}
for _row in PLATFORMS.values():
    LARGEST |= {name: one.gpus for name, one in _row.instances.items()}
    LARGEST |= {name: fact.value for name, fact in _row.largest.items()}
    MEMORY_GB |= {name: one.memory_gb for name, one in _row.instances.items()}
    MEMORY_GB |= {name: fact.value for name, fact in _row.memory_gb.items()}


def capacity(where: Where, provisioner: Provisioner) -> Mapping[str, Nodes]:
    """Kind of capacity → the nodes that are of it."""
    row = PLATFORMS[where]
    return row.provisioners.get(provisioner, row.capacity)
