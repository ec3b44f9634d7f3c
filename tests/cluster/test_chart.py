"""The chart on a real cluster, by Helm's own engine: installed, tested, changed, taken back, removed."""

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
from tests.cluster.command import launcher, project
from tests.cluster.harness.api import Refused as Forbidden
from tests.cluster.releases import Release, everything, queue_is_active, values
from tests.cluster.waiting import until
from tests.compiled import QUICK_COMPILES
from tests.helm.charts import CHART, Helm, Refused
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
    """A release that is not installed yet; what is outside its namespace goes at the end."""
    found = Release(helm, cluster, namespace)
    yield found
    found.act("uninstall", ignore_not_found=True, timeout=600)


def limits(cluster: Access, namespace: str) -> list[Any]:
    found = cluster.api.get(f"/api/v1/namespaces/{namespace}/resourcequotas")["items"]
    return [each["spec"]["hard"] for each in found]


@pytest.mark.usefixtures("steady_nodes")
def test_a_release_comes_changes_goes_back_and_leaves_only_its_claims(
    cluster: Access, namespace: str, release: Release, image: str
) -> None:
    before = everything(cluster, namespace)
    done = release.install(values(cluster, image, priorityClasses=[{"name": "high", "value": 10}]))
    assert done["status"] == "deployed"
    until(lambda: queue_is_active(cluster, namespace), bool, "the queue is active")
    installed = everything(cluster, namespace) - before
    assert {"configmap/jaxlaunch", f"clusterqueue.kueue.x-k8s.io/{namespace}.team"} <= installed
    release.test()
    assert {"pod/team-test", "serviceaccount/team-test"} & everything(cluster, namespace) == set()
    release.upgrade(
        values(
            cluster, image, resourceQuota={"requests.cpu": "2"}, networkPolicy={"enabled": False}
        )
    )
    changed = everything(cluster, namespace)
    assert limits(cluster, namespace) == [{"requests.cpu": "2"}]
    assert "resourcequota/team-quota" in changed
    assert not {one for one in changed if "networkpolicy" in one or "priorityclass" in one}
    release.act("rollback", version=1, timeout=600)
    assert ours(everything(cluster, namespace) - before) == ours(installed)
    assert [each["revision"] for each in release.act("history")] == [1, 2, 3]
    release.test()
    release.uninstall()
    left = until(
        lambda: everything(cluster, namespace) - before,
        lambda seen: len(seen) <= 2,
        "all but the claims are gone",
    )
    assert left == {
        "persistentvolumeclaim/team-checkpoints",
        "persistentvolumeclaim/team-compile-cache",
    }
    assert all(f"kubectl delete {name} --namespace {namespace}" in done["notes"] for name in left)
    release.install(values(cluster, image))  # the claims are its own again
    assert left <= everything(cluster, namespace)


def ours(names: set[str]) -> set[str]:
    """Without Helm's own record of its releases."""
    return {name for name in names if not name.startswith("secret/sh.helm.release")}


