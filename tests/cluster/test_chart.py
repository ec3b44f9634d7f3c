"""The chart on a real cluster, by Helm's own engine: installed, tested, changed, taken back, removed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.command import launcher, project
from tests.cluster.releases import Release, everything, queue_is_active, values
from tests.cluster.waiting import until
from tests.helm.charts import Helm, Refused

FIVE_LINES = """\
name: first
hosts: 2
accelerator: {type: cpu}
train:
  task: trainer.tasks.classify:Classify
"""


@pytest.fixture
def release(helm: Helm, cluster: Access, namespace: str) -> Iterator[Release]:
    """A release that is not installed yet; what is outside its namespace goes at the end."""
    found = Release(helm, cluster, namespace)
    yield found
    found.act("uninstall", ignore_not_found=True, timeout=60)


def limits(cluster: Access, namespace: str) -> list[Any]:
    found = cluster.api.get(f"/api/v1/namespaces/{namespace}/resourcequotas")["items"]
    return [each["spec"]["hard"] for each in found]


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
    release.upgrade(values(cluster, image, resourceQuota={"requests.cpu": "2"}, networkPolicy={"enabled": False}))
    changed = everything(cluster, namespace)
    assert limits(cluster, namespace) == [{"requests.cpu": "2"}]
    assert "resourcequota/team-quota" in changed
    assert not {one for one in changed if "networkpolicies" in one or "priorityclass" in one}
    release.act("rollback", version=1, timeout=60)
    assert ours(everything(cluster, namespace) - before) == ours(installed)
    assert [each["revision"] for each in release.act("history")] == [1, 2, 3]
    release.test()
    release.uninstall()
    left = until(
        lambda: everything(cluster, namespace) - before, lambda seen: len(seen) <= 2, "all but the claims are gone"
    )
    assert left == {"persistentvolumeclaim/team-checkpoints", "persistentvolumeclaim/team-compile-cache"}
    assert all(f"kubectl delete {name} --namespace {namespace}" in done["notes"] for name in left)


def ours(names: set[str]) -> set[str]:
    """Without Helm's own record of its releases."""
    return {name for name in names if not name.startswith("secret/sh.helm.release")}


def test_helm_s_test_fails_where_a_right_or_the_queue_is_missing(
    cluster: Access, namespace: str, release: Release, image: str
) -> None:
    release.install(values(cluster, image))
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/team-submitter"
    rules = cluster.api.get(role)["rules"]
    cluster.api.merge(role, {"rules": [rule for rule in rules if "networkpolicies" not in rule["resources"]]})
    with pytest.raises(Refused, match="team-test"):
        release.test()
    said = cluster.kubectl("logs", "pod/team-test", "--namespace", namespace)
    assert "you may not: get networkpolicies" in said
    cluster.api.merge(role, {"rules": rules})
    cluster.api.delete(f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/localqueues/team")
    with pytest.raises(Refused, match="team-test"):
        release.test()
    assert "has no such LocalQueue" in cluster.kubectl("logs", "pod/team-test", "--namespace", namespace)


def test_five_lines_run_to_completion_through_the_profile_s_queue_image_and_volumes(
    cluster: Access, namespace: str, release: Release, image: str, tmp_path: Path
) -> None:
    kept = preparations.make_volume(cluster, namespace, "team-checkpoints")
    cache = preparations.make_volume(cluster, namespace, "team-compile-cache")
    user = f"alice-{namespace}"
    release.install(values(cluster, image, rbac={"submitters": [{"kind": "User", "name": user}]}))
    theirs = preparations.impersonating(cluster, user, namespace, tmp_path)
    (tmp_path / "job.yaml").write_text(FIVE_LINES)
    done = launcher(theirs, tmp_path, "submit", "job.yaml", "--wait", "--follow")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    jobset = cluster.api.get(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets/first")
    assert jobset["status"]["terminalState"] == "Completed"
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert (pod["containers"][0]["image"], pod["serviceAccountName"]) == (image, "team-jobs")
    (workload,) = cluster.api.get(f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/workloads")["items"]
    assert workload["spec"]["queueName"] == "team"
    told = cluster.kubectl("get", "events", "-n", namespace, "-o", "jsonpath={range .items[*]}{.message}{'\\n'}{end}")
    assert f"Admitted by ClusterQueue {namespace}.team" in told
    assert (kept / "first" / "1000").is_dir()
    assert [path for path in cache.iterdir() if path.name.endswith("-cache")], list(cache.iterdir())


def test_a_submitter_can_watch_read_stop_and_delete_their_job(
    cluster: Access, namespace: str, release: Release, base_image: str, tmp_path: Path
) -> None:
    preparations.make_volume(cluster, namespace, "team-checkpoints")
    user, eve = f"alice-{namespace}", f"eve-{namespace}"
    people = {"submitters": [{"kind": "User", "name": user}], "viewers": [{"kind": "User", "name": eve}]}
    release.install(values(cluster, rbac=people))
    theirs = preparations.impersonating(cluster, user, namespace, tmp_path)
    hers = preparations.impersonating(cluster, eve, namespace, tmp_path)
    program = "import time; print('running', flush=True); time.sleep(600)"
    project(tmp_path, namespace, {}, image=base_image, command=["python", "-c", program])

    def run(whose: Access, *arguments: str, code: int = 0) -> str:
        done = launcher(whose, tmp_path, *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "You may not do this in namespace" in run(hers, "submit", "job.yaml", code=3)
    run(theirs, "submit", "job.yaml")
    for whose in (theirs, hers):
        until(lambda whose=whose: run(whose, "list"), lambda seen: re.search(r"^mine +Running ", seen, re.M), "it runs")
        run(whose, "status", "mine")
        run(whose, "explain", "mine")
        assert "running" in run(whose, "logs", "mine")
    run(hers, "stop", "mine", code=3)
    run(hers, "delete", "mine", "--yes", code=3)
    run(theirs, "stop", "mine")
    run(theirs, "delete", "mine", "--yes")


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
        assert not [name for name in everything(cluster, namespace) if name.endswith("/second-jobs")]
        beside.install(values(cluster, profile={"enabled": False}))
        first, second = (
            {name for name in everything(cluster, namespace) if f"{own}" in name} for own in ("team", "second")
        )
        assert len(first) == len(second) and not first & second
        before = {name for name in ours(everything(cluster, namespace)) if "team" in name}
        beside.uninstall()
        assert {name for name in ours(everything(cluster, namespace)) if "team" in name} == before
        for where, name in ((namespace, "team"), (other, "team")):
            until(lambda where=where, name=name: queue_is_active(cluster, where, name), bool, f"queue of {where}")
    finally:
        elsewhere.act("uninstall", ignore_not_found=True)
        beside.act("uninstall", ignore_not_found=True)
        preparations.remove_namespace(cluster, other)
