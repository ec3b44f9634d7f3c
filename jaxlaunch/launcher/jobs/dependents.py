"""Objects that a JobSet owns besides its pods: a NetworkPolicy, and shared ConfigMaps.

The name of a ConfigMap is the digest of its contents, but anyone can give that name to other
contents, so these are compared.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch.launcher.errors import UserError, exceeds_quota
from jaxlaunch.launcher.jobs.status.hosts import is_ours
from jaxlaunch.launcher.kubernetes.client import ApiError, Cluster, UnreachableError
from jaxlaunch.launcher.kubernetes.kinds import (
    CONFIGMAPS,
    JOBSETS,
    NETWORK_POLICIES,
    Kind,
    manifest_kind,
)
from jaxlaunch.launcher.kubernetes.labels import MANAGED_BY
from jaxlaunch.launcher.kubernetes.objects import pod_template

# Server errors are retried for this long.
RETRY_TIMEOUT_S = 30.0
RETRY_PAUSE_S = 0.5
# A restarted watch misses deletions in between, so the object is read again this often.
_WATCH_PERIOD_S = 10.0
# Field managers that are controllers and not users. They come before the creator if they apply
# fields.
_CONTROLLERS = ("kueue", "jobset", "manager", "kube-controller-manager", "kubelet")

Obj = dict[str, Any]


def get_managed_jobset(cluster: Cluster, name: str, namespace: str) -> Obj:
    """Return the JobSet of that name for a change. Raises UserError if it is not launcher's."""
    jobset = cluster.get(JOBSETS, name, namespace)
    if jobset is None:
        jobsets = filter(is_ours, cluster.list(JOBSETS, namespace))
        names = ", ".join(other["metadata"]["name"] for other in jobsets)
        hint = f"it has {names or 'no job of launcher; -n names another namespace'}."
        raise UserError(f"Namespace {namespace} has no job {name}.", hint)
    if not is_ours(jobset):
        creator = describe_creator(jobset)
        message = f"JobSet {name} in namespace {namespace} is not managed by launcher{creator}."
        raise UserError(message, "change it with kubectl.")
    return jobset


def describe_creator(obj: Mapping[str, Any]) -> str:
    """Return the creator of an object by its metadata: `: created by kubectl-create at 2026-…`."""
    metadata = obj["metadata"]
    fields = metadata.get("managedFields") or ()
    fields = [entry for entry in fields if not entry.get("subresource")]
    user_fields = [entry for entry in fields if entry.get("manager") not in _CONTROLLERS] or fields
    first: Obj = min(user_fields, key=lambda entry: str(entry.get("time", "")), default={})
    manager = first.get("manager") or "an unknown client"
    return f": created by {manager} at {metadata.get('creationTimestamp', 'an unknown time')}"


def owner_reference(jobset: Mapping[str, Any]) -> Obj:
    """Return the owner reference by which an object is deleted with its JobSet."""
    metadata = jobset["metadata"]
    kind = {"apiVersion": JOBSETS.api_version, "kind": JOBSETS.kind}
    return {**kind, "name": metadata["name"], "uid": metadata["uid"]}


def add_owner(manifest: Obj, owner: Obj) -> Obj:
    """Return the manifest of an object with its owner."""
    return manifest | {"metadata": manifest["metadata"] | {"ownerReferences": [owner]}}


