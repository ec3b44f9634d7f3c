"""End a cluster and remove all that it left on the machine, whatever state it is in.

What the programs write in fixed places of the machine is removed if it was not there before the
start.
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from tests.cluster.harness import cgroups, containerd, mounts, network, process
from tests.cluster.harness.places import NETWORK, RUN, STORE

BEFORE = RUN / "before.json"
# What the kubelet and the bridge plugin set.
SETTINGS = (
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "net/ipv4/ip_forward",
    "vm/overcommit_memory",
)
# Where kubelet, containerd, CNI and mount write whatever they are told, parents first.
FOLDERS = (
    "/run/containerd",
    "/run/containerd/s",
    "/run/mount",
    "/var/lib/cni",
    "/var/lib/cni/results",
    "/var/lib/kubelet",
    "/var/lib/kubelet/device-plugins",
    "/var/log/containers",
)
SHIMS = Path("/run/containerd/s")
CNI_RESULTS = Path("/var/lib/cni/results")
CONTAINER_LOGS = Path("/var/log/containers")


def record_machine() -> None:
    """Record the state of the machine before anything starts."""
    settings = {name: Path("/proc/sys", name).read_text() for name in SETTINGS}
    BEFORE.write_text(
        json.dumps(
            {"settings": settings, "folders": [name for name in FOLDERS if os.path.exists(name)]}
        )
    )


def remove_cluster() -> None:
    """Remove everything of the cluster but its caches. Safe when nothing is up."""
    stop_programs()
    mounts.unmount_below(RUN, STORE)  # and what containerd mounted of its store
    network.remove_bridge()
    cgroups.remove_cgroups()
    if RUN.exists():
        restore_machine()
        shutil.rmtree(RUN)


def stop_programs() -> None:
    """Stop first what would restart others; containerd ends gracefully, since its store is kept."""
    process.kill(but="containerd")
    if "containerd" in process.find_daemons():
        with suppress(RuntimeError):  # it is stuck: what it ran is killed by its cgroup
            containerd.remove_containers()
    cgroups.remove_cgroups()
    process.stop("containerd")
    process.kill()


def restore_machine() -> None:
    record = (
        json.loads(BEFORE.read_text()) if BEFORE.exists() else {"settings": {}, "folders": FOLDERS}
    )
    for name, value in record["settings"].items():
        if Path("/proc/sys", name).read_text() != value:
            Path("/proc/sys", name).write_text(value)
    for path in (*cni_results(), *log_links(), *dead_sockets()):
        path.unlink()
    for name in reversed([name for name in FOLDERS if name not in record["folders"]]):
        if name.startswith("/var/lib/kubelet/"):
            shutil.rmtree(name, ignore_errors=True)
        with suppress(OSError):  # never made, or by now another's too
            os.rmdir(name)


def cni_results() -> list[Path]:
    """Return the CNI library's notes on the containers of our network."""
    prefix = f"{NETWORK}-"  # then the container, and its interface
    ours = {
        path.name.removeprefix(prefix).rpartition("-")[0] for path in CNI_RESULTS.glob(f"{prefix}*")
    }
    return [path for container in ours for path in CNI_RESULTS.glob(f"*-{container}-*")]


def log_links() -> list[Path]:
    return [
        link for link in CONTAINER_LOGS.glob("*") if link.is_symlink() and in_run(os.readlink(link))
    ]


def in_run(target: str) -> bool:
    return target.startswith(f"{RUN}/")


def dead_sockets() -> list[Path]:
    """Return sockets of killed shims, at which nobody listens."""
    listening = Path("/proc/net/unix").read_text()
    return [path for path in SHIMS.glob("*") if f"{path}\n" not in listening]