@pytest.mark.usefixtures("steady_nodes")
def test_helm_s_test_fails_where_a_right_or_the_queue_is_missing(
    cluster: Access, namespace: str, release: Release, image: str
) -> None:
    release.install(values(cluster, image))
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/team-submitter"
    rules = cluster.api.get(role)["rules"]
    cluster.api.merge(
        role, {"rules": [rule for rule in rules if "networkpolicies" not in rule["resources"]]}
    )
    with pytest.raises(Refused, match="team-test"):
        release.test()
    said = cluster.kubectl("logs", "pod/team-test", "--namespace", namespace)
    assert "get networkpolicies.networking.k8s.io" in said
    cluster.api.merge(role, {"rules": rules})
    cluster.api.delete(f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/localqueues/team")
    with pytest.raises(Refused, match="team-test"):
        release.test()
    assert "does not exist in namespace" in cluster.kubectl(
        "logs", "pod/team-test", "--namespace", namespace
    )


def test_five_lines_run_to_completion_through_the_cluster_defaults_queue_image_and_volumes(
    cluster: Access, namespace: str, release: Release, image: str, tmp_path: Path
) -> None:
    kept = preparations.make_volume(cluster, namespace, "team-checkpoints")
    cache = preparations.make_volume(cluster, namespace, "team-compile-cache")
    user = f"alice-{namespace}"
    release.install(values(cluster, image, rbac={"submitters": [{"kind": "User", "name": user}]}))
    theirs = preparations.impersonating(cluster, user, namespace, tmp_path)
    (tmp_path / "job.yaml").write_text(FIVE_LINES)
    # A program that compiles quickly is kept too.
    env = QUICK_COMPILES | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    quick = [f"env.{name}={value}" for name, value in env.items()]
    done = launcher(
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
    told = cluster.kubectl(
        "get", "events", "-n", namespace, "-o", "jsonpath={range .items[*]}{.message}{'\\n'}{end}"
    )
    assert f"Admitted by ClusterQueue {namespace}.team" in told
    assert (kept / "first" / "20").is_dir()
    assert [path for path in cache.iterdir() if path.name.endswith("-cache")], list(cache.iterdir())


def test_a_job_that_names_no_resources_counts_against_the_queue_with_the_namespace_s_defaults(
    cluster: Access, namespace: str, release: Release, base_image: str, tmp_path: Path
) -> None:
    release.install(values(cluster))
    folder = project(
        tmp_path, namespace, {}, image=base_image, hosts=5, resources={}, command=["true"]
    )
    assert launcher(cluster, folder, "submit", "job.yaml").returncode == 0
    told = until(
        lambda: launcher(cluster, folder, "explain", "mine", "-n", namespace).stdout,
        lambda seen: "can never admit it" in seen,
        "the queue's answer",
    )
    assert "it requests 250m cpu" in told


def test_a_submitter_can_watch_read_stop_and_delete_their_job(
    cluster: Access, namespace: str, release: Release, base_image: str, tmp_path: Path
) -> None:
    preparations.make_volume(cluster, namespace, "team-checkpoints")
    user, eve = f"alice-{namespace}", f"eve-{namespace}"
    people = {
        "submitters": [{"kind": "User", "name": user}],
        "viewers": [{"kind": "User", "name": eve}],
    }
    release.install(values(cluster, rbac=people, priorityClasses=[{"name": "high", "value": 10}]))
    theirs = preparations.impersonating(cluster, user, namespace, tmp_path)
    hers = preparations.impersonating(cluster, eve, namespace, tmp_path)
    program = "import time; print('running', flush=True); time.sleep(600)"
    urgent = {"priority": f"{namespace}.team.high"}
    project(tmp_path, namespace, {}, image=base_image, command=["python", "-c", program], **urgent)

    def run(whose: Access, *arguments: str, code: int = 0) -> str:
        done = launcher(whose, tmp_path, *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "Missing RBAC permissions in namespace" in run(hers, "submit", "job.yaml", code=3)
    run(theirs, "submit", "job.yaml")
    for whose in (theirs, hers):
        until(
            lambda whose=whose: run(whose, "list"),
            lambda seen: re.search(r"^mine +Running ", seen, re.M),
            "it runs",
        )
        run(whose, "status", "mine")
        run(whose, "explain", "mine")
        until(
            lambda whose=whose: run(whose, "logs", "mine"),
            lambda seen: "running" in seen,
            "it says so",
        )
    run(hers, "stop", "mine", code=3)
    run(hers, "delete", "mine", "--yes", code=3)
    run(theirs, "stop", "mine")
    run(theirs, "delete", "mine", "--yes")


def test_helm_applies_on_the_server_s_side_and_an_unknown_field_is_refused(
    cluster: Access, namespace: str, release: Release, tmp_path: Path
) -> None:
    release.install(values(cluster))
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/team-viewer"
    assert {each["operation"] for each in cluster.api.get(role)["metadata"]["managedFields"]} == {
        "Apply"
    }
    broken = shutil.copytree(CHART, tmp_path / "launcher")
    template = broken / "templates" / "network" / "networkpolicy.yaml"
    template.write_text(template.read_text().replace("policyTypes:", "policyKinds:"))
    with pytest.raises(Refused, match="policyKinds"):
        release.act("upgrade", chart=str(broken), values=values(cluster))


@pytest.fixture
def operator(cluster: Access) -> Iterator[None]:
    """The kinds of the Prometheus operator, served while it lasts; a cluster of the user's may have them already."""
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    names = {each["metadata"]["name"] for each in cluster.api.get(definitions)["items"]}
    missing = [
        each
        for each in yaml.safe_load_all(OPERATOR.read_text())
        if each["metadata"]["name"] not in names
    ]
    for each in missing:
        cluster.api.create(definitions, each)
    until(
        lambda: [serves(cluster, each) for each in missing], all, "the operator's kinds are served"
    )
    yield
    for each in missing:
        cluster.api.delete(f"{definitions}/{each['metadata']['name']}")
    if missing:
        until(
            lambda: cluster.api.get("/apis")["groups"],
            lambda seen: OPERATED not in str(seen),
            f"{OPERATED} is gone",
        )


def serves(cluster: Access, definition: dict[str, Any]) -> bool:
    try:
        cluster.api.get(f"/apis/{OPERATED}/v1/{definition['spec']['names']['plural']}")
    except Forbidden:
        return False
    return True


def test_everything_that_the_chart_can_make_is_taken_by_the_server(
    helm: Helm, cluster: Access, namespace: str, release: Release, operator: None
) -> None:
    before, scratch = everything(cluster, namespace), f"{namespace}-scratch"
    made = {**EVERYTHING, "namespaces": [scratch]}
    release.install(made)
    try:
        installed = everything(cluster, namespace) - before
        hooks = {"Pod", "Namespace"}
        wanted = {
            each["kind"].lower()
            for each in helm.render(made, "team", namespace)
            if each["kind"] not in hooks
        }
        found = {name.partition("/")[0].partition(".")[0] for name in installed}
        assert wanted <= found
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


def test_without_the_operator_s_kinds_what_needs_them_is_refused_before_anything_is_made(
    cluster: Access, namespace: str, release: Release
) -> None:
    before = everything(cluster, namespace)
    with pytest.raises(Refused, match="PodMonitor"):
        release.install(values(cluster, podMonitor={"enabled": True}))
    assert ours(everything(cluster, namespace)) == before


def test_two_releases_in_two_namespaces_and_two_in_one_do_not_collide(
    helm: Helm, cluster: Access, namespace: str, release: Release
) -> None:
    other = preparations.make_namespace(cluster, "restricted")
    elsewhere, beside = Release(helm, cluster, other), Release(helm, cluster, namespace, "second")
    try:
        release.install(values(cluster))
        elsewhere.install(values(cluster))
        with pytest.raises(Refused, match='"jaxlaunch" .*exists'):
            beside.install(values(cluster))
        assert not [
            name for name in everything(cluster, namespace) if name.endswith("/second-jobs")
        ]
        beside.install(values(cluster, defaults={"enabled": False}))
        first, second = (
            {name for name in everything(cluster, namespace) if f"{own}" in name}
            for own in ("team", "second")
        )
        assert len(first) == len(second) and not first & second
        before = {name for name in ours(everything(cluster, namespace)) if "team" in name}
        beside.uninstall()
        assert {name for name in ours(everything(cluster, namespace)) if "team" in name} == before
        for where, name in ((namespace, "team"), (other, "team")):
            until(
                lambda where=where, name=name: queue_is_active(cluster, where, name),
                bool,
                f"queue of {where}",
            )
    finally:
        elsewhere.act("uninstall", ignore_not_found=True)
        beside.act("uninstall", ignore_not_found=True)
        preparations.remove_namespace(cluster, other)
