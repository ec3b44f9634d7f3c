"""Ends a cluster and takes away all it left on the machine, whatever state it is in.

What the programs write in fixed places of the machine is removed where it was not there before the start.
"""

import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.cluster.harness import cgroups, containerd, network, process
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
# Where kubelet, containerd and CNI write whatever they are told.
FOLDERS = ("/run/containerd", "/var/lib/cni", "/var/lib/kubelet", "/var/log/containers", "/var/log/pods")
CNI_RESULTS = Path("/var/lib/cni/results")


def remember() -> None:
    """Writes down what the machine is like before anything is started."""
    settings = {name: Path("/proc/sys", name).read_text() for name in SETTINGS}
    BEFORE.write_text(json.dumps({"settings": settings, "folders": [name for name in FOLDERS if os.path.exists(name)]}))


def end() -> None:
    """Nothing of the cluster is left but its caches. Safe when nothing is up."""
    stop_programs()
    unmount()
    network.remove_bridge()
    cgroups.remove()
    if RUN.exists():
        restore()
        shutil.rmtree(RUN)


def stop_programs() -> None:
    """Those first that would start things again; the store of all state last."""
    process.stop("kubelet", "kwok", "kueue", "jobset", "coredns", "scheduler", "kcm")
    with suppress(RuntimeError, FileNotFoundError):  # it is not up, or stuck: what it ran is killed by its cgroup
        containerd.empty()
    cgroups.remove()
    process.stop("containerd", "apiserver")
    process.stop()


def unmount() -> None:
    """Everything mounted below the run folder, and what containerd mounted of its store."""
    roots = tuple(f"{folder}/" for folder in (RUN, STORE))
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(roots)), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=True)


def restore() -> None:
    before = json.loads(BEFORE.read_text()) if BEFORE.exists() else {"settings": {}, "folders": FOLDERS}
    for name, value in before["settings"].items():
        if Path("/proc/sys", name).read_text() != value:
            Path("/proc/sys", name).write_text(value)
    remove_results()
    for name in FOLDERS:
        if name not in before["folders"]:
            shutil.rmtree(name, ignore_errors=True)
    for link in Path("/var/log/containers").glob("*"):
        if link.is_symlink() and os.readlink(link).startswith(f"{RUN}/"):
            link.unlink()


def remove_results() -> None:
    """The CNI library's notes on our containers; one network's name is ours, another's is everybody's."""
    ours = [path.name.removeprefix(f"{NETWORK}-") for path in CNI_RESULTS.glob(f"{NETWORK}-*")]
    for container in ours:
        for path in CNI_RESULTS.glob(f"*-{container}"):
            path.unlink()
