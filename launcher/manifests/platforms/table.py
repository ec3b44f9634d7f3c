"""What is known of nodes: accelerator × platform → labels, taints, resources. A cluster whose nodes are labelled
otherwise lists them in its defaults."""

from __future__ import annotations

from collections.abc import Mapping

from jaxlaunch.launcher.manifests.platforms import eks, generic, gke
from jaxlaunch.launcher.manifests.platforms.eks import Provisioner
from jaxlaunch.launcher.manifests.platforms.facts import ARM_TAINT, Fact, Nodes, Source, Where

PLUGINS = Source("Kubernetes: device plugins", "kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus")

RESOURCE: Mapping[str, Fact[str]] = {
    "cuda": Fact("nvidia.com/gpu", PLUGINS),
    "rocm": generic.AMD_RESOURCE,
    "tpu": Fact("google.com/tpu", gke.TPUS),
}

NODES: Mapping[Where, Mapping[str, Nodes]] = {"gke": gke.NODES, "eks": eks.NODES, "generic": generic.NODES}

# The label that nodes of one TPU slice share.
SLICE_LABEL: Mapping[Where, Fact[str]] = {"gke": gke.SLICE_LABEL}

# Search paths that a program needs there to find its driver, by JAX's platform.
SEARCH_PATHS: Mapping[tuple[Where, str], Fact[Mapping[str, str]]] = {("gke", "cuda"): gke.DRIVER}

# Accelerators whose kinds of node have equal memory, and no fast network or the same: only of these may a gang have
# several kinds. An AMD GPU has one id on the machine, and another in a virtual machine.
ALIKE = ("l4", "mi300x", "mi325x")

# Accelerators on machines with processors of Arm: GKE taints them, and EC2's p6e are NVIDIA's Grace too.
ARM = tuple(kind for kind, nodes in gke.NODES.items() if ARM_TAINT in nodes.tolerations)

# GPUs of the largest machine, by the value of a label.
LARGEST: Mapping[str, int] = {
    **{name: one.gpus for name, one in eks.INSTANCES.items()},
    **{name: fact.value for name, fact in gke.LARGEST.items()},
}

# GB of each GPU, by the value of a label.
MEMORY_GB: Mapping[str, int] = {
    **{name: one.memory_gb for name, one in eks.INSTANCES.items()},
    **{name: fact.value for name, fact in gke.MEMORY_GB.items()},
    **{name: fact.value for name, fact in generic.MEMORY_GB.items()},
}


def capacity(where: Where, provisioner: Provisioner) -> Mapping[str, Nodes]:
    """Kind of capacity → the nodes that are of it."""
    if where == "eks":
        return eks.CAPACITY[provisioner]
    return gke.CAPACITY if where == "gke" else {}
