"""kwok, which plays the kubelets of fake nodes, and those nodes, made on demand."""

import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.cluster.harness import process
from tests.cluster.harness.api import Api, Call
from tests.cluster.harness.build import module_source
from tests.cluster.harness.control import GRACE_S, is_healthy
from tests.cluster.harness.places import HEALTH, KUBECONFIGS, RUN

# Without it every fake pod of a Job would end at once: pod-complete is not among them.
STAGES = ("node/fast/node-initialize", "pod/fast/pod-ready", "pod/fast/pod-delete")
STAGES_FILE = "kwok-stages.yaml"
SELECTOR = "kwok.x-k8s.io/node=fake"  # else kwok would play the real node too
OPTIONS = """\
apiVersion: config.kwok.x-k8s.io/v1alpha1
kind: KwokConfiguration
options: {podPlayStageParallelism: 64, nodePlayStageParallelism: 64, nodeLeaseParallelism: 16}
"""
TAINT = "jaxlaunch.test/fake"  # of every fake node, so that no pod meant to run lands on one
ADDRESS = "10.127.0.1"
THREADS = 8


def make_config() -> str:
    """Return kwok's settings with the stages that its module ships."""
    folder = module_source("kwok", "sigs.k8s.io/kwok") / "kustomize" / "stage"
    return "---\n".join(
        [OPTIONS, *((folder / f"{stage}.yaml").read_text() + "\n" for stage in STAGES)]
    )


def start(home: Path) -> None:
    flags = [
        f"--kubeconfig={KUBECONFIGS}/kwok.conf",
        f"--config={RUN}/{STAGES_FILE}",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-annotation-selector={SELECTOR}",
        # Renewed four times as often: a thousand nodes at kwok's usual 40 s are a hundred requests
        # a second.
        f"--node-lease-duration-seconds={GRACE_S}",
        "--cidr=10.128.0.0/12",
        f"--node-ip={ADDRESS}",
        f"--server-address=127.0.0.1:{HEALTH['kwok']}",
    ]
    process.start("kwok", [home / "kwok", *flags])


def wait_until_settled() -> None:
    process.wait_until_ready(
        "kwok", lambda: is_healthy(f"http://127.0.0.1:{HEALTH['kwok']}/healthz")
    )


def make_node(
    name: str, labels: Mapping[str, str], resources: Mapping[str, str], taint: str
) -> dict[str, Any]:
    """Return a node that is ready at once: kwok takes most of a minute for a thousand."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    capacity = {"cpu": "208", "memory": "440Gi", "pods": "110", **resources}
    times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": dict([SELECTOR.split("=")]),
            "labels": {"kubernetes.io/hostname": name, **labels},
        },
        "spec": {"taints": [{"key": taint, "value": "true", "effect": "NoSchedule"}]},
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "addresses": [
                {"type": "InternalIP", "address": ADDRESS},
                {"type": "Hostname", "address": name},
            ],
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "Fake", "message": "kwok", **times}
            ],
        },
    }


@contextmanager
def fake_nodes(
    api: Api,
    count: int,
    labels: Mapping[str, str],
    resources: Mapping[str, str],
    taint: str = TAINT,
) -> Iterator[list[str]]:
    """Make fake nodes, remove them at the end, and yield their names."""
    names = [f"fake-{secrets.token_hex(3)}-{number:05d}" for number in range(count)]
    send_calls(
        api,
        [
            Call("POST", "/api/v1/nodes", make_node(name, labels, resources, taint))
            for name in names
        ],
    )
    try:
        yield names
    finally:
        send_calls(api, [Call("DELETE", f"/api/v1/nodes/{name}") for name in names])


def send_calls(api: Api, calls: list[Call]) -> None:
    """Send all calls over a few connections at once."""
    with ThreadPoolExecutor(THREADS) as pool:
        for answers in pool.map(
            lambda part: list(api.calls(part)), [calls[start::THREADS] for start in range(THREADS)]
        ):
            del answers  # what was refused has raised
