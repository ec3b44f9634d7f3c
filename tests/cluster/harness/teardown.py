"""Ends a cluster and takes away all it left on the machine, whatever state it is in.

What the programs write in fixed places of the machine is removed where it was not there before the
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


def remember() -> None:
    """Writes down what the machine is like before anything is started."""
    settings = {name: Path("/proc/sys", name).read_text() for name in SETTINGS}
    BEFORE.write_text(
        json.dumps(
            {"settings": settings, "folders": [name for name in FOLDERS if os.path.exists(name)]}
        )
    )


def end() -> None:
    """Nothing of the cluster is left but its caches. Safe when nothing is up."""
    stop_programs()
    mounts.remove(RUN, STORE)  # and what containerd mounted of its store
    network.remove_bridge()
    cgroups.remove()
    if RUN.exists():
        restore()
        shutil.rmtree(RUN)


def stop_programs() -> None:
    """Those first that would start things again; containerd in peace, since its store is kept."""
    process.kill(but="containerd")
    if "containerd" in process.leading():
        with suppress(RuntimeError):  # it is stuck: what it ran is killed by its cgroup
            containerd.empty()
    cgroups.remove()
    process.stop("containerd")
    process.kill()


def restore() -> None:
    before = (
        json.loads(BEFORE.read_text()) if BEFORE.exists() else {"settings": {}, "folders": FOLDERS}
    )
    for name, value in before["settings"].items():
        if Path("/proc/sys", name).read_text() != value:
            Path("/proc/sys", name).write_text(value)
    for path in (*results(), *log_links(), *dead_sockets()):
        path.unlink()
    for name in reversed([name for name in FOLDERS if name not in before["folders"]]):
        if name.startswith("/var/lib/kubelet/"):
            shutil.rmtree(name, ignore_errors=True)
        with suppress(OSError):  # never made, or by now another's too
            os.rmdir(name)


def results() -> list[Path]:
    """The CNI library's notes on our containers; one network's name is ours, another's is everybody's."""
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
    """Of shims that were killed: nobody listens there."""
    listening = Path("/proc/net/unix").read_text()
    return [path for path in SHIMS.glob("*") if f"{path}\n" not in listening]
