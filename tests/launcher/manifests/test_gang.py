"""Gang scheduling by Kubernetes itself: the group of a job's pods, in each version of the API."""

from __future__ import annotations

from typing import Any

import pytest

from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.kubernetes.kinds import GANG_KINDS, manifest_kind
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.manifests.jobset import prepare

JOB = "name: lm\nimage: a/b:1\naccelerator: {type: cpu}\ncommand: [a]\n"
TRAIN = (
    "train: {task: classify, mesh: {dp: -1}, batch: 96, steps: 9, model: {kind: mlp}, "
    "data: {source: synthetic}, checkpoint: {path: gs://team/run}}\n"
)


def render(text: str, version: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the spec of the pods, and the gang's objects."""
    text_of_defaults = "{}" if version is None else f"gang_scheduling: {version}"
    ready = prepare(load.read_job_text(text), defaults.parse_defaults(text_of_defaults))
    gangs = [
        manifest for manifest in ready.manifests if manifest_kind(manifest) in GANG_KINDS.values()
    ]
    spec: dict[str, Any] = pod_template(ready.manifests[0])["spec"]
    return spec, gangs


def test_workload_of_kubernetes_1_35() -> None:
    spec, (workload,) = render(JOB + "hosts: 4\n", "v1alpha1")
    group = workload["spec"]["podGroups"][0]
    assert spec["workloadRef"] == {"name": "lm", "podGroup": group["name"]}
    assert (workload["apiVersion"], workload["kind"]) == ("scheduling.k8s.io/v1alpha1", "Workload")
    assert workload["metadata"]["name"] == "lm"
    assert group["policy"] == {"gang": {"minCount": 4}}
    owner = {"apiGroup": "jobset.x-k8s.io", "kind": "JobSet", "name": "lm"}
    assert workload["spec"]["controllerRef"] == owner


@pytest.mark.parametrize("version", ["v1alpha2", "v1beta1"])
def test_group_of_newer_kubernetes(version: str) -> None:
    spec, (group,) = render(JOB + "hosts: 4\n", version)
    assert spec["schedulingGroup"] == {"podGroupName": group["metadata"]["name"]}
    assert (group["apiVersion"], group["kind"]) == (f"scheduling.k8s.io/{version}", "PodGroup")
    assert group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 4}}}


COUNTS = {
    "hosts: 3\nspares: 1\n": 3,
    "hosts: 2\nslices: 3\n": 6,
    "hosts: {min: 2, max: 4}\n" + TRAIN: 2,
}


@pytest.mark.parametrize("shape", COUNTS)
def test_gang_is_as_large_as_the_job_needs(shape: str) -> None:
    text = JOB.replace("command: [a]\n", "") if "train" in shape else JOB
    _, (group,) = render(text + shape, "v1beta1")
    assert group["spec"]["schedulingPolicy"]["gang"]["minCount"] == COUNTS[shape]


@pytest.mark.parametrize(("text", "version"), [(JOB, "v1beta1"), (JOB + "hosts: 2\n", None)])
def test_no_gang(text: str, version: str | None) -> None:
    spec, gangs = render(text, version)
    assert not gangs
    assert not {"workloadRef", "schedulingGroup"} & spec.keys()
