"""What a test needs in its namespace before the product: storage, a queue, a user with few rights.

Objects outside the namespace carry its name as a label, and are deleted with it.
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
from tests.cluster.waiting import wait_until

OWNER = "jaxlaunch.test/namespace"
SHARED = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
KUEUE = "kueue.x-k8s.io/v1beta2"
# Where objects outside namespaces are, which these functions make.
CLUSTER_SCOPED = (
    "/api/v1/persistentvolumes",
    *(f"/apis/storage.k8s.io/v1/{plural}" for plural in ("storageclasses", "csidrivers")),
    *(
        f"/apis/{KUEUE}/{plural}"
        for plural in ("clusterqueues", "resourceflavors", "workloadpriorityclasses")
    ),
)


def make_namespace(cluster: Access, level: str) -> str:
    """Make a namespace that enforces this Pod Security level and is ready for pods."""
    name = f"test-{secrets.token_hex(4)}"
    labels = {"pod-security.kubernetes.io/enforce": level}
    cluster.api.create(
        "/api/v1/namespaces",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
    )
    # Before its default service account exists, every pod is refused.
    accounts = f"/api/v1/namespaces/{name}/serviceaccounts"
    wait_until(
        lambda: cluster.api.get(accounts),
        lambda seen: seen["items"],
        f"a service account in {name}",
    )
    return name


def remove_namespace(cluster: Access, name: str) -> None:
    """Begin to delete a namespace, its pods at once: their grace period would occupy the node.

    The jobs are deleted first: a Job keeps pods that ended, and with them the namespace.
    """
    inside = f"/api/v1/namespaces/{name}"
    jobs = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{name}/jobsets"
    outside = (
        f"{path}?labelSelector={OWNER.replace('/', '%2F')}%3D{name}" for path in CLUSTER_SCOPED
    )
    cluster.api.delete(jobs, inside, f"{inside}/pods?gracePeriodSeconds=1", *outside)


def make_volume(
    cluster: Access, namespace: str, name: str = "checkpoints", size: str = "1Gi"
) -> Path:
    """Make a ReadWriteMany volume for this claim; return its folder, where any user may write."""
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
    create_object(
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
    """Make a bound ReadWriteMany claim; return its folder, where any user may write."""
    folder = make_volume(cluster, namespace, name, size)
    claim = {
        "volumeName": f"{namespace}-{name}",
        "resources": {"requests": {"storage": size}},
        **SHARED,
    }
    claims = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    create_object(cluster, claims, "v1", "PersistentVolumeClaim", name, claim, namespace)
    wait_until(
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
    """Make a LocalQueue on its own ClusterQueue with this quota; return the ClusterQueue's name.

    `labels` are those of the nodes that its flavor describes.
    """
    whole = f"{namespace}-{name}"
    create_object(
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
    create_object(
        cluster, f"/apis/{KUEUE}/clusterqueues", KUEUE, "ClusterQueue", whole, spec, namespace
    )
    local = f"/apis/{KUEUE}/namespaces/{namespace}/localqueues"
    create_object(cluster, local, KUEUE, "LocalQueue", name, {"clusterQueue": whole}, namespace)
    return whole


def make_priority(cluster: Access, namespace: str, value: int) -> str:
    """Make a priority for the jobs of a queue; return its name."""
    name = f"{namespace}-{value}"
    priority = {"apiVersion": KUEUE, "kind": "WorkloadPriorityClass", "value": value}
    metadata = {"name": name, "labels": {OWNER: namespace}}
    cluster.api.create(f"/apis/{KUEUE}/workloadpriorityclasses", priority | {"metadata": metadata})
    return name


def make_user(
    cluster: Access, namespace: str, rules: Sequence[Mapping[str, Any]], folder: Path
) -> Path:
    """Write the kubeconfig of a user with these rules in the namespace, and return its path."""
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


def impersonate(cluster: Access, user: str, namespace: str, folder: Path) -> Access:
    """Return the access of a user whom the administrator impersonates."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    for entry in config["users"]:
        entry["user"]["as"] = user
    for context in config["contexts"]:
        context["context"]["namespace"] = namespace
    path = folder / f"{user}.conf"
    path.write_text(json.dumps(config))
    return dataclasses.replace(cluster, kubeconfig=path)


def create_object(
    cluster: Access, path: str, version: str, kind: str, name: str, spec: object, owner: str
) -> None:
    metadata = {"name": name, "labels": {OWNER: owner}}
    cluster.api.create(
        path, {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
    )
