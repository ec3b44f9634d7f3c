"""What a test needs in its namespace before the product comes to it: storage, a queue, a user with few rights.

What is not in the namespace carries its name as a label, and is deleted with it.
"""

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.access import Access
from tests.cluster.harness.places import VOLUMES
from tests.cluster.waiting import until

OWNER = "jaxlaunch.test/namespace"
SHARED = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
KUEUE = "kueue.x-k8s.io/v1beta2"
# Where objects outside namespaces are, which these functions make.
OUTSIDE = (
    "/api/v1/persistentvolumes",
    *(f"/apis/storage.k8s.io/v1/{plural}" for plural in ("storageclasses", "csidrivers")),
    *(
        f"/apis/{KUEUE}/{plural}"
        for plural in ("clusterqueues", "resourceflavors", "workloadpriorityclasses")
    ),
)


def make_namespace(cluster: Access, level: str) -> str:
    """A fresh namespace that enforces this Pod Security level, ready for pods."""
    name = f"test-{secrets.token_hex(4)}"
    labels = {"pod-security.kubernetes.io/enforce": level}
    cluster.api.create(
        "/api/v1/namespaces",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
    )
    # Before its default service account exists, every pod is refused.
    accounts = f"/api/v1/namespaces/{name}/serviceaccounts"
    until(
        lambda: cluster.api.get(accounts),
        lambda seen: seen["items"],
        f"a service account in {name}",
    )
    return name


def remove_namespace(cluster: Access, name: str) -> None:
    """Begins to delete all of it, the pods at once: they would go on using the node for their grace period.

    The jobs first: a Job that is there keeps pods that ended, and with them the namespace.
    """
    inside = f"/api/v1/namespaces/{name}"
    jobs = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{name}/jobsets"
    outside = (f"{path}?labelSelector={OWNER.replace('/', '%2F')}%3D{name}" for path in OUTSIDE)
    cluster.api.delete(jobs, inside, f"{inside}/pods?gracePeriodSeconds=1", *outside)


def make_volume(
    cluster: Access, namespace: str, name: str = "checkpoints", size: str = "1Gi"
) -> Path:
    """A ReadWriteMany volume that waits for this claim; gives the folder of the node that is behind it, where any user
    may write."""
    if not cluster.is_ours:
        pytest.skip(
            "the volume is a folder of this machine, which is no node of the cluster that "
            "KUBECONFIG names"
        )
    folder = VOLUMES / namespace / name
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    volume = {
        "capacity": {"storage": size},
        "persistentVolumeReclaimPolicy": "Retain",
        "hostPath": {"path": str(folder)},
        "claimRef": {"namespace": namespace, "name": name},
        **SHARED,
    }
    make(
        cluster,
        "/api/v1/persistentvolumes",
        "v1",
        "PersistentVolume",
        f"{namespace}-{name}",
        volume,
        namespace,
    )
    return folder


def make_claim(
    cluster: Access, namespace: str, name: str = "checkpoints", size: str = "1Gi"
) -> Path:
    """A bound ReadWriteMany claim that any user may write to; gives the folder of the node that is behind it."""
    folder = make_volume(cluster, namespace, name, size)
    claim = {
        "volumeName": f"{namespace}-{name}",
        "resources": {"requests": {"storage": size}},
        **SHARED,
    }
    claims = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    make(cluster, claims, "v1", "PersistentVolumeClaim", name, claim, namespace)
    until(
        lambda: cluster.api.get(f"{claims}/{name}"),
        lambda seen: seen["status"].get("phase") == "Bound",
        f"{name} bound",
    )
    return folder


def make_queue(
    cluster: Access,
    namespace: str,
    quota: Mapping[str, str],
    *,
    name: str = "queue",
    labels: Mapping[str, str] | None = None,
    preemption: Mapping[str, str] | None = None,
) -> str:
    """A LocalQueue on a ClusterQueue of its own with this quota by resource; gives the ClusterQueue's name.

    `labels` are those of the nodes that its flavour stands for.
    """
    whole = f"{namespace}-{name}"
    make(
        cluster,
        f"/apis/{KUEUE}/resourceflavors",
        KUEUE,
        "ResourceFlavor",
        whole,
        {"nodeLabels": labels or {}},
        namespace,
    )
    resources = [{"name": resource, "nominalQuota": amount} for resource, amount in quota.items()]
    spec: dict[str, Any] = {
        "namespaceSelector": {},
        "resourceGroups": [
            {"coveredResources": list(quota), "flavors": [{"name": whole, "resources": resources}]}
        ],
    }
    if preemption:
        spec["preemption"] = dict(preemption)
    make(cluster, f"/apis/{KUEUE}/clusterqueues", KUEUE, "ClusterQueue", whole, spec, namespace)
    local = f"/apis/{KUEUE}/namespaces/{namespace}/localqueues"
    make(cluster, local, KUEUE, "LocalQueue", name, {"clusterQueue": whole}, namespace)
    return whole


def make_priority(cluster: Access, namespace: str, value: int) -> str:
    """A priority among the jobs of a queue; gives its name."""
    name = f"{namespace}-{value}"
    made = {"apiVersion": KUEUE, "kind": "WorkloadPriorityClass", "value": value}
    metadata = {"name": name, "labels": {OWNER: namespace}}
    cluster.api.create(f"/apis/{KUEUE}/workloadpriorityclasses", made | {"metadata": metadata})
    return name


def make_user(
    cluster: Access, namespace: str, rules: Sequence[Mapping[str, Any]], folder: Path
) -> Path:
    """A kubeconfig, written into `folder`, of a user who may do in this namespace what the rules say and no more."""
    name = f"user-{secrets.token_hex(4)}"
    rights = "rbac.authorization.k8s.io/v1"
    within = f"/apis/{rights}/namespaces/{namespace}"
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    metadata = {"name": name, "namespace": namespace}
    cluster.api.create(
        accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}
    )
    cluster.api.create(
        f"{within}/roles",
        {"apiVersion": rights, "kind": "Role", "metadata": metadata, "rules": list(rules)},
    )
    binding = {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }
    cluster.api.create(
        f"{within}/rolebindings",
        {"apiVersion": rights, "kind": "RoleBinding", "metadata": metadata, **binding},
    )
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = cluster.api.create(f"{accounts}/{name}/token", request)["status"]["token"]
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    for context in config["contexts"]:
        context["context"]["namespace"] = namespace
    path = folder / f"{name}.conf"
    path.write_text(json.dumps(config))
    return path


def impersonating(cluster: Access, user: str, namespace: str, folder: Path) -> Access:
    """The cluster as this user meets it, whoever that is: the administrator speaks in their name."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    for each in config["users"]:
        each["user"]["as"] = user
    for context in config["contexts"]:
        context["context"]["namespace"] = namespace
    path = folder / f"{user}.conf"
    path.write_text(json.dumps(config))
    return dataclasses.replace(cluster, kubeconfig=path)


def make(
    cluster: Access, path: str, version: str, kind: str, name: str, spec: object, owner: str
) -> None:
    metadata = {"name": name, "labels": {OWNER: owner}}
    cluster.api.create(
        path, {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
    )
