"""Objects that a JobSet owns besides its pods: a NetworkPolicy, and ConfigMaps with files.

Jobs with the same files share a ConfigMap, so it has several owners. Its name is a digest of its
contents. Anyone can create a ConfigMap of that name with other contents, so an existing one is
compared with the manifest.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch.launcher.errors import UserError, exceeds_quota
from jaxlaunch.launcher.jobs.status.hosts import is_ours
from jaxlaunch.launcher.kubernetes.client import (
    ApiError,
    Cluster,
    UnreachableError,
    ignore_forbidden,
)
from jaxlaunch.launcher.kubernetes.kinds import (
    CONFIGMAPS,
    JOBSETS,
    NETWORK_POLICIES,
    SECRETS,
    Kind,
    manifest_kind,
)
from jaxlaunch.launcher.kubernetes.labels import JOB_LABEL, MANAGED_BY
from jaxlaunch.launcher.kubernetes.objects import pod_templates

# Errors of the server are retried for this long.
RETRY_TIMEOUT_S = 30.0
RETRY_PAUSE_S = 0.5
# A watch that is started again misses earlier deletions, so the object is read this often.
_WATCH_PERIOD_S = 10.0
# Field managers that are controllers. A creator is looked for among the other managers.
_CONTROLLERS = ("kueue", "jobset", "manager", "kube-controller-manager", "kubelet")

Obj = dict[str, Any]


def get_managed_jobset(cluster: Cluster, name: str, namespace: str) -> Obj:
    """Return the JobSet of that name. Raises UserError if it is missing or not launcher's."""
    jobset = cluster.get(JOBSETS, name, namespace)
    if jobset is None:
        hint = "-n names another namespace."
        with ignore_forbidden():
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
    """Return the creator in an object's metadata, as `: created by kubectl-create at 2026-…`."""
    metadata = obj["metadata"]
    entries = metadata.get("managedFields") or ()
    entries = [entry for entry in entries if not entry.get("subresource")]
    user_entries = [
        entry for entry in entries if entry.get("manager") not in _CONTROLLERS
    ] or entries
    first_entry: Obj = min(user_entries, key=lambda entry: str(entry.get("time", "")), default={})
    manager = first_entry.get("manager") or "an unknown client"
    return f": created by {manager} at {metadata.get('creationTimestamp', 'an unknown time')}"


def owner_reference(jobset: Mapping[str, Any]) -> Obj:
    """Return the owner reference with which Kubernetes deletes an object with its JobSet."""
    metadata = jobset["metadata"]
    kind = {"apiVersion": JOBSETS.api_version, "kind": JOBSETS.kind}
    return {**kind, "name": metadata["name"], "uid": metadata["uid"]}


def add_owner(manifest: Obj, owner: Obj) -> Obj:
    """Return the manifest with an owner reference added to it."""
    return manifest | {"metadata": manifest["metadata"] | {"ownerReferences": [owner]}}


