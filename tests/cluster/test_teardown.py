"""`down` leaves the machine as `up` found it, whatever happened to the cluster in between."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.conftest import done_marker
from tests.cluster.harness import build, cgroups, image, images, mounts, network, places, process
from tests.cluster.test_harness import make_pod, wait_for_log
from tests.cluster.waiting import wait_until

pytestmark = pytest.mark.before_the_cluster

ROOT = Path(__file__).parents[2]
HARNESS = (sys.executable, "-m", "tests.cluster.harness")
# Where programs of a cluster write by habit: two levels are compared, since others write there too.
FOLDERS = ("/etc", "/opt", "/run", "/usr/libexec", "/var/lib", "/var/log")
SETTINGS = ("kernel", "net", "vm")
VOLATILE = (
    "kernel/ns_last_pid",
    "kernel/pty/nr",
    "kernel/random",
    "net/netfilter/nf_conntrack_count",
)


@pytest.fixture(scope="module", autouse=True)
def others_wait(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the other processes of pytest-xdist start a cluster after these tests."""
    yield
    done_marker(tmp_path_factory).touch()


@pytest.fixture(autouse=True)
def no_cluster(programs: Path) -> None:
    if any(process.find_processes()):
        pytest.skip("a cluster is up, and these tests stop it: `make cluster-down` first")


def read_state() -> dict[str, set[str]]:
    """Return what a cluster could leave on this machine, by kind."""
    return {
        "processes": {f"{daemon.pid} {daemon.name}" for daemon in process.find_processes()},
        "network namespaces": set(network_namespaces()),
        "links": set(network.run_ip("-brief", "link").stdout.splitlines()),
        "routes": set(Path("/proc/net/route").read_text().splitlines()),
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "cgroups": {
            str(folder)
            for top in cgroups.find_hierarchies()
            for folder in top.iterdir()
            if folder.is_dir()
        },
        "settings": set(read_settings()),
        "files": {
            str(path)
            for folder in FOLDERS
            for depth in ("*", "*/*")
            for path in Path(folder).glob(depth)
        },
        "run folder": {str(places.RUN)} if places.RUN.exists() else set(),
    }


def find_additions(initial_state: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return what is there now and was not before."""
    return {
        kind: entries - initial_state[kind]
        for kind, entries in read_state().items()
        if entries - initial_state[kind]
    }


def network_namespaces() -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield os.readlink(folder / "ns" / "net")


def read_settings() -> Iterator[str]:
    for top in SETTINGS:
        for path in Path("/proc/sys", top).rglob("*"):
            name = str(path.relative_to("/proc/sys"))
            if path.is_file() and not name.startswith(VOLATILE):
                with suppress(OSError):  # some can only be written
                    yield f"{name} = {path.read_text()}"


def run_harness(word: str) -> str:
    done = subprocess.run([*HARNESS, word], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def use_cluster() -> None:
    """Run a pod with a volume to its end, and leave another one running."""
    reached = Access(places.ADMIN, build.programs_folder() / "kubectl", is_ours=True)
    namespace = preparations.make_namespace(reached, "restricted")
    preparations.make_claim(reached, namespace)
    claimed = [{"name": "kept", "persistentVolumeClaim": {"claimName": "checkpoints"}}]
    pods = f"/api/v1/namespaces/{namespace}/pods"
    reached.api.create(
        pods, make_pod("lasting", images.BASE, "import time; time.sleep(600)", volumes=claimed)
    )
    reached.api.create(pods, make_pod("brief", images.BASE, "", volumes=claimed))
    wait_for_log(reached, namespace, "brief")
    wait_until(
        lambda: reached.api.get(f"{pods}/lasting"),
        lambda seen: seen["status"]["phase"] == "Running",
        "a running pod",
    )


def test_store_of_a_failed_build_on_another_base_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "buildah-old", tmp_path / "rootfs-new"
    merged = old / "root" / "overlay" / "merged"
    merged.mkdir(parents=True)
    (new / "etc").mkdir(parents=True)
    monkeypatch.setattr(image, "IMAGES", tmp_path)
    monkeypatch.setattr(images, "base_folder", lambda: new)
    for folder in (merged.parent, merged):
        subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        store = image.base_store()
        assert not old.exists() and store.exists()
    finally:
        mounts.unmount_below(tmp_path)


@pytest.mark.extended
def test_used_cluster_leaves_nothing() -> None:
    initial_state = read_state()
    run_harness("up")
    use_cluster()
    assert "the cluster is up" not in run_harness("up")  # it was up already, and is the same
    run_harness("down")
    assert find_additions(initial_state) == {}
    run_harness("down")  # of nothing
    assert find_additions(initial_state) == {}
