"""The chart has no warnings of Helm, describes every value, and the commands can read it."""

from __future__ import annotations

import re
import tarfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.job.defaults import (
    CacheClaim,
    CheckpointClaim,
    CheckpointUrl,
    ClusterDefaults,
    Defaults,
    Prometheus,
)
from jaxlaunch.launcher.job.schema import Rdma
from jaxlaunch.launcher.jobs import cluster_defaults
from jaxlaunch.launcher.manifests import jobset
from jaxlaunch.launcher.manifests.jobset import resolve
from tests.helm import readme, schema
from tests.helm.charts import CHART, Helm, find_object

EVERYTHING = yaml.safe_load((Path(__file__).parent / "everything.yaml").read_text())
SCHEMA = yaml.safe_load((CHART / "values.schema.json").read_text())
OLDEST = (
    yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"].strip(">=").partition("-")[0]
)
NEWEST = "1.37.0"


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["nothing", "everything"])
def test_helm_has_nothing_to_say_against_it(
    helm: Helm, values: dict[str, Any], version: str
) -> None:
    assert helm.lint(values, version) == {"total_charts_linted": 1, "messages": [], "errors": []}


def test_a_cluster_that_is_too_old_is_refused(helm: Helm) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["kubeVersion"]) == ("v2", f">={OLDEST}-0")


def test_the_archive_that_is_published_holds_all_that_the_chart_needs(
    helm: Helm, tmp_path: Path
) -> None:
    archive = helm.package(tmp_path)
    assert helm.files(EVERYTHING, chart=archive) == helm.files(EVERYTHING)
    with tarfile.open(archive) as packed:
        names = {Path(name).relative_to("launcher").parts[0] for name in packed.getnames()}
    written = {
        "Chart.yaml",
        "README.md",
        "values.yaml",
        "values.schema.json",
        "rules",
        "dashboards",
        "templates",
    }
    assert names - {".helmignore"} == written


def test_every_value_is_described() -> None:
    assert readme.find_undescribed() == []
    assert len(readme.find_described()) >= 50


# --- the defaults ---------------------------------------------------------------------------------


def defaults_of(helm: Helm, values: dict[str, Any]) -> Defaults:
    config_map = find_object(helm.render(values), "ConfigMap", cluster_defaults.CONFIG_MAP_NAME)
    assert config_map["metadata"]["namespace"] == "ns"
    return defaults.read_config_map(config_map, "the chart's").values


def test_the_commands_read_the_chart_s_defaults(helm: Helm) -> None:
    plain = defaults_of(helm, {})
    assert plain == Defaults(
        checkpoint=CheckpointClaim(claim="team-checkpoints"),
        service_account="team-jobs",
        user=defaults.DEFAULT_USER,
        prometheus=Prometheus(namespace="monitoring"),
    )
    full = defaults_of(helm, EVERYTHING)
    assert (full.image, full.queue, full.image_pull_secrets) == (
        "registry.example/train:1",
        "team",
        ["registry"],
    )
    assert full.compile_cache == CacheClaim(claim="team-compile-cache")
    assert full.nodes["h100"].node_selector == {"pool": "fast"}
    assert full.capacity["spot"].node_selector == {"spot": "true"}
    assert full.network["h100"] == Rdma(profile="rdma", resource="rdma/ib", count=8)
    assert full.prometheus.namespace == "monitoring"


def test_what_the_values_say_of_the_defaults_counts_before_what_the_chart_makes(helm: Helm) -> None:
    defaults_values = {
        "queue": "mine",
        "checkpoint": {"url": "gs://runs"},
        "service_account": "me",
        "platform": "gke",
    }
    result = defaults_of(helm, {"defaults": defaults_values, "kueue": {"enabled": True}})
    assert (result.queue, result.service_account, result.platform) == ("mine", "me", "gke")
    assert result.checkpoint == CheckpointUrl(url="gs://runs")