class Dependents:
    """Creates and checks the objects of one job that its JobSet owns."""

    def __init__(self, cluster: Cluster, manifests: Sequence[Obj], namespace: str) -> None:
        self._cluster, self._manifests, self._namespace = cluster, manifests, namespace

    def create_owned(self, manifest: Obj, jobset: Obj, *, has_deleted_earlier: bool) -> None:
        """Create an object, unless it exists and this JobSet owns it.

        If the object is a ConfigMap of other jobs, the JobSet becomes another owner of it. If it is
        left from an earlier JobSet, it is deleted first.

        Args:
            manifest: Object to create.
            jobset: Its owner, as the cluster has it.
            has_deleted_earlier: Whether an earlier JobSet was deleted. The server releases its
                quota a moment later.
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
                may_exist = (
                    isinstance(error, UnreachableError)
                    or error.reason == "AlreadyExists"
                    or error.status >= 500
                    # The server checks the quota before it checks whether the object exists.
                    or exceeds_quota(error)
                )
                if not may_exist or time.monotonic() > deadline:
                    raise
            obj = self._cluster.get(kind, name, self._namespace)
            if obj is None:
                if exceeds_quota(failure) and not has_deleted_earlier:
                    raise failure
                time.sleep(RETRY_PAUSE_S)
                continue
            _check_contents(obj, manifest)
            if owner["uid"] in _owner_uids(obj):
                return
            if kind is CONFIGMAPS:
                self._add_owner(obj, owner)
            else:
                self._check_creator(obj, manifest)
                self._delete_leftover(kind, obj)

    def _delete_leftover(self, kind: Kind, obj: Obj) -> None:
        """Delete an object of an earlier JobSet of the same name, or wait while it is deleted.

        Kubernetes' garbage collector deletes it too, so the permission is not needed.
        """
        metadata = obj["metadata"]
        if "deletionTimestamp" not in metadata:
            try:
                self._cluster.delete(kind, metadata["name"], self._namespace, uid=metadata["uid"])
            except ApiError as error:
                # Conflict: the object of that name is already another one.
                if error.status not in (403, 409):
                    raise
        time.sleep(RETRY_PAUSE_S)

    def _add_owner(self, obj: Obj, owner: Obj) -> None:
        """Add an owner to a shared ConfigMap. The caller reads the result back.

        Only the owner reference is applied, and by a field manager of its own, which disappears
        with the reference. Otherwise the managers of thousands of jobs would in time fill the
        object. With its uid in the patch, no empty ConfigMap is created if this one was deleted.
        """
        metadata = {key: obj["metadata"][key] for key in ("name", "namespace", "uid")}
        kind = {"apiVersion": CONFIGMAPS.api_version, "kind": CONFIGMAPS.kind}
        patch = {**kind, "metadata": metadata | {"ownerReferences": [owner]}}
        try:
            self._cluster.apply(CONFIGMAPS, patch, f"jaxlaunch-{owner['uid']}")
        except ApiError as error:
            if error.status < 500 and error.reason != "Conflict":
                raise
        except UnreachableError as error:
            if not error.was_sent:
                raise

    def check_network_policy(self) -> None:
        """Raise UserError if the NetworkPolicy exists and is not of a job of this name."""
        for manifest in self._manifests:
            if manifest["kind"] == NETWORK_POLICIES.kind:
                self.check_existing(manifest)

    def check_existing(self, manifest: Obj) -> None:
        """Raise UserError if the object exists and this job cannot use or replace it.

        That is a ConfigMap with other contents, or an object that is not of a job of this name. A
        Secret is not read.
        """
        kind, name = manifest_kind(manifest), manifest["metadata"]["name"]
        if kind in (JOBSETS, SECRETS):
            return
        obj = self._cluster.get(kind, name, self._namespace)
        if obj is not None and kind is CONFIGMAPS:
            _check_contents(obj, manifest)
        elif obj is not None:
            self._check_creator(obj, manifest)

    def _check_creator(self, obj: Obj, manifest: Obj) -> None:
        """Raise UserError if launcher did not create the object for a job of the same name."""
        labels = obj["metadata"].get("labels") or {}
        # The object itself may have another name than its job.
        if labels.get(JOB_LABEL) == manifest["metadata"]["labels"][JOB_LABEL]:
            return
        location = f"{manifest['kind']} {manifest['metadata']['name']} in namespace "
        location += self._namespace
        message = f"{location} exists and is not managed by launcher{describe_creator(obj)}."
        hint = "use another name."
        if manifest_kind(manifest) is NETWORK_POLICIES:
            hint = "use another name, or network_policy: false."
        raise UserError(f"{message} It was not changed.", hint)


def _owner_uids(obj: Obj) -> list[str]:
    return [owner["uid"] for owner in obj["metadata"].get("ownerReferences") or ()]


def _check_contents(obj: Obj, manifest: Obj) -> None:
    """Raise UserError if the object is a ConfigMap that does not have this job's files."""
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
    """Return how the ConfigMap differs, as a clause, or None if pods get exactly these files."""

    def read_files(obj: Obj) -> dict[str, bytes]:
        data, binary_data = obj.get("data") or {}, obj.get("binaryData") or {}
        files = {name: value.encode() for name, value in data.items()}
        return files | {name: base64.b64decode(value) for name, value in binary_data.items()}

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
    current = cluster.get(kind, name, namespace)
    while current is not None and current["metadata"]["uid"] == metadata["uid"]:
        if time.monotonic() > deadline:
            return False
        version, fields = current["metadata"]["resourceVersion"], f"metadata.name={name}"
        watch_limit_s = max(0.0, min(_WATCH_PERIOD_S, deadline - time.monotonic()))
        events = cluster.watch(
            kind,
            namespace,
            fields=fields,
            since=version,
            objects=[current],
            limit_s=watch_limit_s,
        )
        is_watched = False
        with ignore_forbidden(), contextlib.closing(events):
            for event, _ in events:
                if event == "DELETED":
                    break
            is_watched = True
        if not is_watched:
            # A user who may delete an object need not be allowed to watch it.
            time.sleep(RETRY_PAUSE_S)
        current = cluster.get(kind, name, namespace)
    return True


def delete_job(cluster: Cluster, jobset: Mapping[str, Any]) -> list[str]:
    """Start to delete a job. Return a line for each object that is deleted or kept.

    The pods receive SIGTERM, save a checkpoint and end. Then Kubernetes' garbage collector deletes
    the other objects that only this JobSet owns.
    """
    metadata = jobset["metadata"]
    lines = [f"{JOBSETS.qualified_name(metadata['name'])} deleted"]
    config_map_names = [
        volume["configMap"]["name"]
        for template in pod_templates(jobset)
        for volume in template["spec"].get("volumes") or ()
        if "configMap" in volume
    ]
    candidates = [
        (NETWORK_POLICIES, metadata["name"]),
        *((CONFIGMAPS, name) for name in dict.fromkeys(config_map_names)),
    ]
    for kind, name in candidates:
        obj = None
        # Only the output needs these objects. Kubernetes deletes them.
        with ignore_forbidden():
            obj = cluster.get(kind, name, metadata["namespace"])
        owners = [] if obj is None else _owner_uids(obj)
        if metadata["uid"] in owners:
            other_owner_count = len(owners) - 1
            outcome = (
                f"kept: {other_owner_count} more of its jobs are here"
                if other_owner_count
                else "deleted"
            )
            lines.append(f"{kind.qualified_name(name)} {outcome}")
    delete_jobset(cluster, jobset)
    return lines


def delete_jobset(cluster: Cluster, jobset: Mapping[str, Any]) -> None:
    """Start to delete this JobSet. It still exists until the objects that it owns are deleted."""
    name, namespace, uid = (jobset["metadata"][key] for key in ("name", "namespace", "uid"))
    cluster.delete(JOBSETS, name, namespace, uid=uid, propagation="Foreground")
