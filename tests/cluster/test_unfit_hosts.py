"""Checks of a host before JAX starts, in pods: devices, pinned memory, the GPU's driver.

The hosts have no accelerator: its files are made, and what requests its nodes is left out of the
pods.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.job.defaults import Defaults
from jaxlaunch.launcher.kubernetes.objects import pod_template
from tests import needs
from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.gangs import Gang, Object, Workspace, read_verdicts
from tests.found import shows

pytestmark = pytest.mark.extended

ASKS = """
import json, os, resource
print("found", json.dumps({
    "uid": os.getuid(), "pinned": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    "PATH": os.environ["PATH"], "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH"),
}))
"""
PROGRAM: dict[str, Any] = {"command": ["python", "-c", ASKS], "agent": "inject", "grace": "2s"}
V5E: dict[str, Any] = {"platform": "gke", "accelerator": {"type": "v5e", "topology": "2x2"}}
RDMA = {"profile": "rdma", "resource": "example.com/rdma"}
VFIO = {"name": "vfio", "mountPath": "/dev/vfio"}
# The node's device files, as the kernel makes them: the group's is root's alone.
CLOSED: dict[str, Any] = {
    "init": [
        {
            "name": "devices",
            "command": [
                "sh",
                "-c",
                "cd /dev/vfio && touch vfio 0 && chmod 666 vfio && chmod 600 0",
            ],
            "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
            "volumeMounts": [VFIO],
        }
    ],
    "pod": {
        "spec": {
            "volumes": [{"name": "vfio", "emptyDir": {}}],
            "containers": [{"name": "main", "volumeMounts": [VFIO]}],
        }
    },
}
# A driver of CUDA 12.4, as far as the trainer asks it.
OLD_DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
"""


@pytest.fixture(scope="module")
def workspace(cluster: Access, base_image: str) -> Iterator[Workspace]:
    namespace = preparations.make_namespace(cluster, "privileged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield Workspace(cluster, namespace, base_image)
    preparations.remove_namespace(cluster, namespace)


def run_anywhere(jobset: Object) -> None:
    """Remove what requires a node with an accelerator."""
    spec: Object = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    for key in ("nodeSelector", "affinity"):
        spec.pop(key, None)
    spec["containers"][0]["resources"] = {"requests": {"cpu": "20m", "memory": "100Mi"}}


def limit_pinned_memory(kib: int) -> Callable[[Object], None]:
    """Do the same for containers that start with this limit on pinned memory."""

    def change(jobset: Object) -> None:
        run_anywhere(jobset)
        main = pod_template(jobset)["spec"]["containers"][0]
        main["command"] = ["sh", "-c", f'ulimit -l {kib} && exec "$@"', "sh", *main["command"]]

    return change


def read_report(gang: Gang) -> dict[str, Any]:
    """Return what the gang's program printed."""
    assert gang.wait_for_end() == "Completed", [line.text for line in gang.read_lines()]
    report: dict[str, Any] = json.loads(gang.wait_for_line("found {").partition("found ")[2])
    return report


def wait_for_refusal(gang: Gang) -> str:
    """Return the message of a job that failed before its program started."""
    assert gang.wait_for_end() == "Failed"
    verdict, *_ = read_verdicts(gang.hosts)
    assert verdict.code == contract.BAD_SPEC
    assert not [line for line in gang.read_lines() if "found {" in line.text]
    return verdict.message


def test_devices_and_pinned_memory_are_checked_before_the_program(workspace: Workspace) -> None:
    """Run five jobs side by side: four with different containers, one with search paths only."""
    root = Defaults(users={"v5e": "root", "h100": "root"})
    fast: dict[str, Any] = {"accelerator": {"type": "h100"}, "hosts": 2, "network": RDMA}
    env = {"LD_LIBRARY_PATH": "/opt/own/lib"}
    paths = workspace.start(
        "paths",
        Defaults(),
        run_anywhere,
        **PROGRAM,
        platform="gke",
        accelerator={"type": "l4"},
        env=env,
    )
    closed = workspace.start(
        "closed", Defaults(users={"v5e": 1000}), run_anywhere, **PROGRAM, **V5E, **CLOSED
    )
    small = workspace.start("small", Defaults(), limit_pinned_memory(64), **PROGRAM, **fast)
    mended = workspace.start("mended", root, run_anywhere, **PROGRAM, **V5E, **CLOSED)
    pins = workspace.start("pins", root, limit_pinned_memory(64), **PROGRAM, **fast)

    report = read_report(paths)
    assert report["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64:/opt/own/lib"
    assert (
        report["PATH"].startswith("/usr/local/nvidia/bin:/usr/local/bin:") and report["uid"] == 1000
    )
    message = wait_for_refusal(closed)
    assert (
        "cannot open /dev/vfio/0 as uid 1000: its owner is uid 0, its mode 0600; set users: "
        "{v5e: root}" in message
    )
    shows("cannot open /dev/vfio/0 as uid 1000", message)
    message = wait_for_refusal(small)
    assert "network = rdma needs memory that programs pin, and this pod may pin 64 KiB" in message
    shows("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", message)
    assert "LimitMEMLOCK=infinity" in message and "users: {h100: root}" in message
    assert read_report(mended)["uid"] == 0
    assert read_report(pins) | {"PATH": ""} == {
        "uid": 0,
        "pinned": 64 * 1024,
        "PATH": "",
        "LD_LIBRARY_PATH": None,
    }


def test_old_driver_is_reported_before_jax_starts(
    workspace: Workspace, image: str, tmp_path: Path
) -> None:
    (tmp_path / "driver.c").write_text(OLD_DRIVER)
    code = tmp_path / "code"
    (code / "jax_cuda13_plugin").mkdir(parents=True)
    (code / "jax_cuda13_plugin" / "__init__.py").touch()
    library = [
        needs.tool("gcc", package="gcc"),
        "-shared",
        "-o",
        str(code / "libcuda.so.1"),
        str(tmp_path / "driver.c"),
    ]
    subprocess.run(library, check=True)
    data = {"source": "tfds", "name": "digits"}
    train = {"task": "classify", "data": data, "checkpoint": {"path": "/tmp/x"}}
    gang = workspace.start(
        "old",
        Defaults(),
        run_anywhere,
        image=image,
        code=str(code),
        env={"LD_LIBRARY_PATH": "/code"},
        accelerator={"type": "l4"},
        train=train,
        grace="2s",
    )
    message = wait_for_refusal(gang)
    assert "is too old for CUDA 13: it runs CUDA 12.4 at most" in message
    assert (
        "needs driver 580 or newer; use an image with the extra cuda12 of jaxlaunch, or update the "
        "driver of the nodes" in message
    )
