"""A second real node beside the first, for what happens when a node is lost: a kubelet and a containerd of its own.

It shares the machine, the bridge and the pods' addresses with the first, and runs one pod at most,
so that what is lost with it is one host of a gang. Everything it writes is in the run folder:
`down` removes it with the rest.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import yaml

from tests.cluster.harness import cgroups, containerd, kubelet, pki, process
from tests.cluster.harness.api import Api, Refused
from tests.cluster.harness.places import ADMIN, CGROUP, IP, KUBECONFIGS, PKI, RUN, STORE

NODE = "node-1"
PATH = f"/api/v1/nodes/{NODE}"
PORT = 10251
PLACE = RUN / NODE
SOCKET = PLACE / "containerd.sock"
NAMES = ("kubelet-1", "containerd-1")
GROUP = f"{CGROUP}/{NODE}"
TAINT = "jaxlaunch.test/second-node"
# After which the node controller notices that a node is silent, as clusters have it (Kubernetes
# 1.32 on). The tests' own waits for longer than any of them lasts: `unknown` says it in its place.
GRACE_S = 50.0


@contextmanager
def joined(home: Path, *images: str) -> Iterator[None]:
    """The node is there, with these images of the first one, for pods that tolerate TAINT."""
    begin(home, *images)
    try:
        yield
    finally:
        end()
        with suppress(Refused):  # it was deleted meanwhile
            Api(ADMIN).delete(PATH)


def begin(home: Path, *images: str) -> None:
    """Starts the node; returns when it is ready for a pod."""
    for folder in (PLACE, PLACE / "opt", PLACE / "kubelet"):
        folder.mkdir(parents=True, exist_ok=True)
    pki.leaf(PKI, NODE, f"/O=system:nodes/CN=system:node:{NODE}", "extendedKeyUsage=clientAuth\n")
    pair = {
        "client-certificate-data": pki.data(PKI / f"{NODE}.crt"),
        "client-key-data": pki.data(PKI / f"{NODE}.key"),
    }
    (KUBECONFIGS / f"{NODE}.conf").write_text(pki.kubeconfig(PKI, pair))
    start_containerd()
    if left := ctr("containers", "list", "-q").split():  # of pods that were lost with it
        ctr("containers", "delete", *left)
    held = ctr("images", "list", "-q").split()
    for name in (containerd.PAUSE, *images):
        if name not in held:
            copy(name)
    for hierarchy in cgroups.hierarchies():
        (hierarchy / GROUP).mkdir(exist_ok=True)
    start_kubelet(home)


def start_containerd() -> None:
    text = containerd.CONFIG
    for old, new in (
        (f'"{STORE}"', f'"{PLACE / "store"}"'),
        (f'"{containerd.STATE}"', f'"{PLACE / "state"}"'),
        (str(containerd.SOCKET), str(SOCKET)),
        (f"{RUN}/opt", f"{PLACE}/opt"),
        (f"{RUN}/runc", f"{PLACE}/runc"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    (PLACE / "containerd.toml").write_text(text)
    process.start("containerd-1", ["containerd", "--config", PLACE / "containerd.toml"])
    process.ready("containerd-1", lambda: ctr("version"))


def start_kubelet(home: Path) -> None:
    """Starts its kubelet, also again; returns when the node is ready."""
    config = kubelet.config() | {
        "port": PORT,
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupRoot": f"/{GROUP}",
        "podLogsDir": f"{PLACE}/pod-logs",
        "maxPods": 1,
    }
    (PLACE / "kubelet.yaml").write_text(yaml.safe_dump(config))
    flags = [
        f"--config={PLACE}/kubelet.yaml",
        f"--kubeconfig={KUBECONFIGS}/{NODE}.conf",
        f"--root-dir={PLACE}/kubelet",
        f"--cert-dir={PLACE}/kubelet/pki",
        f"--hostname-override={NODE}",
        f"--node-ip={IP}",
        f"--node-labels={kubelet.LABELS}",
        f"--register-with-taints={TAINT}=:NoSchedule",
    ]
    process.start("kubelet-1", [home / "kubelet", *flags])
    process.ready("kubelet-1", lambda: condition() == "True")


def stop_kubelet() -> None:
    """What runs on the node goes on, and nobody hears of it."""
    process.end(
        [pid for name, pid in process.leading().items() if name == "kubelet-1"],
        signal.SIGKILL,
        within=10,
    )


def lose(pids: Sequence[int]) -> None:
    """The machine is gone: no packet leaves its pod any more, then all that ran there ends."""
    subprocess.run(
        ["nsenter", "-t", str(pids[0]), "-n", "ip", "link", "set", "eth0", "down"], check=True
    )
    daemons = [daemon.pid for daemon in process.running() if daemon.name in NAMES]
    for pid in (*daemons, *pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end() -> None:
    """Ends the node and what runs on it."""
    stop_kubelet()
    with suppress(RuntimeError):
        for task in ctr("tasks", "list", "-q").split():
            ctr("tasks", "delete", "--force", task)
    process.end(
        [daemon.pid for daemon in process.running() if daemon.name in NAMES],
        signal.SIGKILL,
        within=10,
    )


def unknown() -> None:
    """Says of a node and its pods what the node controller does once it has been silent for GRACE_S; what follows is
    that controller's own."""
    api, now = Api(ADMIN), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    silent = {
        "status": "Unknown",
        "reason": "NodeStatusUnknown",
        "message": "no status",
        "lastTransitionTime": now,
    }
    api.merge(f"{PATH}/status", {"status": {"conditions": [{"type": "Ready", **silent}]}})
    for pod in api.get(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{NODE}")["items"]:
        known = pod["status"].get("conditions", [])
        changed = [one | {"status": "False"} if one["type"] == "Ready" else one for one in known]
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}/status"
        with suppress(Refused):  # it is gone meanwhile
            api.merge(path, {"status": {"conditions": changed}})


def condition() -> str:
    """Whether the node is ready, as the API server has it: True, False, Unknown; nothing where there is no node."""
    with suppress(RuntimeError):
        conditions = Api(ADMIN).get(PATH)["status"].get("conditions", [])
        return next((one["status"] for one in conditions if one["type"] == "Ready"), "")
    return ""


def copy(name: str) -> None:
    """Puts an image of the first node into this one's store."""
    archive = PLACE / "image.tar"
    containerd.ctr("images", "export", archive, name)
    ctr("images", "import", archive)
    archive.unlink()


def ctr(*words: str | Path) -> str:
    command = [
        "ctr",
        "--address",
        str(SOCKET),
        "--connect-timeout",
        "3s",
        "--namespace",
        "k8s.io",
        *map(str, words),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ctr {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout
