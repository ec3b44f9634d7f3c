"""PodSecurity of a container to devices and pinned memory of its node, on every platform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxlaunch.accelerators import Source
from jaxlaunch.launcher.platforms.facts import Fact, PodSecurity

AMBIENT = Source(
    "Kubernetes: support for ambient capabilities", "github.com/kubernetes/enhancements, issue 2763"
)
DEVICES = Source(
    "Kubernetes: non-root containers and devices",
    "kubernetes.io/blog/2021/11/09/non-root-containers-and-devices",
)
VFIO = Source(
    "Linux: VFIO, whose group files a user must be given", "docs.kernel.org/driver-api/vfio.html"
)
TPU_PODS = Source(
    "GKE: about TPUs, no privileged mode since 1.28; xpk's pods, root and privileged",
    "cloud.google.com/kubernetes-engine/docs/concepts/tpus; github.com/AI-Hypercomputer/xpk, "
    "docker_container.py",
)
NCCL = Source(
    "NCCL: troubleshooting, InfiniBand and RoCE",
    "docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
)
WORKERS = Source(
    "NVIDIA AI Cluster Runtime: GKE GPUDirect-TCPXO", "github.com/NVIDIA/aicr, docs/integrator"
)
SYSTEMD = Source(
    "systemd: LimitMEMLOCK=", "freedesktop.org/software/systemd/man/latest/systemd.exec.html"
)
SECONDARY = Source(
    "Kubernetes Network Plumbing Working Group: selection of networks; pods of NVIDIA's network "
    "operator and of OKE's NCCL tests over SR-IOV",
    "github.com/k8snetworkplumbingwg/multus-cni, docs/how-to-use.md; "
    "github.com/Mellanox/network-operator, example/sriov-network; "
    "github.com/oracle-quickstart/oci-hpc-oke, manifests/nccl-tests/kueue/virtual-functions",
)
SHM = Source(
    "xpk's TPU pods; Google's recipes for TPU7x; GKE's NCCL tests",
    "github.com/AI-Hypercomputer/xpk, docker_resources.py; "
    "github.com/AI-Hypercomputer/tpu-recipes, training/ironwood; "
    "github.com/GoogleCloudPlatform/container-engine-accelerators, gpudirect-tcpxo",
)
STANDARDS = Source(
    "Kubernetes: Pod Security Standards",
    "kubernetes.io/docs/concepts/security/pod-security-standards",
)

# Networks whose adapters access memory of the program, which has to be pinned (RLIMIT_MEMLOCK).
PINNING: Fact[Sequence[str]] = Fact(
    ("rdma", "efa", "efa-dra", "gpudirect-tcpxo", "gpudirect-rdma", "gpudirect-rdma-dra"), NCCL
)
# The capability that removes the limit. It only applies to root, because Kubernetes does not set
# ambient capabilities.
PINNING_CAPABILITY = Fact("IPC_LOCK", AMBIENT)
# The setting in the nodes' containerd unit that removes the limit for all containers.
PINNING_LIMIT = Fact("LimitMEMLOCK=infinity", SYSTEMD)
# Device files belong to root with mode 0600, unless containerd changes their owner to the user of
# the pod.
TPU_DEVICES = Fact("/dev/vfio/0", VFIO)
# The default user of pods with TPUs.
TPU_USER: Fact[Literal["root"]] = Fact("root", TPU_PODS)
DEVICE_OWNERSHIP = Fact("device_ownership_from_security_context = true", DEVICES)

# Platforms whose pods get a /dev/shm without a limit of its own. A container's default of 64 MiB is
# too small for NCCL and for the workers of a data loader.
SHM_PLATFORMS: Fact[Sequence[str]] = Fact(("cuda", "rocm", "tpu"), SHM)

# The annotation that names the networks of a pod's additional interfaces.
MULTUS = Fact("k8s.v1.cni.cncf.io/networks", SECONDARY)

_OWNERSHIP_SETTING = f"containerd's `{DEVICE_OWNERSHIP.value}`"
_LIMIT_SETTING = f"`{PINNING_LIMIT.value}` in containerd's unit"
ACCESS: Sequence[PodSecurity] = (
    PodSecurity("any other", "a number", "restricted", "nothing", STANDARDS),
    PodSecurity("TPU", "root, unless `users` says another", "baseline", "nothing", TPU_PODS),
    PodSecurity("TPU", "a number", "restricted", _OWNERSHIP_SETTING, DEVICES),
    PodSecurity("TPU", "`privileged`", "privileged", "nothing", STANDARDS),
    PodSecurity(
        "network `rdma`, `efa`, `efa-dra`", "a number", "restricted", _LIMIT_SETTING, AMBIENT
    ),
    PodSecurity("network `rdma`, `efa`, `efa-dra`", "`root`", "privileged", "nothing", AMBIENT),
    PodSecurity("network `gpudirect-…`", "a number", "privileged", _LIMIT_SETTING, WORKERS),
    PodSecurity("network `gpudirect-…`", "`root`", "privileged", "nothing", WORKERS),
)
