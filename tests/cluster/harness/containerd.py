"""containerd, which runs the pods' containers, with its own root, state and socket."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.cluster.harness import network, process
from tests.cluster.harness.places import RUN, STORE

STATE = RUN / "containerd"
SOCKET = RUN / "containerd.sock"
PAUSE = "localhost/pause:1"

# Without CAP_SYS_RESOURCE (a container, often) no process may lower its own oom_score_adj, and
# every sandbox would fail: restrict_oom_score_adj. Network namespaces are mounted below the state
# folder, where `down` finds them.
CONFIG = f"""
version = 2
root = "{STORE}"
state = "{STATE}"
oom_score = 0
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
]
[grpc]
  address = "{SOCKET}"
[ttrpc]
  address = "{SOCKET}.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
  path = "{RUN}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  enable_selinux = false
  tolerate_missing_hugetlb_controller = true
  disable_hugetlb_controller = true
  netns_mounts_under_state_dir = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{network.PLUGINS}"
    conf_dir = "{network.CONFIG}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
        Root = "{RUN}/runc"
"""


def run_ctr(*words: str | Path) -> str:
    """Return the output of `ctr`. Raises RuntimeError with its error."""
    command = [
        "ctr",
        "--address",
        SOCKET,
        "--connect-timeout",
        "3s",
        "--namespace",
        "k8s.io",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ctr {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


def start() -> None:
    """Start containerd, wait until it answers, and remove containers of an earlier cluster."""
    network.write_config()
    for folder in (STORE, STATE, RUN / "opt"):
        folder.mkdir(parents=True, exist_ok=True)
    (RUN / "containerd.toml").write_text(CONFIG)
    launch()
    if (
        list_containers()
    ):  # left by a crash; their tasks are gone, and their records would be taken for pods
        remove_containers()
        process.stop("containerd")
        launch()
    forget_untagged()


def launch() -> None:
    process.start("containerd", ["containerd", "--config", RUN / "containerd.toml"])
    process.wait_until_ready("containerd", lambda: run_ctr("version"))


def list_containers() -> list[str]:
    return run_ctr("containers", "list", "-q").split()


def remove_containers() -> None:
    """Kill and remove every container."""
    if tasks := run_ctr("tasks", "list", "-q").split():
        with suppress(
            RuntimeError
        ):  # a pod's containers share a shim, which may go with the first of them
            run_ctr("tasks", "delete", "--force", *tasks)
    if left := list_containers():
        run_ctr("containers", "delete", *left)


def list_images() -> Iterator[tuple[str, str]]:
    """Return the name and digest of every image in the store."""
    for line in run_ctr("images", "list").splitlines()[1:]:
        name, _, digest = line.split()[:3]
        yield name, digest


def forget_untagged() -> None:
    """Drop images that a later one of the same name has replaced, a gigabyte at a time."""
    images_by_name = dict(list_images())
    tagged = {digest for name, digest in images_by_name.items() if not name.startswith("sha256:")}
    if stale := [name for name, digest in images_by_name.items() if digest not in tagged]:
        run_ctr("images", "delete", "--sync", *stale)
