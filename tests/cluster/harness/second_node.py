"""A second real node for the loss of a node: a kubelet and a containerd of its own.

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
from tests.cluster.harness.api import Api, RefusedError
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
def join_node(home: Path, *images: str) -> Iterator[None]:
    """Join the node with these images of the first one, for pods that tolerate TAINT."""
    begin_node(home, *images)
    try:
        yield
    finally:
        end_node()
        with suppress(RefusedError):  # it was deleted meanwhile
            Api(ADMIN).delete(PATH)


def begin_node(home: Path, *images: str) -> None:
    """Start the node and wait until it is ready for a pod."""
    for folder in (PLACE, PLACE / "opt", PLACE / "kubelet"):
        folder.mkdir(parents=True, exist_ok=True)
    pki.make_leaf(
        PKI, NODE, f"/O=system:nodes/CN=system:node:{NODE}", "extendedKeyUsage=clientAuth\n"
    )
    pair = {
        "client-certificate-data": pki.encode_file(PKI / f"{NODE}.crt"),
        "client-key-data": pki.encode_file(PKI / f"{NODE}.key"),
    }
    (KUBECONFIGS / f"{NODE}.conf").write_text(pki.make_kubeconfig(PKI, pair))
    start_containerd()
    if containers := run_ctr("containers", "list", "-q").split():  # of pods that were lost with it
        run_ctr("containers", "delete", *containers)
    held = run_ctr("images", "list", "-q").split()
    for name in (containerd.PAUSE, *images):
        if name not in held:
            copy_image(name)
    for hierarchy in cgroups.find_hierarchies():
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
    process.wait_until_ready("containerd-1", lambda: run_ctr("version"))


def start_kubelet(home: Path) -> None:
    """Start the node's kubelet, also again, and wait until the node is ready."""
    config = kubelet.write_config() | {
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
    process.wait_until_ready("kubelet-1", lambda: ready_condition() == "True")


def stop_kubelet() -> None:
    """Stop the kubelet; what runs on the node continues unobserved."""
    process.end_processes(
        [pid for name, pid in process.find_daemons().items() if name == "kubelet-1"],
        signal.SIGKILL,
        within=10,
    )


def lose_node(pids: Sequence[int]) -> None:
    """Lose the machine: cut its pod's network, then kill all that ran there."""
    subprocess.run(
        ["nsenter", "-t", str(pids[0]), "-n", "ip", "link", "set", "eth0", "down"], check=True
    )
    daemons = [daemon.pid for daemon in process.find_processes() if daemon.name in NAMES]
    for pid in (*daemons, *pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_node() -> None:
    """End the node and what runs on it."""
    stop_kubelet()
    with suppress(RuntimeError):
        for task in run_ctr("tasks", "list", "-q").split():
            run_ctr("tasks", "delete", "--force", task)
    process.end_processes(
        [daemon.pid for daemon in process.find_processes() if daemon.name in NAMES],
        signal.SIGKILL,
        within=10,
    )


def mark_unknown() -> None:
    """Set the node's and its pods' status as the node controller does after GRACE_S of silence.

    What follows is that controller's own work.
    """
    api, now = Api(ADMIN), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    silent = {
        "status": "Unknown",
        "reason": "NodeStatusUnknown",
        "message": "no status",
        "lastTransitionTime": now,
    }
    api.merge(f"{PATH}/status", {"status": {"conditions": [{"type": "Ready", **silent}]}})
    for pod in api.get(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{NODE}")["items"]:
        conditions = pod["status"].get("conditions", [])
        changed = [
            condition | {"status": "False"} if condition["type"] == "Ready" else condition
            for condition in conditions
        ]
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        with suppress(RefusedError):  # it is gone meanwhile
            api.merge(path, {"status": {"conditions": changed}})


def ready_condition() -> str:
    """Return the node's ready condition: True, False or Unknown, or nothing without a node."""
    with suppress(RuntimeError):
        conditions = Api(ADMIN).get(PATH)["status"].get("conditions", [])
        return next(
            (condition["status"] for condition in conditions if condition["type"] == "Ready"), ""
        )
    return ""


def copy_image(name: str) -> None:
    """Copy an image of the first node into this one's store."""
    archive = PLACE / "image.tar"
    containerd.run_ctr("images", "export", archive, name)
    run_ctr("images", "import", archive)
    archive.unlink()


def run_ctr(*words: str | Path) -> str:
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