class Dependents:
    """The objects of one job that its JobSet owns."""

    def __init__(self, cluster: Cluster, manifests: Sequence[Obj], namespace: str) -> None:
        self._cluster, self._manifests, self._namespace = cluster, manifests, namespace

    def create_owned(self, manifest: Obj, jobset: Obj, *, has_removed: bool) -> None:
        """Create an object, unless it exists and this JobSet owns it.

        An object that jobs share gets another owner. A leftover of an earlier JobSet is deleted
        first.

        Args:
            manifest: Object to create.
            jobset: Its owner, as the cluster has it.
            has_removed: Whether an earlier JobSet was deleted, whose quota the server releases a
                moment later.
        """
        kind, name = manifest_kind(manifest), manifest["metadata"]["name"]
        owner = owner_reference(jobset)
        owned = add_owner(manifest, owner)
        deadline = time.monotonic() + RETRY_TIMEOUT_S
        while True:
            try:
                self._cluster.create(kind, owned)
                return
            except (ApiError, UnreachableError) as error:
                failure = error
                is_transient = (
                    not isinstance(failure, ApiError)
                    or failure.reason == "AlreadyExists"
                    or failure.status >= 500
                )
                if not (is_transient or exceeds_quota(failure)) or time.monotonic() > deadline:
                    raise
            obj = self._cluster.get(kind, name, self._namespace)
            if obj is None:
                if exceeds_quota(failure) and not has_removed:
                    raise failure
                time.sleep(RETRY_PAUSE_S)
                continue
            _check_contents(obj, manifest)
            if owner["uid"] in _owner_uids(obj):
                return
            if kind is CONFIGMAPS:
                self._add_owner(obj, owner)
            elif is_ours(obj):
                self._cluster.delete(kind, name, self._namespace, uid=obj["metadata"]["uid"])
            else:
                raise self._foreign_object_error(obj)

    def _add_owner(self, shared: Obj, owner: Obj) -> None:
        """Add an owner to a shared object. The caller reads the result back.

        Only the owner reference is applied, so that its field manager disappears with it. Otherwise
        the managers of thousands of jobs would in time fill the object. The uid prevents the
        creation of an empty object if the old one is being deleted.
        """
        metadata = {key: shared["metadata"][key] for key in ("name", "namespace", "uid")}
        kind = {"apiVersion": CONFIGMAPS.api_version, "kind": CONFIGMAPS.kind}
        reference = {**kind, "metadata": metadata | {"ownerReferences": [owner]}}
        try:
            self._cluster.apply(CONFIGMAPS, reference, f"jaxlaunch-{owner['uid']}")
        except ApiError as fault:
            if fault.status < 500 and fault.reason != "Conflict":
                raise
        except UnreachableError as fault:
            if not fault.was_sent:
                raise

    def check_network_policy(self) -> None:
        """Raise UserError if the NetworkPolicy exists and launcher does not manage it."""
        for manifest in self._manifests:
            if manifest["kind"] == NETWORK_POLICIES.kind:
                name = manifest["metadata"]["name"]
                policy = self._cluster.get(NETWORK_POLICIES, name, self._namespace)
                if policy is not None and not is_ours(policy):
                    raise self._foreign_object_error(policy)

    def check_config_map(self, manifest: Obj) -> None:
        """Raise UserError if the ConfigMap exists with other contents."""
        if manifest["kind"] == CONFIGMAPS.kind:
            name = manifest["metadata"]["name"]
            config_map = self._cluster.get(CONFIGMAPS, name, self._namespace)
            if config_map is not None:
                _check_contents(config_map, manifest)

    def _foreign_object_error(self, obj: Obj) -> UserError:
        name = f"{obj.get('kind') or NETWORK_POLICIES.kind} {obj['metadata']['name']}"
        location = f"{name} in namespace {self._namespace}"
        message = f"{location} exists and is not managed by launcher{describe_creator(obj)}."
        hint = "use another name, or network_policy: false."
        return UserError(f"{message} It was not changed.", hint)


def _owner_uids(obj: Obj) -> list[str]:
    return [owner["uid"] for owner in obj["metadata"].get("ownerReferences") or ()]


def _check_contents(obj: Obj, manifest: Obj) -> None:
    """Raise UserError if pods would not get this job's files from the ConfigMap."""
    difference = _find_difference(obj, manifest) if manifest["kind"] == CONFIGMAPS.kind else None
    if difference is None:
        return
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    subject = f"ConfigMap {name} in namespace {namespace} has the name of one that this job creates"
    command = f"`kubectl delete configmap {name} -n {namespace}`"
    raise UserError(
        f"{subject}, but {difference}{describe_creator(obj)}. It was not changed.",
        f"ask its creator, then {command} and submit again, which creates it.",
    )


