"""The chart's PodMonitor and rules in a real Prometheus: it finds the pods of jobs, and the rules see their labels."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.agent.io.link import choose_free_port
from tests import needs
from tests.cluster.access import Access
from tests.cluster.command import launcher, project
from tests.cluster.waiting import until
from tests.helm.charts import Helm, Object, one

pytestmark = pytest.mark.extended

META = "__meta_kubernetes_"
PROGRAM = "import time; time.sleep(600)"
Series = list[dict[str, str]]


def label(name: str) -> str:
    """Where discovery puts a pod's label."""
    return f"{META}pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"


def discovered(cluster: Access, namespace: str) -> list[dict[str, Any]]:
    """Every port of the namespace's pods, with what Prometheus's own discovery tells of it: Debian's has none for
    Kubernetes."""
    return [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {
                f"{META}namespace": namespace,
                f"{META}pod_name": pod["metadata"]["name"],
                f"{META}pod_phase": pod["status"]["phase"],
                f"{META}pod_container_port_name": port["name"],
                **{label(name): value for name, value in pod["metadata"]["labels"].items()},
            },
        }
        for pod in cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
        for port in pod["spec"]["containers"][0]["ports"]
        if "podIP" in pod["status"]
    ]


def scraped(monitor: Object) -> dict[str, Any]:
    """What the operator makes of a PodMonitor: what of the discovered it keeps, and its own relabelings."""
    spec = monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    kept = [
        {"source_labels": [label(name)], "regex": value, "action": "keep"}
        for name, value in spec["selector"]["matchLabels"].items()
    ]
    kept.append(
        {
            "source_labels": [f"{META}pod_container_port_name"],
            "regex": endpoint["port"],
            "action": "keep",
        }
    )
    named = {
        "namespace": f"{META}namespace",
        "pod": f"{META}pod_name",
        "job": label(spec["jobLabel"]),
    }
    found = [
        {"source_labels": [source], "target_label": target} for target, source in named.items()
    ]
    own = [
        {
            re.sub(r"([A-Z])", lambda upper: f"_{upper[1].lower()}", key): value
            for key, value in each.items()
        }
        for each in endpoint["relabelings"]
    ]
    return {
        "job_name": f"podMonitor/{monitor['metadata']['name']}/0",
        "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}],
        "relabel_configs": [*kept, *found, *own],
    }


@contextmanager
def prometheus(folder: Path, monitor: Object, rules: Object) -> Iterator[str]:
    """The address of a Prometheus that scrapes and evaluates each second."""
    program = needs.tool("prometheus", of="the Debian package prometheus")
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": every, "rule_files": ["rules.yaml"], "scrape_configs": [scraped(monitor)]}
    for name, document in (("prometheus.yml", config), ("rules.yaml", rules["spec"])):
        (folder / name).write_text(yaml.safe_dump(document))
    address = f"127.0.0.1:{choose_free_port()}"
    options = [
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, *options], cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield address
        finally:
            process.terminate()
            process.wait()


def query(address: str, expression: str) -> Series:
    """The labels of its series; none while Prometheus starts."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            result = json.load(answer)["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return []
    return [series["metric"] for series in result]


def test_prometheus_finds_a_job_s_pods_and_the_rules_see_them(
    helm: Helm, cluster: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    if not cluster.is_ours:
        pytest.skip("the pods of another cluster cannot be reached from here")
    made = helm.render(
        {"podMonitor": {"enabled": True}, "alerts": {"enabled": True}}, "team", namespace
    )
    monitor, rules = one(made, "PodMonitor"), one(made, "PrometheusRule")
    folder = project(
        tmp_path / "job", namespace, {}, image=base_image, command=["python", "-c", PROGRAM]
    )
    assert launcher(cluster, folder, "submit", "job.yaml").returncode == 0
    place = tmp_path / "prometheus"
    place.mkdir()

    def asked(expression: str) -> Series:
        """The answer, by what is discovered now."""
        fresh = place / "fresh"
        fresh.write_text(json.dumps(discovered(cluster, namespace)))
        fresh.rename(place / "targets.json")
        return query(address, expression)

    with prometheus(place, monitor, rules) as address:
        (found,) = until(lambda: asked("up == 1"), len, "the pod is scraped")
        assert found.items() >= {"job": "jaxlaunch", "namespace": namespace, "run": "mine"}.items()
        assert found["pod"].startswith("mine-w-0-0-")
        series = until(
            lambda: asked("jaxlaunch:threshold:restarts"), len, "the rules are evaluated"
        )
        assert [each["namespace"] for each in series] == [namespace]
        assert launcher(cluster, folder, "delete", "mine", "--yes", "-n", namespace).returncode == 0
        until(lambda: asked("up"), lambda left: not left, "the pod is no longer a target")
        assert asked('ALERTS{alertstate="firing"}') == []
