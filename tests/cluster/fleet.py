"""Jobs of very many hosts on fake nodes, and what the launcher's commands cost on them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.harness import kwok
from tests.cluster.harness.api import MERGE, Call
from tests.cluster.waiting import wait_until

POOL = "jaxlaunch.test/fleet"  # label of its nodes
JOB = """\
name: {name}
namespace: {namespace}
image: registry.example/train:1
hosts: {hosts}
accelerator: {{type: cpu}}
resources: {{cpu: 200}}
priority: {namespace}
node_selector: {{{pool}: {namespace}}}
tolerations: [{{key: {taint}, operator: Exists}}]
command: [python, train.py]
"""
DELETE_TIMEOUT_S = 900.0  # for kwok to end a thousand pods
CLOSED_TAINT = "jaxlaunch.test/closed"  # a taint that no host tolerates


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one command."""

    out: str
    requests: tuple[str, ...]
    seconds: float
    peak_mib: float

    @property
    def calls(self) -> list[str]:
        """Requests without further pages of a list."""
        return [request for request in self.requests if "continue=" not in request]

    @property
    def writes(self) -> list[str]:
        """Requests that change stored objects."""
        methods = ("POST", "PUT", "PATCH", "DELETE")
        read_only = ("dryRun=All", "accessreviews", "selfsubject")
        return [
            request
            for request in self.requests
            if request.startswith(methods) and not any(ask in request for ask in read_only)
        ]


@dataclasses.dataclass(frozen=True)
class FleetNamespace:
    """A namespace with one fake node for each of its hosts."""

    cluster: Access
    namespace: str
    nodes: list[str]

    def open(self) -> None:
        """Remove the taint that keeps the hosts from the nodes."""
        taints = {
            "spec": {"taints": [{"key": kwok.TAINT, "value": "true", "effect": "NoSchedule"}]}
        }
        calls = [Call("PATCH", f"/api/v1/nodes/{name}", taints, MERGE) for name in self.nodes]
        kwok.send_calls(self.cluster.api, calls)


class Fleet:
    """One job of many hosts, each of which needs a node of its own."""

    def __init__(self, namespace: FleetNamespace, hosts: int, folder: Path) -> None:
        self.cluster, self.namespace, self.hosts = namespace.cluster, namespace.namespace, hosts
        self.name = f"fleet-{hosts}"
        self.file = folder / f"{self.name}.yaml"
        fields = {
            "name": self.name,
            "namespace": self.namespace,
            "hosts": hosts,
            "pool": POOL,
            "taint": kwok.TAINT,
        }
        self.file.write_text(JOB.format(**fields))

    def measure(self, *words: str | Path) -> Cost:
        """Return output and cost of `launcher WORDS` in its own process, which must succeed."""
        command = [sys.executable, "-m", "tests.cluster.counted", *map(str, words)]
        done = subprocess.run(
            command,
            env=self.cluster.env,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stderr
        cost = json.loads(done.stderr.strip().splitlines()[-1])
        return Cost(done.stdout, tuple(cost["requests"]), cost["seconds"], cost["peak_mib"])

    def measure_command(self, command: str) -> Cost:
        return self.measure(command, self.name, "-n", self.namespace)

    def wait_for_pods(self, kind: str, timeout_s: float) -> None:
        """Wait until the Job controller counts every pod as `active` or `ready`.

        Listing a thousand pods again and again would slow down the processes that make them.
        """
        jobs = f"/apis/batch/v1/namespaces/{self.namespace}/jobs"

        def pod_counts() -> list[int]:
            return [job["status"].get(kind, 0) for job in self.cluster.api.get(jobs)["items"]]

        wait_until(
            pod_counts, lambda seen: seen == [self.hosts], f"{self.hosts} pods {kind}", timeout_s
        )


@contextmanager
def make_fleet_namespace(
    cluster: Access, count: int, taint: str = kwok.TAINT
) -> Iterator[FleetNamespace]:
    """Yield a namespace with nodes until its pods are gone. The scheduler takes them last."""
    namespace = preparations.make_namespace(cluster, "restricted")
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    priority_class = {"value": -1000, "preemptionPolicy": "Never", "metadata": {"name": namespace}}
    cluster.api.create(
        classes, {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", **priority_class}
    )
    with kwok.fake_nodes(cluster.api, count, {POOL: namespace}, {}, taint) as nodes:
        yield FleetNamespace(cluster, namespace, nodes)
        # A namespace would delete the pods first: to the Job controller they fail, and it backs off
        # for minutes.
        in_namespace = "-n", namespace
        cluster.kubectl("delete", "jobsets", "--all", "--wait=false", *in_namespace)
        pods = f"/api/v1/namespaces/{namespace}/pods?limit=1"
        wait_until(
            lambda: cluster.api.get(pods)["items"],
            lambda left: not left,
            "no pods left",
            DELETE_TIMEOUT_S,
        )
        cluster.api.delete(f"/api/v1/namespaces/{namespace}")
        cluster.api.delete(f"{classes}/{namespace}")