def _find_difference(config_map: Obj, manifest: Obj) -> str | None:
    """Return the difference as the end of a sentence, or None if pods get exactly these bytes."""

    def read_files(obj: Obj) -> dict[str, bytes]:
        data, packed = obj.get("data") or {}, obj.get("binaryData") or {}
        files = {name: value.encode() for name, value in data.items()}
        return files | {name: base64.b64decode(value) for name, value in packed.items()}

    def describe_content(content: bytes) -> str:
        return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:12]}"

    actual_files, expected_files = read_files(config_map), read_files(manifest)
    for name in sorted(actual_files.keys() | expected_files.keys()):
        if name not in actual_files:
            return f"it lacks {name}"
        if name not in expected_files:
            return f"it holds {name} too"
        if actual_files[name] != expected_files[name]:
            actual, expected = map(describe_content, (actual_files[name], expected_files[name]))
            return f"its {name} is not this job's ({actual} in place of {expected})"
    if not config_map.get("immutable"):
        return (
            "it is not immutable, so that anyone who may write ConfigMaps could exchange the "
            "code of running jobs"
        )
    label = (config_map["metadata"].get("labels") or {}).get(MANAGED_BY)
    if label != manifest["metadata"]["labels"][MANAGED_BY]:
        return f"its label {MANAGED_BY} is {label or 'missing'}, so launcher did not make it"
    return None


# --- deletion -------------------------------------------------------------------------------------


def wait_until_gone(cluster: Cluster, kind: Kind, obj: Obj, limit_s: float) -> bool:
    """Wait until an object that is being deleted is gone. Return False after `limit_s`."""
    metadata = obj["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    deadline = time.monotonic() + limit_s
    latest = cluster.get(kind, name, namespace)
    while latest is not None and latest["metadata"]["uid"] == metadata["uid"]:
        if time.monotonic() > deadline:
            return False
        since, fields = latest["metadata"]["resourceVersion"], f"metadata.name={name}"
        watch_s = max(0.0, min(_WATCH_PERIOD_S, deadline - time.monotonic()))
        for event, _ in cluster.watch(kind, namespace, fields=fields, since=since, limit_s=watch_s):
            if event == "DELETED":
                break
        latest = cluster.get(kind, name, namespace)
    return True


def delete_job(cluster: Cluster, jobset: Mapping[str, Any]) -> list[str]:
    """Start to delete a job. Return a line for each object that is deleted or kept.

    Its pods receive SIGTERM, save and end first. Kubernetes' garbage collector removes what the
    JobSet owns.
    """
    metadata = jobset["metadata"]
    lines = [f"{JOBSETS.qualified_name(metadata['name'])} deleted"]
    volumes = pod_template(jobset)["spec"].get("volumes") or ()
    config_map_names = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    candidates = [
        (NETWORK_POLICIES, metadata["name"]),
        *((CONFIGMAPS, name) for name in config_map_names),
    ]
    for kind, name in candidates:
        obj = cluster.get(kind, name, metadata["namespace"])
        owners = [] if obj is None else _owner_uids(obj)
        if metadata["uid"] in owners:
            other_owner_count = len(owners) - 1
            result = (
                f"kept: {other_owner_count} more of its jobs are here"
                if other_owner_count
                else "deleted"
            )
            lines.append(f"{kind.qualified_name(name)} {result}")
    delete_jobset(cluster, jobset)
    return lines


def delete_jobset(cluster: Cluster, jobset: Mapping[str, Any]) -> None:
    """Start to delete this JobSet, which is gone when all objects that it owns are."""
    name, namespace, uid = (jobset["metadata"][key] for key in ("name", "namespace", "uid"))
    cluster.delete(JOBSETS, name, namespace, uid=uid, propagation="Foreground")
