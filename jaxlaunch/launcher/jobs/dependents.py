"""What a JobSet owns beside its pods: NetworkPolicies of its own, and ConfigMaps that jobs of the same code share.

The name of a ConfigMap is a digest that anyone can give to another, so its contents are compared.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch.launcher.errors import UserError, exceeds_quota
from jaxlaunch.launcher.jobs.ownership import whose
from jaxlaunch.launcher.jobs.status.hosts import is_ours
from jaxlaunch.launcher.kubernetes.client import ApiError, Cluster, Unreachable
from jaxlaunch.launcher.kubernetes.kinds import CONFIGMAPS, JOBSETS, KINDS, NETWORK_POLICIES, Kind
from jaxlaunch.launcher.kubernetes.labels import MANAGED_BY
from jaxlaunch.launcher.kubernetes.objects import pod_template

GIVE_UP_S = 30.0  # on a server that answers with errors
PAUSE_S = 0.5
_LOOK_AGAIN_S = 10.0  # a watch that was restarted misses what was deleted meanwhile
_SHOWN = 12  # hexadecimal digits of a digest

Obj = dict[str, Any]


class Dependents:
    """The objects of one job that its JobSet owns."""

    def __init__(self, cluster: Cluster, manifests: Sequence[Obj], namespace: str) -> None:
        self._cluster, self._manifests, self._namespace = cluster, manifests, namespace

    def attach(self, manifest: Obj, jobset: Obj, *, has_removed: bool) -> None:
        """Create an object, unless it exists and this JobSet owns it.

        What jobs share gets one more owner. What an earlier JobSet left behind is deleted first.

        Args:
            manifest: Object to create.
            jobset: Its owner, as the cluster has it.
            has_removed: Whether an earlier JobSet was deleted, whose quota the server gives back a moment later.
        """
        kind, mine = KINDS[manifest["kind"]], owner(jobset)
        owned = manifest | {"metadata": manifest["metadata"] | {"ownerReferences": [mine]}}
        end = time.monotonic() + GIVE_UP_S
        while True:
            try:
                self._cluster.create(kind, owned)
                return
            except (ApiError, Unreachable) as error:
                fault = error
                may_pass = not isinstance(fault, ApiError) or fault.reason == "AlreadyExists" or fault.status >= 500
                if not (may_pass or exceeds_quota(fault)):
                    raise
                if time.monotonic() > end:
                    raise
            found = self._cluster.get(kind, manifest["metadata"]["name"], self._namespace)
            if found is None:
                if exceeds_quota(fault) and not has_removed:
                    raise fault
                time.sleep(PAUSE_S)
                continue
            _check_contents(found, manifest)
            if any(one["uid"] == mine["uid"] for one in found["metadata"].get("ownerReferences") or ()):
                return
            elif kind is CONFIGMAPS:
                self._join(found, mine)
            elif is_ours(found):
                self._cluster.delete(kind, found["metadata"]["name"], self._namespace, uid=found["metadata"]["uid"])
            else:
                raise self._not_ours(found)

    def _join(self, shared: Obj, mine: Obj) -> None:
        """Adds an owner to what jobs of the same contents share. The caller reads the result back.

        The reference alone is applied, so that its field manager is removed with it: a manager of any other field would
        stay listed, and thousands of jobs would in time fill the object. The uid keeps an object that is being deleted
        from being created again empty.
        """
        known = {name: shared["metadata"][name] for name in ("name", "namespace", "uid")}
        reference = {"metadata": known | {"ownerReferences": [mine]}}
        named = {"apiVersion": CONFIGMAPS.api_version, "kind": CONFIGMAPS.kind}
        try:
            self._cluster.apply(CONFIGMAPS, named | reference, f"jaxlaunch-{mine['uid']}")
        except ApiError as fault:
            if fault.status < 500 and fault.reason != "Conflict":
                raise
        except Unreachable as fault:
            if not fault.sent:
                raise

    def refuse_others_policy(self) -> None:
        """Raises UserError for a NetworkPolicy of this name that launcher does not manage: nothing is written yet."""
        for manifest in self._manifests:
            if manifest["kind"] == NETWORK_POLICIES.kind:
                found = self._cluster.get(NETWORK_POLICIES, manifest["metadata"]["name"], self._namespace)
                if found is not None and not is_ours(found):
                    raise self._not_ours(found)

    def refuse_other_contents(self, manifest: Obj) -> None:
        """Raises UserError for a ConfigMap of this name that holds other files: nothing is written yet."""
        if manifest["kind"] == CONFIGMAPS.kind:
            found = self._cluster.get(CONFIGMAPS, manifest["metadata"]["name"], self._namespace)
            if found is not None:
                _check_contents(found, manifest)

    def _not_ours(self, found: Obj) -> UserError:
        where = (
            f"{found.get('kind') or NETWORK_POLICIES.kind} {found['metadata']['name']} in namespace {self._namespace}"
        )
        hint = "use another name, or network_policy: false."
        return UserError(f"{where} exists and is not managed by launcher{whose(found)}. It was not changed.", hint)


def _check_contents(found: Obj, manifest: Obj) -> None:
    """Raises UserError for a ConfigMap whose pods would not run what this job brings."""
    if manifest["kind"] != CONFIGMAPS.kind or (difference := _difference(found, manifest)) is None:
        return
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    message = f"ConfigMap {name} in namespace {namespace} has the name of one that this job creates, but {difference}"
    hint = f"ask who made it; `kubectl delete configmap {name} -n {namespace}`, then submit again: it is created again."
    raise UserError(f"{message}{whose(found)}. It was not changed.", hint)


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """What is other about it, as the end of a sentence; None where pods get the wanted bytes, now and later."""
    has, wants = _contents(found), _contents(wanted)
    for name in sorted(has.keys() | wants.keys()):
        if name not in has:
            return f"it lacks {name}"
        if name not in wants:
            return f"it holds {name} too"
        if has[name] != wants[name]:
            return f"its {name} is not this job's ({_digest(has[name])} in place of {_digest(wants[name])})"
    if not found.get("immutable"):
        return "it is not immutable, so that anyone who may write ConfigMaps could exchange the code of running jobs"
    label = (found["metadata"].get("labels") or {}).get(MANAGED_BY)
    if label != wanted["metadata"]["labels"][MANAGED_BY]:
        return f"its label {MANAGED_BY} is {label or 'missing'}, so launcher did not make it"
    return None


def _contents(of: Mapping[str, Any]) -> dict[str, bytes]:
    """Name → bytes of every file that a pod would find."""
    text = {name: value.encode() for name, value in (of.get("data") or {}).items()}
    return text | {name: base64.b64decode(value) for name, value in (of.get("binaryData") or {}).items()}


def _digest(content: bytes) -> str:
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:_SHOWN]}"


def owner(jobset: Mapping[str, Any]) -> Obj:
    """The owner reference by which an object is deleted with its JobSet."""
    metadata = jobset["metadata"]
    return {"apiVersion": JOBSETS.api_version, "kind": JOBSETS.kind, "name": metadata["name"], "uid": metadata["uid"]}


def gone(cluster: Cluster, kind: Kind, obj: Obj, limit_s: float) -> bool:
    """Whether an object that is being deleted is gone within `limit_s`."""
    metadata = obj["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    end = time.monotonic() + limit_s
    found = cluster.get(kind, name, namespace)
    while found is not None and found["metadata"]["uid"] == metadata["uid"]:
        if time.monotonic() > end:
            return False
        since, fields = found["metadata"]["resourceVersion"], f"metadata.name={name}"
        slice_s = max(0.0, min(_LOOK_AGAIN_S, end - time.monotonic()))
        for event, _ in cluster.watch(kind, namespace, fields=fields, since=since, limit_s=slice_s):
            if event == "DELETED":
                break
        found = cluster.get(kind, name, namespace)
    return True


def delete_job(cluster: Cluster, jobset: Mapping[str, Any]) -> list[str]:
    """Starts to delete a job. Lines that name what is deleted, and what stays because other jobs use it.

    Its pods save and end first (SIGTERM). What the JobSet owns is removed by Kubernetes' garbage collector.
    """
    metadata = jobset["metadata"]
    lines = [f"{JOBSETS.titled(metadata['name'])} deleted", *_owned(cluster, jobset)]
    cluster.delete(JOBSETS, metadata["name"], metadata["namespace"], uid=metadata["uid"], propagation="Foreground")
    return lines


def _owned(cluster: Cluster, jobset: Mapping[str, Any]) -> list[str]:
    metadata, lines = jobset["metadata"], []
    candidates = [(NETWORK_POLICIES, metadata["name"])]
    for volume in pod_template(jobset)["spec"].get("volumes") or ():
        if "configMap" in volume:
            candidates.append((CONFIGMAPS, volume["configMap"]["name"]))
    for kind, name in candidates:
        found = cluster.get(kind, name, metadata["namespace"])
        owners = [] if found is None else [one["uid"] for one in found["metadata"].get("ownerReferences") or ()]
        if metadata["uid"] in owners:
            kept = f"kept: {len(owners) - 1} more of its jobs are here"
            lines.append(f"{kind.titled(name)} {'deleted' if len(owners) == 1 else kept}")
    return lines
