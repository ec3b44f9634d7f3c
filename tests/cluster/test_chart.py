"""The chart on a real cluster by Helm's own engine: installed, tested, changed and removed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.command import run_launcher, write_project
from tests.cluster.harness.api import RefusedError as Forbidden
from tests.cluster.releases import Release, chart_values, is_queue_active, list_objects
from tests.cluster.waiting import wait_until
from tests.compiled import QUICK_COMPILES
from tests.helm.charts import CHART, Helm, RefusedError
from tests.helm.test_chart import EVERYTHING

pytestmark = pytest.mark.extended

OPERATOR = Path(__file__).parents[1] / "fixtures" / "operator-crds.yaml"
OPERATED = "monitoring.coreos.com"
FIVE_LINES = """\
name: first
hosts: 2
accelerator: {type: cpu}
train:
  task: classify
"""


@pytest.fixture
def release(helm: Helm, cluster: Access, namespace: str) -> Iterator[Release]:
    """Return a release that is not installed yet; its cluster objects are deleted at the end."""
    release = Release(helm, cluster, namespace)
    yield release
    release.act("uninstall", ignore_not_found=True, timeout=600)


def hard_limits(cluster: Access, namespace: str) -> list[Any]:
    quotas = cluster.api.get(f"/api/v1/namespaces/{namespace}/resourcequotas")["items"]
    return [quota["spec"]["hard"] for quota in quotas]


@pytest.mark.usefixtures("steady_nodes")
def test_release_installs_upgrades_rolls_back_and_leaves_only_claims(
    cluster: Access, namespace: str, release: Release, image: str
) -> None:
    initial_objects = list_objects(cluster, namespace)
    done = release.install(
        chart_values(cluster, image, priorityClasses=[{"name": "high", "value": 10}])
    )
    assert done["status"] == "deployed"
    wait_until(lambda: is_queue_active(cluster, namespace), bool, "the queue is active")
    installed = list_objects(cluster, namespace) - initial_objects
    assert {"configmap/jaxlaunch", f"clusterqueue.kueue.x-k8s.io/{namespace}.team"} <= installed
    release.test()
    assert {"pod/team-test", "serviceaccount/team-test"} & list_objects(cluster, namespace) == set()
    release.upgrade(
        chart_values(
            cluster, image, resourceQuota={"requests.cpu": "2"}, networkPolicy={"enabled": False}
        )
    )
    changed = list_objects(cluster, namespace)
    assert hard_limits(cluster, namespace) == [{"requests.cpu": "2"}]
    assert "resourcequota/team-quota" in changed
    assert not {
        object_name
        for object_name in changed
        if "networkpolicy" in object_name or "priorityclass" in object_name
    }
    release.act("rollback", version=1, timeout=600)
    assert without_helm_records(
        list_objects(cluster, namespace) - initial_objects
    ) == without_helm_records(installed)
    assert [revision["revision"] for revision in release.act("history")] == [1, 2, 3]
    release.test()
    release.uninstall()
    remaining = wait_until(
        lambda: list_objects(cluster, namespace) - initial_objects,
        lambda seen: len(seen) <= 2,
        "all but the claims are gone",
    )
    assert remaining == {
        "persistentvolumeclaim/team-checkpoints",
        "persistentvolumeclaim/team-compile-cache",
    }
    assert all(
        f"kubectl delete {name} --namespace {namespace}" in done["notes"] for name in remaining
    )
    release.install(chart_values(cluster, image))  # the claims are its own again
    assert remaining <= list_objects(cluster, namespace)


def without_helm_records(names: set[str]) -> set[str]:
    """Return the names without Helm's own record of its releases."""
    return {name for name in names if not name.startswith("secret/sh.helm.release")}


