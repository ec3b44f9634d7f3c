"""Reads the run folder of a job whose pods are gone, by a pod of its own that lives for seconds.

It is a JobSet, which whoever submits jobs may create: the job's image, user and security, its one volume that holds the
folder, read-only, no network, no token. It is not counted as the job's, and it is deleted with it at the latest.
"""

from __future__ import annotations

import inspect
import json
import posixpath
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.errors import ApiError, ClusterError, UserError
from jaxlaunch.launcher.jobs.dependents import owner
from jaxlaunch.launcher.jobs.status import hosts, read_run, run_files
from jaxlaunch.launcher.jobs.status.run_files import RunFiles
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, PODS
from jaxlaunch.launcher.kubernetes.labels import (
    MAIN_CONTAINER,
    MANAGED,
    NAME_LABEL,
    READER_OF,
    REPLICATED_JOB,
    RESERVED_DOMAINS,
)
from jaxlaunch.launcher.kubernetes.objects import Obj, pod_template
from jaxlaunch.launcher.manifests.security import RESTRICTED

START_S = 120.0  # until its pod starts
_LONGEST_S = 300  # of its Job
_KEPT_S = 60  # after its end, where nobody was left to delete it
_LOOK_AGAIN_S = 5.0
_RESOURCES = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}  # of 16 MiB of logs
_OF_ANY_NODE = ("kubernetes.io/arch", "kubernetes.io/os")  # an image needs no more of the job's node selector
_OF_THE_GANG = (*RESERVED_DOMAINS, "provreq.kueue.x-k8s.io", "networking.gke.io", "devices.gke.io")
_KEPT = ("imagePullSecrets", "serviceAccountName", "tolerations")


def read(
    cluster: Cluster,
    jobset: Obj,
    *,
    say: Callable[[str], None],
    why: Callable[[str], str],
    ranks: Sequence[int] | None = (),
    pattern: str | None = None,
    tail: int | None = None,
) -> RunFiles:
    """What the run folder holds: its summary, its attempts, and the logs of `ranks`, None for all, as far as asked.

    `why` says what holds up the JobSet of a name. Raises UserError for a job whose run folder is on no volume,
    ClusterError when its pod cannot be created or does not start.
    """
    asked = {"ranks": ranks, "pattern": pattern, "tail": tail, "bytes": run_files.MAX_LOGS}
    made = manifest(jobset, asked)
    name, namespace = made["metadata"]["name"], made["metadata"]["namespace"]
    say(f"a pod of JobSet {name} reads {folder(jobset)}")
    is_done = False
    try:
        try:
            cluster.create(JOBSETS, made)
        except ApiError as error:
            error.hint = error.hint or "reading a volume takes the right to create jobsets and to read pods/log."
            raise
        pod = _started(cluster, namespace, name, why)
        found = run_files.read(cluster.log(namespace, pod, follow=True), jobset["metadata"]["uid"])
        is_done = True
        return found
    finally:
        _remove(cluster, namespace, name, say, in_haste=not is_done)


def folder(jobset: Obj) -> str:
    """The run folder in the job's pods. Raises UserError when it has none on a volume."""
    given = hosts.environment(jobset)
    if url := given.get(contract.RUN_URL):
        hint = f"read it with the bucket's own tools: {url}"
        raise UserError(f"The run folder of {jobset['metadata']['name']} is in a bucket.", hint)
    if not given.get(contract.RUN_DIR):
        hint = "give it checkpoints on a volume: train.checkpoint.path, or checkpoint: in the cluster defaults."
        raise UserError(f"Job {jobset['metadata']['name']} has no run folder on a volume.", hint)
    return given[contract.RUN_DIR]


