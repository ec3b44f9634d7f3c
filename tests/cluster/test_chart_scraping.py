"""The chart's PodMonitor and rules in a real Prometheus: it finds pods, rules see their labels."""

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
from tests.cluster.command import run_launcher, write_project
from tests.cluster.waiting import wait_until
from tests.helm.charts import Helm, Object, find_object

pytestmark = pytest.mark.extended

META = "__meta_kubernetes_"
PROGRAM = "import time; time.sleep(600)"
Series = list[dict[str, str]]


def discovery_label(name: str) -> str:
    """Return the discovery label of a pod's label."""
    return f"{META}pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"


def discover_ports(cluster: Access, namespace: str) -> list[dict[str, Any]]:
    """Return the ports of the pods as Prometheus's discovery does, which Debian's lacks."""
    return [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {
                f"{META}namespace": namespace,
                f"{META}pod_name": pod["metadata"]["name"],
                f"{META}pod_phase": pod["status"]["phase"],
                f"{META}pod_container_port_name": port["name"],
                **{
                    discovery_label(name): value
                    for name, value in pod["metadata"]["labels"].items()
                },
            },
        }
        for pod in cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
        for port in pod["spec"]["containers"][0]["ports"]
        if "podIP" in pod["status"]
    ]


def scrape_config(monitor: Object) -> dict[str, Any]:
    """Return the scrape configuration that the operator makes of a PodMonitor."""
    spec = monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    keep_rules = [
        {"source_labels": [discovery_label(name)], "regex": value, "action": "keep"}
        for name, value in spec["selector"]["matchLabels"].items()
    ]
    keep_rules.append(
        {
            "source_labels": [f"{META}pod_container_port_name"],
            "regex": endpoint["port"],
            "action": "keep",
        }
    )
    port_rule = {
        "namespace": f"{META}namespace",
        "pod": f"{META}pod_name",
        "job": discovery_label(spec["jobLabel"]),
    }
    discovered_labels = [
        {"source_labels": [source], "target_label": target} for target, source in port_rule.items()
    ]
    monitor_rules = [
        {
            re.sub(r"([A-Z])", lambda upper: f"_{upper[1].lower()}", key): value
            for key, value in rule.items()
        }
        for rule in endpoint["relabelings"]
    ]
    return {
        "job_name": f"podMonitor/{monitor['metadata']['name']}/0",
        "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}],
        "relabel_configs": [*keep_rules, *discovered_labels, *monitor_rules],
    }


@contextmanager
def run_prometheus(folder: Path, monitor: Object, rules: Object) -> Iterator[str]:
    """Yield the address of a Prometheus that scrapes and evaluates each second."""
    program = needs.tool("prometheus", package="the Debian package prometheus")
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {
        "global": every,
        "rule_files": ["rules.yaml"],
        "scrape_configs": [scrape_config(monitor)],
    }
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


def query_labels(address: str, expression: str) -> Series:
    """Return the labels of a query's series, or none while Prometheus starts."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            result = json.load(answer)["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return []
    return [series["metric"] for series in result]


def test_prometheus_finds_the_pods_of_a_job_for_the_rules(
    helm: Helm, cluster: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    if not cluster.is_ours:
        pytest.skip("the pods of another cluster cannot be reached from here")
    manifests = helm.render(
        {"podMonitor": {"enabled": True}, "alerts": {"enabled": True}}, "team", namespace
    )
    monitor, rules = find_object(manifests, "PodMonitor"), find_object(manifests, "PrometheusRule")
    folder = write_project(
        tmp_path / "job", namespace, {}, image=base_image, command=["python", "-c", PROGRAM]
    )
    assert run_launcher(cluster, folder, "submit", "job.yaml").returncode == 0
    place = tmp_path / "prometheus"
    place.mkdir()

    def query_now(expression: str) -> Series:
        """Query with the pods that are discovered now."""
        fresh = place / "fresh"
        fresh.write_text(json.dumps(discover_ports(cluster, namespace)))
        fresh.rename(place / "targets.json")
        return query_labels(address, expression)

    with run_prometheus(place, monitor, rules) as address:
        (labels,) = wait_until(lambda: query_now("up == 1"), len, "the pod is scraped")
        assert labels.items() >= {"job": "jaxlaunch", "namespace": namespace, "run": "mine"}.items()
        assert labels["pod"].startswith("mine-w-0-0-")
        series = wait_until(
            lambda: query_now("jaxlaunch:threshold:restarts"), len, "the rules are evaluated"
        )
        assert [labels_of_series["namespace"] for labels_of_series in series] == [namespace]
        assert (
            run_launcher(cluster, folder, "delete", "mine", "--yes", "-n", namespace).returncode
            == 0
        )
        wait_until(lambda: query_now("up"), lambda left: not left, "the pod is no longer a target")
        assert query_now('ALERTS{alertstate="firing"}') == []