@pytest.mark.usefixtures("steady_nodes")
def test_helm_test_fails_without_a_right_or_the_queue(
    cluster: Access, namespace: str, release: Release, image: str
) -> None:
    release.install(chart_values(cluster, image))
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/team-submitter"
    rules = cluster.api.get(role)["rules"]
    cluster.api.merge(
        role, {"rules": [rule for rule in rules if "networkpolicies" not in rule["resources"]]}
    )
    with pytest.raises(RefusedError, match="team-test"):
        release.test()
    output = cluster.kubectl("logs", "pod/team-test", "--namespace", namespace)
    assert "get networkpolicies.networking.k8s.io" in output
    cluster.api.merge(role, {"rules": rules})
    cluster.api.delete(f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/localqueues/team")
    with pytest.raises(RefusedError, match="team-test"):
        release.test()
    assert "does not exist in namespace" in cluster.kubectl(
        "logs", "pod/team-test", "--namespace", namespace
    )


def test_five_line_job_completes_with_the_cluster_defaults(
    cluster: Access, namespace: str, release: Release, image: str, tmp_path: Path
) -> None:
    volume = preparations.make_volume(cluster, namespace, "team-checkpoints")
    cache = preparations.make_volume(cluster, namespace, "team-compile-cache")
    user = f"alice-{namespace}"
    release.install(
        chart_values(cluster, image, rbac={"submitters": [{"kind": "User", "name": user}]})
    )
    theirs = preparations.impersonate(cluster, user, namespace, tmp_path)
    (tmp_path / "job.yaml").write_text(FIVE_LINES)
    # A program that compiles quickly is kept too.
    env = QUICK_COMPILES | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    quick = [f"env.{name}={value}" for name, value in env.items()]
    done = run_launcher(
        theirs, tmp_path, "submit", "job.yaml", "train.steps=20", *quick, "--wait", "--follow"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    jobset = cluster.api.get(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets/first")
    assert jobset["status"]["terminalState"] == "Completed"
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert (pod["containers"][0]["image"], pod["serviceAccountName"]) == (image, "team-jobs")
    (workload,) = cluster.api.get(f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/workloads")[
        "items"
    ]
    assert workload["spec"]["queueName"] == "team"
    output = cluster.kubectl(
        "get", "events", "-n", namespace, "-o", "jsonpath={range .items[*]}{.message}{'\\n'}{end}"
    )
    assert f"Admitted by ClusterQueue {namespace}.team" in output
    assert (volume / "first" / "20").is_dir()
    assert [path for path in cache.iterdir() if path.name.endswith("-cache")], list(cache.iterdir())


def test_job_without_resources_uses_the_quota_with_the_default_resources(
    cluster: Access, namespace: str, release: Release, base_image: str, tmp_path: Path
) -> None:
    release.install(chart_values(cluster))
    folder = write_project(
        tmp_path, namespace, {}, image=base_image, hosts=5, resources={}, command=["true"]
    )
    assert run_launcher(cluster, folder, "submit", "job.yaml").returncode == 0
    output = wait_until(
        lambda: run_launcher(cluster, folder, "explain", "mine", "-n", namespace).stdout,
        lambda seen: "can never admit it" in seen,
        "the queue's answer",
    )
    assert "it requests 250m cpu" in output


def test_submitter_can_watch_read_stop_and_delete_their_job(
    cluster: Access, namespace: str, release: Release, base_image: str, tmp_path: Path
) -> None:
    preparations.make_volume(cluster, namespace, "team-checkpoints")
    user, eve = f"alice-{namespace}", f"eve-{namespace}"
    people = {
        "submitters": [{"kind": "User", "name": user}],
        "viewers": [{"kind": "User", "name": eve}],
    }
    release.install(
        chart_values(cluster, rbac=people, priorityClasses=[{"name": "high", "value": 10}])
    )
    theirs = preparations.impersonate(cluster, user, namespace, tmp_path)
    hers = preparations.impersonate(cluster, eve, namespace, tmp_path)
    program = "import time; print('running', flush=True); time.sleep(600)"
    urgent = {"priority": f"{namespace}.team.high"}
    write_project(
        tmp_path, namespace, {}, image=base_image, command=["python", "-c", program], **urgent
    )

    def run(whose: Access, *arguments: str, code: int = 0) -> str:
        done = run_launcher(whose, tmp_path, *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "Missing RBAC permissions in namespace" in run(hers, "submit", "job.yaml", code=3)
    run(theirs, "submit", "job.yaml")
    for whose in (theirs, hers):
        wait_until(
            lambda whose=whose: run(whose, "list"),
            lambda seen: re.search(r"^mine +Running ", seen, re.M),
            "it runs",
        )
        run(whose, "status", "mine")
        run(whose, "explain", "mine")
        wait_until(
            lambda whose=whose: run(whose, "logs", "mine"),
            lambda seen: "running" in seen,
            "it says so",
        )
    run(hers, "stop", "mine", code=3)
    run(hers, "delete", "mine", "--yes", code=3)
    run(theirs, "stop", "mine")
    run(theirs, "delete", "mine", "--yes")


def test_helm_applies_on_the_server_and_refuses_unknown_fields(
    cluster: Access, namespace: str, release: Release, tmp_path: Path
) -> None:
    release.install(chart_values(cluster))
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/team-viewer"
    assert {field["operation"] for field in cluster.api.get(role)["metadata"]["managedFields"]} == {
        "Apply"
    }
    broken = shutil.copytree(CHART, tmp_path / "launcher")
    template = broken / "templates" / "network" / "networkpolicy.yaml"
    template.write_text(template.read_text().replace("policyTypes:", "policyKinds:"))
    with pytest.raises(RefusedError, match="policyKinds"):
        release.act("upgrade", chart=str(broken), values=chart_values(cluster))


@pytest.fixture
def operator_kinds(cluster: Access) -> Iterator[None]:
    """Serve the kinds of the Prometheus operator, unless the user's cluster has them."""
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    names = {definition["metadata"]["name"] for definition in cluster.api.get(definitions)["items"]}
    missing = [
        definition
        for definition in yaml.safe_load_all(OPERATOR.read_text())
        if definition["metadata"]["name"] not in names
    ]
    for definition in missing:
        cluster.api.create(definitions, definition)
    wait_until(
        lambda: [is_served(cluster, definition) for definition in missing],
        all,
        "the operator's kinds are served",
    )
    yield
    for definition in missing:
        cluster.api.delete(f"{definitions}/{definition['metadata']['name']}")
    if missing:
        wait_until(
            lambda: cluster.api.get("/apis")["groups"],
            lambda seen: OPERATED not in str(seen),
            f"{OPERATED} is gone",
        )


def is_served(cluster: Access, definition: dict[str, Any]) -> bool:
    try:
        cluster.api.get(f"/apis/{OPERATED}/v1/{definition['spec']['names']['plural']}")
    except Forbidden:
        return False
    return True


def test_server_admits_everything_that_the_chart_can_render(
    helm: Helm, cluster: Access, namespace: str, release: Release, operator_kinds: None
) -> None:
    initial_objects, scratch = list_objects(cluster, namespace), f"{namespace}-scratch"
    values = {**EVERYTHING, "namespaces": [scratch]}
    release.install(values)
    try:
        installed = list_objects(cluster, namespace) - initial_objects
        hooks = {"Pod", "Namespace"}
        rendered_kinds = {
            manifest["kind"].lower()
            for manifest in helm.render(values, "team", namespace)
            if manifest["kind"] not in hooks
        }
        installed_kinds = {name.partition("/")[0].partition(".")[0] for name in installed}
        assert rendered_kinds <= installed_kinds
        labels = cluster.api.get(f"/api/v1/namespaces/{scratch}")["metadata"]["labels"]
        assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
        privileged = {"name": "x", "image": "i", "securityContext": {"privileged": True}}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x"},
            "spec": {"containers": [privileged]},
        }
        with pytest.raises(Forbidden, match='violates PodSecurity "restricted:latest"'):
            cluster.api.create(f"/api/v1/namespaces/{scratch}/pods?dryRun=All", pod)
        release.uninstall()
        assert cluster.api.get(f"/api/v1/namespaces/{scratch}")["status"]["phase"] == "Active"
    finally:
        cluster.api.delete(f"/api/v1/namespaces/{scratch}")


def test_monitoring_without_the_operator_is_refused_before_any_change(
    cluster: Access, namespace: str, release: Release
) -> None:
    initial_objects = list_objects(cluster, namespace)
    with pytest.raises(RefusedError, match="PodMonitor"):
        release.install(chart_values(cluster, podMonitor={"enabled": True}))
    assert without_helm_records(list_objects(cluster, namespace)) == initial_objects


def test_releases_in_one_and_in_two_namespaces_do_not_collide(
    helm: Helm, cluster: Access, namespace: str, release: Release
) -> None:
    other = preparations.make_namespace(cluster, "restricted")
    elsewhere, beside = Release(helm, cluster, other), Release(helm, cluster, namespace, "second")
    try:
        release.install(chart_values(cluster))
        elsewhere.install(chart_values(cluster))
        with pytest.raises(RefusedError, match='"jaxlaunch" .*exists'):
            beside.install(chart_values(cluster))
        assert not [
            name for name in list_objects(cluster, namespace) if name.endswith("/second-jobs")
        ]
        beside.install(chart_values(cluster, defaults={"enabled": False}))
        first, second = (
            {name for name in list_objects(cluster, namespace) if f"{release_name}" in name}
            for release_name in ("team", "second")
        )
        assert len(first) == len(second) and not first & second
        initial_objects = {
            name
            for name in without_helm_records(list_objects(cluster, namespace))
            if "team" in name
        }
        beside.uninstall()
        assert {
            name
            for name in without_helm_records(list_objects(cluster, namespace))
            if "team" in name
        } == initial_objects
        for release_namespace, name in ((namespace, "team"), (other, "team")):
            wait_until(
                lambda namespace=release_namespace, name=name: is_queue_active(
                    cluster, namespace, name
                ),
                bool,
                f"queue of {release_namespace}",
            )
    finally:
        elsewhere.act("uninstall", ignore_not_found=True)
        beside.act("uninstall", ignore_not_found=True)
        preparations.remove_namespace(cluster, other)