def manifest(jobset: Obj, asked: dict[str, Any]) -> dict[str, Any]:
    """The JobSet that reads the run folder of `jobset`. Raises UserError for a job that has none on a volume."""
    metadata = jobset["metadata"]
    labels = {**MANAGED, READER_OF: metadata["name"]}
    job = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,
        "activeDeadlineSeconds": _LONGEST_S,
        "template": {"metadata": {"labels": labels, **_annotations(jobset)}, "spec": _pod(jobset, asked)},
    }
    return {
        "apiVersion": JOBSETS.api_version,
        "kind": JOBSETS.kind,
        "metadata": {
            "name": f"read-{metadata['name'][:24].rstrip('-')}-{secrets.token_hex(3)}",
            "namespace": metadata["namespace"],
            "labels": labels,
            "ownerReferences": [owner(jobset)],
        },
        "spec": {
            "network": {"enableDNSHostnames": False},
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": _KEPT_S,
            "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _annotations(jobset: Obj) -> dict[str, Any]:
    """What mounts the volume may need: a bucket's sidecar is asked for by an annotation.

    Others are for the gang alone: Kueue refuses the size of a slice on a JobSet of one pod, and multi-networking would
    keep the pod from other nodes.
    """
    given = pod_template(jobset).get("metadata", {}).get("annotations") or {}
    kept = {key: value for key, value in given.items() if key.partition("/")[0] not in _OF_THE_GANG}
    return {"annotations": kept} if kept else {}


def _pod(jobset: Obj, asked: dict[str, Any]) -> dict[str, Any]:
    where, spec = folder(jobset), pod_template(jobset)["spec"]
    main = hosts.main_container(spec)
    mount = _mount(jobset, where, main)
    security, own = _not_root(main.get("securityContext") or {}, spec.get("securityContext") or {})
    selector = {key: value for key, value in (spec.get("nodeSelector") or {}).items() if key in _OF_ANY_NODE}
    container = {
        "name": MAIN_CONTAINER,
        "image": main["image"],
        "command": [
            main["command"][0],
            "-I",
            "-c",
            inspect.getsource(read_run),
            json.dumps({"folder": where, **asked}),
        ],
        "resources": _RESOURCES,
        "securityContext": security,
        "volumeMounts": [{**mount, "readOnly": True}],
    }
    return {
        **{name: spec[name] for name in _KEPT if name in spec},
        **({"securityContext": own} if own else {}),
        **({"nodeSelector": selector} if selector else {}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [one for one in spec["volumes"] if one["name"] == mount["name"]],
    }


def _not_root(security: Obj, own: Obj) -> tuple[Obj, Obj]:
    """The security of the container and of the pod. To read, no device is needed: the group of a job that is root
    does, which is the user of the others and has a right to the volume."""
    group = own.get("runAsGroup")
    if security.get("runAsUser", own.get("runAsUser")) != 0 or not group:
        return security, own
    return RESTRICTED, {**own, "runAsNonRoot": True, "runAsUser": group}


def _mount(jobset: Obj, where: str, main: Obj) -> Obj:
    """The innermost mount that holds the folder."""
    mounts = [(posixpath.normpath(one["mountPath"]), one) for one in main.get("volumeMounts") or ()]
    found = [(path, one) for path, one in mounts if posixpath.commonpath([path, posixpath.normpath(where)]) == path]
    if not found:
        message = f"The run folder of {jobset['metadata']['name']}, {where}, is on no volume of its pods."
        raise UserError(message, "mount a volume there: volumes: in job.yaml.")
    innermost: Obj = max(found, key=lambda one: len(one[0]))[1]
    return innermost


def _started(cluster: Cluster, namespace: str, name: str, why: Callable[[str], str]) -> str:
    """The name of its pod, once that runs or has ended. Raises ClusterError when it does not start."""
    end, labels = time.monotonic() + START_S, f"{NAME_LABEL}={name}"
    while (left := end - time.monotonic()) > 0:
        for _, pod in cluster.watch(PODS, namespace, labels=labels, limit_s=min(left, _LOOK_AGAIN_S)):
            state = _state(pod)
            if "running" in state or "terminated" in state:
                return str(pod["metadata"]["name"])
    raise ClusterError(f"The pod that reads the volume has not started after {START_S:.0f} s: {why(name)}")


def _state(pod: Obj) -> Obj:
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    found: Obj = next((one.get("state") or {} for one in statuses if one["name"] == MAIN_CONTAINER), {})
    return found


def _remove(cluster: Cluster, namespace: str, name: str, say: Callable[[str], None], *, in_haste: bool) -> None:
    if in_haste:
        cluster.hurry()
    try:
        cluster.delete(JOBSETS, name, namespace)
    except ClusterError as error:
        say(f"JobSet {name} could not be deleted, and is {_KEPT_S} s after its end: {error.message}")