def test_the_first_job_of_readme_and_notes_is_whole_with_the_chart_s_defaults(helm: Helm) -> None:
    values = {"defaults": {"image": "i"}}
    chart_defaults = defaults_of(helm, values)
    block = re.search(r"```yaml\n(.*?)```", readme.make_readme(), re.DOTALL)
    notes = re.search(r"job\.yaml:\n\n(.*?)\n\n", helm.files(values)["NOTES.txt"], re.DOTALL)
    assert block is not None and notes is not None
    first, second = (load.parse_job(textwrap.dedent(text)) for text in (block[1], notes[1]))
    assert first == second
    assert [
        item["kind"] for item in jobset.render(resolve(first, ClusterDefaults(chart_defaults)))
    ] == [
        "JobSet",
        "NetworkPolicy",
    ]


def test_a_namespace_can_do_without_defaults_of_its_own(helm: Helm) -> None:
    assert "ConfigMap" not in {
        item["kind"] for item in helm.render({"defaults": {"enabled": False}})
    }


def test_the_values_of_the_defaults_are_the_keys_of_the_defaults() -> None:
    text = schema.PATH.read_text(encoding="utf-8")
    assert text == schema.update_schema(text)


def test_the_schema_has_the_very_keys_of_the_values() -> None:
    def keys(values: Any, schema: dict[str, Any], path: str = "") -> list[str]:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        properties = schema.get("properties")
        if not isinstance(values, dict) or not values or properties is None:
            return []
        wrong = [f"{path}{key}" for key in properties.keys() ^ values.keys()]
        return wrong + [
            fault
            for key in properties.keys() & values.keys()
            for fault in keys(values[key], properties[key], f"{path}{key}.")
        ]

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(keys(values, SCHEMA)) <= {
        "global",
        "test.resources",
        "kueue.preemption.reclaimWithinCohort",
        "kueue.preemption.borrowWithinCohort",
    }


def test_every_schema_of_an_object_is_closed() -> None:
    def open_ones(schema: Any, path: str) -> list[str]:
        if isinstance(schema, list):
            return [
                open_path
                for index, item in enumerate(schema)
                for open_path in open_ones(item, f"{path}[{index}]")
            ]
        if not isinstance(schema, dict):
            return []
        mine = (
            [path]
            if "properties" in schema
            and schema.get("type") == "object"
            and schema.get("additionalProperties") is not False
            else []
        )
        return mine + [
            open_path
            for key, value in schema.items()
            for open_path in open_ones(value, f"{path}.{key}")
        ]

    assert open_ones(SCHEMA, "") == []


# --- NOTES ----------------------------------------------------------------------------------------


def test_the_notes_say_what_was_left_out_and_what_stays(helm: Helm) -> None:
    notes = helm.files({})["NOTES.txt"]
    for told in (
        "kubectl label namespace ns pod-security.kubernetes.io/enforce=restricted",
        "queues (kueue.enabled): needs Kueue",
        "scraping (podMonitor.enabled)",
        "alerts (alerts.enabled)",
        "dashboards (dashboards.enabled)",
        "a web page of jobs (webDashboard.enabled)",
        "helm test: needs defaults.image or test.image",
        "It names no image",
        "The Role team-submitter has no subjects yet",
        "The ValidatingAdmissionPolicy ns.team limits what everyone",
        "kubectl delete persistentvolumeclaim/team-checkpoints --namespace ns",
    ):
        assert told in notes
    unprotected = helm.files({"admissionPolicy": {"enabled": False}})["NOTES.txt"]
    assert "admissionPolicy.enabled is false: submitters" in unprotected
    full = helm.files(EVERYTHING)["NOTES.txt"]
    assert (
        "Not installed" not in full and "no subjects" not in full and "names no image" not in full
    )
    assert "kubectl port-forward --namespace ns service/team-web 8080:80" in full
    assert "kubectl delete namespace/team-a-scratch" in full and "priority: ns.team.high" in full
