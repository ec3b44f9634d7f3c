"""Jobs of very many hosts on nodes that exist in name only, and what the launcher's commands cost on them."""

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
from tests.cluster.waiting import until

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
GONE_S = 900.0  # for kwok to end a thousand pods
CLOSED = "jaxlaunch.test/closed"  # a taint that no host tolerates


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one command took."""

    out: str
    requests: tuple[str, ...]
    seconds: float
    peak_mib: float

    @property
    def calls(self) -> list[str]:
        """Requests, further pages of a list not counted."""
        return [request for request in self.requests if "continue=" not in request]

    @property
    def writes(self) -> list[str]:
        """Requests that change what the server keeps."""
        is_write = ("POST", "PUT", "PATCH", "DELETE")
        asks = ("dryRun=All", "accessreviews", "selfsubject")
        return [
            one
            for one in self.requests
            if one.startswith(is_write) and not any(ask in one for ask in asks)
        ]


@dataclasses.dataclass(frozen=True)
class Place:
    """A namespace, and nodes for its hosts: one for each, and nobody else's."""

    cluster: Access
    namespace: str
    nodes: list[str]

    def open(self) -> None:
        """From now on the nodes take the hosts, which tolerate what is left of their taints."""
        taints = {
            "spec": {"taints": [{"key": kwok.TAINT, "value": "true", "effect": "NoSchedule"}]}
        }
        calls = [Call("PATCH", f"/api/v1/nodes/{name}", taints, MERGE) for name in self.nodes]
        kwok.send(self.cluster.api, calls)


class Fleet:
    """One job of so many hosts, each of which needs a node for itself."""

    def __init__(self, place: Place, hosts: int, folder: Path) -> None:
        self.cluster, self.namespace, self.hosts = place.cluster, place.namespace, hosts
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

    def costs(self, *words: str | Path) -> Cost:
        """What `launcher WORDS` prints and costs, in a process of its own. AssertionError when it fails."""
        command = [sys.executable, "-m", "tests.cluster.counted", *map(str, words)]
        done = subprocess.run(
            command,
            env=self.cluster.env,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stderr.strip().splitlines()[-1])
        return Cost(done.stdout, tuple(told["requests"]), told["seconds"], told["peak_mib"])

    def seen(self, command: str) -> Cost:
        return self.costs(command, self.name, "-n", self.namespace)

    def until(self, count: str, within: float) -> None:
        """Waits until the Job controller counts every pod as this: `active`, which is made and has not ended, or
        `ready`. To list a thousand pods again and again would take the machine from those who make
        them.
        """
        jobs = f"/apis/batch/v1/namespaces/{self.namespace}/jobs"

        def counted() -> list[int]:
            return [job["status"].get(count, 0) for job in self.cluster.api.get(jobs)["items"]]

        until(counted, lambda seen: seen == [self.hosts], f"{self.hosts} pods {count}", within)


@contextmanager
def place(cluster: Access, count: int, taint: str = kwok.TAINT) -> Iterator[Place]:
    """Such a place, which goes when its pods have gone. The scheduler takes them last: others wait for it too."""
    namespace = preparations.make_namespace(cluster, "restricted")
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    last = {"value": -1000, "preemptionPolicy": "Never", "metadata": {"name": namespace}}
    cluster.api.create(
        classes, {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", **last}
    )
    with kwok.fake_nodes(cluster.api, count, {POOL: namespace}, {}, taint) as nodes:
        yield Place(cluster, namespace, nodes)
        # A namespace would delete the pods first: to the Job controller they fail, and it backs off
        # for minutes.
        within = "-n", namespace
        cluster.kubectl("delete", "jobsets", "--all", "--wait=false", *within)
        pods = f"/api/v1/namespaces/{namespace}/pods?limit=1"
        until(lambda: cluster.api.get(pods)["items"], lambda left: not left, "no pods left", GONE_S)
        cluster.api.delete(f"/api/v1/namespaces/{namespace}")
        cluster.api.delete(f"{classes}/{namespace}")
