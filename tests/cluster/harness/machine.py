"""What a machine needs to run a cluster, and what this one lacks."""

import os
import platform
import shutil
import socket
import sys

from tests.cluster.harness import build, network
from tests.cluster.harness.places import PORTS

# Program -> the Debian package that brings it.
PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "openssl": "openssl",
    "umount": "mount",
    "ldd": "libc-bin",
}


def find_missing() -> list[str]:
    """Return a sentence for each missing thing, with where to get it."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return [
            f"a node and its images are made for Linux on x86_64; this is {sys.platform} on "
            f"{platform.machine()}"
        ]
    faults = []
    if os.geteuid() != 0:
        faults.append(
            "a node needs root: run as root, or let TEST_KUBECONFIG name a cluster of your "
            "own, as kind's"
        )
    packages = {package for program, package in PROGRAMS.items() if not shutil.which(program)}
    if not (network.PLUGINS / "bridge").exists():
        packages.add("containernetworking-plugins")
    if packages:
        faults.append(f"missing Debian packages: apt-get install {' '.join(sorted(packages))}")
    if not build.is_built():
        try:
            build.find_machine_go()
        except build.MissingToolError as fault:
            faults.append(str(fault))
    return faults


def find_taken_ports() -> list[int]:
    """Return the ports of a cluster on which another program listens."""
    return [port for port in PORTS if is_taken(port)]


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        # Connections of the last cluster may linger.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
