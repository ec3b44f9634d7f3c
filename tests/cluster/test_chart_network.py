"""The chart's NetworkPolicy together with a job's own: which pods reach the job's pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.command import run_launcher, write_project
from tests.cluster.releases import Release, chart_values
from tests.cluster.waiting import wait_until
from tests.helm.charts import Helm

pytestmark = pytest.mark.extended

SERVES = ["python", "-m", "http.server", "9000"]
# Says which of the addresses in its arguments it reached within 20 s.
CONNECTS = """
import json, socket, sys, time
left, reached, end = set(sys.argv[1:]), [], time.monotonic() + 20
while left and time.monotonic() < end:
    for address in sorted(left):
        host, port = address.split(":")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            continue
        left.remove(address)
        reached.append(int(port))
    time.sleep(0.2)
print(json.dumps(sorted(reached)))
"""
LEADER, METRICS, OTHER = 9401, 9400, 9000


@pytest.fixture
def release(helm: Helm, cluster: Access, namespace: str) -> Iterator[Release]:
    release = Release(helm, cluster, namespace)
    here = {"prometheus": {"namespace": namespace}}
    release.install(chart_values(cluster, kueue={"enabled": False}, defaults=here))
    yield release
    release.uninstall()


def start_pod(
    cluster: Access,
    namespace: str,
    name: str,
    image: str,
    command: list[str],
    labels: dict[str, str],
) -> str:
    """Start a restricted pod and return its path."""
    container = {
        "name": "main",
        "image": image,
        "command": command,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": security,
        "containers": [container],
    }
    pods = f"/api/v1/namespaces/{namespace}/pods"
    cluster.api.create(
        pods,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": spec,
        },
    )
    return f"{pods}/{name}"


def wait_for_address(cluster: Access, pod: str) -> str:
    pod_object = wait_until(
        lambda: cluster.api.get(pod),
        lambda seen: seen["status"].get("phase") == "Running",
        f"{pod} runs",
    )
    return str(pod_object["status"]["podIP"])


def reached_ports(cluster: Access, pod: str) -> list[int]:
    """Return the ports that a pod of CONNECTS reached."""
    wait_until(
        lambda: cluster.api.get(pod),
        lambda seen: seen["status"].get("phase") == "Succeeded",
        f"{pod} ends",
        90,
    )
    ports = json.loads(cluster.api.get(f"{pod}/log"))
    assert isinstance(ports, list)
    return ports


@pytest.fixture
def other_namespace(cluster: Access) -> Iterator[str]:
    """Yield another team's namespace."""
    name = preparations.make_namespace(cluster, "restricted")
    yield name
    preparations.remove_namespace(cluster, name)


def test_only_hosts_of_the_job_and_prometheus_reach_its_pods(
    cluster: Access,
    namespace: str,
    other_namespace: str,
    release: Release,
    base_image: str,
    tmp_path: Path,
) -> None:
    preparations.make_volume(cluster, namespace, "team-checkpoints")
    program = "import time; print('running', flush=True); time.sleep(600)"
    folder = write_project(
        tmp_path, namespace, {}, image=base_image, hosts=2, command=["python", "-c", program]
    )
    assert run_launcher(cluster, folder, "submit", "job.yaml").returncode == 0
    # Both hosts say that they run only after they have met: the gang itself gets through.
    wait_until(
        lambda: run_launcher(cluster, folder, "logs", "mine", "-n", namespace).stdout,
        lambda seen: seen.count("running") == 2,
        "both hosts run",
    )
    leader = first_host(cluster, namespace)
    server = wait_for_address(
        cluster, start_pod(cluster, namespace, "server", base_image, SERVES, {})
    )
    targets = [f"{leader}:{LEADER}", f"{leader}:{METRICS}", f"{server}:{OTHER}"]
    connects = ["python", "-c", CONNECTS, *targets]
    stranger = start_pod(cluster, namespace, "stranger", base_image, connects, {})
    prometheus = {"app.kubernetes.io/name": "prometheus"}
    scraper, impostor = (
        start_pod(cluster, pod_namespace, "scraper", base_image, connects, prometheus)
        for pod_namespace in (namespace, other_namespace)
    )
    by_stranger, by_scraper, by_impostor = (
        reached_ports(cluster, pod) for pod in (stranger, scraper, impostor)
    )
    if OTHER in by_stranger:  # no policy lets anybody in there
        assert by_stranger == by_scraper == by_impostor == [OTHER, METRICS, LEADER]
        pytest.skip(
            "the CNI of this cluster enforces no NetworkPolicy: what this test is for is NOT shown"
        )
    assert (by_stranger, by_scraper, by_impostor) == ([], [METRICS], [])


def first_host(cluster: Access, namespace: str) -> str:
    pods: list[dict[str, Any]] = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    index = "batch.kubernetes.io/job-completion-index"
    (pod_of_host,) = [pod for pod in pods if pod["metadata"]["labels"].get(index) == "0"]
    return str(pod_of_host["status"]["podIP"])
